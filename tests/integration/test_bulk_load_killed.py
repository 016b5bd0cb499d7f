"""A bulk load is killed (SIGKILL) at its k-th change of the disk, for many k, and begun again: all is there, once."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinrow.core.errors import InputError, SchemaError, StoreError
from thinrow.history import load
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.layout import stored_columns
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.verify import verify_generation
from thinrow.history.archive.window import read_everything
from thinrow.history.bulk import source
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.storage import objects

SCHEMA = EventSchema.infer(
    pa.schema({"user": pa.int64(), "ts": pa.int64(), "item": pa.int64()}), user="user", time="ts"
)

#: Loads under limits of a few rows, and kills itself at the k-th change of the disk (never where k is 0).
CHILD = """
import itertools, os, signal, sys
from pathlib import Path
from thinrow.history import buckets, load
from thinrow.history.bulk import merge, runs, source
from thinrow.history.store import HistoryStore
from thinrow.storage import objects

store, files, k = sys.argv[1], sys.argv[2], int(sys.argv[3])
load._LEAST_MEMORY, load._RUN_SHARE, source.CHUNK_ROWS = 0, 1, 50
buckets.PART_BYTES = 0
buckets.STRIPE_ROWS = load.STRIPE_ROWS = 8
runs.BATCH_ROWS = merge.BATCH_ROWS = 8
count = itertools.count(1)

def dying(original):
    def call(*args, **kwargs):
        if next(count) == k:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    return call

objects.os.link = dying(os.link)
objects.os.replace = dying(os.replace)
objects.LocalObjects.delete = dying(objects.LocalObjects.delete)
Path.unlink = dying(Path.unlink)
with HistoryStore.open(store, sync=False) as opened:
    opened.recent.reserve = dying(opened.recent.reserve)
    opened.recent.trim = dying(opened.recent.trim)
    report = opened.bulk_load(files, memory_bytes=4_000)
print(next(count) - 1, report.generation, report.events)
"""


def table_of(rng: np.random.Generator, n: int) -> pa.Table:
    return pa.table({"user": rng.integers(0, 12, n), "ts": rng.integers(0, 99, n), "item": rng.integers(0, 1 << 50, n)})


def filled(path: Path) -> None:
    rng = np.random.default_rng(1)
    with HistoryStore.create(path, SCHEMA, 2, sync=False) as store:
        store.append(table_of(rng, 30))
        store.compact()
        store.append(table_of(rng, 20))


def files_of(folder: Path) -> Path:
    rng = np.random.default_rng(2)
    folder.mkdir()
    for i in range(3):
        pq.write_table(table_of(rng, 120), folder / f"{i}.parquet", row_group_size=40)
    return folder


def content(path: Path) -> dict[str, Any]:
    with HistoryStore.open(path, sync=False) as store:
        store.compact(full=True)
        generation = store.pin()
        assert verify_generation(generation) == []
        assert store.verify_recent() == []
        events = read_everything(generation, generation.users(), stored_columns(SCHEMA)[3:], ReadStats())
    owner = np.repeat(events.users, events.lengths)
    order = np.lexsort((events.arrival, owner))
    # Numbers may have gaps where a try took some; their order may not differ.
    return {
        "user": owner[order].tolist(),
        "ts": events.event_ts[order].tolist(),
        "item": events.columns["item"].values[order].tolist(),
    }


def run(store: Path, files: Path, k: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(store), str(files), str(k)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def killed_and_resumed(tmp_path: Path, kills: list[int]) -> None:
    """One store that is killed at each of ``kills`` in turn, then finishes."""
    files = files_of(tmp_path / "in")
    filled(tmp_path / "whole")
    whole = run(tmp_path / "whole", files, 0)
    assert whole.returncode == 0, whole.stderr
    wanted = content(tmp_path / "whole")
    assert len(wanted["user"]) == 410
    filled(tmp_path / "s")
    for k in kills:
        done = run(tmp_path / "s", files, k)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
    last = run(tmp_path / "s", files, 0)
    assert last.returncode == 0, last.stderr
    again = run(tmp_path / "s", files, 0)
    assert again.stdout.split()[1:] == last.stdout.split()[1:], "what is done is not done again"
    assert content(tmp_path / "s") == wanted
    left = [p.name for p in (tmp_path / "s" / "loads").rglob("*") if p.is_file()]
    assert sorted(left) == [".lock", "done.json", "lock"]


def test_killed_in_every_phase_and_resumed(tmp_path: Path) -> None:
    """In turn: while runs are written, in the merge, and in what is left of it twice."""
    killed_and_resumed(tmp_path, [9, 60, 14])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 126))
def test_killed_at_any_change(tmp_path: Path, first: int) -> None:
    killed_and_resumed(tmp_path, [first])


def test_bad_rows_are_named_before_anything_changes(tmp_path: Path) -> None:
    files = files_of(tmp_path / "in")
    bad = table_of(np.random.default_rng(3), 100).to_pydict()
    bad["ts"][77] = -5
    pq.write_table(pa.table(bad), files / "9.parquet", row_group_size=30)
    filled(tmp_path / "s")
    with HistoryStore.open(tmp_path / "s") as store:
        before = store.pin().number
        with pytest.raises(InputError, match=r"9\.parquet: time 'ts' is -5 in row 77;"):
            store.bulk_load(files)
        assert store.pin().number == before
        pq.write_table(pa.table({"user": [1], "ts": [1]}), files / "9.parquet")
        with pytest.raises(SchemaError, match=r"9\.parquet: input has no column 'item'"):
            store.bulk_load(files)
        with pytest.raises(InputError, match="no file at"):
            store.bulk_load(tmp_path / "nowhere")
        (files / "9.parquet").unlink()
        assert store.bulk_load(files).events == 380


def test_what_a_killed_load_has_written_is_no_garbage_once_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_LEAST_MEMORY", 0)
    monkeypatch.setattr(source, "CHUNK_ROWS", 50)
    write_bucket = load._Load._write_bucket
    path, n = tmp_path / "events.parquet", 400
    pq.write_table(pa.table({"user": np.arange(n) % 20, "ts": np.arange(n), "item": np.arange(n)}), path)

    def stopped(self: Any, base: Any, bucket: int, runs: Any) -> Any:
        if bucket:
            while self._folder.bucket(0) is None:
                time.sleep(0.01)
            raise KeyboardInterrupt
        return write_bucket(self, base, bucket, runs)

    def beside_a_collector(self: Any, base: Any, bucket: int, runs: Any) -> Any:
        assert bucket, "the bucket that was written is taken as it is"
        Archive(objects.LocalObjects(tmp_path / "store" / "archive")).collect_garbage()
        return write_bucket(self, base, bucket, runs)

    with HistoryStore.create(tmp_path / "store", SCHEMA, 2, sync=False) as store:
        monkeypatch.setattr(load._Load, "_write_bucket", stopped)
        with pytest.raises(KeyboardInterrupt):
            store.bulk_load(path, memory_bytes=2_000)
        (segment,) = (tmp_path / "store" / "archive" / "segments").rglob("*.seg")
        long_ago = time.time() - 7_200
        os.utime(segment, (long_ago, long_ago))
        monkeypatch.setattr(load._Load, "_write_bucket", beside_a_collector)
        assert store.bulk_load(path, memory_bytes=2_000).events == n
        assert verify_generation(store.pin()) == []


def test_a_work_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    table = pa.table({"user": [1], "ts": [1], "item": [1]})
    with HistoryStore.create(tmp_path / "store", SCHEMA, 1, sync=False) as store:
        for load_id in (None, "a"):
            with pytest.raises(StoreError, match="take another work_dir"):
                store.bulk_load(table, work_dir=tmp_path / "file", load_id=load_id)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever write meets the full disk, the load goes on where it was when there is room again."""
    files = files_of(tmp_path / "in")
    filled(tmp_path / "s")
    original, left = objects._File.write, [0]

    def write(self: Any, data: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StoreError(f"cannot write {self.name}: {os.strerror(errno.ENOSPC)}; nothing of it was kept")
        original(self, data)

    monkeypatch.setattr(objects._File, "write", write)
    with HistoryStore.open(tmp_path / "s", sync=False) as store:
        before = store.pin().number
        failures: list[str] = []
        for budget in range(1, 200, 6):
            left[0] = budget
            try:
                report = store.bulk_load(files)
            except StoreError as e:
                failures.append(str(e))
                assert store.pin().number == before
            else:
                break
        assert len(failures) > 3
        assert all("No space left" in f for f in failures)
        assert report.events == 380
    monkeypatch.undo()
    assert len(content(tmp_path / "s")["user"]) == 410
