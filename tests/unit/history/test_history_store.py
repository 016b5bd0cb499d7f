"""HistoryStore: numbering, empty stores, lost counters, added columns, and a create that was cut short."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import (
    DuplicateEventError,
    InputError,
    SchemaError,
    StoreError,
    StoreExists,
    StoreNotFound,
    UnknownEventError,
    UserKindError,
)
from thinrow.core.units import EPOCH_BITS
from thinrow.history.archive import stepwise
from thinrow.history.reconstruct import Reconstruction, reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait

ITEM = ColumnSpec(1, "item", Trait.ID, "int64", "main")
EPOCH = 1 << EPOCH_BITS
PLAIN = EventSchema((ITEM,))
WITH_IDS = EventSchema(
    (ITEM,), event_id_column="event_id", event_id_dtype="int64", supersedes_column="supersedes", schema_id=1
)
ARRIVING = EventSchema((ITEM,), arrival_time_column="arrived")


def events(rows: list[tuple[Any, ...]], *names: str) -> pa.Table:
    """A table of (user, event_ts, item, and what ``names`` says)."""
    columns = dict(zip(("user_id", "event_ts", "item", *names), zip(*rows, strict=True), strict=True))
    return pa.table({n: pa.array(v, pa.int64()) if n != "user_id" else pa.array(v) for n, v in columns.items()})


def seen(built: Reconstruction, *names: str) -> list[list[Any]]:
    """Per example its events, oldest first: a tuple of the values of ``names`` each, or the value of the one name."""
    columns = [built.histories.to_jagged(n).to_arrow().to_pylist() for n in names]
    if len(names) == 1:
        return columns[0]  # type: ignore[no-any-return]
    return [list(zip(*example, strict=True)) for example in zip(*columns, strict=True)]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with HistoryStore.create(tmp_path / "s", PLAIN, n_buckets=2, sync=False) as store:
        yield store


def test_an_empty_store(store: HistoryStore) -> None:
    assert len(store.users()) == 0
    assert store.compact().generation == 1
    assert store.compact(full=True).generation == 1
    built = store.read([1, 2], 10)
    assert seen(built, "item") == [[], []]
    version = store.snapshot([1], 10).requests.versions[0]
    assert [int(version[n]) for n in ("seq_len", "checksum", "last_arrival", "snapshot_arrival")] == [0, 0, 0, 0]
    none = store.snapshot(np.empty(0, np.int64), 10)
    assert len(none.requests) == 0
    assert len(reconstruct(none.generation, none.requests).histories) == 0
    assert len(store.append(events([(1, 1, 1)]).slice(0, 0)).arrivals) == 0
    assert store.verify_recent() == []


def test_a_user_without_events_beside_one_with(store: HistoryStore) -> None:
    store.append(events([(5, 1, 50), (5, 2, 51)]))
    for _ in range(2):
        assert seen(store.read([4, 5, 6], 10), "item") == [[], [50, 51], []]
        store.compact()
    assert store.users().tolist() == [5]


def test_request_time_is_exclusive(store: HistoryStore) -> None:
    store.append(events([(1, 5, 50), (1, 6, 60)]))
    for _ in range(2):
        assert [seen(store.read([1], t), "item")[0] for t in (5, 6, 7)] == [[], [50], [50, 60]]
        store.compact()


def test_newest_are_kept_oldest_dropped(store: HistoryStore) -> None:
    store.append(events([(1, t, t) for t in range(10)]))
    store.compact()
    store.append(events([(1, 10, 10)]))
    assert seen(store.read([1], 99, Projection(max_len=3)), "item") == [[8, 9, 10]]
    assert seen(store.read([1], 9, Projection(max_len=3)), "item") == [[6, 7, 8]]


def test_a_snapshot_wants_users_of_the_stores_kind(store: HistoryStore) -> None:
    with pytest.raises(UserKindError, match="'a' is of kind string, but this store holds int64"):
        store.snapshot(["a"], 5)


# --- bulk load ------------------------------------------------------------------------------------------------------


def test_bulk_load_numbers_by_arrival_time_then_input_order(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", ARRIVING, n_buckets=2) as store:
        store.append(events([(1, 100, 0, 5)], "arrived"))
        # (user, event_ts, item, arrived): items say the number that each should get.
        report = store.bulk_load(
            events([(1, 9, 4, 30), (1, 3, 2, 10), (2, 1, 1, 99), (1, 9, 3, 10), (2, 1, 2, 99)], "arrived")
        )
        assert report.events == 6, "the recent event moves with them"
        assert len(store.recent.users()) == 0
        assert seen(store.read([1, 2], 200), "event_ts", "arrival", "item") == [
            [(3, 2, 2), (9, 3, 3), (9, 4, 4), (100, 1, 0)],
            [(1, 1, 1), (1, 2, 2)],
        ]
        # Later appends go on after it, and may be loaded in bulk again.
        assert store.append(events([(1, 1, 0, 0), (3, 1, 0, 0)], "arrived")).arrivals.tolist() == [5, 1]
        store.bulk_load(events([(1, 0, 9, 0)], "arrived"))
        assert seen(store.read([1], 2), "arrival") == [[6, 5]]


def test_bulk_load_wants_no_event_ids(tmp_path: Path) -> None:
    with (
        HistoryStore.create(tmp_path / "s", WITH_IDS) as store,
        pytest.raises(InputError, match="use append, then compact"),
    ):
        store.bulk_load(events([(1, 1, 1, 1, None)], "event_id", "supersedes"))


# --- lost and stale counters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["append", "bulk_load"])
def test_numbers_go_on_after_the_archive_where_the_recent_tier_was_lost(tmp_path: Path, how: str) -> None:
    path = tmp_path / "s"
    with HistoryStore.create(path, PLAIN, n_buckets=2) as store:
        store.append(events([(1, 1, 10), (1, 2, 11), (2, 1, 20)]))
        store.compact()
        logged = store.snapshot([1, 2], 50).requests
    shutil.rmtree(path / "recent")
    with HistoryStore.open(path) as store:
        assert seen(store.read([1, 2], 50), "item") == [[10, 11], [20]]
        new = events([(1, 5, 12), (3, 5, 30)])
        store.append(new) if how == "append" else store.bulk_load(new)
        for _ in range(2):
            assert seen(store.read([1, 2, 3], 50), "arrival", "item") == [
                [(1, 10), (2, 11), (EPOCH + 1, 12)],
                [(1, 20)],
                [(EPOCH + 1, 30)],
            ]
            assert store.verify_recent() == []
            store.compact()
        # Every user's counter was restarted, not only those of the first call.
        assert store.append(events([(2, 6, 21)])).arrivals.tolist() == [EPOCH + 1]
        assert seen(reconstruct(store.pin(), logged), "item") == [[10, 11], [20]]


def test_string_users_whose_recent_tier_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "s"
    schema = EventSchema((ITEM,), user_kind="string")
    with HistoryStore.create(path, schema, n_buckets=2) as store:
        store.append(events([("é", 1, 10), ("a", 1, 20)]))
        store.compact()
    shutil.rmtree(path / "recent")
    with HistoryStore.open(path) as store:
        assert store.append(events([("é", 2, 11), ("a", 2, 21), ("b", 2, 31)])).arrivals.tolist() == [EPOCH + 1] * 3


def test_a_lost_event_is_never_taken_for_the_one_that_came_after(tmp_path: Path) -> None:
    """Logged inline, lost before it was compacted; the next event of the user has the same time, another item."""
    path = tmp_path / "s"
    with HistoryStore.create(path, PLAIN, n_buckets=2) as store:
        store.append(events([(1, 1, 10)]))
        store.compact()
        store.append(events([(1, 5, 777), (9, 5, 778)]))
        logged = store.snapshot([1, 9], 50).requests
    for epoch in (1, 2):
        shutil.rmtree(path / "recent")
        with HistoryStore.open(path) as store:
            assert store.append(events([(1, 5, 888), (9, 5, 889)])).arrivals.tolist() == [epoch * EPOCH + 1] * 2
            store.compact()
            assert seen(reconstruct(store.pin(), logged), "item") == [[10, 777], [778]]


def test_verify_tells_of_counters_behind_the_archive(tmp_path: Path) -> None:
    """A recent tier from an older backup: the numbers that it would give are taken."""
    path = tmp_path / "s"
    with HistoryStore.create(path, PLAIN, n_buckets=2) as store:
        store.append(events([(1, 1, 10), (2, 1, 10)]))
    shutil.copytree(path / "recent", tmp_path / "backup")
    with HistoryStore.open(path) as store:
        store.append(events([(1, 2, 11)]))
        store.compact()
    shutil.rmtree(path / "recent")
    shutil.copytree(tmp_path / "backup", path / "recent")
    with HistoryStore.open(path) as store:
        (damage,) = store.verify_recent()
        assert (damage.user, damage.file) == (1, str(path / "recent"))
        assert "number 2" in damage.what


def test_a_missing_newest_manifest_is_never_read_past(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with HistoryStore.create(path, PLAIN, n_buckets=2) as store:
        store.append(events([(1, 1, 10), (2, 1, 20)]))
        store.compact()
    (path / "archive" / "manifests" / f"{2:020d}.json").unlink()
    with HistoryStore.open(path) as store:
        with pytest.raises(StoreError, match="a manifest may be missing"):
            store.read([1], 50)
        assert {d.user for d in store.verify_recent()} == {1, 2}
        assert all("manifest is missing" in d.what for d in store.verify_recent())


# --- what may come in -----------------------------------------------------------------------------------------------


def test_an_id_seen_before_is_skipped_across_compaction(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", WITH_IDS, n_buckets=2) as store:
        first = events([(1, 1, 10, 1, None), (1, 2, 11, 2, None)], "event_id", "supersedes")
        store.append(first)
        store.compact()
        again = store.append(first)
        assert again.duplicate.tolist() == [True, True]
        assert again.arrivals.tolist() == [1, 2]
        assert seen(store.read([1], 9), "item") == [[10, 11]]


def test_a_correction_finds_its_event_in_the_archive_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with HistoryStore.create(path, WITH_IDS, n_buckets=2) as store:
        store.append(events([(1, 1, 10, 1, None), (1, 2, 11, 2, None)], "event_id", "supersedes"))
        store.compact()
    shutil.rmtree(path / "recent")
    with HistoryStore.open(path) as store:
        before = store.snapshot([1], 9).requests
        store.append(events([(1, 2, 99, 3, 2)], "event_id", "supersedes"))
        for _ in range(3):
            assert seen(store.read([1], 9), "item") == [[10, 99]]
            assert seen(reconstruct(store.pin(), before), "item") == [[10, 11]]
            store.compact(full=True)


def test_bad_tables_change_nothing(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", WITH_IDS, n_buckets=2) as store:
        names = ("event_id", "supersedes")
        store.append(events([(1, 1, 10, 1, None)], *names))
        good = events([(1, 2, 11, 2, None), (2, 2, 20, 3, None)], *names)

        def replaced(name: str, values: Any) -> pa.Table:
            return good.set_column(good.column_names.index(name), name, values)

        cases: list[tuple[type[Exception], str, pa.Table]] = [
            (SchemaError, "input has no column 'item' .* it has user_id", good.drop_columns(["item"])),
            (SchemaError, "'item' has type string, the schema says int64", replaced("item", pa.array(["a", "b"]))),
            (SchemaError, "'item' is null in row 1", replaced("item", pa.array([1, None]))),
            (SchemaError, "'item': a value of type double", replaced("item", pa.array([1.0, 1.5]))),
            (UserKindError, "type string, but this store holds int64 ids", replaced("user_id", pa.array(["a", "b"]))),
            (UserKindError, "type double, but this store holds int64", replaced("user_id", pa.array([1.0, 2.0]))),
            (InputError, "'user_id' is null in row 1", replaced("user_id", pa.array([1, None]))),
            (InputError, "'event_ts' is null in row 0", replaced("event_ts", pa.array([None, 1]))),
            (InputError, "'event_ts' is -7 in row 1; it must be 0 or more", replaced("event_ts", pa.array([3, -7]))),
            (SchemaError, "out of bounds timestamp", replaced("event_ts", pa.array([0, 2**60], pa.timestamp("s")))),
            (SchemaError, "'event_ts' has type string", replaced("event_ts", pa.array(["a", "b"]))),
            (DuplicateEventError, "id 2 of user 1 appears twice", pa.concat_tables([good, good])),
            (UnknownEventError, "supersedes 77, an event that user 2", replaced("supersedes", pa.array([None, 77]))),
        ]
        for error, message, table in cases:
            with pytest.raises(error, match=message):
                store.append(table)
            assert seen(store.read([1, 2], 99), "item") == [[10], []]
        assert store.append(good).arrivals.tolist() == [2, 1]


def test_a_null_user_in_a_dictionary_is_a_null_user(tmp_path: Path) -> None:
    """Arrow counts nulls of the indices; this one hides in the dictionary."""
    schema = EventSchema((ITEM,), user_kind="string")
    with HistoryStore.create(tmp_path / "s", schema, n_buckets=2) as store:
        users = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None]))
        table = pa.table({"user_id": users, "event_ts": [1, 2, 3], "item": [1, 2, 3]})
        with pytest.raises(InputError, match="'user_id' is null in row 1"):
            store.append(table)
        items = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array([7, None]))
        with pytest.raises(SchemaError, match="'item' is null in row 1"):
            store.append(pa.table({"user_id": ["a"] * 3, "event_ts": [1, 2, 3], "item": items}))


# --- more recent events than a request should log -------------------------------------------------------------------


def test_a_long_recent_part_is_compacted_before_it_is_logged(store: HistoryStore) -> None:
    store.append(events([(1, t, t) for t in range(2048)] + [(2, 1, 1)]))
    taken = store.snapshot([1], 10_000)
    assert (taken.generation.number, len(taken.requests.inline)) == (1, 2048)
    store.append(events([(1, 2048, 2048)]))
    taken = store.snapshot([1, 2], 10_000)
    assert taken.generation.number == 2
    assert len(taken.requests.inline) == 0
    assert taken.requests.versions["seq_len"].tolist() == [2049, 1]
    assert seen(reconstruct(taken.generation, taken.requests, Projection(max_len=1)), "item") == [[2048], [1]]


def test_a_user_may_come_several_times_in_a_snapshot(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", WITH_IDS, n_buckets=2, sync=False) as store:
        names = "event_id", "supersedes"
        store.append(events([(1, 1, 10, 1, None), (2, 1, 20, 1, None), (1, 3, 11, 2, None)], *names))
        store.compact()
        store.append(events([(1, 4, 12, 3, 2), (2, 2, 21, 2, None), (1, 2, 13, 4, None)], *names))
        users, times = [2, 1, 1, 2, 1], [2, 5, 4, 9, 1]
        together = store.snapshot(users, times).requests
        alone = RequestBatch.concat([store.snapshot([u], t).requests for u, t in zip(users, times, strict=True)])
        for field in ("users", "request_ts", "versions", "hides", "hide_offsets"):
            assert np.array_equal(getattr(together, field), getattr(alone, field)), field
        for field in ("users", "offsets", "event_ts", "arrival"):
            assert np.array_equal(getattr(together.inline, field), getattr(alone.inline, field)), field
        assert seen(reconstruct(store.pin(), together), "item") == [[20], [10, 13, 12], [10, 13], [20, 21], []]


# --- schemas evolve -------------------------------------------------------------------------------------------------


def test_a_column_added_later_reads_null_for_old_events(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with HistoryStore.create(path, PLAIN, n_buckets=2) as store:
        store.append(events([(1, 1, 10)]))
        store.compact()
        store.append(events([(1, 2, 11), (2, 2, 20)]))  # recent still when the column comes
        logged = store.snapshot([1, 2], 9).requests
        wider = store.evolve(
            add={
                "shop": {"trait": "categorical", "dtype": "string", "group": "more"},
                "price": {"trait": "numeric", "dtype": "float64", "group": "main"},
            }
        )
    with HistoryStore.open(path) as store:
        assert store.schema == wider
        more = {"shop": pa.array(["x", None]), "price": pa.array([None, 2.5])}
        store.append(pa.table({"user_id": [1, 2], "event_ts": [3, 3], "item": [12, 21], **more}))
        for _ in range(3):
            assert seen(store.read([1, 2], 9), "item", "shop", "price") == [
                [(10, None, None), (11, None, None), (12, "x", None)],
                [(20, None, None), (21, None, 2.5)],
            ]
            assert seen(reconstruct(store.pin(), logged), "item", "shop") == [
                [(10, None), (11, None)],
                [(20, None)],
            ]
            store.compact(full=True)
        assert store.snapshot([1], 9).requests.versions["schema_id"].tolist() == [2]


# --- create and open ------------------------------------------------------------------------------------------------


def test_create_and_open_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="no store at"):
        HistoryStore.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(InputError, match="n_buckets=0; it must be between 1 and 65536"):
        HistoryStore.create(tmp_path / "s", PLAIN, n_buckets=0)
    assert not HistoryStore.exists(tmp_path / "s")
    HistoryStore.create(tmp_path / "s", PLAIN).close()
    with pytest.raises(StoreExists, match="a store is at"):
        HistoryStore.create(tmp_path / "s", PLAIN)
    with HistoryStore.open(tmp_path / "s"), pytest.raises(StoreError, match="open in this process already"):
        HistoryStore.open(tmp_path / "s")


def test_a_create_that_was_cut_short_can_be_repeated(tmp_path: Path) -> None:
    """Killed between the folder and the first manifest, or between that and the recent tier."""
    path = tmp_path / "s"
    (path / "archive" / "manifests").mkdir(parents=True)
    with pytest.raises(StoreNotFound):
        HistoryStore.open(path)
    HistoryStore.create(path, PLAIN).close()
    shutil.rmtree(path / "recent")
    with HistoryStore.open(path) as store:
        # An empty archive cannot tell what was given out.
        assert store.append(events([(1, 1, 1)])).arrivals.tolist() == [EPOCH + 1]


def test_a_create_that_fails_leaves_no_store(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir()
    (path / "recent").write_text("a file in the way")
    with pytest.raises((StoreError, OSError)):
        HistoryStore.create(path, PLAIN)
    assert not HistoryStore.exists(path)
    (path / "recent").unlink()
    HistoryStore.create(path, PLAIN).close()


def test_the_events_of_a_lost_archive_are_not_taken_for_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with HistoryStore.create(path, PLAIN) as store:
        store.append(events([(1, 1, 1)]))
    shutil.rmtree(path / "archive")
    with pytest.raises(StoreExists, match="whose archive is gone"):
        HistoryStore.create(path, PLAIN)
    assert not HistoryStore.exists(path)


def test_a_manifest_is_json_that_people_can_read(tmp_path: Path) -> None:
    HistoryStore.create(tmp_path / "s", PLAIN, n_buckets=3).close()
    body = json.loads((tmp_path / "s" / "archive" / "manifests" / f"{1:020d}.json").read_text())["body"]
    assert (body["n_buckets"], body["segments"]) == (3, [[], [], []])


def test_more_text_than_one_array_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = EventSchema((ColumnSpec(1, "note", Trait.TEXT, "string", "main"),))
    notes = [f"{i} {i * i} {hash(str(i))}" for i in range(2_000)]
    table = pa.table({"user_id": [1] * 2_000, "event_ts": range(2_000), "note": notes})
    with HistoryStore.create(tmp_path / "s", schema, n_buckets=1) as store:
        store.bulk_load(table)
        size = sum(len(n) for n in notes)
        monkeypatch.setattr(stepwise, "MAX_TEXT", size)
        assert store.read([1], 2_000).histories.to_jagged("note").to_arrow().to_pylist() == [notes]
        monkeypatch.setattr(stepwise, "MAX_TEXT", size - 1)
        with pytest.raises(InputError, match=f"{size} bytes of column 'note' at once; {size - 1} at most: read fewer"):
            store.read([1], 2_000)


@pytest.mark.parametrize("kind", ["int64", "string"])
def test_no_requests_are_asked_for_with_empty_lists(tmp_path: Path, kind: str) -> None:
    with HistoryStore.create(tmp_path / "s", EventSchema((ITEM,), user_kind=kind), 2, sync=False) as store:  # type: ignore[arg-type]
        store.append(events([("7" if kind == "string" else 7, 5, 1)]))
        for _ in range(2):
            for found in (store.snapshot([], []), store.peek((), ())):
                assert len(found.requests) == 0
            assert len(store.read([], [], Projection(max_len=3)).histories.lengths()) == 0
            assert len(reconstruct(store.pin(), store.snapshot([], []).requests).histories.lengths()) == 0
            store.compact()
        with pytest.raises(InputError, match="0 request times for 1 users"):
            store.snapshot(["7"] if kind == "string" else [7], [])
