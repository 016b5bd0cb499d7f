"""Encoding of fixed-width columns: first the smallest block of every stripe is planned, then all are written.

Worked example: one stripe of words ``[100, 115, 105]`` in one piece, 8 bytes each. Raw takes 24 bytes, bit-packing
``base 100, scale 5, q = [0, 3, 1]`` 32, delta more: the plan says raw. With 60 such words bit-packing (40) wins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

ZERO, CONSTANT, PACKED, DELTA, DICTIONARY, LOCAL, RAW = 0, 1, 2, 3, 4, 5, 6

#: Most words of a local dictionary: they are sorted by insertion.
MAX_LOCAL = 4096


@njit
def _bits(value: Any) -> int:
    """Bits that ``value`` (uint64) needs; 0 for 0."""
    n = 0
    while value:
        value >>= np.uint64(1)
        n += 1
    return n


@njit
def _packed_bytes(n: int, width: int) -> int:
    return ((n * width + 63) // 64 + 1) * 8


@njit
def _gcd(a: Any, b: Any) -> Any:
    while b:
        a, b = b, a % b
    return a


@njit
def _plan_affine(words: Array, start: int, stop: int) -> Any:
    """(base, scale, width) of ``base + q * scale``: base is the least word, read as signed."""
    low = np.int64(words[start])
    high = low
    for r in range(start, stop):
        value = np.int64(words[r])
        low, high = min(low, value), max(high, value)
    base = np.uint64(low)
    reach = np.uint64(high) - base
    scale = reach
    for r in range(start, stop):
        if scale == np.uint64(1):
            break
        scale = _gcd(words[r] - base, scale)
    if reach == np.uint64(0):
        return base, np.uint64(1), 0
    return base, scale, _bits(reach // scale)


@njit
def _plan_delta(words: Array, start: int, stop: int, restarts: Array, at: int) -> Any:
    """(min_delta, scale, width, number of restarts); ``restarts[at]`` is ``start``."""
    low, high = np.int64(0), np.int64(0)
    k = at
    seen = False
    for r in range(start, stop):
        if k < len(restarts) and restarts[k] == r:
            k += 1
            continue
        step = np.int64(words[r] - words[r - 1])
        if not seen:
            low, high, seen = step, step, True
        low, high = min(low, step), max(high, step)
    n_restarts = k - at
    base = np.uint64(low)
    reach = np.uint64(high) - base
    if reach == np.uint64(0):
        return base, np.uint64(1), 0, n_restarts
    scale = reach
    k = at
    for r in range(start, stop):
        if scale == np.uint64(1):
            break
        if k < len(restarts) and restarts[k] == r:
            k += 1
            continue
        scale = _gcd(words[r] - words[r - 1] - base, scale)
    return base, scale, _bits(reach // scale), n_restarts


@njit
def _distinct(
    words: Array, start: int, stop: int, best: int, stamp: int, slot_stamp: Array, slot_word: Array, found: Array
) -> int:
    """Number of distinct words, put into ``found``; -1 once a local dictionary cannot be below ``best`` bytes."""
    mask = np.uint64(len(slot_word) - 1)
    n = 0
    for r in range(start, stop):
        word = words[r]
        slot = ((word * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask
        while slot_stamp[slot] == stamp and slot_word[slot] != word:
            slot = (slot + np.uint64(1)) & mask
        if slot_stamp[slot] != stamp:
            if n == MAX_LOCAL or _local_bytes(stop - start, n + 1) >= best:
                return -1
            slot_stamp[slot] = stamp
            slot_word[slot] = word
            found[n] = word
            n += 1
    return n


@njit
def _local_bytes(n: int, distinct: int) -> int:
    return 8 + 8 * distinct + _packed_bytes(n, _bits(np.uint64(distinct - 1)))


@njit
def _slots(stripe_offsets: Array) -> int:
    """A power of two at least twice the rows of the largest stripe."""
    rows = 1
    for s in range(len(stripe_offsets) - 1):
        rows = max(rows, stripe_offsets[s + 1] - stripe_offsets[s])
    return 2 << _bits(np.uint64(rows))


@njit
def plan_blocks(
    words: Array, stripe_offsets: Array, restarts: Array, itemsize: int, codes: Array, has_codes: bool
) -> tuple[Array, Array, Array, Array, Array]:
    """The smallest block of each stripe; ties go to the lower codec.

    Args:
        words: (R,) uint64.
        stripe_offsets: (S + 1,) int64, rows of each stripe.
        restarts: (P,) int64 ascending rows where a piece begins; every stripe's first row is one.
        itemsize: bytes of a raw value.
        codes: (R,) uint32 codes into the segment dictionary; ignored unless ``has_codes``.

    Returns:
        codec (S,) uint8, width (S,) uint8, size (S,) int64 bytes, base and scale (S,) uint64.
    """
    n_stripes = len(stripe_offsets) - 1
    codec, width = np.zeros(n_stripes, np.uint8), np.zeros(n_stripes, np.uint8)
    size = np.zeros(n_stripes, np.int64)
    base, scale = np.zeros(n_stripes, np.uint64), np.ones(n_stripes, np.uint64)
    n_slots = _slots(stripe_offsets)
    slot_stamp, slot_word = np.full(n_slots, -1, np.int64), np.zeros(n_slots, np.uint64)
    found = np.zeros(MAX_LOCAL, np.uint64)
    piece = 0
    for s in range(n_stripes):
        start, stop = stripe_offsets[s], stripe_offsets[s + 1]
        n = stop - start
        if n == 0:
            continue
        a, b, w = _plan_affine(words, start, stop)
        d, e, v, n_restarts = _plan_delta(words, start, stop, restarts, piece)
        piece += n_restarts
        base[s], scale[s], width[s] = a, b, w
        if w == 0:
            codec[s], size[s] = (ZERO, 0) if a == np.uint64(0) else (CONSTANT, 8)
            continue
        codec[s], size[s] = PACKED, 16 + _packed_bytes(n, w)
        other = 24 + (n_restarts * 4 + 7) // 8 * 8 + n_restarts * 8 + _packed_bytes(n, v)
        if other < size[s]:
            codec[s], size[s], base[s], scale[s], width[s] = DELTA, other, d, e, v
        if has_codes:
            largest = np.uint64(0)
            for r in range(start, stop):
                largest = max(largest, np.uint64(codes[r]))
            other = _packed_bytes(n, _bits(largest))
            if other < size[s]:
                codec[s], size[s], width[s] = DICTIONARY, other, _bits(largest)
        raw = (n * itemsize + 7) // 8 * 8
        # A local dictionary as large as raw would win the tie by its lower id.
        distinct = _distinct(words, start, stop, min(size[s], raw + 1), s, slot_stamp, slot_word, found)
        if distinct >= 0:
            codec[s], size[s], width[s] = LOCAL, _local_bytes(n, distinct), _bits(np.uint64(distinct - 1))
        if raw < size[s]:
            codec[s], size[s], width[s] = RAW, raw, itemsize * 8
    return codec, width, size, base, scale


@njit
def _put(out: Array, bit: int, value: Any, width: int) -> None:
    """Or ``value`` (below 2^width) into the bit string ``out`` (uint64) at ``bit``."""
    at, shift = bit >> 6, bit & 63
    out[at] |= value << np.uint64(shift)
    if shift + width > 64:
        out[at + 1] |= value >> np.uint64(64 - shift)


@njit
def _write_delta(
    words: Array, start: int, stop: int, restarts: Array, at: int, base: Any, scale: Any, width: int, out: Array
) -> None:
    """Codec 3 into ``out`` (uint64, zeros)."""
    k = at
    while k < len(restarts) and restarts[k] < stop:
        k += 1
    n = k - at
    out[0], out[1], out[2] = base, scale, np.uint64(n)
    values = 3 + (n + 1) // 2
    for i in range(n):
        row = restarts[at + i]
        out[3 + i // 2] |= np.uint64(row - start) << np.uint64(32 * (i & 1))
        out[values + i] = words[row]
    packed = out[values + n :]
    k = at
    for r in range(start, stop):
        if k < at + n and restarts[k] == r:
            k += 1
        elif width > 0:
            _put(packed, (r - start) * width, (words[r] - words[r - 1] - base) // scale, width)


@njit
def _write_local(words: Array, start: int, stop: int, width: int, found: Array, n: int, out: Array) -> None:
    """Codec 5 into ``out`` (uint64, zeros); sorts ``found[:n]``."""
    for i in range(1, n):
        word = found[i]
        j = i
        while j > 0 and found[j - 1] > word:
            found[j] = found[j - 1]
            j -= 1
        found[j] = word
    out[0] = np.uint64(n)
    out[1 : 1 + n] = found[:n]
    packed = out[1 + n :]
    for r in range(start, stop):
        low, high = 0, n - 1
        while low < high:
            middle = (low + high) >> 1
            if found[middle] < words[r]:
                low = middle + 1
            else:
                high = middle
        _put(packed, (r - start) * width, np.uint64(low), width)


@njit
def _write_raw(words: Array, start: int, stop: int, itemsize: int, out: Array) -> None:
    """Codec 6 into ``out`` (uint64, zeros)."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - itemsize * 8)
    for r in range(start, stop):
        _put(out, (r - start) * itemsize * 8, words[r] & mask, itemsize * 8)


@njit
def write_blocks(
    words: Array,
    stripe_offsets: Array,
    restarts: Array,
    itemsize: int,
    codes: Array,
    codec: Array,
    width: Array,
    base: Array,
    scale: Array,
    offsets: Array,
    payload: Array,
) -> None:
    """Write the planned blocks of all stripes one after another.

    Args: those of ``plan_blocks`` and what it returned; ``offsets`` (S + 1,) int64 of the blocks in ``payload``
    (uint8 zeros, ``offsets[-1]`` of them).
    """
    blocks = payload.view(np.uint64)
    n_slots = _slots(stripe_offsets)
    slot_stamp, slot_word = np.full(n_slots, -1, np.int64), np.zeros(n_slots, np.uint64)
    found = np.zeros(MAX_LOCAL, np.uint64)
    piece = 0
    for s in range(len(stripe_offsets) - 1):
        start, stop = stripe_offsets[s], stripe_offsets[s + 1]
        out = blocks[offsets[s] // 8 : offsets[s + 1] // 8]
        kind = codec[s]
        w: Any = np.int64(width[s])
        if kind == CONSTANT:
            out[0] = base[s]
        elif kind == PACKED:
            out[0], out[1] = base[s], scale[s]
            packed = out[2:]
            for r in range(start, stop):
                _put(packed, (r - start) * w, (words[r] - base[s]) // scale[s], w)
        elif kind == DELTA:
            while restarts[piece] < start:
                piece += 1
            _write_delta(words, start, stop, restarts, piece, base[s], scale[s], w, out)
        elif kind == DICTIONARY:
            for r in range(start, stop):
                _put(out, (r - start) * w, np.uint64(codes[r]), w)
        elif kind == LOCAL:
            n = _distinct(words, start, stop, 1 << 62, s, slot_stamp, slot_word, found)
            _write_local(words, start, stop, w, found, n, out)
        elif kind == RAW:
            _write_raw(words, start, stop, itemsize, out)
