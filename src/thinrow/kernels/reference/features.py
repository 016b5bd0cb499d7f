"""Feature kernels in NumPy: the oracle that other backends must equal bit for bit.

The hash is named ``thinrow_mix64_v1``: 64 bits from chained ``mix64`` (the finaliser of splitmix64), each kind of value
from a start of its own, so that 5, "5" and the tuple (5,) differ. All arithmetic is modulo 2^64::

    integer v     mix64(start(INT) ^ v)                       v sign-extended to 64 bits
    bytes b       h = start(BYTES); h = mix64(h ^ w) for each 8-byte little-endian word w of b, the last one
                  padded with zeros; then mix64(h ^ len(b))   strings are hashed by their UTF-8 bytes
    tuple t       h = start(TUPLE); h = mix64(h ^ e) for the hash e of each element
    start(KIND)   mix64(seed + KIND)
"""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from thinrow.core.units import DAY_MS
from thinrow.core.wrap import mix64_words
from thinrow.kernels.chain import BYTES, INT, TUPLE, hash_start

U64Array = npt.NDArray[np.uint64]
I64Array = npt.NDArray[np.int64]


def mix64(z: U64Array) -> U64Array:
    """The splitmix64 finaliser, a bijection of 64-bit words: (n,) uint64 -> (n,) uint64."""
    return mix64_words(z)


def _start(seed: int, kind: int) -> U64Array:
    return np.array([hash_start(seed, kind)], np.uint64)


def hash_ints(values: I64Array, seed: int) -> I64Array:
    """(n,) int64 hash of each integer (the 64 bits, read as signed). ``seed`` is in [0, 2^63)."""
    return mix64(_start(seed, INT) ^ values.view(np.uint64)).view(np.int64)


def hash_parts(values: I64Array, bounds: I64Array, seeds: list[int]) -> I64Array:
    """``hash_ints`` of ``values[bounds[k]:bounds[k + 1]]`` under the seed k, for every k, side by side."""
    parts = (hash_ints(values[a:b], seed) for (a, b), seed in zip(pairwise(bounds), seeds, strict=True))
    return np.concatenate([np.empty(0, np.int64), *parts])


def hash_bytes(offsets: I64Array, data: npt.NDArray[np.uint8], seed: int) -> I64Array:
    """(n,) int64 hash of each byte string ``data[offsets[i]:offsets[i + 1]]``."""
    out = np.empty(len(offsets) - 1, np.int64)
    start = _start(seed, BYTES)
    for i in range(len(out)):
        raw = data[offsets[i] : offsets[i + 1]].tobytes()
        h = start
        for word in np.frombuffer(raw.ljust(-(-len(raw) // 8) * 8, b"\0"), "<u8"):
            h = mix64(h ^ word)
        out[i] = mix64(h ^ np.uint64(len(raw))).view(np.int64)[0]
    return out


def hash_words(offsets: I64Array, data: npt.NDArray[np.uint8], seed: int) -> tuple[I64Array, I64Array]:
    """The words of each byte string: (n + 1,) offsets and the ``hash_bytes`` of each word. A word is a run of ASCII
    letters and digits and bytes above 127, letters of ASCII in lower case."""
    texts = [data[a:b].tobytes() for a, b in pairwise(offsets.tolist())]
    words = [re.findall(rb"[0-9a-z\x80-\xff]+", text.lower()) for text in texts]
    flat = [word for found in words for word in found]
    bounds = np.cumsum([0, *(len(word) for word in flat)], dtype=np.int64)
    lists = np.cumsum([0, *(len(found) for found in words)], dtype=np.int64)
    return lists, hash_bytes(bounds, np.frombuffer(b"".join(flat), np.uint8), seed)


def hash_tuples(elements: npt.NDArray[np.int64], seed: int) -> I64Array:
    """(n,) int64 hash of n tuples; ``elements`` is (k, n), the hashes of their elements."""
    h = np.repeat(_start(seed, TUPLE), elements.shape[1])
    for row in elements:
        h = mix64(h ^ row.view(np.uint64))
    return h.view(np.int64)


def mod_unsigned(values: I64Array, divisor: int) -> I64Array:
    """(n,) int64 remainders in [0, divisor) of the values read as *unsigned* 64-bit words; 1 <= divisor < 2^63."""
    return (values.view(np.uint64) % np.uint64(divisor)).astype(np.int64)


def history_candidate_cross(
    start: I64Array,
    stop: I64Array,
    bound: I64Array,
    exact: npt.NDArray[np.bool_],
    arrival: I64Array,
    hidden_from: I64Array,
    event_ts: I64Array,
    keys: I64Array,
    keys_valid: npt.NDArray[np.bool_],
    request_ts: I64Array,
    offsets: I64Array,
    wanted: I64Array,
    wanted_valid: npt.NDArray[np.bool_],
    count: npt.NDArray[np.int32],
    days: npt.NDArray[np.int32],
) -> None:
    """For each candidate of each example: how many visible events have its key, and whole days since the newest.

    Args:
        start, stop: (X,) window of each example in the events, half-open.
        bound: (X,) highest visible arrival (inclusive).
        exact: (X,) whether the whole window is visible.
        arrival, hidden_from, event_ts, keys: (E,) of the events.
        keys_valid: (E,), or (0,) where no key is null.
        request_ts: (X,) ms.
        offsets: (X + 1,) candidates of each example.
        wanted: (C,) key of each candidate.
        wanted_valid: (C,), or (0,) where none is null.
        count: (C,) out.
        days: (C,) out, -1 where there is no such event; (0,) to leave it out.
    """
    for x in range(len(start)):
        window = slice(start[x], stop[x])
        seen = np.ones(stop[x] - start[x], np.bool_)
        if not exact[x]:
            seen = (arrival[window] <= bound[x]) & (hidden_from[window] > bound[x])
        if len(keys_valid):
            seen &= keys_valid[window]
        held, times = keys[window][seen], event_ts[window][seen]
        for c in range(offsets[x], offsets[x + 1]):
            hit = (held == wanted[c]) & bool(not len(wanted_valid) or wanted_valid[c])
            count[c] = hit.sum()
            if len(days):
                days[c] = (request_ts[x] - times[hit].max()) // DAY_MS if hit.any() else -1
