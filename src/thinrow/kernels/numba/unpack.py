"""Packed values (docs/format/archive-v2.md, 4): in lanes or in a bit string, all of a range or one.

Worked example: values 5, 6, 7 of 3 bits are the bit string ``0b111110101`` in one word, and
``one(words, 0, 3, False, 1)`` is 6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.intrinsics import load64, store8, store16, store32, store64
from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

#: Widest value that one unaligned 8-byte load always holds: 57 bits and a shift of up to 7.
MAX_ONE_LOAD = 57
#: Flag of a block's width: its packed values lie in lanes.
LANES = 0x80
MAX_ROWS = 1 << 31
#: Most words that stand in a block of codec 12.
MAX_LOCAL = 4096
#: Values that go through a scratch array at once, which has room for 8 more.
CHUNK = 512


@njit
def in_bounds(
    source_size: Array,
    source: Array,
    block_off: Array,
    block_len: Array,
    width: Array,
    b: int,
    rows: int,
    row: int,
    stop: int,
) -> bool:
    """Whether block ``b`` lies in its buffer and [row, stop) in its rows."""
    if b < 0 or b >= len(source):
        return False
    where, begin, length = source[b], block_off[b], block_len[b]
    if where < 0 or where >= len(source_size):
        return False
    limit = source_size[where]
    if begin < 0 or begin > limit or (begin & 7) != 0 or length < 0 or length > limit - begin or (length & 7) != 0:
        return False
    return bool(
        rows >= 0 and rows <= MAX_ROWS and row >= 0 and row <= stop and stop <= rows and (width[b] & (LANES - 1)) <= 64
    )


@njit
def packed_bytes(n: Any, width: Any, lanes: Any) -> Any:
    if lanes:
        return ((n + 7) // 8 * width + 63) // 64 * 64
    return ((n * width + 63) // 64 + 1) * 8


@njit
def add_lanes(
    words: Array,
    packed: int,
    width: int,
    base: Any,
    scale: Any,
    group: int,
    last: int,
    out: Array,
    at: int,
    itemsize: int,
) -> None:
    """``base + q * scale`` of the groups of eight [group, last), as items from byte ``at`` of ``out`` (uint8) on.

    ``packed`` is the word where the lanes begin; width is 1 or more.
    """
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    end = len(words) - 8
    bit = group * width
    step = 8 * itemsize
    if itemsize == 8:
        for _ in range(group, last):
            row = packed + (bit >> 6) * 8
            store64(words, row, min(row + 8, end), np.uint64(bit & 63), mask, base, scale, out, at)
            bit, at = bit + width, at + step
    elif itemsize == 4:
        for _ in range(group, last):
            row = packed + (bit >> 6) * 8
            store32(words, row, min(row + 8, end), np.uint64(bit & 63), mask, base, scale, out, at)
            bit, at = bit + width, at + step
    elif itemsize == 2:
        for _ in range(group, last):
            row = packed + (bit >> 6) * 8
            store16(words, row, min(row + 8, end), np.uint64(bit & 63), mask, base, scale, out, at)
            bit, at = bit + width, at + step
    else:
        for _ in range(group, last):
            row = packed + (bit >> 6) * 8
            store8(words, row, min(row + 8, end), np.uint64(bit & 63), mask, base, scale, out, at)
            bit, at = bit + width, at + step


@njit
def unpack(buffer: Array, words: Array, packed: Any, width: Any, lanes: Any, first: Any, n: Any, out: Array) -> Array:
    """As ``scaled`` with base 0 and scale 1."""
    return scaled(buffer, words, packed, width, lanes, np.uint64(0), np.uint64(1), first, n, out)


@njit
def scaled(
    buffer: Array,
    words: Array,
    packed: Any,
    width: Any,
    lanes: Any,
    base: Any,
    scale: Any,
    first: Any,
    n: Any,
    out: Array,
) -> Array:
    """``base + q * scale`` of the packed values ``[first, first + n)``, as (n,) uint64 within ``out``.

    They begin at word ``packed`` of the block, which is ``buffer`` and ``words``; ``out`` has room for 8 more than n.
    """
    if width == 0:
        out[:n] = base
        return out[:n]
    if lanes:
        last = (first + n + 7) >> 3
        add_lanes(words, packed, width, base, scale, first >> 3, last, out.view(np.uint8), 0, 8)
        return out[first & 7 : (first & 7) + n]
    unpack_string(buffer, words, packed, width, first, n, out)
    for i in range(n):
        out[i] = base + out[i] * scale
    return out[:n]


@njit
def affine(
    buffer: Array,
    words: Array,
    packed: int,
    width: int,
    lanes: Any,
    base: Any,
    scale: Any,
    row: int,
    stop: int,
    out: Array,
    at: int,
    itemsize: int,
    scratch: Array,
) -> None:
    """``base + q * scale`` of the packed values [row, stop), cut to items of ``itemsize`` bytes, at item ``at`` of
    ``out`` (uint8); arguments as of ``scaled``."""
    while row < stop:
        # Whole groups of eight go straight to the output.
        if lanes and width > 0 and (row & 7) == 0 and stop - row >= 8:
            last = stop >> 3
            add_lanes(words, packed, width, base, scale, row >> 3, last, out, at * itemsize, itemsize)
            at += (last << 3) - row
            row = last << 3
            continue
        n = min(8 - (row & 7) if lanes else CHUNK, stop - row)
        found = scaled(buffer, words, packed, width, lanes, base, scale, row, n, scratch)
        store(found, n, out, at, itemsize)
        row, at = row + n, at + n


@njit
def unpack_string(buffer: Array, words: Array, packed: int, width: int, first: int, n: int, out: Array) -> None:
    """As ``unpack``, of values one after another in a bit string."""
    if width == 0:
        out[:n] = 0
        return
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    bit = first * width
    if width > MAX_ONE_LOAD:
        for i in range(n):
            at = packed + (bit >> 6)
            shift = np.uint64(bit & 63)
            # Two shifts, because a shift by 64 is undefined.
            high = (words[at + 1] << np.uint64(1)) << (np.uint64(63) - shift)
            out[i] = ((words[at] >> shift) | high) & mask
            bit += width
        return
    at = packed * 8 + (bit >> 3)
    b0 = bit & 7
    whole = n - n % 8
    # Eight values take `width` bytes, so their byte offsets and shifts repeat: they leave the loop.
    b1, b2, b3, b4 = b0 + width, b0 + 2 * width, b0 + 3 * width, b0 + 4 * width
    b5, b6, b7 = b0 + 5 * width, b0 + 6 * width, b0 + 7 * width
    o1, o2, o3, o4, o5, o6, o7 = b1 >> 3, b2 >> 3, b3 >> 3, b4 >> 3, b5 >> 3, b6 >> 3, b7 >> 3
    s0, s1, s2, s3 = np.uint64(b0), np.uint64(b1 & 7), np.uint64(b2 & 7), np.uint64(b3 & 7)
    s4, s5, s6, s7 = np.uint64(b4 & 7), np.uint64(b5 & 7), np.uint64(b6 & 7), np.uint64(b7 & 7)
    for i in range(0, whole, 8):
        out[i] = (load64(buffer, at) >> s0) & mask
        out[i + 1] = (load64(buffer, at + o1) >> s1) & mask
        out[i + 2] = (load64(buffer, at + o2) >> s2) & mask
        out[i + 3] = (load64(buffer, at + o3) >> s3) & mask
        out[i + 4] = (load64(buffer, at + o4) >> s4) & mask
        out[i + 5] = (load64(buffer, at + o5) >> s5) & mask
        out[i + 6] = (load64(buffer, at + o6) >> s6) & mask
        out[i + 7] = (load64(buffer, at + o7) >> s7) & mask
        at += width
    for i in range(whole, n):
        out[i] = (load64(buffer, at + (b0 >> 3)) >> np.uint64(b0 & 7)) & mask
        b0 += width


@njit
def store(words: Array, n: int, out: Array, at: int, itemsize: int) -> None:
    """Cut ``words[:n]`` to items of ``itemsize`` bytes, at item ``at`` of ``out`` (uint8)."""
    target = out[at * itemsize : (at + n) * itemsize]
    if itemsize == 8:
        wide = target.view(np.uint64)
        for i in range(n):
            wide[i] = words[i]
    elif itemsize == 4:
        half = target.view(np.uint32)
        for i in range(n):
            half[i] = words[i]
    elif itemsize == 2:
        quarter = target.view(np.uint16)
        for i in range(n):
            quarter[i] = words[i]
    else:
        for i in range(n):
            target[i] = words[i]


@njit
def one(words: Array, packed: int, width: int, lanes: bool, i: int) -> Any:
    """Packed value i of those that begin at word ``packed``."""
    if width == 0:
        return np.uint64(0)
    bit = (i >> 3) * width if lanes else i * width
    at, step = (packed + (bit >> 6) * 8 + (i & 7), 8) if lanes else (packed + (bit >> 6), 1)
    used = bit & 63
    value = words[at] >> np.uint64(used)
    if used + width > 64:
        value |= words[at + step] << np.uint64(64 - used)
    return value & (np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width))


@njit
def ones(words: Array, stop: int) -> Any:
    """Ones among the first ``stop`` bits."""
    n: Any = 0
    for i in range((stop + 63) >> 6):
        word = words[i]
        if i == stop >> 6:
            word &= (np.uint64(1) << np.uint64(stop & 63)) - np.uint64(1)
        word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
        word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
        word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
        n += np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))
    return n
