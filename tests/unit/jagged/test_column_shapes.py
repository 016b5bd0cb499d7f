"""Columns of lists and vectors: from and to Arrow, rows of them, and where single values are asked for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import InputError, SchemaError
from thinrow.core.ragged import offsets_of
from thinrow.features import FeaturePlan, Hash, Source
from thinrow.features.history_cross import history_candidate_cross
from thinrow.jagged import Column, Jagged, SharedHistories
from thinrow.jagged.column import ARROW_TYPES, concat_columns, null_column
from thinrow.testing.histories import random_histories

ELEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "int8": st.integers(-128, 127),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "string": st.text(max_size=3),
}


@st.composite
def shaped(draw: st.DrawFn) -> tuple[str, int, list[list[Any] | None]]:
    """A dtype, the size of its vectors (0: lists), and rows."""
    dtype = draw(st.sampled_from(sorted(ELEMENTS)))
    size = 0 if dtype == "string" else draw(st.integers(0, 3))
    least, most = (size, size) if size else (0, 4)
    row = st.lists(ELEMENTS[dtype], min_size=least, max_size=most)
    return dtype, size, draw(st.lists(row | st.none() if draw(st.booleans()) else row, max_size=7))


def arrow_of(dtype: str, size: int, rows: list[list[Any] | None]) -> pa.Array:
    return pa.array(rows, pa.list_(ARROW_TYPES[dtype], size) if size else pa.large_list(ARROW_TYPES[dtype]))


def column_of(dtype: str, size: int, rows: list[list[Any] | None]) -> Column:
    return Column.from_arrow(arrow_of(dtype, size, rows), dtype, ragged=not size, size=size)


def check_invariants(column: Column, n: int, size: int) -> None:
    assert len(column) == n
    assert column.size == size
    if size:
        assert column.offsets is None
        assert column.values.shape == (n, size)
    else:
        assert column.offsets is not None
        assert column.offsets[0] == 0
        assert column.offsets[-1] == len(column.values)
    if column.valid is not None:
        assert column.valid.shape == (n,)
        empty = column.values[~column.valid] if column.offsets is None else np.diff(column.offsets)[~column.valid]
        assert not empty.any()


@given(shaped(), st.data())
@settings(max_examples=150)
def test_rows_come_back_however_they_are_laid_out_and_taken(case: Any, data: st.DataObject) -> None:
    dtype, size, rows = case
    n, array = len(rows), arrow_of(*case)
    around = pa.concat_arrays([array[:2], array, array[:1]])
    layouts = [
        array,
        around.slice(min(2, n), n),
        pa.chunked_array([array[:2], array[2:2], array[2:]]),
        array.cast(pa.list_(ARROW_TYPES[dtype])),
    ]
    for laid_out in layouts:
        column = Column.from_arrow(laid_out, dtype, ragged=not size, size=size)
        check_invariants(column, n, size)
        assert column.to_arrow().type == array.type
        assert column.to_arrow().to_pylist() == rows
    column = column_of(*case)
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=9) if n else st.just([])), np.int64)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_)
    a, b = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    cuts = np.array(data.draw(st.lists(st.tuples(st.integers(0, n), st.integers(0, n)), max_size=5)), np.int64)
    start, stop = cuts.reshape(-1, 2).T
    for taken, wanted in (
        (column.take(index), [rows[i] for i in index]),
        (column.take(mask), [r for r, m in zip(rows, mask, strict=True) if m]),
        (column.take(slice(a, b)), rows[a:b]),
        (column.take(slice(b, a)), rows[b:a]),
        (column.take(slice(None, None, 2)), rows[::2]),
        (column.take_ranges(start, stop), [r for i, j in zip(start, stop, strict=True) for r in rows[i:j]]),
        (concat_columns([column, column.take(slice(a, b))]), rows + rows[a:b]),
        (concat_columns([column, null_column(dtype, 2, ragged=not size, size=size)]), [*rows, None, None]),
    ):
        check_invariants(taken, len(wanted), size)
        assert taken.to_arrow().to_pylist() == wanted


@pytest.mark.parametrize("size", [0, 2])
def test_an_all_null_input_is_a_column_of_nulls(size: int) -> None:
    column = Column.from_arrow(pa.nulls(3), "int16", ragged=not size, size=size)
    check_invariants(column, 3, size)
    assert column.to_arrow().to_pylist() == [None] * 3


@pytest.mark.parametrize(
    ("rows", "size", "message"),
    [
        (pa.array([[1], [2, None]]), 0, "row 1 holds a null element; leave it out"),
        (pa.array([None, [1, 2], [None, 1]]), 2, "row 2 holds a null element"),
        (pa.array([[1, 2], None, [1]]), 2, "row 2 holds 1 elements; every vector has 2"),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), 3, "row 0 holds 2 elements; every vector has 3"),
        (pa.array([1, 2]), 0, "type int64 is not a list of int8"),
        (pa.array([1, 2]), 2, "type int64 is not a vector of 2 of int8"),
        (pa.array([{"a": 1}]), 0, "is not a list of int8"),
        (pa.array([[1000]]), 0, "is not a int8"),
        (pa.array([["a"]]), 0, "is not a int8"),
    ],
)
def test_what_is_no_list_or_vector_is_refused(rows: pa.Array, size: int, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Column.from_arrow(rows, "int8", ragged=not size, size=size)


def test_half_floats_become_float32() -> None:
    column = Column.from_arrow(pa.array(np.array([1.5, -2], np.float16)), "float32")
    assert column.values.tolist() == [1.5, -2]


def shared(dtype: str, size: int, rows: list[list[Any] | None]) -> tuple[SharedHistories, list[list[Any] | None]]:
    """Shared histories with the rows (repeated as needed) as an event column ``x``, and that column's rows."""
    histories, _ = random_histories(np.random.default_rng(5), n_requests=9)
    held = [rows[i % len(rows)] for i in range(len(histories.events))]
    histories.events.columns["x"] = column_of(dtype, size, held)
    return histories, held


@given(shaped().filter(lambda case: len(case[2]) > 0), st.integers(0, 99))
@settings(max_examples=50)
def test_shared_histories_copy_select_and_concat_them(case: Any, seed: int) -> None:
    histories, rows = shared(*case)
    index, offsets = histories.positions()
    wanted = [[rows[i] for i in index[a:b]] for a, b in itertools.pairwise(offsets)]
    jagged = histories.to_jagged("x")
    assert jagged.to_arrow().to_pylist() == wanted
    back = Jagged.from_arrow(jagged.to_arrow(), case[0], ragged=not case[1], size=case[1])
    assert back.to_arrow().to_pylist() == wanted
    picked = np.random.default_rng(seed).permutation(len(histories))[:4]
    assert jagged.take(picked).to_arrow().to_pylist() == [wanted[i] for i in picked]
    some = histories.select(picked)
    assert some.to_jagged("x").to_arrow().to_pylist() == [wanted[i] for i in picked]
    both = SharedHistories.concat([some, histories])
    assert both.to_jagged("x").to_arrow().to_pylist() == [wanted[i] for i in picked] + wanted


def test_padded_vectors_keep_their_elements_and_lists_are_refused() -> None:
    vectors = Jagged(Column(np.arange(8).reshape(4, 2)), np.array([0, 3, 4]))
    assert vectors.to_padded(2).tolist() == [[[2, 3], [4, 5]], [[6, 7], [0, 0]]]
    lists = Jagged(column_of("int64", 0, [[1], [2, 3]]), np.array([0, 2]))
    for ask in (lambda: lists.to_padded(2), lambda: lists.row(0), lambda: lists.values):
        with pytest.raises(InputError, match="rows of lists have no flat values"):
            ask()


@pytest.mark.parametrize("size", [0, 2])
def test_feature_ops_and_look_ups_refuse_them(size: int) -> None:
    histories, _ = shared("int64", size, [[1, 2]])
    x = histories.events.columns["x"]
    kind = "vectors of 2" if size else "lists"
    with pytest.raises(InputError, match=f"a feature op of a column of {kind}; ops take single values"):
        FeaturePlan({"h": Hash(Source("history.x"))}).apply({"history.x": x})
    assert FeaturePlan({"h": Source("history.x")}).apply({"history.x": x})["h"] is x
    candidates = Jagged(Column(np.zeros(len(histories), np.int64)), offsets_of(np.ones(len(histories))))
    with pytest.raises(InputError, match=f"history column 'x' holds {kind}"):
        history_candidate_cross(histories, "x", candidates, np.zeros(len(histories), np.int64))
