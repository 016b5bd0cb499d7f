"""Merged tables do what separate ones do."""

import numpy as np
import pytest
import torch

from thinrow.core.errors import InputError
from thinrow.embeddings import (
    DeviceTable,
    DynamicTable,
    Embedding,
    GroupEmbedding,
    ShardedEmbedding,
    SparseAdagrad,
    SparseAdam,
    TableGroup,
)
from thinrow.testing.ranks import run_threads

NAMES = ("item", "store", "action")
EDGES = [0, -1, 5, -(2**63), 2**63 - 1]


def batches(n):
    rng = np.random.default_rng(3)
    shapes = {"item": (4, 3), "store": (5,), "action": (0,)}
    for _ in range(n):
        yield {name: torch.from_numpy(rng.choice(EDGES, shape)) for name, shape in shapes.items()}


def trained(look_up, tables):
    """Vectors of every step, each table's loss weighed otherwise."""
    optimizer, seen = SparseAdagrad(*tables, lr=0.1), []
    for keys in batches(4):
        vectors = look_up(keys)
        loss = sum((k + 1) * (vectors[name] ** 2).sum() for k, name in enumerate(NAMES))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append({name: v.detach().clone() for name, v in vectors.items()})
    return seen


def test_a_group_trains_as_separate_tables_do():
    options = {"init": "constant", "init_scale": 0.5, "dtype": np.float64}
    apart = {name: Embedding(DynamicTable(2, **options)) for name in NAMES}
    merged = GroupEmbedding(TableGroup(NAMES), Embedding(DynamicTable(2, **options)))
    first = trained(lambda keys: {name: apart[name](k) for name, k in keys.items()}, apart.values())
    second = trained(merged, [merged])
    for a, b in zip(first, second, strict=True):
        for name in NAMES:
            assert a[name].shape == b[name].shape
            assert torch.equal(a[name], b[name])
    assert len(merged.table) == sum(len(e.table) for e in apart.values())


def test_a_table_keeps_its_place_when_others_come():
    few, more = TableGroup(("item",)), TableGroup(("new", "item"))
    keys = np.array(EDGES)
    np.testing.assert_array_equal(few.keys("item", keys), more.keys("item", keys))
    assert not set(more.keys("new", keys)) & set(more.keys("item", keys))
    assert few.keys("item", np.array([5])).tolist() == [578557196290245364]


def test_tables_that_are_not_named_are_not_read():
    embedding = GroupEmbedding(TableGroup(NAMES), Embedding(DynamicTable(2)))
    assert embedding({"store": torch.tensor([[1, 2]])})["store"].shape == (1, 2, 2)
    assert embedding({}) == {}
    assert len(embedding.table) == 2


def test_a_table_that_the_loss_does_not_reach_is_not_touched():
    """Adam's moments would decay, and its step would be counted."""

    def trained(ranks, kind):
        embedding = ShardedEmbedding(DynamicTable(1), ranks) if kind is None else Embedding(kind(1))
        merged = GroupEmbedding(TableGroup(NAMES), embedding)
        optimizer = SparseAdam(merged, lr=0.1)
        keys = {"item": torch.tensor([[5]]), "store": torch.tensor([5]), "action": torch.tensor([5, 6])}
        for reached in (NAMES, ("store",), ()):
            vectors = merged(keys)
            before = {name: v.detach().clone() for name, v in vectors.items()}
            if reached:
                sum(vectors[name].sum() for name in reached).backward()
            optimizer.step()
            after = merged.eval()(keys)
            merged.train()
            changed = tuple(name for name in NAMES if not torch.equal(before[name], after[name]))
            assert changed == reached
        return True

    for kind in (None, DynamicTable, DeviceTable):
        assert run_threads(1, trained, kind) == [True]


def test_any_module_may_look_a_group_up():
    class Doubled(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.table = inner, inner.table

        def forward(self, keys):
            return 2 * self.inner(keys)

    merged = GroupEmbedding(TableGroup(NAMES), Doubled(Embedding(DynamicTable(1, init="constant", init_scale=1.0))))
    found = merged({"item": torch.tensor([[5, 6]]), "store": torch.tensor([5])})
    assert found["item"].shape == (1, 2, 1)
    found["item"].sum().backward()
    rows, sums = merged.table.take_gradient()
    assert (rows.tolist(), sums.tolist()) == ([0, 1, 2], [[2.0], [2.0], [0.0]])


def test_bad_groups_and_keys():
    for names in ((), ("a", "a")):
        with pytest.raises(InputError, match="each once"):
            TableGroup(names)
    with pytest.raises(InputError, match=r"give a tuple of names, \('item',\) for one"):
        TableGroup("item")
    for keys in (np.array([1.5]), np.array([[1, 2]]), np.array([1], np.int32), [1, 2]):
        with pytest.raises(InputError, match=r"keys of item: .*; they must be a one-dimensional int64 array"):
            TableGroup(NAMES).keys("item", keys)
    for group, module in ((NAMES, Embedding(DynamicTable(2))), (TableGroup(NAMES), DynamicTable(2))):
        with pytest.raises(InputError, match="give a TableGroup and a module that looks keys up"):
            GroupEmbedding(group, module)
    embedding = GroupEmbedding(TableGroup(NAMES), Embedding(DynamicTable(2)))
    with pytest.raises(InputError, match="no table 'shop' in the group; there are item, store, action"):
        embedding({"shop": torch.tensor([1])})
    with pytest.raises(InputError, match="must be int64"):
        embedding({"item": torch.tensor([1.0])})
