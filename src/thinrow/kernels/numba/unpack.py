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
    expand8,
    load64,
    narrow8,
    narrow16,
    narrow32,
    narrow64,
    popcount,
    store8,
    store16,
    store32,
    store64,
)
from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

#: Widest value that one unaligned 8-byte load always holds: 57 bits and a shift of up to 7.
MAX_ONE_LOAD = 57
#: Flag of a block's width: its packed values lie in lanes.
LANES = 0x80
#: Width, without that flag, of packed values that have patches: it is told by their head.
PATCHED = 127
MAX_ROWS = 1 << 31
#: Most words that stand in a block of codec 12.
MAX_LOCAL = 4096
#: Values that go through a scratch array at once. It has room for twice as many and 16: those with patches go through
#: it twice.
CHUNK = 512
SCRATCH = 2 * CHUNK + 16


def workspace() -> tuple[Array, Array]:
    """``scratch`` and ``room`` of decoders, uint64."""
    return np.empty(SCRATCH, np.uint64), np.empty(MAX_LOCAL + 8, np.uint64)


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
def packed_bytes(n: Any, width: Any, lanes: Any) -> Any:
    if lanes:
        return ((n + 7) // 8 * width + 63) // 64 * 64
    return ((n * width + 63) // 64 + 1) * 8


@njit
def packed_size(words: Array, at: Any, n: Any, width: Any, lanes: Any) -> Any:
    """Bytes of n packed values that begin at word ``at`` of a block, with patches too; -1 where those are not sound."""
    if width != PATCHED:
        return packed_bytes(n, width, lanes)
    if at >= len(words):
        return -1
    marked, own, low = _head(words[at])
    if not marked:
        return _patches_bytes(words, at, n)
    inner = at + 1 + ((n + 63) >> 6)
    if (
        inner > len(words)
        or own > n
        or (words[at] >> np.uint64(40)) != 1 << 8
        or not bits_sound(words[at + 1 : inner], n, own)
    ):
        return -1
    width, lanes = low & (LANES - 1), low >= LANES
    if width == PATCHED and lanes:
        if inner >= len(words) or _head(words[inner])[0]:
            return -1
        size = _patches_bytes(words, inner, own)
        return size if size < 0 else (inner - at) * 8 + size
    return (inner - at) * 8 + packed_bytes(own, width, lanes) if width <= 64 else -1


@njit
def _head(head: Any) -> Any:
    """Of packed values with patches: whether a bit a value marks those that are not 0; how many are marked or patched;
    the width of the former, or of the low bits of all."""
    return (
        (head >> np.uint64(48)) == 1,
        np.int64(head & np.uint64(0xFFFFFFFF)),
        np.int64((head >> np.uint64(32)) & np.uint64(0xFF)),
    )


@njit
def _patches(words: Array, at: int, n: Any) -> Any:
    """Of n values with patches at word ``at``: (patches, low and high bits, byte of the first position, words at which
    high bits and lanes begin)."""
    _, own, low = _head(words[at])
    high = np.int64((words[at] >> np.uint64(40)) & np.uint64(0xFF))
    groups = (n + 255) >> 8
    highs = at + 1 + ((2 * groups + own + 7) >> 3)
    return own, low, high, 8 * (at + 1) + 2 * groups, highs, highs + ((own * high + 63) >> 6)


@njit
def _end(words: Array, at: int, group: Any) -> Any:
    """Patches of the values before the end of a group of 256."""
    return np.int64((words[at + 1 + (group >> 2)] >> np.uint64((group & 3) * 16)) & np.uint64(0xFFFF))


@njit
def _patches_bytes(words: Array, at: int, n: Any) -> Any:
    own, low, high, _, _, lanes = _patches(words, at, n)
    size = (lanes - at) * 8 + packed_bytes(n, low, True)
    if (
        own > n
        or low < 1
        or high < 1
        or low + high > 64
        or (words[at] >> np.uint64(48)) != 0
        or size > (len(words) - at) * 8
    ):
        return -1
    previous: Any = 0
    for g in range((n + 255) >> 8):
        end = _end(words, at, g)
        if end < previous:
            return -1
        previous = end
    return size if previous == own else -1


@njit
def _add_patches(buffer: Array, words: Array, at: int, rows: int, first: int, scale: Any, target: Array) -> None:
    """What the low bits of values [first, first + len(target)) lack, times ``scale``. Of ``rows`` values in all, one at
    least: so lanes of 64 bytes or more follow the high bits, and two words can be loaded from where those of any lie.
    """
    _, low, high, positions, highs, _ = _patches(words, at, rows)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - high)
    n = len(target)
    if n == 0:
        return
    for g in range(first >> 8, ((first + n - 1) >> 8) + 1):
        begin, end, base = _end(words, at, g - 1) if g > 0 else 0, _end(words, at, g), (g << 8) - first
        if base >= 0 and base + 256 <= n and high <= MAX_ONE_LOAD:
            # No position of a byte is outside.
            bit: Any = begin * high
            for k in range(begin, end):
                value = load64(buffer, highs * 8 + (bit >> 3)) >> np.uint64(bit & 7)
                target[base + np.int64(buffer[positions + k])] += ((value & mask) << np.uint64(low)) * scale
                bit += high
            continue
        for k in range(begin, end):
            r = base + np.int64(buffer[positions + k])
            if r >= 0 and r < n:
                bit = k * high
                word, shift = highs + (bit >> 6), np.uint64(bit & 63)
                value = (words[word] >> shift) | ((words[word + 1] << np.uint64(1)) << (np.uint64(63) - shift))
                target[r] += ((value & mask) << np.uint64(low)) * scale


@njit
def _scaled_patched(
    buffer: Array, words: Array, packed: Any, rows: Any, base: Any, scale: Any, first: Any, n: Any, out: Array
) -> Array:
    """As ``scaled`` of values with patches, which are sound."""
    marked, own, low = _head(words[packed])
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
    _, low, _, _, _, lanes = _patches(words, packed, rows)
    found = _scaled_plain(buffer, words, lanes, low, True, base, scale, first, n, out)
    _add_patches(buffer, words, packed, rows, first, scale, found)
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
    if width <= 8 and scale == np.uint64(1):
        many = (last - group) >> 3
        _add_narrow(words, packed, width, base, bit, many, out, at, itemsize)
        group, bit, at = group + 8 * many, bit + 8 * many * width, at + 8 * many * step
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
def _add_narrow(
    words: Array, packed: int, width: int, base: Any, bit: Any, many: int, out: Array, at: int, itemsize: int
) -> None:
    """``base + q`` of ``many`` times 64 values of at most 8 bits, which begin at bit ``bit`` of their lanes."""
    end, bits = len(words) - 8, np.uint64(width)
    step, size = 8 * width, 64 * itemsize
    if itemsize == 8:
        for _ in range(many):
            row = packed + (bit >> 6) * 8
            narrow64(words, row, min(row + 8, end), np.uint64(bit & 63), bits, base, out, at)
            bit, at = bit + step, at + size
    elif itemsize == 4:
        for _ in range(many):
            row = packed + (bit >> 6) * 8
            narrow32(words, row, min(row + 8, end), np.uint64(bit & 63), bits, base, out, at)
            bit, at = bit + step, at + size
    elif itemsize == 2:
        for _ in range(many):
            row = packed + (bit >> 6) * 8
            narrow16(words, row, min(row + 8, end), np.uint64(bit & 63), bits, base, out, at)
            bit, at = bit + step, at + size
    else:
        for _ in range(many):
            row = packed + (bit >> 6) * 8
            narrow8(words, row, min(row + 8, end), np.uint64(bit & 63), bits, base, out, at)
            bit, at = bit + step, at + size


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
    if width != PATCHED:
        _affine_plain(buffer, words, packed, width, lanes, base, scale, row, stop, out, at, itemsize, scratch)
        return
    if _head(words[packed])[0]:
        while row < stop:
            n = min(CHUNK, stop - row)
            found = _scaled_patched(buffer, words, packed, rows, base, scale, row, n, scratch)
            store(found, n, out, at, itemsize)
            row, at = row + n, at + n
        return
    low, begin = _patches(words, packed, rows)[1], _patches(words, packed, rows)[5]
    _affine_plain(buffer, words, begin, low, True, base, scale, row, stop, out, at, itemsize, scratch)
    target = out[at * itemsize : (at + stop - row) * itemsize]
    if itemsize == 8:
        _add_patches(buffer, words, packed, rows, row, scale, target.view(np.uint64))
    elif itemsize == 4:
        _add_patches(buffer, words, packed, rows, row, scale, target.view(np.uint32))
    elif itemsize == 2:
        _add_patches(buffer, words, packed, rows, row, scale, target.view(np.uint16))
    else:
        _add_patches(buffer, words, packed, rows, row, scale, target)


@njit
def _affine_plain(
    buffer: Array,
    words: Array,
    packed: Any,
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
    while row < stop:
        # Whole groups of eight go straight to the output.
        if lanes and width > 0 and (row & 7) == 0 and stop - row >= 8:
            last = stop >> 3
            add_lanes(words, packed, width, base, scale, row >> 3, last, out, at * itemsize, itemsize)
            at += (last << 3) - row
            row = last << 3
            continue
        n = min(8 - (row & 7) if lanes else CHUNK, stop - row)
        found = _scaled_plain(buffer, words, packed, width, lanes, base, scale, row, n, scratch)
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
        n += popcount(word)
    return n
