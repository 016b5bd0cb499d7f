"""The bytes that calls of a table must move, counted by hand."""

import numpy as np
import pytest

from thinrow.embeddings import (
    Budget,
    DynamicTable,
    SparseAdagrad,
    SparseAdam,
    SparseRowWiseAdagrad,
    SparseSGD,
    Traffic,
    stream_bandwidth,
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "state_bytes"),
    [(SparseSGD, 0), (SparseAdagrad, 8), (SparseRowWiseAdagrad, 4), (SparseAdam, 8 + 8 + 8)],
)
def test_a_step_of_three_positions_of_two_keys(make, state_bytes):
    table = DynamicTable(2)
    optimizer = make(table)
    rows = table.rows(np.array([5, 6, 5]), insert=True)
    table.read(rows)
    table.add_gradient(rows, np.ones((3, 2), np.float32))
    optimizer.step()
    update, start = 2 * (3 * 8 + 2 * state_bytes), 2 * (8 + state_bytes)
    assert table.traffic == Traffic(look_up=3 * 32, read=3 * 16, sum=3 * 8 + 2 * 8, update=update, start=start)
    assert table.traffic.total == 96 + 48 + 40 + update + start


def test_what_finds_no_row_is_looked_up_and_no_more():
    table = DynamicTable(2, budget=Budget(max_rows=1))
    table.rows(np.array([5, 6, 7]), insert=True)
    assert (table.traffic.look_up, table.traffic.update) == (96, 0)
    loaded = DynamicTable(2)
    loaded.load_state(table.state())
    assert loaded.traffic == Traffic()


def test_memory_moves_something():
    assert stream_bandwidth(1 << 16, rounds=1) > 0
