"""The clock, as a value that tests and replays can set."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Returns the present in int64 milliseconds since the Unix epoch, UTC.
Clock = Callable[[], int]


def system_clock() -> int:
    """The machine's wall clock in milliseconds."""
    return time.time_ns() // 1_000_000
