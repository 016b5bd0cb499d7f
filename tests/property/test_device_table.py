"""A table of tensors does what one of arrays does, to the bit on the CPU, and either opens what the other saved."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.embeddings import (
    Budget,
    DeviceTable,
    DynamicTable,
    SparseAdagrad,
    SparseAdam,
    SparseAdamW,
    SparseRowWiseAdagrad,
    SparseSGD,
    tensor_index,
    tensor_rows,
)
from thinrow.kernels import kernel, use
from thinrow.kernels.dispatch import device_kernel

KEYS = st.one_of(st.integers(-3, 12), st.sampled_from([-(2**63), 2**63 - 1]), st.integers(-(2**63), 2**63 - 1))
OPTIMIZERS = (SparseSGD, SparseAdagrad, SparseRowWiseAdagrad, SparseAdam, SparseAdamW)
# Signs of zero, what is lost in a sum, and what has no full precision.
NUMBERS = [-0.0, 0.0, 1.0, -2.5, 0.1, 3e7, -1e-7, 1e-41]

calls = st.lists(
    st.tuples(
        st.sampled_from(["train", "train", "train a bag", "look", "step", "step", "take", "save and load"]),
        st.lists(KEYS, max_size=12),
        st.integers(0, 2**32 - 1),
    ),
    min_size=3,
    max_size=14,
)
budgets = st.none() | st.builds(
    Budget,
    max_rows=st.integers(1, 9),
    evict=st.sampled_from(["lru", "lfu"]),
    max_age=st.none() | st.integers(1, 4),
    keep=st.sampled_from([0.1, 0.5, 0.9]),
)


def assert_same(a, b):
    """Bit for bit."""
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def assert_same_states(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert_same(a[name], b[name])


def bounds_of(rng, n):
    return np.concatenate([[0], np.sort(rng.integers(0, n + 1, 3)), [n]])


@given(
    calls,
    budgets,
    st.sampled_from(["uniform", "normal", "constant"]),
    st.sampled_from([np.float32, np.float64]),
    st.integers(1, 5),
)
@settings(max_examples=30)
def test_any_sequence_of_calls_does_what_a_table_of_arrays_does(sequence, budget, init, dtype, dim):
    options = {"seed": 3, "init": init, "init_scale": 0.1, "dtype": dtype, "budget": budget}
    with use("reference"), patch.object(tensor_index, "_MIN_RECENT", 2), patch.object(tensor_rows, "_MIN_ROWS", 2):
        host, device = DynamicTable(dim, **options), DeviceTable(dim, **options)
        for name, keys, seed in sequence:
            rng = np.random.default_rng(seed)
            wanted, bounds = np.array(keys, np.int64), bounds_of(rng, len(keys))
            if name.startswith("train"):
                rows, on_device = host.rows(wanted, insert=True), device.rows(torch.from_numpy(wanted), insert=True)
                assert_same(rows, on_device)
                bag = name == "train a bag"
                gradient = rng.choice(np.array(NUMBERS, dtype), (4 if bag else len(rows), dim))
                of = np.repeat(np.arange(4), np.diff(bounds)) if bag else None
                host.add_gradient(rows, gradient, of)
                device.add_gradient(on_device, torch.from_numpy(gradient), None if of is None else torch.from_numpy(of))
            elif name == "step":
                make = OPTIMIZERS[seed % len(OPTIMIZERS)]
                for table in (host, device):
                    make(table, lr=0.3, weight_decay=seed % 3 * 0.01).step()
            elif name == "take":
                taken, of_device = host.take_gradient(), device.take_gradient()
                assert (taken is None) == (of_device is None)
                for a, b in zip(taken or (), of_device or (), strict=True):
                    assert_same(a, b)
            elif name == "save and load":
                SparseSGD(host, device, lr=0.1).step()
                host, device = DynamicTable.from_state(device.state()), DeviceTable.from_state(host.state())
            rows, on_device = host.rows(wanted, insert=False), device.rows(torch.from_numpy(wanted), insert=False)
            assert_same(rows, on_device)
            assert_same(host.read(rows), device.read(on_device))
            assert_same(host.pool(rows, bounds), device.pool(on_device, torch.from_numpy(bounds)))
            assert_same(host.keys(), device.keys())
            assert_same_states(host.state(), device.state())
            assert len(host) == len(device)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 1 - 2.0**-53), (0.5, 0.999999)])
def test_steps_of_adam_after_any_number_of_steps(dtype, betas):
    rng, rows = np.random.default_rng(0), np.array([3, 0, 5])
    blocks = [rng.normal(size=(8, 4)).astype(dtype) for _ in range(3)]
    blocks[2] **= 2
    blocks.append(np.array([0, 1, 2, 999, 4, 2**40, 6, 7])[:, None])
    gradient = rng.normal(size=(3, 4)).astype(dtype)
    tensors = [torch.from_numpy(b.copy()) for b in blocks]
    parameters = 0.01, *betas, 1e-8, 0.02, 0.1
    with use("reference"):
        kernel("adam_rows")(*([b] for b in blocks), rows, gradient, *parameters)
    device_kernel("adam_rows")(*tensors, torch.from_numpy(rows), torch.from_numpy(gradient), *parameters)
    for block, tensor in zip(blocks, tensors, strict=True):
        assert_same(block, tensor)


@given(st.lists(st.lists(KEYS, max_size=8), min_size=1, max_size=4))
@settings(max_examples=30)
def test_keys_of_groups(parts):
    seeds = [5, 0, 2**63 - 1, 7][: len(parts)]
    arrays = [np.array(p, np.int64) for p in parts]
    with use("reference"):
        found = kernel("hash_parts")(np.concatenate(arrays), np.cumsum([0, *map(len, arrays)]), seeds)
    assert_same(found, device_kernel("hash_parts")([torch.from_numpy(a) for a in arrays], seeds))
