"""Decoding of fixed-width blocks (codecs 0 to 6 and 8 to 13 of docs/format/archive-v2.md), a run at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.buffers import Buffers

Array = npt.NDArray[Any]

MAX_ROWS = 1 << 31
#: Flag of a block's width: its packed values lie in lanes.
LANES = 0x80
#: Width of packed values with patches, that flag among it: their head says the rest.
PATCHED = 0xFF
MAX_LOCAL = 4096
_MAGIC_BITS, _MAGIC = np.uint64(0x4338000000000000), 6755399441055744.0


class Damaged(Exception):
    """The block cannot be what a writer wrote."""


def check(holds: bool) -> None:
    """Raises Damaged where a condition does not hold."""
    if not holds:
        raise Damaged


def packed_bytes(n: int, width: int) -> int:
    """Bytes of n packed values: in eight lanes of whole words, or one after another and an extra word."""
    if width & LANES:
        return ((n + 7) // 8 * (width & (LANES - 1)) + 63) // 64 * 64
    return ((n * width + 63) // 64 + 1) * 8


def unpack(data: Array, n: int, width: int) -> Array:
    """All n packed values: (n,) uint64."""
    if not width & LANES:
        return _unpack_string(data, n, width)
    rows, width = (n + 7) // 8, width & (LANES - 1)
    lanes = data.view("<u8").reshape(-1, 8).T
    return np.stack(
        [_unpack_string(np.ascontiguousarray(lane).view(np.uint8), rows, width) for lane in lanes]
    ).T.ravel()[:n]


def _u64(block: Array, at: int, n: int) -> Array:
    words: Array = block[at : at + n * 8].view("<u8")
    return words


def take_packed(data: Array, n: int, width: int) -> tuple[Array, int]:
    """All n packed values that ``data`` begins with, which may have patches, and their bytes. Raises Damaged."""
    if width != PATCHED:
        size = packed_bytes(n, width)
        check(size <= len(data))
        return unpack(data[:size], n, width), size
    check(len(data) >= 8)
    head = int(_u64(data, 0, 1)[0])
    own, inner = head & 0xFFFFFFFF, head >> 32 & 0xFF
    if head >> 48 != 1:
        return _take_patches(data, n)
    at = 8 + (n + 63) // 64 * 8
    check(at <= len(data) and head >> 40 == 1 << 8 and (inner == PATCHED or inner & (LANES - 1) <= 64))
    bits = np.unpackbits(data[8:at], bitorder="little").astype(np.bool_)
    check(int(bits[:n].sum()) == own == int(bits.sum()))
    found, size = _take_patches(data[at:], own) if inner == PATCHED else take_packed(data[at:], own, inner)
    values = np.zeros(n, np.uint64)
    values[bits[:n]] = found
    return values, at + size


def _take_patches(data: Array, n: int) -> tuple[Array, int]:
    check(len(data) >= 8)
    head, groups = int(_u64(data, 0, 1)[0]), (n + 255) // 256
    own, low, high = head & 0xFFFFFFFF, head >> 32 & 0xFF, head >> 40 & 0xFF
    check(head >> 48 == 0 and own <= n and low >= 1 and high >= 1 and low + high <= 64)
    highs_at = 8 + (2 * groups + own + 7) // 8 * 8
    lanes_at = highs_at + (own * high + 63) // 64 * 8
    size = lanes_at + packed_bytes(n, low | LANES)
    check(size <= len(data))
    ends = data[8 : 8 + 2 * groups].view("<u2").astype(np.int64)
    counts = np.diff(ends, prepend=0)
    check(bool((counts >= 0).all()) and int(counts.sum()) == own)
    rows = np.repeat(np.arange(groups) * 256, counts) + data[8 + 2 * groups : 8 + 2 * groups + own]
    check(bool((np.diff(rows) > 0).all()) and (own == 0 or int(rows[-1]) < n))
    values = unpack(data[lanes_at:size], n, low | LANES)
    values[rows] += _unpack_string(data[highs_at:lanes_at], own, high) << np.uint64(low)
    return values, size


def unpack_all(data: Array, n: int, width: int) -> Array:
    """All n packed values, of which ``data`` are all bytes. Raises Damaged."""
    found, size = take_packed(data, n, width)
    check(size == len(data))
    return found


def _unpack_string(data: Array, n: int, width: int) -> Array:
    """All n packed values of a bit string: (n,) uint64."""
    bits = np.unpackbits(data, bitorder="little")[: n * width].reshape(n, width)
    values = np.zeros(n, np.uint64)
    for b in range(width):
        values |= bits[:, b].astype(np.uint64) << np.uint64(b)
    return values


def _delta(block: Array, width: int, n_rows: int, empty: bool) -> Array:
    check(len(block) >= 24 and int(_u64(block, 16, 1)[0]) <= n_rows)
    step, scale, count = _u64(block, 0, 3)
    n = int(count)
    values_at = 24 + (n * 4 + 7) // 8 * 8
    packed_at = values_at + 8 * n
    check(packed_at <= len(block))
    q = unpack_all(block[packed_at:], n_rows, width)
    rows = block[24 : 24 + 4 * n].view("<u4").astype(np.int64)
    check(bool((np.diff(rows) > 0).all()) and bool((rows < n_rows).all()))
    check(empty or (n > 0 and rows[0] == 0))
    moved = step + q * scale
    out = np.zeros(n_rows, np.uint64)
    for first, last, value in zip(rows, np.append(rows, n_rows)[1:], _u64(block, values_at, n), strict=True):
        moved[first] = value
        out[first:last] = np.cumsum(moved[first:last], dtype=np.uint64)
    return out


def _decode_block(
    block: Array, codec: int, width: int, n_rows: int, row: int, stop: int, dictionary: Array, first: int, size: int
) -> Array:
    """Rows [row, stop) of one block: uint64 words (raw: sign-extended)."""
    if codec == 4 or codec >= 8:
        check(first >= 0 and 0 <= size <= len(dictionary) - first)
    if codec in (8, 9, 10):
        return _decode_nested(block, codec, n_rows, row, stop, dictionary, first, size)
    if codec == 11:
        check(len(block) >= 16)
        return _decimal(block, unpack_all(block[16:], n_rows, width)[row:stop])
    if codec == 12:
        return _mixed(block, width, n_rows, row, stop, dictionary[first : first + size])
    if codec == 13:
        marked, own, codes = open_marked(block, width, n_rows)
        check(bool((codes[row - marked[:row].sum() : stop - marked[:stop].sum()] < np.uint64(size)).all()))
        words = np.zeros(n_rows, np.uint64)
        words[marked] = own
        table = np.append(dictionary[first : first + size], np.uint64(0))
        words[~marked] = table[np.minimum(codes, np.uint64(size)).astype(np.int64)]
        return words[row:stop]
    if codec == 0:
        check(len(block) == 0)
        return np.zeros(stop - row, np.uint64)
    if codec == 1:
        check(len(block) == 8)
        return np.full(stop - row, _u64(block, 0, 1)[0])
    if codec == 2:
        check(len(block) >= 16)
        base, scale = _u64(block, 0, 2)
        scaled: Array = base + unpack_all(block[16:], n_rows, width) * scale
        return scaled[row:stop]
    if codec == 3:
        return _delta(block, width, n_rows, row == stop)[row:stop]
    if codec in (4, 5):
        packed, table = block, dictionary
        if codec == 5:
            check(len(block) >= 8 and int(_u64(block, 0, 1)[0]) <= len(block) // 8)
            first, size = 0, int(_u64(block, 0, 1)[0])
            packed, table = block[8 + 8 * size :], _u64(block, 8, size)
        check(codec == 4 or len(block) >= 8 + 8 * size)
        codes = unpack_all(packed, n_rows, width)[row:stop]
        check(bool((codes < np.uint64(size)).all()))
        taken: Array = table[first + codes.astype(np.int64)]
        return taken
    check(codec == 6 and width in (8, 16, 32, 64) and len(block) == (n_rows * (width // 8) + 7) // 8 * 8)
    signed = block[: n_rows * (width // 8)].view(f"<i{width // 8}")[row:stop]
    return signed.astype(np.int64).view(np.uint64)


def _decimal(block: Array, q: Array) -> Array:
    """Codec 11: the words of floats."""
    base, head = _u64(block, 0, 2)
    exponent, bits = int(head) & 0xFF, int(head) >> 8
    check(exponent < 23 and bits in (32, 64))
    with np.errstate(all="ignore"):
        values = ((q + base + _MAGIC_BITS).view(np.float64) - _MAGIC) / 10.0**exponent
        words: Array = values.astype(np.float32).view(np.uint32) if bits == 32 else values.view(np.uint64)
    return words.astype(np.uint64)


def open_marked(block: Array, width: int, n_rows: int) -> tuple[Array, Array, Array]:
    """Of a block of codec 13: (n_rows,) which rows have words of their own, those words, and codes of the other rows.

    Raises Damaged.
    """
    at = 16 + (n_rows + 63) // 64 * 8
    check(len(block) >= at)
    head, base = (int(v) for v in _u64(block, 0, 2))
    n_own, own_width = head & 0xFFFFFFFF, head >> 32
    check(own_width < 256 and own_width & (LANES - 1) <= 64 and n_own <= n_rows)
    bits = np.unpackbits(block[16:at], bitorder="little").astype(np.bool_)
    check(int(bits[:n_rows].sum()) == n_own == int(bits.sum()))
    size = packed_bytes(n_own, own_width)
    check(at + size <= len(block))
    own = unpack(block[at : at + size], n_own, own_width) + np.uint64(base)
    return bits[:n_rows], own, unpack_all(block[at + size :], n_rows - n_own, width)


def _mixed(block: Array, width: int, n_rows: int, row: int, stop: int, dictionary: Array) -> Array:
    """Codec 12: words of the segment dictionary and of the block's own."""
    check(len(block) >= 24)
    counts, base, local_width = (int(v) for v in _u64(block, 0, 3))
    n_hot, n_local = counts & 0xFFFFFFFF, counts >> 32
    check(local_width < 256 and n_local <= MAX_LOCAL and n_hot <= len(dictionary) and local_width & (LANES - 1) <= 64)
    at = 24 + packed_bytes(n_local, local_width)
    check(width & (LANES - 1) <= 64 and at + packed_bytes(n_rows, width) == len(block))
    own = unpack(block[24:at], n_local, local_width) + np.uint64(base)
    codes = unpack(block[at:], n_rows, width)[row:stop]
    check(bool((codes < np.uint64(n_hot + n_local)).all()))
    taken: Array = np.concatenate([dictionary[:n_hot], own])[codes.astype(np.int64)]
    return taken


def _decode_nested(
    block: Array, codec: int, n_rows: int, row: int, stop: int, dictionary: Array, first: int, size: int
) -> Array:
    """Codecs 8 to 10: a plain block of the runs, or of the rows that are there."""
    at = 0 if codec == 8 else 8
    check(len(block) > at)
    head = int(_u64(block, at, 1)[0])
    n, kind, width = head & 0xFFFFFFFF, head >> 32 & 0xFF, head >> 40 & 0xFF
    check(n <= n_rows and (width == PATCHED or width & (LANES - 1) <= 64) and (kind <= 6 or kind in (11, 12, 13)))
    if codec == 8:
        ends_width = head >> 48
        check(ends_width < 256 and ends_width & (LANES - 1) <= 64)
        inner = 8 + packed_bytes(n, ends_width)
        check(inner <= len(block))
        packed = unpack(block[8:inner], n, ends_width)
        check(bool((packed < np.uint64(n_rows)).all()))
        ends = packed.astype(np.int64)
        check(bool((np.diff(ends) > 0).all()) and (int(ends[-1]) if n else -1) == n_rows - 1)
        of_row = np.repeat(np.arange(n), np.diff(ends, prepend=-1))[row:stop]
        low, high = (int(of_row[0]), int(of_row[-1]) + 1) if len(of_row) else (0, 0)
        values = _decode_block(block[inner:], kind, width, n, low, high, dictionary, first, size)
        return values[of_row - low]
    inner = 16 + (n_rows + 63) // 64 * 8
    check(head >> 48 == 0 and inner <= len(block))
    bits = np.unpackbits(block[16:inner], bitorder="little").astype(np.bool_)
    check(int(bits[:n_rows].sum()) == n == int(bits.sum()))
    there = bits[row:stop]
    if codec == 10:
        return (~there).astype(np.uint64)
    low = int(bits[:row].sum())
    found = np.full(stop - row, _u64(block, 0, 1)[0])
    found[there] = _decode_block(block[inner:], kind, width, n, low, low + int(there.sum()), dictionary, first, size)
    return found


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
    """As ``thinrow.kernels.numba.blocks.decode_fixed``."""
    for i, b in enumerate(block.tolist()):
        if not 0 <= b < len(source) or not 0 <= source[b] < len(buffers.arrays):
            return i
        buffer = buffers.arrays[int(source[b])]
        begin, length, rows = int(block_off[b]), int(block_len[b]), int(n_rows[i])
        row, stop, at = int(row_from[i]), int(row_to[i]), int(out_pos[i])
        if not 0 <= begin <= len(buffer) or begin % 8 or not 0 <= length <= len(buffer) - begin or length % 8:
            return i
        if not 0 <= row <= stop <= rows <= MAX_ROWS or (width[b] & (LANES - 1) > 64 and width[b] != PATCHED):
            return i
        if not 0 <= at <= len(out) or stop - row > len(out) - at:
            return i
        coded = (codec[b] == 4 or codec[b] >= 8) and len(dict_n) > 0
        try:
            words = _decode_block(
                buffer[begin : begin + length],
                int(codec[b]),
                int(width[b]),
                rows,
                row,
                stop,
                dictionary,
                int(dict_off[b]) if coded else 0,
                int(dict_n[b]) if coded else 0,
            )
        except Damaged:
            return i
        out[at : at + stop - row] = words.astype(f"u{out.itemsize}").view(out.dtype)
    return -1
