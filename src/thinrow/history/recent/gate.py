"""A gate for the transactions of one process on one environment.

Worked example: two readers are inside, and a third thread wants to be ``alone``, so as to make LMDB's map larger. It
waits until both have left, and whoever comes later waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Many at a time, or one alone: LMDB's map may only be resized while no transaction of the process is alive."""

    def __init__(self) -> None:
        # The lock itself where nobody waits: a condition enters and leaves it by calls of Python.
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._inside = 0
        self._alone = False

    def enter(self) -> None:
        """Wait until nobody is alone, and be counted."""
        with self._lock:
            while self._alone:
                self._condition.wait()
            self._inside += 1

    def leave(self) -> None:
        """Be counted no longer."""
        with self._lock:
            self._inside -= 1
            if self._alone:
                self._condition.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Be inside with others."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be inside alone."""
        with self._condition:
            self._condition.wait_for(lambda: not self._alone)
            self._alone = True
            self._condition.wait_for(lambda: self._inside == 0)
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()
