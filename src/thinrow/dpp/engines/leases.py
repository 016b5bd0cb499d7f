"""The ledger of an engine: which items are out, with whom, and which are done.

Worked trace, window 3, workers A and B, nothing taken by the reader::

    take(A) = 0, take(B) = 1        0 and 1 are out
    settle(1, B), take(B) = 2       1 waits for the reader; 3 is not below 0 + 3, so that A and B now wait
    lost(A) = 0                     A died: 0 is to be made again, and is the lowest that is not out
    take(B) = None                  B still has 2
    settle(2, B), take(B) = 0       and so on: the reader gets 0, 1, 2, each once

A result counts only from a worker that has the item out: what one sends whose lease was taken away is dropped.

Order is strict, so that one slow item, on a stalled disk or a busy node, holds up everything behind it. The item that
the reader waits for is therefore leased to an idle worker as well, a *backup*, once it has been out for three times as
long as most items and for a second. The first result counts; the other one is dropped when it comes::

    0 is out with A since 5 s, the window is full       take(B) = 0
    settle(0, B) = True                                 0 is delivered
    settle(0, A) = False                                what A made is dropped
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)
#: An item is slow that has been out for so many times the median, and so many seconds; of so many items at least.
_SLOW, _SLOW_S, _SEEN = 3.0, 1.0, 8


class Leases(Generic[W]):
    """Args:
    clock: seconds, ascending.

    Attributes:
        head: the item that the reader waits for.
    """

    def __init__(self, first: int, stop: int | None, window: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.head = first
        self._stop, self._window = stop, window
        self._cut = stop
        self._next = first
        self._returned: list[int] = []
        self._out: dict[W, int] = {}
        self._clock = clock
        self._since: dict[W, float] = {}
        self._took: deque[float] = deque(maxlen=32)
        #: Done, and still out with a second worker.
        self._late: set[int] = set()
        self._ended: dict[int, int] = {}

    @property
    def exhausted(self) -> bool:
        """Whether the reader has had the last item."""
        return self._stop is not None and self.head >= self._stop

    @property
    def window(self) -> int:
        """Items out or waiting for the reader, at most."""
        return self._window

    @property
    def n_out(self) -> int:
        """Items that are out."""
        return len(self._out)

    def widen(self, window: int) -> None:
        """A window of so many items at least."""
        self._window = max(self._window, window)

    def held(self, worker: W) -> int | None:
        """The item that a worker has out."""
        return self._out.get(worker)

    def take(self, worker: W) -> int | None:
        """Lease the lowest item of the window that is neither out nor done, or the head where it is slow; None where
        there is neither, or the worker has one out."""
        if worker in self._out:
            return None
        item = self._returned[0] if self._returned else self._next
        if item >= self.head + self._window or (self._cut is not None and item >= self._cut):
            wait = self.backup_s()
            if wait is None or wait > 0:
                return None
            item = self.head
        elif self._returned:
            heapq.heappop(self._returned)
        else:
            self._next += 1
        self._out[worker], self._since[worker] = item, self._clock()
        return item

    def backup_s(self) -> float | None:
        """Seconds until the head is slow; None where it is done, not out or out twice, or few items were seen."""
        holders = [w for w, item in self._out.items() if item == self.head]
        if len(holders) != 1 or self.head in self._late or len(self._took) < _SEEN:
            return None
        slow_s = max(_SLOW * statistics.median(self._took), _SLOW_S)
        return slow_s - (self._clock() - self._since[holders[0]])

    def cut(self, item: int) -> None:
        """The item failed: what lies beyond it will never be asked for, and is leased no more."""
        self._cut = item if self._cut is None else min(item, self._cut)

    def settle(self, item: int, worker: W) -> bool:
        """The worker is done with the item; False where it no longer has it out, or another one was done before, so
        that its result does not count."""
        if self._out.get(worker) != item:
            return False
        del self._out[worker]
        self._took.append(self._clock() - self._since.pop(worker))
        if item in self._late:
            self._late.remove(item)
            return False
        if item in self._out.values():
            self._late.add(item)
        return True

    def lost(self, worker: W) -> int | None:
        """The worker ended: what it had out, if that is not done, is returned, and is to be made again unless another
        worker has it out, too."""
        item = self._out.pop(worker, None)
        self._since.pop(worker, None)
        if item is None:
            return None
        if item in self._late:
            self._late.remove(item)
            return None
        if item not in self._out.values():
            # With a backup, the end of both counts as one: they may have waited for the same disk.
            heapq.heappush(self._returned, item)
            self._ended[item] = self._ended.get(item, 0) + 1
        return item

    def ended(self, item: int) -> int:
        """How many workers ended with the item out."""
        return self._ended.get(item, 0)

    def advance(self) -> None:
        """The reader has had the head."""
        self._ended.pop(self.head, None)
        self.head += 1
