"""Sparse optimizers against torch's dense ones, over steps with repeated keys, several calls and late keys."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from thinrow.core.errors import InputError
from thinrow.embeddings import (
    Budget,
    DeviceTable,
    DynamicTable,
    Embedding,
    ShardedEmbedding,
    ShardedEmbeddings,
    SparseAdagrad,
    SparseAdam,
    SparseAdamW,
    SparseRowWiseAdagrad,
    SparseSGD,
)
from thinrow.testing.ranks import run_threads

N, DIM = 12, 4


def batches(steps=8):
    """Two calls a step, with repeats; key 11 first appears in the last steps, key 0 in the first alone."""
    random = np.random.default_rng(5)
    for step in range(steps):
        keys = random.integers(1, 11, (2, 9))
        keys[0, 0] = 0 if step == 0 else 1
        keys[1, 1] = 11 if step >= steps - 2 else 2
        yield torch.from_numpy(keys), torch.from_numpy(random.normal(size=(2, 9, DIM)))


def loss(model, keys, weights):
    return (model(keys[0]).tanh() * weights[0]).sum() + (model(keys[1]) * model(keys[1]) * weights[1]).sum()


def twins():
    """A module that holds keys 0 to N - 1 in another order, and (N, DIM) the vector of each key."""
    module = Embedding(DynamicTable(DIM, dtype=np.float64, init_scale=1.0, block_rows=4))
    module(torch.arange(N).flip(0))
    return module, torch.from_numpy(vectors(module))


def vectors(module):
    return module.table.read(module.table.rows(np.arange(N), insert=False))


@pytest.mark.parametrize("initial_accumulator", [0.0, 0.3])
def test_adagrad_is_that_of_torch(initial_accumulator):
    module, start = twins()
    dense = torch.nn.Embedding(N, DIM, _weight=start)
    sparse = SparseAdagrad(module, lr=0.1, eps=1e-10, initial_accumulator=initial_accumulator)
    peer = torch.optim.Adagrad(dense.parameters(), lr=0.1, eps=1e-10, initial_accumulator_value=initial_accumulator)
    for step, (keys, weights) in enumerate(batches()):
        sparse.lr = peer.param_groups[0]["lr"] = 0.1 / (step + 1)
        for model, optimizer in ((module, sparse), (dense, peer)):
            optimizer.zero_grad()
            loss(model, keys, weights).backward()
            optimizer.step()
        np.testing.assert_allclose(vectors(module), dense.weight.detach().numpy(), rtol=1e-12, atol=1e-13)


def test_adam_of_a_row_is_that_of_torch_on_the_steps_that_touch_it():
    module, start = twins()
    rows = [torch.nn.Parameter(v.clone()) for v in start]
    peers = [torch.optim.Adam([row], lr=0.05, betas=(0.8, 0.95), eps=1e-6) for row in rows]
    sparse = SparseAdam(module.table, lr=0.05, betas=(0.8, 0.95), eps=1e-6)
    for keys, weights in batches():
        loss(module, keys, weights).backward()
        loss(lambda keys: torch.stack(rows)[keys], keys, weights).backward()
        sparse.step()
        for key in keys.unique().tolist():
            peers[key].step()
        for row in rows:
            row.grad = None
        expected = torch.stack(rows).detach().numpy()
        np.testing.assert_allclose(vectors(module), expected, rtol=1e-12, atol=1e-13)


def test_adam_in_float32_after_many_steps():
    """The bias correction stays right when powers of beta are far below the resolution of float32."""
    table = DynamicTable(1, init_scale=0.0)
    row = table.rows(np.array([7]), insert=True)
    adam = SparseAdam(table, lr=0.5)
    dense = torch.nn.Parameter(torch.zeros(1))
    peer = torch.optim.Adam([dense], lr=0.5)
    for step in range(400):
        table.add_gradient(row, np.array([[np.sin(step)]], np.float32))
        dense.grad = torch.tensor([np.sin(step)], dtype=torch.float32)
        adam.step()
        peer.step()
    assert table.read(row)[0, 0] == pytest.approx(dense.item(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("optimizer", [SparseAdagrad, SparseAdam])
def test_rows_without_a_gradient_do_not_move(optimizer):
    module, start = twins()
    sparse = optimizer(module, lr=0.1)
    for keys in ([1, 2, 3, 4], [1]):
        before = vectors(module)
        module(torch.tensor(keys)).sum().backward()
        sparse.step()
        moved = np.flatnonzero((vectors(module) != before).any(axis=1))
        assert moved.tolist() == keys
    before = module.table.state()
    sparse.step()
    after = module.table.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert not np.array_equal(vectors(module), start.numpy())


@pytest.mark.parametrize("optimizer", [SparseAdagrad, SparseAdam])
def test_zero_grad_forgets_and_a_step_uses_gradients_once(optimizer):
    module, start = twins()
    sparse = optimizer(module, lr=0.1)
    module(torch.tensor([1])).sum().backward()
    sparse.zero_grad()
    sparse.step()
    np.testing.assert_array_equal(vectors(module), start.numpy())


def test_a_table_shared_by_two_modules_steps_once():
    shared, alone = (DynamicTable(DIM, dtype=np.float64) for _ in range(2))
    first, second, third = Embedding(shared), Embedding(shared), Embedding(alone)
    both, one = SparseAdagrad(first, second, lr=0.1), SparseAdagrad(third, lr=0.1)
    assert both.tables == [shared]
    (first(torch.tensor([1])).sum() + second(torch.tensor([1])).sum()).backward()
    (2 * third(torch.tensor([1])).sum()).backward()
    both.step()
    one.step()
    np.testing.assert_array_equal(shared.read(np.array([0])), alone.read(np.array([0])))


def test_an_overflow_in_one_table_leaves_the_others():
    good, bad = DynamicTable(1), DynamicTable(1)
    for table, gradient in ((good, 1.0), (bad, 3e38)):
        row = table.rows(np.array([5]), insert=True)
        for _ in range(2):
            table.add_gradient(row, np.array([[gradient]], np.float32))
    before = good.read(np.array([0]))
    with pytest.raises(InputError, match="gradient of key 5 is inf"):
        SparseAdagrad(good, bad).step()
    np.testing.assert_array_equal(good.read(np.array([0])), before)


@pytest.mark.parametrize(
    ("optimizer", "parameters", "message"),
    [
        (SparseAdagrad, {"lr": -1}, "lr=-1; it must be finite and 0 or more"),
        (SparseAdagrad, {"lr": float("nan")}, "lr=nan"),
        (SparseAdagrad, {"eps": 0}, "eps=0; it must be finite and above 0"),
        (SparseAdagrad, {"initial_accumulator": -1}, "initial_accumulator=-1"),
        (SparseAdam, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\); both must be in \[0, 1\)"),
        (SparseAdam, {"eps": float("inf")}, "eps=inf"),
    ],
)
def test_bad_parameters(optimizer, parameters, message):
    with pytest.raises(InputError, match=message):
        optimizer(DynamicTable(1), **parameters)


def test_a_bad_rate_set_later_changes_nothing():
    table = DynamicTable(1)
    table.add_gradient(table.rows(np.array([5]), insert=True), np.ones((1, 1), np.float32))
    adagrad = SparseAdagrad(table, lr=0.1)
    adagrad.lr = float("inf")
    with pytest.raises(InputError, match="lr=inf"):
        adagrad.step()
    assert table.take_gradient() is not None


@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
@pytest.mark.parametrize("clip_norm", [None, 0.8])
def test_gradient_descent_is_that_of_torch_on_the_rows_of_a_step(weight_decay, clip_norm):
    module, start = twins()
    dense = torch.nn.Parameter(start.clone())
    sparse = SparseSGD(module, lr=0.1, weight_decay=weight_decay, clip_norm=clip_norm)
    for keys, weights in batches():
        loss(module, keys, weights).backward()
        loss(lambda keys: dense[keys], keys, weights).backward()
        sparse.step()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(dense, clip_norm)
        with torch.no_grad():
            # Of rows without a gradient nothing decays.
            touched = keys.unique()
            dense[touched] -= 0.1 * (dense.grad[touched] + weight_decay * dense[touched])
        dense.grad = None
        np.testing.assert_allclose(vectors(module), dense.detach().numpy(), rtol=1e-12, atol=1e-13)


def test_weight_decay_of_adagrad_is_that_of_torch_on_the_rows_of_a_step():
    module, start = twins()
    rows = [torch.nn.Parameter(v.clone()) for v in start]
    peers = [torch.optim.Adagrad([row], lr=0.1, eps=1e-8, weight_decay=0.03) for row in rows]
    sparse = SparseAdagrad(module, lr=0.1, eps=1e-8, weight_decay=0.03)
    by_rows(module, sparse, rows, peers)


@pytest.mark.parametrize(("ours", "peer"), [(SparseAdamW, torch.optim.AdamW), (SparseAdam, torch.optim.Adam)])
def test_weight_decay_of_adam_is_that_of_torch_on_the_steps_that_touch_a_row(ours, peer):
    module, start = twins()
    rows = [torch.nn.Parameter(v.clone()) for v in start]
    peers = [peer([row], lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.04) for row in rows]
    sparse = ours(module, lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.04)
    by_rows(module, sparse, rows, peers)


def by_rows(module, sparse, rows, peers):
    """A step of each row's own dense optimizer where the step touches the row."""
    for keys, weights in batches():
        loss(module, keys, weights).backward()
        loss(lambda keys: torch.stack(rows)[keys], keys, weights).backward()
        sparse.step()
        for key in keys.unique().tolist():
            peers[key].step()
        for row in rows:
            row.grad = None
        np.testing.assert_allclose(vectors(module), torch.stack(rows).detach().numpy(), rtol=1e-12, atol=1e-13)


def test_row_wise_adagrad_keeps_one_sum_a_row():
    module, start = twins()
    dense, sums = torch.nn.Parameter(start.clone()), torch.full((N, 1), 0.3, dtype=torch.float64)
    sparse = SparseRowWiseAdagrad(module, lr=0.1, eps=1e-8, initial_accumulator=0.3, weight_decay=0.01)
    for keys, weights in batches():
        loss(module, keys, weights).backward()
        loss(lambda keys: dense[keys], keys, weights).backward()
        sparse.step()
        with torch.no_grad():
            touched = keys.unique()
            g = dense.grad[touched] + 0.01 * dense[touched]
            sums[touched] += (g * g).mean(1, keepdim=True)
            dense[touched] -= 0.1 * g / (sums[touched].sqrt() + 1e-8)
        dense.grad = None
        np.testing.assert_allclose(vectors(module), dense.detach().numpy(), rtol=1e-12, atol=1e-13)
    assert module.table.state()["row_state.rowwise_adagrad.sum"].shape == (N, 1)


def test_the_norm_is_that_of_all_tables_together():
    tables = [DynamicTable(2, dtype=np.float64, init_scale=0.0) for _ in range(2)]
    sgd = SparseSGD(*tables, lr=1.0, clip_norm=1.0)
    for table, gradient in zip(tables, ([[3.0, 0.0]], [[0.0, 4.0]]), strict=True):
        table.add_gradient(table.rows(np.array([7]), insert=True), np.array(gradient))
    sgd.step()
    found = [table.read(np.array([0])).tolist() for table in tables]
    np.testing.assert_allclose(found, [[[-0.6, 0]], [[0, -0.8]]], rtol=1e-6)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [({"weight_decay": -1}, "weight_decay=-1"), ({"clip_norm": 0}, "clip_norm=0"), ({"lr": float("nan")}, "lr=nan")],
)
def test_parameters_out_of_range_are_named(parameter, message):
    for make in (SparseSGD, SparseAdagrad, SparseRowWiseAdagrad, SparseAdam, SparseAdamW):
        with pytest.raises(InputError, match=message):
            make(DynamicTable(2), **parameter)


def unsure(usage):
    """A score of one's own that fails."""
    raise ValueError("no score")


def test_a_step_that_cannot_be_changes_nothing():
    a, b = (DynamicTable(1, init="constant", init_scale=0.0) for _ in range(2))
    optimizer, row = SparseSGD(a, b, lr=1.0), np.array([0])
    for table in (a, b):
        table.rows(np.array([1]), insert=True)
    a.add_gradient(row, np.ones((1, 1), np.float32))
    for _ in range(2):
        b.add_gradient(row, np.full((1, 1), 3e38, np.float32))
    with pytest.raises(InputError, match="gradient of key 1 is inf"):
        optimizer.step()
    assert not a.read(row).any()
    b.clear_gradient()
    optimizer.step()
    assert a.read(row).tolist() == [[-1.0]]


def test_all_tables_are_updated_before_one_makes_room(monkeypatch):
    monkeypatch.setitem(sys.modules, "unsure", SimpleNamespace(score=unsure))
    a = DynamicTable(1, init="constant", init_scale=0.0, budget=Budget(max_rows=1, evict="unsure:score"))
    b = DynamicTable(1, init="constant", init_scale=0.0)
    for table in (a, b):
        table.add_gradient(table.rows(np.array([1]), insert=True), np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match="no score"):
        SparseSGD(a, b, lr=1.0).step()
    assert a.read(np.array([0])).tolist() == b.read(np.array([0])).tolist() == [[-1.0]]
    assert a.step == 0


def test_passes_that_accumulate_are_merged():
    kept = {}
    for make in (DynamicTable, DeviceTable):
        module = Embedding(make(2))
        vectors = module(torch.arange(100))
        for k in range(50):
            (vectors * (k + 1)).sum().backward(retain_graph=True)
        kept[make] = sum(len(rows) for rows, _ in module.table._gradients)
        assert np.array_equal(module.table.take_gradient()[1], np.full((100, 2), 50 * 51 / 2, np.float32))
    assert max(kept.values()) <= 200


def test_what_has_no_table_is_refused():
    table = DynamicTable(2)
    for given in ([table], torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).parameters(), 0.1):
        with pytest.raises(InputError, match="each as an argument of its own"):
            SparseAdagrad(given)
    with pytest.raises(InputError, match="SparseSGD of no table"):
        SparseSGD()


def test_tables_of_ranks():
    def job(ranks):
        both = ShardedEmbeddings(ShardedEmbedding(DynamicTable(2), ranks), ShardedEmbedding(DynamicTable(3), ranks))
        optimizer = SparseSGD(both, lr=1.0)
        before = [v.detach() for v in both(torch.tensor([5]), torch.tensor([6]))]
        sum(v.sum() for v in both(torch.tensor([5]), torch.tensor([6]))).backward()
        optimizer.step()
        both.eval()
        for was, now in zip(before, both(torch.tensor([5]), torch.tensor([6])), strict=True):
            torch.testing.assert_close(now, was - 1)
        with pytest.raises(InputError, match="give its ShardedEmbedding or Shard"):
            SparseSGD(both.embeddings[0].table)

    run_threads(1, job)
