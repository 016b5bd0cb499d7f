"""TableWriter: from the logs into the training table, in few commits of many rows.

Worked example: a service of 500 requests a second, a commit a minute: each brings 30,000 examples, a file a bucket.
After sixteen commits every bucket has sixteen small files; ``cluster`` makes one of them, and what nobody names goes.
"""

from __future__ import annotations

import threading
from types import TracebackType

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import CommitConflict, ThinrowError
from thinrow.core.units import NEVER
from thinrow.examples.joiner import JoinReport, join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.streaming import IdleRule, join_stream
from thinrow.examples.table import ExampleTable
from thinrow.online.journal import Journal

COMMIT_S, CLUSTER_EVERY, IDLE_MS = 60.0, 16, 300_000


class TableWriter:
    """Joins closed requests into a table every ``commit_s`` seconds, on a thread of its own.

    Attributes:
        last: what the last join did; None before the first.
        error: what the last join failed with; None where it did not. It is tried again.
    """

    def __init__(
        self,
        impressions: ImpressionLog,
        outcomes: OutcomeLog,
        table: ExampleTable,
        *,
        journal: Journal | None = None,
        commit_s: float = COMMIT_S,
        cluster_every: int = CLUSTER_EVERY,
        clock: Clock = system_clock,
        lateness_ms: int | None = None,
        idle_ms: int = IDLE_MS,
    ) -> None:
        """Begin. ``cluster_every`` commits the buckets are rewritten as one sorted file each; ``journal`` is the one
        that writes to the logs, where one does.

        Windows close by ``clock``, or, given ``lateness_ms``, by the watermarks of the logs (``join_stream``); then
        requests that wait while the outcome log is idle for ``idle_ms`` are closed by a heartbeat.
        """
        self._lateness_ms = lateness_ms
        self._idle = IdleRule(outcomes, idle_ms, clock)
        self._logs, self._table, self._clock, self._journal = (impressions, outcomes), table, clock, journal
        self._every, self._commit_s = cluster_every, commit_s
        self._commits = 0
        self._stop = threading.Event()
        self.last: JoinReport | None = None
        self.error: ThinrowError | None = None
        self._thread = threading.Thread(target=self._work, name="table", daemon=True)
        self._thread.start()

    def run_once(self) -> JoinReport:
        """Join what has closed by now, prune the logs of it, and cluster where it is time. Raises as
        ``join_logs``."""
        impressions, outcomes = self._logs
        if self._lateness_ms is None:
            report = join_logs(impressions, outcomes, self._table, self._clock())
        else:
            if self.last is not None and self.last.pending:
                self._idle.apply()
            report = join_stream(impressions, outcomes, self._table, self._lateness_ms)
        floors = (NEVER, NEVER) if self._journal is None else self._journal.floors
        impressions.prune(min(report.impressions_done, floors[0]))
        outcomes.prune(min(report.outcomes_done, floors[1]))
        self._commits += report.examples > 0
        if self._commits >= self._every:
            self._table.cluster()
            self._table.remove_unreferenced()
            self._commits = 0
        self.last = report
        return report

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
            except ThinrowError as e:
                self.error = e
            if stopped:
                return
