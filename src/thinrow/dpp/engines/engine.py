"""What an engine is: base batches by virtual index, produced ahead of the reader, delivered in order."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Engine(Protocol[T_co]):
    """Delivers items ``first``, ``first + 1``, ... each once, whatever the number of workers."""

    def next(self) -> T_co:
        """The next item in order; waits for it.

        Raises:
            StopIteration: the last item was delivered, or the engine is closed.
            Exception: whatever its production raised, when its turn comes.
        """
        ...

    def close(self) -> None:
        """End all workers and drop what they made. May be called twice."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that ``next`` waited for items."""
        ...
