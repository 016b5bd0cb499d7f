"""Decoding of fixed-width blocks as codes into a dictionary, where they hold codes; many runs in one call.

Worked example: segment words ``[7, 9]`` and a block of codec 12 with n_hot 2, the words ``[40, 50]`` of its own and
codes ``[0, 3, 1, 2]``. Its words go to the dictionary of the batch behind those of the segments, ``[7, 9, 40, 50]``,
and the codes are these codes. Behind another block's three words its own would be at 5, and the codes
``[0, 6, 1, 5]``. Words of a block are written once, however many runs lie in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from thinrow.core.buffers import Buffers
from thinrow.kernels.numba.intrinsics import pointer
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.lanes import LANES, PATCHED, packed_bytes
from thinrow.kernels.numba.nested import merge, open_marked
from thinrow.kernels.numba.unpack import CHUNK, MAX_LOCAL, SCRATCH, affine, in_bounds, ones, packed_size, store, unpack

Array = npt.NDArray[Any]

ZERO, CONSTANT, DICTIONARY, LOCAL, MIXED, MARKED = 0, 1, 4, 5, 12, 13
#: Codes are int32.
MAX_WORDS = (1 << 31) - 1
#: Codes of more bits are decoded as values: no writer needs them.
MAX_CODE_BITS = 31


@njit
def _layout(words: Array, codec: Any, width: Any, lanes: Any, rows: int, held: Any) -> Any:
    """What a block (its ``words``) that holds codes looks like: (whether it does, whether it is sound, codes of the
    segment dictionary, words of its own, word at which its codes begin)."""
    bad = True, False, 0, 0, 0
    length = len(words) * 8
    if (codec != DICTIONARY and codec != LOCAL and codec != MIXED and codec != MARKED) or (
        width > MAX_CODE_BITS and (width != PATCHED or (codec != DICTIONARY and codec != MARKED))
    ):
        return False, True, 0, 0, 0
    if codec == DICTIONARY:
        return True, packed_size(words, 0, rows, width, lanes) == length, held, 0, 0
    if codec == MARKED:
        own, _, _, _, packed = open_marked(words, rows)
        if own < 0:
            return bad
        codes = packed_size(words, packed, rows - own, width, lanes)
        return True, codes >= 0 and 8 * packed + codes == length, held, own, packed
    codes = packed_bytes(rows, width, lanes)
    if codec == LOCAL:
        if length < 8 or words[0] > np.uint64(length // 8):
            return bad
        own = np.int64(words[0])
        return True, 8 + 8 * own + codes == length, 0, own, 1 + own
    if len(words) < 3 or words[2] > np.uint64(0xFF):
        return bad
    hot, own = np.int64(words[0] & np.uint64(0xFFFFFFFF)), np.int64(words[0] >> np.uint64(32))
    own_width = np.int64(words[2]) & (LANES - 1)
    if own > MAX_LOCAL or hot > held or own_width > 64:
        return bad
    packed = 24 + packed_bytes(own, own_width, np.int64(words[2]) >= LANES)
    return True, packed + codes == length, hot, own, packed // 8


@njit
def _place(
    address: Array,
    source_size: Array,
    source: Array,
    block_off: Array,
    block_len: Array,
    codec: Array,
    width: Array,
    dict_n: Array,
    block: Array,
    n_rows: Array,
    row_from: Array,
    row_to: Array,
    place: Array,
    values: Array,
) -> Any:
    total = np.int64(0)
    for i in range(len(block)):
        b, rows, row, stop = block[i], n_rows[i], row_from[i], row_to[i]
        if not in_bounds(source_size, source, block_off, block_len, width, b, rows, row, stop):
            return i, total
        bits: Any = np.int64(width[b] & (LANES - 1))
        words = carray(pointer(address[source[b]] + block_off[b]), (block_len[b] // 8,), np.uint64)
        held = max(dict_n[b], 0) if len(dict_n) > 0 else np.int64(0)
        coded, sound, _, own, _ = _layout(words, codec[b], bits, (width[b] & LANES) != 0, rows, held)
        if not sound:
            return i, total
        if coded and i > 0 and block[i - 1] == b and n_rows[i - 1] == rows:
            place[i], values[i] = place[i - 1], 0
            continue
        place[i], values[i] = total, 0
        if coded:
            total += own
        else:
            values[i] = min(stop - row, 1) if codec[b] == ZERO or codec[b] == CONSTANT else stop - row
            total += values[i]
    return -1, total


@njit
def _shift(codes: Array, hot_end: Any, end: Any, shift: Any) -> bool:
    """Add ``shift`` (modulo 2^32) to codes from ``hot_end`` on; False where one is ``end`` or more."""
    beyond: Any = np.uint32(0)
    for i in range(len(codes)):
        code = codes[i]
        beyond |= np.uint32(code >= end)
        codes[i] = code + (shift if code >= hot_end else np.uint32(0))
    found: bool = beyond == 0
    return found


@njit
def _marked_codes(
    buffer: Array,
    words: Array,
    packed: Any,
    bits: Any,
    lanes: Any,
    codec: Any,
    rows: int,
    row: int,
    stop: int,
    held: Any,
    offset: Any,
    first: Any,
    out: Array,
    scratch: Array,
    room: Array,
) -> bool:
    """Codes of rows [row, stop) of a block of codec 13, or of codec 4 with patches, which is sound; ``first`` is the
    code of its first own word. False where a code is ``held`` or more."""
    own = np.int64(words[0] & np.uint64(0xFFFFFFFF)) if codec == MARKED else np.int64(0)
    bitmap, flat, at = words[2 : 2 + ((rows + 63) >> 6)], out.view(np.uint8), 0
    while row < stop:
        n = min(CHUNK, stop - row)
        begin = ones(bitmap, row) if own > 0 else np.int64(0)
        marked = ones(bitmap, row + n) - begin if own > 0 else np.int64(0)
        found = unpack(buffer, words, packed, rows - own, bits, lanes, row - begin, n - marked, scratch)
        largest = np.uint64(0)
        for i in range(len(found)):
            largest = max(largest, found[i])
            found[i] += np.uint64(offset)
        if len(found) > 0 and largest >= np.uint64(held):
            return False
        if own > 0:
            for i in range(marked):
                room[i] = first + begin + i
            both = room[CHUNK + 8 : 2 * CHUNK + 8][:n]
            merge(bitmap, row, found, room, both)
            found = both
        store(found, n, flat, at, 4)
        row, at = row + n, at + n
    return True


@njit
def _decode(
    address: Array,
    source_size: Array,
    source: Array,
    block_off: Array,
    block_len: Array,
    codec: Array,
    width: Array,
    n_words: int,
    dict_off: Array,
    dict_n: Array,
    block: Array,
    n_rows: Array,
    row_from: Array,
    row_to: Array,
    out_pos: Array,
    place: Array,
    tail: Array,
    out: Array,
    itemsize: int,
    scratch: Array,
    spare: Array,
) -> int:
    room, flat = len(tail) // itemsize, out.view(np.uint8)
    one: Any = np.uint64(1)
    for i in range(len(block)):
        b, rows, row, stop, at, first = block[i], n_rows[i], row_from[i], row_to[i], out_pos[i], place[i]
        if not in_bounds(source_size, source, block_off, block_len, width, b, rows, row, stop):
            return i
        if at < 0 or at > len(out) or stop - row > len(out) - at or first < 0 or first > room:
            return i
        held, offset = np.int64(0), np.int64(0)
        if len(dict_n) > 0 and (codec[b] == DICTIONARY or codec[b] == MIXED or codec[b] == MARKED):
            held, offset = dict_n[b], dict_off[b]
        if held < 0 or offset < 0 or offset > n_words or held > n_words - offset:
            return i
        bits: Any = np.int64(width[b] & (LANES - 1))
        lanes: Any = (width[b] & LANES) != 0
        length = block_len[b]
        begin = pointer(address[source[b]] + block_off[b])
        buffer, words = carray(begin, (length,), np.uint8), carray(begin, (length // 8,), np.uint64)
        coded, sound, hot, own, packed = _layout(words, codec[b], bits, lanes, rows, held)
        mine = out[at : at + stop - row]
        if not sound:
            return i
        if not coded:
            step = 0 if codec[b] == ZERO or codec[b] == CONSTANT else 1
            if (stop - row if step == 1 else min(stop - row, 1)) > room - first:
                return i
            for j in range(len(mine)):
                mine[j] = n_words + first + j * step
            continue
        if own > room - first:
            return i
        if own > 0 and (i == 0 or block[i - 1] != b or place[i - 1] != first):
            if codec[b] == LOCAL:
                store(words[1 : 1 + own], own, tail, first, itemsize)
            else:
                own_bits: Any = np.int64(words[2]) & (LANES - 1)
                own_lanes: Any = np.int64(words[2]) >= LANES
                at_word: Any = 3
                if codec[b] == MARKED:
                    _, own_bits, own_lanes, at_word, _ = open_marked(words, rows)
                affine(
                    buffer, words, at_word, own, own_bits, own_lanes, words[1], one, 0, own, tail, first, itemsize,
                    scratch,
                )  # fmt: skip
        if codec[b] == MARKED or bits == PATCHED:
            if not _marked_codes(
                buffer, words, packed, bits, lanes, codec[b], rows, row, stop, held, offset, n_words + first, mine,
                scratch, spare,
            ):  # fmt: skip
                return i
            continue
        base = offset if hot > 0 else n_words + first
        affine(buffer, words, packed, rows, bits, lanes, np.uint64(base), one, row, stop, flat, at, 4, scratch)
        shift = n_words + first - offset if hot > 0 else hot
        if not _shift(mine, np.uint32(base + hot), np.uint32(base + hot + own), np.uint32((shift - hot) & 0xFFFFFFFF)):
            return i
    return -1


def place_words(
    buffers: Buffers,
    source: Array,
    block_off: Array,
    block_len: Array,
    codec: Array,
    width: Array,
    dict_n: Array,
    block: Array,
    n_rows: Array,
    row_from: Array,
    row_to: Array,
    place: Array,
    values: Array,
) -> tuple[int, int]:
    """Where the words that are in no segment dictionary go, for every run of ``decode_codes`` (arguments as there).

    Args:
        place: (n,) int64, out: first of the run's words; runs one after another in one block have the same.
        values: (n,) int64, out: how many of its values, from ``row_from`` on, the caller decodes to that place; 0 where
            the block holds codes.

    Returns:
        -1, or the index of the first run whose block or rows are impossible; and how many words there are.
    """
    bad, total = _place(
        buffers.address,
        buffers.size,
        source,
        block_off,
        block_len,
        codec,
        width,
        dict_n,
        block,
        n_rows,
        row_from,
        row_to,
        place,
        values,
    )
    return int(bad), int(total)


def decode_codes(
    buffers: Buffers,
    source: Array,
    block_off: Array,
    block_len: Array,
    codec: Array,
    width: Array,
    n_words: int,
    dict_off: Array,
    dict_n: Array,
    block: Array,
    n_rows: Array,
    row_from: Array,
    row_to: Array,
    out_pos: Array,
    place: Array,
    tail: Array,
    out: Array,
) -> int:
    """Codes of rows [row_from, row_to) of stripe block ``block[i]`` into ``out[out_pos[i]:]``, for every run i.

    Codes below ``n_words`` are of the segment dictionaries, code ``n_words + k`` is of ``tail[k]``. Arguments that are
    not told here are as of ``decode_fixed``.

    Args:
        n_words: words of all segment dictionaries.
        place: (n,) int64 where each run's words go in ``tail``, as ``place_words`` says.
        tail: contiguous, of the column's dtype: gets the words of blocks that hold codes; those of other blocks are the
            caller's to decode.
        out: (m,) int32.

    Returns:
        -1, or the index of the first run whose block, rows, words or output range is impossible (0 where ``n_words``
        and ``tail`` are more than int32 counts). Nothing outside ``buffers``, ``tail`` and the run's own output range
        is ever read or written.
    """
    if len(block) and n_words + len(tail) > MAX_WORDS:
        return 0
    found: int = _decode(
        buffers.address,
        buffers.size,
        source,
        block_off,
        block_len,
        codec,
        width,
        n_words,
        dict_off,
        dict_n,
        block,
        n_rows,
        row_from,
        row_to,
        out_pos,
        place,
        tail.view(np.uint8),
        out.view(np.uint32),
        tail.itemsize,
        np.empty(SCRATCH, np.uint64),
        np.empty(SCRATCH, np.uint64),
    )
    return found
