"""What an engine is: items (base batches by virtual index) produced ahead of the reader, delivered in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar

from thinrow.dpp.engines.clocks import Times

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: Engines by name, each with its own defaults.
EngineName: TypeAlias = Literal["threads", "processes", "ray"]


@dataclass(frozen=True, slots=True)
class Gauges:
    """Where an engine stands at an instant.

    Attributes:
        head: the item that the reader gets next.
        ready: items that wait for the reader.
        window: items in flight or waiting, at most.
        workers: that are open or starting.
        busy: of these, that make an item.
        blocked: of these, that have made one and wait for memory to hand it over.
        times: CPU seconds and the like of each worker so far, by some name of it; empty where they cannot be told.
    """

    head: int
    ready: int
    window: int
    workers: int
    busy: int
    blocked: int
    times: dict[int, Times]


class Waits:
    """A stopwatch of waits, one at a time: ``with waits: ...``. Any thread may look."""

    def __init__(self) -> None:
        self._ended = 0.0
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        since, self._since = self._since, None
        if since is not None:
            self._ended += time.perf_counter() - since

    @property
    def seconds(self) -> float:
        """Of all waits, the one that is under way included."""
        since = self._since
        return self._ended + (0.0 if since is None else time.perf_counter() - since)


class Engine(Protocol[T_co]):
    """Delivers items ``first``, ``first + 1``, ... each once, whatever the number of workers and whichever die."""

    def next(self) -> T_co:
        """The next item in order; waits for it.

        Raises:
            StopIteration: the last item was delivered, or the engine is closed.
            Exception: whatever its production raised, when its turn comes; the engine stays at this item.
            WorkerLost: its production ended several workers.
        """
        ...

    def close(self) -> None:
        """End all workers and drop what they made. May be called twice."""
        ...

    def resize(self, workers: int) -> None:
        """From now on so many workers. Those that are too many end when they have made what they are at.

        Raises:
            InputError: fewer than 1.
        """
        ...

    def gauges(self) -> Gauges:
        """Where it stands."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that ``next`` waited for items, a wait under way included."""
        ...

    @property
    def restarts(self) -> int:
        """Workers that ended and were replaced."""
        ...

    @property
    def copied_bytes(self) -> int:
        """Bytes of items that were copied between worker and reader, rather than handed over where they are."""
        ...


class EngineChoice(Protocol):
    """Which engine, and its settings; data, made before anything runs.

    Attributes:
        in_process: whether items are produced in this process, by ``produce`` itself rather than a copy of it.
    """

    @property
    def in_process(self) -> bool: ...

    def start(
        self, produce: Callable[[int], T], *, first: int, stop: int | None, workers: int, window: int
    ) -> Engine[T]:
        """An engine that delivers ``produce(first)``, ``produce(first + 1)``, ... to ``stop`` (exclusive; None for no
        end), made by ``workers`` workers, at most ``window`` of them in flight or waiting for the reader.

        Raises:
            InputError: a setting is out of bounds, or ``produce`` cannot be sent to where it is to run.
            MissingExtraError: an optional dependency is not installed.
        """
        ...
