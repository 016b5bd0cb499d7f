"""Packed values in lanes, and their patches, from address to address: the loops that most of a batch goes through.

Worked example: 16 values of 3 bits in lanes are 64 bytes. ``add_lanes(begin, begin + 64, 3, 10, 1, 1, 2, out, 4)`` puts
the second eight of them, 10 added to each, as 32-bit items at ``out``; ``exact(begin, begin + 64, 3, 10, 1, 9, 12, out,
4, spare)`` puts three of these there and nothing beside. Addresses and counts are ones that the caller has checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from thinrow.kernels.numba.intrinsics import (
    descents32,
    narrow8,
    narrow16,
    narrow32,
    narrow64,
    pointer,
    popcount,
    store8,
    store16,
    store32,
    store64,
    word_at,
)
from thinrow.kernels.numba.jit import njit, specialized

Array = npt.NDArray[Any]

#: Widest value that one unaligned 8-byte load always holds: 57 bits and a shift of up to 7.
MAX_ONE_LOAD = 57
#: Flag of a block's width: its packed values lie in lanes.
LANES = 0x80
#: Width, without that flag, of packed values that have patches: it is told by their head.
PATCHED = 127
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@njit
def packed_bytes(n: Any, width: Any, lanes: Any) -> Any:
    if lanes:
        return ((n + 7) // 8 * width + 63) // 64 * 64
    return ((n * width + 63) // 64 + 1) * 8


@specialized
def add_lanes(
    begin: int, end: int, width: int, base: Any, scale: Any, group: int, last: int, out: int, itemsize: int
) -> None:
    """``base + q * scale`` of the groups of eight [group, last), cut to items of ``itemsize`` bytes, from ``out`` on.

    The lanes lie from ``begin`` on in a block that ends at ``end``; width is 1 or more.
    """
    mask = _ALL >> np.uint64(64 - width)
    final, bit, step = end - 64, group * width, 8 * itemsize
    if width <= 8 and scale == np.uint64(1):
        many = (last - group) >> 3
        _add_narrow(begin, final, width, base, bit, many, out, itemsize)
        group, bit, out = group + 8 * many, bit + 8 * many * width, out + 8 * many * step
    if itemsize == 8:
        for _ in range(group, last):
            row = begin + (bit >> 6) * 64
            store64(row, min(row + 64, final), np.uint64(bit & 63), mask, base, scale, out)
            bit, out = bit + width, out + step
    elif itemsize == 4:
        for _ in range(group, last):
            row = begin + (bit >> 6) * 64
            store32(row, min(row + 64, final), np.uint64(bit & 63), mask, base, scale, out)
            bit, out = bit + width, out + step
    elif itemsize == 2:
        for _ in range(group, last):
            row = begin + (bit >> 6) * 64
            store16(row, min(row + 64, final), np.uint64(bit & 63), mask, base, scale, out)
            bit, out = bit + width, out + step
    else:
        for _ in range(group, last):
            row = begin + (bit >> 6) * 64
            store8(row, min(row + 64, final), np.uint64(bit & 63), mask, base, scale, out)
            bit, out = bit + width, out + step


@specialized
def _add_narrow(begin: int, final: int, width: int, base: Any, bit: Any, many: int, out: int, itemsize: int) -> None:
    """``base + q`` of ``many`` times 64 values of at most 8 bits, which begin at bit ``bit`` of their lanes."""
    bits, step, size = np.uint64(width), 8 * width, 64 * itemsize
    if itemsize == 8:
        for _ in range(many):
            row = begin + (bit >> 6) * 64
            narrow64(row, min(row + 64, final), np.uint64(bit & 63), bits, base, out)
            bit, out = bit + step, out + size
    elif itemsize == 4:
        for _ in range(many):
            row = begin + (bit >> 6) * 64
            narrow32(row, min(row + 64, final), np.uint64(bit & 63), bits, base, out)
            bit, out = bit + step, out + size
    elif itemsize == 2:
        for _ in range(many):
            row = begin + (bit >> 6) * 64
            narrow16(row, min(row + 64, final), np.uint64(bit & 63), bits, base, out)
            bit, out = bit + step, out + size
    else:
        for _ in range(many):
            row = begin + (bit >> 6) * 64
            narrow8(row, min(row + 64, final), np.uint64(bit & 63), bits, base, out)
            bit, out = bit + step, out + size


@njit
def move(source: int, size: int, target: int) -> None:
    """Copy bytes."""
    taken, put = carray(pointer(source), (size,), np.uint8), carray(pointer(target), (size,), np.uint8)
    for i in range(size):
        put[i] = taken[i]


@specialized
def exact(
    begin: int,
    end: int,
    width: int,
    base: Any,
    scale: Any,
    row: int,
    stop: int,
    out: int,
    itemsize: int,
    spare: int,
) -> None:
    """``add_lanes`` of the values [row, stop), no others; ``spare``: 64 bytes."""
    if row & 7 and row < stop:
        add_lanes(begin, end, width, base, scale, row >> 3, (row >> 3) + 1, spare, itemsize)
        n = min(8 - (row & 7), stop - row)
        move(spare + (row & 7) * itemsize, n * itemsize, out)
        row, out = row + n, out + n * itemsize
    if stop - row >= 8:
        add_lanes(begin, end, width, base, scale, row >> 3, stop >> 3, out, itemsize)
        row, out = stop & ~7, out + ((stop & ~7) - row) * itemsize
    if row < stop:
        add_lanes(begin, end, width, base, scale, row >> 3, (row >> 3) + 1, spare, itemsize)
        move(spare, (stop - row) * itemsize, out)


@njit
def head_of(head: Any) -> Any:
    """Of packed values with patches: whether a bit a value marks those that are not 0; how many are marked or patched;
    the width of the former, or of the low bits of all; that of the high bits."""
    return (
        (head >> np.uint64(48)) == 1,
        np.int64(head & np.uint64(0xFFFFFFFF)),
        np.int64((head >> np.uint64(32)) & np.uint64(0xFF)),
        np.int64((head >> np.uint64(40)) & np.uint64(0xFF)),
    )


@njit
def patches(at: int, n: Any) -> Any:
    """Of n values with patches at an address: (patches, low and high bits, addresses of the positions, of the high bits
    and of the lanes)."""
    _, own, low, high = head_of(word_at(at))
    positions = at + 8 + 2 * ((n + 255) >> 8)
    highs = at + 8 + ((positions - at - 8 + own + 7) >> 3) * 8
    return own, low, high, positions, highs, highs + ((own * high + 63) >> 6) * 8


@njit
def _group_end(at: int, group: Any) -> Any:
    """Patches of the values before the end of a group of 256, of those at an address."""
    return np.int64((word_at(at + 8 + (group >> 2) * 8) >> np.uint64((group & 3) * 16)) & np.uint64(0xFFFF))


@njit
def patches_bytes(at: int, end: int, n: Any) -> Any:
    """Bytes of n values with patches at an address in a block that ends at ``end``; -1 where they are not sound."""
    if end - at < 8:
        return -1
    own, low, high, positions, _, lanes = patches(at, n)
    size = lanes - at + packed_bytes(n, low, True)
    if own > n or low < 1 or high < 1 or low + high > 64 or (word_at(at) >> np.uint64(48)) != 0 or size > end - at:
        return -1
    previous: Any = 0
    descents: Any = 0
    of_row = carray(pointer(positions), (own,), np.uint8)
    for g in range((n + 255) >> 8):
        last = _group_end(at, g)
        if last < previous or last > own:
            return -1
        if previous < last:
            # A group's first position may be below the last of the group before.
            descents -= np.int64(previous > 0 and of_row[previous] <= of_row[previous - 1])
            if (g << 8) + np.int64(of_row[last - 1]) >= n:
                return -1
        previous = last
    return size if previous == own and descents + _descents(positions, own) == 0 else -1


@njit
def _descents(positions: int, own: Any) -> Any:
    """How many of the positions of patches, but for the first, are not above the one before. Of one value at least, so
    that lanes of 64 bytes or more follow: 32 can be loaded from where any of them is."""
    n: Any = 0
    for k in range(1, own, 32):
        found = descents32(positions + k)
        if own - k < 32:
            found &= (np.uint64(1) << np.uint64(own - k)) - np.uint64(1)
        n += popcount(found)
    return n


@specialized
def add_patches(at: int, rows: int, first: int, n: int, scale: Any, out: int, itemsize: int) -> None:
    """Add what the low bits of the values [first, first + n) lack, times ``scale``, to the items that they are at
    ``out``. Of ``rows`` values in all, sound, at address ``at``."""
    if n == 0:
        return
    place = pointer(out)
    if itemsize == 8:
        _add_high(at, rows, first, scale, carray(place, (n,), np.uint64))
    elif itemsize == 4:
        _add_high(at, rows, first, scale, carray(place, (n,), np.uint32))
    elif itemsize == 2:
        _add_high(at, rows, first, scale, carray(place, (n,), np.uint16))
    else:
        _add_high(at, rows, first, scale, carray(place, (n,), np.uint8))


@specialized
def _add_high(at: int, rows: int, first: int, scale: Any, target: Array) -> None:
    """Of one value at least, so that lanes of 64 bytes or more follow the high bits, and eight bytes can be loaded from
    where those of any begin, and eight after them."""
    own, low, high, positions, highs, _ = patches(at, rows)
    mask, times, n = _ALL >> np.uint64(64 - high), scale << np.uint64(low), np.uint64(len(target))
    # Unsigned: an index that might be negative is looked at each time.
    of_row = carray(pointer(positions), (own,), np.uint8)
    for g in range(first >> 8, ((first + len(target) - 1) >> 8) + 1):
        begin, end = np.uint64(_group_end(at, g - 1) if g > 0 else 0), np.uint64(_group_end(at, g))
        base: Any = np.uint64((g << 8) - first)
        bit: Any = np.int64(begin) * high
        if high <= MAX_ONE_LOAD:
            for k in range(begin, end):
                r = base + np.uint64(of_row[k])
                if r < n:
                    target[r] += ((word_at(highs + (bit >> 3)) >> np.uint64(bit & 7)) & mask) * times
                bit += high
            continue
        for k in range(begin, end):
            r = base + np.uint64(of_row[k])
            if r < n:
                word, shift = highs + (bit >> 6) * 8, np.uint64(bit & 63)
                value = (word_at(word) >> shift) | ((word_at(word + 8) << np.uint64(1)) << (np.uint64(63) - shift))
                target[r] += (value & mask) * times
            bit += high


@njit
def ones_at(at: int, stop: int) -> Any:
    """Ones among the first ``stop`` bits of the words at an address."""
    n: Any = 0
    whole = stop >> 6
    words = carray(pointer(at), (whole,), np.uint64)
    for i in range(whole):
        n += popcount(words[i])
    if stop & 63:
        n += popcount(word_at(at + 8 * whole) & ((np.uint64(1) << np.uint64(stop & 63)) - np.uint64(1)))
    return n


@njit
def marks_sound(at: int, n: Any, own: Any) -> bool:
    """Whether ``own`` of n bits at an address are ones, and none after them in their last word."""
    if ones_at(at, n) != own:
        return False
    last = np.uint64(0) if n & 63 == 0 else word_at(at + 8 * (n >> 6)) >> np.uint64(n & 63)
    return bool(last == np.uint64(0))


@njit
def marks_from(at: int, n: int, bit: Any) -> Any:
    """64 bits from ``bit`` on, below n, of the n bits at an address; 0 beyond their last word."""
    word, shift = at + (bit >> 6) * 8, np.uint64(bit & 63)
    found = word_at(word) >> shift
    if shift > 0 and (bit | 63) + 1 < n:
        found |= word_at(word + 8) << (np.uint64(64) - shift)
    return found
