"""Units (users, or examples) cut into batches by what they cost, and spread over ranks.

Worked example: costs ``[60, 30, 50, 40, 10]`` with a limit of 100 are batches ``[0, 0, 1, 1, 1]``: 90 and 100. With a
limit of 120, too, two batches are needed, and they are as even as the order allows. Two ranks get ``[60, 40]`` and
``[50, 30, 10]``: 100 and 90.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

#: Halvings of the range in which the least limit is looked for.
HALVINGS = 40


@njit
def _cut(cost: Array, events: Array, start: int, stop: int, limit: float, most: int, out: Array) -> Any:
    """Batches of units [start, stop), read from the front; into ``out`` the batch of each, where it has a length."""
    batch, total, held, n = -1, 0.0, 0, 0
    for u in range(start, stop):
        if n == 0 or total + cost[u] > limit or held + events[u] > most:
            batch, total, held, n = batch + 1, 0.0, 0, 0
        total += cost[u]
        held += events[u]
        n += 1
        if len(out):
            out[u - start] = batch
    return batch + 1


@njit
def count_batches(cost: Array, events: Array, window_off: Array, limit: float, most: int) -> Array:
    """(W,) int64 batches of each window.

    Args:
        cost: (U,) float64.
        events: (U,) int64.
        window_off: (W + 1,) int64, the units of each window.
        limit: cost of a batch at most; a unit that costs more is a batch alone.
        most: events of a batch at most; likewise.
    """
    counts, none = np.empty(len(window_off) - 1, np.int64), np.empty(0, np.int64)
    for w in range(len(counts)):
        counts[w] = _cut(cost, events, window_off[w], window_off[w + 1], limit, most, none)
    return counts


@njit
def cut_batches(cost: Array, events: Array, limit: float, most: int) -> Array:
    """(U,) int64 the batch of each unit of a window, ascending: as many batches as ``count_batches`` says, cut with the
    least limit that gives no more."""
    out = np.empty(len(cost), np.int64)
    n = _cut(cost, events, 0, len(cost), limit, most, out)
    if n > 1:
        low, high = 0.0, limit
        for _ in range(HALVINGS):
            middle = low + (high - low) / 2
            if _cut(cost, events, 0, len(cost), middle, most, out) <= n:
                high = middle
            else:
                low = middle
        _cut(cost, events, 0, len(cost), high, most, out)
    return out


@njit
def spread_units(cost: Array, n_ranks: int) -> Array:
    """(U,) int64 the rank of each unit: the dearest first, of equals the first, to the rank that has least, of equals
    the lowest (LPT, Graham 1969). The dearest rank has at most the mean and one unit."""
    ranks, load = np.empty(len(cost), np.int64), np.zeros(n_ranks)
    for u in np.argsort(-cost, kind="mergesort"):
        rank = 0
        for r in range(1, n_ranks):
            if load[r] < load[rank]:
                rank = r
        ranks[u] = rank
        load[rank] += cost[u]
    return ranks
