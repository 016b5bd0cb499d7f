"""Packed values (docs/format/archive-v2.md, 4): in lanes or in a bit string, with patches, all of a range or one.

Worked example: values 5, 6, 7 of 3 bits are the bit string ``0b111110101`` in one word, and
``one(words, 0, 3, False, 1)`` is 6. Of 64 values of 3 bits, one of which is 5 + (9 << 3), the low 3 bits lie in lanes
(64 bytes), and a patch adds 9, of 4 bits, shifted by 3, to its row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.intrinsics import (
    address,
    expand8,
    load64,
    popcount,
)
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.lanes import (
    LANES,
    MAX_ONE_LOAD,
    PATCHED,
    add_lanes,
    add_patches,
    exact,
    head_of,
    marks_sound,
    packed_bytes,
    patches,
    patches_bytes,
)

Array = npt.NDArray[Any]

MAX_ROWS = 1 << 31
#: Most words that stand in a block of codec 12.
MAX_LOCAL = 4096
#: Values that go through a scratch array at once. It has room for twice as many and 16: those with patches go through
#: it twice.
CHUNK = 512
SCRATCH = 2 * CHUNK + 16
ROOM = MAX_LOCAL + 8


def workspace() -> tuple[Array, Array]:
    """``scratch`` and ``room`` of decoders, uint64."""
    return np.empty(SCRATCH, np.uint64), np.empty(ROOM, np.uint64)


@njit
def sound_width(width: Any) -> bool:
    """Whether it is one that a block may have."""
    return bool((width & (LANES - 1)) <= 64 or width == (PATCHED | LANES))


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
    return bool(rows >= 0 and rows <= MAX_ROWS and row >= 0 and row <= stop and stop <= rows and sound_width(width[b]))


@njit
def packed_size(words: Array, at: Any, n: Any, width: Any, lanes: Any) -> Any:
    """Bytes of n packed values that begin at word ``at`` of a block, with patches too; -1 where those are not sound."""
    if width != PATCHED:
        return packed_bytes(n, width, lanes)
    if at >= len(words):
        return -1
    begin, end = words.ctypes.data, words.ctypes.data + 8 * len(words)
    marked, own, low, _ = head_of(words[at])
    if not marked:
        return patches_bytes(begin + 8 * at, end, n)
    inner = at + 1 + ((n + 63) >> 6)
    if (
        inner > len(words)
        or own > n
        or (words[at] >> np.uint64(40)) != 1 << 8
        or not marks_sound(begin + 8 * (at + 1), n, own)
    ):
        return -1
    width, lanes = low & (LANES - 1), low >= LANES
    if width == PATCHED and lanes:
        size = patches_bytes(begin + 8 * inner, end, own)
        return size if size < 0 else (inner - at) * 8 + size
    return (inner - at) * 8 + packed_bytes(own, width, lanes) if width <= 64 else -1


@njit
def _scaled_patched(
    buffer: Array, words: Array, packed: Any, rows: Any, base: Any, scale: Any, first: Any, n: Any, out: Array
) -> Array:
    """As ``scaled`` of values with patches, which are sound."""
    marked, own, low, _ = head_of(words[packed])
    if not marked:
        return _scaled_patches(buffer, words, packed, rows, base, scale, first, n, out)
    inner = packed + 1 + ((rows + 63) >> 6)
    bitmap, spare, zero = words[packed + 1 : inner], out[CHUNK + 8 :], np.uint64(0)
    begin = ones(bitmap, first)
    held = ones(bitmap, first + n) - begin
    if low == (PATCHED | LANES):
        found = _scaled_patches(buffer, words, inner, own, zero, scale, begin, held, spare)
    else:
        found = _scaled_plain(buffer, words, inner, low & (LANES - 1), low >= LANES, zero, scale, begin, held, spare)
    at: Any = 0
    for i in range(0, n, 64):
        word = bits_from(bitmap, first + i)
        for j in range(i, min(i + 64, n), 8):
            expand8(word, found, at, base, out, j)
            at += popcount(word & np.uint64(0xFF))
            word >>= np.uint64(8)
    return out[:n]


@njit
def _scaled_patches(
    buffer: Array, words: Array, packed: Any, rows: Any, base: Any, scale: Any, first: Any, n: Any, out: Array
) -> Array:
    at = words.ctypes.data + 8 * packed
    _, low, _, _, _, lanes = patches(at, rows)
    lanes = (lanes - words.ctypes.data) >> 3
    found = _scaled_plain(buffer, words, lanes, low, True, base, scale, first, n, out)
    add_patches(at, rows, first, n, scale, address(found), 8)
    return found


@njit
def bits_from(words: Array, bit: Any) -> Any:
    """64 bits from ``bit`` on, which is in ``words``; 0 beyond their end."""
    at, shift = bit >> 6, np.uint64(bit & 63)
    word = words[at] >> shift
    if shift > 0 and at + 1 < len(words):
        word |= words[at + 1] << (np.uint64(64) - shift)
    return word


@njit
def bits_sound(bitmap: Array, n: Any, own: Any) -> bool:
    """Whether ``own`` of the first n bits are ones, and none after them."""
    found: bool = ones(bitmap, n) == own and ones(bitmap, len(bitmap) * 64) == own
    return found


@njit
def unpack(
    buffer: Array, words: Array, packed: Any, rows: Any, width: Any, lanes: Any, first: Any, n: Any, out: Array
) -> Array:
    """As ``scaled`` with base 0 and scale 1."""
    return scaled(buffer, words, packed, rows, width, lanes, np.uint64(0), np.uint64(1), first, n, out)


@njit
def scaled(
    buffer: Array,
    words: Array,
    packed: Any,
    rows: Any,
    width: Any,
    lanes: Any,
    base: Any,
    scale: Any,
    first: Any,
    n: Any,
    out: Array,
) -> Array:
    """``base + q * scale`` of the packed values ``[first, first + n)``, as (n,) uint64 within ``out``.

    They begin at word ``packed`` of the block, which is ``buffer`` and ``words``, and are ``rows`` in all; ``out`` has
    room for 8 more than n, or is of ``SCRATCH`` where the width is ``PATCHED``.
    """
    if width == PATCHED:
        return _scaled_patched(buffer, words, packed, rows, base, scale, first, n, out)
    return _scaled_plain(buffer, words, packed, width, lanes, base, scale, first, n, out)


@njit
def _scaled_plain(
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
    if width == 0:
        out[:n] = base
        return out[:n]
    if lanes:
        last = (first + n + 7) >> 3
        begin, end = words.ctypes.data + 8 * packed, words.ctypes.data + 8 * len(words)
        add_lanes(begin, end, width, base, scale, first >> 3, last, address(out), 8)
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
    rows: Any,
    width: Any,
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
    ``out`` (uint8); arguments as of ``scaled``, ``scratch`` of ``SCRATCH``."""
    begin, end = words.ctypes.data + 8 * packed, words.ctypes.data + 8 * len(words)
    place, spare = out.ctypes.data + at * itemsize, address(scratch)
    if width == PATCHED and not head_of(words[packed])[0]:
        _, low, _, _, _, first = patches(begin, rows)
        exact(first, end, low, base, scale, row, stop, place, itemsize, spare)
        add_patches(begin, rows, row, stop - row, scale, place, itemsize)
        return
    if lanes and 0 < width < PATCHED:
        exact(begin, end, width, base, scale, row, stop, place, itemsize, spare)
        return
    while row < stop:
        n = min(CHUNK, stop - row)
        store(scaled(buffer, words, packed, rows, width, lanes, base, scale, row, n, scratch), n, out, at, itemsize)
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
        n += popcount(word)
    return n
