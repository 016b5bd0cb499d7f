"""A read of a few requests in one compiled call: what a ranker asks for, one user or some, a few hundred events each.

Worked example: the newest 200 of one user, five columns. All that does not depend on the request (where index pages,
files, streams and dictionaries lie) is written down once for a set of columns; a call is given the request and memory
for 200 rows, and plans, verifies, decodes and cuts. Around it Python makes the arrays' views, some 60 calls in all.

What the call cannot do, or finds wrong, the long way does, or says what it is: ``reconstruct``, which is its oracle.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinrow.core import pool
from thinrow.core.errors import CorruptionError, StoreError
from thinrow.core.stripes import (
    FOUND_DELIVERED,
    FOUND_MIXED,
    FOUND_PIECES,
    FOUND_ROWS,
    FOUND_USERS,
    PLAN_ARRIVALS,
    PLAN_CHUNKS,
    PLAN_TIMES,
    USED,
    FewTables,
)
from thinrow.core.users import Users
from thinrow.history.archive.layout import StoredColumn, key_columns
from thinrow.history.archive.lookup import Ints
from thinrow.jagged import Column, Events, SharedHistories
from thinrow.kernels import kernel
from thinrow.schema.event_schema import ARRIVAL_ID, EVENT_TS_ID

if TYPE_CHECKING:
    from thinrow.history.archive.generation import Generation
    from thinrow.history.archive.reader import ReadStats
    from thinrow.history.archive.tables import ReadTables

#: Rows that memory is taken for before it is known how many there are.
MAX_ROWS = 1 << 18
#: Of so few requests it is not worth asking how many events they saw.
_FEW = 8
#: An index up to this size is checked whole, which takes it 20 microseconds a megabyte, and no request has to wait.
_INDEX_BYTES = 16 << 20
_KEYS = key_columns()
_DONE, _NOT_HERE, _NO_PAGE = range(3)
#: So many segments are opened at once, and so many misses make tables anew.
_ALL_SEGMENTS, _MISSES = 64, 32
#: Sets of columns that are kept.
_MAX_TABLES = 64


class Few:
    """What reads of a few requests go by, of one set of columns."""

    def __init__(self, generation: Generation, columns: tuple[StoredColumn, ...], used: npt.NDArray[np.bool_]) -> None:
        self.columns, self.used = columns, used
        #: By kind of block of a recent tier, bytes of a row and how the streams are read of it (``history.live``).
        self.live: dict[int, tuple[int, Ints] | None] = {}
        self.tables: FewTables | None = None
        if not used.any() or any(c.ragged or c.is_bytes for c in columns):
            return
        try:
            segments = self._segments = generation.opened_where(used)
        except (StoreError, CorruptionError):
            # One that others do not need is damaged or lost.
            return
        n, pages = len(generation.segments), segments.pieces.pages
        if pages is None or segments.with_hides:
            return
        keys, read = generation.tables.of(n, _KEYS[:2]), generation.tables.of(n, (_KEYS[0], *columns))
        if not keys.prepare_set(generation, segments) or not read.prepare_set(generation, segments):
            return
        with suppress(CorruptionError):
            # Of what is damaged the long way says what it is.
            segments.pieces.load_all(_INDEX_BYTES)
        sizes = [per_row * kind.itemsize for per_row, kind in read.shapes]
        row_bytes = np.append(0, np.cumsum(sizes)).tolist()
        self.row_bytes = row_bytes[-1]
        self.tables = FewTables(
            pages, generation.segment_bounds, segments.position, keys.tables, read.tables, read.keys, read.values[0],
            row_bytes,
        )  # fmt: skip
        #: Of event_ts and each column: name, id, first byte in a row, dtype, elements, and of nulls first byte or
        #: -1; streams of both.
        self.parts = [self._part(read, i, c, row_bytes) for i, c in enumerate((_KEYS[0], *columns))]

    @staticmethod
    def _part(
        read: ReadTables, i: int, spec: StoredColumn, row_bytes: list[int]
    ) -> tuple[str, int, int, np.dtype[np.generic], int, int, int, int]:
        w, nulls = read.values[i], read.nulls[i]
        before = row_bytes[nulls] if nulls >= 0 else -1
        return spec.name, spec.id, row_bytes[w], read.dtypes[w], spec.size, before, w, nulls

    def load_pages(self, generation: Generation, users: Users) -> None:
        """Check the index pages of users; of what is damaged the long way says what it is."""
        pair_user, pair_segment = _pairs(generation, users, self.used.copy())
        table, pieces = self._segments.position[pair_segment], self._segments.pieces
        with suppress(CorruptionError):
            first, last, n, wrong = pieces.find(table, np.unique(users)[pair_user])
            if wrong < 0:
                pieces.take_ranges(table, first, last, n)

    def read(
        self,
        generation: Generation,
        users: Users,
        request_ts: Ints,
        versions: npt.NDArray[np.void],
        max_len: int,
        horizon_ms: int | None,
        same: bool,
        stats: ReadStats,
    ) -> tuple[int, SharedHistories | None]:
        """What ``read_few`` says (there ``same``, too), and the histories of (X,) requests where it is done.

        Raises:
            Erased: the generation was revoked.
        """
        tables, n = self.tables, len(users)
        assert tables is not None
        since = time.perf_counter()
        generation.opened_where(self.used)
        rows = n * max_len
        if n > _FEW:
            # What they saw is mostly less than what they may see.
            rows = max(int(np.minimum(versions["seq_len"], max_len).sum()), 0)
        capacity = (rows + 7) & ~7
        streams = len(tables.row_bytes) - 1
        out, at = pool.empty(capacity * self.row_bytes, np.uint8), USED + streams + 1
        found, exact = np.zeros(at + 6 * n + 1, np.int64), np.empty(n, np.bool_)
        horizon = -1 if horizon_ms is None else horizon_ms
        done = kernel("read_few")(
            # Copies, because memory that is not ours may be of a kind that the call was not compiled for.
            tables, versions.copy(), users.copy(), request_ts.copy(), max_len, horizon, same, out, capacity,
            found, exact,
        )  # fmt: skip
        if done != _DONE:
            return done, None
        head = found[:at].tolist()
        n_users, total = head[FOUND_USERS], head[FOUND_ROWS]
        event_ts, columns = self.columns_in(out, capacity, head, stats)
        stats.events_decoded += total
        user_of, rest = found[at + n : at + 2 * n], at + 2 * n
        distinct, bound = found[at : at + n_users], found[rest + 3 * n + 1 :]
        events = Events.lazy(
            distinct,
            found[rest : rest + n_users + 1],
            event_ts,
            lambda: _visibility(generation, distinct, user_of, request_ts, bound, max_len, horizon_ms),
            columns,
        )
        start, stop = found[rest + n + 1 : rest + 2 * n + 1], found[rest + 2 * n + 1 : rest + 3 * n + 1]
        stats.clock("decode", since)
        return done, SharedHistories(events, user_of, start, stop, bound, exact)

    def columns_in(
        self, out: npt.NDArray[np.uint8], capacity: int, head: list[int], stats: ReadStats
    ) -> tuple[Ints, dict[str, Column]]:
        """event_ts and the columns of the rows in ``out``, views; ``stats`` gets what the call says of them in the
        ``head`` of what it found, but for the events that it decoded."""
        total, used_by, size_of = head[FOUND_ROWS], head[USED:], stats.column_bytes
        if head[FOUND_MIXED]:
            stats.book_bytes(EVENT_TS_ID, head[PLAN_TIMES])
            stats.book_bytes(ARRIVAL_ID, head[PLAN_ARRIVALS])
        found = []
        for name, column_id, first, dtype, elements, nulls, w, w_nulls in self.parts:
            used, valid = used_by[w], None
            if nulls >= 0:
                used += used_by[w_nulls]
                said = out[capacity * nulls : capacity * nulls + total]
                if said.any():
                    valid = said == 0
            size_of[column_id] = size_of.get(column_id, 0) + used
            shape = (total, elements) if elements else (total,)
            found.append((name, Column(np.ndarray(shape, dtype, out, capacity * first), valid)))
        stats.pieces += head[FOUND_PIECES]
        stats.mixed_pieces += head[FOUND_MIXED]
        stats.bytes_read += head[PLAN_CHUNKS] + head[-1]
        stats.events_delivered += head[FOUND_DELIVERED]
        return found.pop(0)[1].values, dict(found)


class FewReads:
    """The ``Few`` of one generation, over all segments that its reads have met. Safe for threads."""

    def __init__(self) -> None:
        self._used: npt.NDArray[np.bool_] | None = None
        self._met: npt.NDArray[np.bool_] | None = None
        self._missed = 0
        self._few: dict[int, Few] = {}

    def read(
        self,
        generation: Generation,
        columns: tuple[StoredColumn, ...],
        users: Users,
        request_ts: Ints,
        versions: npt.NDArray[np.void],
        max_len: int | None,
        horizon_ms: int | None,
        same: bool,
        stats: ReadStats,
    ) -> SharedHistories | None:
        """The newest archived events of (X,) requests, verified; None where they are to be read the long way, or, with
        ``same``, where events of these users were archived since."""
        few = self.of(generation, columns, users, max_len)
        if few is None or max_len is None:
            return None
        done, histories = few.read(generation, users, request_ts, versions, max_len, horizon_ms, same, stats)
        if self.prepared(done, few, generation, users):
            done, histories = few.read(generation, users, request_ts, versions, max_len, horizon_ms, same, stats)
        return histories

    def of(
        self, generation: Generation, columns: tuple[StoredColumn, ...], users: Users, max_len: int | None
    ) -> Few | None:
        """What to read the newest ``max_len`` events of ``users`` by; None where one call cannot read them."""
        n = len(users)
        if max_len is None or not n or n * max_len > MAX_ROWS or users.dtype != np.int64:
            return None
        if self._used is None:
            self._meet(generation, users)
        used = self._used
        assert used is not None
        few = self._few.get(id(columns))
        # The columns are kept, so that no others get their id.
        if few is None or few.used is not used:
            if len(self._few) >= _MAX_TABLES:
                self._few.clear()
            few = self._few[id(columns)] = Few(generation, columns, used)
        return None if few.tables is None else few

    def prepared(self, done: int, few: Few, generation: Generation, users: Users) -> bool:
        """Whether what a call lacked, as it says, is there now."""
        if done == _NO_PAGE:
            few.load_pages(generation, users)
        elif done == _NOT_HERE:
            self._meet(generation, users)
        return done == _NO_PAGE

    def _meet(self, generation: Generation, users: Users) -> None:
        """Take in the segments of more users: all there are where these are few, else tables are made anew when a
        quarter more are known, or often missed."""
        n = len(generation.segments)
        known, met = self._used, self._met
        met = np.full(n, n <= _ALL_SEGMENTS) if met is None else met.copy()
        _pairs(generation, users, met)
        self._met, self._missed = met, self._missed + 1
        if known is None or int(met.sum()) * 4 > int(known.sum()) * 5 or self._missed > _MISSES:
            self._used, self._missed = met, 0


def _pairs(generation: Generation, users: Users, used: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Pairs of user (among the distinct) and segment; the latter are marked in ``used``."""
    n = len(users)
    pairs = np.empty((2, n * generation.most_segments), np.int64)
    _, n_pairs = kernel("place_users")(
        users.copy(), *generation.segment_bounds, np.empty(n, np.int64), np.empty(n, np.int64), pairs[0], pairs[1], used
    )
    return pairs[0, :n_pairs], pairs[1, :n_pairs]


def _visibility(
    generation: Generation,
    users: Users,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
    max_len: int,
    horizon_ms: int | None,
) -> tuple[Ints, Ints]:
    """Arrival and hidden_from of the same rows, which few ask for."""
    from thinrow.history.archive.reader import ReadStats
    from thinrow.history.archive.window import Window

    n = len(user_of)
    oldest = np.full(n, np.iinfo(np.int64).min) if horizon_ms is None else request_ts - horizon_ms
    window = Window(generation, users, user_of, request_ts, bound, ReadStats())
    events = window.read(np.full(n, max_len, np.int64), oldest, ())
    return events.arrival, events.hidden_from
