"""Packing of values (docs/format/archive-v2.md, 4): how to, by how many there are of each length, and doing it.

Worked example: of 512 values 500 need 3 bits or less and 12 need 9. In lanes all take 576 bytes. With patches the low 3
bits take 192, a head 8, positions and ends of two groups 16, and 12 times 6 high bits 16: 232 bytes.

Loops over values are kept free of branches and go over slices from 0 on, so that they compile to vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.intrinsics import bit_length, pack8
from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

#: Flag of a block's width: its packed values lie in lanes. So do those of stripes of this many rows or more.
LANES, LANES_FROM = 0x80, 64
#: Width, without that flag, of packed values that have patches.
PATCHED = 127
#: Patches must save a byte for so many values, and bits that mark values too: both take time.
PATCH_MARGIN, MARK_MARGIN = 32, 16
#: Lengths of values, 0 to 64.
N_LENGTHS = 65
#: More patches than a writer makes.
_MOST_PATCHES = 0xFFFF
#: Code of a word that the segment dictionary does not hold.
NO_CODE = 0xFFFFFFFF
#: Its length, which no code has: a dictionary holds fewer words.
NO_LENGTH = 32
#: More bytes than any block has.
NEVER = 1 << 50
PLAIN, PATCHES, MARKS, MARKS_AND_PATCHES = 0, 1, 2, 3
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@njit
def packed_bytes(n: int, width: int) -> int:
    if n >= LANES_FROM:
        return ((n + 7) // 8 * width + 63) // 64 * 64
    return ((n * width + 63) // 64 + 1) * 8


@njit
def _patched_bytes(lengths: Array, top: int, n: int, limit: int) -> Any:
    """(bytes, low bits) of n values with patches, by how many are of each length; the longest has ``top`` bits.
    ``limit`` and 0 where they take as much."""
    best, low = limit, 0
    own, groups = 0, (n + 255) >> 8
    for bits in range(top - 1, 0, -1):
        own += lengths[bits + 1]
        patches = 8 + (2 * groups + own + 7) // 8 * 8 + (own * (top - bits) + 63) // 64 * 8
        # With fewer bits these only grow.
        if own > _MOST_PATCHES or patches >= best:
            break
        size = patches + packed_bytes(n, bits)
        if size < best:
            best, low = size, bits
    return best, low


@njit
def fit(lengths: Array, n: int) -> Any:
    """(bytes, width, form, low bits of values with patches) of n values in the smallest form, where ``lengths[k]`` of
    them need k bits. The width is without the flag."""
    top = N_LENGTHS - 1
    while top > 0 and lengths[top] == 0:
        top -= 1
    size, form, low = packed_bytes(n, top), PLAIN, 0
    if n < LANES_FROM or top < 2:
        return size, top, form, low
    cost, margin = size, n // PATCH_MARGIN
    other, bits = _patched_bytes(lengths, top, n, cost - margin)
    if other + margin < cost:
        size, form, low, cost = other, PATCHES, bits, other + margin
    own, head, margin = n - lengths[0], 8 + (n + 63) // 64 * 8, n // MARK_MARGIN
    other = head + packed_bytes(own, top)
    if other + margin < cost:
        size, form, low, cost = other, MARKS, 0, other + margin
    if own >= LANES_FROM:
        margin += own // PATCH_MARGIN
        other, bits = _patched_bytes(lengths, top, own, cost - margin - head)
        if head + other + margin < cost:
            size, form, low = head + other, MARKS_AND_PATCHES, bits
    return size, top if form == PLAIN else PATCHED, form, low


@njit
def tally(q: Array, lengths: Array, room: Array, counts: Array) -> None:
    """How many of ``q`` need so many bits, into ``lengths``. ``room`` (uint8) has as many places as ``q``, ``counts``
    (int32) four for each length: one count alone would wait for itself."""
    n = len(q)
    for r in range(n):
        room[r] = bit_length(np.uint64(q[r]))
    counts[:] = 0
    a, b = counts[:N_LENGTHS], counts[N_LENGTHS : 2 * N_LENGTHS]
    c, d = counts[2 * N_LENGTHS : 3 * N_LENGTHS], counts[3 * N_LENGTHS : 4 * N_LENGTHS]
    fours = n & ~3
    for r in range(0, fours, 4):
        a[room[r]] += 1
        b[room[r + 1]] += 1
        c[room[r + 2]] += 1
        d[room[r + 3]] += 1
    for r in range(fours, n):
        a[room[r]] += 1
    for k in range(N_LENGTHS):
        lengths[k] = a[k] + b[k] + c[k] + d[k]


@njit
def inverse_of(odd: Any) -> Any:
    """The number that times ``odd`` is 1, modulo 2^64 (Newton)."""
    found = odd * np.uint64(3) ^ np.uint64(2)
    for _ in range(4):
        found *= np.uint64(2) - odd * found
    return found


@njit
def divide(q: Array, scale: Any) -> None:
    """Every ``q`` by ``scale``, of which it is a multiple, or 0: a product and a shift in place of a division."""
    if scale == np.uint64(1):
        return
    shift = np.uint64(0)
    while not scale & np.uint64(1):
        scale >>= np.uint64(1)
        shift += np.uint64(1)
    inverse = inverse_of(scale)
    for r in range(len(q)):
        q[r] = (q[r] >> shift) * inverse


@njit
def mark_bits(marked: Array, out: Array) -> None:
    """Bits that say which of ``marked`` (bool) are true, into ``out`` (uint64, zeros)."""
    n = len(marked)
    for i in range(n >> 6):
        bits, part = np.uint64(0), marked[64 * i : 64 * i + 64]
        for k in range(64):
            bits |= np.uint64(part[k]) << np.uint64(k)
        out[i] = bits
    for r in range(n & ~63, n):
        out[r >> 6] |= np.uint64(marked[r]) << np.uint64(r & 63)


@njit
def pack(q: Array, width: Any, out: Array, room: Array, counts: Array) -> None:
    """The low ``width`` bits of each number into ``out`` (uint64, zeros): in lanes where the width says so, else one
    after another; with patches where it is ``PATCHED`` in lanes. ``room`` and ``counts`` as for ``tally``."""
    if width == (PATCHED | LANES):
        _pack_patched(q, out, room, counts)
        return
    _pack_plain(q, width, out)


@njit
def _pack_plain(q: Array, width: Any, out: Array) -> None:
    lanes = (width & LANES) != 0
    width &= LANES - 1
    if width == 0:
        return
    mask = _ALL >> np.uint64(64 - width)
    if lanes:
        _pack_lanes(q, width, mask, out)
        return
    at, used = 0, 0
    word = np.uint64(0)
    for r in range(len(q)):
        value = q[r] & mask
        word |= value << np.uint64(used)
        used += width
        if used >= 64:
            out[at] = word
            at += 1
            used -= 64
            # What did not fit; a shift by 64 is undefined.
            word = value >> np.uint64(width - used) if used > 0 else np.uint64(0)
    if used > 0:
        out[at] = word


@njit
def _pack_lanes(q: Array, width: Any, mask: Any, out: Array) -> None:
    source, target, bit = q.ctypes.data, out.ctypes.data, 0
    for at in range(len(q) >> 3):
        row, used = target + (bit >> 6) * 64, bit & 63
        pack8(source + at * 64, mask, used, row)
        if used + width > 64:
            pack8(source + at * 64, mask, used - 64, row + 64)
        bit += width
    for r in range(len(q) & ~7, len(q)):
        at, used = (bit >> 6) * 8 + (r & 7), bit & 63
        out[at] |= (q[r] & mask) << np.uint64(used)
        if used + width > 64:
            out[at + 8] |= (q[r] & mask) >> np.uint64(64 - used)


@njit
def _pack_patched(q: Array, out: Array, room: Array, counts: Array) -> None:
    lengths = np.empty(N_LENGTHS, np.int64)
    tally(q, lengths, room, counts)
    _, _, form, low = fit(lengths, len(q))
    top = N_LENGTHS - 1
    while lengths[top] == 0:
        top -= 1
    if form == PATCHES:
        _put_patches(q, low, top, out)
        return
    # One place more: what is not kept is overwritten by what follows.
    held, marked = np.empty(len(q) + 1, np.uint64), room.view(np.bool_)[: len(q)]
    begin, own = 1 + (len(q) + 63) // 64, 0
    for r in range(len(q)):
        marked[r] = q[r] != np.uint64(0)
    mark_bits(marked, out[1:begin])
    for r in range(len(q)):
        held[own] = q[r]
        own += marked[r]
    width = top | LANES if own >= LANES_FROM else top
    if form == MARKS_AND_PATCHES:
        width = PATCHED | LANES
        _put_patches(held[:own], low, top, out[begin:])
    else:
        _pack_plain(held[:own], width, out[begin:])
    out[0] = np.uint64(own) | np.uint64(width) << np.uint64(32) | np.uint64(1) << np.uint64(48)


@njit
def _put_patches(q: Array, low: int, top: int, out: Array) -> None:
    """Head, ends of groups, positions, high bits, and the low bits in lanes."""
    high, groups = top - low, (len(q) + 255) >> 8
    places, highs = np.empty(len(q) + 1, np.uint8), np.empty(len(q) + 1, np.uint64)
    bytes_of, k = out[1:].view(np.uint8), 0
    for g in range(groups):
        part = q[256 * g : min(256 * g + 256, len(q))]
        for r in range(len(part)):
            rest = part[r] >> np.uint64(low)
            places[k], highs[k] = r, rest
            k += rest != np.uint64(0)
        bytes_of[2 * g], bytes_of[2 * g + 1] = k & 255, k >> 8
    for i in range(k):
        bytes_of[2 * groups + i] = places[i]
    out[0] = np.uint64(k) | np.uint64(low) << np.uint64(32) | np.uint64(high) << np.uint64(40)
    at = 1 + (2 * groups + k + 7) // 8
    _pack_plain(highs[:k], high, out[at:])
    _pack_plain(q, low | LANES, out[at + (k * high + 63) // 64 :])


@njit
def fit_codes(codes: Array, own_width: Any, lengths: Array, room: Array, counts: Array) -> Any:
    """(bytes, width) of codes packed, and words without one: those of codec 4, or of codec 13 where there are some of
    either kind; else ``NEVER`` bytes."""
    tally(codes, lengths, room, counts)
    own = lengths[NO_LENGTH]
    lengths[NO_LENGTH] = 0
    n = len(codes) - own
    if n == 0:
        return NEVER, 0, own
    size, width, _, _ = fit(lengths, n)
    if own > 0:
        size += 16 + (len(codes) + 63) // 64 * 8 + packed_bytes(own, own_width)
    return size, width, own


@njit
def pack_marked(words: Array, codes: Array, base: Any, out: Array, q: Array, room: Array, counts: Array) -> Any:
    """Head, bits and own words of a block of codec 13 into ``out``, codes into ``q`` (one place more than words); the
    words before the packed codes and the codes."""
    own, n, reach = 0, 0, np.uint64(0)
    held, marked = np.empty(len(words) + 1, np.uint64), room.view(np.bool_)[: len(words)]
    for r in range(len(words)):
        reach = max(reach, words[r] - base)
        marked[r] = codes[r] == np.uint32(NO_CODE)
    begin = 2 + (len(words) + 63) // 64
    mark_bits(marked, out[2:begin])
    for r in range(len(words)):
        held[own], q[n] = words[r] - base, codes[r]
        own += marked[r]
        n += not marked[r]
    width: Any = np.int64(bit_length(reach)) | (LANES if own >= LANES_FROM else 0)
    out[0], out[1] = np.uint64(own) | np.uint64(width) << np.uint64(32), base
    pack(held[:own], width, out[begin:], room, counts)
    return begin + packed_bytes(own, width & (LANES - 1)) // 8, q[:n]
