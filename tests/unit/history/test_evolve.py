"""Evolution of a store: both tiers are read by column id, old requests keep what they saw, nothing is rewritten."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinrow.core.errors import CommitConflict, SchemaError
from thinrow.history.reconstruct import Reconstruction, reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait

SCHEMA = EventSchema(
    (
        ColumnSpec(1, "price", Trait.NUMERIC, "float32", "main"),
        ColumnSpec(2, "shop", Trait.CATEGORICAL, "string", "place"),
        ColumnSpec(3, "count", Trait.NUMERIC, "int8", "main"),
        ColumnSpec(4, "few", Trait.NUMERIC, "float32", "place"),
    )
)
CITY = {"city": {"trait": "categorical", "dtype": "string", "group": "place"}}
N = 3_000


def rows_of(first: int, n: int, **renamed: str) -> pa.Table:
    """Events ``first`` to ``first + n`` of users 0, 1, 2 by turns; incompressible prices, counts of both signs."""
    i = np.arange(first, first + n)
    price = np.random.default_rng(0).random(first + n).astype(np.float32)[first:]
    data = {
        "user_id": i % 3,
        "event_ts": i,
        renamed.get("price", "price"): price,
        "shop": pa.array([f"s{k % 7}" for k in i.tolist()]),
        "count": ((i * 37) % 251 - 125).astype(np.int8),
        "few": (i % 3).astype(np.float32) / 3,
    }
    return pa.table(data)


def seen(built: Reconstruction, *names: str) -> list[list[Any]]:
    """Per example, the values of each name."""
    return [[values for values in built.histories.to_jagged(n).to_arrow().to_pylist()] for n in names]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with HistoryStore.create(tmp_path / "s", SCHEMA, n_buckets=2, sync=False) as store:
        yield store


def segments(store: HistoryStore) -> list[str]:
    return [info.name for _, info in store.pin().segments]


def test_both_tiers_are_read_by_id_and_nothing_is_rewritten(store: HistoryStore) -> None:
    store.append(rows_of(0, N))
    store.compact()
    store.append(rows_of(N, 9))
    users = [0, 1, 2]
    logged = store.snapshot(users, N + 100).requests
    before = seen(reconstruct(store.pin(), logged), "price", "count", "few", "shop")
    held = segments(store)
    store.evolve(rename={"price": "cost"}, widen={"price": "float64", "count": "int64", "few": "float64"}, add=CITY)
    assert segments(store) == held
    assert store.pin().number == 3
    for _ in range(2):
        for batch in (logged, store.snapshot(users, N + 100).requests):
            built = reconstruct(store.pin(), batch, Projection(columns=("cost", "count", "few", "shop", "city")))
            assert seen(built, "cost", "count", "few", "shop") == before
            assert not any(v for row in seen(built, "city")[0] for v in row)
            columns = built.histories.events.columns
            assert [columns[n].values.dtype.name for n in ("cost", "count", "few")] == ["float64", "int64", "float64"]
        coded = reconstruct(store.pin(), logged, Projection(codes=("count",)))
        assert seen(coded, "count") == before[1:2]
        assert coded.histories.events.columns["count"].dictionary.type == pa.int64()
        newest = reconstruct(store.pin(), logged, Projection(columns=("cost",), max_len=5))
        assert seen(newest, "cost")[0] == [row[-5:] for row in before[0]]
        store.compact(full=True)
    with pytest.raises(SchemaError, match="no column 'price'; the schema has cost"):
        store.read(users, N, Projection(columns=("price",)))
    store.evolve(drop=["shop"])
    built = reconstruct(store.pin(), logged)
    assert list(built.histories.events.columns) == ["cost", "count", "few", "city"]
    assert seen(built, "cost", "count", "few") == before[:3]


def test_a_name_that_is_given_again_is_another_column(store: HistoryStore) -> None:
    store.append(rows_of(0, 30))
    store.compact()
    store.append(rows_of(30, 3))
    logged = store.snapshot([0], 1_000).requests
    store.evolve(drop=["shop"])
    store.evolve(add={"shop": {"trait": "numeric", "dtype": "int64", "group": "place"}})
    for _ in range(2):
        assert seen(reconstruct(store.pin(), logged), "shop") == [[[None] * 11]]
        store.compact(full=True)


def test_a_table_that_lacks_a_column_is_no_old_one_where_a_name_was_given_again(store: HistoryStore) -> None:
    store.evolve(rename={"price": "cost"})
    store.evolve(add={"price": {"trait": "numeric", "dtype": "float32", "group": "main"}}, rename={"few": "little"})
    # Without a check the price of today would be read as the cost, under schema 1, or be dropped, under schema 2.
    half = rows_of(0, 3, price="cost")
    for table, lacks in ((rows_of(0, 3), "cost"), (half.append_column("price", half["cost"]), "little")):
        with pytest.raises(SchemaError, match=f"column '{lacks}'"):
            store.append(table)
    store.append(half)
    assert store.read([0], 1_000).histories.events.event_ts.tolist() == [0]


def test_an_old_table_fits_though_names_went_from_column_to_column_since(store: HistoryStore) -> None:
    store.evolve(add=CITY)
    store.evolve(rename={"city": "town"})
    store.evolve(drop=["town"], rename={"few": "city"})
    store.evolve(add={"late": CITY["city"]}, rename={"city": "few"})
    store.append(rows_of(0, 3))
    assert seen(store.read([0], 1_000), "count", "few", "late") == [[[-125]], [[0.0]], [[None]]]


def test_who_does_not_know_the_new_columns_may_go_on_appending(store: HistoryStore) -> None:
    store.evolve(rename={"price": "cost"}, add=CITY)
    store.append(rows_of(0, 3))
    city = pa.array(["a", "b", "c"])
    store.append(rows_of(3, 3, price="cost").append_column("city", city))
    store.evolve(widen={"cost": "float64"})
    with pytest.raises(SchemaError, match="input has no column 'cost'"):
        store.append(rows_of(6, 3).drop_columns(["price"]))
    for _ in range(2):
        built = store.read([0, 1], 100)
        assert seen(built, "city") == [[[None, "a"], [None, "b"]]]
        price = rows_of(0, 6)["price"].to_pylist()
        assert seen(built, "cost") == [[[price[0], price[3]], [price[1], price[4]]]]
        store.compact()


@pytest.mark.parametrize("kind", ["table", "stream", "file"])
def test_a_bulk_load_takes_what_an_append_takes(store: HistoryStore, tmp_path: Path, kind: str) -> None:
    """Of three batches two know neither the new name nor the new columns; a list, a vector and a text among these."""
    added: dict[str, Any] = {
        "seen": {"trait": "id_list", "dtype": "int64", "group": "main", "nullable": True},
        "taste": {"trait": "vector", "dtype": "float32", "size": 2, "group": "main", "nullable": True},
    }
    store.evolve(rename={"price": "cost"}, add={**CITY, **added}, widen={"count": "int32"})
    known = rows_of(3, 3, price="cost").append_column("city", pa.array(["a", "b", "c"]))
    known = known.append_column("seen", pa.array([[1], [], [2, 3]], pa.list_(pa.int64())))
    known = known.append_column("taste", pa.array([[0.5, 1], None, [2, 3]], pa.list_(pa.float32(), 2)))
    tables = [rows_of(0, 3), known, rows_of(6, 3)]
    with HistoryStore.create(tmp_path / "other", SCHEMA, 2, sync=False) as other:
        other.evolve(rename={"price": "cost"}, add={**CITY, **added}, widen={"count": "int32"})
        for i, table in enumerate(tables):
            other.append(table)
            path = tmp_path / f"{i}.parquet"
            pq.write_table(table, path)
            given: Any = {"table": table, "stream": table.to_batches(), "file": path}[kind]
            store.bulk_load(given)
        whole = [n.name for n in store.schema.columns] + ["arrival", "event_ts"]
        for users in ([0], [1], [2]):
            assert seen(store.read(users, 100), *whole) == seen(other.read(users, 100), *whole)
    assert seen(store.read([0], 100), "city") == [[[None, "a", None]]]
    if kind == "file":
        # Files of several schemas are one load.
        assert store.bulk_load([tmp_path / f"{i}.parquet" for i in range(3)]).events == 9
    with pytest.raises(SchemaError, match="input has no column 'cost'"):
        store.bulk_load(rows_of(6, 3).drop_columns(["price"]))


def test_a_tier_that_is_behind_says_so_and_one_on_its_own_catches_up(store: HistoryStore) -> None:
    store.append(rows_of(0, 3))
    old = store.pin()
    store.evolve(add=CITY)
    store.append(rows_of(3, 3).append_column("city", pa.array(["a", "b", "c"])))
    users, after = np.array([0]), np.zeros(1, np.int64)
    with pytest.raises(CommitConflict, match="events of schema 2, newer than 1; pin the newest generation and retry"):
        store.recent.read_since(users, after, old.schema)
    assert list(store.recent.read_since(users, after).events.columns) == ["price", "shop", "count", "few", "city"]
    # A pin that lags once is pinned again.
    pins = iter([old])
    assert store.snapshot([0], 9).generation.number == 2
    from thinrow.history.snapshot import take_snapshot

    taken = take_snapshot(lambda: next(pins, store.pin()), store.recent, users, np.array([9]))
    assert taken.generation.number == 2


def test_dropped_columns_leave_the_files_at_full_compaction(store: HistoryStore) -> None:
    store.append(rows_of(0, 300))
    store.compact(full=True)
    size = store.pin().bytes
    store.evolve(drop=["price", "count"])
    assert store.compact(full=True).merged_events == 300
    assert store.pin().bytes < size * 0.8
    assert store.compact(full=True).merged_events == 0


def test_a_refused_change_changes_nothing(store: HistoryStore) -> None:
    for asked in ({"drop": ["x"]}, {"widen": {"price": "int64"}}, {}):
        with pytest.raises(SchemaError):
            store.evolve(**asked)
    assert store.pin().number == 1


def test_requests_of_two_schemas_are_one_batch(store: HistoryStore) -> None:
    store.append(rows_of(0, 6))
    first = store.snapshot([0], 100).requests
    store.evolve(rename={"price": "cost"}, widen={"count": "int16"}, drop=["shop"])
    second = store.snapshot([1], 100).requests
    both = RequestBatch.concat([first, second])
    assert both.schema == store.schema
    built = reconstruct(store.pin(), both)
    price = rows_of(0, 6)["price"].to_pylist()
    assert seen(built, "cost") == [[[price[0], price[3]], [price[1], price[4]]]]


def test_changes_beside_appends_compactions_and_snapshots(store: HistoryStore) -> None:
    """Threads race; no event is lost, and each request is rebuilt from the last generation as it was."""
    failures: list[BaseException] = []
    logged: list[tuple[RequestBatch, list[Any]]] = []
    done = threading.Event()

    def guarded(work: Any) -> None:
        try:
            while not done.is_set():
                work()
        except BaseException as e:
            failures.append(e)
            done.set()

    at = iter(range(0, 1_000_000, 6))

    def append() -> None:
        store.append(rows_of(next(at), 6))

    def snapshot() -> None:
        taken = store.snapshot([0, 1, 2], 10**9)
        count = seen(reconstruct(taken.generation, taken.requests, Projection(columns=("count",))), "count")
        logged.append((taken.requests, count))

    threads = [threading.Thread(target=guarded, args=(w,)) for w in (append, snapshot, store.compact)]
    for thread in threads:
        thread.start()
    try:
        for step in range(6):
            store.evolve(add={f"c{step}": CITY["city"]})
            if step:
                store.evolve(drop=[f"c{step - 1}"])
    finally:
        while len(logged) < 4 and not failures:
            done.wait(0.01)
        done.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
    store.compact()
    n = next(at)
    assert store.pin().n_rows == n
    for requests, count in logged:
        assert seen(reconstruct(store.pin(), requests, Projection(columns=("count",))), "count") == count
