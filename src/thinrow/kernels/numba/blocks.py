"""Decoding of fixed-width blocks (codecs 0 to 6 of docs/format/archive-v2.md), many runs in one call.

Worked example: block ``base 100, scale 5, width 2, q = [0, 3, 1]`` holds 100, 115, 105; the run that asks for its rows
[1, 3) gets 115, 105. Blocks are read where they lie, in mapped files or buffers. Values that lie in lanes are unpacked
eight at a time in vector registers, straight into the output where nothing but a sum is left to do; others go through a
scratch array that stays in the nearest cache, and one simple loop a codec turns them into the output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from thinrow.core.buffers import Buffers
from thinrow.kernels.numba.intrinsics import load64, pointer, store8, store16, store32, store64
from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

CHUNK = 512
MAX_ROWS = 1 << 31
ZERO, CONSTANT, PACKED, DELTA, DICTIONARY, LOCAL, RAW = 0, 1, 2, 3, 4, 5, 6
#: Widest value that one unaligned 8-byte load always holds: 57 bits and a shift of up to 7.
MAX_ONE_LOAD = 57
#: Flag of a block's width: its packed values lie in lanes.
LANES = 0x80


@njit
def _copy(src: Array, dst: Array) -> None:
    """``dst[:] = src[:len(dst)]``; a loop, because slice assignment in numba first copies what might overlap."""
    for i in range(len(dst)):
        dst[i] = src[i]


@njit
def _packed_bytes(n: int, width: int, lanes: bool) -> int:
    if lanes:
        return ((n + 7) // 8 * width + 63) // 64 * 64
    return ((n * width + 63) // 64 + 1) * 8


@njit
def _add_lanes(
    words: Array, packed: int, width: int, base: Any, group: int, last: int, out: Array, at: int, itemsize: int
) -> None:
    """``base`` + packed value of the groups of eight [group, last), as items from byte ``at`` of ``out`` (uint8) on.

    ``packed`` is the word where the lanes begin; width is 1 or more.
    """
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    end = len(words) - 8
    bit = group * width
    step = 8 * itemsize
    if itemsize == 8:
        for _ in range(group, last):
            row = packed + (bit >> 6) * 8
            store64(words, row, min(row + 8, end), np.uint64(bit & 63), mask, base, out, at)
            bit, at = bit + width, at + step
    elif itemsize == 4:
        for _ in range(group, last):
            row = packed + (bit >> 6) * 8
            store32(words, row, min(row + 8, end), np.uint64(bit & 63), mask, base, out, at)
            bit, at = bit + width, at + step
    elif itemsize == 2:
        for _ in range(group, last):
            row = packed + (bit >> 6) * 8
            store16(words, row, min(row + 8, end), np.uint64(bit & 63), mask, base, out, at)
            bit, at = bit + width, at + step
    else:
        for _ in range(group, last):
            row = packed + (bit >> 6) * 8
            store8(words, row, min(row + 8, end), np.uint64(bit & 63), mask, base, out, at)
            bit, at = bit + width, at + step


@njit
def _unpack(buffer: Array, words: Array, packed: int, width: int, lanes: bool, first: int, n: int, out: Array) -> Array:
    """Packed values ``[first, first + n)``, which begin at word ``packed`` of the block, as (n,) uint64 within ``out``.

    ``buffer`` and ``words`` are the block; ``out`` has room for 8 values more than n.
    """
    if lanes and width > 0:
        _add_lanes(words, packed, width, np.uint64(0), first >> 3, (first + n + 7) >> 3, out.view(np.uint8), 0, 8)
        return out[first & 7 : (first & 7) + n]
    _unpack_string(buffer, words, packed, width, first, n, out)
    return out[:n]


@njit
def _unpack_string(buffer: Array, words: Array, packed: int, width: int, first: int, n: int, out: Array) -> None:
    """As ``_unpack``, of values one after another in a bit string."""
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
def _restart_row(words: Array, k: int) -> Any:
    """The row of restart k of a delta block."""
    return np.int64((words[3 + (k >> 1)] >> np.uint64((k & 1) * 32)) & np.uint64(0xFFFFFFFF))


@njit
def _restarts(words: Array, width: int, lanes: bool, n_rows: int, row: int, stop: int) -> Any:
    """Header of a delta block: (whether it is sound, number of restarts, the last restart at or before ``row``)."""
    if len(words) < 3 or words[2] > np.uint64(n_rows):
        return False, 0, 0
    n = np.int64(words[2])
    if 24 + (n * 4 + 7) // 8 * 8 + n * 8 + _packed_bytes(n_rows, width, lanes) != len(words) * 8:
        return False, 0, 0
    previous = -1
    k = 0
    for r in range(n):
        at = _restart_row(words, r)
        if at <= previous or at >= n_rows:
            return False, 0, 0
        previous = at
        if at <= row:
            k = r
    if row < stop and (n == 0 or _restart_row(words, 0) != 0):
        return False, 0, 0
    return True, n, k


@njit
def _store(words: Array, n: int, out: Array, at: int, itemsize: int) -> None:
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
def _look_up(codes: Array, table: Array, out: Array, at: int, itemsize: int) -> bool:
    """``table[code]`` of each code at item ``at`` of ``out``; False where a code is not below ``len(table)``."""
    largest = np.uint64(0)
    for i in range(len(codes)):
        largest = max(largest, codes[i])
    if len(codes) > 0 and largest >= np.uint64(len(table)):
        return False
    if itemsize == 8:
        wide = out[at * 8 : (at + len(codes)) * 8].view(np.uint64)
        for i in range(len(codes)):
            wide[i] = table[codes[i]]
        return True
    for i in range(len(codes)):
        codes[i] = table[codes[i]]
    _store(codes, len(codes), out, at, itemsize)
    return True


@njit
def _sum_deltas(words: Array, values: int, n_restarts: int, k: int, row: int, q: Array, value: Any) -> Any:
    """Values in place of the deltas of rows [row, row + len(q)); ``value`` is that of the row before.

    ``values`` is the word of the first restart's value, k the first restart at or after ``row``; returns the last value
    and the first restart after these rows.
    """
    min_delta, scale = words[0], words[1]
    i, n = 0, len(q)
    while i < n:
        following = _restart_row(words, k) - row if k < n_restarts else n
        steps = q[i : min(n, following)]
        for j in range(len(steps)):
            value += min_delta + steps[j] * scale
            steps[j] = value
        i += len(steps)
        if i < n:
            value = words[values + k]
            q[i] = value
            k += 1
            i += 1
    return value, k


@njit
def _raw(
    buffer: Array, words: Array, width: int, row: int, out: Array, at: int, n: int, itemsize: int, scratch: Array
) -> None:
    """Codec 6: rows [row, row + n), sign-extended or cut to the output's width."""
    if width == itemsize * 8:
        _copy(buffer[row * itemsize :], out[at * itemsize : (at + n) * itemsize])
        return
    spare = np.int64(64 - width)
    for done in range(0, n, CHUNK):
        size = min(CHUNK, n - done)
        for i in range(size):
            bit = (row + done + i) * width
            word = words[bit >> 6] >> np.uint64(bit & 63)
            scratch[i] = np.int64(word << np.uint64(spare)) >> spare
        _store(scratch, size, out, at + done, itemsize)


@njit
def _affine(
    buffer: Array,
    words: Array,
    width: int,
    lanes: bool,
    row: int,
    stop: int,
    out: Array,
    at: int,
    itemsize: int,
    scratch: Array,
) -> None:
    """Codec 2: rows [row, stop)."""
    base, scale = words[0], words[1]
    direct = lanes and width > 0 and scale == np.uint64(1)
    while row < stop:
        # Whole groups of eight go straight to the output.
        if direct and (row & 7) == 0 and stop - row >= 8:
            last = stop >> 3
            _add_lanes(words, 2, width, base, row >> 3, last, out, at * itemsize, itemsize)
            at += (last << 3) - row
            row = last << 3
            continue
        n = min(8 - (row & 7) if direct else CHUNK, stop - row)
        q = _unpack(buffer, words, 2, width, lanes, row, n, scratch)
        for i in range(n):
            q[i] = base + q[i] * scale
        _store(q, n, out, at, itemsize)
        row, at = row + n, at + n


@njit
def _decode_packed(
    buffer: Array,
    words: Array,
    packed: int,
    codec: int,
    width: int,
    lanes: bool,
    n_restarts: int,
    k: int,
    row: int,
    stop: int,
    table: Array,
    out: Array,
    at: int,
    itemsize: int,
    scratch: Array,
) -> bool:
    """Rows [row, stop) of a block of codec 3 to 5 with sound sizes; False where a code is not in ``table``.

    A delta block is summed from its restart k, so rows before ``row`` are decoded and not stored.
    """
    first = _restart_row(words, k) if codec == DELTA else row
    value = np.uint64(0)
    while first < stop:
        n = min(CHUNK, stop - first)
        q = _unpack(buffer, words, packed, width, lanes, first, n, scratch)
        if codec == DELTA:
            value, k = _sum_deltas(words, packed - n_restarts, n_restarts, k, first, q, value)
            skipped = max(row - first, 0)
            if skipped < n:
                _store(q[skipped:], n - skipped, out, at + first + skipped - row, itemsize)
        elif not _look_up(q, table, out, at + first - row, itemsize):
            return False
        first += n
    return True


@njit
def _decode_run(
    buffer: Array,
    words: Array,
    codec: int,
    width: int,
    lanes: bool,
    n_rows: int,
    row: int,
    stop: int,
    dictionary: Array,
    out: Array,
    at: int,
    itemsize: int,
    scratch: Array,
) -> bool:
    """Rows [row, stop) of a block (``buffer`` and ``words``: the same bytes); False where it is damaged."""
    length = len(buffer)
    if codec == ZERO:
        if length == 0:
            out[at * itemsize : (at + stop - row) * itemsize] = 0
        return length == 0
    if codec == CONSTANT:
        if length != 8:
            return False
        scratch[:] = words[0]
        for done in range(0, stop - row, CHUNK):
            _store(scratch, min(CHUNK, stop - row - done), out, at + done, itemsize)
        return True
    if codec == RAW:
        if (width != 8 and width != 16 and width != 32 and width != 64) or length != (
            n_rows * (width // 8) + 7
        ) // 8 * 8:
            return False
        _raw(buffer, words, width, row, out, at, stop - row, itemsize, scratch)
        return True
    n_restarts, k = 0, 0
    packed = length - _packed_bytes(n_rows, width, lanes)
    table = dictionary
    if codec == PACKED:
        if packed != 16:
            return False
        _affine(buffer, words, width, lanes, row, stop, out, at, itemsize, scratch)
        return True
    if codec == DELTA:
        sound, n_restarts, k = _restarts(words, width, lanes, n_rows, row, stop)
        if not sound:
            return False
    elif codec == LOCAL:
        if length < 8 or words[0] > np.uint64(length // 8) or packed != 8 + 8 * np.int64(words[0]):
            return False
        table = words[1 : packed // 8]
    elif codec != DICTIONARY or packed != 0:
        return False
    return _decode_packed(
        buffer,
        words,
        packed // 8,
        codec,
        width,
        lanes,
        n_restarts,
        k,
        row,
        stop,
        table,
        out,
        at,
        itemsize,
        scratch,
    )


@njit
def _decode_runs(
    address: Array,
    source_size: Array,
    source: Array,
    block_off: Array,
    block_len: Array,
    codec: Array,
    width: Array,
    dictionary: Array,
    dict_off: Array,
    dict_n: Array,
    block: Array,
    n_rows: Array,
    row_from: Array,
    row_to: Array,
    out_pos: Array,
    out: Array,
    itemsize: int,
    scratch: Array,
) -> int:
    items = len(out) // itemsize
    for i in range(len(block)):
        b = block[i]
        if b < 0 or b >= len(source):
            return i
        where, begin, length, rows = source[b], block_off[b], block_len[b], n_rows[i]
        row, stop, at = row_from[i], row_to[i], out_pos[i]
        if where < 0 or where >= len(address):
            return i
        limit = source_size[where]
        if begin < 0 or begin > limit or (begin & 7) != 0 or length < 0 or length > limit - begin or (length & 7) != 0:
            return i
        bits: Any = np.int64(width[b] & (LANES - 1))
        if rows < 0 or rows > MAX_ROWS or row < 0 or row > stop or stop > rows or bits > 64:
            return i
        if at < 0 or at > items or stop - row > items - at:
            return i
        first, size = np.int64(0), np.int64(0)
        if codec[b] == DICTIONARY and len(dict_n) > 0:
            first, size = dict_off[b], dict_n[b]
        if first < 0 or first > len(dictionary) or size < 0 or size > len(dictionary) - first:
            return i
        table = dictionary[first : first + size]
        kind: Any = np.int64(codec[b])
        place = pointer(address[where] + begin)
        buffer, words = carray(place, (length,), np.uint8), carray(place, (length // 8,), np.uint64)
        lanes = (width[b] & LANES) != 0
        if not _decode_run(buffer, words, kind, bits, lanes, rows, row, stop, table, out, at, itemsize, scratch):
            return i
    return -1


def decode_fixed(
    buffers: Buffers,
    source: Array,
    block_off: Array,
    block_len: Array,
    codec: Array,
    width: Array,
    dictionary: Array,
    dict_off: Array,
    dict_n: Array,
    block: Array,
    n_rows: Array,
    row_from: Array,
    row_to: Array,
    out_pos: Array,
    out: Array,
) -> int:
    """Decode rows [row_from, row_to) of stripe block ``block[i]`` into ``out[out_pos[i]:]``, for every run i.

    Args:
        buffers: what holds the blocks.
        source: (C,) int64, which of them each block lies in.
        block_off: (C,) int64 byte offset of each block, a multiple of 8.
        block_len: (C,) int64 bytes of each block.
        codec: (C,) uint8.
        width: (C,) uint8 bits a packed value, and the flag ``LANES``.
        dictionary: uint64 words of segment dictionaries, one after another.
        dict_off: (C,) int64 first word of the dictionary that each block uses (codec 4 alone); or empty.
        dict_n: (C,) int64 words in it (codec 4 alone); or empty.
        block: (n,) int64 block of each run.
        n_rows: (n,) int64 values in the whole block.
        row_from: (n,) int64 first row wanted (inclusive).
        row_to: (n,) int64 last row wanted (exclusive).
        out_pos: (n,) int64 position in ``out`` of the first row wanted.
        out: contiguous, of any dtype of 1, 2, 4 or 8 bytes; a word is cut to its width.

    Returns:
        -1, or the index of the first run whose block, rows or output range is impossible. Nothing outside
        ``buffers``, ``dictionary`` and the run's own output range is ever read or written.
    """
    # As bytes, every dtype of the output is served by one compilation.
    flat = out.view(np.uint8)
    found: int = _decode_runs(
        buffers.address,
        buffers.size,
        source,
        block_off,
        block_len,
        codec,
        width,
        dictionary if dictionary.flags.writeable else dictionary.copy(),
        dict_off,
        dict_n,
        block,
        n_rows,
        row_from,
        row_to,
        out_pos,
        flat,
        out.itemsize,
        np.empty(CHUNK + 8, np.uint64),
    )
    return found


@njit
def copy_ranges(src: Array, src_off: Array, length: Array, dst: Array, dst_off: Array) -> int:
    """``dst[dst_off[i]:][:length[i]] = src[src_off[i]:][:length[i]]`` for every i, in order (uint8, int64).

    Returns -1, or the index of the first range that does not lie in its array; the ranges before it are copied.
    """
    for i in range(len(src_off)):
        a, b, n = src_off[i], dst_off[i], length[i]
        if n < 0 or a < 0 or b < 0 or a > len(src) or b > len(dst) or n > len(src) - a or n > len(dst) - b:
            return i
        _copy(src[a:], dst[b : b + n])
    return -1
