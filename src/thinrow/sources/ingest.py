"""From a source into a store: at least once in, exactly once in the store.

A batch goes through in this order::

    read       rows and the moves of their partitions
    screen     bad rows become dead letters
    letters    written and synced: what is refused is safe before its position is
    append     rows and positions, one transaction; nothing where a partition stands elsewhere (PositionConflict)
    acknowledge  the source is told; nothing rests on it

Killed anywhere, the next run begins at the stored positions: rows that were not appended come again, rows that were
appended do not. Letters may be written twice, and are one letter when they are read.

Worked example: ``Ingest(store, source).run()`` reads to the end of what is there; ``run(follow=True, stop=event)`` goes
on until ``event`` is set, and then returns once the batch at hand is durable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import InputError, Overloaded, PositionConflict, Unacknowledged, UnknownEventError
from thinrow.core.units import NEVER
from thinrow.core.users import plain
from thinrow.history.dead_letters import Letter
from thinrow.history.recent.tier import Advance
from thinrow.history.store import HistoryStore
from thinrow.sources.ahead import ReadAhead
from thinrow.sources.pseudonyms import Pseudonyms
from thinrow.sources.screen import Screened, screen
from thinrow.sources.source import Batch, Origin, Source
from thinrow.sources.wanted import empty_table

#: The source under whose name the tier keeps which key made the pseudonyms.
KEY_SOURCE = ".pseudonyms"
_SCHEMA_S = 1.0
#: Between two tries of a store that is full.
_MAX_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class IngestReport:
    """Attributes:
    events: appended.
    duplicates: rows whose event id the store, or an earlier row, had.
    refused: events that became dead letters.
    skipped: messages without an event, by intent.
    batches, bytes: read.
    conflicts: batches that were read again because another reader was first.
    waited_s: for the store to take more.
    lag: what the source knows of and was not read; None where it cannot tell.
    """

    events: int = 0
    duplicates: int = 0
    refused: int = 0
    skipped: int = 0
    batches: int = 0
    bytes: int = 0
    conflicts: int = 0
    waited_s: float = 0.0
    lag: int | None = None


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Attributes:
    batch_events: of one append, at most.
    linger_s: for which a batch that is not full waits; the floor of freshness.
    max_future_ms: events later than the clock by more are refused; None for no bound.
    pseudonyms: user ids are replaced by.
    read_ahead: whether a source that can is read on a thread, one batch ahead of the appends.
    """

    batch_events: int = 16_384
    linger_s: float = 0.05
    max_future_ms: int | None = None
    pseudonyms: Pseudonyms | None = None
    read_ahead: bool = True

    def __post_init__(self) -> None:
        if self.batch_events < 1 or self.linger_s <= 0:
            raise InputError(f"batches of {self.batch_events} events, {self.linger_s} s; both must be above 0")


class Ingest:
    """One source into one store."""

    def __init__(
        self,
        store: HistoryStore,
        source: Source,
        options: IngestOptions | None = None,
        progress: Callable[[IngestReport], None] | None = None,
        clock: Clock = system_clock,
        relieve: Callable[[], None] | None = None,
    ) -> None:
        """Checks only; ``run`` begins.

        Args:
            relieve: called where the tier is full, before it is tried again: a compaction.

        Raises:
            InputError: the tier keeps positions apart from events, and the schema has no event ids to tell what came
                twice; or the pseudonyms of the store are made with another key, or with none.
        """
        self._store, self._clock = store, clock
        self._options = options or IngestOptions()
        self._ahead = ReadAhead(source) if self._options.read_ahead and source.reads_ahead else None
        self._source = self._ahead or source
        self._progress, self._relieve = progress, relieve
        self._stop = threading.Event()
        self._schema = store.schema
        self._schema_at = time.monotonic()
        if not store.recent.stores_positions_with_events and self._schema.event_id_column is None:
            raise InputError(
                "this recent tier keeps positions apart from events: after a crash only event ids tell what came "
                'twice; name an event_id column, or "source_id", in the schema'
            )
        self.letters = store.dead_letters
        self.report = IngestReport()
        check_key(store, self._options.pseudonyms)

    def run(self, *, follow: bool = False, stop: threading.Event | None = None) -> IngestReport:
        """Read to the end of the source, or, with ``follow``, until ``stop`` is set.

        Raises:
            StoreError: source or store refuse; all that is stored is whole, and a new run goes on.
            InputError: the source does not have the columns of the schema.
        """
        stop = self._stop = stop or threading.Event()
        with self._ahead or nullcontext():
            self._read_and_append(follow, stop)
        self.report = replace(self.report, lag=self._source.lag())
        return self.report

    def _read_and_append(self, follow: bool, stop: threading.Event) -> None:
        self.letters.withdraw(self._source.name, self._positions)
        self._source.start(self._schema, self._positions)
        while not stop.is_set():
            self._refresh_schema()
            batch = self._source.read(self._options.batch_events, self._options.linger_s)
            if batch is not None:
                self._take_in(batch)
            elif not follow and self._source.ended():
                break
            if self._progress is not None:
                self._progress(replace(self.report, lag=self._source.lag()))

    def _positions(self) -> dict[str, str]:
        return self._store.recent.positions(self._source.name)

    def _refresh_schema(self) -> None:
        """Whoever evolves the store need not stop its readers."""
        if time.monotonic() - self._schema_at < _SCHEMA_S:
            return
        self._schema_at = time.monotonic()
        schema = self._store.schema
        if schema.schema_id != self._schema.schema_id:
            self._schema = schema
            self._source.use(schema)

    def _take_in(self, batch: Batch) -> None:
        schema = self._schema
        table = batch.table if batch.table.num_columns else empty_table(schema)
        if self._options.pseudonyms is not None:
            table = self._options.pseudonyms.apply(table, schema.user_column, schema.user_kind)
        future = self._options.max_future_ms
        latest = NEVER if future is None else self._clock() + future
        found = screen(table, schema, latest, blame_rows=batch.made_of_messages)
        refused = [self._letter(batch, r.origin, r.reason) for r in batch.refused]
        for row, why in sorted(found.refused.items()):
            user = table.column(schema.user_column)[row].as_py()
            known = user if isinstance(user, str if schema.user_kind == "string" else int) else None
            refused.append(self._letter(batch, batch.origin(row), why, known))
        advances = [Advance(self._source.name, p, m.before, m.after) for p, m in batch.moves.items()]
        done = self._append(batch, found, advances, refused)
        if done is None:
            self.report = replace(self.report, conflicts=self.report.conflicts + 1)
            self._source.start(self._schema, self._positions)
            return
        appended, late = done
        self._source.acknowledge(batch)
        was, duplicates = self.report, int(appended.sum())
        self.report = replace(
            was,
            events=was.events + len(appended) - duplicates,
            duplicates=was.duplicates + duplicates + found.repeated,
            refused=was.refused + len(refused) + late,
            skipped=was.skipped + batch.skipped,
            batches=was.batches + 1,
            bytes=was.bytes + batch.n_bytes,
        )

    def _append(
        self, batch: Batch, found: Screened, advances: Sequence[Advance], refused: Sequence[Letter]
    ) -> tuple[npt.NDArray[np.bool_], int] | None:
        """As ``append_screened``, when the store takes more again; None where another reader was first, or where the
        batch is let go of: it is read again, from the stored position."""
        began, pause_s = time.monotonic(), 0.05
        while True:
            try:
                return self._append_once(batch, found, advances, refused)
            except PositionConflict:
                return None
            except (Overloaded, Unacknowledged) as e:
                if isinstance(e, Unacknowledged) and self._schema.event_id_column is None:
                    raise
                if self._relieve is not None and isinstance(e, Overloaded):
                    self._relieve()
                if self._stop.is_set():
                    return None
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                waited = time.monotonic() - began
                began += waited
                self.report = replace(self.report, waited_s=self.report.waited_s + waited)

    def _append_once(
        self, batch: Batch, found: Screened, advances: Sequence[Advance], refused: Sequence[Letter]
    ) -> tuple[npt.NDArray[np.bool_], int]:
        """Append, and write letters, which stay only where the batch may have happened: whoever reads it again may take
        them in."""
        with self.letters.beside() as letters:
            letters.add(refused)

            def refuse(rows: dict[int, str]) -> None:
                where = {r: batch.origin(int(found.rows[r])) for r in sorted(rows)}
                letters.add([self._letter(batch, o, rows[r], plain(found.events.users[r])) for r, o in where.items()])

            try:
                return append_screened(self._store, found, advances, refuse)
            except (PositionConflict, Overloaded):
                letters.drop()
                raise

    def _letter(self, batch: Batch, origin: Origin, reason: str, user: int | str | None = None) -> Letter:
        return Letter(
            self._source.name,
            origin.partition,
            origin.where,
            reason,
            origin.payload,
            origin.key,
            batch.how,
            user,
            self._clock(),
            None if (move := batch.moves.get(origin.partition)) is None else move.before or "",
        )


def check_key(store: HistoryStore, pseudonyms: Pseudonyms | None) -> None:
    """The same key each time, or one user has two histories. Raises InputError."""
    held = store.recent.positions(KEY_SOURCE).get("")
    mine = None if pseudonyms is None else pseudonyms.check
    if held == mine:
        return
    if held is not None:
        what = "another key" if mine else "none"
        raise InputError(f"user ids of this store are pseudonyms, and {what} is given; give the key that made them")
    assert mine is not None
    if len(store.recent.known_users(1)) or store.pin().n_rows:
        raise InputError("this store holds user ids as they came; pseudonyms are for a store from its first event on")
    set_positions(store, [Advance(KEY_SOURCE, "", None, mine)])


def set_positions(store: HistoryStore, advances: Sequence[Advance]) -> None:
    """Advance partitions without events. Raises PositionConflict."""
    schema = store.schema
    store.append_checked(screen(empty_table(schema), schema).events, advances)


def append_screened(
    store: HistoryStore,
    found: Screened,
    advances: Sequence[Advance],
    refuse: Callable[[dict[int, str]], None],
) -> tuple[npt.NDArray[np.bool_], int]:
    """Append what a screen let through, and advance.

    Args:
        refuse: called with row of ``found.events`` -> reason where corrections turn out to name nothing.

    Returns:
        (m,) which of the appended events were duplicates, and how many were refused.

    Raises:
        PositionConflict: nothing was appended.
    """
    rows, refused = np.arange(len(found.events)), 0
    while len(rows) or advances:
        events = found.events if not refused else found.events.take(rows)
        try:
            return store.append_checked(events, advances).duplicate, refused
        except UnknownEventError as e:
            if not e.rows:
                raise
            assert events.supersedes is not None
            names = events.supersedes.take(np.array(e.rows)).to_arrow().to_pylist()
            gone = dict(zip(rows[list(e.rows)].tolist(), names, strict=True))
            refuse({row: f"it supersedes {n!r}, an event that its user does not have" for row, n in gone.items()})
            rows, refused = np.delete(rows, e.rows), refused + len(gone)
    return np.empty(0, np.bool_), refused
