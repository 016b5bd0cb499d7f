"""Tables and batches of more than 2^31 elements and 6 GB: nothing wraps around (each takes about 10 GB of memory)."""

import numpy as np
import pytest

from thinrow.embeddings import DynamicTable, SparseAdagrad, SparseSGD

pytestmark = pytest.mark.slow

DIM = 1024
#: Their elements pass 2^31 a thousand rows before the end.
MANY = (1 << 31) // DIM + 1000


@pytest.fixture(autouse=True)
def _memory():
    with open("/proc/meminfo") as f:
        free = next(int(line.split()[1]) for line in f if line.startswith("MemAvailable"))
    if free < 13 << 20:
        pytest.skip(f"{free >> 20} GB of memory are free; this test takes 12")


def test_a_table_beyond_two_to_the_31_elements():
    table, few = DynamicTable(DIM), DynamicTable(DIM)
    keys = np.arange(MANY)
    assert table.rows(keys, insert=True).tolist() == keys.tolist()
    # The ends, and what stands before and behind element 2^31.
    probe = np.array([0, 1, MANY - 1001, MANY - 1000, MANY - 999, MANY - 1])
    small = few.rows(probe, insert=True)
    np.testing.assert_array_equal(table.read(probe), few.read(small))
    gradient = np.arange(len(probe) * DIM, dtype=np.float32).reshape(-1, DIM)
    for some, rows in ((table, probe), (few, small)):
        some.add_gradient(rows, gradient)
        SparseSGD(some, lr=0.5).step()
    np.testing.assert_array_equal(table.read(probe), few.read(small))
    others = np.array([2, MANY - 1002, MANY - 998, MANY - 2])
    fresh = DynamicTable(DIM)
    np.testing.assert_array_equal(table.read(others), fresh.read(fresh.rows(others, insert=True)))
    bounds = np.array([0, 3, 6])
    np.testing.assert_array_equal(table.pool(probe, bounds), few.pool(small, bounds))


def test_a_batch_of_vectors_beyond_two_to_the_31_elements():
    table = DynamicTable(DIM)
    keys = np.arange(MANY) % 1000
    rows = table.rows(keys, insert=True)
    vectors = table.read(rows)
    assert vectors.size > 1 << 31
    for part in (slice(0, 1000), slice(MANY - 2000, MANY)):
        np.testing.assert_array_equal(vectors[part], table.read(rows[part]))


def test_a_batch_of_gradients_beyond_two_to_the_31_elements():
    table = DynamicTable(DIM)
    rows = table.rows(np.arange(MANY) % 1000, insert=True)
    before = table.read(np.arange(1000))
    gradient = np.zeros((MANY, DIM), np.float32)
    # Only these count, the last of them behind element 2^31.
    marked = np.array([5, MANY - 7])
    gradient[marked] = 1
    table.add_gradient(rows, gradient)
    del gradient
    SparseAdagrad(table, lr=1.0).step()
    moved = np.flatnonzero((table.read(np.arange(1000)) != before).any(axis=1))
    assert moved.tolist() == sorted(set(rows[marked].tolist()))
