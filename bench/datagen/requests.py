"""Batches of requests over histories: random users, and all requests of a few users together (K = 20).

Worked example, one batch of two users with 2 requests each: ``users`` [3, 3, 8, 8], ``start`` [90, 90, 200, 200] is
where their histories begin and ``stop`` [130, 140, 260, 290] (exclusive) where each request cuts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.datagen.datasets import Histories, Ints
from thinrow.core.ragged import offsets_of
from thinrow.core.users import bucket_of
from thinrow.history.store import DEFAULT_BUCKETS

#: Requests a user in the clustered pattern.
K = 20


@dataclass(frozen=True, slots=True)
class Batch:
    """X requests, by user: (X,) int64 each. ``start``, ``stop``: positions in the columns of the whole visible history,
    from its oldest event (inclusive) to its newest (exclusive)."""

    users: Ints
    request_ts: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.users)

    def cut(self, newest: int | None) -> tuple[Ints, Ints]:
        """Position of the first of the newest n events, and the (X + 1,) offsets of what is delivered."""
        start = self.start if newest is None else np.maximum(self.start, self.stop - newest)
        return start, offsets_of(self.stop - start)

    def slice(self, a: int, b: int) -> Batch:
        """Requests ``[a, b)``."""
        return Batch(self.users[a:b], self.request_ts[a:b], self.start[a:b], self.stop[a:b])


def random_users(data: Histories, batches: int, size: int, seed: int = 1) -> list[Batch]:
    """``batches`` of ``size`` distinct random users (all, where there are fewer), one request each in the later half of
    the user's history."""
    rng = np.random.default_rng(seed)
    size = min(size, data.n_users)
    return [
        _batch(data, np.sort(rng.choice(data.n_users, size, replace=False)), rng.random((size, 1)))
        for _ in range(batches)
    ]


def clustered(data: Histories, batches: int, users: int, k: int, seed: int = 2) -> list[Batch]:
    """``batches`` of ``users`` random users, neighbours in a bucketed and sorted table, with ``k`` requests each."""
    rng = np.random.default_rng(seed)
    order = np.lexsort((np.arange(data.n_users), bucket_of(np.arange(data.n_users), DEFAULT_BUCKETS)))
    runs = [order[a : a + users] for a in range(0, data.n_users, users)]
    chosen = rng.choice(len(runs), min(batches, len(runs)), replace=False)
    return [_batch(data, runs[i], np.sort(rng.random((len(runs[i]), k)), axis=1)) for i in chosen]


def clustered_batches(data: Histories, quick: bool) -> list[Batch]:
    """The K = 20 that all cases share: batches of 25 users (quick: 5) with 20 requests each."""
    return clustered(data, 2 if quick else 4, 5 if quick else 25, K)


def unique_events(batches: Sequence[Batch]) -> int:
    """Events that some request of the batches sees."""
    first, last = (np.concatenate([getattr(b, n) for b in batches]) for n in ("start", "stop"))
    begins, row = np.unique(first, return_inverse=True)
    ends = np.zeros(len(begins), np.int64)
    np.maximum.at(ends, row, last)
    return int((ends - begins).sum())


def _batch(data: Histories, users: Ints, place: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Batch:
    event_ts = data.columns["event_ts"]
    first, span = data.first[users], np.diff(data.first)[users]
    at = first[:, None] + ((0.5 + 0.5 * place) * (span[:, None] - 1)).astype(np.int64)
    request_ts = (event_ts[at] + 1).ravel()
    who = np.repeat(users, place.shape[1])
    stop = [
        a + np.searchsorted(event_ts[a:b], t)
        for a, b, t in zip(data.first[who], data.first[who + 1], request_ts, strict=True)
    ]
    return Batch(who.astype(np.int64), request_ts, data.first[who], np.array(stop, np.int64))
