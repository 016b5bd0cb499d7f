"""Packing of values (docs/format/archive-v2.md, 4): how to, by how many there are of each length, and doing it.

Worked example: of 512 values 500 need 3 bits or less and 12 need 9. In lanes all take 576 bytes. With patches the low 3
bits take 192, a head 8, positions and ends of two groups 16, and 12 times 6 high bits 16: 232 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.intrinsics import bit_length
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
#: More bytes than any block has.
NEVER = 1 << 50
PLAIN, PATCHES, MARKS, MARKS_AND_PATCHES = 0, 1, 2, 3


@njit
def packed_bytes(n: int, width: int) -> int:
    if n >= LANES_FROM:
        return ((n + 7) // 8 * width + 63) // 64 * 64
    return ((n * width + 63) // 64 + 1) * 8


@njit
def _patched_bytes(lengths: Array, top: int, n: int) -> Any:
    """(bytes, low bits) of n values with patches, by how many are of each length; the longest has ``top`` bits."""
    best, low = 1 << 62, 0
    own, groups = 0, (n + 255) >> 8
    for bits in range(top - 1, 0, -1):
        own += lengths[bits + 1]
        if own > _MOST_PATCHES:
            break
        size = 8 + (2 * groups + own + 7) // 8 * 8 + (own * (top - bits) + 63) // 64 * 8 + packed_bytes(n, bits)
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
    cost = size
    other, bits = _patched_bytes(lengths, top, n)
    if other + n // PATCH_MARGIN < cost:
        size, form, low, cost = other, PATCHES, bits, other + n // PATCH_MARGIN
    own, head = n - lengths[0], 8 + (n + 63) // 64 * 8
    other = head + packed_bytes(own, top)
    if other + n // MARK_MARGIN < cost:
        size, form, low, cost = other, MARKS, 0, other + n // MARK_MARGIN
    if own >= LANES_FROM:
        other, bits = _patched_bytes(lengths, top, own)
        other += head
        if other + n // MARK_MARGIN + own // PATCH_MARGIN < cost:
            size, form, low = other, MARKS_AND_PATCHES, bits
    return size, top if form == PLAIN else PATCHED, form, low


@njit
def tally(q: Array, lengths: Array) -> None:
    """How many of ``q`` need so many bits, into ``lengths``."""
    lengths[:] = 0
    for r in range(len(q)):
        lengths[bit_length(q[r])] += 1


@njit
def pack(q: Array, width: Any, out: Array) -> None:
    """The low ``width`` bits of each number into ``out`` (uint64, zeros): in lanes where the width says so, else one
    after another; with patches where it is ``PATCHED`` in lanes."""
    if width == (PATCHED | LANES):
        _pack_patched(q, out)
        return
    _pack_plain(q, width, out)


@njit
def _pack_plain(q: Array, width: Any, out: Array) -> None:
    lanes = (width & LANES) != 0
    width &= LANES - 1
    if width == 0:
        return
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    if lanes:
        for r in range(len(q)):
            bit = (r >> 3) * width
            at, used = (bit >> 6) * 8 + (r & 7), bit & 63
            out[at] |= (q[r] & mask) << np.uint64(used)
            if used + width > 64:
                out[at + 8] |= (q[r] & mask) >> np.uint64(64 - used)
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
def _pack_patched(q: Array, out: Array) -> None:
    lengths = np.zeros(N_LENGTHS, np.int64)
    tally(q, lengths)
    _, _, form, low = fit(lengths, len(q))
    top = N_LENGTHS - 1
    while lengths[top] == 0:
        top -= 1
    if form == PATCHES:
        _put_patches(q, len(q) - _up_to(lengths, low), low, top, out)
        return
    held = np.empty(len(q), np.uint64)
    begin, own = 1 + (len(q) + 63) // 64, 0
    for r in range(len(q)):
        if q[r] != np.uint64(0):
            out[1 + (r >> 6)] |= np.uint64(1) << np.uint64(r & 63)
            held[own] = q[r]
            own += 1
    width = top | LANES if own >= LANES_FROM else top
    if form == MARKS_AND_PATCHES:
        width = PATCHED | LANES
        lengths[0] = 0
        _put_patches(held[:own], own - _up_to(lengths, low), low, top, out[begin:])
    else:
        _pack_plain(held[:own], width, out[begin:])
    out[0] = np.uint64(own) | np.uint64(width) << np.uint64(32) | np.uint64(1) << np.uint64(48)


@njit
def _up_to(lengths: Array, bits: int) -> int:
    n = 0
    for k in range(bits + 1):
        n += lengths[k]
    return n


@njit
def _put_patches(q: Array, own: int, low: int, top: int, out: Array) -> None:
    """Head, ends of groups, positions, high bits, and the low bits in lanes."""
    high, groups = top - low, (len(q) + 255) >> 8
    out[0] = np.uint64(own) | np.uint64(low) << np.uint64(32) | np.uint64(high) << np.uint64(40)
    bytes_of = out[1:].view(np.uint8)
    highs = np.empty(own, np.uint64)
    k = 0
    for r in range(len(q)):
        rest = q[r] >> np.uint64(low)
        if rest != np.uint64(0):
            bytes_of[2 * groups + k] = r & 255
            highs[k] = rest
            k += 1
        if (r & 255) == 255 or r == len(q) - 1:
            bytes_of[2 * (r >> 8)], bytes_of[2 * (r >> 8) + 1] = k & 255, k >> 8
    at = 1 + (2 * groups + own + 7) // 8
    _pack_plain(highs, high, out[at:])
    _pack_plain(q, low | LANES, out[at + (own * high + 63) // 64 :])


@njit
def fit_affine(words: Array, base: Any, scale: Any, width: Any, is_float: bool, lengths: Array) -> Any:
    """(bytes, width) of ``(words - base) / scale``, the longest of which has ``width`` bits."""
    if len(words) < LANES_FROM or width < 2 or is_float:
        return packed_bytes(len(words), width), width
    lengths[:] = 0
    if scale == np.uint64(1):
        for r in range(len(words)):
            lengths[bit_length(words[r] - base)] += 1
    else:
        for r in range(len(words)):
            lengths[bit_length((words[r] - base) // scale)] += 1
    size, bits, _, _ = fit(lengths, len(words))
    return size, bits


@njit
def fit_delta(
    words: Array, base: Any, scale: Any, width: Any, most: Any, restarts: Array, start: Any, lengths: Array
) -> Any:
    """(bytes, width) of what codec 3 packs, the longest of which has ``width`` bits: with patches where those are
    ``most`` or fewer. ``restarts`` are the stripe's, which begins at row ``start``."""
    if len(words) < LANES_FROM or width < 2 or width > most:
        return packed_bytes(len(words), width), width
    lengths[:] = 0
    for r in range(1, len(words)):
        step = words[r] - words[r - 1] - base
        lengths[bit_length(step if scale == np.uint64(1) else step // scale)] += 1
    # A restart's is 0, whatever its step.
    lengths[0] += 1
    for i in range(1, len(restarts)):
        r = restarts[i] - start
        lengths[bit_length((words[r] - words[r - 1] - base) // scale)] -= 1
        lengths[0] += 1
    size, bits, _, _ = fit(lengths, len(words))
    return size, bits


@njit
def fit_codes(codes: Array, own_width: Any, lengths: Array) -> Any:
    """(bytes, width) of codes packed, and words without one: those of codec 4, or of codec 13 where there are some of
    either kind; else ``NEVER`` bytes."""
    lengths[:] = 0
    own = 0
    for r in range(len(codes)):
        if codes[r] == NO_CODE:
            own += 1
        else:
            lengths[bit_length(np.uint64(codes[r]))] += 1
    n = len(codes) - own
    if n == 0:
        return NEVER, 0, own
    size, width, _, _ = fit(lengths, n)
    if own > 0:
        size += 16 + (len(codes) + 63) // 64 * 8 + packed_bytes(own, own_width)
    return size, width, own


@njit
def pack_marked(words: Array, codes: Array, base: Any, out: Array, q: Array) -> Any:
    """Head, bits and own words of a block of codec 13 into ``out``, codes into ``q``; the words before the packed codes
    and the codes."""
    own, n = 0, 0
    held = np.empty(len(words), np.uint64)
    reach = np.uint64(0)
    for r in range(len(words)):
        reach = max(reach, words[r] - base)
        if codes[r] == NO_CODE:
            out[2 + (r >> 6)] |= np.uint64(1) << np.uint64(r & 63)
            held[own] = words[r] - base
            own += 1
        else:
            q[n] = codes[r]
            n += 1
    width: Any = np.int64(bit_length(reach)) | (LANES if own >= LANES_FROM else 0)
    out[0], out[1] = np.uint64(own) | np.uint64(width) << np.uint64(32), base
    begin = 2 + (len(words) + 63) // 64
    pack(held[:own], width, out[begin:])
    return begin + packed_bytes(own, width & (LANES - 1)) // 8, q[:n]
