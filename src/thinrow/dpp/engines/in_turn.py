"""No workers: an item is produced when the reader asks for it, on the reader's own thread.

For looking at one thing after another (a debugger, a profile), and to measure what reading ahead gains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from thinrow.dpp.engines.engine import Gauges, Waits
from thinrow.dpp.engines.failures import check_settings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InTurn:
    """Nothing runs ahead of the reader."""

    in_process: ClassVar[bool] = True

    def start(
        self, produce: Callable[[int], T], *, first: int, stop: int | None, workers: int, window: int
    ) -> InTurnEngine[T]:
        """See ``EngineChoice.start``; ``workers`` and ``window`` change nothing here."""
        check_settings(workers=workers, window=window)
        return InTurnEngine(produce, first, stop)


class InTurnEngine(Generic[T]):
    """An ``Engine`` without workers.

    Attributes:
        restarts, copied_bytes: always 0.
    """

    restarts = copied_bytes = 0

    def __init__(self, produce: Callable[[int], T], first: int, stop: int | None) -> None:
        self._produce, self._head, self._stop = produce, first, stop
        self._closed, self._waits = False, Waits()

    def next(self) -> T:
        """See ``Engine.next``."""
        if self._closed or (self._stop is not None and self._head >= self._stop):
            raise StopIteration
        with self._waits:
            item = self._produce(self._head)
        self._head += 1
        return item

    def close(self) -> None:
        """See ``Engine.close``."""
        self._closed = True

    def resize(self, workers: int) -> None:
        """See ``Engine.resize``; there are no workers to have more of."""
        check_settings(workers=workers)

    def gauges(self) -> Gauges:
        """See ``Engine.gauges``."""
        return Gauges(self._head, 0, 1, 1, 0, 0, {})

    @property
    def waited_s(self) -> float:
        """Seconds in which items were produced: the reader waits for each."""
        return self._waits.seconds
