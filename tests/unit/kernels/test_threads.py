"""Slices of a kernel call: bounds, order of results, a busy pool, exceptions, and life after a fork."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from thinrow.kernels.numba import threads


@pytest.fixture
def three_threads(monkeypatch):
    monkeypatch.setattr(threads, "N_THREADS", 3)
    monkeypatch.setattr(threads, "_pool", None)


@pytest.mark.parametrize(
    ("n", "item_bytes", "expected"),
    [
        (0, 8, [0, 0]),
        (10, 8, [0, 10]),
        (2 * threads.MIN_BYTES - 1, 1, [0, 2 * threads.MIN_BYTES - 1]),
        (9, threads.MIN_BYTES, [0, 3, 6, 9]),
        (2, 100 * threads.MIN_BYTES, [0, 0, 1, 2]),
    ],
)
@pytest.mark.usefixtures("three_threads")
def test_bounds(n, item_bytes, expected):
    assert threads.even_bounds(n, item_bytes) == expected


@pytest.mark.usefixtures("three_threads")
def test_results_are_in_order_and_slices_run_at_once():
    meeting = threading.Barrier(3, timeout=30)

    def slice_of(first, last):
        meeting.wait()
        return first, last

    assert threads.spread(slice_of, [0, 4, 4, 9]) == [(0, 4), (4, 4), (4, 9)]
    assert threads.spread(lambda a, b: (a, b), [2, 5]) == [(2, 5)]


@pytest.mark.usefixtures("three_threads")
def test_a_busy_pool_is_not_waited_for():
    release = threading.Event()
    try:
        for _ in range(2):
            threads._shared_pool().submit(release.wait, 30)
        assert threads.spread(lambda a, b: threading.current_thread(), [0, 1, 2, 3]) == [threading.current_thread()] * 3
    finally:
        release.set()


@pytest.mark.usefixtures("three_threads")
def test_exceptions_arrive():
    def fail(first, last):
        if first == 1:
            raise ZeroDivisionError
        return last

    with pytest.raises(ZeroDivisionError):
        threads.spread(fail, [0, 1, 2, 3])


def _spread_in_child(results):
    results.put(threads.spread(lambda a, b: b, [0, 1, 2, 3]))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("three_threads")
def test_a_forked_child_makes_a_pool_of_its_own():
    threads.spread(lambda a, b: b, [0, 1, 2, 3])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_spread_in_child, args=(results,))
    child.start()
    assert results.get(timeout=30) == [1, 2, 3]
    child.join(30)
    assert child.exitcode == 0
