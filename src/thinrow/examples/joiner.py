"""The outcome join over logs, resumable: what was joined is committed with the examples, in one snapshot.

State, in the summary of the table's newest snapshot: every file of the logs numbered below ``impressions`` and
``outcomes`` was seen by a join at ``cut_ms``, and no later one. What that join did follows from the logs alone:

- a request is written when its first row stands in a seen file and ``request_ts + last_window_ms <= cut_ms``;
- an outcome of a seen file is settled when its request is written, ``ts + last_window_ms <= cut_ms``, or no outcome of
  the schema has its name.

So a process killed anywhere leaves either the old snapshot, and the next join does the same again, or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CommitConflict, CorruptionError, NewerFormatError, SchemaError, StoreError
from thinrow.core.units import NEVER
from thinrow.examples.log import KEY_DTYPE, ImpressionLog, OutcomeLog, keys_of
from thinrow.examples.outcomes import JoinCounts, join, known_names, last_window_ms
from thinrow.examples.records import Impressions, Outcomes
from thinrow.examples.table import ExampleTable

#: Of a join up to times that its caller gives, and of one that follows watermarks (``thinrow.examples.streaming``).
STATE_FORMAT, STREAM_FORMAT = 1, 2
#: Earlier than every time; far enough from the end of int64 to subtract from.
LONG_AGO = -(1 << 62)
_RULE = ("lateness_ms", "correct_for_ms", "newest_request", "newest_outcome")


@dataclass(frozen=True, slots=True)
class JoinState:
    """Attributes:
    cut_ms: the time of the last join (its ``now_ms``, or that of an earlier join where the clock went back).
    impressions: number of the first file of the impression log that no join has seen.
    outcomes: the same of the outcome log.
    logs: ids of the two logs.
    counts: outcomes settled by all joins so far.
    lateness_ms: how far watermarks stay behind; -1 where callers give the time.
    correct_for_ms: for a table of corrections, how long after its last window an example is corrected.
    newest_request, newest_outcome: the latest times in files that were seen; kept by a join that follows watermarks.
    """

    cut_ms: int = -1
    impressions: int = 1
    outcomes: int = 1
    logs: tuple[str, str] = ("", "")
    counts: JoinCounts = field(default_factory=JoinCounts)
    lateness_ms: int = -1
    correct_for_ms: int = 0
    newest_request: int = LONG_AGO
    newest_outcome: int = LONG_AGO

    def to_json(self) -> str:
        """Canonical JSON; ``from_json`` reverses it."""
        counts = self.counts.to_dict()
        body: dict[str, Any] = {"cut_ms": self.cut_ms, "impressions": self.impressions, "outcomes": self.outcomes}
        body |= {"logs": self.logs, "counts": counts}
        if self.lateness_ms < 0:
            # The first format knows no such requests, and this join has none.
            del counts["late_requests"]
            return json.dumps({"format": STATE_FORMAT} | body)
        rule = {n: getattr(self, n) for n in _RULE}
        return json.dumps({"format": STREAM_FORMAT} | body | rule)

    @classmethod
    def from_json(cls, text: str, where: str) -> JoinState:
        """Raises NewerFormatError on a newer format, CorruptionError (naming ``where``) on anything else."""
        try:
            data = json.loads(text)
            version = int(data["format"])
            if version > STREAM_FORMAT:
                newest = STREAM_FORMAT
                raise NewerFormatError(
                    f"join state of {where} has format {version}, newer than {newest}; update thinrow"
                )
            first, second = data["logs"]
            counts = JoinCounts(**data["counts"])
            rule = {n: int(data[n]) for n in _RULE} if version == STREAM_FORMAT else {}
            seen = int(data["cut_ms"]), int(data["impressions"]), int(data["outcomes"])
            return cls(*seen, (first, second), counts, **rule)
        except (ValueError, KeyError, TypeError) as e:
            raise CorruptionError(f"unreadable join state: {e}", file=where) from e


@dataclass(frozen=True, slots=True)
class JoinReport:
    """Attributes:
    examples: examples written by this join.
    pending: requests that wait for a window to close.
    pending_outcomes: outcomes that wait.
    counts: outcomes settled by this join.
    totals: outcomes settled by all joins into the table.
    impressions_done: files of the impression log numbered below it are not needed by later joins (``prune``); an
        outcome that arrives for a request of a pruned file counts as ``unknown_request``, not ``after_write``.
    outcomes_done: the same of the outcome log.
    snapshot_id: the table's snapshot after the join; None where nothing was ever joined.
    """

    examples: int
    pending: int
    pending_outcomes: int
    counts: JoinCounts
    totals: JoinCounts
    impressions_done: int
    outcomes_done: int
    snapshot_id: int | None


@dataclass(frozen=True, slots=True)
class LogRows:
    """Rows of several log files: ``keys`` (n,) KEY_DTYPE, ``file`` (n,) number of its file, ``row`` (n,) row in it."""

    keys: npt.NDArray[np.void]
    file: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]

    @classmethod
    def of(cls, log: ImpressionLog | OutcomeLog, numbers: range) -> LogRows:
        """Of the files of these numbers."""
        parts = [log.keys(n) for n in numbers]
        lengths = [len(p) for p in parts]
        keys = np.concatenate([np.empty(0, KEY_DTYPE), *parts])
        row = np.concatenate([np.empty(0, np.int64), *(np.arange(n) for n in lengths)])
        return cls(keys, np.repeat(np.array(numbers, np.int64), lengths), row)

    def by_file(self, wanted: npt.NDArray[np.intp]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Number of each file that holds one of ``wanted`` (ascending positions), and the rows in it."""
        numbers, first = np.unique(self.file[wanted], return_index=True)
        for number, part in zip(numbers.tolist(), np.split(wanted, first[1:]), strict=False):
            yield number, self.row[part]

    def check(self, kind: str, number: int, request_id: npt.NDArray[np.int64], ts: npt.NDArray[np.int64]) -> None:
        """Hold what was read of a file to its keys. Raises CommitConflict: an erasure rewrote it since."""
        first, last = np.searchsorted(self.file, [number, number + 1])
        if not np.array_equal(self.keys[first:last], keys_of(request_id, ts)):
            raise CommitConflict(f"an erasure rewrote file {number} of the log of {kind} during the join; run again")


def join_logs(impressions: ImpressionLog, outcomes: OutcomeLog, table: ExampleTable, now_ms: int) -> JoinReport:
    """Write the examples that have closed by ``now_ms``, in one commit, and count the outcomes settled by then.

    A request is written once, however often it was logged, as long as the log keeps the file of its first row. Memory:
    the requests and outcomes that settle in this call, and 32 bytes for each row that the logs keep.

    Raises:
        CommitConflict: another writer committed first, or an erasure rewrote a log meanwhile; nothing was written, run
            again.
        StoreError: the table was joined with other logs, or a log has lost files.
        SchemaError: the log has another example schema than the table.
        CorruptionError: a log file is damaged, missing or foreign.
    """
    if impressions.example_schema != table.example_schema:
        raise SchemaError(f"table {table.name!r} has another example schema than the log; open both with one schema")
    snapshot_id, text = table.join_state()
    before = JoinState() if text is None else JoinState.from_json(text, table.name)
    # Listed once: a file that is appended while this runs must count as unseen.
    numbers = impressions.numbers(), outcomes.numbers()
    state = next_state(before, impressions, outcomes, numbers, max(now_ms, before.cut_ms))
    if before.lateness_ms >= 0:
        raise StoreError(f"table {table.name!r} is joined by watermarks; go on with join_stream")
    schema, window = table.example_schema, last_window_ms(table.example_schema)
    requests, happened = LogRows.of(impressions, numbers[0]), LogRows.of(outcomes, numbers[1])

    ids, closes = requests.keys["request_id"], later_by(requests.keys["ts"], window)
    is_first = np.zeros(len(ids), np.bool_)
    is_first[np.unique(ids, return_index=True)[1]] = True
    seen = requests.file < before.impressions
    is_written = is_first & seen & (closes <= before.cut_ms)
    closing = is_first & ~is_written & (closes <= state.cut_ms)
    waiting = is_first & (closes > state.cut_ms)
    written = np.unique(ids[is_written])

    settled = (later_by(happened.keys["ts"], window) <= before.cut_ms) | np.isin(happened.keys["request_id"], written)
    old = happened.file < before.outcomes
    resumed = load_outcomes(outcomes, happened, np.flatnonzero(old & ~settled))
    fresh = load_outcomes(outcomes, happened, np.flatnonzero(~old))
    joined = join(
        load_impressions(impressions, requests, np.flatnonzero(closing)),
        Outcomes.concat([resumed.take(known_names(resumed, schema)), fresh]),
        schema,
        state.cut_ms,
        written=written,
        waiting=ids[waiting],
    )
    # Rows logged again never reach ``join``; the join that first sees them counts them.
    counts = joined.counts + JoinCounts(repeated_requests=int((~is_first & ~seen).sum()))
    totals = before.counts + counts
    if len(joined.examples) or counts != JoinCounts():
        snapshot_id = table.append_after(snapshot_id, joined.examples, replace(state, counts=totals).to_json())

    # Outcomes that time has not settled are settled by what the log says of their request: both must stay.
    lasting = later_by(happened.keys["ts"], window) > state.cut_ms
    needed = waiting | np.isin(ids, happened.keys["request_id"][lasting])
    unsettled = lasting & ~np.isin(happened.keys["request_id"], ids[is_first & ~waiting])
    return JoinReport(
        examples=len(joined.examples),
        pending=int(waiting.sum()),
        pending_outcomes=len(joined.pending_outcomes),
        counts=counts,
        totals=totals,
        impressions_done=int(requests.file[needed].min(initial=state.impressions)),
        outcomes_done=int(happened.file[unsettled].min(initial=state.outcomes)),
        snapshot_id=snapshot_id,
    )


def next_state(
    before: JoinState, impressions: ImpressionLog, outcomes: OutcomeLog, numbers: tuple[range, range], cut_ms: int
) -> JoinState:
    """What a join that sees these files has done. Raises StoreError: these are other logs, or files are lost."""
    logs = (impressions.id, outcomes.id)
    if before.logs != ("", "") and before.logs != logs:
        raise StoreError(f"the table was joined with logs {before.logs}, these are {logs}; pass the same logs")
    for kind, done, have in (
        ("impressions", before.impressions, numbers[0]),
        ("outcomes", before.outcomes, numbers[1]),
    ):
        if have.stop < done:
            raise StoreError(f"the log of {kind} ends before file {have.stop}, file {done - 1} was joined; restore it")
    return JoinState(cut_ms, numbers[0].stop, numbers[1].stop, logs, before.counts)


def load_impressions(log: ImpressionLog, rows: LogRows, wanted: npt.NDArray[np.intp]) -> Impressions:
    """The records of rows at ``wanted``, ascending positions. Raises as ``LogRows.check``."""
    parts = []
    for number, taken in rows.by_file(wanted):
        records = log.read(number)
        rows.check(log.kind, number, records.request_id, records.snapshots.request_ts)
        parts.append(records.take(taken))
    return Impressions.concat(parts) if parts else Impressions.empty(log.event_schema, log.example_schema)


def load_outcomes(log: OutcomeLog, rows: LogRows, wanted: npt.NDArray[np.intp]) -> Outcomes:
    """The records of rows at ``wanted``, ascending positions. Raises as ``LogRows.check``."""
    parts = []
    for number, taken in rows.by_file(wanted):
        records = log.read(number)
        rows.check(log.kind, number, records.request_id, records.ts)
        parts.append(records.take(taken))
    return Outcomes.concat(parts)


def later_by(ts: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
    """``ts + window``, at most NEVER: a time near the end of int64 must not become one long past."""
    return np.minimum(ts, NEVER - window) + window
