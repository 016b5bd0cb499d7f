"""Projection: what it resolves to, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import InputError, SchemaError
from thinrow.core.units import NEVER
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait

ARROW = pa.schema([(n, pa.int64()) for n in ("user", "ts", "item", "store", "price")])
SCHEMA = EventSchema.infer(ARROW, user="user", time="ts", groups={"what": ["item"], "where": ["store"]})


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({}, ["item", "store", "price"]),
        ({"columns": ("price", "item")}, ["item", "price"]),
        ({"groups": ("where",)}, ["store"]),
        ({"columns": ("price",), "groups": ("what",)}, ["item", "price"]),
        ({"columns": ()}, []),
    ],
)
def test_columns_in_schema_order(asked: dict[str, Any], names: list[str]) -> None:
    assert [c.name for c in Projection(**asked).resolve(SCHEMA)] == names


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"columns": "item"}, r"columns='item' is one string; give a tuple of names: columns=\('item',\)"),
        ({"groups": "what"}, "groups='what' is one string"),
        ({"codes": "item"}, "codes='item' is one string"),
        ({"max_len": 0}, "max_len=0; it must be 1 or more"),
        ({"horizon_ms": -1}, "horizon_ms=-1; it must be 0 or more"),
        ({"align": 0}, "align=0; it must be 1 or more"),
        ({"align": 2}, "align=2 with max_len=None; max_len must be align or more"),
        ({"align": 5, "max_len": 4}, "align=5 with max_len=4; max_len must be align or more"),
        ({"shortest": 5, "max_len": 4}, "shortest=5 with max_len=4 and align=1; max_len must be shortest or more"),
        ({"shortest": 2}, "shortest=2 with max_len=None"),
        ({"shortest": 2, "max_len": 8, "align": 2}, "windows of drawn lengths are not aligned"),
        ({"align": 2, "max_len": 4, "horizon_ms": 9}, "align=2 with horizon_ms=9; .* drop one of the two"),
    ],
)
def test_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Projection(**asked)


CODED = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "main"),
        ColumnSpec(2, "brand", Trait.CATEGORICAL, "string", "main"),
        ColumnSpec(3, "tags", Trait.ID_LIST, "int64", "main"),
        ColumnSpec(4, "vector", Trait.VECTOR, "float32", "main", size=3),
        ColumnSpec(5, "price", Trait.NUMERIC, "float32", "main"),
    )
)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"codes": ("itme",)}, "no column 'itme'; the schema has item"),
        ({"codes": ("item",), "columns": ("brand",)}, "codes of column 'item', which is not read; add it"),
        ({"codes": ("tags",)}, "codes of column 'tags', which holds lists; single integers and text"),
        ({"codes": ("vector",)}, "codes of column 'vector', which holds vectors of 3; single integers and text"),
        ({"codes": ("price",)}, "codes of column 'price', which holds float32; single integers and text"),
    ],
)
def test_codes_of_what_has_none_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Projection(**asked).resolve(CODED)


def test_codes_change_no_column() -> None:
    names = [c.name for c in CODED.columns]
    assert [c.name for c in Projection(codes=("item", "brand")).resolve(CODED)] == names


def test_aligned_lengths_as_in_the_docstring() -> None:
    visible = np.arange(10)
    assert Projection(max_len=4, align=2).newest(visible)[4:9].tolist() == [4, 3, 4, 3, 4]
    assert Projection(max_len=4).newest(visible).tolist() == [4] * 10
    assert (Projection().newest(visible) == NEVER).all()
    assert Projection(max_len=4, horizon_ms=9).newest(visible).tolist() == [4] * 10


@pytest.mark.parametrize(("n", "align"), [(1, 1), (4, 1), (4, 2), (4, 3), (4, 4), (7, 5)])
def test_aligned_windows_start_at_multiples_and_are_never_short(n: int, align: int) -> None:
    visible = np.arange(60)
    read = np.minimum(Projection(max_len=n, align=align).newest(visible), visible)
    start = visible - read
    assert (start % align == 0).all()
    assert (read <= n).all()
    assert (read[n:] >= n - align + 1).all()
    assert (read[:n] == visible[:n]).all()
    assert set(np.diff(start).tolist()) <= {0, align}


def test_unknown_names() -> None:
    with pytest.raises(InputError, match="no column 'shop'; the schema has item, store, price"):
        Projection(columns=("shop",)).resolve(SCHEMA)
    with pytest.raises(InputError, match="no feature group 'rest'; the schema has what, where, main"):
        Projection(groups=("rest",)).resolve(SCHEMA)
