"""TableWriter: from the logs into the training table, in few commits of many rows, or into a log of splits.

Worked example: a service of 500 requests a second, a commit a minute: each brings 30,000 examples, a file a bucket.
After sixteen commits every bucket has sixteen small files; ``cluster`` makes one of them, and what nobody names goes.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import CommitConflict, InputError
from thinrow.core.units import NEVER
from thinrow.examples.joiner import JoinReport, join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.splits import SplitLog
from thinrow.examples.streaming import IdleRule, join_stream
from thinrow.examples.table import ExampleTable
from thinrow.online.journal import Journal

_log = logging.getLogger(__name__)

COMMIT_S, CLUSTER_EVERY, IDLE_MS = 60.0, 16, 300_000


class TableWriter:
    """Joins closed requests into a table every ``commit_s`` seconds, on a thread of its own.

    Attributes:
        last: what the last join did, into the table where there is one; None before the first.
        error: what the last join failed with; None where it did not. It is tried again.
    """

    def __init__(
        self,
        impressions: ImpressionLog,
        outcomes: OutcomeLog,
        table: ExampleTable | None,
        *,
        splits: SplitLog | None = None,
        journal: Journal | None = None,
        commit_s: float = COMMIT_S,
        cluster_every: int = CLUSTER_EVERY,
        clock: Clock = system_clock,
        lateness_ms: int | None = None,
        idle_ms: int = IDLE_MS,
    ) -> None:
        """Begin. ``cluster_every`` commits the buckets are rewritten as one sorted file each; ``journal`` is the one
        that writes to the logs, where one does. ``splits`` gets the same examples, sealed in the order in which they
        close, for sessions that follow; the logs keep what either has yet to join.

        Windows close by ``clock``, or, given ``lateness_ms``, by the watermarks of the logs (``join_stream``); then
        requests that wait while the outcome log is idle for ``idle_ms`` are closed by a heartbeat.

        Raises:
            InputError: neither a table nor ``splits``, or ``splits`` without ``lateness_ms``.
        """
        if table is None and splits is None:
            raise InputError("neither a table nor a log of splits; name one to join into")
        if splits is not None and lateness_ms is None:
            raise InputError("a log of splits is closed by the times of its logs; give lateness_ms")
        self._lateness_ms = lateness_ms
        self._idle = IdleRule(outcomes, idle_ms, clock)
        self._logs, self._table, self._splits = (impressions, outcomes), table, splits
        self._clock, self._journal = clock, journal
        self._every, self._commit_s = cluster_every, commit_s
        self._commits = 0
        self._stop = threading.Event()
        self.last: JoinReport | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="table", daemon=True)
        self._thread.start()

    def run_once(self) -> JoinReport:
        """Join what has closed by now, prune the logs of it, and cluster where it is time. Raises as
        ``join_logs``."""
        impressions, outcomes = self._logs
        reports = self._join()
        report = reports[0]
        floors = (NEVER, NEVER) if self._journal is None else self._journal.floors
        impressions.prune(min(floors[0], *(r.impressions_done for r in reports)))
        outcomes.prune(min(floors[1], *(r.outcomes_done for r in reports)))
        self._commits += report.examples > 0
        if self._table is not None and self._commits >= self._every:
            self._table.cluster()
            self._table.remove_unreferenced()
            self._commits = 0
        self.last = report
        return report

    def _join(self) -> list[JoinReport]:
        """What the joins did, the table's first."""
        if self._lateness_ms is None:
            assert self._table is not None
            return [join_logs(*self._logs, self._table, self._clock())]
        if self.last is not None and self.last.pending:
            self._idle.apply()
        into = [t for t in (self._table, self._splits) if t is not None]
        return [join_stream(*self._logs, one, self._lateness_ms) for one in into]

    def close(self) -> None:
        """Join once more, and end."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            stopped = self._stop.wait(self._commit_s)
            try:
                self.run_once()
                self.error = None
            except CommitConflict:
                pass  # another writer was first; what is left is joined next time
            except Exception as e:  # no other may end the thread, for nothing would be joined any more
                if str(e) != str(self.error):
                    _log.warning("the join failed: %s", e)
                self.error = e
            if stopped:
                return
