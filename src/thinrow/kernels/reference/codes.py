"""Decoding of fixed-width blocks as codes into a dictionary, a run at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.buffers import Buffers
from thinrow.kernels.reference.blocks import (
    LANES,
    MAX_LOCAL,
    MAX_ROWS,
    PATCHED,
    Damaged,
    check,
    open_marked,
    packed_bytes,
    unpack,
    unpack_all,
)

Array = npt.NDArray[Any]

MAX_WORDS = (1 << 31) - 1
MAX_CODE_BITS = 31


def _block(
    buffers: Buffers, source: Array, off: Array, length: Array, width: Array, b: int, rows: int, row: int, stop: int
) -> Array:
    """The bytes of block b. Raises Damaged where they or the rows are impossible."""
    check(0 <= b < len(source) and 0 <= source[b] < len(buffers.arrays))
    buffer = buffers.arrays[int(source[b])]
    begin, size = int(off[b]), int(length[b])
    check(0 <= begin <= len(buffer) and begin % 8 == 0 and 0 <= size <= len(buffer) - begin and size % 8 == 0)
    check(0 <= row <= stop <= rows <= MAX_ROWS and (width[b] & (LANES - 1) <= 64 or width[b] == PATCHED))
    found: Array = buffer[begin : begin + size]
    return found


def _layout(block: Array, codec: int, width: int, rows: int, held: int) -> tuple[int, Array, Array] | None:
    """Codes of the segment dictionary, words of its own, and the code of each row of a block that holds codes, words
    of its own behind those of the dictionary; else None."""
    if codec not in (4, 5, 12, 13) or (
        width & (LANES - 1) > MAX_CODE_BITS and not (width == PATCHED and codec in (4, 13))
    ):
        return None
    words = block.view("<u8")
    if codec == 13:
        marked, own, codes = open_marked(block, width, rows)
        found = np.zeros(rows, np.uint64)
        # A code that no dictionary has, so that it is not taken for an own word.
        found[~marked] = np.where(codes < np.uint64(held), codes, np.uint64(1 << 40))
        found[marked] = held + np.arange(len(own))
        return held, own, found
    hot, own, packed = held, words[:0], block
    if codec == 5:
        check(len(words) > 0 and int(words[0]) <= len(words))
        n = int(words[0])
        hot, own, packed = 0, words[1 : 1 + n], block[8 + 8 * n :]
        check(len(own) == n)
    elif codec == 12:
        check(len(words) >= 3)
        counts, base, own_width = (int(v) for v in words[:3])
        hot, n = counts & 0xFFFFFFFF, counts >> 32
        check(own_width < 256 and n <= MAX_LOCAL and hot <= held and own_width & (LANES - 1) <= 64)
        at = 24 + packed_bytes(n, own_width)
        check(at <= len(block))
        own, packed = unpack(block[24:at], n, own_width) + np.uint64(base), block[at:]
    return hot, own, unpack_all(packed, rows, width)


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
    """As ``thinrow.kernels.numba.codes.place_words``."""
    total = 0
    for i, b in enumerate(block.tolist()):
        rows, row, stop = int(n_rows[i]), int(row_from[i]), int(row_to[i])
        try:
            data = _block(buffers, source, block_off, block_len, width, b, rows, row, stop)
            held = max(int(dict_n[b]), 0) if len(dict_n) else 0
            layout = _layout(data, int(codec[b]), int(width[b]), rows, held)
        except Damaged:
            return i, total
        values[i] = 0
        if layout is not None and i > 0 and block[i - 1] == b and n_rows[i - 1] == rows:
            place[i] = place[i - 1]
            continue
        place[i] = total
        if layout is None:
            values[i] = min(stop - row, 1) if codec[b] in (0, 1) else stop - row
        total += int(values[i]) if layout is None else len(layout[1])
    return -1, total


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
    """As ``thinrow.kernels.numba.codes.decode_codes``."""
    if len(block) and n_words + len(tail) > MAX_WORDS:
        return 0
    for i, b in enumerate(block.tolist()):
        rows, row, stop, at, first = (int(a[i]) for a in (n_rows, row_from, row_to, out_pos, place))
        try:
            data = _block(buffers, source, block_off, block_len, width, b, rows, row, stop)
            check(0 <= at <= len(out) and stop - row <= len(out) - at and 0 <= first <= len(tail))
            coded = len(dict_n) > 0 and codec[b] in (4, 12, 13)
            held, offset = (int(dict_n[b]), int(dict_off[b])) if coded else (0, 0)
            check(held >= 0 and 0 <= offset <= n_words and held <= n_words - offset)
            layout = _layout(data, int(codec[b]), int(width[b]), rows, held)
            if layout is None:
                places = first + np.arange(stop - row) * (codec[b] not in (0, 1))
                check(not len(places) or int(places[-1]) < len(tail))
                out[at : at + stop - row] = n_words + places
                continue
            hot, own, found = layout
            check(len(own) <= len(tail) - first)
            check(bool((found[row:stop] < np.uint64(hot + len(own))).all()))
            codes = found[row:stop].astype(np.int64)
        except Damaged:
            return i
        tail[first : first + len(own)] = own.astype(f"u{tail.itemsize}").view(tail.dtype)
        out[at : at + stop - row] = np.where(codes < hot, codes + offset, codes - hot + n_words + first)
    return -1
