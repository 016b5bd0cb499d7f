"""A store is backed up while other processes append, compact and collect garbage; what is restored is a prefix.

Run as a script, this file is the writer: event k of the stream, over all users, has event time k and item k.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import CorruptionError, InputError, StoreError, StoreExists, StoreNotFound
from thinrow.core.units import EPOCH_BITS, NEVER
from thinrow.history import backup as module
from thinrow.history.archive.verify import verify_generation
from thinrow.history.backup import is_backup, verify_backup
from thinrow.history.place import remember
from thinrow.history.recent.memory import MemoryRecent
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait
from thinrow.storage.s3 import S3Location

SCHEMA = EventSchema(
    (ColumnSpec(1, "item", Trait.ID, "int64", "item"),), event_id_column="event_id", event_id_dtype="int64"
)
USERS = 7


def table(first: int, stop: int) -> pa.Table:
    k = np.arange(first, stop)
    return pa.table({"user_id": k % USERS, "event_ts": k, "event_id": k, "item": k})


def write(path: Path) -> None:
    with HistoryStore.open(path, sync=False) as store:
        for i in range(100_000):
            store.append(table(20 * i, 20 * i + 20))
            if i % 5 == 4:
                store.compact()
            if i % 10 == 9:
                store.collect_garbage(keep=1, grace_s=0)
            print(20 * i + 20, flush=True)


def items(store: HistoryStore) -> list[int]:
    held = store.read(store.users(), NEVER - 1).histories.to_jagged("item")
    return sorted(held.values.tolist())


def check(folder: Path, at: Path, number: int | None = None) -> int:
    """Restore and hold to the stream; how many events it has."""
    HistoryStore.restore(folder, at, number)
    with HistoryStore.open(at) as store:
        assert verify_generation(store.pin()) == []
        assert store.verify_recent() == []
        found = items(store)
        assert found == list(range(len(found)))
        # What the original appended after the backup comes again from the source, beginning a little earlier.
        n = len(found)
        again = store.append(table(max(n - 30, 0), n + 40))
        assert again.duplicate.tolist() == [k < n for k in range(max(n - 30, 0), n + 40)]
        assert (again.arrivals[~again.duplicate] > 1 << EPOCH_BITS).all()
        store.compact(full=True)
        assert items(store) == list(range(n + 40))
        assert verify_generation(store.pin()) == []
    return n


def test_backups_while_a_process_writes(tmp_path: Path) -> None:
    HistoryStore.create(tmp_path / "store", SCHEMA, 3).close()
    writer = subprocess.Popen([sys.executable, __file__, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    at_least = []
    try:
        with HistoryStore.open(tmp_path / "store") as store:
            for _ in range(4):
                last = int(writer.stdout.readline())
                for _ in range(5):
                    last = int(writer.stdout.readline())
                at_least.append(last)
                store.backup(tmp_path / "copy")
    finally:
        writer.kill()
        writer.communicate()
    for number, last in enumerate(at_least, 1):
        assert verify_backup(tmp_path / "copy", number)[2] == []
        assert check(tmp_path / "copy", tmp_path / f"restored-{number}", number) >= last


def test_backups_while_threads_of_this_process_write(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "store", SCHEMA, 3, sync=False) as store:
        stop = threading.Event()

        def append() -> None:
            i = 0
            while not stop.is_set():
                store.append(table(20 * i, 20 * i + 20))
                i += 1

        def compact() -> None:
            while not stop.is_set():
                store.compact()
                store.collect_garbage(keep=1, grace_s=0)

        threads = [threading.Thread(target=append), threading.Thread(target=compact)]
        for t in threads:
            t.start()
        try:
            for _ in range(5):
                store.backup(tmp_path / "copy")
                time.sleep(0.05)
        finally:
            stop.set()
            for t in threads:
                t.join()
    counts = [check(tmp_path / "copy", tmp_path / f"restored-{n}", n) for n in range(1, 6)]
    assert counts == sorted(counts)


@pytest.fixture
def store(tmp_path: Path):
    with HistoryStore.create(tmp_path / "store", SCHEMA, 3) as store:
        store.append(table(0, 500))
        store.compact()
        store.append(table(500, 600))
        yield store


@pytest.mark.parametrize("inside", [".", "copies", "archive/../copies"])
def test_a_store_is_not_copied_into_itself(store: HistoryStore, inside: str) -> None:
    with pytest.raises(InputError, match="would copy itself; name one outside it"):
        store.backup(store.path / inside)
    assert not (store.path / "copies").exists()


def test_what_is_there_is_not_copied_again(store: HistoryStore, tmp_path: Path) -> None:
    (tmp_path / "store" / "log").mkdir()
    (tmp_path / "store" / "log" / "1").write_bytes(b"x" * 10_000)
    first = store.backup(tmp_path / "copy")
    assert first.shared_bytes == 0
    again = store.backup(tmp_path / "copy")
    # The recent tier is one file.
    assert again.files <= 1
    assert again.shared_bytes + again.bytes == first.bytes
    assert again.number == 2


def test_other_files_of_the_folder_come_along(store: HistoryStore, tmp_path: Path) -> None:
    root = tmp_path / "store"
    (root / "examples" / "data").mkdir(parents=True)
    (root / "examples" / "data" / "a.parquet").write_bytes(b"rows")
    (root / "examples" / "data" / ".tmp-1").write_bytes(b"unfinished")
    with closing(sqlite3.connect(root / "examples" / "catalog.db")) as catalog:
        catalog.execute("pragma journal_mode=wal")
        catalog.execute("create table t (x)")
        catalog.execute("insert into t values (42)")
        catalog.commit()
        assert (root / "examples" / "catalog.db-wal").exists()
        store.backup(tmp_path / "copy")
    HistoryStore.restore(tmp_path / "copy", tmp_path / "new")
    assert (tmp_path / "new" / "examples" / "data" / "a.parquet").read_bytes() == b"rows"
    assert sorted(p.name for p in (tmp_path / "new" / "examples").rglob("*") if p.is_file()) == [
        "a.parquet",
        "catalog.db",
    ]
    with closing(sqlite3.connect(tmp_path / "new" / "examples" / "catalog.db")) as catalog:
        assert catalog.execute("select x from t").fetchall() == [(42,)]


def test_a_folder_that_never_stands_still_is_refused(
    store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "store" / "catalog.db"
    with closing(sqlite3.connect(database)) as catalog:
        catalog.execute("create table t (x)")

    real = module._others

    def others(path: Path):
        with closing(sqlite3.connect(database)) as catalog:
            catalog.execute("insert into t values (1)")
            catalog.commit()
        return real(path)

    monkeypatch.setattr(module, "_others", others)
    monkeypatch.setattr(module, "_TRIES", 2)
    with pytest.raises(StoreError, match="stop the outcome join"):
        store.backup(tmp_path / "copy")
    assert not is_backup(tmp_path / "copy")


def test_old_backups_are_pruned_with_what_only_they_need(store: HistoryStore, tmp_path: Path) -> None:
    store.backup(tmp_path / "copy")
    store.append(table(600, 5_000))
    store.compact(full=True)
    store.backup(tmp_path / "copy")
    size = sum(p.stat().st_size for p in (tmp_path / "copy").rglob("*"))
    store.backup(tmp_path / "copy", keep=1)
    assert sum(p.stat().st_size for p in (tmp_path / "copy").rglob("*")) < size
    with pytest.raises(StoreNotFound, match="its backups are 3"):
        HistoryStore.restore(tmp_path / "copy", tmp_path / "new", 1)
    assert check(tmp_path / "copy", tmp_path / "new") == 5_000
    with pytest.raises(InputError, match="keep=0"):
        store.backup(tmp_path / "copy", keep=0)


def test_damage_of_a_backup_is_found_and_not_restored(store: HistoryStore, tmp_path: Path) -> None:
    store.backup(tmp_path / "copy")
    files = [p for p in (tmp_path / "copy").rglob("*") if p.is_file() and p.name != "lock"]
    assert {p.relative_to(tmp_path / "copy").parts[0] for p in files} == {"archive", "backups", "content", "manifests"}
    for path in files:
        held = path.read_bytes()
        path.write_bytes(held[: len(held) // 2] + bytes([held[len(held) // 2] ^ 1]) + held[len(held) // 2 + 1 :])
        if path.parent.name == "backups":
            with pytest.raises(CorruptionError):
                verify_backup(tmp_path / "copy")
        else:
            assert verify_backup(tmp_path / "copy")[2]
        if path.parent.name == "content":
            with pytest.raises(CorruptionError, match="restore an older backup"):
                HistoryStore.restore(tmp_path / "copy", tmp_path / "new")
            assert not HistoryStore.exists(tmp_path / "new")
        path.write_bytes(held)
    # What a restore that failed left is no store, and in nobody's way.
    assert check(tmp_path / "copy", tmp_path / "new") == 600


def test_what_cannot_be_done_is_named(store: HistoryStore, tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="holds none"):
        HistoryStore.restore(tmp_path / "nothing", tmp_path / "new")
    store.backup(tmp_path / "copy")
    with pytest.raises(StoreExists):
        HistoryStore.restore(tmp_path / "copy", tmp_path / "store")
    other = HistoryStore(tmp_path / "store", store.archive, MemoryRecent(SCHEMA))
    with pytest.raises(StoreError, match="LMDB"):
        other.backup(tmp_path / "copy")


@pytest.mark.parametrize("lost", ["archive", "bucket"])
def test_recent_events_without_their_archive_are_not_restored_over(
    store: HistoryStore, tmp_path: Path, lost: str
) -> None:
    store.backup(tmp_path / "copy")
    held = (tmp_path / "store" / "recent" / "data.mdb").read_bytes()
    shutil.rmtree(tmp_path / "store" / "archive")
    if lost == "bucket":
        remember(tmp_path / "store", S3Location("far", "away"))
    with pytest.raises(StoreExists, match="restore to another path"):
        HistoryStore.restore(tmp_path / "copy", tmp_path / "store")
    assert (tmp_path / "store" / "recent" / "data.mdb").read_bytes() == held


def test_a_killed_backup_leaves_nothing_that_counts(store: HistoryStore, tmp_path: Path) -> None:
    store.backup(tmp_path / "copy")
    shutil.copytree(tmp_path / "copy", tmp_path / "before")
    os.remove(tmp_path / "copy" / "backups" / f"{1:020d}.json")
    assert not is_backup(tmp_path / "copy")
    assert store.backup(tmp_path / "copy").bytes < 100_000
    assert check(tmp_path / "copy", tmp_path / "new") == 600


if __name__ == "__main__":
    write(Path(sys.argv[1]))
