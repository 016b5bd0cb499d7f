"""The training table on a real Iceberg catalog: order, idempotence, other engines, damage, and concurrent writers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import LongType, StringType

from thinrow.core.errors import (
    CommitConflict,
    CorruptionError,
    InputError,
    NewerFormatError,
    ObjectNotFound,
    SchemaError,
    StoreError,
    StoreExists,
    StoreNotFound,
)
from thinrow.core.users import UserKind, bucket_of
from thinrow.examples.datafiles import ROW_GROUP_ROWS, local_path
from thinrow.examples.records import ExampleBatch
from thinrow.examples.table import SORT_COLUMNS, ExampleTable
from thinrow.schema.event_schema import ColumnSpec, Trait
from thinrow.testing.examples import event_schema, example_schema, random_examples, same_records

XS = example_schema()


def _create(path: Path, kind: UserKind = "int64", n_buckets: int = 4) -> ExampleTable:
    return ExampleTable.create(path, event_schema=event_schema(kind), example_schema=XS, n_buckets=n_buckets)


def _examples(seed: int, n: int, kind: UserKind = "int64", first_id: int = 0) -> ExampleBatch:
    return random_examples(np.random.default_rng(seed), n, event_schema(kind), XS, first_id=first_id)


def _everything(table: ExampleTable) -> ExampleBatch:
    parts = [table.read_bucket(b) for b in range(table.n_buckets)]
    whole = ExampleBatch.concat(parts)
    return whole.take(np.argsort(whole.request_id, kind="stable"))


@pytest.fixture
def table(tmp_path: Path) -> Iterator[ExampleTable]:
    with _create(tmp_path / "t") as table:
        yield table


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.lists(st.integers(0, 12), max_size=3), st.sampled_from(["int64", "string"]))
def test_records_survive_the_table(
    tmp_path_factory: pytest.TempPathFactory, seed: int, sizes: list[int], kind: UserKind
) -> None:
    path = tmp_path_factory.mktemp("t")
    starts = np.cumsum([0, *sizes]).tolist()
    batches = [_examples(seed + i, n, kind, first_id=starts[i]) for i, n in enumerate(sizes)]
    with _create(path, kind) as table:
        for batch in batches:
            table.append(batch)
        if batches:
            assert same_records(_everything(table), ExampleBatch.concat(batches))
        table.cluster()
        for bucket, rows in table.buckets().items():
            found = table.scan_bucket(bucket)
            assert len(found) == rows
            assert found.equals(found.sort_by([(c, "ascending") for c in SORT_COLUMNS]))
            assert (bucket_of(table.read_bucket(bucket).batch.users, 4) == bucket).all()
    with ExampleTable.open(path, n_buckets=4) as reopened:
        assert reopened.event_schema == event_schema(kind)
        assert reopened.example_schema == XS
        assert reopened.rows() == sum(sizes)
        if batches:
            assert same_records(_everything(reopened), ExampleBatch.concat(batches))


def test_an_empty_table(table: ExampleTable) -> None:
    assert table.snapshot_id is None
    assert table.cluster() is None
    assert (table.rows(), table.bytes(), table.buckets(), table.data_files()) == (0, 0, {}, ())
    assert len(table.read_bucket(3)) == 0
    assert table.scan_bucket(0).schema.equals(table.arrow_schema)
    assert table.remove_unreferenced().files == 0
    assert table.join_state() == (None, None)


def test_clustering_makes_one_sorted_file_a_bucket_once(table: ExampleTable) -> None:
    for i in range(3):
        table.append(_examples(i, 10, first_id=10 * i))
    before, old = _everything(table), table.snapshot_id
    first = table.cluster()
    assert first not in (None, old)
    assert table.cluster() == first
    assert [len(f) for f in (table.data_files(), table.buckets())] == [len(table.buckets())] * 2
    assert same_records(_everything(table), before)
    # The snapshot that a reader had pinned still reads as before, in the order of its commits.
    assert table.rows(old) == 30
    assert len(table.data_files(old)) > len(table.data_files())
    assert table.scan_bucket(next(iter(table.buckets())), old).num_rows == next(iter(table.buckets().values()))


def test_what_only_old_snapshots_need_is_removed(table: ExampleTable) -> None:
    for i in range(3):
        table.append(_examples(i, 10, first_id=10 * i))
    pinned, before = table.snapshot_id, _everything(table)
    assert pinned is not None
    table.cluster()
    folder = Path(local_path(table.data_files()[0].path)).parents[1]
    n_live = len(table.data_files())
    table.remove_unreferenced(keep=[pinned])
    assert table.rows(pinned) == 30
    assert sum(1 for _ in folder.rglob("*.parquet")) == n_live + len(table.data_files(pinned))
    removed = table.remove_unreferenced()
    assert removed.files >= 3
    on_disk = list(folder.rglob("*.parquet"))
    assert len(on_disk) == n_live
    assert sum(p.stat().st_size for p in on_disk) == table.bytes()
    assert same_records(_everything(table), before)
    with pytest.raises(StoreNotFound, match=f"no snapshot {pinned}"):
        table.rows(pinned)
    # A file of a killed writer goes when it is old, and not while its writer may be at work.
    orphan = folder / "data" / "left.parquet"
    orphan.write_bytes(b"x" * 10)
    assert table.remove_unreferenced().files == 0
    assert table.remove_unreferenced(orphan_age_s=-1).bytes == 10
    table.append(_examples(9, 5, first_id=90))
    assert table.rows() == 35


def test_duckdb_reads_the_data_files(table: ExampleTable) -> None:
    examples = _examples(5, 40)
    table.append(examples)
    table.cluster()
    paths = [local_path(f.path) for f in table.data_files()]
    con = duckdb.connect()
    query = (
        "select request_id, user_id, len(cand_item), list_sum(label_click), v_checksum from read_parquet(?) order by 1"
    )
    found = con.execute(query, [paths]).fetchall()
    clicks = examples.labels["click"]
    expected = [
        (
            i,
            int(examples.batch.users[i]),
            int(clicks.lengths[i]),
            int(clicks.row(i).sum()) if clicks.lengths[i] else None,
            int(examples.batch.versions["checksum"].view(np.int64)[i]),
        )
        for i in range(40)
    ]
    assert found == expected


def test_pyiceberg_alone_reads_the_same_rows(table: ExampleTable) -> None:
    table.append(_examples(5, 20))
    table.append(_examples(6, 20, first_id=20))
    plain = SqlCatalog(
        "thinrow", uri=f"sqlite:///{table.path}/catalog.db", warehouse=f"file://{table.path}/warehouse"
    ).load_table("thinrow.examples")
    found = plain.scan().to_arrow().sort_by("request_id").cast(table.arrow_schema).combine_chunks()
    ours = pa.concat_tables([table.scan_bucket(b) for b in table.buckets()]).sort_by("request_id").combine_chunks()
    assert found.equals(ours)
    user = int(_examples(5, 20).batch.users[0])
    assert plain.scan(row_filter=f"user_id == {user}").to_arrow().num_rows > 0
    assert str(plain.spec().fields[0].transform) == "bucket[4]"
    assert plain.properties["write.parquet.compression-codec"] == "zstd"
    assert plain.properties["write.parquet.compression-level"] == "3"


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.lists(st.text(min_size=1, max_size=40), min_size=1))
def test_our_bucket_is_icebergs(numbers: list[int], texts: list[str]) -> None:
    for values, kind in ((numbers, LongType()), (texts, StringType())):
        transform = BucketTransform(7).transform(kind)
        users = np.array(values, np.int64 if kind == LongType() else object)
        assert bucket_of(users, 7).tolist() == [transform(v) for v in values]


def test_a_range_reads_only_its_rows(tmp_path: Path) -> None:
    n = ROW_GROUP_ROWS + 100
    with _create(tmp_path, n_buckets=1) as table:
        table.append(_examples(1, n))
        table.append(_examples(2, 50, first_id=n))
        whole = table.scan_bucket(0)
        for start, stop in ((0, 1), (ROW_GROUP_ROWS - 1, ROW_GROUP_ROWS + 1), (n - 5, n + 5), (n + 49, None), (n, n)):
            assert table.scan_bucket(0, start=start, stop=stop).equals(whole.slice(start, (stop or n + 50) - start))
        columns = ["recent_sales. value €", "user_id", "cand_item"]
        assert table.scan_bucket(0, columns=columns, start=5, stop=9).equals(whole.select(columns).slice(5, 4))
        rows = table.read_bucket(0, start=n - 3, stop=n + 3)
        assert rows.request_id.tolist() == whole["request_id"].to_pylist()[n - 3 : n + 3]


def test_misuse_is_refused(table: ExampleTable, tmp_path: Path) -> None:
    with pytest.raises(StoreExists, match="'examples'"):
        _create(table.path)
    with pytest.raises(StoreNotFound, match=r"catalog\.db"):
        ExampleTable.open(tmp_path / "nowhere")
    with pytest.raises(StoreNotFound, match="'other'"):
        ExampleTable.open(table.path, "other")
    with pytest.raises(SchemaError, match=r"bucket\[4\].*archive 6 buckets, which is no multiple"):
        ExampleTable.open(table.path, n_buckets=6)
    assert ExampleTable.open(table.path, n_buckets=8).n_buckets == 4
    with pytest.raises(InputError, match="n_buckets=0"):
        _create(tmp_path / "u", n_buckets=0)
    with pytest.raises(InputError, match=r"bucket 4 is not in \[0, 4\)"):
        table.scan_bucket(4)
    rows = _examples(0, 3).to_arrow(event_schema(), XS)
    with pytest.raises(SchemaError, match="lack column 'arm'"):
        table.append(rows.drop_columns("arm"))
    with pytest.raises(SchemaError, match="unknown column 'x'"):
        table.append(rows.append_column("x", rows["arm"]))
    with pytest.raises(SchemaError, match="do not fit"):
        table.append(rows.set_column(1, "user_id", pa.array(["a", "b", "c"])))
    with pytest.raises(InputError):
        table.append(_examples(0, 3, "string"))
    assert table.rows() == 0


def test_a_newer_format_is_refused(table: ExampleTable) -> None:
    with table._refreshed().transaction() as tx:
        tx.set_properties({"thinrow.format": "2"})
    with pytest.raises(NewerFormatError, match="has format 2"):
        ExampleTable.open(table.path)
    with table._refreshed().transaction() as tx:
        tx.set_properties({"thinrow.format": "1", "thinrow.event_schema": "{}"})
    with pytest.raises(SchemaError, match="no readable thinrow schemas"):
        ExampleTable.open(table.path)


def test_damage_is_named(table: ExampleTable) -> None:
    table.append(_examples(1, 200))
    file = table.data_files()[0]
    path = Path(local_path(file.path))
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    expected, named = table.scan_bucket(file.bucket), []
    for position in [*range(4, footer, footer // 150), *range(len(whole) - 8, len(whole))]:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            found = table.scan_bucket(file.bucket)
        except CorruptionError as e:
            named.append(e.file)
        else:
            # Page headers keep hints (such as statistics) that decide nothing.
            assert found.equals(expected)
    assert set(named) == {str(path)}
    assert len(named) > 100
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptionError, match=path.name):
        table.scan_bucket(file.bucket)
    path.unlink()
    with pytest.raises(ObjectNotFound, match=path.name):
        table.scan_bucket(file.bucket)


def test_the_loser_of_two_writers_has_changed_nothing(table: ExampleTable) -> None:
    table.append(_examples(1, 10))
    base = table.snapshot_id
    with ExampleTable.open(table.path) as other:
        stale = other._refreshed()
        table.append(_examples(2, 10, first_id=10))
        with pytest.raises(CommitConflict, match="run again"):
            other._append(stale, _examples(3, 10, first_id=20), None)
        with pytest.raises(CommitConflict, match="moved on"):
            other.append_after(base, _examples(3, 10, first_id=20), "{}")
        assert other.rows() == table.rows() == 20
        other.append(_examples(3, 10, first_id=20))
        stale = other._refreshed()
        table.append(_examples(4, 10, first_id=30))
        other._refreshed = lambda: stale  # type: ignore[method-assign]
        with pytest.raises(CommitConflict):
            other.cluster()
    assert table.rows() == 40


def test_the_join_state_outlives_clustering_removal_and_other_engines(table: ExampleTable) -> None:
    table.append(_examples(1, 10), join_state=json.dumps({"a": 1}))
    table.append(_examples(2, 10, first_id=10))
    table.cluster()
    table.remove_unreferenced()
    assert table.join_state()[1] == json.dumps({"a": 1})
    foreign = table._refreshed()
    foreign.append(table.scan_bucket(next(iter(table.buckets()))).slice(0, 1))
    assert table.join_state()[1] == json.dumps({"a": 1})
    table.remove_unreferenced()
    assert table.join_state()[1] == json.dumps({"a": 1})
    # Only an engine that expires what it does not know can lose the state, and that is noticed.
    current = table._refreshed().current_snapshot()
    assert current is not None
    doomed = [s.snapshot_id for s in table._refreshed().snapshots() if s.snapshot_id != current.snapshot_id]
    table._refreshed().maintenance.expire_snapshots().by_ids(doomed).commit()
    with pytest.raises(StoreError, match="were expired"):
        table.join_state()
    assert table.rows() == 21


def test_rows_of_an_older_schema_read_as_null(table: ExampleTable) -> None:
    table.append(_examples(1, 5))
    newer = replace(
        event_schema(), columns=(*event_schema().columns, replace(event_schema().columns[0], id=99, name="later"))
    )
    rows = pa.concat_tables([table.scan_bucket(b) for b in table.buckets()])
    later = ExampleBatch.from_arrow(rows, newer, XS).batch.inline.columns["later"]
    assert later.valid is None or not later.valid.any()


def test_a_table_follows_the_schema_of_its_store(table: ExampleTable) -> None:
    """Swapped names, a widened, a dropped and an added column: rows of before and after are read by column id."""
    before = _examples(5, 30)
    table.append(before)
    snapshot = table.snapshot_id
    old = table.event_schema
    swapped = {"item": "short", "short": "item", "department": "place"}
    kept = [replace(c, name=swapped.get(c.name, c.name)) for c in old.columns if c.name != "count"]
    wide = [replace(c, dtype="int64") if c.name == "tiny" else c for c in kept]
    later = ColumnSpec(99, "later", Trait.ID, "int32", "rest", nullable=True)
    new = replace(old, schema_id=2, columns=(*wide, later))
    after = random_examples(np.random.default_rng(6), 20, new, XS, first_id=100)
    with ExampleTable.open(table.path) as other:
        other.append(after)
        assert other.event_schema == new
        found = _everything(other)
    assert same_records(found.take(np.arange(30)), replace(before, batch=before.batch.under(new)))
    assert same_records(found.take(np.arange(30, 50)), after)
    # Who had the table open sees the change; an older snapshot is read under the new names too.
    assert table.rows() == 50
    assert table.event_schema == new
    parts = [table.read_bucket(b, snapshot) for b in range(table.n_buckets)]
    assert sum(len(p) for p in parts) == 30
    table.append(_examples(7, 5, first_id=200))  # of the old schema still
    table.cluster()
    again = _everything(table)
    assert same_records(again.take(np.arange(50)), found)
    assert len(again) == 55
    with pytest.raises(SchemaError, match="event schema 1 for table 'examples', which has 2; pass the newest schema"):
        table.evolve(old)
    table.evolve(new)
