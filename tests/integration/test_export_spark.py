"""An exported table is read by Apache Spark with Iceberg's own library, from its metadata file.

Runs where PySpark 3.5 and Java are and ``THINROW_ICEBERG_JAR`` names ``iceberg-spark-runtime-3.5_2.12-<version>.jar``
(group ``org.apache.iceberg`` of Maven's central repository), or several jars with commas between.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.examples.export import export_events
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait

START = 1_700_000_000_000
SCHEMA = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "item"),
        ColumnSpec(2, "kind", Trait.CATEGORICAL, "string", "item", nullable=True),
        ColumnSpec(3, "rank", Trait.NUMERIC, "int8", "price"),
        ColumnSpec(4, "price", Trait.NUMERIC, "float32", "price", nullable=True),
        ColumnSpec(5, "raw", Trait.TEXT, "binary", "text"),
        ColumnSpec(6, "seen", Trait.TIMESTAMP, "int64", "text"),
        ColumnSpec(7, "tags", Trait.ID_LIST, "string", "lists", nullable=True),
        ColumnSpec(8, "spot", Trait.VECTOR, "float32", "lists", size=2),
    ),
    user_kind="string",
)


_JARS = os.environ.get("THINROW_ICEBERG_JAR")
_LACKS = [
    what
    for what, there in (
        ("pyspark", importlib.util.find_spec("pyspark")),
        ("java", shutil.which("java")),
        ("a jar of Iceberg, named by THINROW_ICEBERG_JAR", _JARS),
    )
    if not there
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_LACKS), reason=f"not installed: {', '.join(_LACKS)}; see the head of this file"),
]


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    options = {
        "spark.jars": _JARS,
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    session = SparkSession.builder.master("local[2]").config(map=options).getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HistoryStore]:
    """40 users over 4 buckets, some with late events, the last third still recent."""
    rng, n = np.random.default_rng(5), 300
    with HistoryStore.create(tmp_path_factory.mktemp("spark") / "store", SCHEMA, n_buckets=4) as opened:
        for part in range(3):
            rows = range(part * n, part * n + n)
            columns = {
                "user_id": [f"user é{u}" for u in rng.integers(0, 40, n)],
                "event_ts": START + rng.integers(0, 1000, n) + 500 * part,
                "item": np.array(rows) << 33,
                "kind": [None if i % 9 == 0 else f"k{i % 3}" for i in rows],
                "rank": (np.array(rows) % 100 - 50).astype(np.int8),
                "price": pa.array([None if i % 4 == 0 else i / 2 for i in rows], pa.float32()),
                "raw": pa.array([bytes([i % 256, 0, 255]) for i in rows], pa.binary()),
                "seen": START + np.array(rows),
                "tags": pa.array([None if i % 7 == 0 else ["a", "ü"][: i % 3] for i in rows], pa.list_(pa.string())),
                "spot": pa.array([[i / 4, -1.0] for i in rows], pa.list_(pa.float32(), 2)),
            }
            opened.append(pa.table(columns))
            if part < 2:
                opened.compact()
        yield opened


def rows_of(frame: Any) -> list[tuple[Any, ...]]:
    """Rows in the order of their keys; times as microseconds, because PySpark gives those in the machine's zone."""
    from pyspark.sql.functions import col, unix_micros

    times = {"event_ts", "seen"}
    found = frame.select(*(unix_micros(col(c)).alias(c) if c in times else col(c) for c in frame.columns)).collect()
    rows = [tuple(bytes(v) if isinstance(v, bytearray) else v for v in r) for r in found]
    return sorted(rows, key=lambda r: r[:3])


def truth(store: HistoryStore, projection: Projection | None = None) -> list[tuple[Any, ...]]:
    table = store.to_arrow(projection=projection).read_all()
    for i, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            micros = table.column(i).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
            table = table.set_column(i, field.name, micros)
    return sorted((tuple(r.values()) for r in table.to_pylist()), key=lambda r: r[:3])


def test_spark_reads_every_row_and_type(spark: Any, store: HistoryStore, tmp_path: Path) -> None:
    export = export_events(store, tmp_path / "out")
    frame = spark.read.format("iceberg").load(export.metadata)
    kinds = {f.name: f.dataType.simpleString() for f in frame.schema.fields}
    assert kinds == {
        "user_id": "string",
        "event_ts": "timestamp",
        "arrival": "bigint",
        "item": "bigint",
        "kind": "string",
        "rank": "int",
        "price": "float",
        "raw": "binary",
        "seen": "timestamp",
        "tags": "array<string>",
        "spot": "array<float>",
    }
    rows = rows_of(frame)
    assert len(rows) == export.rows == 900
    assert rows == truth(store)


def test_spark_prunes_by_bucket_and_by_statistics(spark: Any, store: HistoryStore, tmp_path: Path) -> None:
    """A filter on the user leaves three of four files unread, so that they may be gone."""
    export = export_events(store, tmp_path / "out")
    wanted = [r for r in truth(store) if r[0] == "user é7"]
    assert wanted
    assert export.files == 4
    frame = spark.read.format("iceberg").load(export.metadata).filter("user_id = 'user é7'")
    (kept,) = {Path(r[0].removeprefix("file:")) for r in frame.select("_file").collect()}
    for file in (tmp_path / "out").rglob("*.parquet"):
        if file.name != kept.name:
            file.unlink()
    assert rows_of(frame) == wanted
    future = spark.read.format("iceberg").load(export.metadata).filter("event_ts > timestamp '2100-01-01 00:00:00'")
    assert future.count() == 0


def test_spark_reads_a_projection(spark: Any, store: HistoryStore, tmp_path: Path) -> None:
    projection = Projection(columns=("price", "tags"), max_len=3)
    export = export_events(store, tmp_path / "out", "newest", projection)
    assert rows_of(spark.read.format("iceberg").load(export.metadata)) == truth(store, projection)
