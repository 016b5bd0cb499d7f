"""Saving while training goes on: one call at a time in a thread, its error raised by the next.

Worked example::

    with Background() as saving:
        saving.start(save, "run", 200, tensors=snapshot(tensors), meta={})     # returns at once
        ...                                                                    # train; tensors may change
        saving.start(save, "run", 400, tensors=snapshot(tensors), meta={})     # first waits for step 200
        saving.wait()                                                          # run/step-00000400 is durable

What is saved must not change meanwhile: ``DynamicTable.state`` and ``delta`` are copies, ``snapshot`` makes others so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy.typing as npt

from thinrow.checkpoints.checkpoint import as_arrays


class Background:
    """A thread that saves. The interpreter does not end before it has."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "thinrow-save")
        self._running: Future[Any] | None = None

    def start(self, call: Callable[..., Any], *args: Any, **named: Any) -> None:
        """Call ``call(*args, **named)`` in the thread, once the call before it is done.

        Raises:
            What the call before it did; this one is not begun then.
        """
        self.wait()
        self._running = self._pool.submit(call, *args, **named)

    def wait(self) -> Any:
        """What the call that was started last returned, once it is done; None where that was taken already.

        Raises:
            What it did, once.
        """
        running, self._running = self._running, None
        return None if running is None else running.result()

    def close(self) -> None:
        """Wait, and end the thread. Raises as ``wait``."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def snapshot(tensors: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Copies, for a save in the background. Raises InputError where a tensor cannot be stored."""
    return {name: array.copy() for name, array in as_arrays(tensors).items()}
