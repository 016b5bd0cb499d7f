"""The table itself: starts of rows, growth, saving, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.numpy import load, save

from thinrow.core.errors import InputError
from thinrow.core.wrap import mix64_words
from thinrow.embeddings import DynamicTable, SparseAdagrad, SparseAdam
from thinrow.embeddings import index as index_module
from thinrow.embeddings.index import INDEX_BYTES, KeyIndex
from thinrow.kernels.numba import threads

LOW, HIGH = -(2**63), 2**63 - 1


def filled(keys, **parameters):
    table = DynamicTable(3, **parameters)
    table.rows(np.array(keys, np.int64), insert=True)
    return table


def adagrad(table):
    return SparseAdagrad(table, lr=0.1, initial_accumulator=0.5)


def adam(table):
    return SparseAdam(table, lr=0.1)


def trained(steps=3, dtype=np.float32, optimizer=adagrad):
    """A table after some steps on random keys, and its optimizer."""
    table = DynamicTable(5, seed=9, block_rows=16, dtype=dtype)
    optimizer = optimizer(table)
    train(table, optimizer, steps, np.random.default_rng(1))
    return table, optimizer


def train(table, optimizer, steps, random):
    for _ in range(steps):
        rows = table.rows(random.integers(-40, 40, 50), insert=True)
        table.add_gradient(rows, random.normal(size=(50, table.dim)).astype(table.dtype))
        optimizer.step()


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape, a[name].tobytes()) == (b[name].dtype, b[name].shape, b[name].tobytes())


def test_any_key_is_a_key():
    keys = [0, -1, LOW, HIGH, 1, LOW + 1]
    table = filled(keys)
    assert table.rows(np.array([HIGH, 5, LOW, -1, 0]), insert=False).tolist() == [3, -1, 2, 1, 0]
    assert table.keys().tolist() == keys
    assert len(table) == 6


def test_starts_depend_on_seed_and_key_alone():
    keys = np.random.default_rng(0).integers(LOW, HIGH, 300)
    first = filled(keys, seed=4)
    second = DynamicTable(3, seed=4, block_rows=1)
    for key in keys[::-1]:
        second.rows(np.array([key]), insert=True)
    rows, again = (t.rows(keys, insert=False) for t in (first, second))
    assert rows.tolist() != again.tolist()
    np.testing.assert_array_equal(first.read(rows), second.read(again))
    assert not np.any(first.read(rows) == filled(keys, seed=5).read(rows))


def test_starts_are_uniform_over_the_scale():
    vectors = filled(range(20_000), init_scale=0.5, dtype=np.float64).values.to_array()
    assert -0.5 <= vectors.min() < -0.499
    assert 0.499 < vectors.max() < 0.5
    counts = np.histogram(vectors, 10, (-0.5, 0.5))[0]
    assert np.all(np.abs(counts - 6000) < 5 * 6000**0.5)
    assert np.abs(np.corrcoef(vectors.T) - np.eye(3)).max() < 0.04
    assert not filled([1, 2], init_scale=0).values.to_array().any()


def test_starts_are_normal_with_the_scale_as_deviation():
    vectors = filled(range(20_000), init="normal", init_scale=0.5, dtype=np.float64).values.to_array() / 0.5
    assert abs(vectors.mean()) < 5 / 60_000**0.5
    assert abs(vectors.std() - 1) < 0.02
    # Shares within one, two and three deviations of a normal distribution.
    for k, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs((np.abs(vectors) < k).mean() - share) < 0.01
    assert np.abs(np.corrcoef(vectors.T) - np.eye(3)).max() < 0.04


def keys_as_vectors(keys, dim, seed):
    return np.repeat(keys[:, None] % 1000 + seed, dim, axis=1).astype(np.float64)


def one_row_too_few(keys, dim, seed):
    return np.zeros((len(keys) - 1, dim))


def beyond_float32(keys, dim, seed):
    return np.full((len(keys), dim), 1e39)


@pytest.mark.parametrize("init", ["uniform", "normal", "constant", f"{__name__}:keys_as_vectors"])
def test_a_key_starts_alike_in_any_order_shard_and_load(init):
    keys = np.random.default_rng(0).permutation(300)
    options = {"init": init, "init_scale": 0.5, "seed": 4}
    whole, odd = filled(keys, **options), filled(keys[keys % 2 == 1], **options)
    loaded = DynamicTable.from_state(filled(keys[:100], **options).state())
    for other in (odd, loaded):
        other.rows(keys[::-1].copy(), insert=True)
        same = (t.read(t.rows(keys, insert=False)) for t in (whole, other))
        np.testing.assert_array_equal(*same)
    if init == "constant":
        assert np.all(whole.values.to_array() == 0.5)
    if init.endswith("keys_as_vectors"):
        assert whole.read(whole.rows(np.array([7]), insert=False)).tolist() == [[11.0] * 3]


def test_a_start_that_fails_leaves_the_table_as_it_was():
    table = filled([], init=f"{__name__}:one_row_too_few")
    with pytest.raises(InputError, match=r"gave float64 \(1, 3\); it must give \(2, 3\) floats, finite as float32"):
        table.rows(np.array([1, 2]), insert=True)
    assert len(table) == 0
    too_large = filled([], init=f"{__name__}:beyond_float32")
    with pytest.raises(InputError, match="finite as float32"):
        too_large.rows(np.array([1, 2]), insert=True)
    assert len(too_large) == 0
    with pytest.raises(InputError, match="cannot be imported"):
        filled([1], init="no.such:function")


def test_starts_are_the_same_numbers_in_both_dtypes():
    for init in ("uniform", "normal"):
        made = (filled(range(50), init=init, init_scale=0.25, dtype=d) for d in (np.float32, np.float64))
        single, double = (table.values.to_array() for table in made)
        np.testing.assert_array_equal(single, double)


def test_growth_moves_no_row():
    table = filled(range(10), block_rows=8)
    table.row_state("s", 1, fill=2)
    address = [b.ctypes.data for b in table.values.blocks]
    vectors = table.read(np.arange(10))
    keys = np.arange(5_000)
    assert table.rows(keys, insert=True).tolist() == keys.tolist()
    assert [b.ctypes.data for b in table.values.blocks[:2]] == address
    np.testing.assert_array_equal(table.read(np.arange(10)), vectors)
    assert table.row_state("s", 1).to_array().tolist() == [[2.0]] * 5_000


def flags_of(block):
    """What the system was told of the memory in the middle of a block, ``hg`` for large pages and ``nh`` for small."""
    middle, within = block.ctypes.data + block.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            first, last = (int(end, 16) for end in name.split("-"))
            within = first <= middle < last
        elif within and name == "VmFlags:":
            return {"hg", "nh"} & set(rest)
    raise AssertionError("no such memory")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="large pages are asked for on Linux"
)
def test_a_block_that_fills_by_and_by_is_in_small_pages_until_it_is_full():
    table = DynamicTable(1024, block_rows=1024)
    table.rows(np.arange(4000), insert=True)
    assert [flags_of(block) for block in table.values.blocks] == [{"hg"}] * 4
    table.rows(np.arange(4000, 4200), insert=True)
    assert [flags_of(block) for block in table.values.blocks[3:]] == [{"hg"}, {"nh"}]
    for first in range(4200, 5200, 200):
        table.rows(np.arange(first, first + 200), insert=True)
    assert [flags_of(block) for block in table.values.blocks[3:]] == [{"hg"}, {"hg"}, {"nh"}]
    other = DynamicTable(1024)
    other.rows(np.arange(5200), insert=True)
    np.testing.assert_array_equal(table.values.to_array(), other.values.to_array())


def test_read_only_calls_change_nothing():
    table, _ = trained()
    before = table.state()
    rows = table.rows(np.array([1, 10**9, LOW]), insert=False)
    assert rows[1:].tolist() == [-1, -1]
    assert not table.read(rows)[1:].any()
    assert_same(table.state(), before)


def test_read_into_an_array():
    table = filled([7])
    out = np.full((2, 3), 9, np.float32)
    assert table.read(np.array([-1, 0]), out) is out
    np.testing.assert_array_equal(out, table.read(np.array([-1, 0])))
    for wrong in (np.empty((1, 3), np.float32), np.empty((2, 3)), np.empty((3, 2), np.float32).T):
        with pytest.raises(InputError, match=r"must be a writable, C-contiguous float32 array of \(2, 3\)"):
            table.read(np.array([0, 0]), wrong)


def test_gradients_of_a_row_are_summed_over_calls():
    table = filled([5, 6, 7], dtype=np.float64)
    table.add_gradient(np.array([2, 0, 2]), np.array([[1.0, 0, 0], [2, 2, 2], [0, 1, 0]]))
    table.add_gradient(np.array([1, 2]), np.array([[8.0, 8, 8], [0, 0, 1]]))
    rows, sums = table.take_gradient()
    assert rows.tolist() == [0, 1, 2]
    assert sums.tolist() == [[2, 2, 2], [8, 8, 8], [1, 1, 1]]
    assert table.take_gradient() is None


@pytest.mark.parametrize("optimizer", [adagrad, adam])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_saved_table_goes_on_bit_for_bit(dtype, optimizer):
    table, first = trained(dtype=dtype, optimizer=optimizer)
    state = load(save(table.state()))
    other = DynamicTable.from_state(state, block_rows=2)
    into = DynamicTable(5, dtype=dtype, seed=1)
    into.rows(np.array([77, 78]), insert=True)
    into.add_gradient(np.array([0]), np.ones((1, 5), dtype))
    into.load_state(state)
    assert into.take_gradient() is None
    for each, stepper in ((table, first), (other, optimizer(other)), (into, optimizer(into))):
        assert_same(each.state(), state)
        each.rows(np.arange(1000, 1100), insert=True)
        train(each, stepper, 3, np.random.default_rng(2))
    assert_same(table.state(), other.state())
    assert_same(table.state(), into.state())
    assert table.state()["values"].tobytes() != state["values"].tobytes()


def test_the_saved_state_is_a_copy():
    table, optimizer = trained()
    state = table.state()
    values = state["values"].copy()
    train(table, optimizer, 1, np.random.default_rng(3))
    np.testing.assert_array_equal(state["values"], values)


@pytest.mark.parametrize("optimizer", [adagrad, adam])
def test_threads_and_repeats_change_no_bit(monkeypatch, optimizer):
    states = []
    for n_threads in (1, 1, 2, 5):
        monkeypatch.setattr(threads, "N_THREADS", n_threads)
        monkeypatch.setattr(threads, "MIN_BYTES", 1 if n_threads > 1 else 1 << 18)
        monkeypatch.setattr(threads, "_pool", None)
        table, _ = trained(6, optimizer=optimizer)
        states.append(table.state())
    for state in states[1:]:
        assert_same(states[0], state)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"dim": 0}, "dim=0; it must be an integer, 1 or more"),
        ({"seed": -1}, r"seed=-1; it must be in \[0, 2\^63\)"),
        ({"init_scale": float("nan")}, "init_scale=nan"),
        ({"init_scale": -0.1}, "init_scale=-0.1"),
        ({"init": "constant", "init_scale": float("inf")}, "init_scale=inf"),
        ({"init_scale": 1e38}, "init_scale=1e\\+38; it must be 2.13e\\+37 at most"),
        ({"budget": 1000}, "budget=1000; it must be a Budget"),
        ({"dim": 2.0}, "dim=2.0; it must be an integer"),
        ({"init": "xavier"}, "init='xavier'; it must be uniform, normal, constant, or"),
        ({"block_rows": 3}, "block_rows=3; it must be a power of two"),
        ({"block_rows": 0}, "block_rows=0"),
        ({"dtype": np.float16}, "dtype=float16; it must be float32 or float64"),
    ],
)
def test_bad_parameters(parameters, message):
    with pytest.raises(InputError, match=message):
        DynamicTable(**{"dim": 2, **parameters})


def test_bad_keys_and_rows():
    table = filled([7, 8])
    for wrong in (np.array([1], np.int32), np.array([1.0]), np.array([[1]]), [1], np.array([1], np.uint64)):
        with pytest.raises(InputError, match=r"keys: .*must be a one-dimensional int64 array"):
            table.rows(wrong, insert=True)
    with pytest.raises(InputError, match=r"row 2 \(position 1\); rows are in \[-1, 2\)"):
        table.read(np.array([0, 2, 9]))
    with pytest.raises(InputError, match=r"row -2 \(position 0\)"):
        table.read(np.array([-2]))
    assert len(table) == 2


def test_bad_gradients_name_the_key_and_are_not_kept():
    table = filled([7, -8])
    gradient = np.ones((3, 3), np.float32)
    with pytest.raises(InputError, match=r"gradient of row -1; rows are in \[0, 2\)"):
        table.add_gradient(np.array([0, 1, -1]), gradient)
    with pytest.raises(InputError, match="gradient of row 2"):
        table.add_gradient(np.array([0, 1, 2]), gradient)
    with pytest.raises(InputError, match=r"gradient is float64 \(3, 3\); for these rows it must be float32 \(3, 3\)"):
        table.add_gradient(np.array([0, 1, 0]), gradient.astype(np.float64))
    for wrong in (np.nan, np.inf):
        gradient[1, 2] = wrong
        with pytest.raises(InputError, match=f"gradient of key -8 is {wrong} in column 2"):
            table.add_gradient(np.array([0, 1, 0]), gradient)
    assert table.take_gradient() is None


def test_sums_of_several_calls_that_overflow_name_the_key():
    table = filled([7, -8])
    optimizer = SparseAdagrad(table)
    before = table.state()
    for _ in range(2):
        table.add_gradient(np.array([1]), np.full((1, 3), 3e38, np.float32))
    with pytest.raises(InputError, match="gradient of key -8 is inf in column 0"):
        optimizer.step()
    assert_same(table.state(), before)
    table.clear_gradient()
    assert table.take_gradient() is None


def test_bad_states():
    table, _ = trained()
    good = table.state()
    before = DynamicTable(5, seed=3)
    state = before.state()

    def refused(message, **changed):
        changed = {k.replace("__", "."): v for k, v in changed.items()}
        with pytest.raises(InputError, match=message):
            before.load_state({k: v for k, v in (good | changed).items() if v is not None})
        assert_same(before.state(), state)

    refused("the state has no 'seed'", seed=None)
    refused("values of the state is .*; it must be", values=good["values"][:-1])
    refused("values of the state is .*; it must be", values=good["values"][:, :4])
    refused("key 0 is there twice", keys=np.zeros_like(good["keys"]))
    refused("keys: int32", keys=good["keys"].astype(np.int32))
    refused("the state has 'more'; beside keys", more=good["keys"])
    refused("the state has 'row_state.adagrad.sum'", row_fill__adagrad__sum=None)
    refused("row_state.adagrad.sum of the state is", row_state__adagrad__sum=good["values"][:3])
    with pytest.raises(InputError, match="of a float32 table of dim 5, this table is float32 of dim 4"):
        DynamicTable(4).load_state(good)
    with pytest.raises(InputError, match="of a float32 table of dim 5, this table is float64 of dim 5"):
        DynamicTable(5, dtype=np.float64).load_state(good)


def test_a_row_state_has_one_shape():
    table = filled([7])
    state = table.row_state("s", 2, fill=1)
    assert table.row_state("s", 2, fill=5) is state
    assert state.to_array().tolist() == [[1, 1]]
    with pytest.raises(InputError, match="row state 's' is float32 of width 2, asked for was int64 of width 2"):
        table.row_state("s", 2, dtype=np.int64)


def test_the_index_grows_by_a_segment_at_a_time():
    keys = np.random.default_rng(0).integers(LOW, HIGH, 300_000)
    index, segments = KeyIndex(), [1]
    for first in range(0, len(keys), 20_000):
        index.rows(keys[first : first + 20_000], insert=True)
        segments.append(len(index._slots))
    assert max(np.diff(segments)) == 1
    assert segments[-1] == -(-300_000 // (65_536 * 5 // 16))
    assert index.n_bytes < 300_000 * INDEX_BYTES + (1 << 20) + 65_536 * 8
    assert index.rows(keys, insert=False).tolist() == list(range(len(keys)))


def test_keys_that_all_want_one_segment_are_found():
    candidates = np.arange(1 << 19)
    keys = candidates[mix64_words(candidates.view(np.uint64)) % np.uint64(128) == 5]
    with patch.multiple(index_module, _SEGMENT_SLOTS=1024, _SLAB_SLOTS=4096):
        for index in (KeyIndex(), KeyIndex(keys)):
            assert index.rows(keys, insert=True).tolist() == list(range(len(keys)))
            source, target = index.drop(keys % 3 == 0)
            assert len(source) == len(target)
            assert index.keys_of(index.rows(keys[keys % 3 != 0], insert=False).argsort()).shape == (len(index),)
            assert index.rows(keys[keys % 3 == 0], insert=False).max() == -1


def test_a_copy_of_a_table_is_another_table():
    table = filled([7, -1])
    other = deepcopy(table)
    other.rows(np.array([9]), insert=True)
    gradient_of_ones(other, [0])
    assert table.keys().tolist() == [7, -1]
    assert table.read(np.array([0])).tolist() == filled([7]).read(np.array([0])).tolist()
    assert other.rows(np.array([9, 7]), insert=False).tolist() == [2, 0]


def gradient_of_ones(table, rows):
    table.add_gradient(np.array(rows), np.ones((len(rows), 3), np.float32))
    adagrad(table).step()


def test_torch_is_needed_by_the_module_alone():
    program = """
import sys
sys.modules["torch"] = None
from thinrow.core.errors import MissingExtraError
import thinrow.embeddings
assert "numba" not in sys.modules
import numpy as np
from thinrow.embeddings import DynamicTable, SparseAdagrad
table = DynamicTable(2)
table.add_gradient(table.rows(np.array([3]), insert=True), np.ones((1, 2), np.float32))
SparseAdagrad(table).step()
try:
    thinrow.embeddings.Embedding
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "torch is not installed; run: pip install 'thinrow[train]'\n"


def test_every_name_loads():
    import thinrow.embeddings

    for name in thinrow.embeddings.__all__:
        assert getattr(thinrow.embeddings, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = thinrow.embeddings.nothing
