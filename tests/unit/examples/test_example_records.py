"""Records of the training path: they survive Arrow, and misfits are refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import InputError, SchemaError, UserKindError
from thinrow.core.users import UserKind
from thinrow.examples.records import ExampleBatch, Impressions, Outcomes
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column, Jagged
from thinrow.schema.event_schema import ColumnSpec, EventSchema, Trait
from thinrow.schema.example_schema import ExampleSchema
from thinrow.testing.examples import (
    event_schema,
    example_schema,
    random_examples,
    random_impressions,
    random_outcomes,
    same_records,
)

XS = example_schema()


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(0, 12), st.sampled_from(["int64", "string"]))
def test_arrow_and_back(seed: int, n: int, kind: UserKind) -> None:
    rng, es = np.random.default_rng(seed), event_schema(kind)
    examples = random_examples(rng, n, es, XS)
    assert same_records(examples, ExampleBatch.from_arrow(examples.to_arrow(es, XS), es, XS))
    impressions = examples.impressions
    assert same_records(impressions, Impressions.from_arrow(impressions.to_arrow(es, XS), es, XS))
    outcomes = random_outcomes(rng, n, n)
    assert same_records(outcomes, Outcomes.from_arrow(outcomes.to_arrow()))


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from(["int64", "string"]))
def test_take_and_concat_are_those_of_the_rows(seed: int, sizes: list[int], kind: UserKind) -> None:
    rng, es = np.random.default_rng(seed), event_schema(kind)
    parts = [random_examples(rng, n, es, XS) for n in sizes]
    whole = ExampleBatch.concat(parts)
    tables = [p.to_arrow(es, XS) for p in parts]
    assert whole.to_arrow(es, XS).equals(pa.concat_tables(tables).combine_chunks())
    rows = rng.permutation(len(whole))[: len(whole) // 2 + 1]
    assert whole.take(rows).to_arrow(es, XS).equals(whole.to_arrow(es, XS).take(rows))


def test_a_column_added_to_the_schema_reads_as_null() -> None:
    old = event_schema()
    new = replace(old, schema_id=2, columns=(*old.columns, ColumnSpec(99, "later", Trait.ID, "int16", "rest")))
    impressions = random_impressions(np.random.default_rng(3), 5, old, XS)
    read = Impressions.from_arrow(impressions.to_arrow(old, XS), new, XS)
    later = read.snapshots.inline.columns["later"]
    assert later.values.dtype == np.int16
    assert later.valid is not None
    assert not later.valid.any()
    assert len(later) == len(read.snapshots.inline)


def test_stored_types_are_those_of_iceberg() -> None:
    table = random_examples(np.random.default_rng(0), 3, event_schema(), XS).to_arrow(event_schema(), XS)
    assert table.schema.field("ctx_c_int8").type == pa.int32()
    assert table.schema.field("recent_short").type.value_type == pa.int32()
    assert table.schema.field("v_checksum").type == pa.int64()
    assert table.schema.field("request_ts").type == pa.int64()
    assert not table.schema.field("cand_item").nullable


def _misfits() -> list[tuple[str, Impressions, type[Exception], str]]:
    good = random_impressions(np.random.default_rng(1), 4, event_schema(), XS)
    s, shown = good.snapshots, good.candidates
    wide = Jagged(Column(np.full(len(shown["k_int8"].column), 300)), shown["k_int8"].offsets)
    short = Jagged(shown["k_int8"].column.take(slice(0, 0)), np.zeros(5, np.int64))
    c_null = Column(good.context["c_int8"].values, np.array([True, False, True, True]))
    return [
        ("kind", replace(good, snapshots=replace(s, users=np.array(["a"] * 4, object))), UserKindError, "string"),
        ("negative", replace(good, snapshots=replace(s, request_ts=s.request_ts * 0 - 5)), InputError, "-5 in row 0"),
        ("missing", replace(good, context={}), InputError, "'c_int8' is missing"),
        (
            "unknown",
            replace(good, context=good.context | {"x": c_null}),
            InputError,
            "'x' is not in the example schema",
        ),
        ("null", replace(good, context=good.context | {"c_int8": c_null}), InputError, "null at position 1"),
        ("wide", replace(good, candidates=shown | {"k_int8": wide}), SchemaError, "300, which does not fit int8"),
        ("shape", replace(good, candidates=shown | {"k_int8": short}), InputError, "one value a candidate"),
        ("length", replace(good, boundary=np.zeros(3, np.int64)), InputError, "'boundary' has 3 rows"),
        ("type", replace(good, arm=Column(np.zeros(4))), SchemaError, "float64 values, the schema says string"),
    ]


@pytest.mark.parametrize(("impressions", "error", "text"), [m[1:] for m in _misfits()], ids=[m[0] for m in _misfits()])
def test_misfits_are_refused(impressions: Impressions, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        impressions.to_arrow(event_schema(), XS)


def test_outcome_values_are_labels() -> None:
    with pytest.raises(InputError, match="4294967296 exceeds int32"):
        Outcomes.of("click", [1], [2], [3], 1 << 32).to_arrow()


def test_reading_under_another_schema_names_the_column() -> None:
    table = random_impressions(np.random.default_rng(1), 2, event_schema(), XS).to_arrow(event_schema(), XS)
    with pytest.raises(SchemaError, match="no column 'ctx_c_int8'"):
        Impressions.from_arrow(table.drop_columns("ctx_c_int8"), event_schema(), XS)


def test_impressions_from_plain_lists(tmp_path: Path) -> None:
    events = pa.table({"user": ["a", "b"], "ts": [1, 2], "item": [5, 6]})
    schema = ExampleSchema.of(
        context={"hour": "int8", "city": "string"},
        candidates={"item": "int64", "price": "float32"},
        item="item",
        outcomes={"click": 10},
    )
    with HistoryStore.create(tmp_path, EventSchema.infer(events.schema, user="user", time="ts"), 2) as store:
        store.append(events)
        seen = store.snapshot(["b", "c"], 3)
        made = Impressions.of(
            schema,
            [1, 2],
            seen,
            context={"hour": [8, 9], "city": ["Rome", "Oslo"]},
            candidates={"item": [[5], [6, 7]], "price": [[0.5], [1.5, 2]]},
            model_version="m",
        )
        table = made.to_arrow(store.schema, schema)
        assert table["cand_item"].to_pylist() == [[5], [6, 7]]
        assert table["cand_price"].to_pylist() == [[0.5], [1.5, 2]]
        assert table["ctx_city"].to_pylist() == ["Rome", "Oslo"]
        assert table["boundary"].to_pylist() == [1, 0]
        assert made.candidates["item"].offsets is made.candidates["price"].offsets
        again = Impressions.of(
            schema, [1, 2], seen.requests, context=made.context, candidates=made.candidates, boundary=3
        )
        assert again.boundary.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"candidates": {}}, InputError, "candidate field 'item' is missing"),
        ({"candidates": {"item": [[1]]}}, InputError, "'item' has 1 rows, but there are 2 ids"),
        ({"candidates": {"item": [["x"], []]}}, SchemaError, "field 'item' takes rows of values of dtype int64"),
        ({"context": {"hour": [300, 1]}}, SchemaError, "field 'hour' takes values of dtype int8"),
        ({"context": {"hour": [1, 1], "day": [1, 1]}}, InputError, "context field 'day' is not in the example schema"),
    ],
)
def test_plain_lists_that_do_not_fit(change: dict[str, Any], error: type[Exception], message: str) -> None:
    schema = ExampleSchema.of(context={"hour": "int8"}, candidates={"item": "int64"}, item="item", outcomes={"c": 1})
    seen = random_impressions(np.random.default_rng(3), 2, event_schema(), XS).snapshots
    good: dict[str, Any] = {"context": {"hour": [1, 2]}, "candidates": {"item": [[1], []]}}
    with pytest.raises(error, match=message):
        Impressions.of(schema, [1, 2], seen, **(good | change))


def test_rows_are_read_by_column_id_under_every_later_schema() -> None:
    old = event_schema()
    renamed = [replace(c, name={"item": "article", "tiny": "item"}.get(c.name, c.name)) for c in old.columns]
    wide = [replace(c, dtype="int64") if c.name == "short" else c for c in renamed if c.name != "count"]
    new = replace(old, schema_id=2, columns=tuple(wide))
    impressions = random_impressions(np.random.default_rng(3), 5, old, XS)
    was = impressions.snapshots.inline.columns
    for events in (old, new):  # the log may have been opened before or after the change
        read = Impressions.from_arrow(impressions.to_arrow(events, XS), new, XS).snapshots.inline.columns
        assert list(read) == [c.name for c in new.columns]
        assert read["article"].to_arrow().equals(was["item"].to_arrow())
        assert read["item"].to_arrow().equals(was["tiny"].to_arrow())
        assert read["short"].values.dtype == np.int64
        assert read["short"].to_arrow().to_pylist() == was["short"].to_arrow().to_pylist()
    # Requests of the new schema in a log that was opened under the old one lose nothing.
    later = replace(impressions, snapshots=impressions.snapshots.under(new))
    again = Impressions.from_arrow(later.to_arrow(old, XS), old, XS)
    assert again.snapshots.schema == new
    assert list(again.snapshots.inline.columns) == [c.name for c in new.columns]
