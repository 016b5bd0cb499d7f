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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import InputError, PositionConflict
from thinrow.core.units import NEVER
from thinrow.examples.log import OutcomeLog
from thinrow.examples.records import Outcomes
from thinrow.history.dead_letters import Letter
from thinrow.history.recent.tier import Advance
from thinrow.online.outcome_fields import OutcomeFields, outcomes_of
from thinrow.online.outcome_ids import KnownIds
from thinrow.online.outcome_retry import outcome_letters
from thinrow.sources.screen import screen
from thinrow.sources.source import Batch, Move, Origin, Source
from thinrow.sources.wanted import empty_table


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
        letters: str | Path,
        fields: OutcomeFields | None = None,
        options: OutcomeOptions | None = None,
        progress: Callable[[OutcomeReport], None] | None = None,
        clock: Clock = system_clock,
    ) -> None:
        """Checks only; ``run`` begins. ``letters`` is the folder for what is refused."""
        self._log, self._source, self._letters = log, source, outcome_letters(log, letters)
        self._fields, self._options = fields or OutcomeFields(), options or OutcomeOptions()
        self._schema = self._fields.schema()
        self._progress, self._clock = progress, clock
        self._known = KnownIds(log) if self._fields.outcome_id is not None else None
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
        if not self._held.is_followed_by(batch):
            # The source began at the stored positions in between: its group gave it other partitions.
            self._begin_again()
            return
        table = batch.table if batch.table.num_columns else empty_table(self._schema)
        future = self._options.max_future_ms
        latest = NEVER if future is None else self._clock() + future
        found = screen(table, self._schema, latest, blame_rows=batch.made_of_messages)
        outcomes, wrong = outcomes_of(found, self._fields)
        letters = [self._letter(batch, r.origin, r.reason) for r in batch.refused]
        refused = {**found.refused, **wrong}
        letters += [self._letter(batch, batch.origin(row), why) for row, why in sorted(refused.items())]
        self._held.add(batch, outcomes, letters, found.repeated)

    def _letter(self, batch: Batch, origin: Origin, reason: str) -> Letter:
        place = self._source.name, origin.partition, origin.where
        return Letter(*place, reason, origin.payload, origin.key, batch.how, None, self._clock())

    def _begin_again(self) -> None:
        """At the stored positions; what is held comes again."""
        self.report = replace(self.report, conflicts=self.report.conflicts + 1)
        self._held = _Held()
        self._source.start(self._schema, self._positions)

    def _flush(self) -> None:
        held, self._held = self._held, _Held()
        if not held.moves:
            return
        self._letters.add(held.letters)
        advances = [Advance(self._source.name, p, m.before, m.after) for p, m in held.moves.items()]
        read = Outcomes.concat(held.outcomes)
        try:
            if self._known is not None:
                outcomes, again = self._known.append(read, advances)
            else:
                self._log.append(read, advances)
                outcomes, again = len(read), 0
        except PositionConflict:
            self._begin_again()
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

    def is_followed_by(self, batch: Batch) -> bool:
        """Whether the batch goes on where what is held ends, so that the two can be one file."""
        return all(p not in self.moves or self.moves[p].after == move.before for p, move in batch.moves.items())

    def is_due(self, options: OutcomeOptions) -> bool:
        """Whether it is to become a file."""
        late = time.monotonic() - self._since >= options.roll_s
        return bool(self.moves) and (self.n >= options.roll_events or late)


def _gone(row: int) -> Origin:
    raise AssertionError(f"row {row} of a batch that was taken in")
