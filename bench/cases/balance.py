"""What ranks have to do of a batch: cut by position, by cost, and users whole; counted, not timed.

400,000 examples, 20 a user, 8 ranks, lengths lognormal (median 1,100, longest 20,000), attention at one 4,096th of a
pair. A model with shared passes runs a user's history once on each rank that has an example of it. Costs, so that less
is better:

- ``vs_mean_share.<way>``: the dearest rank over the mean, mean over batches. ``by_position`` cuts a block of 1,024
  examples into 8 runs; ``budget`` is ``BatchBudget`` with users whole, 204 mean users a batch, windows of 8,192
  examples; ``budget_by_example`` counts examples, as for a model without shared passes, and ``by_example_position``
  is the cut by position counted in that way.
- ``vs_by_position_share``: the dearest rank's work under ``budget`` over that by position, a mean batch's work alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bench.harness import Options, Result
from thinrow.dpp import BatchBudget
from thinrow.dpp.budget import RowSizes
from thinrow.dpp.budget_order import BudgetOrder
from thinrow.dpp.order import RowRefs, SplitManifest, VirtualOrder

_RANKS, _K, _PAIR = 8, 20, 1 / 4096
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def run(options: Options) -> Result:
    """All of it; quick: a twentieth of the users."""
    users, batches = (1_600, 6) if options.quick else (20_000, 60)
    rng = np.random.default_rng(0)
    longest = np.minimum(rng.lognormal(7, 1, users), 20_000)
    length = (np.repeat(longest, _K) * np.tile(np.linspace(0.9, 1, _K), users)).astype(np.int32)
    sizes = RowSizes(length, np.repeat(np.arange(users), _K).astype(np.int32), users)
    manifest = SplitManifest("balance", 1, (users * _K // 16,) * 16, 256)
    blocks = {n: VirtualOrder(manifest, 0, 4, n, None, 1) for n in (4, 32)}
    mean = float(_cost(longest).mean())
    whole = BudgetOrder(blocks[32], BatchBudget(204 * mean, pair=_PAIR), sizes, None)
    single = float(_cost(length.astype(np.float64)).mean()) * 1_024
    apart = BudgetOrder(blocks[4], BatchBudget(single, pair=_PAIR, shared=False), sizes, None)
    result = Result("balance", {"users": users, "rows": len(length), "ranks": _RANKS, "batches": batches})
    ways: dict[str, tuple[VirtualOrder | BudgetOrder, bool]] = {
        "by_position": (blocks[4], True),
        "budget": (whole, True),
        "by_example_position": (blocks[4], False),
        "budget_by_example": (apart, False),
    }
    work = {}
    for name, (order, shared) in ways.items():
        n = order.n_batches or 0
        loads = np.array([_load(order, t, sizes, shared) for t in range(0, n, max(n // batches, 1))])
        once = np.array([_once(order, t, sizes) for t in range(0, n, max(n // batches, 1))])
        share = loads.max(axis=1) / loads.mean(axis=1)
        result.ratios[f"vs_mean_share.{name}"] = float(share.mean())
        result.figures[name] = {"worst": round(float(share.max()), 3), "median": round(float(np.median(share)), 3)}
        # Work of the dearest rank where each history is run once, over all batches, is 1 / ranks.
        work[name] = float((loads.max(axis=1) / once).mean())
    result.ratios["vs_by_position_share"] = work["budget"] / work["by_position"]
    return result


def _cost(events: Floats) -> Floats:
    return events + _PAIR * events * events


def _rows(order: VirtualOrder | BudgetOrder, refs: RowRefs) -> Ints:
    split_off = np.concatenate([[0], np.cumsum(order.manifest.split_rows)])
    vs, which = np.unique(refs.v, return_inverse=True)
    bases = [order.base(v) for v in vs.tolist()]
    first = np.array([split_off[b.split] + b.first_row for b in bases], np.int64)
    return first[which] + refs.row if len(vs) else np.empty(0, np.int64)


def _load(order: VirtualOrder | BudgetOrder, t: int, sizes: RowSizes, shared: bool) -> Floats:
    """(ranks,) cost of batch t at each rank."""
    return np.array([_of(_rows(order, order.batch(t, r, _RANKS)), sizes, shared) for r in range(_RANKS)])


def _once(order: VirtualOrder | BudgetOrder, t: int, sizes: RowSizes) -> float:
    """Cost of batch t where each history is run once."""
    return _of(_rows(order, order.batch(t)), sizes, True)


def _of(rows: Ints, sizes: RowSizes, shared: bool) -> float:
    events = sizes.events[rows].astype(np.float64)
    if shared:
        _, which = np.unique(sizes.users[rows], return_inverse=True)
        longest = np.zeros(int(which.max()) + 1 if len(which) else 0)
        np.maximum.at(longest, which, events)
        events = longest
    return float(_cost(events).sum())
