"""The block codec: every value comes back under every schema, a cut block equals its rows, a flipped bit is found."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import CorruptionError, InputError, NewerFormatError
from thinrow.history.recent.keys import arrival_keys, is_sealed, seal, user_keys, users_of_keys
from thinrow.history.recent.rows import (
    HEADER_DTYPE,
    Rows,
    block_bounds,
    decode_blocks,
    encode_blocks,
    schema_id_of,
    split_block,
)
from thinrow.jagged import Column
from thinrow.jagged.column import ARROW_TYPES
from thinrow.schema import ColumnSpec, EventSchema, Trait

TRAITS = {"string": Trait.CATEGORICAL, "binary": Trait.TEXT, "float32": Trait.NUMERIC, "float64": Trait.NUMERIC}
texts = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = {
    "int8": st.integers(-(2**7), 2**7 - 1),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "string": texts,
    "binary": st.binary(max_size=12),
}


def column_of(values, dtype, ragged=False, size=0):
    kind = ARROW_TYPES[dtype]
    kind = pa.list_(kind, size) if size else pa.list_(kind) if ragged else kind
    return Column.from_arrow(pa.array(values, kind), dtype, ragged=ragged, size=size)


@st.composite
def specs(draw, i):
    """A column of any trait."""
    dtype, nullable = draw(st.sampled_from(sorted(VALUES))), draw(st.booleans())
    trait, size = TRAITS.get(dtype, Trait.ID), 0
    if dtype not in ("string", "binary") and draw(st.booleans()):
        trait, size = Trait.VECTOR, draw(st.integers(1, 3))
    elif not dtype.startswith(("float", "binary")) and draw(st.booleans()):
        trait = Trait.ID_LIST
    return ColumnSpec(i + 1, f"c{i}", trait, dtype, "g", nullable, size)


def values_of(spec):
    values = VALUES[spec.dtype]
    if spec.ragged:
        return st.lists(values, max_size=4)
    return st.lists(values, min_size=spec.size, max_size=spec.size) if spec.size else values


@st.composite
def schemas(draw):
    columns = tuple(draw(specs(i)) for i in range(draw(st.integers(0, 10))))
    ids = draw(st.sampled_from([None, "int64", "string"]))
    return EventSchema(
        columns, event_id_column=ids and "id", event_id_dtype=ids, schema_id=draw(st.integers(1, 2**31 - 1))
    )


@st.composite
def written(draw):
    """A schema, rows of it, and how they are cut into blocks."""
    schema = draw(schemas())
    n = draw(st.integers(1, 12))

    def some(spec):
        each = st.none() | values_of(spec) if spec.nullable else values_of(spec)
        rows = draw(st.lists(each, min_size=n, max_size=n))
        return column_of(rows, spec.dtype, spec.ragged, spec.size)

    times = st.lists(st.integers(0, 2**63 - 1), min_size=n, max_size=n)
    targets = draw(st.booleans())
    ids = schema.event_id_dtype and draw(
        st.sampled_from([None, some(ColumnSpec(99, "id", Trait.ID, schema.event_id_dtype, "g", True))])
    )
    rows = Rows(
        np.array(draw(times)),
        np.array(draw(times)) if targets else None,
        np.array(draw(times)) if targets else None,
        ids or None,
        {c.name: some(c) for c in schema.columns},
    )
    cuts = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    return schema, rows, np.array([0, *cuts, n])


def encoded(schema, rows, bounds):
    first = 1 + bounds[:-1]
    keys = [user_keys(np.array([7]))[0] + a for a in arrival_keys(first)]
    return keys, encode_blocks(schema, rows, bounds, first, keys)


def listed(schema, rows):
    n = len(rows.event_ts)
    ids = [None] * n if rows.event_ids is None else rows.event_ids.to_arrow().to_pylist()
    targets = [(0, 0)] * n
    if rows.target_ts is not None:
        targets = list(zip(rows.target_ts.tolist(), rows.target_arrival.tolist(), strict=True))
    columns = [rows.columns[c.name].to_arrow().to_pylist() for c in schema.columns]
    return list(zip(rows.event_ts.tolist(), targets, ids, *columns, strict=True))


@given(written())
@settings(max_examples=150, deadline=None)
def test_every_value_comes_back(case):
    schema, rows, bounds = case
    keys, values = encoded(schema, rows, bounds)
    found = decode_blocks(schema, lambda i: None, keys, values, "file")
    assert found.counts.tolist() == np.diff(bounds).tolist()
    assert found.arrival.tolist() == list(range(1, bounds[-1] + 1))
    assert listed(schema, found.rows) == listed(schema, rows)
    assert {schema_id_of(v) for v in values} == {schema.schema_id}


@given(written(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_cut_block_holds_the_rows_above(case, data):
    schema, rows, _ = case
    n = len(rows.event_ts)
    [key], [value] = encoded(schema, rows, np.array([0, n]))
    through = data.draw(st.integers(1, n + 2))
    new_key = key[:-8] + (through + 1).to_bytes(8, "big")
    rest = split_block(schema, key, value, through, "file", new_key)
    if through >= n:
        assert rest is None
    else:
        found = decode_blocks(schema, lambda i: None, [new_key], [rest], "file")
        assert found.arrival.tolist() == list(range(through + 1, n + 1))
        assert listed(schema, found.rows) == listed(schema, rows)[through:]


@given(written(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_flipped_bit_names_file_and_user(case, data):
    schema, rows, bounds = case
    keys, values = encoded(schema, rows, bounds)
    which = data.draw(st.integers(0, len(values) - 1))
    bit = data.draw(st.integers(0, 8 * len(values[which]) - 1))
    damaged = bytearray(values[which])
    damaged[bit // 8] ^= 1 << bit % 8
    values[which] = bytes(damaged)
    with pytest.raises(CorruptionError, match=r"file recent.mdb, user 7") as caught:
        decode_blocks(schema, lambda i: None, keys, values, "recent.mdb")
    assert (caught.value.file, caught.value.user) == ("recent.mdb", 7)


@given(written(), written())
@settings(max_examples=60, deadline=None)
def test_blocks_of_several_schemas_are_read_together(first, second):
    """Columns are matched by id; a column that the older schema lacks is null; arrival order is kept."""
    old, old_rows, _ = first
    n = len(old_rows.event_ts)
    # Same ids must keep their dtypes, so the newer schema is the older one's columns and those of the other case.
    extra = tuple(
        ColumnSpec(c.id + 100, f"d{c.id}", c.trait, c.dtype, c.group, c.nullable, c.size) for c in second[0].columns
    )
    new = EventSchema(
        (*extra, *old.columns[1:]),
        event_id_column="id",
        event_id_dtype=old.event_id_dtype or "int64",
        schema_id=0x7FFFFFFE,
    )
    if old.schema_id >= new.schema_id:
        return
    m = len(second[1].event_ts)
    take = np.arange(m) % n
    new_rows = Rows(
        second[1].event_ts,
        second[1].target_ts,
        second[1].target_arrival,
        None,
        {
            **{f"d{c.id}": second[1].columns[c.name] for c in second[0].columns},
            **{c.name: old_rows.columns[c.name].take(take) for c in old.columns[1:]},
        },
    )
    a_keys, a = encoded(old, old_rows, np.array([0, n]))
    b_keys, b = encoded(new, new_rows, np.array([0, m]))
    found = decode_blocks(new, {old.schema_id: old}.get, b_keys + a_keys + b_keys, b + a + b, "file")
    assert found.counts.tolist() == [m, n, m]
    rows = listed(new, found.rows)
    assert rows[:m] == rows[m + n :] == listed(new, new_rows)
    ids = [None] * n if old_rows.event_ids is None else old_rows.event_ids.to_arrow().to_pylist()
    for row, expected, name in zip(rows[m : m + n], listed(old, old_rows), ids, strict=True):
        assert row[:2] == expected[:2]
        assert row[2] == name
        assert row[3:] == (*[None] * len(extra), *expected[4:])


def test_unknown_schema_newer_format_and_wrong_lengths():
    schema = EventSchema((ColumnSpec(1, "a", Trait.ID, "int64", "g"),))
    rows = Rows(np.array([5]), None, None, None, {"a": column_of([1], "int64")})
    [key], [value] = encoded(schema, rows, np.array([0, 1]))

    def resealed(**changes):
        header = np.frombuffer(value[: HEADER_DTYPE.itemsize], HEADER_DTYPE).copy()
        for name, number in changes.items():
            header[name] = number
        return seal(key, header.tobytes() + value[HEADER_DTYPE.itemsize : -4])

    for changes, error, message in (
        ({"format": 3}, NewerFormatError, "format 3, newer than 2"),
        ({"schema_id": 9}, CorruptionError, "schema 9, which is not stored"),
        ({"n": 2}, CorruptionError, "length does not follow from its header"),
        ({"flags": 2}, CorruptionError, "length does not follow from its header"),
    ):
        with pytest.raises(error, match=message):
            decode_blocks(schema, lambda i: None, [key], [resealed(**changes)], "file")
    # A value under another's key is damage too.
    with pytest.raises(CorruptionError, match="user 8"):
        decode_blocks(schema, lambda i: None, [user_keys(np.array([8]))[0] + key[-8:]], [value], "file")
    with pytest.raises(CorruptionError):
        decode_blocks(schema, lambda i: None, [key], [b""], "file")


@given(st.lists(st.lists(st.integers(0, 700), min_size=1, max_size=6), max_size=3))
def test_block_bounds_cut_each_user(groups):
    for counts in groups:
        offsets = np.concatenate([[0], np.cumsum(counts)])
        bounds, user = block_bounds(offsets)
        expected = [(u, a) for u, c in enumerate(counts) for a in range(offsets[u], offsets[u] + c, 256)]
        assert list(zip(user.tolist(), bounds[:-1].tolist(), strict=True)) == expected
        assert bounds[-1] == offsets[-1]


long_texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.lists(long_texts, min_size=1))
def test_keys_sort_as_users_do_and_none_is_a_prefix_of_another(numbers, strings):
    text = np.empty(len(strings), object)
    text[:] = strings
    for users, kind in ((np.array(numbers), "int64"), (text, "string")):
        keys = user_keys(users)
        assert users_of_keys(keys, kind).tolist() == users.tolist()
        assert users_of_keys(sorted(keys), kind).tolist() == sorted(users.tolist())
        distinct = sorted(set(keys))
        assert not any(b.startswith(a) for a, b in pairwise(distinct))


@given(st.binary(), st.binary(), st.binary())
def test_a_seal_holds_for_one_key_and_one_body(key, body, other):
    assert is_sealed(key, seal(key, body))
    assert is_sealed(other, seal(key, body)) == (other == key) or len(other) != len(key)


def test_more_strings_than_arrow_can_address_are_refused(monkeypatch):
    monkeypatch.setattr("thinrow.history.recent.rows._MAX_HEAP_BYTES", 5)
    schema = EventSchema((ColumnSpec(1, "a", Trait.TEXT, "string", "g"), ColumnSpec(2, "b", Trait.TEXT, "binary", "g")))
    for a, fits in (("x", True), ("xyz", False)):
        rows = Rows(
            np.array([5]), None, None, None, {"a": column_of([a], "string"), "b": column_of([b"123"], "binary")}
        )
        if fits:
            encoded(schema, rows, np.array([0, 1]))
        else:
            with pytest.raises(InputError, match="append fewer rows a call"):
                encoded(schema, rows, np.array([0, 1]))
