"""The torch module: what forward gives, what backward leaves with the table, and that evaluation only reads."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from thinrow.core.errors import InputError
from thinrow.embeddings import Budget, DeviceTable, DynamicTable, Embedding, EmbeddingBag, SparseSGD


def embedding(dim=3, dtype=np.float64, **parameters):
    return Embedding(DynamicTable(dim, dtype=dtype, **parameters))


def gradients(module):
    """Gradient by key of what waits for the optimizer."""
    rows, sums = module.table.take_gradient()
    return dict(zip(module.table.keys()[rows].tolist(), sums.tolist(), strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_vectors_of_keys_of_any_shape(dtype):
    module = embedding(dtype=dtype)
    keys = torch.tensor([[[7, -1], [7, 2**63 - 1]]])
    out = module(keys)
    assert out.shape == (1, 2, 2, 3)
    assert out.dtype == torch.from_numpy(np.empty(0, dtype)).dtype
    expected = module.table.read(module.table.rows(keys.flatten().numpy(), insert=False))
    np.testing.assert_array_equal(out.detach().numpy().reshape(-1, 3), expected)
    assert module(torch.tensor(7)).shape == (3,)
    assert module(torch.empty(0, 4, dtype=torch.int64)).shape == (0, 4, 3)
    assert len(module.table) == 3
    assert module(keys.transpose(1, 2)).equal(out.transpose(1, 2))


def test_gradients_are_those_of_a_dense_embedding():
    module = embedding(dim=4)
    random = np.random.default_rng(0)
    keys = torch.from_numpy(random.integers(0, 9, (5, 6)))
    weights = torch.from_numpy(random.normal(size=(5, 6, 4)))
    dense = torch.nn.Embedding(9, 4, dtype=torch.float64)
    module(torch.arange(9))
    with torch.no_grad():
        dense.weight.copy_(torch.from_numpy(module.table.read(np.arange(9))))
    for model in (module, dense):
        (model(keys).tanh() * weights).sum().backward()
    rows, sums = module.table.take_gradient()
    assert rows.tolist() == sorted(set(keys.flatten().tolist()))
    np.testing.assert_allclose(sums, dense.weight.grad.numpy()[rows], rtol=1e-13, atol=1e-15)


def test_calls_and_passes_accumulate():
    module = embedding(dim=1)
    a, b = module(torch.tensor([5, 6])), module(torch.tensor([6, 5, 6]))
    (a.sum() + 10 * b.sum()).backward(retain_graph=True)
    assert gradients(module) == {5: [11.0], 6: [21.0]}
    a.sum().backward()
    b[0].sum().backward()
    assert gradients(module) == {5: [1.0], 6: [2.0]}


def test_evaluation_only_reads():
    module = embedding()
    known = module(torch.tensor([1, 2])).detach()
    before = module.table.state()
    module.eval()
    out = module(torch.tensor([[2, 9], [1, -4]]))
    assert not out.requires_grad
    assert out[0, 0].equal(known[1])
    assert out[1, 0].equal(known[0])
    assert not out[:, 1].any()
    after = module.table.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert module.table.take_gradient() is None


def test_training_without_gradients_inserts():
    module = embedding()
    with torch.no_grad():
        assert not module(torch.tensor([3])).requires_grad
    assert module.table.keys().tolist() == [3]


def test_the_dense_optimizer_and_the_state_dict_see_nothing():
    module = torch.nn.Sequential(embedding(), torch.nn.Linear(3, 1, dtype=torch.float64))
    module(torch.tensor([3]))
    assert [name for name, _ in module.named_parameters()] == ["1.weight", "1.bias"]
    assert sorted(module.state_dict()) == ["1.bias", "1.weight"]


def test_a_copy_is_a_table_of_its_own():
    module = embedding()
    module(torch.tensor([3]))
    other = copy.deepcopy(module)
    other(torch.tensor([4]))
    other.table.values.blocks[0][0] = 7
    assert module.table.keys().tolist() == [3]
    assert not np.any(module.table.read(np.array([0])) == 7)
    assert "rows=2" in repr(other)


def test_a_gradient_that_is_not_finite_names_the_key():
    module = embedding()
    out = module(torch.tensor([3, -(2**63)]))
    with pytest.raises(InputError, match=f"gradient of key {-(2**63)} is nan in column 1"):
        (out[1, 1] * float("nan")).backward()
    assert module.table.take_gradient() is None


def test_keys_are_int64_on_the_cpu():
    for keys in (
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([1.0]),
        torch.empty(1, dtype=torch.int64, device="meta"),
        np.array([1]),
        [1],
    ):
        with pytest.raises(InputError, match="must be int64 on the CPU"):
            embedding()(keys)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_those_of_torch(mode):
    random = np.random.default_rng(0)
    keys = torch.from_numpy(random.integers(0, 9, 40))
    bounds = torch.tensor([0, 0, 7, 7, 30, 31, 40])
    weights = torch.from_numpy(random.normal(size=(6, 4)))
    module = EmbeddingBag(DynamicTable(4, dtype=np.float64, seed=2), mode)
    dense = torch.nn.EmbeddingBag(9, 4, mode=mode, dtype=torch.float64)
    module(torch.arange(9), torch.tensor([0, 9]))
    with torch.no_grad():
        dense.weight.copy_(torch.from_numpy(module.table.read(np.arange(9))))
    ours, theirs = module(keys, bounds), dense(keys, bounds[:-1])
    torch.testing.assert_close(ours, theirs)
    for out in (ours, theirs):
        (out.tanh() * weights).sum().backward()
    rows, sums = module.table.take_gradient()
    np.testing.assert_allclose(sums, dense.weight.grad.numpy()[rows], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(module.eval()(keys, bounds), ours.detach(), rtol=0, atol=0)


def test_a_bag_of_keys_without_rows():
    module = EmbeddingBag(DynamicTable(2, dtype=np.float64, budget=Budget(max_rows=1)))
    out = module(torch.tensor([5, 6, 7]), torch.tensor([0, 2, 3]))
    vector = module.table.read(np.array([0]))[0]
    np.testing.assert_array_equal(out.detach().numpy(), [vector, [0, 0]])
    out.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double())
    assert gradients(module) == {5: [1.0, 2.0]}


def test_bad_bags():
    module = EmbeddingBag(DynamicTable(2))
    # The last has differences that wrap, none of them negative.
    for bounds in ([], [0], [0, 3], [1, 2], [0, 2, 1, 2], [0, 2**62, 2**63 - 1, -(2**62), 2]):
        for bag in (module, EmbeddingBag(DeviceTable(2))):
            with pytest.raises(InputError, match="they must ascend from 0 to 2"):
                bag(torch.tensor([5, 6]), torch.tensor(bounds, dtype=torch.int64))
            assert len(bag.table) == 0
        with pytest.raises(InputError, match="they must ascend from 0 to 2"):
            module.table.pool(np.array([-1, -1]), np.array(bounds, np.int64))
        with pytest.raises(InputError, match="they must ascend from 0 to 2"):
            DeviceTable(2).pool(torch.tensor([-1, -1]), torch.tensor(bounds, dtype=torch.int64))
    with pytest.raises(InputError, match="bounds: a list, no tensor; they must be int64 on the CPU"):
        module(torch.tensor([5, 6]), [0, 2])
    with pytest.raises(InputError, match="it must be 'sum' or 'mean'"):
        EmbeddingBag(DynamicTable(2), "max")
    table = DynamicTable(2)
    rows = table.rows(np.array([5, 6]), insert=True)
    for of in ([0], [0, 1], [0, -1]):
        with pytest.raises(InputError, match="each in"):
            table.add_gradient(rows, np.ones((1, 2), np.float32), np.array(of))


@pytest.mark.parametrize("kind", [DynamicTable, DeviceTable])
def test_a_gradient_finds_its_key_after_rows_moved(kind):
    table = kind(1, init="constant", init_scale=0.0, budget=Budget(max_rows=4, keep=0.75))
    module, bag, optimizer = Embedding(table), EmbeddingBag(table), SparseSGD(table, lr=1.0)
    later, pooled = module(torch.tensor([1, 2])), bag(torch.tensor([2, 1, 2]), torch.tensor([0, 1, 3]))
    optimizer.step()
    module(torch.tensor([2, 3, 4]))
    optimizer.step()  # key 1 goes, and another key takes row 0
    (later.sum() + 10 * pooled.sum()).backward()
    optimizer.step()
    vectors = table.read(table.rows(table.keys(), insert=False))[:, 0].tolist()
    assert dict(zip(table.keys().tolist(), vectors, strict=True)) == {2: -21.0, 3: 0.0, 4: 0.0}


def test_a_gradient_finds_its_key_after_another_state_was_loaded():
    one, other = embedding(dim=1), embedding(dim=1)
    other(torch.tensor([9, 8, 7]))
    kept, lost = one(torch.tensor([7])), one(torch.tensor([6]))
    one.table.load_state(other.table.state())
    kept.sum().backward()
    assert gradients(one) == {7: [1.0]}
    with pytest.raises(InputError, match="look keys up first"):
        lost.sum().backward()


@pytest.mark.parametrize("module", [Embedding, EmbeddingBag])
def test_what_is_no_table_is_refused(module):
    with pytest.raises(InputError, match="table=8; it must be a DynamicTable or a DeviceTable"):
        module(8)


def test_keys_that_were_written_over_find_no_rows_that_moved():
    table = DynamicTable(1, budget=Budget(max_rows=1))
    module, keys = Embedding(table), torch.tensor([7])
    with torch.inference_mode():
        others = torch.tensor([7])
    out, second = module(keys), module(others)
    keys.add_(1)
    SparseSGD(table).step()
    with pytest.raises(InputError, match="whose keys were written over"):
        out.sum().backward()
    second.sum().backward()
    assert table.take_gradient() is None
