"""StripeTables: where the stripes and streams of mapped segment files lie, as a compiled kernel reads them.

Worked example: of a store of 16 segments a batch wants streams 0 of group ``keys`` and 1 of group ``price``. Row s of
``segments`` says where file s begins, how long it is, and where the pages of its stripe records are; row (w, s) of
``streams`` says at which place of a stripe record the chunk of stream w's group stands, how many blocks that has, which
is wanted, and where the segment dictionary lies. Rows are filled when a batch first meets a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

#: Fields of a row of ``StripeTables.segments``: address and bytes of the file, records of stripes, bytes of one, how
#: many a full page has, address and number of the rows of ``pages``.
FILE, FILE_BYTES, N_STRIPES, RECORD_BYTES, PAGE_RECORDS, PAGES, N_PAGES, SEGMENT_FIELDS = range(8)
#: Fields of a row of pages: offset in the file, bytes, CRC, number of the first record, records, whether it was found
#: sound.
PAGE_OFFSET, PAGE_BYTES, PAGE_CRC, PAGE_FIRST, PAGE_COUNT, PAGE_SOUND, PAGE_FIELDS = range(7)
#: Fields of a row of streams: place of the group (or ``LACKING``, ``ELSEWHERE``), blocks in its chunk, number of the
#: stream among them, address and words of the dictionary.
PLACE, N_BLOCKS, STREAM, WORDS, N_WORDS, STREAM_FIELDS = range(6)
#: The segment has no such stream: its values are 0, all of them null.
LACKING = -1
#: The stream cannot be read by these tables.
ELSEWHERE = -2
#: Of nulls: the segment says of none.
NEVER_NULL = -3

#: Kinds of streams: values of fixed width, nulls, codes of text.
VALUES, NULLS, TEXT = 0, 1, 2


class StripeTables:
    """Attributes:
    segments: (S, SEGMENT_FIELDS) int64; rows of segments that were not prepared are 0.
    streams: (W, S, STREAM_FIELDS) int64.
    kind, per_row: (W,) int64 kind of each stream, and values a row.
    files: by segment number, the mapped file.
    pages: by segment number, (n, PAGE_FIELDS) int64 pages of stripe records.
    words: by (stream, segment number), the dictionary.
    """

    def __init__(self, n_segments: int, kind: Sequence[int], per_row: Sequence[int]) -> None:
        """Nothing prepared."""
        self.segments: I64 = np.zeros((n_segments, SEGMENT_FIELDS), np.int64)
        self.streams: I64 = np.zeros((len(kind), n_segments, STREAM_FIELDS), np.int64)
        self.kind: I64 = np.array(kind, np.int64)
        self.per_row: I64 = np.array(per_row, np.int64)
        self.files: dict[int, U8] = {}
        self.pages: dict[int, I64] = {}
        self.words: dict[tuple[int, int], U64] = {}

    def prepared(self, segments: I64) -> npt.NDArray[np.bool_]:
        """Whether each of ``segments`` (numbers) was prepared."""
        found: npt.NDArray[np.bool_] = self.segments[segments, FILE] != 0
        return found

    def add_stream(self, stream: int, segment: int, place: int, n_blocks: int, number: int, words: U64 | None) -> None:
        """Say where stream ``stream`` is in a segment; before its ``add_segment``."""
        row = self.streams[stream, segment]
        row[PLACE], row[N_BLOCKS], row[STREAM] = place, n_blocks, number
        if words is not None and len(words):
            self.words[stream, segment] = words
            row[WORDS], row[N_WORDS] = address_of(words), len(words)

    def add_segment(self, segment: int, file: U8, pages: I64, n_stripes: int, record_bytes: int) -> None:
        """Say where a segment's file and its stripe records are; from here on it is prepared.

        Args:
            segment: its number.
            file: the whole of it, mapped; it begins at an address that is a multiple of 8.
            pages: (n, PAGE_FIELDS), kept and written.
            n_stripes: stripe records.
            record_bytes: of each.
        """
        assert not address_of(file) & 7
        self.files[segment], self.pages[segment] = file, pages
        most = int(pages[0, PAGE_COUNT]) if len(pages) else 1
        row = [0, file.nbytes, n_stripes, record_bytes, most, address_of(pages) if len(pages) else 0, len(pages)]
        self.segments[segment] = row
        # Last, because another thread reads it without a lock.
        self.segments[segment, FILE] = address_of(file)


def address_of(array: npt.NDArray[Any]) -> int:
    """Address of a contiguous array's first byte."""
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0])


#: Index entry of a piece: a run of one user's events in one stripe (docs/format/archive-v2.md, section 6).
PIECE_DTYPE = np.dtype(
    [
        ("key", "<i8"),
        ("first_ts", "<i8"),
        ("last_ts", "<i8"),
        ("max_arrival", "<i8"),
        ("min_hidden_from", "<i8"),
        ("digest", "<u8"),
        ("stripe", "<u4"),
        ("row", "<u4"),
        ("n_rows", "<u4"),
        ("flags", "<u4"),
    ]
)

#: Fields of ``FewTables.state``: addresses and lengths of what a read of a few users goes by.
(
    PAGE_OFF, N_TABLES, FIRST_KEY, FIRST_RECORD, N_RECORDS, PAGE_ADDRESS, ALL_PAGES, FIRST_SEGMENT, LAST_SEGMENT,
    N_BUCKETS, POSITION, N_SEGMENTS, MOST_SEGMENTS, KEY_SEGMENTS, KEY_STREAMS, KEY_KIND, KEY_PER_ROW, ALL_SEGMENTS,
    STREAMS, N_STREAMS, KINDS, PER_ROW, KEYS, ROW_BYTES, TIMES,
    STATE_FIELDS,
) = range(26)  # fmt: skip

#: Head of what ``read_few`` and ``read_live`` find: users, rows, events delivered, pieces, mixed pieces, recent events,
#: bytes of blocks of event_ts and of arrival and of chunks that planning read; then bytes of blocks by stream, and of
#: chunks.
(
    FOUND_USERS, FOUND_ROWS, FOUND_DELIVERED, FOUND_PIECES, FOUND_MIXED, FOUND_RECENT,
    PLAN_TIMES, PLAN_ARRIVALS, PLAN_CHUNKS, USED,
) = range(10)  # fmt: skip

#: Of rows in blocks of a recent tier, as ``read_live`` takes them: head of their blocks, bytes of a row; then of each
#: stream what is to be done (``TAKE`` the value at this byte, ``TEST`` this bit, or ``SET`` to this) and this number.
LIVE_HEAD, LIVE_ROW_BYTES, LIVE_STREAMS = range(3)
TAKE, TEST, SET = range(3)


class FewTables:
    """What ``read_few`` reads of some columns of some segments, its addresses in one array, because each array that a
    compiled call is given costs it as much as a look-up.

    Attributes:
        pages: of the piece indexes as one (``kernels.numba.pages``).
        bounds: first (inclusive) and last (exclusive) segment of each bucket.
        position: segment number -> table of the index; -1 of segments that are not here.
        keys, columns: tables of the streams event_ts and arrival, and of those that are delivered.
        key_stream, times: one of the latter in the chunk of keys, and that of event_ts.
        row_bytes: (W + 1,) bytes of a row of all streams before each.
        state: (STATE_FIELDS,) int64.
    """

    def __init__(
        self,
        pages: tuple[I64, ...],
        bounds: tuple[I64, I64],
        position: I64,
        keys: StripeTables,
        columns: StripeTables,
        key_stream: int,
        times: int,
        row_bytes: Sequence[int],
    ) -> None:
        self.pages, self.bounds, self.position = pages, tuple(map(np.ascontiguousarray, bounds)), position
        self.keys, self.columns, self.key_stream, self.times = keys, columns, key_stream, times
        self.row_bytes: I64 = np.array(row_bytes, np.int64)
        self.most_segments = int((bounds[1] - bounds[0]).max())
        page_off, first_key, first_record, n_records, address = (address_of(a) for a in pages)
        self.state: I64 = np.array(
            [
                page_off, len(pages[0]) - 1, first_key, first_record, n_records, address, len(pages[1]),
                *map(address_of, self.bounds), len(bounds[0]), address_of(position), len(position), self.most_segments,
                *map(address_of, (keys.segments, keys.streams, keys.kind, keys.per_row, columns.segments)),
                address_of(columns.streams), len(columns.kind), address_of(columns.kind), address_of(columns.per_row),
                key_stream, address_of(self.row_bytes), times,
            ],
            np.int64,
        )  # fmt: skip
        assert len(self.state) == STATE_FIELDS
