"""Schema evolution: what may change, what ids do, and that every earlier schema comes back from the log."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import SchemaError
from thinrow.schema import ColumnSpec, EventSchema, SchemaChange, Trait
from thinrow.schema.evolution import WIDER, Evolution, highest_id, schema_at

SCHEMA = EventSchema(
    (
        ColumnSpec(1, "price", Trait.NUMERIC, "float32", "main"),
        ColumnSpec(2, "shop", Trait.CATEGORICAL, "string", "place"),
        ColumnSpec(3, "flags", Trait.BITMAP, "int8", "main"),
        ColumnSpec(4, "count", Trait.NUMERIC, "int8", "main"),
    )
)
NEW = {"trait": "numeric", "dtype": "int16", "group": "main"}


def change(**asked: Any) -> Evolution:
    return Evolution(**({"add": {}, "drop": (), "rename": {}, "widen": {}, "nullable": ()} | asked))


def test_a_change_of_everything() -> None:
    asked = change(add={"city": NEW}, drop=("shop",), rename={"price": "cost"}, widen={"price": "float64"})
    new, made = asked.apply(SCHEMA, (), 7)
    assert new.schema_id == 2
    assert [(c.id, c.name, c.dtype, c.nullable) for c in new.columns] == [
        (1, "cost", "float64", False),
        (3, "flags", "int8", False),
        (4, "count", "int8", False),
        (5, "city", "int16", True),
    ]
    assert made.describe() == [
        "drop shop (id 2)",
        "rename price to cost (id 1)",
        "widen cost (id 1) from float32 to float64",
        "add city (id 5): numeric int16 in group main",
    ]
    assert SchemaChange.from_dict(made.to_dict()) == made
    assert schema_at(new, (made,), 2) == new
    assert set(schema_at(new, (made,), 1).columns) == set(SCHEMA.columns)


def test_an_id_is_never_given_twice() -> None:
    schema, log = SCHEMA, []
    for _ in range(3):
        schema, made = change(add={"city": NEW}).apply(schema, log, 0)
        log.append(made)
        schema, made = change(drop=("city",)).apply(schema, log, 0)
        log.append(made)
    assert [c.added[0].id for c in log if c.added] == [5, 6, 7]
    assert highest_id(schema, log) == 7


def test_names_may_be_swapped_and_taken_over() -> None:
    new, _ = change(rename={"price": "shop", "shop": "price"}, widen={"count": "int64"}).apply(SCHEMA, (), 0)
    assert [c.name for c in new.columns] == ["shop", "price", "flags", "count"]
    new, _ = change(drop=("shop",), add={"shop": NEW}).apply(SCHEMA, (), 0)
    assert [(c.id, c.name) for c in new.columns] == [(1, "price"), (3, "flags"), (4, "count"), (5, "shop")]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "schema 1 would not change; add, drop, rename or widen a column"),
        ({"drop": ("x",)}, "no column 'x'; the schema has price, shop, flags, count"),
        ({"drop": ("price", "shop", "flags", "count")}, "would leave no column; keep one, or add one"),
        ({"drop": ("price",), "rename": {"price": "p"}}, "'price' is dropped and changed at once; do one of the two"),
        ({"rename": {"price": "shop"}}, "column name 'shop' appears twice; each must be unique"),
        ({"rename": {"price": "arrival"}}, "column name 'arrival' is reserved"),
        ({"widen": {"price": "int64"}}, "'price' is float32 and cannot become 'int64': float32 widens to float64"),
        ({"widen": {"shop": "binary"}}, "string widens to nothing else; add a column instead, and backfill it"),
        ({"widen": {"count": "int"}}, "cannot become 'int': int8 widens to int16, int32, int64"),
        (
            {"widen": {"flags": "int16"}},
            "a bitmap of int8 and cannot become 'int16': a bitmap of int8 widens to nothing",
        ),
        ({"add": {1: NEW}}, "column name 1 is a int; give a string"),
        ({"add": {"price": NEW}}, "column name 'price' appears twice"),
        ({"add": {"c": {"trait": "id"}}}, "column 'c': say { trait = "),
        ({"add": {"c": NEW | {"nullable": False}}}, "nullable is False; old events lack it, leave nullable out"),
        ({"add": {"c": NEW | {"id": 9}}}, "id is 9; ids are given out by the store, leave it out"),
        ({"add": {"c": NEW | {"trait": "x"}}}, "unknown trait 'x'; known: timestamp"),
        ({"add": {"c": NEW | {"colour": 1}}}, "column 'c': .*colour.*; say trait, dtype and group of it"),
        ({"add": {"c": NEW | {"dtype": "string"}}}, "trait numeric with dtype 'string'"),
    ],
)
def test_refusals_say_what_to_do(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        change(**asked).apply(SCHEMA, (), 0)


def test_no_other_schema_is_made_up() -> None:
    new, made = change(drop=("shop",)).apply(SCHEMA, (), 0)
    for wrong in (0, 3):
        with pytest.raises(SchemaError, match=f"no schema {wrong} in this store; it had 1 to 2"):
            schema_at(new, (made,), wrong)
    with pytest.raises(SchemaError, match="not a schema change"):
        SchemaChange.from_dict({"schema_id": 2})


@given(st.data())
@settings(max_examples=60)
def test_the_log_gives_back_every_schema(data: st.DataObject) -> None:
    schema, log, seen = SCHEMA, [], [SCHEMA]
    names = (f"n{i}" for i in range(1000))
    for _ in range(data.draw(st.integers(1, 6))):
        have = [c.name for c in schema.columns]
        dropped = data.draw(st.lists(st.sampled_from(have), unique=True, max_size=len(have) - 1))
        kept = [n for n in have if n not in dropped]
        renamed = data.draw(st.lists(st.sampled_from(kept), unique=True))
        widened = {
            c.name: data.draw(st.sampled_from(WIDER[c.dtype]))
            for c in schema.columns
            if c.name in kept and c.dtype in WIDER and c.trait is not Trait.BITMAP and data.draw(st.booleans())
        }
        asked = change(
            add={next(names): NEW for _ in range(data.draw(st.integers(0, 2)))},
            drop=dropped,
            rename={n: next(names) for n in renamed},
            widen=widened,
            nullable=data.draw(st.lists(st.sampled_from(kept), unique=True)),
        )
        if not (
            dropped or renamed or widened or asked.add or any(not schema.column(n).nullable for n in asked.nullable)
        ):
            with pytest.raises(SchemaError, match="would not change"):
                asked.apply(schema, log, 0)
            continue
        schema, made = asked.apply(schema, log, 0)
        log.append(SchemaChange.from_dict(made.to_dict()))
        seen.append(schema)
    for old in seen:
        assert set(schema_at(schema, log, old.schema_id).columns) == set(old.columns)
        assert schema_at(schema, log, old.schema_id).schema_id == old.schema_id


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"add": {"a\0b": NEW}}, "column name"),
        ({"add": {"a": {**NEW, "group": "\0overlay 1"}}}, "group name"),
        ({"rename": {"price": "a\0b"}}, "column name"),
    ],
)
def test_names_with_a_nul_are_not_made(asked: dict[str, Any], what: str) -> None:
    with pytest.raises(SchemaError, match=rf"{what} '.*x00.*NUL.*leave it out"):
        change(**asked).apply(SCHEMA, (), 7)


def test_a_column_that_has_such_a_name_already_may_change() -> None:
    old = EventSchema((ColumnSpec(1, "price", Trait.NUMERIC, "float32", "\0odd"),))
    (new,) = change(widen={"price": "float64"}).apply(old, (), 7)[0].columns
    assert (new.dtype, new.group) == ("float64", "\0odd")
