"""Merge the runs of one bucket: users in order, their events numbered and in order of time, some rows at a time.

Worked trace, two runs of a bucket, blocks of 3 rows: ``[1, 1, 4 | 4, 9]`` and ``[1, 5, 5 | 6]``. The least last user
of the blocks read is 4: rows of users below it, ``1, 1`` and ``1``, are complete and make a part. Then both rows of 4
and ``5, 5`` (least last user 6), and so on. A user who alone fills a part is sorted in pieces on disk and comes as
several parts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.ragged import offsets_of
from thinrow.core.users import Users
from thinrow.history.buckets import NewEvents
from thinrow.history.bulk.external import sorted_tables
from thinrow.history.bulk.runs import BATCH_ROWS, Run, read_column, users_array, with_users
from thinrow.jagged import Events
from thinrow.jagged.column import concat_columns, one_array
from thinrow.jagged.events import never_hidden
from thinrow.kernels import kernel
from thinrow.schema import EventSchema

Ints = npt.NDArray[np.int64]

#: A user of so many parts' rows is sorted on disk.
GIANT_PARTS = 2


@dataclass(frozen=True, slots=True)
class Numbers:
    """The arrival numbers of one bucket's load.

    Attributes:
        users: (U,) of all runs, ascending.
        first, n: (U,) the loaded events of a user get the numbers ``first + 1`` to ``first + n``.
        recent: events of these users that are in the recent tier with lower numbers, in order of arrival; None where
            there are none.
    """

    users: Users
    first: Ints
    n: Ints
    recent: Events | None


class BucketParts:
    """The new events of one bucket. Picklable; iterating reads the runs."""

    def __init__(
        self,
        runs: Sequence[Run],
        bucket: int,
        numbers: Numbers,
        schema: EventSchema,
        rows_at_once: int,
        stripe_rows: int,
        folder: Path | None,
    ) -> None:
        """Parts of about ``rows_at_once`` rows; a longer user's are multiples of ``stripe_rows``, sorted in
        ``folder`` (None: that of ``tempfile``)."""
        self._runs, self._bucket, self._numbers, self._schema = runs, bucket, numbers, schema
        self._rows = max(rows_at_once // stripe_rows, 1) * stripe_rows
        self._folder = folder

    @property
    def has_giants(self) -> bool:
        """Whether a user comes as several parts."""
        return bool((self._numbers.n > GIANT_PARTS * self._rows).any())

    def __iter__(self) -> Iterator[NewEvents]:
        if len(self._runs) == 1 and self._runs[0].table is not None and not self.has_giants:
            yield from self._sorted(self._runs[0].of(self._bucket))
            return
        at = 0
        block = max(BATCH_ROWS, self._rows // max(len(self._runs), 1))
        cursors = [_Cursor(run.batches(self._bucket, block)) for run in self._runs]
        giant = self._numbers.n > GIANT_PARTS * self._rows
        while True:
            for cursor in cursors:
                cursor.fill(block)
            if not any(cursor.rows for cursor in cursors):
                return
            ends = [cursor.last for cursor in cursors if not cursor.done]
            batches = [b for cursor in cursors for b in cursor.take(min(ends) if ends else None)]
            if batches:
                stop = at + self._users_in(batches, at)
                yield self._part(pa.Table.from_batches(batches), at, stop)
                at = stop
                continue
            # One user fills a block: all of that user is read before anything else.
            if giant[at]:
                yield from self._giant(cursors, at)
            else:
                user = self._numbers.users[at]
                batches = [b for cursor in cursors for b in cursor.of(user)]
                yield self._part(pa.Table.from_batches(batches), at, at + 1)
            at += 1

    def _sorted(self, table: pa.Table) -> Iterator[NewEvents]:
        """The parts of the only run, which is in memory and by user as it is."""
        users, n = self._numbers.users, self._numbers.n
        ends, at = offsets_of(n), 0
        while at < len(users):
            stop = max(at + 1, int(np.searchsorted(ends, ends[at] + self._rows, "right")) - 1)
            rows = table.slice(int(ends[at]), int(ends[stop] - ends[at]))
            part = self._as_it_is(rows, at, stop)
            yield self._part(with_users(rows, users[at:stop], n[at:stop]), at, stop) if part is None else part
            at = stop

    def _as_it_is(self, table: pa.Table, at: int, stop: int) -> NewEvents | None:
        """The users ``[at, stop)``, whose rows are in ``table`` by user; None where these do not stand in order of
        arrival and of time, or there are recent ones."""
        numbers, offsets = self._numbers, offsets_of(self._numbers.n[at:stop])
        if _slice(numbers.recent, at, stop) is not None:
            return None
        arrival = np.empty(len(table), np.int64)
        for name in ("arrived", "event_ts"):
            if name in table.column_names:
                times = one_array(table.column(name)).to_numpy()
                if not kernel("number_in_order")(offsets, numbers.first[at:stop], times, arrival):
                    return None
        columns = {c.name: read_column(table.column(f"c.{c.name}"), c) for c in self._schema.columns}
        return NewEvents.without_hides(
            Events(numbers.users[at:stop], offsets, times, arrival, never_hidden(len(table)), columns)
        )

    def _users_in(self, batches: Sequence[pa.RecordBatch], at: int) -> int:
        """Users that ``batches`` hold: the next ones of the bucket."""
        last: Any = max(batch.column(0)[batch.num_rows - 1].as_py() for batch in batches)
        return int(np.searchsorted(self._numbers.users[at:], last, "right"))

    def _part(self, table: pa.Table, at: int, stop: int) -> NewEvents:
        """The users ``[at, stop)`` of the bucket, whose rows are in ``table`` by run, in order of the input."""
        numbers = self._numbers
        users, n = numbers.users[at:stop], numbers.n[at:stop]
        codes = _codes(table.column("user"), users)
        starts = offsets_of(n)
        assert np.array_equal(np.bincount(codes, minlength=len(users)), n), "runs that do not hold what they count"
        known = (
            table.column("arrived").to_numpy() if "arrived" in table.column_names else np.zeros(len(codes), np.int64)
        )
        order = stable_order(codes, known)
        codes = _at(codes, order)
        arrival = numbers.first[at:stop][codes] + 1 + np.arange(len(codes)) - starts[codes]
        event_ts = _at(table.column("event_ts").to_numpy(), order)
        columns = {c.name: read_column(table.column(f"c.{c.name}"), c) for c in self._schema.columns}
        recent = _slice(numbers.recent, at, stop)
        if recent is not None:
            held = len(recent)
            codes = np.concatenate([np.repeat(np.arange(len(users)), recent.lengths), codes])
            arrival = np.concatenate([recent.arrival, arrival])
            event_ts = np.concatenate([recent.event_ts, event_ts])
            order = np.concatenate([np.arange(held), held + (np.arange(len(table)) if order is None else order)])
            columns = {name: concat_columns([recent.columns[name], c]) for name, c in columns.items()}
        by_time = stable_order(codes, event_ts)
        offsets = offsets_of(np.bincount(codes, minlength=len(users)))
        if by_time is not None:
            order = by_time if order is None else order[by_time]
        taken = columns if order is None else {name: column.take(order) for name, column in columns.items()}
        event_ts, arrival = _at(event_ts, by_time), _at(arrival, by_time)
        return NewEvents.without_hides(Events(users, offsets, event_ts, arrival, never_hidden(len(codes)), taken))

    def _giant(self, cursors: Sequence[_Cursor], at: int) -> Iterator[NewEvents]:
        """One user in several parts."""
        numbers, user = self._numbers, self._numbers.users[at]
        tables = _tables((b for cursor in cursors for b in cursor.of(user)), self._rows)
        recent = _slice(numbers.recent, at, at + 1)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="giant-") as name:
            folder = Path(name)
            tables = _counted(tables, "place")
            if self._schema.arrival_time_column is not None:
                tables = sorted_tables(tables, ("arrived", "place"), folder / "arrived", self._rows)
            numbered = _counted((t.drop_columns(["place"]) for t in tables), "arrival", int(numbers.first[at]) + 1)
            if recent is not None:
                numbered = _chained(_as_table(recent, user), numbered)
            for table in sorted_tables(numbered, ("event_ts", "arrival"), folder / "event_ts", self._rows):
                columns = {c.name: read_column(table.column(f"c.{c.name}"), c) for c in self._schema.columns}
                rows = table.num_rows
                event_ts, arrival = (table.column(k).to_numpy() for k in ("event_ts", "arrival"))
                owner = numbers.users[at : at + 1], np.array([0, rows])
                yield NewEvents.without_hides(Events(*owner, event_ts, arrival, never_hidden(rows), columns))


class _Cursor:
    """The rows of one run's bucket from some user on."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._held: list[tuple[pa.RecordBatch, Users]] = []
        self.rows = 0
        self.done = False

    @property
    def last(self) -> Any:
        """The last user that has been read."""
        return self._held[-1][1][-1]

    def fill(self, rows: int) -> None:
        """Read on until ``rows`` rows are held."""
        while not self.done and self.rows < rows:
            self._read()

    def take(self, before: Any) -> list[pa.RecordBatch]:
        """Let go of the rows of users below ``before`` (of all where None)."""
        return self._take(before, "left")

    def of(self, user: Any) -> Iterator[pa.RecordBatch]:
        """Let go of all rows of ``user``, the least one held, reading on as they go."""
        while True:
            yield from self._take(user, "right")
            if self.rows or self.done:
                return
            self._read()

    def _take(self, bound: Any, side: Any) -> list[pa.RecordBatch]:
        taken = []
        while self._held:
            batch, users = self._held[0]
            n = len(users) if bound is None else int(np.searchsorted(users, bound, side))
            if n:
                taken.append(batch.slice(0, n))
                self.rows -= n
            if n < len(users):
                self._held[0] = batch.slice(n), users[n:]
                break
            self._held.pop(0)
        return taken

    def _read(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            self.done = True
        elif batch.num_rows:
            self._held.append((batch, users_array(batch.column(0))))
            self.rows += batch.num_rows


def stable_order(codes: Ints, values: Ints) -> npt.NDArray[np.intp] | None:
    """Rows by (code, value), ties in order; codes and values are 0 or more. None where they are so already."""
    if kernel("in_order")(codes, values):
        return None
    least = values.min()
    bits = int(values.max() - least).bit_length()
    if int(codes.max()).bit_length() + bits <= 63:
        return np.argsort((codes << bits) | (values - least), kind="stable")
    return np.lexsort((values, codes))


def _at(values: Ints, order: npt.NDArray[np.intp] | None) -> Ints:
    return values if order is None else values[order]


def _codes(column: pa.ChunkedArray, users: Users) -> Ints:
    """Place of each row's user among ``users``, who ascend."""
    if pa.types.is_integer(column.type):
        places: Ints = kernel("find_sorted")(users, column.to_numpy())
        return places
    found = pc.index_in(column, value_set=pa.array(users, pa.string()))
    codes: Ints = found.to_numpy().astype(np.int64)
    return codes


def _slice(recent: Events | None, at: int, stop: int) -> Events | None:
    if recent is None or recent.offsets[at] == recent.offsets[stop]:
        return None
    return NewEvents.without_hides(recent).users(at, stop).events


def _tables(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Batches together, some ``rows`` at a time."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(b.num_rows for b in held) >= rows:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _counted(tables: Iterable[pa.Table], name: str, first: int = 0) -> Iterator[pa.Table]:
    """The same rows with a column that counts them."""
    for table in tables:
        yield table.append_column(name, pa.array(np.arange(first, first + table.num_rows)))
        first += table.num_rows


def _chained(head: pa.Table, tail: Iterator[pa.Table]) -> Iterator[pa.Table]:
    yielded = False
    for table in tail:
        if not yielded:
            yield head.select(table.column_names).cast(table.schema)
            yielded = True
        yield table


def _as_table(events: Events, user: Any) -> pa.Table:
    """Recent events of one user as rows of a run, numbered."""
    arrays: dict[str, Any] = {"user": [user] * len(events), "event_ts": events.event_ts}
    arrays["arrived"] = np.zeros(len(events), np.int64)
    arrays |= {f"c.{name}": column.to_arrow() for name, column in events.columns.items()}
    return pa.table({**arrays, "arrival": events.arrival})
