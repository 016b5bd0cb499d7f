"""Histories as Arrow streams: the visible events, no more memory than a group of users, read by other engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from thinrow.core.errors import CorruptionError, InputError, SchemaError, UserKindError
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait
from thinrow.testing.oracle import FatRowOracle

SCHEMA = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "item"),
        ColumnSpec(2, "kind", Trait.CATEGORICAL, "string", "item", nullable=True),
        ColumnSpec(3, "price", Trait.NUMERIC, "float32", "price", nullable=True),
        ColumnSpec(4, "name", Trait.TEXT, "string", "text"),
        ColumnSpec(5, "seen", Trait.TIMESTAMP, "int64", "text"),
    ),
    event_id_column="event_id",
    event_id_dtype="int64",
    supersedes_column="supersedes",
)
NAMES = [c.name for c in SCHEMA.columns]
ROUNDS, USERS = 4, 7


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HistoryStore, FatRowOracle]]:
    """Four appends with late events and corrections across them; the last one stays recent."""
    rng, oracle = np.random.default_rng(3), FatRowOracle()
    with HistoryStore.create(tmp_path_factory.mktemp("arrow") / "store", SCHEMA, n_buckets=3) as store:
        known: list[tuple[int, int]] = []
        for batch in range(ROUNDS):
            if batch:
                store.compact()
            rows = []
            for i in range(40):
                user = int(rng.integers(0, USERS if batch < 3 else USERS + 2))
                mine = [e for u, e in known if u == user]
                row = {
                    "user_id": user,
                    "event_ts": int(rng.integers(0, 100)) + 30 * batch,
                    "item": i,
                    "kind": None if i % 7 == 0 else f"k{i % 4}",
                    "price": None if i % 5 == 0 else float(i),
                    "name": f"name {user} {i}",
                    "seen": i * 1000,
                    "event_id": batch * 100 + i,
                    "supersedes": int(rng.choice(mine)) if mine and i % 3 == 0 else None,
                }
                rows.append(row)
                oracle.append(user, row["event_ts"], {n: row[n] for n in NAMES}, row["event_id"], row["supersedes"])
                known.append((user, row["event_id"]))
            store.append(pa.Table.from_pylist(rows, schema=_input_schema()))
        yield store, oracle


def _input_schema() -> pa.Schema:
    ids = [("user_id", pa.int64()), ("event_ts", pa.int64()), ("event_id", pa.int64()), ("supersedes", pa.int64())]
    types = {"int64": pa.int64(), "string": pa.string(), "float32": pa.float32()}
    return pa.schema(ids + [(c.name, types[c.dtype]) for c in SCHEMA.columns])


def _expected(oracle: FatRowOracle, user: int, at: int = 1 << 60) -> list[tuple[Any, ...]]:
    return [(user, ts, arrival, *values) for ts, arrival, values in oracle.fat_row(user, at)]


def _rows(reader: pa.RecordBatchReader) -> list[tuple[Any, ...]]:
    table = reader.read_all()
    for name in ("event_ts", "seen"):
        at = table.column_names.index(name)
        assert table.schema.field(name).type == pa.timestamp("ms", "UTC")
        table = table.set_column(at, name, table[name].cast(pa.int64()))
    return [tuple(row[n] for n in ("user_id", "event_ts", "arrival", *sorted(NAMES))) for row in table.to_pylist()]


@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_all_users_are_what_the_oracle_shows(filled: tuple[HistoryStore, FatRowOracle], batch_rows: int) -> None:
    store, oracle = filled
    reader = store.to_arrow(batch_rows=batch_rows)
    assert pa.types.is_dictionary(reader.schema.field("kind").type)
    assert reader.schema.field("name").type == pa.string()
    batches = list(reader)
    assert max(b.num_rows for b in batches) <= batch_rows
    rows = _rows(pa.RecordBatchReader.from_batches(batches[0].schema, batches))
    users = list(dict.fromkeys(r[0] for r in rows))
    assert sorted(users) == sorted(u for u in oracle.events if _expected(oracle, u))
    assert rows == [r for u in users for r in _expected(oracle, u)]


def test_users_come_in_the_order_asked_each_once(filled: tuple[HistoryStore, FatRowOracle]) -> None:
    store, oracle = filled
    rows = _rows(store.to_arrow([5, 2, 999, 5]))
    assert rows == _expected(oracle, 5) + _expected(oracle, 2)


def test_time_newest_and_columns_are_pushed_down(filled: tuple[HistoryStore, FatRowOracle]) -> None:
    store, oracle = filled
    assert _rows(store.to_arrow([1], at=90)) == _expected(oracle, 1, 90)
    assert _rows(store.to_arrow([1], Projection(max_len=3))) == _expected(oracle, 1)[-3:]
    recent = [r for r in _expected(oracle, 1, 150) if r[1] >= 100]
    assert _rows(store.to_arrow([1], Projection(horizon_ms=50), at=150)) == recent
    assert store.to_arrow([1], Projection(columns=("price",))).schema.names == [
        "user_id",
        "event_ts",
        "arrival",
        "price",
    ]


def test_generation_shows_what_is_archived(filled: tuple[HistoryStore, FatRowOracle]) -> None:
    store, _ = filled
    generation = store.pin()
    table = generation.to_arrow().read_all()
    seen = {(u, a) for u, a in zip(table["user_id"].to_pylist(), table["arrival"].to_pylist(), strict=True)}
    assert len(seen) == table.num_rows < generation.n_rows
    # A correction that is still recent hides nothing here, one that is archived does.
    everything = FatRowOracle()
    for user, events in filled[1].events.items():
        archived = [e for e in events if (user, e.arrival) in seen]
        everything.events[user] = archived
        last = max((a for u, a in seen if u == user), default=0)
        assert all(e.hidden_from > last for e in archived)
        assert {e.arrival for e in events if e.arrival <= last < e.hidden_from} == {e.arrival for e in archived}


def test_engines_query_the_stream(filled: tuple[HistoryStore, FatRowOracle]) -> None:
    store, oracle = filled
    rows = [r for u in oracle.events for r in _expected(oracle, u)]
    reader = store.to_arrow(batch_rows=16)
    assert reader.schema.names[:3] == ["user_id", "event_ts", "arrival"]
    found = duckdb.sql("select kind, count(*), sum(price) from reader group by kind").fetchall()
    at = {n: 3 + i for i, n in enumerate(sorted(NAMES))}
    expected = {
        k: (
            sum(r[at["kind"]] == k for r in rows),
            sum(r[at["price"]] for r in rows if r[at["kind"]] == k and r[at["price"]] is not None),
        )
        for k in {r[at["kind"]] for r in rows}
    }
    assert {k: (n, s) for k, n, s in found} == expected
    frame = pl.from_arrow(store.to_arrow(batch_rows=16).read_all())
    assert isinstance(frame, pl.DataFrame)
    assert dict(frame.group_by(pl.col("kind").cast(pl.String)).len().iter_rows()) == {
        k: v[0] for k, v in expected.items()
    }


def test_strings_as_users_and_no_rows(tmp_path: Path) -> None:
    schema = EventSchema((ColumnSpec(1, "kind", Trait.CATEGORICAL, "string", "a", nullable=True),), user_kind="string")
    with HistoryStore.create(tmp_path / "s", schema, n_buckets=2) as store:
        assert store.to_arrow().read_all().num_rows == 0
        store.append(pa.table({"user_id": ["b", "a"], "event_ts": [1, 2], "kind": pa.nulls(2, pa.string())}))
        store.compact()
        table = store.to_arrow().read_all()
        assert sorted(table["user_id"].to_pylist()) == ["a", "b"]
        assert table["kind"].null_count == 2
        assert store.to_arrow([]).read_all().num_rows == 0
        with pytest.raises(UserKindError):
            store.to_arrow([1])


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """Damage in the last bucket is met when its turn comes, not before."""
    schema = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "a"),))
    users = np.repeat(np.arange(40), 5)
    with HistoryStore.create(tmp_path / "s", schema, n_buckets=4) as store:
        store.bulk_load(pa.table({"user_id": users, "event_ts": np.arange(200), "item": np.arange(200)}))
        bucket, info = store.pin().segments[-1]
        assert bucket == 3
        path = next((tmp_path / "s" / "archive").rglob(Path(info.name).name))
        data = bytearray(path.read_bytes())
        data[len(data) // 4] ^= 255
        path.write_bytes(data)
    with HistoryStore.open(tmp_path / "s") as store:
        reader = store.to_arrow(batch_rows=20)
        assert reader.read_next_batch().num_rows == 20
        with pytest.raises(CorruptionError):
            reader.read_all()


def test_bad_input_is_refused(filled: tuple[HistoryStore, FatRowOracle]) -> None:
    store, _ = filled
    with pytest.raises(InputError, match=r"batch_rows=0; it must be 1 or more"):
        store.to_arrow(batch_rows=0)
    with pytest.raises(InputError, match=r"horizon_ms=5 counts back from a time"):
        store.to_arrow(projection=Projection(horizon_ms=5))
    with pytest.raises(SchemaError, match="colour"):
        store.pin().to_arrow(projection=Projection(columns=("colour",)))


def _small(path: Path) -> HistoryStore:
    columns = (ColumnSpec(1, "item", Trait.ID, "int32", "a"), ColumnSpec(2, "shop", Trait.ID, "int32", "b"))
    store = HistoryStore.create(path, EventSchema(columns), n_buckets=1)
    store.append(pa.table({"user_id": [1, 2], "event_ts": [5, 6], "item": [11, 12], "shop": [1, 2]}))
    return store


@pytest.mark.parametrize(
    "change", [{"rename": {"item": "shop", "shop": "item"}}, {"drop": ["item"]}, {"widen": {"item": "int64"}}]
)
def test_a_column_that_changes_under_a_stream_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    """Names that are swapped would be values of one column under the name of the other."""
    with _small(tmp_path / "store") as store:
        store.compact()
        reader = store.to_arrow(batch_rows=1)
        assert reader.read_next_batch()["item"].to_pylist() == [11]
        store.evolve(**change)
        with pytest.raises(SchemaError, match=r"'item'.*begin again"):
            reader.read_all()


def test_other_columns_may_change_under_a_stream(tmp_path: Path) -> None:
    with _small(tmp_path / "store") as store:
        store.compact()
        reader = store.to_arrow(projection=Projection(columns=("item",)), batch_rows=1)
        store.evolve(
            rename={"shop": "store"}, nullable=["item"], add={"more": {"trait": "id", "dtype": "int8", "group": "a"}}
        )
        assert reader.read_all()["item"].to_pylist() == [11, 12]


def test_users_that_are_archived_as_a_stream_begins_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _small(tmp_path / "store") as store:
        users = store.recent.users

        def compacted_first() -> Any:
            monkeypatch.undo()
            store.compact()
            return users()

        monkeypatch.setattr(store.recent, "users", compacted_first)
        assert store.to_arrow().read_all()["item"].to_pylist() == [11, 12]
