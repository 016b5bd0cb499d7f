"""What the kernel knows of a worker: how long it ran, and how long it was ready to run and no processor was free."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class Times(NamedTuple):
    """Seconds so far: on a processor; ready to run, but waiting for one (0 where the kernel does not count it)."""

    cpu_s: float
    queued_s: float


def of_process(pid: int) -> Times | None:
    """Of a process; None where it has ended. Threads that have ended are in ``cpu_s`` alone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return None
    queued = sum(_queued_s(f"/proc/{pid}/task/{thread}/schedstat") for thread in threads)
    return Times((int(fields[11]) + int(fields[12])) / _TICKS, queued)


def of_thread(native_id: int, cpu_s: float) -> Times:
    """Of a thread of this process whose clock says ``cpu_s``."""
    return Times(cpu_s, _queued_s(f"/proc/self/task/{native_id}/schedstat"))


def _queued_s(path: str) -> float:
    with suppress(OSError, ValueError, IndexError), open(path, "rb") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0
