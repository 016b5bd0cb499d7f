"""Backfill: old events get values of a column; versions, pieces and segment files stay what they were, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import CommitConflict, CorruptionError, DuplicateEventError, InputError, SchemaError
from thinrow.history import store as store_module
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.lookup import look_up
from thinrow.history.archive.verify import verify_generation
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait

SCHEMA = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "main"),))
WITH_IDS = EventSchema(
    (ColumnSpec(1, "item", Trait.ID, "int64", "main"),), event_id_column="line", event_id_dtype="string"
)
ADDED: dict[str, dict[str, Any]] = {
    "score": {"trait": "numeric", "dtype": "float32", "group": "main"},
    "city": {"trait": "categorical", "dtype": "string", "group": "place"},
    "tags": {"trait": "id_list", "dtype": "int32", "group": "place"},
}
VALUES: dict[str, Any] = {
    "score": lambda i: i / 4,
    "city": lambda i: f"c{i % 5}" if i % 7 else None,
    "tags": lambda i: list(range(i % 4)),
}
N = 2_600


def events(first: int, n: int) -> pa.Table:
    i = np.arange(first, first + n)
    return pa.table({"user_id": i % 2, "event_ts": 10 * i, "item": i})


def rows_of(store: HistoryStore, *names: str) -> list[dict[str, Any]]:
    """All events, by user and time."""
    built = store.read([0, 1], 10**9)
    found = []
    for user in (0, 1):
        columns = {n: built.histories.to_jagged(n).to_arrow().to_pylist()[user] for n in ("item", *names)}
        found += [
            {"user_id": user, **dict(zip(columns, row, strict=True))} for row in zip(*columns.values(), strict=True)
        ]
    return found


def keyed(items: list[int], column: str, value: Any = None) -> pa.Table:
    """Values of ``column`` for the events that ``events`` made of ``items``, in that order."""
    rows = np.array(items, np.int64)
    values = [(value or VALUES[column])(i) for i in items]
    kind = {"score": pa.float32(), "city": pa.string(), "tags": pa.list_(pa.int32())}[column]
    return pa.table(
        {"user_id": rows % 2, "event_ts": 10 * rows, "arrival": rows // 2 + 1, column: pa.array(values, kind)}
    )


def check(store: HistoryStore, held: dict[str, dict[int, Any]]) -> None:
    for row in rows_of(store, *held):
        for column, values in held.items():
            assert row[column] == values.get(row["item"]), (column, row)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with HistoryStore.create(tmp_path / "s", SCHEMA, n_buckets=2, sync=False) as store:
        store.append(events(0, N))
        store.compact()
        store.append(events(N, 40))
        store.compact()
        store.evolve(add=ADDED)
        yield store


def test_values_are_seen_and_no_version_changes(store: HistoryStore) -> None:
    logged = store.snapshot([0, 1], 20_000).requests
    before = store.pin()
    pieces = look_up(before, np.array([0, 1])).records
    files = {name: store.archive.objects.get(name) for _, info in before.segments for name in info.files}
    held: dict[str, dict[int, Any]] = {}
    for column in ADDED:
        items = [int(i) for i in np.random.default_rng(1).permutation(N + 40)[: N // 2]]
        done = store.backfill(column, keyed(items, column))
        assert (done.placed, done.unplaced, done.generation) == (len(items), 0, store.pin().number)
        held[column] = {i: VALUES[column](i) for i in items}
        check(store, held)
    now = store.pin()
    assert np.array_equal(look_up(now, np.array([0, 1])).records, pieces)
    assert all(store.archive.objects.get(name) == data for name, data in files.items())
    again = store.snapshot([0, 1], 20_000).requests
    for name in ("start_ts", "end_ts", "seq_len", "checksum", "last_arrival", "snapshot_arrival"):
        assert np.array_equal(again.versions[name], logged.versions[name])
    for generation in (before, now):
        assert reconstruct(generation, logged).stats.versions_verified == 2
    assert verify_generation(now) == []
    assert before.bytes < now.bytes
    for full in (False, True):
        store.append(events(N + 40 + 40 * full, 40))
        store.compact(full=full)
        check(store, held)
        assert verify_generation(store.pin()) == []
        assert reconstruct(store.pin(), logged).stats.versions_verified == 2
    assert not any(info.overlays for _, info in store.pin().segments)


def test_others_keep_what_they_have_and_the_newest_value_counts(store: HistoryStore) -> None:
    store.backfill("score", keyed([1, 2, 3], "score"))
    store.compact(full=True)
    store.backfill("score", keyed([3, 4], "score", lambda i: None if i == 4 else -1.0))
    store.backfill("score", keyed([5], "score"))
    held = {"score": {1: 0.25, 2: 0.5, 3: -1.0, 5: 1.25}}
    check(store, held)
    assert all(len(info.overlays) <= 1 for _, info in store.pin().segments)
    store.evolve(widen={"score": "float64"}, rename={"score": "rank"})
    check(store, {"rank": held["score"]})
    store.backfill("rank", keyed([6], "score").rename_columns(["user_id", "event_ts", "arrival", "rank"]))
    store.compact(full=True)
    check(store, {"rank": held["score"] | {6: 1.5}})
    store.backfill("rank", keyed([7], "score").rename_columns(["user_id", "event_ts", "arrival", "rank"]))
    store.evolve(drop=["rank"])
    assert [r["item"] for r in rows_of(store)] == [*range(0, N + 40, 2), *range(1, N + 40, 2)]
    store.compact(full=True)
    assert not any(info.overlays for _, info in store.pin().segments)


def test_events_are_named_by_id_where_the_schema_has_ids(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", WITH_IDS, n_buckets=2, sync=False) as store:
        line = pa.array([f"e{i}" if i % 3 else None for i in range(60)])
        store.append(events(0, 60).append_column("line", line))
        store.evolve(add=ADDED)
        store.compact()
        named = pa.table({"user_id": [1, 0, 0], "line": ["e1", "e2", "e9"], "city": ["a", "b", "c"]})
        done = store.backfill("city", named)
        assert (done.placed, done.unplaced) == (2, 1)
        check(store, {"city": {1: "a", 2: "b"}})


def test_what_names_no_archived_event_is_counted(store: HistoryStore) -> None:
    store.append(events(N + 40, 2))
    table = keyed([0, 1, N + 40], "score")
    wrong_time = table.set_column(1, "event_ts", pa.array([0, 11, 10 * (N + 40)]))
    done = store.backfill("score", wrong_time)
    assert (done.placed, done.unplaced, done.segments) == (1, 2, 1)
    number = store.pin().number
    done = store.backfill("score", keyed([N + 41], "score"))
    assert (done.generation, done.placed, done.unplaced, done.segments) == (number, 0, 1, 0)
    assert len(store.archive.objects.list("overlays/")) == 1
    assert store.backfill("score", keyed([], "score")).placed == 0


def test_refusals_change_nothing(store: HistoryStore) -> None:
    good = keyed([1, 2], "score")
    for table, column, kind, message in (
        (good.to_pydict(), "score", InputError, "values are a dict; pass a pyarrow.Table"),
        (good, "x", SchemaError, "no column 'x'; the schema has item, score"),
        (good, "city", SchemaError, "they need user_id, city, and event_ts with arrival"),
        (
            good.drop_columns(["arrival"]),
            "score",
            SchemaError,
            "values have columns user_id, event_ts, score; they need",
        ),
        (pa.concat_tables([good, good]), "score", DuplicateEventError, "row 3 names an event of user 0 again"),
        (good.set_column(3, "score", pa.array(["a", "b"])), "score", SchemaError, "column 'score' has type string"),
        (
            good.append_column("item", pa.nulls(2, pa.int64())),
            "item",
            SchemaError,
            "'item' is null in row 0 and not null",
        ),
    ):
        with pytest.raises(kind, match=message):
            store.backfill(column, table)
    assert store.archive.objects.list("overlays/") == []


def test_damage_is_named_and_confined_to_the_column(store: HistoryStore) -> None:
    store.backfill("city", keyed([1], "city"))
    (other,) = store.archive.objects.list("overlays/")
    store.backfill("score", keyed(list(range(N)), "score"))
    (name,) = (n for n in store.archive.objects.list("overlays/") if n != other)
    data = bytearray(store.archive.objects.get(name))
    data[200] ^= 1
    store.archive.objects.put(name, bytes(data))
    fresh = Archive(store.archive.objects).pin()
    assert {(d.file, d.column) for d in verify_generation(fresh)} == {(name, "score")}
    with pytest.raises(CorruptionError, match=rf"{name}.*column 'score'"):
        store.read([0, 1], 10**9)
    for keep in (len(data) - 1, 100):
        store.archive.objects.put(name, bytes(data[:keep]))
        assert [d.file for d in verify_generation(Archive(store.archive.objects).pin())] == [name]
    store.archive.objects.put(name, store.archive.objects.get(other))
    (damage,) = verify_generation(Archive(store.archive.objects).pin())
    assert damage.file == name
    assert "the manifest names" in damage.what


@pytest.mark.parametrize("other", ["compact", "full", "evolve", "backfill", "same column"])
def test_a_lost_commit_is_tried_again_on_the_new_head(
    store: HistoryStore, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, lost = Archive.commit, []

    def late(self: Archive, base: Any, *rest: Any, **named: Any) -> Any:
        if rest[1].startswith("backfill score") and not lost:
            lost.append(True)
            if other == "compact":
                store.append(events(N + 40, 40))
                store.compact()
            elif other == "full":
                store.compact(full=True)
            elif other == "evolve":
                store.evolve(rename={"city": "town"})
            elif other == "backfill":
                store.backfill("city", keyed([1, 2], "city"))
            else:
                store.backfill("score", keyed([1, 8], "score", lambda i: 100.0 + i))
        return commit(self, base, *rest, **named)

    monkeypatch.setattr(Archive, "commit", late)
    done = store.backfill("score", keyed([1, 2, N + 1], "score"))
    assert (done.placed, done.unplaced) == (3, 0)
    held = {"score": {1: 0.25, 2: 0.5, N + 1: (N + 1) / 4}}
    if other == "same column":
        held["score"][8] = 108.0
    if other == "backfill":
        held["city"] = {1: "c1", 2: "c2"}
    check(store, held)
    generations = [store.archive.generation(n) for n in store.archive.numbers()]
    named = {name for g in generations for _, info in g.segments for name in info.files}
    assert named.issuperset(store.archive.objects.list("overlays/"))
    assert verify_generation(store.pin()) == []


def test_a_store_that_is_always_busy_ends_in_an_error(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise CommitConflict("another writer was first")

    monkeypatch.setattr(Archive, "commit", never)
    with pytest.raises(CommitConflict):
        store.backfill("score", keyed([1], "score"))
    assert store.archive.objects.list("overlays/") == []


def test_a_value_after_a_stripe_of_nulls_is_kept(tmp_path: Path) -> None:
    schema = EventSchema((ColumnSpec(1, "score", Trait.NUMERIC, "float32", "main", nullable=True),))
    score = [None] * 1_320
    score[0], score[1], score[1_300] = 0.25, 0.5, 650.25
    i = np.arange(1_320)
    with HistoryStore.create(tmp_path / "s", schema, n_buckets=1, sync=False) as store:
        store.append(pa.table({"user_id": 0 * i, "event_ts": i, "score": pa.array(score, pa.float32())}))
        store.compact()
        assert verify_generation(store.pin()) == []
        assert store.read([0], 10**9).histories.to_jagged("score").to_arrow().to_pylist() == [score]


@pytest.mark.parametrize("load_id", [None, "named"])
def test_a_bulk_load_that_loses_its_commit_to_a_backfill_keeps_the_values(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch, load_id: str | None
) -> None:
    items, real = list(range(0, N, 3)), store.archive.commit

    def commit(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(store.archive, "commit", real)
        store.backfill("score", keyed(items, "score"))
        return real(*args, **named)

    monkeypatch.setattr(store.archive, "commit", commit)
    more = events(N + 40, 4_000)
    for name in ADDED:
        more = more.append_column(name, pa.nulls(len(more)))
    store.bulk_load(more, load_id=load_id)
    check(store, {"score": {i: VALUES["score"](i) for i in items}})
    assert verify_generation(store.pin()) == []


def test_a_group_that_is_named_as_overlays_are_is_not_made_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier releases made such stores: they open, and a backfill after which they could not be read is refused."""
    schema = EventSchema(
        (
            ColumnSpec(1, "y", Trait.ID, "int64", "z", nullable=True),
            ColumnSpec(2, "x", Trait.ID_LIST, "int64", "\0overlay 1"),
        )
    )
    with pytest.raises(SchemaError, match=r"group name '\\x00overlay 1' of column 'x'"):
        HistoryStore.create(tmp_path / "new", schema, 1)
    assert not HistoryStore.exists(tmp_path / "new")
    monkeypatch.setattr(store_module, "check_new", lambda columns: None)
    HistoryStore.create(tmp_path / "old", schema, 1, sync=False).close()
    monkeypatch.undo()
    x = pa.array([[31], [32]], pa.list_(pa.int64()))
    values = pa.table({"user_id": [1], "event_ts": [5], "arrival": [1], "y": [77], "w": [78]})
    with HistoryStore.open(tmp_path / "old", sync=False) as store:
        store.append(pa.table({"user_id": [1, 1], "event_ts": [5, 6], "y": [4, 4], "x": x}))
        store.compact()
        with pytest.raises(SchemaError, match=r"'y' cannot be backfilled: .*add a column, and backfill that"):
            store.backfill("y", values)
        store.evolve(add={"w": {"trait": "id", "dtype": "int64", "group": "z"}})
        store.backfill("w", values)
        store.evolve(drop=["x"])
        with pytest.raises(SchemaError, match=r"'y' cannot be backfilled"):
            store.backfill("y", values)
        store.compact(full=True)
        read = store.to_arrow().read_all()
        assert (read["y"].to_pylist(), read["w"].to_pylist()) == ([4, 4], [78, None])
