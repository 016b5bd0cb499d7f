"""Decoded rows that readers share: the same batches, each row group decoded once, and nothing of what was erased."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy.exc import OperationalError

from thinrow.core.errors import InputError, ObjectNotFound, StoreError
from thinrow.dpp import client
from thinrow.examples import decoded
from thinrow.examples.decoded import FOLDER, DecodedRows, claim, nothing_kept
from thinrow.examples.erase import erase_everywhere
from thinrow.examples.records import ExampleBatch
from thinrow.examples.table import ExampleTable
from thinrow.history.store import HistoryStore
from thinrow.testing.engines import digest
from thinrow.testing.world import make_world

SMALL: dict[str, Any] = {"base_rows": 4, "block": 2, "seed": 3, "threads": 2}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[HistoryStore, ExampleTable]]:
    world = make_world(tmp_path, users=6, days=6)
    with world.store() as store, world.table() as table:
        yield store, table


def test_row_groups_are_decoded_once_for_all_readers_and_damaged_ones_again(
    opened: tuple[HistoryStore, ExampleTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [digest(b) for b in client.loader(*opened, **SMALL)]
    scanned: list[int] = []
    scan = ExampleTable.scan_bucket
    monkeypatch.setattr(
        ExampleTable, "scan_bucket", lambda self, b, *a, **k: scanned.append(b) or scan(self, b, *a, **k)
    )
    folder = opened[1].path / FOLDER

    def read(**options: Any) -> list[str]:
        scanned.clear()
        return [digest(b) for b in client.loader(*opened, **SMALL, **options)]

    assert read(cache_bytes=1 << 24) == plain
    assert sorted(scanned) == [0, 1]
    files = sorted(folder.rglob("*/*"))
    assert len(files) == 2
    # Other sessions, epochs and processes.
    assert read(cache_bytes=1 << 24) == plain
    assert read(cache_bytes=1 << 24, epochs=2)[:3] == plain[:3]
    assert scanned == []
    # Every byte of a file is checked, and what is short.
    whole = files[0].read_bytes()
    for at in (0, 9, 100, len(whole) - 1):
        files[0].write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read(cache_bytes=1 << 24) == plain
        assert len(scanned) == 1
        assert files[0].read_bytes() == whole
    for n in (0, 63, 64, len(whole) // 2):
        files[0].write_bytes(whole[:n])
        assert read(cache_bytes=1 << 24) == plain
    # A filter keeps other rows.
    some = {"user_share": 0.5}
    kept = [digest(b) for b in client.loader(*opened, **SMALL, **some)]
    assert read(cache_bytes=1 << 24, **some) == read(cache_bytes=1 << 24, **some) == kept != plain


@pytest.mark.slow
def test_worker_processes_share_them(opened: tuple[HistoryStore, ExampleTable]) -> None:
    options = {**SMALL, "engine": "processes", "cache_bytes": 1 << 24}
    plain = [digest(b) for b in client.loader(*opened, **SMALL)]
    assert [digest(b) for b in client.loader(*opened, **options)] == plain
    files = {f: f.stat().st_ino for f in (opened[1].path / FOLDER).rglob("*/*")}
    assert len(files) == 2
    assert [digest(b) for b in client.loader(*opened, **options)] == plain
    assert {f: f.stat().st_ino for f in files} == files


def test_bytes_are_bounded_and_a_folder_that_refuses_costs_nothing(
    opened: tuple[HistoryStore, ExampleTable], tmp_path: Path
) -> None:
    rows = opened[1].scan_bucket(0)
    shared = claim(tmp_path, 3 * (rows.nbytes + 8_192), lambda: True)
    assert shared is not None
    for i in range(12):
        assert shared.put(f"{i:032x}", rows)
        assert sum(f.stat().st_size for f in shared.folder.iterdir()) <= shared.max_bytes
    found = shared.get(f"{11:032x}")
    assert found is not None
    assert found.equals(rows)
    assert shared.get(f"{0:032x}") is None
    assert not DecodedRows(shared.folder, 100).put("0", rows)
    # A name that is a folder, and a table's folder that is a file.
    (shared.folder / "x").mkdir()
    assert shared.get("x") is None
    assert not shared.put("x", rows)
    (tmp_path / "file").write_text("")
    assert claim(tmp_path / "file", 1 << 24, lambda: True) is None
    with pytest.raises(InputError, match="cache_bytes=-1"):
        client.loader(*opened, cache_bytes=-1)


def test_two_claims_share_a_folder_which_is_gone_for_good_after_an_erasure(
    opened: tuple[HistoryStore, ExampleTable], tmp_path: Path
) -> None:
    rows = opened[1].scan_bucket(0)
    first, second = (claim(tmp_path, 1 << 24, lambda: True) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.folder == second.folder
    assert first.put("a", rows)
    assert second.get("a") is not None
    with nothing_kept(tmp_path):
        assert not (tmp_path / FOLDER).exists()
        assert not first.put("a", rows)
    later = claim(tmp_path, 1 << 24, lambda: True)
    assert later is not None
    assert later.folder != first.folder
    assert not first.put("a", rows)
    assert first.get("a") is None
    assert list(later.folder.iterdir()) == []


def test_nobody_claims_while_an_erasure_commits(tmp_path: Path) -> None:
    order: list[str] = []

    def stands() -> bool:
        order.append("asked")
        return False

    with nothing_kept(tmp_path):
        waiting = threading.Thread(target=claim, args=(tmp_path, 1, stands))
        waiting.start()
        waiting.join(0.2)
        order.append("committed")
    waiting.join(30)
    assert order == ["committed", "asked"]


def test_an_erasure_that_cannot_remove_them_changes_nothing(
    opened: tuple[HistoryStore, ExampleTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, table = opened
    before, rows = table.snapshot_id, table.rows()
    shared = claim(table.path, 1 << 24, lambda: True)
    assert shared is not None
    shared.put("a", table.scan_bucket(0))
    monkeypatch.setattr(decoded.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(decoded, "_ATTEMPTS", 3)
    with pytest.raises(StoreError, match="cannot be removed"):
        table.rewrite(lambda examples: (examples.take(np.arange(0)), np.arange(0)))
    assert (table.snapshot_id, table.rows()) == (before, rows)


def first_row_away(examples: ExampleBatch) -> tuple[ExampleBatch, Any]:
    kept = np.arange(1, len(examples))
    return examples.take(kept), kept


@pytest.mark.parametrize("clustered", [True, False])
def test_no_snapshot_stands_once_an_erasure_has_committed(
    opened: tuple[HistoryStore, ExampleTable], monkeypatch: pytest.MonkeyPatch, clustered: bool
) -> None:
    _, table = opened
    older = table.snapshot_id
    assert older is not None
    assert table.stands(older)
    # Another commit between: the erasure's readers go on from the newest only. Unclustered they cannot go on at all.
    newer = table.append(table.read_bucket(0, start=0, stop=2))
    if clustered:
        newer = table.cluster()
    assert newer is not None
    assert table.stands(older)
    assert table.stands(newer)
    # Killed after the commit, before snapshots expire.
    monkeypatch.setattr(ExampleTable, "remove_unreferenced", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        table.rewrite(first_row_away)
    assert {older, newer} <= {s.snapshot_id for s in table._refreshed().metadata.snapshots}
    assert not table.stands(older)
    assert not table.stands(newer)
    newest = table.snapshot_id
    assert newest is not None
    assert table.stands(newest)
    assert table.stands(table.append(table.read_bucket(0, start=0, stop=2)))
    assert not table.stands(12345)


def test_what_goes_wrong_with_a_claim_ends_no_run(opened: tuple[HistoryStore, ExampleTable], tmp_path: Path) -> None:
    def raises(error: Exception) -> Any:
        def stands() -> bool:
            raise error

        return stands

    for error in (ObjectNotFound("gone"), StoreError("busy"), OperationalError("x", None, Exception("locked"))):
        assert claim(tmp_path, 1, raises(error)) is None


@pytest.mark.parametrize("odd", ["link", "file"])
def test_what_is_no_folder_does_not_stop_an_erasure(tmp_path: Path, odd: str) -> None:
    root = tmp_path / "table"
    root.mkdir()
    if odd == "link":
        (tmp_path / "fast").mkdir()
        (root / FOLDER).symlink_to(tmp_path / "fast")
    held = claim(root, 1 << 20, lambda: True)
    assert held is not None
    if odd == "file":
        (root / FOLDER / ".nfs0001").write_text("")
    with nothing_kept(root):
        assert not held.folder.exists()
        assert not (root / FOLDER).exists() or list((root / FOLDER).iterdir()) == []


def test_a_child_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    def stands() -> bool:
        pids.append(os.fork())
        if not pids[-1]:
            time.sleep(60)
            os._exit(0)
        return True

    pids: list[int] = []
    try:
        assert claim(tmp_path, 1 << 20, stands) is not None
        other = threading.Thread(target=claim, args=(tmp_path, 1 << 20, lambda: True))
        other.start()
        other.join(30)
        assert not other.is_alive()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_later_schema_changes_nothing_for_a_reader_that_shares(tmp_path: Path) -> None:
    """Rows of the table's columns when it began, also where others share rows of later ones."""

    def read(name: str, **options: Any) -> list[str]:
        world = make_world(tmp_path / name, users=6, days=6)
        with world.store() as store, world.table() as table:
            walk = iter(client.loader(store, table, **{**SMALL, "threads": 1, "epochs": 2}, **options))
            found = [digest(next(walk))]
            store.evolve(add={"added": {"trait": "id", "dtype": "int8", "group": "main"}})
            with ExampleTable.open(table.path) as other:
                other.evolve(store.schema)
                if options:
                    # Another job of the later schema shares its rows, too.
                    assert [len(b) for b in client.loader(store, other, **SMALL, **options)]
            return found + [digest(batch) for batch in walk]

    assert read("shared", cache_bytes=1 << 24) == read("apart")


def users_kept(table: ExampleTable) -> set[int]:
    """Users of all rows that some file holds."""
    found = set[int]()
    for file in (table.path / FOLDER).rglob("*"):
        if file.is_file():
            rows = DecodedRows(file.parent, 1 << 24).get(file.name)
            # A killed writer's file may be cut off; it is not read, and still its bytes must go with an erasure.
            assert rows is not None or file.name.startswith(".")
            if rows is not None:
                users = ExampleBatch.from_arrow(rows, table.event_schema, table.example_schema).batch.users
                found |= set(np.asarray(users).tolist())
    return found


READER = """
import sys
from thinrow.dpp import loader
from thinrow.examples.table import ExampleTable
from thinrow.history.store import HistoryStore
with HistoryStore.open(sys.argv[1]) as store:
    while True:
        with ExampleTable.open(sys.argv[2]) as table:
            for number, batch in enumerate(loader(
                store, table, base_rows=4, block=1, threads=1, cache_bytes=1 << 24, on_missing="skip"
            )):
                print(number, flush=True)
"""


@pytest.mark.slow
def test_readers_killed_while_users_are_erased_leave_nothing_of_them(
    opened: tuple[HistoryStore, ExampleTable],
) -> None:
    store, table = opened
    rng = np.random.default_rng(0)
    everybody = {u for batch in client.loader(store, table, **SMALL) for u in np.asarray(batch.users).tolist()}
    gone = set[int]()
    also = partial(erase_everywhere, impressions=[], outcomes=[], tables=[table])
    for user in sorted(everybody)[:-1]:
        command = [sys.executable, "-c", READER, str(store.path), str(table.path)]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for reader in readers:
            assert reader.stdout is not None
            for _ in range(int(rng.integers(1, 30))):
                assert reader.stdout.readline()
        store.erase([user], also=also, grace_s=0)
        gone.add(user)
        assert not users_kept(table) & gone
        for reader in readers:
            for _ in range(int(rng.integers(30))):
                assert reader.stdout.readline()  # type: ignore[union-attr]
            reader.kill()
            reader.wait()
            reader.stdout.close()  # type: ignore[union-attr]
        assert not users_kept(table) & gone


def test_nothing_of_what_was_erased_is_kept_not_even_by_who_decoded_it_before(
    opened: tuple[HistoryStore, ExampleTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, table = opened
    folder, erased = table.path / FOLDER, list[int]()

    def also(generation: Any, whole: Any) -> Any:
        return erase_everywhere(generation, whole, impressions=[], outcomes=[], tables=[table])

    options = {**SMALL, "threads": 1, "cache_bytes": 1 << 24, "on_missing": "skip"}
    everybody = {u for batch in client.loader(store, table, **options) for u in np.asarray(batch.users).tolist()}
    assert users_kept(table) == everybody
    for file in folder.rglob("*/*"):
        file.unlink()
    scan = ExampleTable.scan_bucket

    def scan_then_erase(self: ExampleTable, *args: Any, **rest: Any) -> Any:
        rows = scan(self, *args, **rest)
        if not erased:
            erased.append(min(everybody))
            store.erase([erased[0]], also=also, grace_s=0)
        return rows

    with ExampleTable.open(table.path) as own:
        second = client.loader(store, own, epochs=3, **options)
        monkeypatch.setattr(ExampleTable, "scan_bucket", scan_then_erase)
        seen = [np.asarray(batch.users).tolist() for batch in second]
    assert erased[0] not in seen[-1]
    assert erased[0] not in users_kept(table)
    monkeypatch.setattr(ExampleTable, "scan_bucket", scan)
    assert list(client.loader(store, table, **options))
    assert users_kept(table) == everybody - set(erased)
