"""What engines of workers that may die have in common: items delivered in order, errors in their turn, leases that end.

One thread, ``_manage``, talks to the workers and holds ``_changed`` while it changes anything; the reader waits on it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from thinrow.dpp.engines.clocks import Times
from thinrow.dpp.engines.engine import Gauges, Waits
from thinrow.dpp.engines.failures import MAX_ENDED, START_S, check_settings, start_lost, worker_lost
from thinrow.dpp.engines.leases import Leases


class Leaseholder(Protocol):
    """A worker as the reader knows it: when its lease, or its start, began, and whether it is open."""

    since: float
    ready: bool

    def __hash__(self) -> int: ...


W = TypeVar("W", bound=Leaseholder)
D = TypeVar("D")


class LeasedEngine(ABC, Generic[W, D]):
    """The reader's side of an ``Engine`` whose workers W bring items as D.

    Attributes:
        restarts: workers that ended and were replaced.
    """

    def __init__(self, name: str, *, first: int, stop: int | None, workers: int, window: int, lease_s: float) -> None:
        """``_thread`` is to be started when the engine is whole."""
        check_settings(workers=workers, window=window)
        self._n_workers, self._lease_s = workers, lease_s
        self._leases: Leases[W] = Leases(first, stop, window)
        self._workers: list[W] = []
        self._done: dict[int, D] = {}
        self._failed: dict[int, BaseException] = {}
        self._broken: BaseException | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._waits = Waits()
        self._failed_starts = 0
        self.restarts = 0
        self._thread = threading.Thread(target=self._manage, name=name, daemon=True)

    @property
    def waited_s(self) -> float:
        """See ``Engine.waited_s``."""
        return self._waits.seconds

    def resize(self, workers: int) -> None:
        """See ``Engine.resize``."""
        check_settings(workers=workers)
        with self._changed:
            self._n_workers = workers
            self._leases.widen(workers + 1)
        self._wake()

    def gauges(self) -> Gauges:
        """See ``Engine.gauges``."""
        with self._changed:
            leases, blocked = self._leases, sum(map(self._blocked, self._workers))
            times = {id(w): t for w in self._workers if (t := self._times(w)) is not None}
            counts = len(self._workers), leases.n_out - blocked, blocked
            return Gauges(leases.head, len(self._done), leases.window, *counts, times)

    def _blocked(self, worker: W) -> bool:
        """Whether a worker waits for memory."""
        return False

    def _times(self, worker: W) -> Times | None:
        """Of a worker so far; None where they cannot be told."""
        return None

    def close(self) -> None:
        """End all workers; items that were delivered stay valid. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake()
        # Garbage collection may call from any thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @abstractmethod
    def _wake(self) -> None:
        """Let ``_manage`` look again."""

    @abstractmethod
    def _manage(self) -> None:
        """Until the engine is closed."""

    @abstractmethod
    def _drop(self, worker: W) -> None:
        """End a worker that is not to be used again."""

    def _lost(self, worker: W, how: str) -> None:
        """A worker ended, or has to: its item goes to another one, and another one comes."""
        self._drop(worker)
        self._count_lost(worker, how)

    def _shrink(self) -> None:
        """Let go of workers that are too many; those that are at an item have their turn when they have made it."""
        for worker in [w for w in self._workers if self._leases.held(w) is None]:
            if len(self._workers) > self._n_workers:
                self._drop(worker)

    def _take(self) -> D:
        """The next item in order, when it is there; ``_changed`` is held. Raises as ``Engine.next``."""
        if self._closed or self._leases.exhausted:
            raise StopIteration
        head = self._leases.head
        with self._waits:
            self._changed.wait_for(lambda: head in self._done or head in self._failed or self._broken or self._closed)
        if head in self._failed:
            raise self._failed[head]
        if self._broken is not None and head not in self._done:
            raise self._broken
        if self._closed:
            raise StopIteration
        done = self._done.pop(head)
        self._leases.advance()
        return done

    def _fail(self, item: int, error: BaseException) -> None:
        self._failed[item] = error
        self._leases.cut(item)

    def _count_lost(self, worker: W, how: str) -> None:
        """Give back what a worker had that is gone; what ended too many of them is an error."""
        self.restarts += 1
        item = self._leases.lost(worker)
        if item is not None and self._leases.ended(item) >= MAX_ENDED:
            self._fail(item, worker_lost(item, how))
        if not worker.ready and self._broken is None:
            self._failed_starts += 1
            if self._failed_starts >= MAX_ENDED:
                self._broken = start_lost(how)
        self._changed.notify_all()

    def _expire(self, at_work: Sequence[W]) -> float | None:
        """Replace workers whose lease is over; seconds until the next one may be."""
        now = time.monotonic()
        ends = [(w, w.since + (self._lease_s if w.ready else START_S)) for w in at_work]
        for worker, end in ends:
            if now >= end:
                self._lost(worker, f"it took longer than {end - worker.since} s")
        if len(self._workers) < self._n_workers and self._broken is None:
            return 0.0
        left = [end - now for _, end in ends if end > now]
        slow = self._leases.backup_s()
        if slow is not None and any(w.ready and self._leases.held(w) is None for w in self._workers):
            left.append(slow)
        return max(min(left), 0.0) + 0.01 if left else None
