"""Jagged rows: from and to Arrow, rows by number, padding that keeps the newest values, and ranges."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.ragged import ranges_index
from thinrow.jagged import Column, Jagged
from thinrow.jagged.column import ARROW_TYPES
from thinrow.schema.event_schema import DTYPES, DType

ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=6)


def jagged(rows: list[list[Any]], dtype: str = "int64") -> Jagged:
    flat = pa.array([v for r in rows for v in r], ARROW_TYPES[dtype])
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    return Jagged(Column.from_arrow(flat, dtype), offsets)


def rows_of(found: Jagged) -> list[list[Any]]:
    return [r.as_py() for r in found.to_arrow()]


def test_rows_lengths_and_views() -> None:
    found = jagged([[5, 6], [], [7]])
    assert len(found) == 3
    assert found.lengths.tolist() == [2, 0, 1]
    assert found.values.tolist() == [5, 6, 7]
    assert [found.row(i).tolist() for i in range(3)] == [[5, 6], [], [7]]
    assert np.shares_memory(found.row(0), found.values)


def test_padding_keeps_the_newest_values() -> None:
    """Histories ascend in time: what is cut is the oldest, so each row keeps its *last* ``width`` values."""
    histories = jagged([[10, 20, 30, 40], [50], [], [60, 70]])
    assert histories.to_padded(2).tolist() == [[30, 40], [50, 0], [0, 0], [60, 70]]
    assert histories.to_padded(3, fill=-1).tolist() == [[20, 30, 40], [50, -1, -1], [-1, -1, -1], [60, 70, -1]]


@given(ROWS, st.integers(0, 7))
def test_padding_is_the_tail_then_fill(rows: list[list[int]], width: int) -> None:
    padded = jagged(rows).to_padded(width, fill=-100)
    assert padded.shape == (len(rows), width)
    assert padded.dtype == np.int64
    tails = [r[max(len(r) - width, 0) :] for r in rows]
    assert padded.tolist() == [t + [-100] * (width - len(t)) for t in tails]


@given(ROWS.filter(bool), st.data())
def test_take_gives_whole_rows_in_the_order_asked(rows: list[list[int]], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    taken = jagged(rows).take(np.array(wanted, np.intp))
    assert rows_of(taken) == [rows[i] for i in wanted]
    assert taken.offsets.dtype == np.int64


def test_take_copies() -> None:
    found = jagged([[1, 2], [3]])
    assert not np.shares_memory(found.take(np.array([0, 1])).values, found.values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_from_arrow(dtype: DType) -> None:
    a, b = ("a", "b") if dtype == "string" else (b"a", b"b") if dtype == "binary" else (1, 2)
    rows = [[a, None, b], [], [b, b]]
    array = jagged(rows, dtype).to_arrow()
    assert array.type == pa.large_list(ARROW_TYPES[dtype])
    assert array.to_pylist() == rows
    assert rows_of(Jagged.from_arrow(array, dtype)) == rows


@pytest.mark.parametrize("make", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
@given(rows=ROWS, data=st.data())
@settings(max_examples=30)
def test_sliced_and_chunked_lists_come_back(make: Any, rows: list[list[int]], data: st.DataObject) -> None:
    array = pa.array(rows, make(pa.int64()))
    first = data.draw(st.integers(0, len(rows)))
    n = data.draw(st.integers(0, len(rows) - first))
    sliced = array.slice(first, n)
    found = Jagged.from_arrow(sliced, "int64")
    assert found.offsets[0] == 0
    assert found.offsets[-1] == len(found.column)
    assert rows_of(found) == rows[first : first + n]
    chunked = pa.chunked_array([sliced, array, sliced])
    assert rows_of(Jagged.from_arrow(chunked, "int64")) == rows[first : first + n] + rows + rows[first : first + n]


def test_lists_of_fixed_size_come_back() -> None:
    array = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2))
    assert rows_of(Jagged.from_arrow(array, "int64")) == [[1, 2], [3, 4], [5, 6]]
    assert rows_of(Jagged.from_arrow(array.slice(1), "int64")) == [[3, 4], [5, 6]]


def test_chunks_of_dictionaries_that_differ_come_back() -> None:
    chunks = [
        pa.ListArray.from_arrays([0, len(texts)], pa.array(texts).dictionary_encode()) for texts in (["b", "a"], ["a"])
    ]
    assert rows_of(Jagged.from_arrow(pa.chunked_array(chunks), "string")) == [["b", "a"], ["a"]]


@pytest.mark.parametrize(
    "array", [pa.array([], pa.list_(pa.int32())), pa.chunked_array([], pa.list_(pa.int32())), pa.array([[1]])[1:]]
)
def test_no_rows(array: Any) -> None:
    found = Jagged.from_arrow(array, "int32")
    assert len(found) == 0
    assert len(found.column) == 0
    assert found.offsets.tolist() == [0]
    assert found.values.dtype == np.int32
    assert found.to_padded(3).shape == (0, 3)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8))
def test_ranges_index_is_the_ranges_one_after_another(pairs: list[tuple[int, int]]) -> None:
    """A range that stops before it starts is empty."""
    start, stop = (np.array([p[i] for p in pairs], np.int64) for i in (0, 1))
    index, offsets = ranges_index(start, stop)
    assert index.dtype == offsets.dtype == np.int64
    assert len(offsets) == len(pairs) + 1
    assert offsets[-1] == len(index)
    parts = [index[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert parts == [list(range(a, b)) for a, b in pairs]
