"""Schemas of events and examples: what is taken, every refusal, their stored forms, and the encoded version."""

from __future__ import annotations

import json
import struct
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinrow.core.errors import InputError, SchemaError
from thinrow.schema import VERSION_DTYPE, ColumnSpec, EventSchema, ExampleSchema, HistoryVersion, Projection, Trait
from thinrow.schema.event_schema import DTYPES, RESERVED_NAMES

INTEGERS = ("int8", "int16", "int32", "int64")
#: Trait -> the dtypes that it may have.
TABLE: dict[Trait, tuple[str, ...]] = {
    Trait.TIMESTAMP: ("int64",),
    Trait.ID: (*INTEGERS, "string"),
    Trait.CATEGORICAL: (*INTEGERS, "string"),
    Trait.NUMERIC: (*INTEGERS, "float32", "float64"),
    Trait.TEXT: ("string", "binary"),
    Trait.BITMAP: INTEGERS,
    Trait.ID_LIST: (*INTEGERS, "string"),
    Trait.VECTOR: (*INTEGERS, "float32", "float64"),
}

ARROW = pa.schema(
    [
        ("household_id", pa.int64()),
        ("transaction_timestamp", pa.timestamp("us")),
        ("line_id", pa.string()),
        ("corrects", pa.string()),
        ("committed_at", pa.int64()),
        ("product_id", pa.int64()),
        ("department", pa.dictionary(pa.int32(), pa.string())),
        ("sales_value", pa.float64()),
    ]
)
TOML = """
user = "household_id"
time = "transaction_timestamp"
event_id = "line_id"
supersedes = "corrects"
arrival_time = "committed_at"

[groups.item]
product_id = { trait = "id", dtype = "int64" }
department = { trait = "categorical", dtype = "string", id = 9 }

[groups.price]
sales_value = { trait = "numeric", dtype = "float64", nullable = true }
"""
HEAD = 'user = "household_id"\ntime = "transaction_timestamp"\n'
ONE = '[groups.item]\nproduct_id = { trait = "id", dtype = "int64" }\n'


def column(name: str = "item", id: int = 1, **more: Any) -> ColumnSpec:
    return ColumnSpec(**{"id": id, "name": name, "trait": Trait.ID, "dtype": "int64", "group": "main", **more})


# One column, and columns together


@pytest.mark.parametrize("trait", Trait)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trait_has_only_its_dtypes(trait: Trait, dtype: str) -> None:
    if dtype in TABLE[trait]:
        spec = column(trait=trait, dtype=dtype, size=3 if trait is Trait.VECTOR else 0)
        assert (spec.dtype, spec.ragged) == (dtype, trait is Trait.ID_LIST)
        return
    allowed = ", ".join(TABLE[trait])
    with pytest.raises(SchemaError, match=f"'item': trait {trait.value} with dtype '{dtype}'; allowed: {allowed}"):
        column(trait=trait, dtype=dtype)


def test_values_of_strings_and_bytes_are_int32_codes() -> None:
    for trait, dtype in ((Trait.ID, "string"), (Trait.TEXT, "binary")):
        spec = column(trait=trait, dtype=dtype)
        assert spec.is_bytes
        assert spec.numpy_dtype == np.int32
    assert not column(dtype="int16").is_bytes
    assert column(dtype="int16").numpy_dtype == np.int16


@pytest.mark.parametrize("name", ["", "user_id", "event_ts", "arrival", "hidden_from", "event_id", "supersedes"])
def test_reserved_names_are_refused(name: str) -> None:
    assert name == "" or name in RESERVED_NAMES
    with pytest.raises(SchemaError, match=f"column name '{name}' is reserved; rename the column"):
        column(name)


@pytest.mark.parametrize("group", ["", "keys", "ids"])
def test_reserved_groups_are_refused(group: str) -> None:
    with pytest.raises(SchemaError, match=f"'item' is in group '{group}', a reserved name"):
        column(group=group)


@pytest.mark.parametrize("bad", [0, -1])
def test_ids_are_1_or_more(bad: int) -> None:
    with pytest.raises(SchemaError, match=f"'item' has id {bad}; ids are 1 or more"):
        column(id=bad)


def test_ids_and_names_are_unique() -> None:
    with pytest.raises(SchemaError, match="column id '3' appears twice"):
        EventSchema((column("a", 3), column("b", 3)))
    with pytest.raises(SchemaError, match="column name 'a' appears twice"):
        EventSchema((column("a", 1), column("a", 2)))


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"event_id_column": "e"}, "event_id_column and event_id_dtype go together"),
        ({"event_id_dtype": "int64"}, "event_id_column and event_id_dtype go together"),
        ({"supersedes_column": "s"}, "supersedes needs event_id"),
        ({"user_kind": "uuid"}, "user_kind is 'uuid'; allowed: int64, string"),
        ({"event_id_column": "e", "event_id_dtype": "int32"}, "event_id_dtype is 'int32'; allowed: int64, string"),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        EventSchema((column(),), **given_)


def test_groups_come_in_order_of_first_appearance() -> None:
    schema = EventSchema((column("a", 1, group="z"), column("b", 2, group="a"), column("c", 3, group="z")))
    assert schema.groups == ("z", "a")
    assert schema.column("b").id == 2
    with pytest.raises(SchemaError, match="no column 'd'; the schema has a, b, c"):
        schema.column("d")


# TOML


def test_toml_names_every_column_and_its_role() -> None:
    assert EventSchema.from_toml(TOML, ARROW) == EventSchema(
        columns=(
            ColumnSpec(1, "product_id", Trait.ID, "int64", "item"),
            ColumnSpec(9, "department", Trait.CATEGORICAL, "string", "item"),
            ColumnSpec(3, "sales_value", Trait.NUMERIC, "float64", "price", nullable=True),
        ),
        user_kind="int64",
        user_column="household_id",
        time_column="transaction_timestamp",
        event_id_column="line_id",
        event_id_dtype="string",
        supersedes_column="corrects",
        arrival_time_column="committed_at",
    )


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int8(), pa.int32())],
)
def test_the_input_settles_the_kinds_of_ids(kind: pa.DataType) -> None:
    text = kind != pa.dictionary(pa.int8(), pa.int32())
    arrow = pa.schema(
        [("household_id", kind), ("transaction_timestamp", pa.int64()), ("e", kind), ("product_id", pa.int64())]
    )
    schema = EventSchema.from_toml(HEAD + 'event_id = "e"\n' + ONE, arrow)
    assert schema.user_kind == schema.event_id_dtype == ("string" if text else "int64")


def test_without_event_ids_there_is_no_dtype_of_them() -> None:
    schema = EventSchema.from_toml(HEAD + ONE, ARROW)
    assert (schema.event_id_column, schema.event_id_dtype, schema.supersedes_column) == (None, None, None)


def spec(text: str) -> str:
    return HEAD + f"[groups.item]\nproduct_id = {text}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user = ", "schema is not TOML"),
        (HEAD + 'colour = "x"\n' + ONE, "schema has an unknown key 'colour'; known: arrival_time, event_id, groups"),
        (HEAD, r"schema has no \[groups.NAME\] table"),
        (HEAD + "groups = 5\n", r"schema has no \[groups.NAME\] table"),
        (HEAD + "[groups]\n", r"schema has no \[groups.NAME\] table"),
        (HEAD + "[groups]\nitem = 5\n", r"group 'item' is not a table; write \[groups.item\]"),
        ('time = "transaction_timestamp"\n' + ONE, "schema lacks 'user'; add a line: user = \"COLUMN\""),
        ('user = "household_id"\n' + ONE, "schema lacks 'time'"),
        ('user = 5\ntime = "transaction_timestamp"\n' + ONE, "schema lacks 'user'"),
        (HEAD.replace("household_id", "nobody") + ONE, "input has no column 'nobody'; it has household_id, "),
        (HEAD + 'event_id = "nothing"\n' + ONE, "input has no column 'nothing'"),
        (HEAD + 'event_id = ""\n' + ONE, "input has no column ''"),
        (HEAD + "event_id = 0\n" + ONE, "input has no column 0"),
        (HEAD + 'arrival_time = ""\n' + ONE, "input has no column ''"),
        (HEAD + 'supersedes = "corrects"\n' + ONE, "supersedes needs event_id"),
        (HEAD + ONE.replace("product_id", "colour"), "input has no column 'colour'"),
        (HEAD + ONE.replace("groups.item", "groups.keys"), "in group 'keys', a reserved name"),
        (HEAD + ONE.replace("product_id", "arrival"), "column name 'arrival' is reserved"),
        (spec('"int64"'), 'column \'product_id\': write product_id = { trait = "id", dtype = "int64" }'),
        (spec('{ trait = "id" }'), "column 'product_id': write"),
        (spec('{ dtype = "int64" }'), "column 'product_id': write"),
        (
            spec('{ trait = "id", dtype = "int64", sort = 1 }'),
            "unknown key 'sort'; known: trait, dtype, nullable, id, ",
        ),
        (spec('{ trait = "id", dtype = "int64", size = 1 }'), "has size 1; only a vector has a size"),
        (spec('{ trait = "vector", dtype = "float32", size = "4" }'), "size is '4'; it must be of type int"),
        (spec('{ trait = "colour", dtype = "int64" }'), "unknown trait 'colour'; known: timestamp, id, "),
        (spec('{ trait = ["id"], dtype = "int64" }'), "unknown trait"),
        (spec('{ trait = "id", dtype = "uint8" }'), "trait id with dtype 'uint8'; allowed: int8"),
        (spec('{ trait = "id", dtype = 64 }'), "trait id with dtype 64; allowed: int8"),
        (spec('{ trait = "vector", dtype = "float32" }'), "has size 0; give the number of its elements, 1 to 32768"),
        (spec('{ trait = "vector", dtype = "int8", size = 32769 }'), "has size 32769; give the number of its elements"),
        (spec('{ trait = "id_list", dtype = "float32" }'), "allowed: int8, int16, int32, int64, string"),
        (spec('{ trait = "id", dtype = "int64", id = "1" }'), "id is '1'; it must be of type int"),
        (spec('{ trait = "id", dtype = "int64", id = true }'), "id is True; it must be of type int"),
        (spec('{ trait = "id", dtype = "int64", id = 0 }'), "has id 0; ids are 1 or more"),
        (spec('{ trait = "id", dtype = "int64", nullable = 1 }'), "nullable is 1; it must be of type bool"),
        (TOML.replace("id = 9", "id = 1"), "column id '1' appears twice"),
    ],
)
def test_toml_that_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        EventSchema.from_toml(text, ARROW)


def test_an_input_with_the_user_column_twice_is_refused() -> None:
    arrow = ARROW.append(pa.field("household_id", pa.int64()))
    with pytest.raises(SchemaError, match="input has 2 columns 'household_id'; rename all but one"):
        EventSchema.from_toml(HEAD + ONE, arrow)


# Inference


@pytest.mark.parametrize(
    ("kind", "dtype", "trait"),
    [
        *((pa.type_for_alias(d), d, Trait.ID) for d in INTEGERS),
        (pa.uint8(), "int16", Trait.ID),
        (pa.uint16(), "int32", Trait.ID),
        (pa.uint32(), "int64", Trait.ID),
        (pa.float32(), "float32", Trait.NUMERIC),
        (pa.float64(), "float64", Trait.NUMERIC),
        (pa.string(), "string", Trait.CATEGORICAL),
        (pa.large_string(), "string", Trait.CATEGORICAL),
        (pa.dictionary(pa.int8(), pa.string()), "string", Trait.CATEGORICAL),
        (pa.binary(), "binary", Trait.TEXT),
        (pa.large_binary(), "binary", Trait.TEXT),
        (pa.timestamp("ns", "UTC"), "int64", Trait.TIMESTAMP),
        (pa.bool_(), "int8", Trait.CATEGORICAL),
        (pa.float16(), "float32", Trait.NUMERIC),
        (pa.list_(pa.int64()), "int64", Trait.ID_LIST),
        (pa.large_list(pa.uint8()), "int16", Trait.ID_LIST),
        (pa.list_(pa.dictionary(pa.int8(), pa.string())), "string", Trait.ID_LIST),
        (pa.list_(pa.float16(), 3), "float32", Trait.VECTOR),
        (pa.list_(pa.bool_(), 3), "int8", Trait.VECTOR),
    ],
)
def test_inference_guesses_dtype_and_trait_from_the_type(kind: pa.DataType, dtype: str, trait: Trait) -> None:
    arrow = pa.schema([("u", pa.int64()), ("x", kind), ("t", pa.int64()), pa.field("y", kind, nullable=False)])
    schema = EventSchema.infer(arrow, user="u", time="t")
    size = 3 if trait is Trait.VECTOR else 0
    assert schema.columns == (
        ColumnSpec(1, "x", trait, dtype, "main", nullable=True, size=size),  # type: ignore[arg-type]
        ColumnSpec(2, "y", trait, dtype, "main", nullable=False, size=size),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("kind", [pa.uint64(), pa.list_(pa.date32()), pa.date32(), pa.null()])
def test_inference_refuses_a_type_without_counterpart(kind: pa.DataType) -> None:
    arrow = pa.schema([("u", pa.int64()), ("t", pa.int64()), ("x", kind)])
    with pytest.raises(SchemaError, match=r"column 'x' has type .*, which has no counterpart; cast it to one of int8"):
        EventSchema.infer(arrow, user="u", time="t")


def test_inference_leaves_out_the_roles_and_groups_the_rest() -> None:
    schema = EventSchema.infer(
        ARROW,
        user="household_id",
        time="transaction_timestamp",
        event_id="line_id",
        supersedes="corrects",
        arrival_time="committed_at",
        groups={"price": ["sales_value"]},
    )
    assert [(c.id, c.name, c.group) for c in schema.columns] == [
        (1, "product_id", "main"),
        (2, "department", "main"),
        (3, "sales_value", "price"),
    ]
    assert (schema.user_column, schema.time_column) == ("household_id", "transaction_timestamp")
    assert (schema.event_id_column, schema.event_id_dtype) == ("line_id", "string")
    assert (schema.supersedes_column, schema.arrival_time_column) == ("corrects", "committed_at")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"user": "nobody"}, "input has no column 'nobody'"),
        ({"time": "never"}, "input has no column 'never'"),
        ({"event_id": "nothing"}, "input has no column 'nothing'"),
        ({"arrival_time": ""}, "input has no column ''"),
        ({"groups": {"g": ["colour"]}}, "group 'g' names 'colour', which is no column of the events"),
        ({"groups": {"g": ["household_id"]}}, "group 'g' names 'household_id', which is no column of the events"),
        ({"groups": {"keys": ["product_id"]}}, "in group 'keys', a reserved name"),
    ],
)
def test_inference_refuses_names_that_are_not_there(more: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        EventSchema.infer(ARROW, **{"user": "household_id", "time": "transaction_timestamp", **more})


# Schema files


def test_a_toml_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(TOML, encoding="utf-8")
    assert EventSchema.load(path, ARROW) == EventSchema.load(str(path), ARROW) == EventSchema.from_toml(TOML, ARROW)


def test_a_python_file_is_run_for_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "schema.py"
    path.write_text(
        "from thinrow.schema import ColumnSpec, EventSchema, Trait\n"
        "schema = EventSchema((ColumnSpec(4, 'näme', Trait.TEXT, 'string', 'words'),), 'string')\n",
        encoding="utf-8",
    )
    assert EventSchema.load(path, ARROW) == EventSchema(
        (ColumnSpec(4, "näme", Trait.TEXT, "string", "words"),), "string"
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("s.py", b"schema = 1 / 0", "does not run: ZeroDivisionError: division by zero; mend it"),
        ("s.py", b"schema = (", "does not run: SyntaxError"),
        ("s.py", b"other = 1", "defines no `schema` of type EventSchema"),
        ("s.py", b"schema = {}", "defines no `schema` of type EventSchema"),
        (
            "s.py",
            b"from thinrow.schema import EventSchema\nschema = EventSchema((), supersedes_column='s')",
            "^supersedes needs event_id",
        ),
        ("s.toml", b"user = \xff", "is not UTF-8 text"),
        ("s.toml", b"user = ", "schema is not TOML"),
    ],
)
def test_a_schema_file_that_gives_no_schema_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SchemaError, match=message):
        EventSchema.load(tmp_path / name, ARROW)


def test_a_missing_schema_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(SchemaError, match=f"no schema file at {path}; pass --schema FILE.toml or FILE.py"):
            EventSchema.load(path, ARROW)


# Stored forms

NAMES = st.text(min_size=1, max_size=8).filter(lambda n: n not in RESERVED_NAMES)
GROUPS = st.text(min_size=1, max_size=4).filter(lambda g: g not in ("keys", "ids"))


@st.composite
def schemas(draw: st.DrawFn) -> EventSchema:
    names = draw(st.lists(NAMES, max_size=5, unique=True))
    ids = draw(st.lists(st.integers(1, 99), min_size=len(names), max_size=len(names), unique=True))
    columns = []
    for column_id, name in zip(ids, names, strict=True):
        trait = draw(st.sampled_from([t for t in Trait if TABLE[t]]))
        dtype: Any = draw(st.sampled_from(TABLE[trait]))
        size = draw(st.integers(1, 9)) if trait is Trait.VECTOR else 0
        columns.append(ColumnSpec(column_id, name, trait, dtype, draw(GROUPS), draw(st.booleans()), size))
    has_ids = draw(st.booleans())
    return EventSchema(
        tuple(columns),
        draw(st.sampled_from(["int64", "string"])),
        draw(st.integers(1, 1000)),
        draw(NAMES),
        draw(NAMES),
        draw(NAMES) if has_ids else None,
        draw(st.sampled_from(["int64", "string"])) if has_ids else None,
        draw(st.none() | NAMES) if has_ids else None,
        draw(st.none() | NAMES),
    )


@given(schemas())
def test_a_schema_comes_back_from_its_dict_and_its_json(schema: EventSchema) -> None:
    assert EventSchema.from_dict(schema.to_dict()) == schema
    again = EventSchema.from_dict(json.loads(schema.to_json()))
    assert again == schema
    assert again.to_json() == schema.to_json()


def test_the_dict_names_every_field() -> None:
    """A field added to the schema but not to its stored form would be lost without a word."""
    data = EventSchema((column(trait=Trait.VECTOR, size=2),)).to_dict()
    assert data.keys() == {f.name for f in fields(EventSchema)}
    assert data["columns"][0].keys() == {f.name for f in fields(ColumnSpec)}


GOOD = EventSchema((column(),)).to_dict()


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "schema",
        {},
        {**GOOD, "columns": 5},
        {**GOOD, "columns": [5]},
        {**GOOD, "columns": [{"trait": "id"}]},
        {**GOOD, "columns": [{**GOOD["columns"][0], "trait": "colour"}]},
        {**GOOD, "columns": [{**GOOD["columns"][0], "id": "1"}]},
        {**GOOD, "columns": [{**GOOD["columns"][0], "size": 1}]},
        {**GOOD, "columns": GOOD["columns"] * 2},
        {**GOOD, "colour": 1},
        {**GOOD, "user_kind": "uuid"},
        {**GOOD, "event_id_dtype": "int64"},
    ],
)
def test_a_dict_of_another_form_is_refused(data: Any) -> None:
    with pytest.raises(SchemaError):
        EventSchema.from_dict(data)


# Projection (the rest of it is in test_projection.py)


def test_what_a_projection_names_and_the_schema_lacks_is_a_schema_error() -> None:
    schema = EventSchema((column("a", 1), column("b", 2, group="rest")))
    with pytest.raises(SchemaError, match="no column 'c'; the schema has a, b"):
        Projection(columns=("a", "c")).resolve(schema)
    with pytest.raises(SchemaError, match="no feature group 'c'; the schema has main, rest"):
        Projection(groups=("main", "c")).resolve(schema)


def test_a_column_named_twice_is_delivered_once() -> None:
    schema = EventSchema((column("a", 1), column("b", 2)))
    assert [c.name for c in Projection(columns=("b", "b"), groups=("main",)).resolve(schema)] == ["a", "b"]


# HistoryVersion

I64 = st.integers(-(1 << 63), (1 << 63) - 1)
VERSIONS = st.builds(
    HistoryVersion, I64, I64, I64, st.integers(0, (1 << 64) - 1), I64, I64, st.integers(-(1 << 31), (1 << 31) - 1)
)


@given(VERSIONS)
def test_a_version_is_53_bytes_and_comes_back(version: HistoryVersion) -> None:
    data = version.encode()
    assert len(data) == 53 < 64
    assert HistoryVersion.decode(data) == version


def test_the_bytes_of_a_version_are_these() -> None:
    """Logged versions outlive releases: the form never changes without a new format number."""
    version = HistoryVersion(1000, 1500, 3, (1 << 64) - 1, 4, 5, 2)
    words = b"".join(n.to_bytes(8, "little") for n in (1000, 1500, 3, (1 << 64) - 1, 4, 5))
    assert version.encode() == b"\x01" + words + b"\x02\0\0\0"


@pytest.mark.parametrize("size", [0, 1, 52, 54, 64])
def test_a_version_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(InputError, match=f"an encoded version has 53 bytes, got {size}; log it whole"):
        HistoryVersion.decode((HistoryVersion().encode() + bytes(64))[:size])


@pytest.mark.parametrize("form", [0, 2, 255])
def test_a_version_of_another_format_is_refused(form: int) -> None:
    data = struct.pack("<B", form) + HistoryVersion().encode()[1:]
    with pytest.raises(InputError, match=f"version format {form} is not 1, the one known"):
        HistoryVersion.decode(data)


@given(VERSIONS)
def test_a_version_fits_the_array_of_versions(version: HistoryVersion) -> None:
    assert VERSION_DTYPE.names == tuple(f.name for f in fields(HistoryVersion))
    assert np.array([astuple(version)], VERSION_DTYPE)[0].item() == astuple(version)


# ExampleSchema

EXAMPLES = ExampleSchema.of(
    context={"age": "int8"},
    candidates={"item": "int64", "title": "string"},
    item="item",
    outcomes={"click": 60_000, "buy": 1},
)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"context": {"item": "int8"}}, "field 'item' appears twice; each must be unique"),
        ({"outcomes": {"title": 5}}, "field 'title' appears twice"),
        ({"item": "nothing"}, "item 'nothing' must be a candidate field of dtype int64"),
        ({"item": "title"}, "item 'title' must be a candidate field of dtype int64"),
        ({"context": {"key": "int64"}, "item": "key"}, "item 'key' must be a candidate field of dtype int64"),
        ({"outcomes": {"click": 0}}, "outcome 'click' has a window of 0 ms; it must be 1 or more"),
        ({"context": {"a b": "int64"}}, "field name 'a b' is not an identifier; rename it"),
        ({"context": {"": "int64"}}, "field name '' is not an identifier"),
        ({"context": {"age": "uint8"}}, "field 'age' has dtype 'uint8'; allowed: int8, "),
    ],
)
def test_an_example_schema_that_contradicts_itself_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        ExampleSchema.of(**{**EXAMPLES.to_dict(), **more})
    with pytest.raises(SchemaError, match=f"^{message}"):
        ExampleSchema.from_dict({**EXAMPLES.to_dict(), **more})


def test_an_example_schema_keeps_the_order_of_its_fields() -> None:
    assert [f.name for f in EXAMPLES.candidates] == ["item", "title"]
    assert EXAMPLES.outcomes == (("click", 60_000), ("buy", 1))
    assert ExampleSchema.of(candidates={"i": "int64"}, item="i", outcomes={}).context == ()


@given(
    st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), min_size=3, max_size=9, unique=True),
    st.data(),
)
def test_an_example_schema_comes_back_from_json(names: list[str], data: st.DataObject) -> None:
    a, b = sorted(data.draw(st.tuples(*[st.integers(1, len(names))] * 2)))
    dtypes = st.sampled_from(DTYPES)
    schema = ExampleSchema.of(
        candidates={names[0]: "int64", **{n: data.draw(dtypes) for n in names[1:a]}},
        item=names[0],
        context={n: data.draw(dtypes) for n in names[a:b]},
        outcomes={n: data.draw(st.integers(1, 1 << 40)) for n in names[b:]},
    )
    assert ExampleSchema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema


@pytest.mark.parametrize(
    "more",
    [
        {"context": 5},
        {"context": None},
        {"candidates": {5: "int64"}},
        {"outcomes": {"click": None}},
        {"outcomes": {"click": "soon"}},
        {"outcomes": []},
    ],
)
def test_an_example_dict_of_another_form_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="not an example schema: "):
        ExampleSchema.from_dict({**EXAMPLES.to_dict(), **more})


@pytest.mark.parametrize("data", [None, [], {}, {"context": {}}])
def test_an_example_schema_without_its_parts_is_refused(data: Any) -> None:
    with pytest.raises(SchemaError, match="not an example schema: "):
        ExampleSchema.from_dict(data)


def test_a_nul_in_a_name_is_refused() -> None:
    arrow = pa.schema({"user": pa.int64(), "ts": pa.int64(), "a\0b": pa.int64()})
    with pytest.raises(SchemaError, match=r"column name 'a\\x00b' .*NUL.*leave it out"):
        EventSchema.infer(arrow, user="user", time="ts")
    arrow = pa.schema({"user": pa.int64(), "ts": pa.int64(), "a": pa.int64()})
    with pytest.raises(SchemaError, match=r"group name '\\x00overlay 1' of column 'a' .*NUL"):
        EventSchema.infer(arrow, user="user", time="ts", groups={"\0overlay 1": ["a"]})
