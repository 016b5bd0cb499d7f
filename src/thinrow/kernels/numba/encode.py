"""Encoding of fixed-width columns: first the smallest block of every stripe is planned, then all are written.

Worked example: two stripes of words ``[7, 7, 7]`` and ``[100, 115, 105]``, 8 bytes each. The plan says a constant of 8
bytes and 24 raw ones (``encode_plan``), so the blocks begin at bytes 0 and 8 of the payload and end at 32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.encode_packed import (
    LANES,
    LANES_FROM,
    divide,
    pack,
    pack_marked,
    packed_bytes,
)
from thinrow.kernels.numba.encode_plan import (
    CONSTANT,
    DECIMAL,
    DELTA,
    DICTIONARY,
    LOCAL,
    MARKED,
    MIXED,
    PACKED,
    POWERS,
    ZERO,
    Room,
    distinct_words,
    from_base,
    from_word,
    integers_of,
    plan_stripe,
    room_for,
    steps_of,
    to_floats,
)
from thinrow.kernels.numba.intrinsics import bit_length
from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]


@njit
def _pieces(restarts: Array, piece: Any, stop: Any) -> Any:
    """The pieces from ``piece`` on that begin before row ``stop``."""
    n = 0
    while piece + n < len(restarts) and restarts[piece + n] < stop:
        n += 1
    return restarts[piece : piece + n]


@njit
def _plan(
    words: Array,
    kind: int,
    stripe_offsets: Array,
    restarts: Array,
    itemsize: int,
    codes: Array,
    n_words: int,
    codec: Array,
    width: Array,
    size: Array,
    base: Array,
    scale: Array,
    at: Room,
) -> None:
    piece, seen = 0, 0
    for s in range(len(codec)):
        start, stop = stripe_offsets[s], stripe_offsets[s + 1]
        if start == stop:
            continue
        seen += 1
        if seen == 256:
            at.seen[:] = 0
            seen = 1
        rows = _pieces(restarts, piece, stop)
        piece += len(rows)
        mine = codes[start:stop] if n_words > 0 else codes[:0]
        stamps = np.uint8(seen), s, len(codec) + s
        codec[s], width[s], size[s], base[s], scale[s] = plan_stripe(
            words[start:stop], rows, start, kind, itemsize, mine, n_words, stamps, at
        )


def plan_blocks(
    words: Array, kind: int, stripe_offsets: Array, restarts: Array, itemsize: int, codes: Array, n_words: int
) -> tuple[Array, Array, Array, Array, Array]:
    """The smallest plain block (codecs 0 to 6, 11 to 13) of each stripe; ties go to the lower codec.

    Args:
        words: (R,) uint64.
        kind: 32 or 64 where words are floats of so many bits, 0 where they are integers.
        stripe_offsets: (S + 1,) int64, rows of each stripe.
        restarts: (P,) int64 ascending rows where a piece begins; every stripe's first row is one.
        itemsize: bytes of a raw value.
        codes: (R,) uint32 codes into the segment dictionary, ``NO_CODE`` where it lacks the word; ignored where
            ``n_words`` is 0.
        n_words: words in the segment dictionary.

    Returns:
        codec (S,) uint8, width (S,) uint8, size (S,) int64 bytes, base and scale (S,) uint64.
    """
    n = len(stripe_offsets) - 1
    codec, width, size = np.zeros(n, np.uint8), np.zeros(n, np.uint8), np.zeros(n, np.int64)
    base, scale = np.zeros(n, np.uint64), np.ones(n, np.uint64)
    plan = (codec, width, size, base, scale)
    _plan(words, kind, stripe_offsets, restarts, itemsize, codes, n_words, *plan, room_for(stripe_offsets))
    return plan


@njit
def _delta_header(words: Array, rows: Array, start: Any, out: Array) -> int:
    """Restarts of codec 3 into ``out`` (uint64, zeros), from its third word on; returns the words before q. ``words``
    begin with row ``start``."""
    n = len(rows)
    out[2] = np.uint64(n)
    values = 3 + (n + 1) // 2
    for i in range(n):
        row = rows[i] - start
        out[3 + i // 2] |= np.uint64(row) << np.uint64(32 * (i & 1))
        out[values + i] = words[row]
    return values + n


@njit
def _sort(words: Array) -> None:
    """Ascending, by insertion."""
    for i in range(1, len(words)):
        word = words[i]
        j = i
        while j > 0 and words[j - 1] > word:
            words[j] = words[j - 1]
            j -= 1
        words[j] = word


@njit
def _ranks(words: Array, table: Array, q: Array) -> None:
    """Position in the ascending ``table`` of each word; all of them are there."""
    for r in range(len(q)):
        low, high = 0, len(table) - 1
        while low < high:
            middle = (low + high) >> 1
            if table[middle] < words[r]:
                low = middle + 1
            else:
                high = middle
        q[r] = low


@njit
def _write_mixed(words: Array, codes: Array, hot: Any, base: Any, stamp: int, out: Array, q: Array, at: Room) -> int:
    """Head and own words of a block of codec 12 into ``out``, codes into ``q``; the words before the packed codes."""
    mask = np.uint64(len(at.slot_word) - 1)
    n, reach = 0, np.uint64(0)
    for r in range(len(words)):
        word = words[r]
        reach = max(reach, word - base)
        if hot > 0 and codes[r] < hot:
            continue
        slot = ((word * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask
        while at.slot_stamp[slot] == stamp and at.slot_word[slot] != word:
            slot = (slot + np.uint64(1)) & mask
        if at.slot_stamp[slot] != stamp:
            at.slot_stamp[slot], at.slot_word[slot] = stamp, word
            at.found[n] = word - base
            n += 1
    table = at.found[:n]
    _sort(table)
    from_word(words, base, q)
    _ranks(q, table, q)
    for r in range(len(words)):
        q[r] = codes[r] if hot > 0 and codes[r] < hot else q[r] + np.uint64(hot)
    width = bit_length(reach)
    out[0], out[1] = np.uint64(hot) | np.uint64(n) << np.uint64(32), base
    out[2] = width | LANES if n >= LANES_FROM else width
    pack(table, np.int64(out[2]), out[3:], at.room, at.counts)
    return 3 + packed_bytes(n, width) // 8


@njit
def _write_local(words: Array, stamp: int, out: Array, q: Array, at: Room) -> int:
    """Own words of a block of codec 5 into ``out``, codes into ``q``; the words before the packed codes."""
    n = distinct_words(words, 1 << 62, stamp, at)
    table = out[1 : 1 + n]
    for i in range(n):
        table[i] = at.found[i]
    _sort(table)
    _ranks(words, table, q)
    out[0] = n
    return 1 + n


@njit
def _write_delta(words: Array, rows: Array, start: Any, base: Any, scale: Any, out: Array, q: Array) -> int:
    """Head of a block of codec 3 into ``out``, steps into ``q``; the words before the packed steps."""
    steps_of(words, rows, start, q)
    from_base(rows, start, base, q)
    divide(q, scale)
    out[0], out[1] = base, scale
    return _delta_header(words, rows, start, out)


@njit
def _write_decimal(words: Array, base: Any, scale: Any, out: Array, q: Array, at: Room) -> int:
    """Head of a block of codec 11 into ``out``, integers into ``q``; the words before the packed integers."""
    kind: Any = np.int64(scale >> np.uint64(8))
    floats = to_floats(words, kind, at)
    integers_of(floats, POWERS[scale & np.uint64(0xFF)], q.view(np.int64))
    for r in range(len(q)):
        q[r] -= base
    out[0], out[1] = base, scale
    return 2


@njit
def _write(
    words: Array,
    stripe_offsets: Array,
    restarts: Array,
    codes: Array,
    codec: Array,
    width: Array,
    base: Array,
    scale: Array,
    offsets: Array,
    blocks: Array,
    at: Room,
) -> None:
    piece = 0
    for s in range(len(codec)):
        start, stop = stripe_offsets[s], stripe_offsets[s + 1]
        out, mine, q = blocks[offsets[s] // 8 : offsets[s + 1] // 8], words[start:stop], at.q[: stop - start]
        kind: Any = np.int64(codec[s])
        packed = 0
        if kind == ZERO:
            continue
        if kind == CONSTANT:
            out[0] = base[s]
            continue
        if kind == DICTIONARY:
            known = codes[start:stop]
            for r in range(len(q)):
                q[r] = known[r]
        elif kind == MIXED:
            hot = np.int64(scale[s])
            packed = _write_mixed(mine, codes[start:stop] if hot > 0 else codes[:0], hot, base[s], s, out, q, at)
        elif kind == MARKED:
            packed, q = pack_marked(mine, codes[start:stop], base[s], out, at.q, at.room, at.counts)
        elif kind == DECIMAL:
            packed = _write_decimal(mine, base[s], scale[s], out, q, at)
        elif kind == LOCAL:
            packed = _write_local(mine, s, out, q, at)
        elif kind == DELTA:
            while restarts[piece] < start:
                piece += 1
            packed = _write_delta(mine, _pieces(restarts, piece, stop), start, base[s], scale[s], out, q)
        elif kind == PACKED:
            from_word(mine, base[s], q)
            divide(q, scale[s])
            out[0], out[1], packed = base[s], scale[s], 2
        else:
            for r in range(len(q)):
                q[r] = mine[r]
        pack(q, np.int64(width[s]), out[packed:], at.room, at.counts)


def write_blocks(
    words: Array,
    kind: int,
    stripe_offsets: Array,
    restarts: Array,
    itemsize: int,
    codes: Array,
    n_words: int,
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
    plan = (codec, width, base, scale, offsets, payload.view(np.uint64))
    _write(words, stripe_offsets, restarts, codes, *plan, room_for(stripe_offsets))
