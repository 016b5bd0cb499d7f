"""Column: every dtype from and to Arrow however it is laid out, and columns one after another."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import SchemaError
from thinrow.jagged import Column
from thinrow.jagged.column import ARROW_TYPES, cast_column, concat_columns, null_column, unite_dictionaries
from thinrow.schema.event_schema import DTYPES, DType

TEXTUAL = ("string", "binary")


def _ints(dtype: str) -> list[Any]:
    info = np.iinfo(dtype)
    return [int(info.min), 0, int(info.max), 7, 7]


SAMPLES: dict[str, list[Any]] = {
    **{d: _ints(d) for d in ("int8", "int16", "int32", "int64")},
    "float32": [0.5, -2.25, math.inf, 0.0, -1.5],
    "float64": [0.1, 1e300, -math.inf, 0.0, 7.5],
    "string": ["b", "", "日本", "b", "a\0"],
    "binary": [b"b", b"", b"\xff\x00", b"b", b"a"],
}


def values_of(dtype: str) -> st.SearchStrategy[Any]:
    if dtype == "string":
        return st.text(max_size=3)
    if dtype == "binary":
        return st.binary(max_size=3)
    if dtype.startswith("float"):
        return st.floats(width=32 if dtype == "float32" else 64, allow_nan=False)
    return st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def layouts(array: pa.Array) -> dict[str, pa.Array | pa.ChunkedArray]:
    """The same rows as Arrow may hold them."""
    around = pa.concat_arrays([array[:2], array, array[:1]])
    return {
        "plain": array,
        "sliced": around.slice(2, len(array)),
        "chunked": pa.chunked_array([array[:2], array[2:2], array[2:]]),
        "no chunks": pa.chunked_array([], array.type) if not len(array) else array,
        "dictionary": array.dictionary_encode(),
        "sliced dictionary": around.dictionary_encode().slice(2, len(array)),
        "chunks of differing dictionaries": pa.chunked_array(
            [array[:2].dictionary_encode(), array[2:].dictionary_encode()]
        ),
    }


def check_invariants(column: Column, dtype: str) -> None:
    if dtype in TEXTUAL:
        assert column.values.dtype == np.int32
        assert column.dictionary is not None
        assert column.dictionary.type == ARROW_TYPES[dtype]
        assert column.dictionary.null_count == 0
        assert len(column.dictionary.unique()) == len(column.dictionary)
    else:
        assert column.values.dtype == np.dtype(dtype)
        assert column.dictionary is None
    if column.valid is not None:
        assert column.valid.dtype == np.bool_
        assert not column.values[~column.valid].any()


@pytest.mark.parametrize("nulls", [False, True], ids=["no nulls", "nulls"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_in_every_layout_comes_back(dtype: DType, nulls: bool) -> None:
    rows = [None, *SAMPLES[dtype], None] if nulls else SAMPLES[dtype]
    for name, array in layouts(pa.array(rows, ARROW_TYPES[dtype])).items():
        column = Column.from_arrow(array, dtype)
        check_invariants(column, dtype)
        assert len(column) == len(rows)
        assert (column.valid is not None) == nulls, name
        assert column.to_arrow().type == ARROW_TYPES[dtype]
        assert column.to_arrow().to_pylist() == rows, name


@given(st.data())
@settings(max_examples=60)
def test_any_values_come_back(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    rows = data.draw(st.lists(st.none() | values_of(dtype), max_size=8))
    array = pa.array(rows, ARROW_TYPES[dtype])
    name = data.draw(st.sampled_from(sorted(layouts(array))))
    column = Column.from_arrow(layouts(array)[name], dtype)
    check_invariants(column, dtype)
    assert column.to_arrow().to_pylist() == rows


@pytest.mark.parametrize("dtype", TEXTUAL)
def test_a_null_inside_a_dictionary_is_a_null(dtype: DType) -> None:
    a, b = SAMPLES[dtype][0], SAMPLES[dtype][4]
    held = pa.array([a, None, b], ARROW_TYPES[dtype])
    array = pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 2, 1], pa.int8()), held)
    other = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array([b, a], ARROW_TYPES[dtype]))
    for found, rows in (
        (array, [None, a, None, b, None]),
        (array[1:], [a, None, b, None]),
        (pa.chunked_array([array, other]), [None, a, None, b, None, b, a]),
    ):
        column = Column.from_arrow(found, dtype)
        check_invariants(column, dtype)
        assert column.to_arrow().to_pylist() == rows


def test_a_null_inside_a_dictionary_of_numbers_is_a_null() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), pa.array([5, None], pa.int64()))
    assert Column.from_arrow(array, "int64").to_arrow().to_pylist() == [None, 5]


def test_one_string_has_one_code_although_the_dictionary_holds_it_twice() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["a", "b", "a"]))
    column = Column.from_arrow(array, "string")
    assert column.values.tolist() == [0, 1, 0]
    assert column.to_arrow().to_pylist() == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("array", "dtype", "rows"),
    [
        (pa.array(["a", None], pa.large_string()), "string", ["a", None]),
        (pa.array(["a", "a"], pa.large_string()).dictionary_encode(), "string", ["a", "a"]),
        (pa.array([b"ab", None], pa.large_binary()), "binary", [b"ab", None]),
        (pa.array([b"ab"], pa.binary(2)), "binary", [b"ab"]),
        (pa.array([True, None, False]), "int8", [1, None, 0]),
        (pa.array([200, None], pa.uint8()), "int16", [200, None]),
        (pa.array([3, None], pa.int64()), "int8", [3, None]),
        (pa.array([3], pa.int32()), "float64", [3.0]),
        (pa.array([3], pa.int32()), "float32", [3.0]),
        (pa.array([2.0]), "int64", [2]),
        (pa.nulls(2), "int64", [None, None]),
        (pa.nulls(2), "string", [None, None]),
        (pa.array([], pa.float64()), "float32", []),
    ],
)
def test_other_arrow_types_are_cast_where_the_value_stays(array: pa.Array, dtype: DType, rows: list[Any]) -> None:
    column = Column.from_arrow(array, dtype)
    check_invariants(column, dtype)
    assert column.to_arrow().to_pylist() == rows


def test_float64_is_rounded_to_float32() -> None:
    column = Column.from_arrow(pa.array([0.1, math.inf, None]), "float32")
    assert column.values.tolist() == [float(np.float32(0.1)), math.inf, 0.0]
    assert np.isnan(Column.from_arrow(pa.array([math.nan]), "float32").values[0])


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_timestamps_of_any_unit_become_milliseconds(unit: str, zone: str | None) -> None:
    second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    array = pa.array([5 * second, None], pa.int64()).cast(pa.timestamp(unit, zone))
    for held in (array, array.dictionary_encode(), pa.chunked_array([array[:1], array[1:]])):
        assert Column.from_arrow(held, "int64").to_arrow().to_pylist() == [5_000, None]


def test_a_timestamp_is_cut_to_whole_milliseconds() -> None:
    array = pa.array([1_999, 2_000], pa.timestamp("us"))
    assert Column.from_arrow(array, "int64").values.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (pa.array([128]), "int8"),
        (pa.array([1 << 63], pa.uint64()), "int64"),
        (pa.array([1.5]), "int64"),
        (pa.array([math.nan]), "int64"),
        (pa.array([1e300]), "float32"),
        (pa.array([None, -1e39]), "float32"),
        (pa.array([(1 << 53) + 1]), "float64"),
        (pa.array([(1 << 24) + 1]), "float32"),
        (pa.array(["x"]), "int64"),
        (pa.array([b"\xff"]), "string"),
        (pa.array([b"\xff"]).dictionary_encode(), "string"),
        (pa.array([[1]]), "int64"),
        (pa.array([["a"]]), "string"),
        (pa.array([1 << 62], pa.timestamp("s")), "int64"),
        (pa.array([1], pa.date32()), "int64"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(array: pa.Array, dtype: DType) -> None:
    with pytest.raises(SchemaError, match=f"is not a {dtype}: .*; cast the column first"):
        Column.from_arrow(array, dtype)


def test_nan_is_a_value_and_no_null() -> None:
    for valid in (None, np.array([True, False])):
        array = Column(np.array([math.nan, 1.0]), valid).to_arrow()
        assert array.null_count == (valid is not None)
        assert math.isnan(array[0].as_py())
    assert Column.from_arrow(pa.array([math.nan]), "float64").valid is None


def test_take_keeps_validity_and_dictionary_and_a_slice_copies_nothing() -> None:
    column = Column.from_arrow(pa.array(["a", None, "b"]), "string")
    assert column.take(np.array([2, 1, 2])).to_arrow().to_pylist() == ["b", None, "b"]
    view = column.take(slice(1, 3))
    assert view.to_arrow().to_pylist() == [None, "b"]
    assert view.dictionary is column.dictionary
    assert np.shares_memory(view.values, column.values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 3])
def test_null_column_is_all_null(dtype: DType, n: int) -> None:
    column = null_column(dtype, n)
    check_invariants(column, dtype)
    assert column.to_arrow().type == ARROW_TYPES[dtype]
    assert column.to_arrow().to_pylist() == [None] * n


@given(st.data())
@settings(max_examples=60)
def test_concat_has_the_rows_of_its_parts_one_after_another(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    rows = data.draw(st.lists(st.lists(st.none() | values_of(dtype), max_size=5), min_size=1, max_size=4))
    parts = [
        null_column(dtype, len(r)) if all(v is None for v in r) else Column.from_arrow(pa.array(r), dtype) for r in rows
    ]
    both = concat_columns(parts)
    assert both.to_arrow().to_pylist() == [v for r in rows for v in r]
    assert both.values.dtype == parts[0].values.dtype
    if both.dictionary is not None:
        assert len(both.dictionary.unique()) == len(both.dictionary)


def test_concat_unites_dictionaries_in_order_of_first_appearance() -> None:
    parts = [Column.from_arrow(pa.array(r), "string") for r in (["b", "a"], ["c", "a", None], ["b", "d"])]
    both = concat_columns(parts)
    assert both.dictionary.to_pylist() == ["b", "a", "c", "d"]
    assert both.to_arrow().to_pylist() == ["b", "a", "c", "a", None, "b", "d"]


def test_concat_of_equal_dictionaries_keeps_the_codes() -> None:
    a = Column(np.array([1, 0], np.int32), None, pa.array(["x", "y"]))
    b = Column(np.array([1], np.int32), np.array([False]), pa.array(["x", "y"]))
    both = concat_columns([a, b])
    assert both.dictionary is a.dictionary
    assert both.values.tolist() == [1, 0, 1]
    assert both.valid is not None
    assert both.valid.tolist() == [True, True, False]


def test_concat_without_nulls_has_no_validity_and_one_part_is_itself() -> None:
    a, b = (Column.from_arrow(pa.array(v), "int64") for v in ([1], [2, 3]))
    assert concat_columns([a, b]).valid is None
    assert concat_columns([a]) is a


def test_codes_of_integers_stand_for_their_values() -> None:
    column = Column(np.array([0, 2, 1], np.int32), np.array([True, True, False]), pa.array([7, 9, 7], pa.int16()))
    assert not column.is_text
    assert column.to_arrow().equals(pa.array([7, 7, None], pa.int16()))
    plain = column.decoded()
    assert (plain.values.dtype, plain.values.tolist(), plain.dictionary) == (np.int16, [7, 7, 9], None)
    assert plain.decoded() is plain
    assert column.take(np.array([1, 0])).decoded().values.tolist() == [7, 7]
    wide = cast_column(column, "int64")
    assert wide.dictionary is not None
    assert wide.decoded().values.dtype == np.int64
    text = Column(np.zeros(1, np.int32), None, pa.array(["a"]))
    assert text.is_text
    assert text.decoded() is text
    none = Column(np.zeros(2, np.int32), np.zeros(2, np.bool_), pa.array([], pa.int64()))
    assert none.decoded().values.tolist() == [0, 0]
    assert none.to_arrow().equals(pa.nulls(2, pa.int64()))


def test_concat_of_codes_and_values_of_integers() -> None:
    coded = Column(np.array([1, 0], np.int32), None, pa.array([7, 9]))
    plain = Column(np.array([5, 9]), np.array([True, False]))
    joined = concat_columns([coded, plain, coded, Column(np.array([0], np.int32), None, pa.array([3]))])
    assert joined.to_arrow().to_pylist() == [9, 7, 5, None, 9, 7, 3]
    assert joined.dictionary.to_pylist() == [7, 9, 5, 9, 3]
    assert concat_columns([coded, coded]).dictionary is coded.dictionary
    assert concat_columns([plain, coded]).to_arrow().to_pylist() == [5, None, 9, 7]


def test_unite_dictionaries_maps_every_old_code() -> None:
    united, maps = unite_dictionaries([pa.array(["b", "a"]), pa.array([], pa.string()), pa.array(["a", "c"])])
    assert united.to_pylist() == ["b", "a", "c"]
    assert [m.tolist() for m in maps] == [[0, 1], [], [1, 2]]
    assert {m.dtype for m in maps} == {np.dtype(np.int32)}
