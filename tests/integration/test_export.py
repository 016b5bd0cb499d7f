"""An exported table is read from its metadata by two engines: polars, and DataFusion on iceberg-rust."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datafusion import SessionContext
from pyiceberg_core.datafusion import IcebergDataFusionTable

from thinrow.core.errors import CommitConflict, InputError, SchemaError, StoreExists
from thinrow.core.users import bucket_of
from thinrow.examples.export import export_events
from thinrow.examples.iceberg import open_catalog
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait

SCHEMA = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "item"),
        ColumnSpec(2, "kind", Trait.CATEGORICAL, "string", "item", nullable=True),
        ColumnSpec(3, "rank", Trait.NUMERIC, "int8", "price"),
        ColumnSpec(4, "price", Trait.NUMERIC, "float32", "price", nullable=True),
        ColumnSpec(5, "raw", Trait.TEXT, "binary", "text"),
        ColumnSpec(6, "seen", Trait.TIMESTAMP, "int64", "text"),
    )
)
KEYS = ["user_id", "event_ts", "arrival"]
START = 1_700_000_000_000


def fill(path: Path, n: int = 400) -> None:
    """40 users over 4 buckets, some with late events, the last quarter still recent."""
    rng = np.random.default_rng(5)
    with HistoryStore.create(path, SCHEMA, n_buckets=4) as store:
        for part in range(4):
            m = n // 4
            store.append(
                pa.table(
                    {
                        "user_id": rng.integers(0, 40, m),
                        "event_ts": START + rng.integers(0, 1000, m) + 500 * part,
                        "item": np.arange(m),
                        "kind": [None if i % 9 == 0 else f"k{i % 3}" for i in range(m)],
                        "rank": (np.arange(m) % 100 - 50).astype(np.int8),
                        "price": [None if i % 4 == 0 else i / 2 for i in range(m)],
                        "raw": [bytes([i % 256, 0, 255]) for i in range(m)],
                        "seen": START + np.arange(m),
                    }
                )
            )
            if part < 3:
                store.compact()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    fill(folder / "store")
    return folder / "store"


@pytest.fixture
def store(path: Path) -> Iterator[HistoryStore]:
    with HistoryStore.open(path) as opened:
        yield opened


def truth(store: HistoryStore, projection: Projection | None = None) -> list[tuple[Any, ...]]:
    """Rows that an engine should see, times as moments."""
    table = store.to_arrow(projection=projection).read_all()
    return sorted((tuple(r.values()) for r in table.to_pylist()), key=lambda r: r[:3])


def by_polars(metadata: str, monkeypatch: pytest.MonkeyPatch) -> pl.DataFrame:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    return pl.scan_iceberg(metadata, reader_override="native").sort(KEYS).collect()


def by_datafusion(metadata: str, sql: str) -> pa.Table:
    context = SessionContext()
    context.register_table("events", IcebergDataFusionTable(["thinrow", "events"], metadata, {}))
    return pa.Table.from_batches(context.sql(sql).collect())


def test_two_engines_read_the_same_rows(store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, int]] = []
    export = export_events(store, tmp_path / "out", progress=lambda *p: done.append(p))
    rows = truth(store)
    assert export.rows == len(rows) == 400
    assert done == [(i, 4) for i in range(1, 5)]
    frame = by_polars(export.metadata, monkeypatch)
    assert [tuple(r) for r in frame.iter_rows()] == rows
    assert frame.schema["event_ts"] == pl.Datetime("us", "UTC")
    read = by_datafusion(export.metadata, "select * from events order by user_id, event_ts, arrival")
    assert [tuple(r.values()) for r in read.to_pylist()] == rows
    total = by_datafusion(export.metadata, "select count(*) n, sum(price) p from events where user_id = 7").to_pylist()[
        0
    ]
    mine = [r for r in rows if r[0] == 7]
    price = frame.columns.index("price")
    assert total == {"n": len(mine), "p": sum(r[price] for r in mine if r[price] is not None)}


def test_files_are_bucketed_and_sorted(store: HistoryStore, tmp_path: Path) -> None:
    export = export_events(store, tmp_path / "out")
    table = open_catalog(tmp_path / "out").load_table("thinrow.events")
    assert str(table.spec().fields[0].transform) == "bucket[4]"
    assert [f.source_id for f in table.sort_order().fields] == [1, 2, 3]
    names = {f.source_id: table.schema().find_column_name(f.source_id) for f in table.sort_order().fields}
    assert list(names.values()) == KEYS
    files = list(table.scan().plan_files())
    assert (len(files), sum(f.file.file_size_in_bytes for f in files)) == (export.files, export.bytes)
    for task in files:
        rows = pq.read_table(task.file.file_path.removeprefix("file://"), columns=KEYS).to_pylist()
        assert set(bucket_of(np.array([r["user_id"] for r in rows]), 4).tolist()) == {task.file.partition[0]}
        keys = [tuple(r.values()) for r in rows]
        assert keys == sorted(keys)
        assert task.file.sort_order_id == table.sort_order().order_id
    # The statistics leave out what cannot hold a user.
    assert len(list(table.scan(row_filter="user_id == 7").plan_files())) == 1


def test_projection_and_time_are_exported(store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    projection = Projection(columns=("price",), max_len=2)
    export = export_events(store, tmp_path / "out", "newest", projection)
    assert [tuple(r) for r in by_polars(export.metadata, monkeypatch).iter_rows()] == truth(store, projection)
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=START + 700)
    early = export_events(store, tmp_path / "out", "early", at=START + 700)
    seen = [tuple(r) for r in by_polars(early.metadata, monkeypatch).iter_rows()]
    assert seen == [r for r in truth(store) if r[1] < moment]
    assert 0 < len(seen) < 400


def test_lists_and_vectors_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = EventSchema(
        (
            ColumnSpec(1, "tags", Trait.ID_LIST, "int32", "a", nullable=True),
            ColumnSpec(2, "embedding", Trait.VECTOR, "float32", "a", size=2),
        )
    )
    tags, vectors = [[1, 2], [], None, [3]], [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0], [3.5, 4.0]]
    with HistoryStore.create(tmp_path / "store", schema, n_buckets=2) as store:
        for part in (slice(0, 2), slice(2, 4)):
            embedding = pa.array(vectors[part], pa.list_(pa.float32(), 2))
            columns = {"tags": pa.array(tags[part], pa.list_(pa.int32())), "embedding": embedding}
            store.append(
                pa.table({"user_id": [1, 1], "event_ts": [START + part.start, START + part.start + 1], **columns})
            )
            if not part.start:
                store.compact()
        table = store.to_arrow().read_all()
        assert table["tags"].to_pylist() == tags
        assert table.schema.field("embedding").type == pa.list_(pa.float32(), 2)
        assert table["embedding"].to_pylist() == vectors
        assert store.pin().to_arrow().read_all()["embedding"].to_pylist() == vectors[:2]
        export = export_events(store, tmp_path / "out")
    frame = by_polars(export.metadata, monkeypatch)
    assert (frame["tags"].to_list(), frame["embedding"].to_list()) == (tags, vectors)
    read = by_datafusion(export.metadata, "select tags, embedding from events order by arrival")
    assert (read["tags"].to_pylist(), read["embedding"].to_pylist()) == (tags, vectors)


def test_what_is_there_is_not_touched(store: HistoryStore, tmp_path: Path) -> None:
    export = export_events(store, tmp_path / "out")
    with pytest.raises(StoreExists, match="'events'"):
        export_events(store, tmp_path / "out")
    assert by_datafusion(export.metadata, "select count(*) n from events").to_pylist() == [{"n": 400}]


def test_refused_export_leaves_no_table(store: HistoryStore, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="colour"):
        export_events(store, tmp_path / "out", projection=Projection(columns=("colour",)))
    assert not (tmp_path / "out").exists()
    schema = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "item"),))
    with HistoryStore.create(tmp_path / "far", schema, n_buckets=1) as far:
        far.append(pa.table({"user_id": [1], "event_ts": [1 << 60], "item": [1]}))
        with pytest.raises(InputError, match="microseconds"):
            export_events(far, tmp_path / "out")
    assert not open_catalog(tmp_path / "out").table_exists("thinrow.events")
    assert not list((tmp_path / "out").rglob("*.parquet"))


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".a", "a\0b", "a" * 201])
def test_a_name_that_is_no_folder_of_its_own_is_refused(store: HistoryStore, tmp_path: Path, name: str) -> None:
    """The folder of a table is emptied before it is made: an empty name took all other tables along."""
    export = export_events(store, tmp_path / "out", "été 1.b")
    with pytest.raises(InputError, match="table name"):
        export_events(store, tmp_path / "out", name)
    assert by_datafusion(export.metadata, "select count(*) n from events").to_pylist() == [{"n": 400}]


def test_a_column_may_have_the_name_of_the_partition(tmp_path: Path) -> None:
    schema = EventSchema((ColumnSpec(1, "user_id_bucket", Trait.ID, "int64", "item"),))
    with HistoryStore.create(tmp_path / "store", schema, n_buckets=2) as store:
        store.append(pa.table({"user_id": [1], "event_ts": [1], "user_id_bucket": [9]}))
        export = export_events(store, tmp_path / "out")
    read = by_datafusion(export.metadata, "select user_id_bucket b from events where user_id = 1")
    assert read.to_pylist() == [{"b": 9}]


def test_rebucketing_meanwhile_loses_no_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "store")
    with HistoryStore.open(tmp_path / "store") as store:
        export = export_events(store, tmp_path / "out", progress=lambda done, _: done == 1 and store.rebucket(8))
        assert store.pin().n_buckets == 8
        assert by_polars(export.metadata, monkeypatch).height == export.rows == 400
        one = truth(store)[0][0]
        mine = by_datafusion(export.metadata, f"select count(*) n from events where user_id = {one}")
        assert mine.to_pylist() == [{"n": sum(r[0] == one for r in truth(store))}]


def test_a_column_that_changes_meanwhile_is_named(tmp_path: Path) -> None:
    fill(tmp_path / "store")
    with HistoryStore.open(tmp_path / "store") as store:
        with pytest.raises(SchemaError, match=r"'item'.*begin again"):
            export_events(
                store, tmp_path / "out", progress=lambda done, _: done == 1 and store.evolve(rename={"item": "product"})
            )
        assert not list((tmp_path / "out").rglob("*.parquet"))


_KILLED = """
import os, signal, sys
from thinrow.examples.export import export_events
from thinrow.history.store import HistoryStore
store = HistoryStore.open(sys.argv[1])
export_events(store, sys.argv[2], progress=lambda done, n: os.kill(os.getpid(), signal.SIGKILL) if done == 2 else None)
"""


def test_killed_export_is_run_again(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(path), str(out)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = set(out.rglob("*.parquet"))
    assert left
    assert not open_catalog(out).table_exists("thinrow.events")
    with HistoryStore.open(path) as store:
        export = export_events(store, out)
    assert not left & set(out.rglob("*.parquet"))
    assert len(list(out.rglob("*.parquet"))) == export.files
    assert by_datafusion(export.metadata, "select count(*) n from events").to_pylist() == [{"n": 400}]


def test_one_export_at_a_time(store: HistoryStore, tmp_path: Path) -> None:
    def second(done: int, n: int) -> None:
        if done == 1:
            with pytest.raises(CommitConflict, match="another export"):
                export_events(store, tmp_path / "out", "other")

    export_events(store, tmp_path / "out", progress=second)


def test_command_prints_the_metadata(path: Path, tmp_path: Path) -> None:
    script = "from thinrow.cli.main import main; main()"
    command = [sys.executable, "-c", script, "export", str(tmp_path / "out"), "--store", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.startswith("400 events in 4 files")
    assert by_datafusion(ran.stdout.strip(), "select count(*) n from events").to_pylist() == [{"n": 400}]
