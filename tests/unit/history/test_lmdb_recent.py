"""What LmdbRecent adds to the contract: one environment a process, a growing map, checked meta, schemas that evolve."""

import gc
import os
import subprocess
import sys
from dataclasses import replace

import lmdb
import numpy as np
import pytest

from thinrow.core.errors import CorruptionError, NewerFormatError, SchemaError, StoreError, UserKindError
from thinrow.history.recent import LmdbRecent
from thinrow.history.recent.keys import seal
from thinrow.schema import ColumnSpec, EventSchema, Trait
from thinrow.testing.recent_model import (
    append_rows,
    column_of,
    contract_schema,
    hides_of,
    listed,
    read,
    users_of,
    values_of,
)

SCHEMA = contract_schema()


def row(user, i, name=None, supersedes=None):
    return (user, i, name, supersedes, values_of(i))


@pytest.fixture
def path(tmp_path):
    """A tier with two events of user 1."""
    with LmdbRecent(tmp_path / "recent", SCHEMA) as tier:
        append_rows(tier, [row(1, 1, 11), row(1, 2, 12, 11)])
    return tmp_path / "recent"


def edit(path, database, change):
    """``change(key, value)`` -> new value, over a database of a closed tier."""
    env = lmdb.open(str(path), max_dbs=8)
    db = env.open_db(database.encode())
    with env.begin(write=True) as txn:
        for key, value in list(txn.cursor(db)):
            txn.put(key, change(key, value), db=db)
    env.close()


def test_a_second_open_in_one_process_is_refused(path):
    with LmdbRecent(path, SCHEMA) as tier:
        with pytest.raises(StoreError, match="open in this process already; share that LmdbRecent"):
            LmdbRecent(path, SCHEMA)
        link = path.parent / "link"
        link.symlink_to(path)
        with pytest.raises(StoreError, match="open in this process already"):
            LmdbRecent(link, SCHEMA)
        assert read(tier, [1]).top.tolist() == [2]
    LmdbRecent(path, SCHEMA).close()


def test_a_forgotten_tier_frees_its_directory(path):
    LmdbRecent(path, SCHEMA)
    gc.collect()
    LmdbRecent(path, SCHEMA).close()


def test_a_failed_open_frees_its_directory(path):
    with pytest.raises(UserKindError, match="holds int64 user ids, the schema says string"):
        LmdbRecent(path, contract_schema("string"))
    LmdbRecent(path, SCHEMA).close()


def test_a_tier_from_before_a_fork_says_so(path):
    with LmdbRecent(path, SCHEMA) as tier:
        tier._pid = os.getpid() + 1
        with pytest.raises(StoreError, match="open it after the fork"):
            tier.users()
        tier._pid = os.getpid()


def test_the_map_grows_and_nothing_is_lost(tmp_path):
    with LmdbRecent(tmp_path / "recent", SCHEMA, map_size=1 << 16) as tier:
        for call in range(4):
            append_rows(tier, [row(i % 50, i, call * 3000 + i) for i in range(3000)])
        assert tier._env.info()["map_size"] > 1 << 19
        assert read(tier, list(range(50))).top.tolist() == [240] * 50
        assert append_rows(tier, [row(i % 50, i, i) for i in range(3000)]).duplicate.all()


def test_a_map_that_another_process_made_larger_is_adopted(tmp_path):
    script = (
        "import sys; from thinrow.history.recent import LmdbRecent; from thinrow.testing.recent_model import *\n"
        "with LmdbRecent(sys.argv[1], contract_schema(), map_size=1 << 18) as t:\n"
        "    append_rows(t, [(int(sys.argv[2]), i, None, None, values_of(i)) for i in range(9000)])\n"
    )

    def other(user):
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "recent"), str(user)], check=True)

    with LmdbRecent(tmp_path / "recent", SCHEMA, map_size=1 << 18) as tier:
        other(5)
        found = read(tier, [5])
        assert found.top.tolist() == [9000]
        assert found.events.arrival.tolist() == list(range(1, 9001))
        other(6)
        other(7)
        assert append_rows(tier, [row(6, 1), row(7, 1)]).arrivals.tolist() == [9001, 9001]


def test_a_foreign_environment_is_refused(tmp_path):
    env = lmdb.open(str(tmp_path / "other"))
    with env.begin(write=True) as txn:
        txn.put(b"a", b"b")
    env.close()
    with pytest.raises(StoreError, match="not a recent tier; choose another directory"):
        LmdbRecent(tmp_path / "other", SCHEMA)


def test_a_file_that_is_no_environment_is_damage(tmp_path):
    (tmp_path / "recent").mkdir()
    (tmp_path / "recent" / "data.mdb").write_bytes(b"x" * 10_000)
    with pytest.raises(CorruptionError, match="recent"):
        LmdbRecent(tmp_path / "recent", SCHEMA)


def test_newer_formats_are_refused(path):
    edit(path, "meta", lambda key, value: seal(key, b"3") if key == b"format" else value)
    with pytest.raises(NewerFormatError, match="recent format 3, newer than 2"):
        LmdbRecent(path, SCHEMA)


@pytest.mark.parametrize("name", ["format", "user_kind", "schema:1"])
def test_damaged_meta_is_found(path, name):
    edit(path, "meta", lambda key, value: bytes([value[0] ^ 1]) + value[1:] if key == name.encode() else value)
    with pytest.raises(CorruptionError, match=name):
        LmdbRecent(path, SCHEMA)


def test_damaged_blocks_counters_and_ids_are_found(path):
    def flip(key, value):
        return value[:9] + bytes([value[9] ^ 8]) + value[10:]

    edit(path, "events", flip)
    with LmdbRecent(path, SCHEMA) as tier:
        for call in (lambda: read(tier, [1]), lambda: tier.trim(np.array([1]), np.array([1]))):
            with pytest.raises(CorruptionError, match=f"file {path}, user 1"):
                call()
        assert tier.users().tolist() == [1]
    edit(path, "events", flip)
    edit(path, "ids", flip)
    with LmdbRecent(path, SCHEMA) as tier:
        with pytest.raises(CorruptionError, match="event ids fail"):
            append_rows(tier, [row(1, 3, 11)])
        assert read(tier, [1]).top.tolist() == [2]
    edit(path, "users", flip)
    with LmdbRecent(path, SCHEMA) as tier, pytest.raises(CorruptionError, match="user counters fail"):
        read(tier, [1])


def test_added_columns_are_null_and_dropped_ones_vanish(path):
    columns = (
        *(c for c in SCHEMA.columns if c.name not in ("shop", "note")),
        ColumnSpec(19, "brand", Trait.CATEGORICAL, "string", "item", nullable=True),
        ColumnSpec(20, "rank", Trait.NUMERIC, "int16", "item", nullable=True),
    )
    # A renamed column keeps its id.
    columns = tuple(replace(c, name="article") if c.name == "item" else c for c in columns)
    later = replace(SCHEMA, columns=columns, schema_id=2)
    values = dict(zip((c.name for c in SCHEMA.columns), values_of(3), strict=True))
    with LmdbRecent(path, later) as tier:
        given = {"article": 77, "brand": "b", "rank": 5}
        new = {
            c.name: column_of([given.get(c.name, values.get(c.name))], c.dtype, ragged=c.ragged, size=c.size)
            for c in columns
        }
        tier.append(np.array([1]), np.array([3]), new, None, column_of([12], "int64"), None)
        tier.append(np.array([2]), np.array([3]), new)
        found = read(tier, [2, 1])
        assert list(found.events.columns) == [c.name for c in columns]
        assert found.events.columns["brand"].to_arrow().to_pylist() == ["b", None, None, "b"]
        assert found.events.columns["rank"].to_arrow().to_pylist() == [5, None, None, 5]
        assert found.events.columns["article"].to_arrow().to_pylist() == [77, -2, -1, 77]
        assert found.events.arrival.tolist() == [1, 1, 2, 3]
        assert hides_of(found) == {2: [], 1: [(1, 1, 2), (2, 2, 3)]}
        # A block of the older schema is cut by that schema.
        tier.trim(np.array([1]), np.array([1]))
        assert read(tier, [1]).events.columns["article"].to_arrow().to_pylist() == [-1, 77]
    with LmdbRecent(path, SCHEMA) as tier:
        assert [e[0] for e in listed(read(tier, [1]))[1]] == [2, 3]


def test_schemas_that_contradict_stored_ones_are_refused(path):
    changed = (replace(SCHEMA.columns[0], dtype="int32"), *SCHEMA.columns[1:])
    for schema, message in (
        (replace(SCHEMA, columns=SCHEMA.columns[1:]), "raise schema_id when columns change"),
        (replace(SCHEMA, columns=changed, schema_id=2), r"id 1\) is int32, but the tier holds int64"),
        (replace(SCHEMA, event_id_dtype="string", schema_id=2), "event ids are string, but the tier holds int64"),
    ):
        with pytest.raises(SchemaError, match=message):
            LmdbRecent(path, schema)


def test_a_schema_may_gain_ids(tmp_path):
    plain = EventSchema((ColumnSpec(1, "a", Trait.ID, "int64", "g"),))
    with LmdbRecent(tmp_path / "recent", plain) as tier:
        tier.append(np.array([1]), np.array([5]), {"a": column_of([1], "int64")})
    later = replace(plain, event_id_column="id", event_id_dtype="string", schema_id=2)
    with LmdbRecent(tmp_path / "recent", later) as tier:
        tier.append(np.array([1]), np.array([6]), {"a": column_of([2], "int64")}, column_of(["x"], "string"))
        found = read(tier, [1])
        assert found.event_ids.to_arrow().to_pylist() == [None, "x"]


def test_string_users_with_nul_are_kept_apart_on_disk(tmp_path):
    schema = contract_schema("string")
    users = ["a", "a\0", "a\0\0", "a\1"]
    with LmdbRecent(tmp_path / "recent", schema) as tier:
        for i, user in enumerate(users):
            append_rows(tier, [(user, j, None, None, values_of(j)) for j in range(i + 1)])
        tier.trim(users_of(["a\0"], "string"), np.array([1]))
        assert read(tier, users).events.lengths.tolist() == [1, 1, 3, 4]
