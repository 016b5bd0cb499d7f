"""A table with a budget against a dict of plain Python: who has a row, whose vectors, through any sequence of steps."""

import dataclasses
import os
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import InputError
from thinrow.core.wrap import MASK64, mix64
from thinrow.embeddings import (
    Budget,
    DynamicTable,
    SparseAdagrad,
    SparseAdam,
    SparseRowWiseAdagrad,
    SparseSGD,
    index,
)
from thinrow.embeddings.index import INDEX_BYTES
from thinrow.embeddings.sketch import Sketch
from thinrow.embeddings.states import pick, replay
from thinrow.kernels import BACKENDS, kernel, use

KEYS = st.one_of(st.integers(-20, 20), st.sampled_from([-(2**63), 2**63 - 1]))
DIM = 3


def int64(keys):
    return np.array(keys, np.int64)


def lowest_key_first(usage):
    """A score of one's own: the lowest keys go."""
    return usage.keys.astype(np.float64)


def no_score(usage):
    return np.full(len(usage.keys), np.nan)


class DictTable:
    """Rows in order, as the docstrings say it."""

    def __init__(self, budget, max_rows):
        self.budget, self.max_rows, self.step, self.order = budget, max_rows, 0, []
        self.vectors, self.uses, self.seen = {}, {}, {}
        self.moments = {}
        #: Of each step the keys that it used; the last is the one that goes on.
        self.used = [set()]

    def insert(self, keys, start):
        absent = [k for k in keys if k not in self.order]
        for key in absent:
            self.seen[key] = self.seen.get(key, 0) + 1
            if key not in self.order and self.seen[key] >= self.budget.min_count and len(self.order) < self.max_rows:
                self.order.append(key)
                self.vectors[key], self.uses[key] = start(key), [0, 0]
        for key in keys:
            if key in self.order:
                self.uses[key] = [self.uses[key][0] + 1, self.step]
                self.used[-1].add(key)

    def end_step(self):
        self.step += 1
        gone = set()
        if self.budget.max_age is not None:
            gone = set(self.order) - set().union(*self.used[-self.budget.max_age :])
        self.used.append(set())
        # Where there is room for one row only, room for a new key is that of this row.
        kept = 0 if self.max_rows == 1 else max(1, int(self.max_rows * self.budget.keep))
        too_many = len(self.order) - kept if len(self.order) > (kept + self.max_rows) // 2 else 0
        score = {"lru": lambda k: self.uses[k][1], "lfu": lambda k: self.uses[k][0]}.get(self.budget.evict, lambda k: k)
        ranked = sorted((k for k in self.order if k not in gone), key=lambda k: (score(k), mix64(k & MASK64)))
        gone |= set(ranked[: max(0, too_many - len(gone))])
        left = len(self.order) - len(gone)
        holes = [i for i, k in enumerate(self.order[:left]) if k in gone]
        movers = [k for k in self.order[left:] if k not in gone]
        for hole, key in zip(holes, movers, strict=True):
            self.order[hole] = key
        self.order = self.order[:left]
        for key in gone:
            del self.vectors[key], self.uses[key]
            self.moments.pop(key, None)
        if too_many and gone and self.budget.evict == "lfu":
            for key in self.order:
                self.uses[key][0] -= self.uses[key][0] // 2
        return len(gone)

    def update(self, key, gradient, optimizer):
        """By the formulas of the papers, lr 0.5."""
        if optimizer is SparseSGD:
            change = gradient
        else:
            m, v, t = self.moments.get(key, (0, 0, 0))
            m, v, t = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2, t + 1
            self.moments[key] = m, v, t
            change = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        self.vectors[key] = self.vectors[key] - 0.5 * change


class Tracked:
    """A table with its state at the mark: the delta since then must lead to the state of now."""

    def __init__(self, table):
        self.table, self.changes, self.marked = table, table.track(), table.state()

    def check(self):
        delta, now = self.table.delta(self.changes), self.table.state()
        same(replay(self.marked, delta), now)
        assert delta["delta.gone"].tolist() == sorted(set(self.marked["keys"].tolist()) - set(now["keys"].tolist()))
        assert delta["delta.rows"].tolist() == sorted(set(delta["delta.rows"].tolist()))
        unchanged = np.setdiff1d(np.arange(len(now["keys"])), delta["delta.rows"])
        same(pick(self.marked, unchanged)["values"], pick(now, unchanged)["values"])
        served = self.table.delta(self.changes, row_states=False)
        assert {"delta.rows", "delta.gone", "keys", "values", "dim"} <= set(served) <= set(delta)


def same(left, right):
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            same(left[name], right[name])
    else:
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


budgets = st.builds(
    Budget,
    max_rows=st.integers(1, 12),
    evict=st.sampled_from(["lru", "lfu", f"{__name__}:lowest_key_first"]),
    max_age=st.none() | st.integers(1, 4),
    keep=st.sampled_from([0.1, 0.5, 0.9]),
    min_count=st.integers(1, 3),
    # Far more cells than keys: no two share both.
    sketch_cells=st.just(1 << 16),
)
calls = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "look", "step", "mark", "save and load"]), st.lists(KEYS, max_size=10)
    ),
    min_size=4,
    max_size=25,
)


@pytest.fixture(scope="module", autouse=True)
def importable():
    """The function of one's own is found by the name of this module."""
    import sys

    sys.modules.setdefault(__name__, SimpleNamespace(lowest_key_first=lowest_key_first, no_score=no_score))


@pytest.mark.parametrize("backend", BACKENDS)
@given(budgets, calls, st.integers(0, 99), st.sampled_from([SparseSGD, SparseAdam]), st.booleans())
@settings(max_examples=150)
def test_any_sequence_of_steps_does_what_a_dict_does(backend, budget, calls, seed, make, in_bytes):
    max_rows = budget.max_rows
    if in_bytes:
        # A vector, its usage, its place in the index; Adam's two moments and count of steps.
        row_bytes = DIM * 4 + 2 * 8 + INDEX_BYTES + (2 * DIM * 4 + 8 if make is SparseAdam else 0)
        budget = dataclasses.replace(budget, max_rows=None, max_bytes=max_rows * row_bytes + seed % row_bytes)
    # So that a few keys are many segments of the index, and often too many for one of them.
    few = patch.multiple(index, _MIN_SLOTS=2, _SEGMENT_SLOTS=4, _SLAB_SLOTS=16)
    with use(backend), few:
        table = DynamicTable(DIM, seed=seed, block_rows=4, budget=budget)
        optimizer = make(table, lr=0.5)
        oracle, plain = DictTable(budget, max_rows), DynamicTable(DIM, seed=seed)
        tracked = Tracked(table)

        def start(key):
            return plain.read(plain.rows(int64([key]), insert=True))[0]

        for name, keys in calls:
            if name == "insert":
                rows = table.rows(int64(keys), insert=True)
                oracle.insert(keys, start)
                gradient = np.random.default_rng(len(keys)).normal(size=(len(keys), DIM)).astype(np.float32)
                table.add_gradient(rows, gradient)
                for key, g in zip(keys, gradient, strict=True):
                    if key in oracle.order:
                        oracle.vectors.setdefault(("g", key), []).append(g)
            elif name == "look":
                before = table.state()
                table.rows(int64(keys), insert=False)
                assert all(np.array_equal(v, before[n]) for n, v in table.state().items())
            elif name == "step":
                optimizer.step()
                for entry in [e for e in oracle.vectors if isinstance(e, tuple)]:
                    parts = oracle.vectors.pop(entry)
                    total = parts[0]
                    for part in parts[1:]:
                        total = total + part
                    oracle.update(entry[1], total, make)
                oracle.end_step()
            elif name == "mark":
                tracked.changes.mark()
                tracked.marked = table.state()
            elif not table._gradients:
                table = DynamicTable.from_state(table.state(), block_rows=2)
                optimizer = make(table, lr=0.5)
                tracked = Tracked(table)
            if name in ("step", "mark"):
                tracked.check()
            assert table.keys().tolist() == oracle.order
            assert len(table) <= max_rows
            found = table.rows(int64([*oracle.order, *keys]), insert=False).tolist()
            assert found == [oracle.order.index(k) if k in oracle.order else -1 for k in [*oracle.order, *keys]]
            if oracle.order and not table._gradients:
                expected = np.stack([oracle.vectors[k] for k in oracle.order])
                np.testing.assert_allclose(table.read(np.arange(len(table))), expected, rtol=1e-5, atol=1e-6)
                usage = table.state()["row_state.usage"]
                assert usage.tolist() == [oracle.uses[k] for k in oracle.order]


@given(st.lists(st.lists(KEYS, max_size=30), max_size=8), st.sampled_from([1, 4, 64]))
@settings(max_examples=100)
def test_counts_are_never_too_low(calls, n_cells):
    sketches = {backend: Sketch(n_cells) for backend in BACKENDS}
    seen, total = {}, 0
    for keys in calls:
        counts = {}
        for backend, sketch in sketches.items():
            with use(backend):
                counts[backend] = sketch.seen(int64(keys)).tolist()
        assert counts["numba"] == counts["reference"]
        assert np.array_equal(*(s.cells for s in sketches.values()))
        for key, count in zip(keys, counts["numba"], strict=True):
            seen[key] = seen.get(key, 0) + 1
            assert count >= seen[key]
        total += len(keys)
        if total >= 8 * n_cells:
            seen, total = {k: n // 2 for k, n in seen.items()}, 0


def test_a_count_stays_at_255():
    cells = np.full((2, 4), 255, np.uint8)
    for backend in BACKENDS:
        with use(backend):
            assert kernel("count_keys")(cells, int64([7, 7])).tolist() == [255, 255]


@pytest.mark.parametrize(
    ("make", "state_bytes"),
    [(SparseSGD, 0), (SparseAdagrad, 64), (SparseRowWiseAdagrad, 4), (SparseAdam, 2 * 64 + 8)],
)
def test_bytes_bound_the_rows_with_their_state(make, state_bytes):
    table = DynamicTable(16, budget=Budget(max_bytes=100_000), block_rows=16)
    optimizer = make(table)
    for step in range(50):
        rows = table.rows(np.arange(step * 100, step * 100 + 400), insert=True)
        table.add_gradient(rows, np.ones((400, 16), np.float32))
        held = sum(b.nbytes for part in (table.values, *table._row_state.values()) for b in part.blocks)
        # But for the last block of each.
        assert held + len(table) * INDEX_BYTES <= 100_000 + 16 * table.row_bytes
        optimizer.step()
    assert table.row_bytes == 16 * 4 + state_bytes + 16 + 60
    assert len(table) > 0.8 * 100_000 / table.row_bytes


def test_the_only_row_makes_room():
    table = DynamicTable(2, budget=Budget(max_rows=1))
    for key in (5, 6):
        assert table.rows(int64([key]), insert=True).tolist() == [0]
        assert table.make_room() == 1
    too_small = DynamicTable(2, budget=Budget(max_bytes=50))
    with pytest.raises(InputError, match="max_bytes=50; a row of the table with its state is"):
        too_small.rows(int64([5]), insert=True)


def test_room_is_not_made_under_gradients():
    table = DynamicTable(2, budget=Budget(max_rows=4))
    table.add_gradient(table.rows(int64([1]), insert=True), np.ones((1, 2), np.float32))
    with pytest.raises(InputError, match="step the optimizer first"):
        table.make_room()
    assert DynamicTable(2).make_room() == 0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "give one of the two"),
        ({"max_rows": 1, "max_bytes": 1}, "give one of the two"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"max_rows": 10.5}, "max_rows=10.5; it must be an integer"),
        ({"max_rows": 1, "min_count": 256}, "255 at most"),
        ({"max_rows": 1, "keep": 1}, "keep=1"),
        ({"max_rows": 1, "sketch_cells": 3}, "power of two"),
        ({"max_rows": 1, "sketch_cells": 1 << 42}, "2\\^32 at most"),
        ({"max_rows": 1, "evict": "oldest"}, "it must be 'lru', 'lfu' or 'module:name'"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(parameters, message):
    with pytest.raises(InputError, match=message):
        Budget(**parameters)


def test_a_score_that_is_none_is_refused():
    for path, message in (("no.module:f", "cannot be imported"), (f"{__name__}:no_score", "none of them NaN")):
        table = DynamicTable(2, budget=Budget(max_rows=2, evict=path))
        table.rows(int64([1, 2]), insert=True)
        with pytest.raises(InputError, match=message):
            table.make_room()
        assert table.keys().tolist() == [1, 2]


def test_a_state_without_its_budget_is_refused():
    table = DynamicTable(2, budget=Budget(max_rows=4, min_count=2, sketch_cells=8))
    state = table.state()
    for name in ("step", "sketch", "sketch_sightings"):
        with pytest.raises(InputError, match=f"the state has a budget but no '{name}'"):
            DynamicTable.from_state({n: v for n, v in state.items() if n != name})
    with pytest.raises(InputError, match=r"must be uint8 \(2, 8\)"):
        DynamicTable.from_state({**state, "sketch": np.zeros((2, 4), np.uint8)})
    with pytest.raises(InputError, match="budget is none"):
        DynamicTable.from_state({**state, "budget": np.frombuffer(b"{}x", np.uint8)})


@pytest.mark.slow
def test_a_hundred_million_keys_pass_without_growth():
    """``THINROW_KEYS``: how many. The memory of the table never exceeds its budget."""
    n, a_step = int(os.environ.get("THINROW_KEYS", "100000000")), 200_000
    budget = Budget(max_bytes=256 << 20, min_count=1)
    table = DynamicTable(16, budget=budget)
    sgd = SparseSGD(table, lr=0.1)
    for first in range(0, n, a_step):
        keys = np.arange(first, first + a_step) * 7919
        rows = table.rows(keys, insert=True)
        table.add_gradient(rows, np.ones((a_step, 16), np.float32))
        held = sum(b.nbytes for part in (table.values, *table._row_state.values()) for b in part.blocks)
        held += table._index.n_bytes
        # Beside the last block of each, and the last segment.
        assert held <= (256 << 20) + 65_536 * (64 + 16 + 8) + (1 << 20)
        assert (rows >= 0).mean() > 0.3
        sgd.step()
    print(f"{n} keys through {len(table)} rows")
