"""RowCache: hot rows of embedding servers in the ranker's memory, as many as the model leaves room for.

Worked example, a budget of 100 MB. Batches of the last ten seconds needed 20 MB at most, so 100 - 1.25 x 20 = 75 MB
are the cache's. The queue grows and a batch needs 60 MB: before its rows are fetched the coldest of the cache's four
tiers goes, then the next, until 25 MB are left; the model never waits for it. When the peak has left the window, the
cache grows again, by a quarter of the budget a step.

Hot rows are those that were asked for most, counts being halved by each step. A step runs on a thread of its own: it
fetches what is missing, makes new tiers, and swaps them in as one value, while batches read the old ones. Rows are
those that the servers gave, of the one version of the source, so a cached row has the bits of a fetched one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError, ThinrowError
from thinrow.serving.rows import Fetched, Floats, Ints, RowSource

#: What a batch is said to need is multiplied by it.
SPARE = 1.25
_TIERS, _FETCHED, _NOTED, _TRACKED = 4, 1 << 16, 256, 1 << 16
_HALF, _FORGOTTEN = 0.5, 0.25


class MemoryBudget:
    """Bytes that a cache and the batches of a model share; batches come first.

    Attributes:
        total: of both.
    """

    def __init__(self, total: int, *, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        """``window_s``: so long a batch's need is remembered. Raises InputError where a number is not above 0."""
        if total < 1 or not window_s > 0:
            raise InputError(f"total={total}, window_s={window_s}; both must be above 0")
        self.total, self._window_s, self._clock = total, window_s, clock
        # Times and needs, the needs descending: the first is the largest of the window.
        self._needs = deque[tuple[float, int]]()
        self._lock = threading.Lock()

    def need(self, size: int) -> None:
        """A batch needs ``size`` bytes from now on."""
        now = self._clock()
        with self._lock:
            while self._needs and self._needs[-1][1] <= size:
                self._needs.pop()
            self._needs.append((now, size))
            self._forget(now)

    def cache_bytes(self) -> int:
        """What the cache may have."""
        with self._lock:
            self._forget(self._clock())
            peak = self._needs[0][1] if self._needs else 0
        return max(0, int(self.total - SPARE * peak))

    def _forget(self, now: float) -> None:
        while self._needs and now - self._needs[0][0] > self._window_s:
            self._needs.popleft()


class Counts:
    """How often keys were asked for, of late.

    Attributes:
        keys: (n,) int64 ascending; ``counts`` (n,) float64 of them.
    """

    def __init__(self) -> None:
        self.keys: Ints = np.empty(0, np.int64)
        self.counts: npt.NDArray[np.float64] = np.empty(0, np.float64)

    def add(self, seen: list[Ints], most: int) -> None:
        """Age what there is, add a count for each of ``seen``, and keep the ``most`` that were asked for most."""
        both = np.concatenate([self.keys, *seen])
        weights = np.concatenate([_HALF * self.counts, np.ones(len(both) - len(self.keys))])
        keys, at = np.unique(both, return_inverse=True)
        counts = np.bincount(at.reshape(-1), weights, minlength=len(keys))
        kept: npt.NDArray[Any] = np.flatnonzero(counts >= _FORGOTTEN)
        if len(kept) > most:
            kept = kept[np.sort(np.argsort(-counts[kept], kind="stable")[:most])]
        self.keys, self.counts = np.asarray(keys[kept], np.int64), counts[kept]

    def hottest(self, n: int) -> Ints:
        """(m,) the ``n`` that were asked for most, the hottest first; equal ones by key."""
        chosen: Ints = self.keys[np.argsort(-self.counts, kind="stable")[:n]]
        return chosen


@dataclass(frozen=True, slots=True)
class _Tier:
    keys: Ints
    vectors: Floats

    def find(self, keys: Ints) -> tuple[npt.NDArray[np.bool_], Ints]:
        """(n,) which are here, and the places of those."""
        if not len(self.keys):
            return np.zeros(len(keys), np.bool_), np.empty(0, np.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        here = self.keys[at] == keys
        return here, at[here]


class RowCache:
    """A ``RowSource`` before another. Any number of threads may fetch while one steps.

    Attributes:
        budget: how large it may be.
        counts: of its keys.
        hits, misses: rows that were here, and that were fetched.
    """

    def __init__(self, source: RowSource, dim: int, budget: MemoryBudget, counts: Counts | None = None) -> None:
        """Empty; ``counts`` are those of the cache before it, whose hot rows the first step fetches."""
        self._source, self._dim, self.budget = source, dim, budget
        self.counts = counts or Counts()
        self._tiers: tuple[_Tier, ...] = ()
        self._writing, self._noting = threading.Lock(), threading.Lock()
        self._seen: list[Ints] = []
        self.hits = self.misses = 0

    @property
    def row_bytes(self) -> int:
        """Of memory."""
        return 4 * self._dim + 8

    def __len__(self) -> int:
        return sum(len(tier.keys) for tier in self._tiers)

    def fetch(self, keys: Ints) -> Fetched:
        """As ``RowSource.fetch``."""
        vectors = np.empty((len(keys), self._dim), np.float32)
        left = np.arange(len(keys))
        for tier in self._tiers:
            here, at = tier.find(keys[left])
            vectors[left[here]] = tier.vectors[at]
            left = left[~here]
        degraded, seconds = np.zeros(len(keys), np.bool_), {}
        if len(left):
            found = self._source.fetch(keys[left])
            vectors[left], degraded[left], seconds = found.vectors, found.degraded, dict(found.seconds)
        with self._noting:
            self.misses += len(left)
            self.hits += len(keys) - len(left)
            # What is beyond is not counted: a sample of the batches between two steps will do.
            if len(self._seen) < _NOTED:
                self._seen.append(keys)
        return Fetched(keys, vectors, degraded, seconds)

    def make_room(self, size: int) -> None:
        """A batch is about to need ``size`` bytes: the cache lets go of what is the model's."""
        self.budget.need(size)
        if len(self) * self.row_bytes > self.budget.cache_bytes():
            with self._writing:
                self._tiers = self._cut(self._tiers)

    def step(self) -> None:
        """Count, fetch what is hot and missing, and swap it in.

        Raises:
            As the source's ``fetch``; what is cached stays.
        """
        with self._noting:
            seen, self._seen = self._seen, []
        most = self.budget.cache_bytes() // self.row_bytes
        self.counts.add(seen, 2 * most + _TRACKED)
        most = min(most, len(self) + max(1, self.budget.total // self.row_bytes // 4))
        hot = self.counts.hottest(most)
        vectors, kept = self._rows(hot)
        hot, vectors = hot[kept], vectors[kept]
        ends = np.linspace(0, len(hot), _TIERS + 1).astype(np.int64)
        tiers = []
        for start, stop in itertools.pairwise(ends.tolist()):
            order = np.argsort(hot[start:stop])
            tiers.append(_Tier(hot[start:stop][order], vectors[start:stop][order]))
        with self._writing:
            self._tiers = self._cut(tuple(tiers))

    def read(self) -> dict[str, Any]:
        """Rows, bytes, and the share of hits."""
        asked = self.hits + self.misses
        return {
            "rows": len(self),
            "bytes": len(self) * self.row_bytes,
            "may_have_bytes": self.budget.cache_bytes(),
            "hit_rate": self.hits / asked if asked else 0.0,
        }

    def _rows(self, keys: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Vectors of ``keys``, and which of them are known."""
        vectors, known = np.zeros((len(keys), self._dim), np.float32), np.zeros(len(keys), np.bool_)
        for tier in self._tiers:
            here, at = tier.find(keys)
            vectors[here], known[here] = tier.vectors[at], True
        missing = np.flatnonzero(~known)
        missing = missing[np.argsort(keys[missing])]
        for start in range(0, len(missing), _FETCHED):
            part = missing[start : start + _FETCHED]
            found = self._source.fetch(keys[part])
            vectors[part], known[part] = found.vectors, ~found.degraded
        return vectors, known

    def _cut(self, tiers: tuple[_Tier, ...]) -> tuple[_Tier, ...]:
        """The hottest tiers that fit."""
        most = self.budget.cache_bytes()
        while tiers and sum(len(tier.keys) for tier in tiers) * self.row_bytes > most:
            tiers = tiers[:-1]
        return tiers


class Caches:
    """The caches of an arm's releases, one after another, and the thread that steps the one that is live."""

    def __init__(self, budget: MemoryBudget, *, every_s: float = 1.0, say: Callable[..., None] | None = None) -> None:
        self.budget, self._every_s, self._say = budget, every_s, say
        self.live: RowCache | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="cache", daemon=True)
        self._thread.start()

    def __call__(self, rows: RowSource, dim: int) -> RowCache:
        """A cache before ``rows``, of a release that is about to be live: what was hot is in it already."""
        made = RowCache(rows, dim, self.budget, None if self.live is None else self.live.counts)
        if self.live is not None:
            self._step(made)
        self.live = made
        return made

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.wait(self._every_s):
            if self.live is not None:
                self._step(self.live)

    def _step(self, cache: RowCache) -> None:
        try:
            cache.step()
        except ThinrowError as error:
            if self._say is not None:
                self._say("cache_step_failed", why=str(error))


__all__ = ["Caches", "Counts", "MemoryBudget", "RowCache"]
