"""The block codec: every value comes back under every schema, a cut block equals its rows, a flipped bit is found."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import CorruptionError, InputError, NewerFormatError
from thinrow.history.recent.keys import NO_ROWS, group_by_number, is_sealed, pack_pairs, seal, user_keys, users_of_keys
from thinrow.history.recent.opened import open_blocks
from thinrow.history.recent.rows import (
    HEADER_DTYPE,
    Rows,
    decode_blocks,
    encode_rows,
    number_rows,
    schema_id_of,
    split_block,
)
from thinrow.jagged import Column
from thinrow.jagged.column import ARROW_TYPES
from thinrow.kernels.dispatch import BACKENDS, kernel, use
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
    """Keys and values of blocks cut at ``bounds``, of one user."""
    n, [key] = len(rows.event_ts), user_keys(np.array([7]))
    blocks = []
    for a, b in pairwise(bounds.tolist()):
        held = dict(zip([key], pack_pairs(np.array([a]), np.array([0])), strict=True))
        cut = encode_rows(schema, rows.take(np.arange(a, b)))
        blocks += number_rows(cut, [key], held, np.array([0]), np.array([0, b - a]), NO_ROWS, "file").blocks
    assert sum(b - a for a, b in pairwise(bounds.tolist())) == n
    return [key for key, _ in blocks], [value for _, value in blocks]


def listed(schema, rows):
    n = len(rows.event_ts)
    ids = [None] * n if rows.event_ids is None else rows.event_ids.to_arrow().to_pylist()
    targets = [(0, 0)] * n
    if rows.target_ts is not None:
        targets = list(zip(rows.target_ts.tolist(), rows.target_arrival.tolist(), strict=True))
    columns = [rows.columns[c.name].to_arrow().to_pylist() for c in schema.columns]
    return list(zip(rows.event_ts.tolist(), targets, ids, *columns, strict=True))


@given(written())
@settings(max_examples=150)
def test_every_value_comes_back(case):
    schema, rows, bounds = case
    keys, values = encoded(schema, rows, bounds)
    found = decode_blocks(schema, lambda i: None, keys, values, "file")
    assert found.counts.tolist() == np.diff(bounds).tolist()
    assert found.arrival.tolist() == list(range(1, bounds[-1] + 1))
    assert listed(schema, found.rows) == listed(schema, rows)
    assert {schema_id_of(v) for v in values} == {schema.schema_id}


@given(written(), st.data())
@settings(max_examples=100)
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
@settings(max_examples=100)
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
@settings(max_examples=60)
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


@given(written(), st.data())
@settings(max_examples=150)
def test_blocks_opened_in_one_call_are_those_decoded_one_by_one(case, data):
    schema, rows, bounds = case
    keys, values = encoded(schema, rows, bounds)
    n_blocks = len(keys)
    cut = data.draw(st.integers(0, n_blocks))
    blocks, after = np.array([cut, 0, n_blocks - cut]), np.array(data.draw(st.tuples(*[st.integers(0, 14)] * 3)))
    newer = schema
    if data.draw(st.booleans()) and schema.columns and schema.schema_id < 2**31 - 1:
        extra = ColumnSpec(77, "extra", Trait.ID, "int8", "g", True)
        widened = [replace(c, dtype="int64") if c.dtype in ("int8", "int16", "int32") else c for c in schema.columns]
        newer = replace(schema, columns=(extra, *widened[1:]), schema_id=schema.schema_id + 1)
    schemas_held = {schema.schema_id: schema, newer.schema_id: newer}
    decoded = decode_blocks(newer, schemas_held.get, keys, values, "file")
    user = np.repeat(np.repeat(np.arange(3), blocks), decoded.counts)
    keep = np.flatnonzero(decoded.arrival > after[user])
    for backend in BACKENDS:
        with use(backend):
            found = open_blocks(newer, schemas_held.get, blocks, after, keys, values)
        if any(c.ragged or c.is_bytes for c in schema.columns) or schema.event_id_dtype == "string":
            assert found is None
            continue
        opened, arrival, offsets = found
        assert arrival.tolist() == decoded.arrival[keep].tolist()
        assert offsets.tolist() == np.searchsorted(user[keep], np.arange(4)).tolist()
        expected = decoded.rows.take(keep)
        assert listed(newer, opened) == listed(newer, expected)
        for c in newer.columns:
            a, b = opened.columns[c.name], expected.columns[c.name]
            assert (a.values.dtype, a.values.shape) == (b.values.dtype, b.values.shape)
        # Another kind of block among them, a newer one, or a flipped bit: it says nothing.
        at = data.draw(st.integers(0, n_blocks - 1))
        bit = data.draw(st.integers(0, 8 * len(values[at]) - 1))
        flipped = bytearray(values[at])
        flipped[bit // 8] ^= 1 << bit % 8
        with use(backend):
            damaged = [*values[:at], bytes(flipped), *values[at + 1 :]]
            assert open_blocks(newer, schemas_held.get, blocks, after, keys, damaged) is None
            older = replace(schema, schema_id=schema.schema_id - 1)
            assert open_blocks(older, schemas_held.get, blocks, after, keys, values) is None


events_seen = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 4)), max_size=8)


@given(events_seen, st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=4, max_size=4))
def test_recent_events_follow_what_was_there_as_the_reference_says(rows, limits):
    rows = sorted(rows, key=lambda r: r[0])
    user, ts, arrival = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    offsets = np.searchsorted(user, np.arange(5)).astype(np.int64)
    request_ts, bound, above = np.array(limits).T.copy()
    expected = True
    for u in range(4):
        mine = [(t, a) for w, t, a in rows if w == u]
        expected &= all(x < y for x, y in pairwise(mine))
        expected &= all(t < request_ts[u] and above[u] < a <= bound[u] for t, a in mine)
    for backend in BACKENDS:
        with use(backend):
            assert kernel("follows")(ts, arrival, offsets, request_ts, bound, above) == expected


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


@st.composite
def calls(draw):
    """Rows of users, of each of whom a pair is held or not, and floors."""
    counts = draw(st.lists(st.integers(0, 5) | st.integers(250, 530), min_size=1, max_size=5))
    n_users, offsets = len(counts), np.concatenate([[0], np.cumsum(counts)])
    if draw(st.booleans()):
        users = np.sort(
            np.array(
                list(draw(st.sets(st.integers(-(2**63), 2**63 - 1), min_size=n_users, max_size=n_users))), np.int64
            )
        )
    else:
        users = np.empty(n_users, object)
        users[:] = sorted(draw(st.sets(texts.filter(bool), min_size=n_users, max_size=n_users)))
    keys = user_keys(users)
    pairs = st.tuples(st.integers(0, 2**41) | st.just(2**63 - 2), st.integers(0, 2**41))
    drawn = draw(st.lists(st.none() | pairs, min_size=n_users, max_size=n_users))
    known = [(key, pair) for key, pair in zip(keys, drawn, strict=True) if pair]
    a, b = np.array([p for _, p in known], np.int64).reshape(-1, 2).T
    held = dict(zip([k for k, _ in known], pack_pairs(a, b), strict=True))
    floors = draw(
        st.lists(st.integers(0, 2**42), min_size=1, max_size=1)
        | st.lists(st.integers(0, 2**42), min_size=n_users, max_size=n_users)
    )
    n = int(offsets[-1])
    id_rows = np.array(sorted(draw(st.sets(st.integers(0, n - 1)))) if n else [], np.int64)
    schema = EventSchema(
        (ColumnSpec(1, "c", *draw(st.sampled_from([(Trait.ID, "int16"), (Trait.ID, "string")])), "g"),)
    )
    values = np.arange(n) % 7
    column = (
        Column(values.astype(np.int16))
        if schema.columns[0].dtype == "int16"
        else column_of([str(v) for v in values], "string")
    )
    encoded_rows = encode_rows(schema, Rows(np.arange(n) * 3, None, None, None, {"c": column}))
    return encoded_rows, keys, held, np.array(floors), offsets, id_rows, "file"


@given(calls())
@settings(max_examples=100)
def test_rows_are_numbered_and_cut_as_the_reference_does(call):
    found = number_rows(*call)
    with use("reference"):
        expected = number_rows(*call)
    assert found.arrivals.tolist() == expected.arrivals.tolist()
    assert (found.pairs, found.blocks, found.over) == (expected.pairs, expected.blocks, expected.over)
    _, keys, held, floors, offsets, _, _ = call
    if found.over < 0:
        assert all(is_sealed(key, value) for key, value in found.blocks)
        starts = [(u, a) for u in range(len(keys)) for a in range(offsets[u], offsets[u + 1], 256)]
        assert [key for key, _ in found.blocks] == [
            keys[u] + int(found.arrivals[a]).to_bytes(8, "big") for u, a in starts
        ]
        counter = {key: int.from_bytes(pair[:8], "little") for key, pair in held.items()}
        for u, key in enumerate(keys):
            floor = int(floors[u if len(floors) > 1 else 0])
            first = max(counter.get(key, floor), floor >> 40 << 40) + 1
            mine = found.arrivals[offsets[u] : offsets[u + 1]].tolist()
            assert mine == list(range(first, first + len(mine)))


@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2), st.integers(-1, 2**63 - 1))), st.booleans()
)
@settings(max_examples=100)
def test_users_are_grouped_as_the_reference_does(rows, with_ids):
    users, times = np.array(rows, np.int64).reshape(-1, 2).T
    ids = times if with_ids else NO_ROWS
    found, sound, id_keys = group_by_number(users, times, ids)
    with use("reference"):
        expected, also_sound, also_keys = group_by_number(users, times, ids)
    assert (found.users.tolist(), found.keys, found.offsets.tolist()) == (
        expected.users.tolist(), expected.keys, expected.offsets.tolist()
    )  # fmt: skip
    assert (sound, id_keys) == (also_sound, also_keys)
    assert sound == all(0 <= t < 2**63 - 2 for t in times.tolist())
    order = np.argsort(users, kind="stable")
    assert found.users.tolist() == sorted(set(users.tolist()))
    assert found.order is None or found.order.tolist() == order.tolist()
    assert id_keys == (
        [a + b for a, b in zip(user_keys(users[order]), user_keys(times[order]), strict=True)] if with_ids else []
    )


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
