"""Streams of many stripes, a run at a time: records, headers and blocks as docs/format/archive-v2.md has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.buffers import Buffers
from thinrow.core.stripes import (
    ELSEWHERE,
    FILE,
    LACKING,
    N_BLOCKS,
    N_STRIPES,
    NULLS,
    PAGE_BYTES,
    PAGE_COUNT,
    PAGE_CRC,
    PAGE_FIRST,
    PAGE_OFFSET,
    PLACE,
    RECORD_BYTES,
    STREAM,
    TEXT,
    StripeTables,
)
from thinrow.kernels.reference.blocks import decode_fixed
from thinrow.kernels.reference.crc import crc32c

Array = npt.NDArray[Any]

MAX_STRIPE_ROWS = 65_536
_ENTRY = np.dtype([("codec", "u1"), ("width", "u1"), ("reserved", "<u2"), ("length", "<u4"), ("crc", "<u4")])
_SPARSE, _ABSENT, LAST_CODEC, _ZSTD = 9, 10, 13, 7


class _Damaged(Exception):
    """The stripe cannot be what a writer wrote."""


def _check(holds: bool) -> None:
    if not holds:
        raise _Damaged


def _range(file: Array, begin: int, size: int) -> Array:
    _check(0 <= begin <= len(file) and 0 <= size <= len(file) - begin)
    return file[begin : begin + size]


def _record(tables: StripeTables, segment: int, stripe: int) -> Array:
    """The stripe record as words of 4 bytes."""
    row = tables.segments[segment]
    _check(row[FILE] != 0 and stripe < row[N_STRIPES])
    pages = tables.pages[segment]
    page = pages[int(np.searchsorted(pages[:, PAGE_FIRST], stripe, side="right")) - 1]
    data = _range(tables.files[segment], int(page[PAGE_OFFSET]), int(page[PAGE_BYTES]))
    _check(len(data) >= 8 and crc32c(data) == page[PAGE_CRC])
    count, heap = (int(v) for v in data[:8].view("<u4"))
    size, at = int(row[RECORD_BYTES]), stripe - int(page[PAGE_FIRST])
    _check(count == page[PAGE_COUNT] and (8 + count * size + heap + 7) // 8 * 8 == len(data) and at < count)
    found: Array = data[8 + at * size : 8 + (at + 1) * size].view("<u4")
    return found


def _block(file: Array, record: Array, where: Array, kind: int, used: Array) -> tuple[int, int, int, int, int]:
    """Place, bytes, codec, width and CRC of the block that a stream has in a stripe; counts the chunk's bytes."""
    place, n_blocks, k = int(where[PLACE]), int(where[N_BLOCKS]), int(where[STREAM])
    _check(4 * (place + 1) + 2 <= len(record) and 0 <= k < n_blocks)
    low, high, size, crc = (int(v) for v in record[2 + 4 * place : 6 + 4 * place])
    begin = low | high << 32
    chunk = _range(file, begin, size)
    head = (n_blocks * 12 + 7) // 8 * 8
    _check(begin % 8 == 0 and head <= size and crc32c(chunk[:head]) == crc)
    entries = chunk[: n_blocks * 12].view(_ENTRY)
    lengths = entries["length"].astype(np.int64)
    _check(not (lengths % 8).any() and head + int(lengths.sum()) == size and int(entries["codec"].max()) <= LAST_CODEC)
    used[-1] += size
    codec = int(entries["codec"][k])
    if codec == _ABSENT:
        _check(kind == NULLS and k + 1 < n_blocks and int(entries["codec"][k + 1]) == _SPARSE)
        k += 1
    at = begin + head + int(lengths[:k].sum())
    return at, int(lengths[k]), codec, int(entries["width"][k]), int(entries["crc"][k])


def read_stripes(
    tables: StripeTables,
    records: Array,
    segment: Array,
    piece: Array,
    start: Array,
    stop: Array,
    out_pos: Array,
    out: Sequence[Array],
    refused: Array,
    used: Array,
    counted: Array,
    keys: int,
) -> int:
    """As ``thinrow.kernels.numba.stripes.read_stripes``."""
    done: set[tuple[int, int]] = set()
    known = [p for p in piece.tolist() if 0 <= p < min(len(counted), len(segment)) and counted[p] >= 0]
    before = {(int(segment[p]), int(records[p, 6]) & 0xFFFFFFFF) for p in known}
    previous = -1, -1
    for i, p in enumerate(piece.tolist()):
        try:
            _check(0 <= p < len(records) and 0 <= segment[p] < len(tables.segments))
            where = int(segment[p]), int(records[p, 6]) & 0xFFFFFFFF
            first = int(records[p, 6]) >> 32
            rows = first + int(start[i]), first + int(stop[i])
            record = _record(tables, *where)
            _check(first <= rows[0] <= rows[1] <= int(record[0]) <= MAX_STRIPE_ROWS)
            if where != previous:
                previous = where
                done = {(0, int(tables.streams[keys, where[0], PLACE]))} if keys >= 0 and where in before else set()
            for w, into in enumerate(out):
                _read_stream(tables, w, where[0], record, rows, int(out_pos[i]), into, refused, used, done)
        except _Damaged:
            return i
    return -1


def _read_stream(
    tables: StripeTables,
    w: int,
    segment: int,
    record: Array,
    rows: tuple[int, int],
    out_pos: int,
    out: Array,
    refused: Array,
    used: Array,
    done: set[tuple[int, int]],
) -> None:
    """Rows of one stream; ``done`` are the chunks and streams of this stripe whose bytes are in ``used``."""
    where, kind, times = tables.streams[w, segment], int(tables.kind[w]), int(tables.per_row[w])
    place, (first, last), at = int(where[PLACE]), (r * times for r in rows), out_pos * times
    if place == ELSEWHERE:
        refused[w] = True
        return
    _check(0 <= at <= len(out) and last - first <= len(out) - at)
    if place < 0:
        out[at : at + last - first] = int(kind == NULLS and place == LACKING)
        return
    spent = np.zeros(1, np.int64)
    begin, size, codec, width, crc = _block(tables.files[segment], record, where, kind, spent)
    used[-1] += spent[0] if (0, place) not in done else 0
    used[w] += size if (1, w) not in done else 0
    done |= {(0, place), (1, w)}
    if refused[w] or (kind == TEXT and codec == _ZSTD):
        refused[w] = True
        return
    _check((width & 0x7F <= 64 or width == 0xFF) and crc32c(tables.files[segment][begin : begin + size]) == crc)
    words = tables.words.get((w, segment), np.empty(0, np.uint64))
    one = (np.array([v], np.int64) for v in (0, begin, size))
    kinds = (np.array([v], np.uint8) for v in (codec, width))
    runs = (np.array([v], np.int64) for v in (0, len(words), 0, int(record[0]) * times, first, last, at))
    call: tuple[Any, ...] = *one, *kinds, words, *runs, out
    _check(decode_fixed(Buffers([tables.files[segment]]), *call) == -1)
