"""The outcome join that follows its logs: watermarks close windows, and the table is a function of the logs alone.

The *watermark* of a log after a file is the latest time in that file and the ones before, less ``lateness_ms``. A
request closes at the first file of the outcome log whose watermark reaches ``request_ts + last_window_ms``, and its
example is written once, with the outcomes of that file and the ones before. Neither a clock nor how often the join ran
is asked: steps at any moments, killed anywhere, write what one step over the whole logs, the batch join, writes.

Worked example: one outcome ``buy``, window 50 ms, lateness 10 ms; request 7 at 100 ms::

    outcome file 1   buy of 7 at 120, buy of 9 at 155     watermark 145: request 7 is open until 150
    outcome file 2   buy of 9 at 165                      watermark 155: request 7 is written, labelled
    outcome file 3   buy of 7 at 140                      after_write; a table of corrections takes it
    request 8 at 90, logged after one at 160              late: the watermark of its log had passed 140

A log that nothing is appended to has no watermark that moves: ``IdleRule`` appends a heartbeat, a row of the log like
any other, so that its decision, made by a clock, is in the log too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import InputError, SchemaError, StoreError
from thinrow.core.units import NEVER
from thinrow.examples.joiner import (
    LONG_AGO,
    JoinReport,
    JoinState,
    LogRows,
    later_by,
    load_impressions,
    load_outcomes,
    next_state,
)
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.outcomes import JoinCounts, Joined, join, last_window_ms
from thinrow.examples.records import Outcomes
from thinrow.examples.splits import SplitLog
from thinrow.examples.table import ExampleTable

#: The request of a heartbeat: no request may have this id.
HEARTBEAT = -(1 << 63)

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def heartbeat(ts: int) -> Outcomes:
    """An outcome of nothing: outcomes before ``ts`` (ms) are not waited for, but for the lateness."""
    return Outcomes.of("", HEARTBEAT, 0, ts)


class IdleRule:
    """Appends a heartbeat where the outcome log did not grow for ``idle_ms`` of the process's clock.

    Its time is ``clock() - idle_ms``. So no window stays open longer than its end, lateness and twice ``idle_ms``; an
    outcome that a stalled source delivers afterwards counts as ``after_write``.

    Raises:
        InputError: ``idle_ms`` is below 1.
    """

    def __init__(
        self,
        outcomes: OutcomeLog,
        idle_ms: int,
        clock: Clock = system_clock,
        elapsed_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if idle_ms < 1:
            raise InputError(f"idle_ms={idle_ms}; it must be 1 or more")
        self._log, self._idle_ms, self._clock, self._elapsed_s = outcomes, idle_ms, clock, elapsed_s
        self._stop, self._since = -1, 0.0

    def apply(self) -> bool:
        """Look at the log, from time to time; returns whether a heartbeat was appended."""
        stop, now = self._log.numbers().stop, self._elapsed_s()
        if stop != self._stop:
            self._stop, self._since = stop, now
        elif (now - self._since) * 1000 >= self._idle_ms:
            self._log.append(heartbeat(self._clock() - self._idle_ms))
            self._stop, self._since = self._log.numbers().stop, now
            return True
        return False


def join_stream(
    impressions: ImpressionLog,
    outcomes: OutcomeLog,
    table: ExampleTable | SplitLog,
    lateness_ms: int,
    *,
    correct_for_ms: int = 0,
) -> JoinReport:
    """Write the examples that the logs' watermarks have closed, in one commit, and count the outcomes settled by then.

    A late outcome counts as ``after_write`` and changes nothing. Where it shall be a correction, a second table takes
    it, of the same schemas, by a second join with ``correct_for_ms``: so long after its last window a request is looked
    at again, and where its labels are others by then, its example is written there, once, with these. What a correction
    replaces has its request id. Prune the logs below what both joins have done.

    Args:
        lateness_ms: how much earlier than the latest rows of its log a row may be. 0 or more, the same at every call.
        correct_for_ms: 0 for a table of examples, more for one of corrections; the same at every call.

    Raises:
        InputError: a time out of bounds.
        CommitConflict: another writer committed first, or an erasure rewrote a log meanwhile; nothing was written, run
            again.
        StoreError: the table was joined by another rule or with other logs, or a log has lost files.
        SchemaError: the log has another example schema than the table.
        CorruptionError: a log file is damaged, missing or foreign.
    """
    for name, value in (("lateness_ms", lateness_ms), ("correct_for_ms", correct_for_ms)):
        if not 0 <= value < 1 << 60:
            raise InputError(f"{name}={value}; it must be in [0, 2^60)")
    if impressions.example_schema != table.example_schema:
        raise SchemaError(f"table {table.name!r} has another example schema than the log; open both with one schema")
    snapshot_id, text = table.join_state()
    rule = JoinState(lateness_ms=lateness_ms, correct_for_ms=correct_for_ms)
    before = rule if text is None else JoinState.from_json(text, table.name)
    if (before.lateness_ms, before.correct_for_ms) != (lateness_ms, correct_for_ms):
        raise StoreError(
            f"table {table.name!r} was joined with lateness_ms={before.lateness_ms}, correct_for_ms="
            f"{before.correct_for_ms} (-1: by a clock, with join_logs); go on with the same"
        )
    seen = _Seen.of(impressions, outcomes, before, last_window_ms(table.example_schema))
    joined = _join(seen, impressions, outcomes, table)
    examples = joined.examples
    counts = joined.counts + seen.counts()
    totals = before.counts + counts
    committed = len(examples) > 0 or counts != JoinCounts()
    if committed:
        state = replace(seen.after, counts=totals)
        snapshot_id = table.append_after(snapshot_id, examples, state.to_json())
    # What an uncommitted state has seen must be there to be seen again.
    kept = seen.after if committed else before
    lasting = later_by(seen.happened.keys["ts"], seen.window) >= seen.after.cut_ms
    needed = seen.waiting | np.isin(seen.requests.keys["request_id"], seen.happened.keys["request_id"][lasting])
    return JoinReport(
        examples=len(examples),
        pending=int(seen.waiting.sum()),
        pending_outcomes=int(seen.pending_outcomes.sum()),
        counts=counts,
        totals=totals,
        impressions_done=int(seen.requests.file[needed].min(initial=kept.impressions)),
        outcomes_done=int(seen.happened.file[lasting].min(initial=kept.outcomes)),
        snapshot_id=snapshot_id,
    )


def _join(seen: _Seen, impressions: ImpressionLog, outcomes: OutcomeLog, table: ExampleTable | SplitLog) -> Joined:
    """The examples that close, or of a table of corrections those of them whose labels have changed."""
    schema = table.example_schema
    closing = load_impressions(impressions, seen.requests, np.flatnonzero(seen.closing))
    rows = np.flatnonzero(seen.taken)
    taken = load_outcomes(outcomes, seen.happened, rows)
    joined = join(closing, taken, schema, NEVER)
    if not seen.after.correct_for_ms:
        return joined
    was = join(closing, taken.take(~seen.is_late[rows]), schema, NEVER).examples
    changed = np.zeros(len(closing), np.bool_)
    for name, labels in joined.examples.labels.items():
        differs = labels.values != was.labels[name].values
        changed[np.repeat(np.arange(len(closing)), labels.lengths)[differs]] = True
    return replace(joined, examples=joined.examples.take(np.flatnonzero(changed)))


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the logs and the state before say, of n rows of requests and m of outcomes.

    Attributes:
        requests, happened: all rows that the logs keep.
        window: ms from a request to when it is joined: its last window, and the time for corrections.
        new_request, is_first, is_dropped: (n,) not seen before; first of its id; of these, logged too late.
        closing, waiting: (n,) written now; later.
        taken, is_late: (m,) for a request that closes now; not there when the example was written first.
        after_write, unknown, early: (m,) settled now, as late, without a request, or before one that is open.
        pending_outcomes: (m,) not settled yet.
    """

    after: JoinState
    requests: LogRows
    happened: LogRows
    window: int
    new_request: Mask
    is_first: Mask
    is_dropped: Mask
    closing: Mask
    waiting: Mask
    taken: Mask
    is_late: Mask
    after_write: Mask
    unknown: Mask
    early: Mask
    pending_outcomes: Mask

    @classmethod
    def of(cls, impressions: ImpressionLog, outcomes: OutcomeLog, before: JoinState, last_window: int) -> _Seen:
        # Listed once: a file that is appended while this runs must count as unseen.
        numbers = impressions.numbers(), outcomes.numbers()
        requests, happened = LogRows.of(impressions, numbers[0]), LogRows.of(outcomes, numbers[1])
        late, window = before.lateness_ms, last_window + before.correct_for_ms
        shown = _latest(requests, numbers[0], before.impressions, before.newest_request)
        told = _latest(happened, numbers[1], before.outcomes, before.newest_outcome)
        newest = int(shown[-1]), int(told[-1])
        cut = max(min(newest) - late, before.cut_ms)
        after = replace(
            next_state(before, impressions, outcomes, numbers, cut),
            lateness_ms=late,
            correct_for_ms=before.correct_for_ms,
            newest_request=newest[0],
            newest_outcome=newest[1],
        )

        ids = requests.keys["request_id"]
        is_first = np.zeros(len(ids), np.bool_)
        is_first[np.unique(ids, return_index=True)[1]] = True
        new = requests.file >= before.impressions
        ends, closes = (later_by(requests.keys["ts"], w) for w in (last_window, window))
        # The watermark of the files before its own.
        is_dropped = is_first & (ends <= shown[requests.file - numbers[0].start] - late)
        known = is_first & ~is_dropped
        is_old = known & ~new & (closes <= before.newest_outcome - late)
        closed_by, written_by = (_first_file(told, late, numbers[1], t) for t in (closes, ends))
        closing = known & ~is_old & (closed_by < numbers[1].stop)

        which = _find(ids, known, happened.keys["request_id"])
        has = which >= 0
        # Of no request, -1, is the last element.
        of_closing, of_old = (np.append(a, False)[which] for a in (closing, is_old))
        last_file, first_file = (np.append(a, NEVER)[which] for a in (closed_by, written_by))
        file, is_seen = happened.file, happened.file < before.outcomes
        expires, beats = later_by(happened.keys["ts"], window), happened.keys["request_id"] == HEARTBEAT
        # Of an open request such a one is early; of one that comes yet it would be, and no label either.
        expired = expires <= cut
        open_ = ~beats & (of_old | ~(is_seen & (expires <= before.cut_ms)))
        after_it = (file > last_file) | (of_old & ~is_seen)
        return cls(
            after=after,
            requests=requests,
            happened=happened,
            window=window,
            new_request=new,
            is_first=is_first,
            is_dropped=is_dropped,
            closing=closing,
            waiting=known & ~is_old & ~closing,
            taken=open_ & of_closing & ~after_it,
            is_late=file > first_file,
            after_write=open_ & after_it & (of_closing | (of_old & ~is_seen)),
            unknown=open_ & ~has & expired,
            early=open_ & has & expired & ~of_old & ~of_closing,
            pending_outcomes=open_ & ~expired & ~of_old & ~of_closing,
        )

    def counts(self) -> JoinCounts:
        """Of what is settled by keys alone."""
        return JoinCounts(
            after_write=int(self.after_write.sum()),
            unknown_request=int(self.unknown.sum()),
            early=int(self.early.sum()),
            repeated_requests=int((self.new_request & ~self.is_first).sum()),
            late_requests=int((self.new_request & self.is_dropped).sum()),
        )


def _latest(rows: LogRows, numbers: range, first_new: int, newest: int) -> Ints:
    """(files + 1,) latest time in all files before each of ``numbers``, and in all. Of files before the kept ones, what
    the state says holds from the first new file on: no request that those closed can come after."""
    latest = np.full(len(numbers) + 1, LONG_AGO)
    np.maximum.at(latest, rows.file - numbers.start + 1, rows.keys["ts"])
    start = max(min(first_new - numbers.start, len(numbers)), 0)
    latest[start] = max(int(latest[start]), newest)
    return np.maximum.accumulate(latest)


def _first_file(told: Ints, lateness_ms: int, numbers: range, ends: Ints) -> Ints:
    """Number of the first file whose watermark reaches each of ``ends``; that after the last where none does."""
    return np.searchsorted(told[1:] - lateness_ms, ends, side="left") + numbers.start


def _find(ids: Ints, known: Mask, wanted: Ints) -> Ints:
    """(m,) position in ``ids`` of each wanted one among the known, which are distinct; -1 where it is not there."""
    at = np.flatnonzero(known)
    if not len(at):
        return np.full(len(wanted), -1, np.int64)
    order = at[np.argsort(ids[at], kind="stable")]
    found = order[np.minimum(np.searchsorted(ids[order], wanted), len(order) - 1)]
    return np.where(ids[found] == wanted, found, -1)
