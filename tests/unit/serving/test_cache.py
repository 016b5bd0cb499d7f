"""The cache of rows: the bits of what it stands before, a size that follows what batches need, hot rows first."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import InputError
from thinrow.serving.cache import SPARE, Caches, Counts, MemoryBudget, RowCache
from thinrow.serving.rows import Fetched, Ints

DIM = 4
ROW = 4 * DIM + 8


class Source:
    """Rows of any key, of one version; keys that are multiples of ``lost`` are not answered."""

    def __init__(self, version: int = 1) -> None:
        self.version, self.lost, self.asked = version, 0, list[Ints]()

    def fetch(self, keys: Ints) -> Fetched:
        assert (np.diff(keys) > 0).all()
        self.asked.append(keys)
        vectors = np.repeat((keys * 10 + self.version).astype(np.float32)[:, None], DIM, axis=1)
        lost = keys % self.lost == 0 if self.lost else np.zeros(len(keys), np.bool_)
        return Fetched(keys, np.where(lost[:, None], np.float32(0), vectors), lost)


def cached(rows: int = 100, clock: list[float] | None = None) -> tuple[RowCache, Source]:
    source = Source()
    at = clock if clock is not None else [0.0]
    return RowCache(source, DIM, MemoryBudget(rows * ROW, clock=lambda: at[0])), source


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=12), st.integers(1, 40), st.integers(0, 3))
def test_what_is_read_is_what_the_source_gives_and_no_more_is_kept_than_may_be(
    calls: list[list[int]], rows: int, lost: int
) -> None:
    cache, source = cached(rows)
    source.lost = lost
    for number, call in enumerate(calls):
        keys = np.unique(np.array(call, np.int64))
        found, plain = cache.fetch(keys), source.fetch(keys)
        known = ~found.degraded
        # A row that is kept outlives its server; one that is not known is not kept.
        assert found.vectors[known].tobytes() == plain_rows(keys[known]).tobytes()
        assert (found.degraded <= plain.degraded).all()
        if number % 2:
            cache.step()
        if number % 3 == 2:
            cache.make_room(number * ROW)
        assert len(cache) * ROW <= cache.budget.cache_bytes() or not len(cache)


def plain_rows(keys: Ints) -> np.ndarray:
    return Source().fetch(keys).vectors


def test_the_size_follows_what_batches_need() -> None:
    at = [0.0]
    cache, _ = cached(100, at)
    keys = np.arange(100)
    cache.fetch(keys)
    sizes = []
    for _ in range(5):
        cache.fetch(keys)
        cache.step()
        sizes.append(len(cache))
    # A quarter of the budget a step.
    assert sizes == [25, 50, 75, 100, 100]
    # A batch that needs half of it takes that at once, in tiers; none of it while the peak is in the window.
    cache.make_room(40 * ROW)
    assert len(cache) == 50 <= 100 - SPARE * 40
    cache.step()
    assert len(cache) == 50
    cache.make_room(99 * ROW)
    assert len(cache) == 0
    at[0] = 9.0
    cache.make_room(8 * ROW)
    cache.fetch(keys)
    cache.step()
    assert len(cache) == 0
    # The peak has left the window; the last batch has not.
    at[0] = 11.0
    cache.fetch(keys)
    cache.step()
    assert len(cache) == 25
    for _ in range(3):
        cache.fetch(keys)
        cache.step()
    assert len(cache) == 90
    assert cache.read()["may_have_bytes"] == 90 * ROW


def test_hot_rows_are_kept_and_old_ones_are_forgotten() -> None:
    counts = Counts()
    counts.add([np.array([1, 2, 3]), np.array([2, 3]), np.array([3])], 10)
    assert counts.hottest(2).tolist() == [3, 2]
    for _ in range(3):
        counts.add([np.array([7])], 10)
    assert counts.hottest(1).tolist() == [7]
    assert 1 not in counts.keys
    counts.add([np.arange(20)], 4)
    assert len(counts.keys) == 4

    cache, source = cached(8)
    hot, cold = np.arange(8), np.arange(100, 200)
    for n in range(30):
        cache.fetch(np.concatenate([hot, cold[n * 3 : n * 3 + 3]]))
        cache.step()
    source.asked.clear()
    cache.fetch(np.concatenate([hot, cold[:3]]))
    assert [asked.tolist() for asked in source.asked] == [cold[:3].tolist()]
    assert cache.read()["hit_rate"] > 0.5


def test_rows_that_no_server_gave_are_asked_for_again() -> None:
    cache, source = cached()
    source.lost = 2
    keys = np.arange(10)
    assert cache.fetch(keys).degraded.sum() == 5
    cache.step()
    source.lost = 0
    found = cache.fetch(keys)
    assert not found.degraded.any()
    assert found.vectors.tobytes() == plain_rows(keys).tobytes()


def test_a_new_release_begins_with_what_was_hot_and_rows_of_its_own() -> None:
    caches = Caches(MemoryBudget(100 * ROW), every_s=3600)
    first = caches(Source(), DIM)
    keys = np.arange(20)
    first.fetch(keys)
    first.step()
    second = caches(Source(version=2), DIM)
    assert len(second) == 20
    assert second.fetch(keys).vectors[:, 0].tolist() == (keys * 10 + 2).tolist()
    assert second.hits == 20
    caches.close()


def test_batches_read_while_a_step_swaps() -> None:
    cache, _ = cached(50)
    stop, wrong = threading.Event(), list[int]()

    def read() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set():
            keys = np.unique(rng.integers(0, 80, 30))
            if cache.fetch(keys).vectors.tobytes() != plain_rows(keys).tobytes():
                wrong.append(1)

    thread = threading.Thread(target=read)
    thread.start()
    for n in range(200):
        cache.step()
        cache.make_room((n % 5) * 8 * ROW)
    stop.set()
    thread.join()
    assert not wrong


@pytest.mark.parametrize("wrong", [{"total": 0}, {"total": 5, "window_s": 0}])
def test_a_budget_is_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="above 0"):
        MemoryBudget(**wrong)
