"""Tables of any number of shards, through any sequence of steps, full saves, deltas, loads and reshardings: what is
loaded is what was saved, row by row where the shards are the same, key by key where they are others."""

import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.checkpoints import (
    ServingTable,
    commit,
    commit_export,
    export_shard,
    load,
    load_shard,
    save_shard,
    steps,
    version_of,
)
from thinrow.checkpoints.export import DTYPES, index_of, shift_of
from thinrow.core.routing import Routing
from thinrow.core.wrap import mix64_words
from thinrow.embeddings import Budget, DynamicTable, SparseAdagrad, SparseAdam, SparseSGD
from thinrow.embeddings.states import prefixed, tables_of
from thinrow.kernels import BACKENDS, kernel, use

DIM = 3
KEYS = st.one_of(st.integers(-15, 15), st.sampled_from([-(2**63), 2**63 - 1]))

budgets = st.none() | st.builds(
    Budget,
    max_rows=st.integers(2, 12),
    evict=st.sampled_from(["lru", "lfu"]),
    max_age=st.none() | st.integers(1, 4),
    min_count=st.integers(1, 2),
    sketch_cells=st.just(64),
)
optimizers = st.sampled_from([SparseSGD, SparseAdagrad, SparseAdam])
calls = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.lists(KEYS, max_size=10)),
        st.tuples(st.sampled_from(["full", "delta", "delta", "half"]), st.none()),
        st.tuples(st.sampled_from(["export", "export delta", "export delta"]), st.sampled_from(DTYPES)),
        st.tuples(st.just("load"), st.integers(1, 4)),
    ),
    min_size=3,
    max_size=20,
)


class Run:
    """Ranks in one process, and what they last saved."""

    def __init__(self, folder, budget, optimizer):
        self.folder, self.optimizer, self.number = folder, optimizer, 0
        self.start([DynamicTable(DIM, seed=5, block_rows=4, budget=budget) for _ in range(2)])
        self.saved = self.base = None

    def start(self, tables):
        self.tables, self.routing = tables, Routing.even(len(tables))
        self.changes = [table.track() for table in tables]
        # A reader with a mark of its own.
        self.served_changes, self.served_base = [table.track() for table in tables], None

    def step(self, keys):
        keys = np.array(keys, np.int64)
        shards = self.routing.shards(keys)
        for shard, table in enumerate(self.tables):
            mine = keys[shards == shard]
            if len(mine):
                gradient = np.random.default_rng(len(keys)).normal(size=(len(mine), DIM)).astype(np.float32)
                table.add_gradient(table.rows(mine, insert=True), gradient)
        self.optimizer(*self.tables, lr=0.5).step()

    def save(self, kind):
        self.number += 1
        delta = kind == "delta" and self.base is not None
        for shard, (table, changes) in enumerate(zip(self.tables, self.changes, strict=True)):
            if kind == "half" and shard == len(self.tables) - 1:
                return
            tensors = prefixed("a.table.", table.delta(changes) if delta else table.state())
            save_shard(self.folder, self.number, shard, self.routing, tensors=tensors)
        base = self.base if delta else None
        shared = {"w": np.full(2, self.number)}
        path = commit(self.folder, self.number, self.routing, tensors=shared, meta={"at": self.number}, base=base)
        self.saved = self.number, self.routing, [table.state() for table in self.tables]
        self.base = load(path).version
        for changes in self.changes:
            changes.mark(self.base)

    def export(self, dtype, delta):
        self.number += 1
        folder, base = self.folder / "served", self.served_base if delta else None
        for shard, (table, changes) in enumerate(zip(self.tables, self.served_changes, strict=True)):
            state = table.state() if base is None else table.delta(changes, row_states=False)
            export_shard(folder, self.number, shard, self.routing, {"t.": state}, dtype=dtype)
        self.types = [*(self.types if base else []), dtype]
        self.served_base = version_of(commit_export(folder, self.number, self.routing, base=base))
        for changes in self.served_changes:
            changes.mark(self.served_base)
        self.check_served(ServingTable.open(folder, "t."), dtype)

    def check_served(self, served, dtype):
        held = {k: v for t in self.tables for k, v in zip(t.keys().tolist(), t.read(np.arange(len(t))), strict=True)}
        wanted = np.array([*range(-20, 20), -(2**63), 2**63 - 1])
        vectors, found = served.read(wanted)
        assert found.tolist() == [k in held for k in wanted.tolist()]
        assert not vectors[~found].any()
        expected = np.array([held.get(k, np.zeros(DIM)) for k in wanted.tolist()], np.float32)
        # A row of an earlier export may be in another type: each is as exact as the least of them.
        np.testing.assert_allclose(vectors, expected, rtol=2**-10, atol=np.abs(expected).max() / 127)
        if set(self.types) == {"float32"}:
            assert vectors.tobytes() == expected.tobytes()

    def load(self, n_shards):
        if self.saved is None:
            assert steps(self.folder) == []
            return
        number, routing_saved, states = self.saved
        everything = load(self.folder)
        assert (everything.step, everything.meta) == (number, {"at": number})
        assert everything.tensors["w"].tolist() == [number] * 2
        assert by_key([tables_of(everything.tensors)["a.table."]]) == by_key(states)
        routing = Routing.even(n_shards)
        found = [load_shard(self.folder, shard, routing) for shard in range(n_shards)]
        loaded = [tables_of(checkpoint.tensors)["a.table."] for checkpoint in found]
        assert everything.routing == routing_saved
        if routing == routing_saved:
            for mine, saved in zip(loaded, states, strict=True):
                same(mine, saved)
        assert by_key(loaded) == by_key(states)
        for shard, state in enumerate(loaded):
            assert (routing.shards(state["keys"]) == shard).all()
        self.start([DynamicTable.from_state(state, block_rows=2) for state in loaded])
        self.base = found[0].version if routing == routing_saved else None
        for changes in self.changes:
            changes.base = self.base


def by_key(states):
    """Key -> bytes of all that is said of its row; and that no key is in two shards."""
    names = sorted({n for s in states for n in s if n == "values" or n.startswith("row_state.")})
    out = {}
    for state in states:
        for row, key in enumerate(state["keys"].tolist()):
            assert key not in out
            out[key] = {n: state[n][row].tobytes() for n in names if n in state}
    # A shard that never had a gradient has no optimizer state; joined, its rows have the fill.
    return {k: {n: b for n, b in of.items() if n == "values" or any(b)} for k, of in out.items()}


def same(left, right):
    assert left.keys() == right.keys()
    for name, array in left.items():
        other = right[name]
        assert (array.dtype, array.shape, array.tobytes()) == (other.dtype, other.shape, other.tobytes()), name
        assert array.flags.writeable


@given(st.data(), st.integers(1, 3), st.sets(st.integers(-(2**63), 2**63 - 1), max_size=60))
@settings(max_examples=60)
def test_keys_are_found_in_an_export(data, n_shards, keys):
    routing = Routing.even(n_shards)
    low, end = routing.bounds(data.draw(st.integers(0, n_shards - 1)))
    mixed = np.sort(mix64_words(np.array([*keys], np.int64).view(np.uint64)))
    words = mixed[(mixed >= low) & (mixed <= end - 1)]
    index = index_of(words, low, end)
    assert shift_of(len(index) - 1, low, end) < 64
    wanted = np.array([*keys, *data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9))], np.int64)
    expected = [int(np.searchsorted(words, w)) if w in words else -1 for w in mix64_words(wanted.view(np.uint64))]
    for backend in BACKENDS:
        with use(backend):
            found = kernel("find_words")(words, index, low, shift_of(len(index) - 1, low, end), wanted)
        assert found.tolist() == expected


@given(budgets, optimizers, calls)
@settings(max_examples=15)
def test_what_is_loaded_is_what_was_saved(budget, optimizer, calls):
    run_calls(budget, optimizer, calls)


@pytest.mark.slow
@given(budgets, optimizers, calls)
@settings(max_examples=300)
def test_what_is_loaded_is_what_was_saved_at_length(budget, optimizer, calls):
    run_calls(budget, optimizer, calls)


def run_calls(budget, optimizer, calls):
    with tempfile.TemporaryDirectory() as folder, patch.object(os, "fsync", lambda _: None):
        run = Run(Path(folder), budget, optimizer)
        for name, argument in [*calls, ("load", 3)]:
            if name == "step":
                run.step(argument)
            elif name == "load":
                run.load(argument)
            elif name.startswith("export"):
                run.export(argument, name == "export delta")
            else:
                run.save(name)
        assert not [p.name for p in Path(folder).iterdir() if p.name.startswith(".tmp-")]
