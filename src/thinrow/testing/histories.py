"""Random shared histories in memory, late and corrected events among them, for tests of what stands on batches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from thinrow.core.ragged import offsets_of
from thinrow.core.units import NEVER
from thinrow.jagged import Column, Events, Jagged, SharedHistories


def random_histories(
    rng: np.random.Generator,
    *,
    n_users: int = 3,
    n_requests: int = 12,
    max_events: int = 20,
    max_len: int | None = None,
    align: int = 1,
    late: float = 0.2,
    columns: Mapping[str, int] | None = None,
) -> tuple[SharedHistories, npt.NDArray[np.int64]]:
    """Histories of requests and the (X,) times of these, in random order.

    Args:
        late: share of events that arrive out of order, and of events that a later one corrects.
        columns: name -> number of distinct values of an int64 event column.
    """
    lengths = rng.integers(0, max_events + 1, n_users)
    offsets = offsets_of(lengths)
    n = int(offsets[-1])
    event_ts = np.concatenate([np.sort(rng.integers(0, 50, k)) for k in lengths] or [np.empty(0)]).astype(np.int64)
    arrival, hidden = np.empty(n, np.int64), np.full(n, NEVER, np.int64)
    for a, b in itertools.pairwise(offsets):
        order = np.arange(b - a) + np.where(rng.random(b - a) < late, rng.integers(0, 10, b - a), 0)
        arrival[a:b][np.argsort(order, kind="stable")] = np.arange(1, b - a + 1)
        corrected = rng.random(b - a) < late / 4
        hidden[a:b][corrected] = arrival[a:b][corrected] + rng.integers(1, 5, corrected.sum())
    values = {name: Column(rng.integers(1, k + 1, n)) for name, k in (columns or {"item": 5}).items()}
    events = Events(np.arange(n_users) * 7, offsets, event_ts, arrival, hidden, values)
    user_of, request_ts = rng.integers(0, n_users, n_requests), rng.integers(0, 60, n_requests)
    bound = rng.integers(0, lengths[user_of] + 1) if n_users else np.empty(0, np.int64)
    seen = [_window(events, *r, max_len, align) for r in zip(user_of, request_ts, bound, strict=True)]
    start, stop = (np.array([s[i] for s in seen], np.int64) for i in (0, 1))
    exact = np.array([s[2] for s in seen], np.bool_)
    return SharedHistories(events, user_of, start, stop, bound, exact), request_ts


def random_candidates(rng: np.random.Generator, n_requests: int, columns: Mapping[str, int]) -> dict[str, Jagged]:
    """0 to 4 candidates a request, at least one in all, of int64 columns with values in ``[1, k]``."""
    offsets = offsets_of(np.maximum(rng.integers(0, 5, n_requests), np.arange(n_requests) == 0))
    return {n: Jagged(Column(rng.integers(1, k + 1, int(offsets[-1]))), offsets) for n, k in columns.items()}


def _window(
    events: Events, user: int, request_ts: int, bound: int, max_len: int | None, align: int
) -> tuple[int, int, bool]:
    """The rule of visibility, spelled out for one request."""
    a, b = int(events.offsets[user]), int(events.offsets[user + 1])
    seen = [
        i for i in range(a, b) if events.event_ts[i] < request_ts and events.arrival[i] <= bound < events.hidden_from[i]
    ]
    if max_len is not None and len(seen) > max_len:
        # The window starts at a multiple of align among the visible events.
        seen = seen[-(-(len(seen) - max_len) // align) * align :]
    if not seen:
        return a, a, True
    return seen[0], seen[-1] + 1, len(seen) == seen[-1] + 1 - seen[0]
