"""Traffic: the bytes that a table's calls must move; over what memory moves at best they are MBU.

Sparse work is bound by memory, so its measure is the share of the memory's bandwidth that is in use (RecIS, arXiv
2509.20883, section 3). Of n positions with d distinct keys, a row of r bytes and optimizer states of s bytes a row:

    look_up   n * (8 + 16 + 8)          the key, its slot in the index, the row's number
    read      n * 2r                    the row, and where it goes
    sum       n * r + d * r             the gradient of a position, the sum of a key
    update    d * (r + 2r + 2s)         the sum; vector and states, read and written
    start     a new row's r + s

Worked example: 3 positions of 2 keys in a table of dim 2 (r = 8) under Adagrad (s = 8) are 96 + 48 + 40 + 80 bytes,
and 16 to start the keys. What the caches save, and what is read twice, does not count: a call that moves more bytes
than it must is no better.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np

#: Key, slot and row number of one position.
LOOK_UP_BYTES = 8 + 16 + 8


@dataclass(slots=True)
class Traffic:
    """Bytes since the table was made, by call."""

    look_up: int = 0
    read: int = 0
    sum: int = 0
    update: int = 0
    start: int = 0

    @property
    def total(self) -> int:
        return sum(int(getattr(self, f.name)) for f in fields(self))


def stream_bandwidth(n_bytes: int = 1 << 27, rounds: int = 3) -> float:
    """Bytes a second that this process copies at best, read and written, on all its processors: the best of ``rounds``
    copies of ``n_bytes``, which should be more than the caches hold (STREAM's copy; McCalpin 1995)."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    source, target = np.ones(n_bytes, np.uint8), np.zeros(n_bytes, np.uint8)
    bounds = [n_bytes * k // threads for k in range(threads + 1)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            since = time.perf_counter()
            list(pool.map(lambda a, b: np.copyto(target[a:b], source[a:b]), bounds[:-1], bounds[1:]))
            best = max(best, 2 * n_bytes / (time.perf_counter() - since))
    return best
