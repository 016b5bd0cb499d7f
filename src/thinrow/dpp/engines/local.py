"""Threads that produce items ahead of one reader, a bounded window of them, delivered in order.

Worked trace, 2 threads, window 3, a reader that has taken nothing: items 0 and 1 are leased; 1 is done first and kept;
its thread leases 2, is done, and waits, since 3 is not below 0 + 3; item 0 is done and delivered; now 3 is leased.

Heavy work (NumPy, Arrow, compiled kernels) releases the GIL, so that threads overlap. All waiting is on one condition.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from thinrow.core.errors import InputError
from thinrow.dpp.engines.clocks import Times, of_thread
from thinrow.dpp.engines.engine import Gauges, Waits
from thinrow.dpp.engines.failures import check_settings

T = TypeVar("T")
_BUFFER_BYTES = 512 << 20


def _nbytes(item: object) -> int:
    return int(getattr(item, "nbytes", 0))


def _times(thread: threading.Thread) -> Times:
    assert thread.ident is not None
    assert thread.native_id is not None
    return of_thread(thread.native_id, time.clock_gettime(time.pthread_getcpuclockid(thread.ident)))


@dataclass(frozen=True, slots=True)
class Threads:
    """Worker threads of this process; nothing is sent or copied.

    Attributes:
        buffer_bytes: of items that wait for the reader. Where they are as many, the item that the reader waits for is
            made and no other; so the most that waits is this and one item a thread.
    """

    in_process: ClassVar[bool] = True
    buffer_bytes: int = _BUFFER_BYTES

    def __post_init__(self) -> None:
        check_settings(buffer_bytes=self.buffer_bytes)

    def start(
        self, produce: Callable[[int], T], *, first: int, stop: int | None, workers: int, window: int
    ) -> ThreadEngine[T]:
        """See ``EngineChoice.start``."""
        return ThreadEngine(
            produce, first=first, stop=stop, threads=workers, window=window, buffer_bytes=self.buffer_bytes
        )


class ThreadEngine(Generic[T]):
    """An ``Engine`` of local threads.

    Args:
        produce: item number -> item; called from several threads at once.
        first: the first item number to deliver.
        stop: one past the last item number; None for no end.
        threads: how many threads work.
        window: items in flight or waiting for the reader, at most.
        buffer_bytes: see ``Threads``; items say what they hold as ``nbytes``, others count nothing.

    Attributes:
        restarts, copied_bytes: always 0.
        peak_bytes: of items that waited for the reader, at most.
    """

    restarts = copied_bytes = 0

    def __init__(
        self,
        produce: Callable[[int], T],
        *,
        first: int,
        stop: int | None,
        threads: int,
        window: int,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        for name, value in (("threads", threads), ("window", window)):
            if value < 1:
                raise InputError(f"{name}={value}; it must be 1 or more")
        self._produce = produce
        self._stop = stop
        self._window, self._buffer_bytes = window, buffer_bytes
        self._held_bytes = self.peak_bytes = 0
        self._changed = threading.Condition()
        self._head = first
        self._next_lease = first
        self._done: dict[int, T] = {}
        self._failed: dict[int, BaseException] = {}
        self._closed = False
        self._waits = Waits()
        self._n_threads = self._busy = 0
        self._threads: list[threading.Thread] = []
        self.resize(threads)

    def resize(self, workers: int) -> None:
        """See ``Engine.resize``."""
        check_settings(workers=workers)
        with self._changed:
            if self._closed:
                return
            self._n_threads, self._window = workers, max(self._window, workers + 1 if self._threads else 1)
            for _ in range(workers - len(self._threads)):
                name = f"thinrow-dpp-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                # Here and not later: who closes waits for every thread of the list.
                thread.start()
                self._threads.append(thread)
            self._changed.notify_all()

    def gauges(self) -> Gauges:
        """See ``Engine.gauges``."""
        with self._changed:
            # A thread's clock is there as long as the thread.
            times = {t.ident: _times(t) for t in self._threads if t.ident is not None and t.native_id is not None}
            counts = len(self._done), self._window, len(self._threads), self._busy
            return Gauges(self._head, *counts, 0, times)

    @property
    def waited_s(self) -> float:
        """See ``Engine.waited_s``."""
        return self._waits.seconds

    def next(self) -> T:
        """The next item in order; waits for it. After a failure the engine stays at the failed item.

        Raises:
            StopIteration: the last item was delivered, or the engine is closed.
            Exception: whatever its production raised.
        """
        with self._changed:
            head = self._head
            if self._ended(head):
                raise StopIteration
            with self._waits:
                self._changed.wait_for(lambda: head in self._done or head in self._failed or self._closed)
            if head in self._failed:
                raise self._failed[head]
            if self._closed:
                raise StopIteration
            self._head += 1
            item = self._done.pop(head)
            self._held_bytes -= _nbytes(item)
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """End all threads, each after the item it is at, and drop what they made. May be called twice."""
        with self._changed:
            self._closed = True
            self._done.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _ended(self, number: int) -> bool:
        return self._closed or (self._stop is not None and number >= self._stop)

    def _lease(self) -> int | None:
        """The lowest unleased item within the window; waits for one. None where this thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._over() or self._may_lease())
            if self._over():
                self._threads.remove(threading.current_thread())
                return None
            self._next_lease += 1
            self._busy += 1
            return self._next_lease - 1

    def _may_lease(self) -> bool:
        """Whether there is room for the next item; for the one that the reader waits for there always is."""
        room = self._next_lease < self._head + self._window and self._held_bytes < self._buffer_bytes
        return room or self._next_lease == self._head

    def _over(self) -> bool:
        """Whether a thread without an item ends. What lies beyond a failed item will never be asked for."""
        return self._ended(self._next_lease) or bool(self._failed) or len(self._threads) > self._n_threads

    def _work(self) -> None:
        while (number := self._lease()) is not None:
            failure: BaseException | None = None
            try:
                item = self._produce(number)
            except BaseException as e:
                failure = e
            with self._changed:
                self._busy -= 1
                if failure is not None:
                    self._failed[number] = failure
                elif not self._closed:
                    self._done[number] = item
                    self._held_bytes += _nbytes(item)
                    self.peak_bytes = max(self.peak_bytes, self._held_bytes)
                self._changed.notify_all()
