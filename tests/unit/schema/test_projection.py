"""Projection: what it resolves to, and what it refuses."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from thinrow.core.errors import InputError
from thinrow.schema import EventSchema, Projection

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
        ({"max_len": 0}, "max_len=0; it must be 1 or more"),
        ({"horizon_ms": -1}, "horizon_ms=-1; it must be 0 or more"),
    ],
)
def test_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Projection(**asked)


def test_unknown_names() -> None:
    with pytest.raises(InputError, match="no column 'shop'; the schema has item, store, price"):
        Projection(columns=("shop",)).resolve(SCHEMA)
    with pytest.raises(InputError, match="no feature group 'rest'; the schema has what, where, main"):
        Projection(groups=("rest",)).resolve(SCHEMA)
