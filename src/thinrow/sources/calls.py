"""Events that this process hands over itself: a bounded queue in front of the store.

Worked example::

    source = CallSource("web", max_events=10_000)
    ticket = source.put([{"user": 7, "ts": 1000, "item": 3}])   # waits where the queue is full
    ticket.wait()                                              # they are durable (or letters, where refused)

There is nothing to read again after a crash: what no ticket has confirmed is the caller's to put again, and only event
ids keep it from entering twice.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from thinrow.core.errors import InputError, StoreError
from thinrow.schema import EventSchema
from thinrow.sources.source import Batch, Origin, Positions, Refused
from thinrow.sources.wanted import Wanted, table_of_rows, wanted_of


@dataclass(slots=True)
class Ticket:
    """Of the events of one ``put``."""

    _done: threading.Event = field(default_factory=threading.Event)
    _failed: str = ""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the events are durable.

        Raises:
            StoreError: they are not, in time or at all: put them again.
        """
        if not self._done.wait(timeout_s):
            raise StoreError(f"the events are not durable after {timeout_s} s; wait longer, or put them again")
        if self._failed:
            raise StoreError(self._failed)


class CallSource:
    """See the module. ``put`` from any thread."""

    reads_ahead = False

    def __init__(self, name: str = "calls", max_events: int = 65_536) -> None:
        """``max_events`` wait at most."""
        self.name = name
        self._max = max_events
        self._changed = threading.Condition()
        self._waiting: deque[tuple[pa.Table | list[Mapping[str, Any]], Ticket]] = deque()
        self._n = 0
        self._closed = False
        self._taken: list[Ticket] = []
        self._wanted: Wanted = {}

    def put(self, events: pa.Table | Sequence[Mapping[str, Any]], timeout_s: float | None = None) -> Ticket:
        """Hand over events: a table, or rows as dicts. Waits while the queue is full.

        Raises:
            StoreError: the queue stays full for ``timeout_s``, or is closed; nothing was taken.
        """
        held = events if isinstance(events, pa.Table) else list(events)
        n = len(held)
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or not self._n or self._n + n <= self._max, timeout_s):
                raise StoreError(f"{self._n} events wait already, of {self._max}; the store is slower than its source")
            if self._closed:
                raise StoreError("the queue is closed; nothing reads it any more")
            ticket = Ticket()
            self._waiting.append((held, ticket))
            self._n += n
            self._changed.notify_all()
            return ticket

    def start(self, schema: EventSchema, positions: Positions) -> None:
        """See ``Source``."""
        self.use(schema)
        self._fail("the events were taken, and are not durable; put them again")

    def use(self, schema: EventSchema) -> None:
        """See ``Source``."""
        self._wanted = wanted_of(schema)

    def read(self, max_events: int, timeout_s: float) -> Batch | None:
        """See ``Source``."""
        taken: list[pa.Table | list[Mapping[str, Any]]] = []
        until = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting), max(0.0, until - time.monotonic()))
            n = 0
            while self._waiting and (not taken or n + len(self._waiting[0][0]) <= max_events):
                if taken and isinstance(self._waiting[0][0], pa.Table) != isinstance(taken[0], pa.Table):
                    break
                events, ticket = self._waiting.popleft()
                taken.append(events)
                self._taken.append(ticket)
                n += len(events)
            self._n -= n
            self._changed.notify_all()
        if not taken:
            return None
        if isinstance(taken[0], pa.Table):
            return self._tables([t for t in taken if isinstance(t, pa.Table)])
        return self._rows([row for t in taken for row in t])

    def _tables(self, tables: list[pa.Table]) -> Batch:
        try:
            table = pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as e:
            raise InputError(
                f"tables that wait together have columns that differ: {e}; put tables of one schema"
            ) from e
        return Batch(table, {}, lambda row: _origin(row, table.slice(row, 1).to_pylist()[0]), n_bytes=table.nbytes)

    def _rows(self, rows: list[Mapping[str, Any]]) -> Batch:
        table, kept, bad = table_of_rows(rows, self._wanted)
        refused = [Refused(_origin(i, rows[i]), why) for i, why in sorted(bad.items())]
        return Batch(table, {}, lambda row: _origin(kept[row], rows[kept[row]]), refused, how={"format": "json"})

    def acknowledge(self, batch: Batch) -> None:
        """See ``Source``."""
        self._fail("")

    def _fail(self, why: str) -> None:
        for ticket in self._taken:
            ticket._failed = why
            ticket._done.set()
        self._taken = []

    def ended(self) -> bool:
        """See ``Source``."""
        with self._changed:
            return not self._waiting

    def lag(self) -> int | None:
        """Events that wait."""
        return self._n

    def close(self) -> None:
        """Take no more; what waits is refused."""
        with self._changed:
            self._closed = True
            self._taken += [ticket for _, ticket in self._waiting]
            self._waiting.clear()
            self._n = 0
            self._fail("the queue was closed before the events were durable; put them again")
            self._changed.notify_all()


def _origin(row: int, event: Mapping[str, Any]) -> Origin:
    # No position is ever the same: a clock tells two of them apart.
    return Origin("", json.dumps({"at_ns": time.time_ns(), "row": row}), json.dumps(event, default=str).encode())
