"""A folder of backups knows whose it is, gives no name to other content, and is changed by one at a time."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from thinrow.core.errors import CorruptionError, InputError, StoreError
from thinrow.core.units import NEVER
from thinrow.history.backup import prune, verify_backup
from thinrow.history.store import HistoryStore
from thinrow.storage.manifest import ManifestLog
from thinrow.storage.objects import LocalObjects
from thinrow.storage.sealed import seal
from thinrow.testing.generators import generator

DATA = Path(__file__).parents[2] / "data" / "backup-v1"


made = generator(DATA / "generate.py")


def new_store(path: Path, first: int = 0) -> HistoryStore:
    store = HistoryStore.create(path, made.SCHEMA, 2, sync=False)
    grow(store, first)
    return store


def grow(store: HistoryStore, first: int) -> None:
    store.append(made.events(first, first + 10))
    store.compact()


def items(store: HistoryStore) -> list[int]:
    return sorted(store.read(store.users(), NEVER - 1).histories.to_jagged("item").values.tolist())


def restored(folder: Path, path: Path, number: int | None = None) -> list[int]:
    HistoryStore.restore(folder, path, number)
    with HistoryStore.open(path, sync=False) as store:
        return items(store)


def change_record(folder: Path, **entries: object) -> None:
    log = ManifestLog(LocalObjects(folder), "backups", 3)
    body = log.load(1)
    LocalObjects(folder).put(log.name_of(1), seal({**body, **entries}, 3, "manifest"))


def test_a_folder_takes_backups_of_one_store(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    with new_store(tmp_path / "a") as a, new_store(tmp_path / "b", 1_000) as b:
        a.backup(copies)
        with pytest.raises(InputError, match=rf"backups of another store, \w+, which was at {a.path}.*of its own"):
            b.backup(copies, keep=1)
        assert verify_backup(copies, 1) == (1, 10, [])
        a.backup(copies)
    assert restored(copies, tmp_path / "new", 1) == list(range(10))


def test_a_branch_of_the_same_store_replaces_nothing(tmp_path: Path) -> None:
    """Both branches have a generation 3."""
    copies = tmp_path / "copies"
    with new_store(tmp_path / "a") as a:
        a.backup(copies)
        grow(a, 100)
        assert a.backup(copies).generation == 3
    HistoryStore.restore(copies, tmp_path / "b", 1)
    with HistoryStore.open(tmp_path / "b", sync=False) as b:
        grow(b, 900)
        assert b.backup(copies).generation == 3
    for number, first in ((1, None), (2, 100), (3, 900)):
        later = [] if first is None else list(range(first, first + 10))
        assert verify_backup(copies, number)[1:] == (10 + len(later), [])
        assert restored(copies, tmp_path / f"new-{number}", number) == [*range(10), *later]


def test_nothing_is_pruned_under_a_running_backup(tmp_path: Path) -> None:
    copies, refused = tmp_path / "copies", []
    with new_store(tmp_path / "a") as a:
        a.backup(copies)
        grow(a, 100)
        a.compact(full=True)

        def meanwhile(done: int, of: int) -> None:
            for call in (lambda: prune(copies, 1), lambda: a.backup(copies, keep=1)):
                with pytest.raises(StoreError, match="is under way; run again when it has ended"):
                    call()
                refused.append((done, of))

        a.backup(copies, progress=meanwhile)
    assert refused[-1] == (2, 2)
    assert prune(copies, 1) > 0
    assert verify_backup(copies) == (2, 20, [])
    assert restored(copies, tmp_path / "new") == [*range(10), *range(100, 110)]


def test_a_killed_backup_blocks_nobody(tmp_path: Path) -> None:
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    with new_store(tmp_path / "a") as a:
        a.backup(tmp_path / "copies")
        command = [sys.executable, "-S", "-c", hold, str(tmp_path / "copies" / "lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            with pytest.raises(StoreError, match="under way"):
                a.backup(tmp_path / "copies")
            other.kill()
        assert a.backup(tmp_path / "copies", keep=1).number == 2


@pytest.mark.parametrize("name", ["../../out/PWNED", "/tmp/PWNED", "a/../../PWNED", "", ".tmp-restoring", 7, None])
def test_a_record_names_files_inside_the_store_alone(tmp_path: Path, name: object) -> None:
    copies, data = tmp_path / "copies", b"evil"
    with new_store(tmp_path / "a") as a:
        a.backup(copies)
    digest = hashlib.sha256(data).hexdigest()
    (copies / "content" / digest).write_bytes(data)
    change_record(copies, files=[{"name": name, "sha256": digest, "bytes": 4, "mtime_ns": 0}])
    before = sorted(tmp_path.rglob("*"))
    for call in (lambda: HistoryStore.restore(copies, tmp_path / "new"), lambda: verify_backup(copies)):
        with pytest.raises(CorruptionError, match="no record of a backup"):
            call()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("entries", [{"manifest": "../x"}, {"files": [{"sha256": "../x"}]}, {"archive_generation": 7}])
def test_a_record_that_makes_no_sense_is_damage(tmp_path: Path, entries: dict[str, object]) -> None:
    with new_store(tmp_path / "a") as a:
        a.backup(tmp_path / "copies")
    change_record(tmp_path / "copies", **entries)
    with pytest.raises(CorruptionError):
        HistoryStore.restore(tmp_path / "copies", tmp_path / "new")


@pytest.mark.parametrize("part", ["content", "archive", "manifests"])
def test_a_file_that_is_missing_is_said_to_be(tmp_path: Path, part: str) -> None:
    copies = tmp_path / "copies"
    with new_store(tmp_path / "a") as a:
        a.backup(copies)
        grow(a, 100)
        (a.path / "log").write_bytes(b"logged")
        a.compact(full=True)
        a.backup(copies)
    needed = {r: _needed(copies, r) for r in (1, 2)}
    (copies / next(iter(sorted(n for n in needed[2] - needed[1] if n.startswith(part))))).unlink()
    with pytest.raises(CorruptionError, match=rf"{part}/.*(missing|cannot be read).*restore an older backup"):
        HistoryStore.restore(copies, tmp_path / "new", 2)
    assert verify_backup(copies, 2)[2] != []
    # Into the same place: nothing of what the first try restored is left.
    assert restored(copies, tmp_path / "new", 1) == list(range(10))
    assert not (tmp_path / "new" / "log").exists()


def _needed(copies: Path, number: int) -> set[str]:
    """What is there when all but backup ``number`` are gone."""
    scratch = copies.parent / f"only-{number}"
    shutil.copytree(copies, scratch)
    for record in (scratch / "backups").iterdir():
        if int(record.stem) != number:
            record.unlink()
    prune(scratch, 1)
    return {p.relative_to(scratch).as_posix() for p in scratch.rglob("*") if p.is_file()}


def test_backups_of_format_1_verify_restore_and_go_on(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    shutil.copytree(DATA / "copies", copies)
    assert verify_backup(copies, 1) == (1, 20, [])
    assert verify_backup(copies, 2) == (2, 45, [])
    assert restored(copies, tmp_path / "one", 1) == list(range(30))
    assert restored(copies, tmp_path / "two") == list(range(50))
    assert (tmp_path / "two" / "log" / "1").read_bytes() == b"logged"
    with HistoryStore.open(tmp_path / "one", sync=False) as store:
        grow(store, 900)
        assert store.backup(copies).number == 3
    # Generation 3 of this branch is not that of backup 2.
    assert restored(copies, tmp_path / "again", 2) == list(range(50))
    with HistoryStore.open(tmp_path / "two", sync=False) as other, pytest.raises(InputError, match="another store"):
        other.backup(copies)
    assert prune(copies, 2) > 0
    assert [verify_backup(copies, n)[2] for n in (2, 3)] == [[], []]
    assert restored(copies, tmp_path / "last") == [*range(30), *range(900, 910)]


def test_an_older_backup_is_restored_where_a_newer_one_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the killed restore said of generations to be collected would refuse every commit."""
    copies, target = tmp_path / "copies", tmp_path / "r"
    with new_store(tmp_path / "s") as store:
        store.backup(copies)
        grow(store, 100)
        store.backup(copies)
    put = LocalObjects.put_if_absent

    def killed(self: LocalObjects, name: str, data: bytes) -> None:
        if name.startswith("manifests/0"):
            raise KeyboardInterrupt
        put(self, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(LocalObjects, "put_if_absent", killed)
        with pytest.raises(KeyboardInterrupt):
            HistoryStore.restore(copies, target)
    assert restored(copies, target, 1) == list(range(10))
    with HistoryStore.open(target, sync=False) as store:
        generation = store.pin().number
        grow(store, 200)
        assert store.pin().number > generation
        assert items(store) == [*range(10), *range(200, 210)]


def test_a_damaged_record_hides_no_other_backup(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    with new_store(tmp_path / "s") as store:
        store.backup(copies)
        grow(store, 100)
        store.backup(copies)
    *_, newest = sorted((copies / "backups").glob("*.json"))
    record = bytearray(newest.read_bytes())
    record[len(record) // 2] ^= 1
    newest.write_bytes(record)
    assert restored(copies, tmp_path / "r", 1) == list(range(10))


def test_shared_rows_of_a_table_are_not_backed_up(tmp_path: Path) -> None:
    with new_store(tmp_path / "s") as store:
        shared = store.path / "examples" / "decoded" / "abc"
        shared.mkdir(parents=True)
        (shared / "rows").write_bytes(b"x" * 100)
        (store.path / "examples" / "decoded.lock").touch()
        (store.path / "examples" / "kept").write_bytes(b"y")
        store.backup(tmp_path / "copies")
    HistoryStore.restore(tmp_path / "copies", tmp_path / "r")
    assert sorted(p.name for p in (tmp_path / "r" / "examples").iterdir()) == ["kept"]
