"""As ``thinrow.kernels.numba.budget``, in plain Python."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

HALVINGS = 40


def _cut(cost: list[float], events: list[int], limit: float, most: int) -> list[int]:
    batch_of: list[int] = []
    total, held = 0.0, 0
    for c, m in zip(cost, events, strict=True):
        if not batch_of:
            batch_of.append(0)
        elif total + c > limit or held + m > most:
            batch_of.append(batch_of[-1] + 1)
            total, held = 0.0, 0
        else:
            batch_of.append(batch_of[-1])
        total, held = total + c, held + m
    return batch_of


def count_batches(cost: Array, events: Array, window_off: Array, limit: float, most: int) -> Array:
    """As ``thinrow.kernels.numba.budget.count_batches``."""
    counts = []
    for a, b in itertools.pairwise(window_off):
        counts.append(len(set(_cut(cost[a:b].tolist(), events[a:b].tolist(), limit, most))))
    return np.array(counts, np.int64)


def cut_batches(cost: Array, events: Array, limit: float, most: int) -> Array:
    """As ``thinrow.kernels.numba.budget.cut_batches``."""
    costs, numbers = cost.tolist(), events.tolist()
    n = len(set(_cut(costs, numbers, limit, most)))
    low, high = 0.0, limit
    for _ in range(HALVINGS if n > 1 else 0):
        middle = low + (high - low) / 2
        if len(set(_cut(costs, numbers, middle, most))) <= n:
            high = middle
        else:
            low = middle
    return np.array(_cut(costs, numbers, high, most), np.int64)


def spread_units(cost: Array, n_ranks: int) -> Array:
    """As ``thinrow.kernels.numba.budget.spread_units``."""
    load, ranks = [0.0] * n_ranks, np.empty(len(cost), np.int64)
    for u in sorted(range(len(cost)), key=lambda u: (-cost[u], u)):
        ranks[u] = load.index(min(load))
        load[ranks[u]] += float(cost[u])
    return ranks
