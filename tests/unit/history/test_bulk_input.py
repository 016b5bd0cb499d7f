"""A load that was killed goes on with the input that it was begun with, and with no other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinrow.core.errors import InputError
from thinrow.core.units import NEVER
from thinrow.history import load
from thinrow.history.bulk import source
from thinrow.history.bulk.source import difference
from thinrow.history.bulk.state import LoadFolder
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema

N = 200
SCHEMA = EventSchema.infer(
    pa.schema({"user": pa.int64(), "ts": pa.int64(), "item": pa.int64()}), user="user", time="ts"
)


def table(item: int, n: int = N) -> pa.Table:
    return pa.table({"user": np.arange(n) % 7, "ts": np.arange(n), "item": np.full(n, item)})


def items(store: HistoryStore) -> dict[int, int]:
    store.compact()
    values = store.read(store.users(), NEVER - 1).histories.to_jagged("item").values
    return {int(v): int(n) for v, n in zip(*np.unique(values, return_counts=True), strict=True)}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(load, "_LEAST_MEMORY", 0)
    monkeypatch.setattr(source, "CHUNK_ROWS", 50)
    with HistoryStore.create(tmp_path / "store", SCHEMA, 2, sync=False) as store:
        yield store


def loaded(store: HistoryStore, given: Any, load_id: str | None = "day1", stop: int | None = None) -> int:
    """Load, or be interrupted after ``stop`` rows were read; how many rows were read."""
    rows = []

    def progress(seen: load.LoadProgress) -> None:
        rows.append(seen.rows)
        if stop is not None and seen.rows > stop:
            raise KeyboardInterrupt

    if stop is None:
        store.bulk_load(given, load_id=load_id, memory_bytes=2_000, progress=progress)
    else:
        with pytest.raises(KeyboardInterrupt):
            store.bulk_load(given, load_id=load_id, memory_bytes=2_000, progress=progress)
        assert list((store.path / "loads").rglob("run-*.json"))
    return rows[-1] - rows[0]


def test_changed_files_are_not_taken_for_those_that_it_began_with(store: HistoryStore, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(table(1), path)
    size = path.stat().st_size
    held = path.read_bytes(), path.stat()
    loaded(store, path, stop=120)
    pq.write_table(table(2, N + 9), path)
    with pytest.raises(InputError, match=rf"'day1'.*in\.parquet had {size} bytes.*take another load_id, or delete"):
        loaded(store, path)
    with pytest.raises(InputError, match="that was files, this is a stream"):
        loaded(store, table(2))
    assert loaded(store, path, "day2") == N + 9
    assert items(store) == {2: N + 9}
    path.write_bytes(held[0])
    os.utime(path, ns=(held[1].st_atime_ns, held[1].st_mtime_ns))
    assert loaded(store, path) < N, "it goes on where it was"
    assert items(store) == {1: N, 2: N + 9}


def test_a_folder_that_was_deleted_begins_anew(store: HistoryStore, tmp_path: Path) -> None:
    pq.write_table(table(1), tmp_path / "in.parquet")
    loaded(store, tmp_path / "in.parquet", stop=120)
    pq.write_table(table(2), tmp_path / "in.parquet")
    LoadFolder(store.path / "loads" / "day1").clear()
    assert loaded(store, tmp_path / "in.parquet") == N
    assert items(store) == {2: N}


def test_an_input_that_was_bad_may_be_mended_under_its_name(store: HistoryStore, tmp_path: Path) -> None:
    bad = table(1).to_pydict()
    bad["ts"][170] = -5
    pq.write_table(pa.table(bad), tmp_path / "in.parquet")
    with pytest.raises(InputError, match="row 170"):
        loaded(store, tmp_path / "in.parquet")
    pq.write_table(table(2), tmp_path / "in.parquet")
    assert loaded(store, tmp_path / "in.parquet") == N
    assert items(store) == {2: N}


@pytest.mark.parametrize("named", [True, False])
def test_a_load_of_an_earlier_thinrow_goes_on_or_is_refused(store: HistoryStore, tmp_path: Path, named: bool) -> None:
    path, load_id = tmp_path / "in.parquet", "day1" if named else None
    pq.write_table(table(1), path)
    loaded(store, path, load_id, stop=120)
    (folder,) = (LoadFolder(p) for p in (store.path / "loads").iterdir() if p.is_dir())
    job = folder.get("job")
    assert job is not None
    del job["source"]
    folder.put("job", job)
    if named:
        with pytest.raises(InputError, match="an earlier thinrow began it, and did not note its files; give"):
            loaded(store, path, load_id)
    else:
        assert loaded(store, path, load_id) < N
        assert items(store) == {1: N}


def test_a_stream_begins_anew_with_the_columns_that_it_had(store: HistoryStore) -> None:
    loaded(store, table(1).to_reader(max_chunksize=30), stop=120)
    other = table(2).append_column("more", pa.array(np.zeros(N)))
    with pytest.raises(InputError, match=r"its columns were user \(int64\), .*; now they are .*more \(double\)"):
        loaded(store, other.to_reader())
    assert loaded(store, iter(table(3).to_batches(max_chunksize=30))) == N
    assert items(store) == {3: N}


FILES = [["/a", 1, 10], ["/b", 2, 20]]


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (FILES, None),
        (FILES[::-1], "its 2 files come in another order now"),
        (FILES[:1], "/b was one of its files, and is none now"),
        ([*FILES, ["/c", 3, 30]], "/c is new among its files"),
        ([["/a", 1, 11], FILES[1]], "/a had 1 bytes, changed 1970-01-01T00:00:00.000000010; now it has 1, changed"),
    ],
)
def test_what_differs_is_named(now: list[Any], message: str | None) -> None:
    found = difference({"files": FILES}, {"files": now})
    assert found is None if message is None else str(found).startswith(message)
