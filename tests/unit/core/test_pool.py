"""Memory of large arrays comes back when nothing refers to it, and not before."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core import pool as pools
from thinrow.core.pool import SMALLEST_BYTES, Pool


def address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_waits_for_the_next_array_of_its_size() -> None:
    pool = Pool()
    first = pool.empty(100_000, np.int64)
    place = address(first)
    assert (first.shape, first.dtype, place % 8) == ((100_000,), np.int64, 0)
    view = first[10:20].view(np.int32)
    del first
    other = pool.empty(100_000, np.int64)
    assert address(other) != place
    del view
    assert address(pool.empty(99_000, np.int64)) == place


def test_no_more_waits_than_the_bound() -> None:
    pool = Pool(kept_bytes=3 << 20)
    held = [pool.empty(1 << 20, np.uint8) for _ in range(5)]
    del held
    assert pool._waiting == 3 << 20


def test_memory_of_sizes_that_nobody_asks_for_any_longer_goes_first() -> None:
    pool = Pool(kept_bytes=3 << 20)
    held = [pool.empty(1 << 20, np.uint8) for _ in range(3)]
    del held
    other = pool.empty(2 << 20, np.uint8)
    place = address(other)
    del other
    assert pool._waiting == 3 << 20
    assert address(pool.empty(2 << 20, np.uint8)) == place


def test_small_arrays_are_the_allocators() -> None:
    pool = Pool()
    small = pool.empty(SMALLEST_BYTES - 1, np.uint8)
    del small
    assert pool._waiting == 0


def test_threads_never_share_memory() -> None:
    pool, wrong = Pool(), []

    def work(mark: int) -> None:
        for _ in range(200):
            array = pool.empty(20_000, np.int64)
            array[:] = mark
            if (array != mark).any():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_a_forked_process_takes_memory_although_a_thread_was_taking_some() -> None:
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with pools._pool._lock:
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        pools.empty(SMALLEST_BYTES, np.uint8)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
    assert status == 0
