"""Decoding of fixed-width blocks (codecs 0 to 6 and 8 to 13 of docs/format/archive-v2.md), many runs in one call.

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
from thinrow.kernels.numba.direct import decode_direct
from thinrow.kernels.numba.intrinsics import address, pointer, prefix8
from thinrow.kernels.numba.jit import linked, njit
from thinrow.kernels.numba.lanes import LANES, packed_bytes
from thinrow.kernels.numba.nested import ABSENT, DECIMAL, MARKED, MIXED, RUNS, merge, open_marked, open_nested, spread
from thinrow.kernels.numba.unpack import (
    CHUNK,
    MAX_LOCAL,
    ROOM,
    SCRATCH,
    affine,
    in_bounds,
    ones,
    packed_size,
    scaled,
    store,
    unpack,
    workspace,
)

Array = npt.NDArray[Any]

ZERO, CONSTANT, PACKED, DELTA, DICTIONARY, LOCAL, RAW = 0, 1, 2, 3, 4, 5, 6
#: The float64 of these bits plus a number below 2^51 is the float64 of these bits plus that integer: so integers
#: become floats in vector registers that cannot convert them.
_MAGIC_BITS, _MAGIC = np.uint64(0x4338000000000000), 6755399441055744.0
_POWERS = np.array([10.0**e for e in range(23)])


@njit
def _copy(src: Array, dst: Array) -> None:
    """``dst[:] = src[:len(dst)]``; a loop, because slice assignment in numba first copies what might overlap."""
    for i in range(len(dst)):
        dst[i] = src[i]


@njit
def _fills(words: Array, packed: Any, n: Any, width: Any, lanes: Any) -> bool:
    """Whether n packed values from word ``packed`` on are sound and end where the block does."""
    size = packed_size(words, packed, n, width, lanes)
    return bool(size >= 0 and packed * 8 + size == len(words) * 8)


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
    packed = 24 + (n * 4 + 7) // 8 * 8 + n * 8
    if not _fills(words, packed // 8, n_rows, width, lanes):
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
    store(codes, len(codes), out, at, itemsize)
    return True


@njit
def _running(steps: Array, value: Any, out: Array) -> Any:
    """Sums of ``value`` and the steps so far into ``out``, which may be where the steps are; returns the last."""
    whole = len(steps) & ~7
    for i in range(0, whole, 8):
        value += prefix8(steps.ctypes.data + 8 * i, value, out.ctypes.data + 8 * i)
    for i in range(whole, len(steps)):
        value += steps[i]
        out[i] = value
    return value


@njit
def _delta(
    buffer: Array,
    words: Array,
    n_rows: int,
    width: int,
    lanes: bool,
    n_restarts: int,
    k: int,
    row: int,
    stop: int,
    out: Array,
    at: int,
    itemsize: int,
    scratch: Array,
) -> None:
    """Rows [row, stop) of a block of codec 3 that is sound, summed from its restart k: what is before ``row`` is added
    up and not stored."""
    values = 3 + (n_restarts + 1) // 2
    packed, first, value = values + n_restarts, _restart_row(words, k), np.uint64(0)
    while first < stop:
        n = min(CHUNK, stop - first)
        steps = scaled(buffer, words, packed, n_rows, width, lanes, words[0], words[1], first, n, scratch)
        hidden = min(max(row - first, 0), n)
        shown = steps[hidden:]
        if itemsize == 8:
            place = at + first + hidden - row
            shown = out[place * 8 : (place + n - hidden) * 8].view(np.uint64)
        i = 0
        while i < n:
            following = min(n, _restart_row(words, k) - first if k < n_restarts else n)
            begin = max(i, min(hidden, following))
            for step in steps[i:begin]:
                value += step
            # Views from 0 on: an index that might be negative is looked at each time.
            value = _running(steps[begin:following], value, shown[begin - hidden :])
            i = following
            if i < n:
                value = words[values + k]
                if i >= hidden:
                    shown[i - hidden] = value
                k, i = k + 1, i + 1
        if itemsize != 8:
            store(shown, n - hidden, out, at + first + hidden - row, itemsize)
        first += n


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
        store(scratch, size, out, at + done, itemsize)


@njit
def _coded(
    buffer: Array,
    words: Array,
    packed: int,
    n_rows: int,
    width: int,
    lanes: bool,
    row: int,
    stop: int,
    table: Array,
    out: Array,
    at: int,
    itemsize: int,
    scratch: Array,
) -> bool:
    """Rows [row, stop) of codes that lie from word ``packed`` on, looked up; False where one is not in ``table``."""
    while row < stop:
        n = min(CHUNK, stop - row)
        codes = unpack(buffer, words, packed, n_rows, width, lanes, row, n, scratch)
        if not _look_up(codes, table, out, at, itemsize):
            return False
        row, at = row + n, at + n
    return True


@njit
def _decimal(
    buffer: Array,
    words: Array,
    n_rows: int,
    width: int,
    lanes: bool,
    row: int,
    stop: int,
    out: Array,
    at: int,
    itemsize: int,
    scratch: Array,
) -> bool:
    """Codec 11: rows [row, stop) of a block whose size is sound."""
    exponent, bits = words[1] & np.uint64(0xFF), words[1] >> np.uint64(8)
    if exponent >= np.uint64(len(_POWERS)) or (bits != np.uint64(32) and bits != np.uint64(64)):
        return False
    base, power = words[0] + _MAGIC_BITS, _POWERS[exponent]
    while row < stop:
        n = min(CHUNK, stop - row)
        q = unpack(buffer, words, 2, n_rows, width, lanes, row, n, scratch)
        for i in range(n):
            q[i] += base
        number = q.view(np.float64)
        target = out[at * itemsize : (at + n) * itemsize]
        if bits == np.uint64(32) and itemsize == 4:
            single = target.view(np.float32)
            for i in range(n):
                single[i] = (number[i] - _MAGIC) / power
        else:
            half = q.view(np.float32)
            for i in range(n):
                value = (number[i] - _MAGIC) / power
                if bits == np.uint64(64):
                    number[i] = value
                else:
                    half[2 * i], half[2 * i + 1] = value, np.float32(0)
            store(q, n, out, at, itemsize)
        row, at = row + n, at + n
    return True


@njit
def _mixed(
    buffer: Array,
    words: Array,
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
    room: Array,
) -> bool:
    """Codec 12: rows [row, stop)."""
    if len(words) < 3 or words[2] > np.uint64(0xFF):
        return False
    n_hot, n_local = np.int64(words[0] & np.uint64(0xFFFFFFFF)), np.int64(words[0] >> np.uint64(32))
    local_width, local_lanes = np.int64(words[2]) & (LANES - 1), np.int64(words[2]) >= LANES
    if n_local > MAX_LOCAL or n_hot > len(dictionary) or local_width > 64 or width > 64:
        return False
    packed = 24 + packed_bytes(n_local, local_width, local_lanes)
    if packed + packed_bytes(n_rows, width, lanes) != len(buffer):
        return False
    local = unpack(buffer, words, 3, n_local, local_width, local_lanes, 0, n_local, room)
    for i in range(n_local):
        local[i] += words[1]
    if n_hot == 0 or n_local == 0:
        table = local if n_hot == 0 else dictionary[:n_hot]
        return _coded(buffer, words, packed // 8, n_rows, width, lanes, row, stop, table, out, at, itemsize, scratch)
    while row < stop:
        n = min(CHUNK, stop - row)
        codes = unpack(buffer, words, packed // 8, n_rows, width, lanes, row, n, scratch)
        largest = np.uint64(0)
        for i in range(n):
            largest = max(largest, codes[i])
        if largest >= np.uint64(n_hot + n_local):
            return False
        for i in range(n):
            code = np.int64(codes[i])
            # Both are loaded and one is picked: no branch that a processor would guess wrong.
            hot, cold = dictionary[min(code, n_hot - 1)], local[max(code, n_hot) - n_hot]
            codes[i] = hot if code < n_hot else cold
        store(codes, n, out, at, itemsize)
        row, at = row + n, at + n
    return True


@njit
def _marked(
    buffer: Array,
    words: Array,
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
    room: Array,
) -> bool:
    """Codec 13: rows [row, stop)."""
    own, own_width, own_lanes, begin, packed = open_marked(words, n_rows)
    if own < 0 or not _fills(words, packed, n_rows - own, width, lanes):
        return False
    bitmap, one = words[2:begin], np.uint64(1)
    while row < stop:
        n = min(CHUNK, stop - row)
        first = ones(bitmap, row)
        held = ones(bitmap, row + n) - first
        codes = unpack(buffer, words, packed, n_rows - own, width, lanes, row - first, n - held, scratch)
        if not _look_up(codes, dictionary, scratch.view(np.uint8), 0, 8):
            return False
        mine = scaled(buffer, words, begin, own, own_width, own_lanes, words[1], one, first, held, room)
        both = room[CHUNK + 8 : 2 * CHUNK + 8][:n]
        merge(bitmap, row, scratch, mine, both)
        store(both, n, out, at, itemsize)
        row, at = row + n, at + n
    return True


@njit
def _nested(
    buffer: Array,
    words: Array,
    codec: int,
    n_rows: int,
    row: int,
    stop: int,
    dictionary: Array,
    out: Array,
    at: int,
    itemsize: int,
    scratch: Array,
    room: Array,
) -> bool:
    """Rows [row, stop) of a block of codec 8 to 10: the plain block within goes to the beginning of the output, and
    from there to all rows."""
    sound, inner, n, first, last = open_nested(words, codec == RUNS, n_rows, row, stop)
    if not sound:
        return False
    target = out[at * itemsize : (at + stop - row) * itemsize]
    if codec == ABSENT:
        # The fill value and what is present are 1 and 0 here.
        target[:] = 0
    else:
        head = words[0] if codec == RUNS else words[1]
        kind = np.int64((head >> np.uint64(32)) & np.uint64(0xFF))
        bits = np.int64((head >> np.uint64(40)) & np.uint64(0xFF))
        held, values = buffer[inner * 8 :], words[inner:]
        width, lanes = bits & (LANES - 1), bits >= LANES
        place, begin, table = address(target), address(held), address(dictionary)
        spare, other = address(scratch), address(room)
        if not decode_direct(
            begin, len(held), kind, bits, n, first, last, table, len(dictionary), place, itemsize, spare, other
        ) and not _decode_plain(
            held, values, kind, width, lanes, n, first, last, dictionary, out, at, itemsize, scratch, room
        ):  # fmt: skip
            return False
    if itemsize == 8:
        spread(target.view(np.uint64), words, codec, row, first, last)
    elif itemsize == 4:
        spread(target.view(np.uint32), words, codec, row, first, last)
    elif itemsize == 2:
        spread(target.view(np.uint16), words, codec, row, first, last)
    else:
        spread(target, words, codec, row, first, last)
    return True


@njit
def _decode_plain(
    buffer: Array,
    words: Array,
    codec: Any,
    width: Any,
    lanes: Any,
    n_rows: Any,
    row: int,
    stop: int,
    dictionary: Array,
    out: Array,
    at: int,
    itemsize: int,
    scratch: Array,
    room: Array,
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
            store(scratch, min(CHUNK, stop - row - done), out, at + done, itemsize)
        return True
    if codec == RAW:
        if (
            lanes
            or (width != 8 and width != 16 and width != 32 and width != 64)
            or length != (n_rows * (width // 8) + 7) // 8 * 8
        ):
            return False
        _raw(buffer, words, width, row, out, at, stop - row, itemsize, scratch)
        return True
    if codec == MIXED:
        return _mixed(buffer, words, width, lanes, n_rows, row, stop, dictionary, out, at, itemsize, scratch, room)
    if codec == MARKED:
        return _marked(buffer, words, width, lanes, n_rows, row, stop, dictionary, out, at, itemsize, scratch, room)
    if codec == PACKED:
        if not _fills(words, 2, n_rows, width, lanes):
            return False
        affine(buffer, words, 2, n_rows, width, lanes, words[0], words[1], row, stop, out, at, itemsize, scratch)
        return True
    if codec == DECIMAL:
        return _fills(words, 2, n_rows, width, lanes) and _decimal(
            buffer, words, n_rows, width, lanes, row, stop, out, at, itemsize, scratch
        )
    if codec == DELTA:
        sound, n_restarts, k = _restarts(words, width, lanes, n_rows, row, stop)
        if not sound:
            return False
        # Of no rows there need not be a restart.
        if row < stop:
            _delta(buffer, words, n_rows, width, lanes, n_restarts, k, row, stop, out, at, itemsize, scratch)
        return True
    packed: Any = 0
    table = dictionary
    if codec == LOCAL:
        if length < 8 or words[0] > np.uint64(length // 8):
            return False
        packed = 1 + np.int64(words[0])
        table = words[1:packed]
    elif codec != DICTIONARY:
        return False
    return _fills(words, packed, n_rows, width, lanes) and _coded(
        buffer, words, packed, n_rows, width, lanes, row, stop, table, out, at, itemsize, scratch
    )


@linked
def decode_rows(
    at: int, length: int, codec: int, width: int, n_rows: int, row: int, stop: int, table: int, n_table: int,
    out: int, itemsize: int, scratch: int, room: int,
) -> int:  # fmt: skip
    """Rows [row, stop) of the block of ``length`` bytes at an address, to the items at ``out``; 0 where it is damaged.

    Codec and width are the header's; what lies where, and that the rows are the block's, the caller has checked.
    ``table`` is the address of the segment dictionary of ``n_table`` words; ``scratch`` and ``room`` are those of
    ``workspace``.
    """
    if decode_direct(
        at, length, codec, width, n_rows, row, stop, table, n_table, out, itemsize, scratch, room
    ):  # fmt: skip
        return 1
    bits, lanes = width & (LANES - 1), (width & LANES) != 0
    begin = pointer(at)
    buffer, words = carray(begin, (length,), np.uint8), carray(begin, (length // 8,), np.uint64)
    target = carray(pointer(out), ((stop - row) * itemsize,), np.uint8)
    dictionary = carray(pointer(table), (n_table,), np.uint64)
    spare, other = carray(pointer(scratch), (SCRATCH,), np.uint64), carray(pointer(room), (ROOM,), np.uint64)
    if RUNS <= codec <= ABSENT:
        return _nested(buffer, words, codec, n_rows, row, stop, dictionary, target, 0, itemsize, spare, other)
    return _decode_plain(
        buffer, words, codec, bits, lanes, n_rows, row, stop, dictionary, target, 0, itemsize, spare, other
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
    room: Array,
) -> int:
    items = len(out) // itemsize
    for i in range(len(block)):
        b, rows, row, stop, at = block[i], n_rows[i], row_from[i], row_to[i], out_pos[i]
        if not in_bounds(source_size, source, block_off, block_len, width, b, rows, row, stop):
            return i
        if at < 0 or at > items or stop - row > items - at:
            return i
        first, size = np.int64(0), np.int64(0)
        if (codec[b] == DICTIONARY or codec[b] >= RUNS) and len(dict_n) > 0:
            first, size = dict_off[b], dict_n[b]
        if first < 0 or first > len(dictionary) or size < 0 or size > len(dictionary) - first:
            return i
        table = dictionary[first : first + size]
        begin, place = address[source[b]] + block_off[b], out.ctypes.data + at * itemsize
        if not decode_rows(
            begin, block_len[b], codec[b], width[b], rows, row, stop, table.ctypes.data, len(table), place, itemsize,
            scratch.ctypes.data, room.ctypes.data,
        ):  # fmt: skip
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
        dict_off: (C,) int64 first word of the dictionary that each block uses (codecs 4, 8, 9 and 12); or empty.
        dict_n: (C,) int64 words in it; or empty.
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
        *workspace(),
    )
    return found
