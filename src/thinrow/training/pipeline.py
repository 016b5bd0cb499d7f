"""What runs beside a step: the next batch is read and made ready while this one is learned from.

Three stages, of which each is at another batch::

    copy        batch t + 2   the reader's batch becomes what the model reads (and goes to its device): a thread
    dispatch    batch t + 1   ranks tell each other which keys they will look up: behind this step's forward pass
    compute     batch t       forward, backward, both optimizers

Nothing of the model is read ahead, and batches are made ready in order, so that losses are those of a run in which one
thing comes after another (``overlap=False``), bit for bit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")

#: Items that wait at most, beside the one that is made.
_DEPTH = 2


class Ahead(Generic[T]):
    """The items of ``source``, made by a thread of their own, a few ahead of who takes them.

    Attributes:
        waited_s: seconds that ``take`` and ``peek`` waited.
    """

    def __init__(self, source: Generator[T, None, None]) -> None:
        self._source, self.waited_s = source, 0.0
        self._ready: deque[T] = deque()
        self._failure: BaseException | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="thinrow-copy", daemon=True)
        self._thread.start()

    def take(self) -> T | None:
        """The next item; waits for it. None where there is none any more.

        Raises:
            Exception: whatever making it raised.
        """
        self._wait()
        with self._changed:
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._failure is not None:
                raise self._failure
            return None

    def peek(self) -> T | None:
        """What ``take`` will give; waits for it. None where that is nothing, or will raise."""
        self._wait()
        with self._changed:
            return self._ready[0] if self._ready else None

    def close(self) -> None:
        """End the thread, after the item that it is at, and the source; what it made is dropped."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _wait(self) -> None:
        since = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
        self.waited_s += time.perf_counter() - since

    def _work(self) -> None:
        try:
            for item in self._source:
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < _DEPTH)
                    if self._closed:
                        break
        except BaseException as failure:
            self._failure = failure
        finally:
            self._source.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()


class OneByOne(Generic[T]):
    """As ``Ahead``, but an item is made when it is taken, and none is seen before."""

    def __init__(self, source: Generator[T, None, None]) -> None:
        self._source, self.waited_s = source, 0.0

    def take(self) -> T | None:
        """See ``Ahead.take``."""
        since = time.perf_counter()
        item = next(self._source, None)
        self.waited_s += time.perf_counter() - since
        return item

    def peek(self) -> T | None:
        """Nothing."""
        return None

    def close(self) -> None:
        """See ``Ahead.close``."""
        self._source.close()
