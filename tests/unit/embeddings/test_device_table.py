"""A table of tensors under the modules, what it refuses, and that what need not wait for a device does not."""

import copy

import numpy as np
import pytest
import torch

from thinrow.core.errors import InputError
from thinrow.embeddings import (
    Budget,
    DeviceTable,
    DynamicTable,
    Embedding,
    EmbeddingBag,
    GroupEmbedding,
    ShardedEmbedding,
    SparseAdagrad,
    SparseAdam,
    SparseRowWiseAdagrad,
    SparseSGD,
    TableGroup,
)
from thinrow.kernels import use
from thinrow.kernels.dispatch import device_kernel

KINDS = (DynamicTable, DeviceTable)


@pytest.fixture(autouse=True)
def reference():
    with use("reference"):
        yield


def int64(*keys):
    return torch.tensor(keys, dtype=torch.int64)


def keys_as_vectors(keys, dim, seed):
    return np.repeat(keys[:, None] + 0.5, dim, axis=1)


def negative_keys_fail(keys, dim, seed):
    if keys.min() < 0:
        raise ValueError("negative")
    return keys_as_vectors(keys, dim, seed)


class Model(torch.nn.Module):
    """Every module once, over one table."""

    def __init__(self, table):
        super().__init__()
        self.embedding, self.bag = Embedding(table), EmbeddingBag(table, "mean")
        self.group = GroupEmbedding(TableGroup(("a", "b")), self.embedding)

    def forward(self, keys, bounds):
        parts = self.group({"a": keys, "b": keys[:2] + 1})
        bags = self.bag(keys, bounds).sum()
        return self.embedding(keys[:, None]).tanh().sum() + bags + parts["a"].square().sum() * parts["b"].sum()


def trained(table, **options):
    model, optimizer, losses = Model(table), SparseAdam(table, lr=0.1, **options), []
    for step in range(4):
        loss = model(torch.arange(step, step + 5) % 6 - 2, int64(0, 2, 2, 5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return [*losses, model(int64(0, 77), int64(0, 1, 2)).item()]


def test_modules_train_a_table_of_tensors_as_one_of_arrays():
    tables = [kind(3, seed=4) for kind in KINDS]
    losses = [trained(table) for table in tables]
    assert losses[0] == losses[1]
    states = [table.state() for table in tables]
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_batches_that_fill_vectors_and_threads_give_the_same_bits(dtype):
    rng = np.random.default_rng(1)
    keys, bounds = rng.zipf(1.2, 9_000) % 3_000, np.append(np.arange(0, 9_000, 7), 9_000)
    gradient = rng.normal(size=(len(keys), 17)).astype(dtype)
    host, device = (kind(17, dtype=dtype, init="normal") for kind in KINDS)
    for make in (SparseSGD, SparseAdagrad, SparseRowWiseAdagrad, SparseAdam):
        rows, there = host.rows(keys, insert=True), device.rows(torch.from_numpy(keys), insert=True)
        assert np.array_equal(host.pool(rows, bounds), device.pool(there, torch.from_numpy(bounds)))
        host.add_gradient(rows, gradient)
        device.add_gradient(there, torch.from_numpy(gradient))
        make(host, device, lr=0.1, weight_decay=0.01).step()
    states = host.state(), device.state()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


def test_clipped_steps_are_the_same_to_rounding():
    np.testing.assert_allclose(*(trained(kind(3, seed=4), clip_norm=0.5) for kind in KINDS), rtol=1e-6)


@pytest.mark.parametrize("optimizer", [SparseSGD, SparseAdagrad, SparseRowWiseAdagrad, SparseAdam])
def test_bytes_are_counted_alike(optimizer):
    counted = []
    for kind in KINDS:
        table = kind(3)
        Embedding(table)(int64(1, 2, 1)).sum().backward()
        optimizer(table, lr=0.1).step()
        counted.append(table.traffic)
    assert counted[0] == counted[1]


def test_starts_by_a_function_of_ones_own():
    table = DeviceTable(2, init=f"{__name__}:negative_keys_fail")
    assert table.read(table.rows(int64(3, 1, 3), insert=True)).tolist() == [[3.5] * 2, [1.5] * 2, [3.5] * 2]
    with pytest.raises(ValueError, match="negative"):
        table.rows(int64(9, -4), insert=True)
    assert table.keys().tolist() == [3, 1]
    assert table.rows(int64(9, 1), insert=False).tolist() == [-1, 1]
    assert table.rows(int64(9), insert=True).tolist() == [2]


@pytest.fixture(scope="module", autouse=True)
def importable():
    """The function of one's own is found by the name of this module."""
    import sys
    from types import SimpleNamespace

    sys.modules.setdefault(__name__, SimpleNamespace(negative_keys_fail=negative_keys_fail))


def test_many_keys_are_found_after_growth():
    keys = torch.from_numpy(np.random.default_rng(0).permutation(60_000) * 7919 - 2**40)
    table = DeviceTable(1)
    for part in keys.split(9_000):
        table.rows(torch.cat([part, keys[:50], part]), insert=True)
    assert len(table) == 60_000
    assert torch.equal(table.rows(keys, insert=False), torch.arange(60_000))
    assert (table.rows(keys + 1, insert=False) == -1).all()


def test_keys_inserted_in_inference_mode_are_trained_later():
    table = DeviceTable(2)
    module, optimizer = Embedding(table), SparseSGD(table, lr=1.0)
    with torch.inference_mode():
        before = module(int64(5, 6)).clone()
    module(int64(6)).sum().backward()
    optimizer.step()
    assert torch.equal(table.read(int64(0, 1)), before - torch.tensor([[0.0], [1.0]]))


def test_a_copy_is_a_table_of_its_own():
    module = Embedding(DeviceTable(2))
    module(int64(3))
    other = copy.deepcopy(module)
    other(int64(4))
    assert module.table.keys().tolist() == [3]
    assert other.table.keys().tolist() == [3, 4]


def test_a_table_becomes_what_was_saved():
    saved, table = DynamicTable(2, seed=9), DeviceTable(2)
    SparseAdagrad(saved, initial_accumulator=0.5)
    saved.rows(np.array([4, 2]), insert=True)
    saved.row_state("adagrad.sum", 2, fill=0.5)
    table.load_state(saved.state())
    assert table.seed == 9
    assert table.rows(int64(2, 8), insert=True).tolist() == [1, 2]
    assert table.row_state("adagrad.sum", 2).to_array().tolist() == [[0.5, 0.5]] * 3
    with pytest.raises(InputError, match=r"this table is float32 of dim 2; use DeviceTable\.from_state"):
        table.load_state(DynamicTable(3).state())
    with pytest.raises(InputError, match="the state has no 'values'"):
        table.load_state({"keys": np.empty(0, np.int64)})


BAD_CALLS = {
    "a row that is not there": lambda t, given: t.read(given([0, 2])),
    "a row to pool that is not there": lambda t, given: t.pool(given([0, -2]), given([0, 2])),
    "bounds that descend": lambda t, given: t.pool(given([0, 1]), given([0, 2, 1, 2])),
    "bounds that end early": lambda t, given: t.pool(given([0, 1]), given([0, 1])),
    "bounds that begin late": lambda t, given: t.pool(given([0, 1]), given([1, 2])),
    "no bounds": lambda t, given: t.pool(given([]), given([])),
    "a gradient of nobody": lambda t, given: t.add_gradient(given([-1]), given([[1.0, 1.0]])),
    "a gradient of a row that is not there": lambda t, given: t.add_gradient(given([0, 2]), given([[1.0, 1.0]] * 2)),
    "gradients of bags that are not there": lambda t, given: t.add_gradient(
        given([0]), given([[1.0, 1.0]]), given([1])
    ),
    "a gradient that is not finite": lambda t, given: t.add_gradient(given([0, 1]), given([[1.0, 1.0], [1.0, np.nan]])),
    "another width of a state": lambda t, given: (t.row_state("s", 1), t.row_state("s", 2)),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_both_kinds_refuse_in_the_same_words(call):
    said = []
    for kind, given in ((DynamicTable, np.asarray), (DeviceTable, torch.from_numpy)):
        table = kind(2)
        table.rows(given(np.array([-7, 2**62])), insert=True)

        def numbers(x, given=given):
            """Rows and bounds, or vectors."""
            return given(np.array(x, np.float32 if x and isinstance(x[0], list) else np.int64))

        with pytest.raises(InputError) as refused:
            BAD_CALLS[call](table, numbers)
        assert table.take_gradient() is None
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_what_a_device_cannot_take():
    table = DeviceTable(2)
    for keys in (np.array([1]), torch.tensor([1.0]), int64(1)[None], torch.empty(1, dtype=torch.int64, device="meta")):
        with pytest.raises(InputError, match="keys: "):
            table.rows(keys, insert=True)
    with pytest.raises(InputError, match=r"gradient is torch\.float64"):
        table.add_gradient(table.rows(int64(1), insert=True), torch.zeros(1, 2, dtype=torch.float64))
    for budget in (Budget(max_bytes=1 << 20), Budget(max_rows=9, min_count=2)):
        with pytest.raises(InputError, match="on a device a budget has max_rows and min_count=1"):
            DeviceTable(2, budget=budget)
        with pytest.raises(InputError, match="on a device a budget has max_rows and min_count=1"):
            DeviceTable.from_state(DynamicTable(2, budget=budget).state())
    with pytest.raises(InputError, match=r"they must be int64 on the CPU"):
        Embedding(table)(torch.empty(1, dtype=torch.int64, device="meta"))
    with pytest.raises(InputError, match="a DeviceTable over ranks"):
        ShardedEmbedding(table, None)
    full = DeviceTable(2, budget=Budget(max_rows=4))
    full.add_gradient(full.rows(int64(1), insert=True), torch.ones(1, 2))
    with pytest.raises(InputError, match="step the optimizer first"):
        full.make_room()


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_beyond_its_budget_takes_no_key_until_it_has_made_room(kind):
    saved = DynamicTable(2)
    saved.rows(np.arange(1500), insert=True)
    state = saved.state() | {"budget": Budget(max_rows=40).to_bytes(), "step": np.array(0)}
    given = np.asarray if kind is DynamicTable else torch.from_numpy
    table = kind.from_state(state)
    assert table.rows(given(np.arange(1498, 1502)), insert=True).tolist() == [1498, 1499, -1, -1]
    # With these it would be beyond the index too.
    assert (table.rows(given(np.arange(1500, 4000)), insert=True) == -1).all()
    assert table.make_room() == 1464
    assert sorted(table.rows(given(np.arange(9000, 9006)), insert=True).tolist()) == [-1, -1, 36, 37, 38, 39]


@pytest.mark.parametrize("kind", KINDS)
def test_counts_fade_only_where_room_is_needed(kind):
    given = np.asarray if kind is DynamicTable else torch.from_numpy
    table = kind(2, budget=Budget(max_rows=8, evict="lfu", max_age=1))
    usage = []
    for keys in ([1, 2, 2, 2], [2, 2], np.arange(2, 10)):
        table.rows(given(np.array(keys)), insert=True)
        table.make_room()
        usage.append(sorted(table.row_state("usage", 2, dtype=np.int64).to_array()[:, 0].tolist()))
    assert usage == [[1, 3], [5], [1, 1, 1, 1, 1, 1, 3]]


def test_sums_of_several_calls_that_overflow_name_the_key():
    table = DeviceTable(1)
    rows = table.rows(int64(8, 9), insert=True)
    for _ in range(2):
        table.add_gradient(rows, torch.tensor([[1.0], [3e38]]))
    with pytest.raises(InputError, match="gradient of key 9 is inf in column 0"):
        table.take_gradient()
    table.clear_gradient()
    assert table.take_gradient() is None


def test_reading_and_updating_wait_for_no_device_and_stay_on_it():
    """A tensor on "meta" has a device and no numbers: what would ask for one, or for one of the CPU, fails."""
    table = DeviceTable(4, device="meta")
    known = torch.arange(9, device="meta")
    table._index.fill(known)
    table._index._recent = known + 9, known
    table.values.grow(9)
    keys = torch.empty(20, dtype=torch.int64, device="meta")
    assert Embedding(table).eval()(keys).shape == (20, 4)
    group = GroupEmbedding(TableGroup(("a", "b")), Embedding(table)).eval()
    assert group({"b": keys, "a": keys})["a"].device == table.device
    device_kernel("start_rows")(table.values.blocks, 0, known, 1, 0.5, True)
    device_kernel("touch_rows")(table.row_state("usage", 2, dtype=np.int64).blocks, keys, 3)
    assert device_kernel("pool_rows")(table.values.blocks, keys, known).device == table.device
    assert device_kernel("merge_keys")((known, known), (keys, keys))[1].shape == (29,)
    for make in (SparseSGD, SparseAdagrad, SparseRowWiseAdagrad, SparseAdam):
        table._gradients = [(known, torch.empty(9, 4, device="meta"))]
        make(table, lr=0.1, weight_decay=0.1).step()
        assert {state.blocks.device for state in table._row_state.values()} <= {table.device}
    with pytest.raises(RuntimeError, match="meta"):
        table.read(known)
    with pytest.raises(InputError, match="they must be int64 on meta"):
        Embedding(table)(torch.arange(3))


@pytest.mark.parametrize("kind", [DynamicTable, DeviceTable])
def test_a_table_may_keep_its_own_budget(kind):
    table = kind(2, budget=Budget(max_rows=100))
    state = DynamicTable(2, budget=Budget(max_rows=7)).state()
    table.load_state(state, keep_budget=True)
    assert table.budget == Budget(max_rows=100)
    table.load_state(state)
    assert table.budget == Budget(max_rows=7)
    with pytest.raises(InputError, match="keep_budget=True of a table without a budget"):
        kind(2).load_state(state, keep_budget=True)
