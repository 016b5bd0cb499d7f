"""Batches cut by a budget, against the rule written out in plain Python; kernels against their reference."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of
from thinrow.dpp import BatchBudget
from thinrow.dpp import budget_order as module
from thinrow.dpp.budget import RowSizes
from thinrow.dpp.budget_order import BudgetOrder
from thinrow.dpp.order import BATCH_STREAM, UNIT_STREAM, SplitManifest, VirtualOrder, permutation
from thinrow.kernels import kernel, use

MANY = settings(max_examples=80)

budgets = st.builds(
    BatchBudget,
    limit=st.integers(1, 400),
    event=st.sampled_from([0.0, 1.0, 2.5]),
    pair=st.sampled_from([0.0, 1 / 16]),
    row=st.sampled_from([0.5, 1.0]),
    max_events=st.none() | st.integers(1, 90),
    by_length=st.booleans(),
    shared=st.booleans(),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[BudgetOrder, RowSizes]:
    rows = tuple(draw(st.lists(st.integers(0, 23), min_size=1, max_size=5)))
    manifest = SplitManifest("table", 1, rows, draw(st.integers(1, 7)))
    order = VirtualOrder(
        manifest, draw(st.integers(-(2**63), 2**63)), draw(st.integers(1, 4)), draw(st.integers(1, 6)), None, 2
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    users = [np.sort(rng.integers(0, 6, n)) + 6 * s for s, n in enumerate(rows)]
    lengths = rng.integers(0, draw(st.sampled_from([1, 40])), sum(rows), endpoint=True).astype(np.int32)
    sizes = RowSizes(lengths, np.concatenate(users).astype(np.int32), 6 * len(rows))
    return BudgetOrder(order, draw(budgets), sizes, draw(st.none() | st.integers(1, 30))), sizes


def slowly(one: BudgetOrder, sizes: RowSizes) -> list[list[list[tuple[int, int]]]]:
    """The batches of a run: units of rows (v, place in v)."""
    order, budget, max_len = one._order, one._budget, one._max_len
    split_off = np.concatenate([[0], np.cumsum(order.manifest.split_rows)])
    run: list[list[list[tuple[int, int]]]] = []
    for window in range(order.n_batches or 0):
        units: dict[Any, list[tuple[int, int]]] = {}
        seen: dict[Any, list[int]] = {}
        for v in order.bases_of(window):
            base = order.base(v)
            for row in range(base.stop_row - base.first_row):
                at = split_off[base.split] + base.first_row + row
                key = int(sizes.users[at]) if budget.shared else (v, row)
                units.setdefault(key, []).append((v, row))
                seen.setdefault(key, []).append(int(sizes.events[at]))
        keys = sorted(units)
        held = {}
        for key in keys:
            longest, least = max(seen[key]), min(seen[key])
            reach = longest if max_len is None else longest - least + max_len
            held[key] = min(longest, reach)
        drawn = permutation(len(keys), order.seed, UNIT_STREAM, window).tolist()
        keys = [keys[i] for i in drawn]
        if budget.by_length:
            keys.sort(key=lambda k: held[k])
        cost = [budget.row * len(units[k]) + budget.event * held[k] + budget.pair * (held[k] * held[k]) for k in keys]
        most = budget.max_events or 10**9

        def cut(
            limit: float, keys: Any = keys, cost: Any = cost, held: Any = held, most: int = most
        ) -> list[list[Any]]:
            found: list[list[Any]] = []
            total = events = 0.0
            for key, c in zip(keys, cost, strict=True):
                if not found or total + c > limit or events + held[key] > most:
                    found.append([])
                    total = events = 0.0
                total, events = total + c, events + held[key]
                found[-1].append(key)
            return found

        # As even as can be: of all limits that matter the least one that needs no more batches.
        n = len(cut(budget.limit))
        sums = sorted({sum(cost[a:b]) for a in range(len(cost)) for b in range(a + 1, len(cost) + 1)})
        even = next(found for s in [*(s for s in sums if s <= budget.limit), budget.limit] if len(found := cut(s)) == n)
        by_number = permutation(n, order.seed, BATCH_STREAM, window).tolist() if budget.by_length else list(range(n))
        placed: list[list[list[tuple[int, int]]]] = [[] for _ in range(n)]
        for number, batch in zip(by_number, even, strict=True):
            placed[number] = [units[key] for key in batch]
        run += placed
    return run


def cut(cost: list[float], events: list[int], limit: float, most: int) -> list[list[int]]:
    """Positions of units, read from the front."""
    found: list[list[int]] = []
    total, held = 0.0, 0
    for i, (c, m) in enumerate(zip(cost, events, strict=True)):
        if not found or total + c > limit or held + m > most:
            found.append([])
            total, held = 0.0, 0
        total, held = total + c, held + m
        found[-1].append(i)
    return found


def rows_of(one: BudgetOrder, t: int, *ranks: int) -> list[tuple[int, int]]:
    refs = one.batch(t, *ranks)
    return list(zip(refs.v.tolist(), refs.row.tolist(), strict=True))


@MANY
@given(cases())
def test_batches_are_those_of_the_rule_written_out(case: tuple[BudgetOrder, RowSizes]) -> None:
    one, sizes = case
    expected = slowly(one, sizes)
    assert one.n_batches == len(expected)
    for t, units in enumerate(expected):
        assert rows_of(one, t) == [row for unit in units for row in unit]
        assert set(one.bases_of(t)) >= {v for unit in units for v, _ in unit}
    seen = Counter(row for t in range(len(expected)) for row in rows_of(one, t))
    bases = [one.base(v) for v in range(one.n_bases or 0)]
    assert seen == Counter((b.v, r) for b in bases for r in range(b.stop_row - b.first_row))


@MANY
@given(cases(), st.integers(1, 9))
def test_ranks_share_a_batch_users_whole(case: tuple[BudgetOrder, RowSizes], n_ranks: int) -> None:
    one, sizes = case
    budget = one._budget
    for t, units in enumerate(slowly(one, sizes)):
        parts = [rows_of(one, t, rank, n_ranks) for rank in range(n_ranks)]
        assert sorted(row for part in parts for row in part) == sorted(rows_of(one, t))
        for unit in units:
            assert sum(set(unit) <= set(part) for part in parts) == 1
        load = one.load(t, n_ranks)
        costs = one._planned(one._place(t)[0])
        largest = float(costs[0].cost[costs[1] == one._place(t)[1]].max())
        assert load.max() <= load.mean() + largest * (1 - 1 / n_ranks) + 1e-9 * load.max()
        # One row costs at most a twentieth of what a rank has: then ranks are within 5%.
        if largest <= 0.05 * load.mean():
            assert load.max() <= 1.05 * load.mean()
        assert load.sum() <= budget.limit * (1 + 1e-9) or len(units) == 1


@MANY
@given(cases(), st.integers(0, 2**32))
def test_any_step_is_found_without_the_steps_before_and_in_another_process(
    case: tuple[BudgetOrder, RowSizes], at: int
) -> None:
    one, sizes = case
    n = one.n_batches or 0
    walk = [rows_of(one, t, 0, 2) for t in range(n)]
    other = BudgetOrder(one._order, one._budget, sizes, one._max_len)
    sent = pickle.loads(pickle.dumps(other))
    for t in list(range(n))[at % max(n, 1) :]:
        assert rows_of(other, t, 0, 2) == rows_of(sent, t, 0, 2) == walk[t]
    for t in (-1, n):
        with pytest.raises(InputError, match=f"batch {t} is not in the run; it has {n} batches"):
            one.batch(t)


@MANY
@given(cases())
def test_windows_are_counted_in_any_number_at_a_time_and_without_end(case: tuple[BudgetOrder, RowSizes]) -> None:
    one, sizes = case
    n, before = one.n_batches or 0, module._CHUNK_ROWS
    try:
        module._CHUNK_ROWS = 1
        few = BudgetOrder(one._order, one._budget, sizes, one._max_len)
        assert few.n_batches == n
        assert np.array_equal(few._starts, one._starts)
    finally:
        module._CHUNK_ROWS = before
    if n:
        order = one._order
        endless = VirtualOrder(order.manifest, order.seed, order.interleave, order.block, None, None)
        more = BudgetOrder(endless, one._budget, sizes, one._max_len)
        assert more.n_batches is None
        # The last window of a run that ends may lack what the next epoch brings.
        whole = int(one._starts[-2])
        assert [rows_of(more, t) for t in range(whole)] == [rows_of(one, t) for t in range(whole)]
        assert len(rows_of(more, n + 50)) > 0


@MANY
@given(st.lists(st.floats(0, 100), max_size=60), st.integers(1, 400), st.integers(1, 200), st.integers(0, 2**32))
def test_kernels_are_their_reference(costs: list[float], limit: int, most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost, events = np.array(costs, np.float64), rng.integers(0, 50, len(costs))
    off = offsets_of(np.diff(np.sort(np.concatenate([[0, len(costs)], rng.integers(0, len(costs) + 1, 3)]))))
    calls = (
        ("count_batches", (cost, events, off, float(limit), most)),
        ("cut_batches", (cost, events, float(limit), most)),
        ("spread_units", (cost, 1 + limit % 9)),
    )
    for name, arguments in calls:
        got = kernel(name)(*arguments)
        with use("reference"):
            np.testing.assert_array_equal(got, kernel(name)(*arguments))


def test_ranks_of_many_users_are_within_five_percent() -> None:
    rng = np.random.default_rng(5)
    users = np.repeat(np.arange(20_000), 4).astype(np.int32)
    lengths = np.minimum(rng.lognormal(5, 1, len(users)), 2_000).astype(np.int32)
    order = VirtualOrder(SplitManifest("table", 1, (len(users),), 256), 3, 4, 32, None, 1)
    limit = 600 * float(np.mean(lengths + lengths.astype(float) ** 2 / 512)) * 2
    one = BudgetOrder(order, BatchBudget(limit, pair=1 / 512), RowSizes(lengths, users, 20_000), None)
    n = one.n_batches or 0
    assert n > 20
    loads = [one.load(t, 8) for t in range(n)]
    assert max(load.max() / load.mean() for load in loads) <= 1.05
    # Batches cost about the same, the last of a window too.
    totals = np.array([load.sum() for load in loads])
    assert totals.max() <= limit
    assert totals.min() >= 0.6 * totals.max()


def test_bad_budgets_are_named() -> None:
    for name in ("limit", "event", "pair", "row"):
        with pytest.raises(InputError, match=f"{name}=-1"):
            BatchBudget(**{"limit": 1, name: -1})
    with pytest.raises(InputError, match=r"limit=0\.0 .*nothing is bounded"):
        BatchBudget(0)
    with pytest.raises(InputError, match="nothing is bounded"):
        BatchBudget(5, event=0)
    with pytest.raises(InputError, match="max_events=0"):
        BatchBudget(5, max_events=0)
    order = VirtualOrder(SplitManifest("table", 1, (3,), 2), 0, 1, 1, 2, 1)
    sizes = RowSizes(np.ones(3, np.int32), np.zeros(3, np.int32), 1)
    with pytest.raises(InputError, match="both batch_rows=2 and BatchBudget"):
        BudgetOrder(order, BatchBudget(5), sizes, None)
    with pytest.raises(InputError, match="sizes of 3 rows for a table of 4"):
        BudgetOrder(VirtualOrder(SplitManifest("table", 1, (4,), 2), 0, 1, 1, None, 1), BatchBudget(5), sizes, None)


def test_a_user_holds_what_its_drawn_windows_reach_over():
    sizes = RowSizes(np.int32([10, 12, 5]), np.int32([0, 0, 1]), 2, np.int32([4, 3, 5]))
    # Events 6 to 9 and 9 to 11 of the first user, all five of the second.
    assert sizes.held(np.arange(3), 9, np.array([0, 2])).tolist() == [6, 5]
    assert sizes.held(np.arange(3), 9, None).tolist() == [4, 3, 5]
    assert sizes.fingerprint() != RowSizes(sizes.events, sizes.users, 2).fingerprint()
