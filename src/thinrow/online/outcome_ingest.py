"""Outcomes from an event source into an outcome log: at least once in, exactly once in the log.

A source (a topic, JSON lines, Parquet) is read as for a store (``thinrow.sources.ingest``): what cannot be decoded or
is no outcome becomes a dead letter, the rest flows on. What has come within some seconds is one file of the log, and
the positions of the source are in it::

    read        outcomes and the moves of their partitions, until there are enough or it is time
    letters     written and synced: what is refused is safe before its position is
    append      outcomes and positions, one file; nothing where a partition stands elsewhere (PositionConflict)

Worked example: ``{"request_id": 7, "item": 12, "name": "click", "ts": 3500, "id": "c-1"}`` at offset 5. The file that
holds it says ``{"clicks": {"0": {"offset": 6}}}``. A process killed before the file is there reads it again; after, it
goes on at 6. Delivered again at offset 9, ``c-1`` of request 7 is known, and left out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import CommitConflict, InputError, PositionConflict
from thinrow.core.units import NEVER
from thinrow.examples.log import OutcomeLog
from thinrow.examples.records import Outcomes, text_column
from thinrow.examples.streaming import HEARTBEAT
from thinrow.history.dead_letters import DeadLetters, Letter
from thinrow.history.recent.tier import Advance
from thinrow.jagged import Column
from thinrow.schema import ColumnSpec, EventSchema, Trait
from thinrow.sources.screen import Screened, screen
from thinrow.sources.source import Batch, Move, Origin, Source
from thinrow.sources.wanted import empty_table

_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class OutcomeFields:
    """Which fields of a source's events are what of an outcome.

    Attributes:
        request_id, item, ts: integers; ``ts`` may be a time as text too (ISO 8601).
        name: text, which outcome; None where ``outcome`` says it for all.
        outcome: the outcome that every event is; None where ``name`` says it.
        value: an integer within int32, 1 where it is null or not there; None for 1 throughout.
        outcome_id: names an outcome among those of its request, text, or an integer with ``integer_ids``; one that came
            before is left out. ``source_id`` for the place in the source. None where nothing does.
        integer_ids: see ``outcome_id``.
    """

    request_id: str = "request_id"
    item: str = "item"
    ts: str = "ts"
    name: str | None = "name"
    outcome: str | None = None
    value: str | None = "value"
    outcome_id: str | None = None
    integer_ids: bool = False

    def __post_init__(self) -> None:
        if (self.name is None) == (self.outcome is None):
            raise InputError(f"name={self.name!r}, outcome={self.outcome!r}; give the field of names, or one outcome")

    def schema(self) -> EventSchema:
        """The events of the source, as sources and ``screen`` take them: the request in the user's place."""
        columns = [ColumnSpec(1, self.item, Trait.ID, "int64", "main")]
        if self.name is not None:
            columns.append(ColumnSpec(2, self.name, Trait.CATEGORICAL, "string", "main"))
        if self.value is not None:
            columns.append(ColumnSpec(3, self.value, Trait.ID, "int64", "main", nullable=True))
        kind = "int64" if self.integer_ids else "string"
        return EventSchema(
            tuple(columns),
            user_column=self.request_id,
            time_column=self.ts,
            event_id_column=self.outcome_id,
            event_id_dtype=None if self.outcome_id is None else kind,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, slots=True)
class OutcomeOptions:
    """Attributes:
    batch_events: of one read, at most.
    linger_s: for which a read waits.
    roll_events, roll_s: so many outcomes, or what came in so long, become one file of the log.
    max_future_ms: outcomes later than the clock by more are refused, for their time would close every window; None for
        no bound.
    """

    batch_events: int = 16_384
    linger_s: float = 0.05
    roll_events: int = 65_536
    roll_s: float = 5.0
    max_future_ms: int | None = 3_600_000

    def __post_init__(self) -> None:
        if min(self.batch_events, self.roll_events) < 1 or min(self.linger_s, self.roll_s) <= 0:
            raise InputError(
                f"batches of {self.batch_events} in {self.linger_s} s, files of {self.roll_events} in {self.roll_s} s; "
                "all must be above 0"
            )


@dataclass(frozen=True, slots=True)
class OutcomeReport:
    """Attributes:
    outcomes: in the log.
    duplicates: left out, for the log has their request and id.
    refused: became dead letters.
    skipped: messages without an event, by intent.
    files: of the log.
    conflicts: batches that were read again because another reader was first.
    lag: what the source knows of and was not read; None where it cannot tell.
    """

    outcomes: int = 0
    duplicates: int = 0
    refused: int = 0
    skipped: int = 0
    files: int = 0
    conflicts: int = 0
    lag: int | None = None


class OutcomeIngest:
    """One source into one outcome log."""

    def __init__(
        self,
        log: OutcomeLog,
        source: Source,
        letters: DeadLetters,
        fields: OutcomeFields | None = None,
        options: OutcomeOptions | None = None,
        progress: Callable[[OutcomeReport], None] | None = None,
        clock: Clock = system_clock,
    ) -> None:
        """Checks only; ``run`` begins. ``letters`` get what is refused."""
        self._log, self._source, self._letters = log, source, letters
        self._fields, self._options = fields or OutcomeFields(), options or OutcomeOptions()
        self._schema = self._fields.schema()
        self._progress, self._clock = progress, clock
        self._known = _KnownIds(log) if self._fields.outcome_id is not None else None
        self._held = _Held()
        self.report = OutcomeReport()

    def run(self, *, follow: bool = False, stop: threading.Event | None = None) -> OutcomeReport:
        """Read to the end of the source, or, with ``follow``, until ``stop`` is set; what was read is then in the log.

        Raises:
            StoreError: source, log or letters refuse; all that is stored is whole, and a new run goes on.
            InputError: the source does not have the fields.
        """
        stop = stop or threading.Event()
        self._held = _Held()
        self._source.start(self._schema, self._positions)
        while not stop.is_set():
            batch = self._source.read(self._options.batch_events, self._options.linger_s)
            if batch is not None:
                self._hold(batch)
            ended = batch is None and not follow and self._source.ended()
            if self._held.is_due(self._options) or (ended and self._held.moves):
                self._flush()
            elif ended:
                break
            if self._progress is not None:
                self._progress(replace(self.report, lag=self._source.lag()))
        self._flush()
        self.report = replace(self.report, lag=self._source.lag())
        return self.report

    def _positions(self) -> dict[str, str]:
        return self._log.positions(self._source.name)

    def _hold(self, batch: Batch) -> None:
        table = batch.table if batch.table.num_columns else empty_table(self._schema)
        future = self._options.max_future_ms
        latest = NEVER if future is None else self._clock() + future
        found = screen(table, self._schema, latest, blame_rows=batch.made_of_messages)
        outcomes, wrong = self._outcomes(found)
        letters = [self._letter(batch, r.origin, r.reason) for r in batch.refused]
        refused = {**found.refused, **wrong}
        letters += [self._letter(batch, batch.origin(row), why) for row, why in sorted(refused.items())]
        self._held.add(batch, outcomes, letters, found.repeated)

    def _outcomes(self, found: Screened) -> tuple[Outcomes, dict[int, str]]:
        """The outcomes of what was screened, and row -> why a row is none."""
        events, fields = found.events, self._fields
        n = len(events)
        requests = np.asarray(events.users, np.int64)
        values = np.ones(n, np.int64)
        if fields.value is not None:
            column = events.columns[fields.value]
            values = np.where(column.valid, column.values, 1) if column.valid is not None else column.values
        name = text_column(fields.outcome or "", n) if fields.name is None else events.columns[fields.name]
        ids = events.event_ids
        if ids is not None and fields.integer_ids:
            ids = Column.from_arrow(pc.cast(ids.to_arrow(), pa.string()), "string")
        made = Outcomes(requests, events.columns[fields.item].values, name, events.event_ts, values, ids)
        wrong: dict[int, str] = {}
        for mask, why in (
            (requests == HEARTBEAT, f"request {HEARTBEAT} is that of heartbeats, of no outcome"),
            (np.abs(values) > _INT32, f"its value is beyond {_INT32}, as much as a label holds"),
        ):
            wrong |= dict.fromkeys(found.rows[np.flatnonzero(mask)].tolist(), why)
        if wrong:
            made = made.take(~np.isin(found.rows, list(wrong)))
        return made, wrong

    def _letter(self, batch: Batch, origin: Origin, reason: str) -> Letter:
        place = self._source.name, origin.partition, origin.where
        return Letter(*place, reason, origin.payload, origin.key, batch.how, None, self._clock())

    def _flush(self) -> None:
        held, self._held = self._held, _Held()
        if not held.moves:
            return
        self._letters.add(held.letters)
        advances = [Advance(self._source.name, p, m.before, m.after) for p, m in held.moves.items()]
        try:
            outcomes, again = self._append(Outcomes.concat(held.outcomes), advances)
        except PositionConflict:
            self.report = replace(self.report, conflicts=self.report.conflicts + 1)
            self._source.start(self._schema, self._positions)
            return
        for batch in held.batches:
            self._source.acknowledge(batch)
        was = self.report
        self.report = replace(
            was,
            outcomes=was.outcomes + outcomes,
            duplicates=was.duplicates + again + held.repeated,
            refused=was.refused + len(held.letters),
            skipped=was.skipped + held.skipped,
            files=was.files + 1,
        )

    def _append(self, outcomes: Outcomes, advances: Sequence[Advance]) -> tuple[int, int]:
        """How many outcomes went into the log, and how many were there. Raises PositionConflict."""
        if self._known is None:
            self._log.append(outcomes, advances)
            return len(outcomes), 0
        while True:
            number = self._known.look()
            names = names_of(outcomes)
            fresh = self._known.fresh(names)
            try:
                self._log.append(outcomes.take(fresh), advances, at=number)
            except CommitConflict:
                # Others appended, perhaps these very outcomes.
                continue
            self._known.add(number, [n for n, new in zip(names, fresh.tolist(), strict=True) if new and n is not None])
            return int(fresh.sum()), int((~fresh).sum())


class _Held:
    """What was read and is not in the log yet."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.outcomes: list[Outcomes] = []
        self.letters: list[Letter] = []
        self.moves: dict[str, Move] = {}
        self.repeated = self.skipped = self.n = 0
        self._since = time.monotonic()

    def add(self, batch: Batch, outcomes: Outcomes, letters: list[Letter], repeated: int) -> None:
        if not self.moves:
            self._since = time.monotonic()
        for partition, move in batch.moves.items():
            first = self.moves.get(partition, move)
            self.moves[partition] = Move(first.before, move.after)
        # For the acknowledgement its moves are enough.
        self.batches.append(Batch(batch.table.slice(0, 0), batch.moves, _gone))
        self.outcomes.append(outcomes)
        self.letters += letters
        self.repeated += repeated
        self.skipped += batch.skipped
        self.n += len(outcomes) + len(letters)

    def is_due(self, options: OutcomeOptions) -> bool:
        """Whether it is to become a file."""
        late = time.monotonic() - self._since >= options.roll_s
        return bool(self.moves) and (self.n >= options.roll_events or late)


def _gone(row: int) -> Origin:
    raise AssertionError(f"row {row} of a batch that was taken in")


class _KnownIds:
    """Requests and ids of the outcomes that the files of a log hold: of those that are there, for a file that is pruned
    is settled, and what comes again of it finds its request closed."""

    def __init__(self, log: OutcomeLog) -> None:
        self._log = log
        self._next = 0
        self._files: deque[tuple[int, list[str]]] = deque()
        self._names: set[str] = set()

    def look(self) -> int:
        """Read what others appended; the number of the next file."""
        numbers = self._log.numbers()
        for number in range(max(self._next, numbers.start), numbers.stop):
            self.add(number, [n for n in names_of(self._log.read(number)) if n is not None])
        while self._files and self._files[0][0] < numbers.start:
            self._names.difference_update(self._files.popleft()[1])
        self._next = numbers.stop
        return numbers.stop

    def add(self, number: int, names: list[str]) -> None:
        """Those of a file."""
        self._files.append((number, names))
        self._names.update(names)
        self._next = number + 1

    def fresh(self, names: Sequence[str | None]) -> npt.NDArray[np.bool_]:
        """(n,) whether a name is in no file and no earlier row; one that is None always is."""
        out, here = np.ones(len(names), np.bool_), set[str]()
        for i, name in enumerate(names):
            if name is not None:
                out[i] = name not in self._names and name not in here
                here.add(name)
        return out


def names_of(outcomes: Outcomes) -> list[Any]:
    """(n,) request and id of each, as one text; None where it has no id."""
    if outcomes.outcome_id is None:
        return [None] * len(outcomes)
    requests = pc.cast(pa.array(outcomes.request_id), pa.string())
    ids = outcomes.outcome_id.to_arrow().cast(pa.string())
    return list(pc.binary_join_element_wise(requests, ids, " ").to_pylist())
