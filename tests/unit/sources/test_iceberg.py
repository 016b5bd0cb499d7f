"""An Iceberg table as a source: each snapshot's new rows once, wherever a run stops."""

import threading

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from thinrow.core.errors import InputError, StoreError
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources.iceberg import IcebergSource, _below
from thinrow.sources.ingest import Ingest, IngestOptions
from thinrow.sources.places import open_source

ARROW = pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int64())])


@pytest.fixture
def table(tmp_path):
    catalog = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}/w")
    catalog.create_namespace("db")
    yield catalog.create_table("db.events", ARROW)
    catalog.close()


@pytest.fixture
def store(tmp_path):
    schema = EventSchema.infer(ARROW, user="user", time="ts")
    with HistoryStore.create(tmp_path / "store", schema, 4, sync=False) as opened:
        yield opened


def rows(first, last):
    return pa.table(
        {"user": [i % 3 for i in range(first, last)], "ts": range(first, last), "item": range(first, last)}, ARROW
    )


def items(store):
    return sorted(store.read([0, 1, 2], 1 << 60).histories.to_jagged("item").values.tolist())


def folder_of(table):
    return table.location().removeprefix("file://")


def run(store, table, **more):
    return Ingest(store, open_source([f"iceberg:{folder_of(table)}"]), **more).run()


def test_new_snapshots_are_read_once(store, table):
    assert run(store, table).events == 0
    for n in range(3):
        table.append(rows(10 * n, 10 * n + 10))
    assert (run(store, table).events, items(store)) == (30, list(range(30)))
    assert run(store, table).batches == 0
    table.append(rows(30, 40))
    assert (run(store, table).events, items(store)) == (10, list(range(40)))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_that_stops_anywhere_goes_on(store, table, steps):
    for n in range(4):
        table.append(rows(10 * n, 10 * n + 10))
    for _ in range(20):
        stop, seen = threading.Event(), []

        def tell(report, stop=stop, seen=seen):
            seen.append(report)
            if len(seen) >= steps:
                stop.set()

        Ingest(store, IcebergSource("t", folder_of(table)), IngestOptions(), tell).run(stop=stop)
        table.append(rows(0, 0)) if not items(store) else None
    assert items(store) == list(range(40))


def test_snapshots_that_take_rows_away_or_are_gone_are_errors(store, table):
    table.append(rows(0, 10))
    run(store, table)
    table.delete("item = 3")
    with pytest.raises(StoreError, match="takes rows away"):
        run(store, table)
    assert items(store) == list(range(10))
    table.append(rows(10, 20))
    first = store.recent.positions(folder_of(table))[""]
    with pytest.raises(StoreError, match="takes rows away"):
        run(store, table)
    assert store.recent.positions(folder_of(table))[""] == first


def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(InputError, match="metadata"):
        IcebergSource("t", tmp_path)
    (tmp_path / "a.metadata.json").write_text("{}")
    with pytest.raises(InputError, match="not the metadata"):
        IcebergSource("t", tmp_path / "a.metadata.json")


def test_a_table_with_an_overwrite_in_its_past_is_followed_from_a_later_snapshot(store, table):
    table.append(rows(0, 10))
    table.overwrite(rows(10, 20))
    with pytest.raises(StoreError, match=r"begin=\d+"):
        run(store, table)
    place = f"iceberg:{folder_of(table)}?begin="
    begun = lambda begin, name: Ingest(store, open_source([place + begin], name)).run().events  # noqa: E731
    assert (begun("latest", "new"), begun(str(table.current_snapshot().snapshot_id), "numbered")) == (0, 0)
    table.append(rows(20, 30))
    assert (begun("latest", "new"), items(store)) == (10, [*range(10), *range(20, 30)])
    assert begun("latest", "newer") == 0
    for wrong in ("7", "first"):
        with pytest.raises(InputError, match=f"begin='?{wrong}"):
            begun(wrong, "wrong")
    with pytest.raises(InputError, match="option 'start'"):
        open_source([f"iceberg:{folder_of(table)}?start=1"])


def test_a_large_file_comes_in_parts(store, table):
    table.append(rows(0, 10))
    for most in (1, 3, 4):
        with HistoryStore.create(store.path.parent / f"s{most}", store.schema, 1, sync=False) as other:
            for _ in range(12):
                stop = threading.Event()
                Ingest(
                    other,
                    open_source([f"iceberg:{folder_of(table)}"]),
                    IngestOptions(batch_events=most),
                    progress=lambda report, stop=stop: stop.set() if report.batches else None,
                ).run(stop=stop)
            assert items(other) == list(range(10))
            assert other.recent.positions(folder_of(table))[""].count("rows") == 0


def test_files_of_one_name_are_told_apart_by_their_path():
    assert _below("file:///w/t/data/p=1/0.parquet", "file:///w/t") == "data/p=1/0.parquet"
    assert _below("s3://other/p=1/0.parquet", "file:///w/t") == "s3://other/p=1/0.parquet"


def test_what_comes_to_an_empty_table_comes_after_latest(store, table):
    begun = lambda: Ingest(store, open_source([f"iceberg:{folder_of(table)}?begin=latest"])).run().events  # noqa: E731
    assert begun() == 0
    table.append(rows(0, 3))
    assert (begun(), items(store)) == (3, [0, 1, 2])
