"""Runs slices of one kernel call on several threads; used by kernels whose slices write different places.

numba's own ``prange`` is not used: its thread pools do not survive a fork, one of them forbids calls from two threads
at once, and their idle threads spin against torch's.

With 2 threads, ``even_bounds(1000, 4096)`` is ``[0, 500, 1000]`` and ``spread(f, [0, 500, 1000])`` is
``[f(0, 500), f(500, 1000)]``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Lock
from typing import TypeVar

import numba

T = TypeVar("T")

#: Threads of one call, the caller's included: the CPUs of this process, or the variable NUMBA_NUM_THREADS.
N_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]

#: Bytes that a slice moves at least; handing over less takes longer than doing it.
MIN_BYTES = 1 << 18

_pool: ThreadPoolExecutor | None = None
_lock = Lock()


def slice_count(n_bytes: int) -> int:
    """Slices for a call that moves ``n_bytes`` in all: at least 1, at most one a thread."""
    return max(1, min(N_THREADS, n_bytes // MIN_BYTES))


def even_bounds(n: int, item_bytes: int) -> list[int]:
    """Ends of equal slices of ``[0, n)``, the first 0 and the last n; an item moves about ``item_bytes``."""
    count = slice_count(n * item_bytes)
    return [n * k // count for k in range(count + 1)]


def spread(function: Callable[[int, int], T], bounds: Sequence[int]) -> list[T]:
    """``function(bounds[k], bounds[k + 1])`` of every k, in order. The function must run without the GIL to gain."""
    if len(bounds) <= 2:
        return [function(bounds[0], bounds[-1])]
    pool = _shared_pool()
    first, *others = pairwise(bounds)
    waiting = [pool.submit(function, *ends) for ends in others]
    results = [function(*first)]
    for ends, future in zip(others, waiting, strict=True):
        # A slice that no thread has begun is done here: a busy pool or a held GIL costs no more than no pool.
        results.append(function(*ends) if future.cancel() else future.result())
    return results


def _shared_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, N_THREADS - 1), "thinrow-kernel")
        return _pool


def _forget_pool() -> None:
    global _pool, _lock
    _pool, _lock = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
