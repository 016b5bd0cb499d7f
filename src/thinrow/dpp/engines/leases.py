"""The ledger of an engine: which items are out, with whom, and which are done.

Worked trace, window 3, workers A and B, nothing taken by the reader::

    take(A) = 0, take(B) = 1        0 and 1 are out
    settle(1, B), take(B) = 2       1 waits for the reader; 3 is not below 0 + 3, so that A and B now wait
    lost(A) = 0                     A died: 0 is to be made again, and is the lowest that is not out
    take(B) = None                  B still has 2
    settle(2, B), take(B) = 0       and so on: the reader gets 0, 1, 2, each once

A result counts only from the worker that has the item out: what one sends whose lease was taken away is dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class Leases(Generic[W]):
    """Attributes:
    head: the item that the reader waits for.
    """

    def __init__(self, first: int, stop: int | None, window: int) -> None:
        self.head = first
        self._stop, self._window = stop, window
        self._cut = stop
        self._next = first
        self._returned: list[int] = []
        self._out: dict[W, int] = {}
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
        """Lease the lowest item of the window that is neither out nor done; None where there is none, or the worker has
        one out."""
        if worker in self._out:
            return None
        item = self._returned[0] if self._returned else self._next
        if item >= self.head + self._window or (self._cut is not None and item >= self._cut):
            return None
        if self._returned:
            heapq.heappop(self._returned)
        else:
            self._next += 1
        self._out[worker] = item
        return item

    def cut(self, item: int) -> None:
        """The item failed: what lies beyond it will never be asked for, and is leased no more."""
        self._cut = item if self._cut is None else min(item, self._cut)

    def settle(self, item: int, worker: W) -> bool:
        """The worker is done with the item; False where it no longer has it out, so that its result does not count."""
        if self._out.get(worker) != item:
            return False
        del self._out[worker]
        return True

    def lost(self, worker: W) -> int | None:
        """The worker ended: what it had out is to be made again, and is returned."""
        item = self._out.pop(worker, None)
        if item is not None:
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
