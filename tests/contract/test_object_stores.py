"""Both object stores keep the contract; the local one also keeps it against a failing medium."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from thinrow.core.errors import CommitConflict, CorruptionError, StoreError
from thinrow.storage import objects, ranges
from thinrow.storage.cache import CachedObjects
from thinrow.storage.objects import LocalObjects, MemoryObjects, ObjectStore
from thinrow.testing.object_store import DATA, ObjectStoreContract


class TestMemory(ObjectStoreContract):
    def make(self, folder: Path) -> ObjectStore:
        return MemoryObjects()


class TestLocal(ObjectStoreContract):
    def make(self, folder: Path) -> ObjectStore:
        return LocalObjects(folder / "deep" / "root")


class TestCached(ObjectStoreContract):
    """Blocks so small that ranges span many, in a folder so small that most of them are evicted."""

    def make(self, folder: Path) -> ObjectStore:
        return CachedObjects(MemoryObjects(), folder / "cache", ("",), max_bytes=4_000, block_bytes=37)


class TestCachedInPart(ObjectStoreContract):
    def make(self, folder: Path) -> ObjectStore:
        return CachedObjects(LocalObjects(folder / "objects"), folder / "cache", ("a/", "d", "m/"))


class TestLocalWithoutHardLinks(ObjectStoreContract):
    @pytest.fixture(autouse=True)
    def _no_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)

    def make(self, folder: Path) -> ObjectStore:
        return LocalObjects(folder)


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses memory maps."""

    def refuse(*args: object, **named: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(mmap, "mmap", refuse)


class TestLocalWithoutMaps(ObjectStoreContract):
    @pytest.fixture(autouse=True)
    def _unmapped(self, unmapped: None) -> None:
        pass

    def make(self, folder: Path) -> ObjectStore:
        return LocalObjects(folder)


class TestLocalReadInPieces(ObjectStoreContract):
    """Reads that the system cuts short, and buffers longer than one read takes."""

    @pytest.fixture(autouse=True)
    def _short(self, unmapped: None, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = os.preadv

        def cut(descriptor: int, parts: list[memoryview], position: int) -> int:
            return whole(descriptor, [parts[0][:7]], position)

        monkeypatch.setattr(os, "preadv", cut)
        monkeypatch.setattr(ranges, "_MAX_READ", 100)

    def make(self, folder: Path) -> ObjectStore:
        return LocalObjects(folder)


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def fail(*args: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "link"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = LocalObjects(tmp_path)
    store.put("s/old", b"old")
    monkeypatch.setattr(os, call, fail)
    if call != "link":
        with (
            pytest.raises(StoreError, match=r"s/new: No space left on device; .*free space"),
            store.create("s/new") as w,
        ):
            w.write(DATA)
        with pytest.raises(StoreError, match="No space"):
            store.put("s/old", DATA)
    if call != "replace":
        with pytest.raises(StoreError, match="No space"):
            store.put_if_absent("s/new", DATA)
    monkeypatch.undo()
    assert files(tmp_path) == ["s/old"]
    assert store.get("s/old") == b"old"


def test_a_real_limit_of_the_system_leaves_nothing(tmp_path: Path) -> None:
    """A file size limit stops a real write halfway."""
    program = """
import resource, sys
from thinrow.core.errors import StoreError
from thinrow.storage.objects import LocalObjects
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with LocalObjects(sys.argv[1]).create("s/new") as w:
        for _ in range(100):
            w.write(bytes(10_000))
except StoreError as e:
    print(e)
"""
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "cannot write s/new: File too large" in ran.stdout
    assert files(tmp_path) == []


def test_leftovers_of_killed_writers_are_never_shown(tmp_path: Path) -> None:
    store = LocalObjects(tmp_path)
    store.put("s/a", b"a")
    (tmp_path / "s" / ".tmp-0123").write_bytes(b"half")
    assert store.list("") == store.list("s/") == store.list("s") == ["s/a"]


def test_sweep_takes_old_leftovers_alone(tmp_path: Path) -> None:
    store = LocalObjects(tmp_path)
    store.put("a/1", b"whole")
    for name, age_s in (("a/.tmp-old", 100), ("a/.tmp-new", 0), ("a/.tmp-lock", 100)):
        (tmp_path / name).write_bytes(b"123")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    # Killed between the link and the removal of the temporary name: no byte is freed by that.
    os.link(tmp_path / "a/1", tmp_path / "a/.tmp-linked")
    os.utime(tmp_path / "a/1", (time.time() - 100,) * 2)
    assert store.sweep(int(time.time() * 1000) - 50_000) == 3
    assert files(tmp_path) == ["a/.tmp-lock", "a/.tmp-new", "a/1"]


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalObjects(tmp_path)
    store.put("s/first", b"")
    events: list[str] = []
    for name in ("fsync", "replace", "link"):
        real = getattr(os, name)

        def record(*args: object, _name: str = name, _real: object = real) -> object:
            events.append(_name)
            return _real(*args)  # type: ignore[operator]

        monkeypatch.setattr(os, name, record)
    store.put("s/x", b"x")
    store.put_if_absent("s/y", b"y")
    assert events == ["fsync", "replace", "fsync", "fsync", "link", "fsync"]


def test_new_directories_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(objects, "sync_directory", lambda path: synced.append(path))
    LocalObjects(tmp_path).put("a/b/x", b"")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


def test_a_file_that_shrinks_under_a_reader(tmp_path: Path, unmapped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalObjects(tmp_path)
    store.put("d", DATA)
    monkeypatch.setattr(ranges, "check_ranges", lambda *args: os.truncate(tmp_path / "d", 100))
    out = np.zeros(400, np.uint8)
    with pytest.raises(CorruptionError, match=r"file d.*ends at 100"):
        store.read_into("d", np.array([0, 60]), np.array([50, 80]), out, np.array([0, 50]))


def test_near_ranges_cost_one_read(tmp_path: Path, unmapped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalObjects(tmp_path)
    store.put("d", DATA)
    reads: list[int] = []
    whole = os.preadv

    def count(descriptor: int, parts: list[memoryview], position: int) -> int:
        reads.append(sum(len(p) for p in parts))
        return whole(descriptor, parts, position)

    monkeypatch.setattr(os, "preadv", count)
    offsets, lengths = np.array([9000, 0, 100, 108]), np.array([10, 8, 8, 8])
    store.read_into("d", offsets, lengths, np.zeros(34, np.uint8), np.array([0, 10, 18, 26]), gap=100)
    assert sorted(reads) == [10, 116]


def read(store: LocalObjects, name: str, length: int) -> bytes:
    out = np.zeros(length, np.uint8)
    store.read_into(name, np.array([0]), np.array([length]), out, np.array([0]))
    return out.tobytes()


def test_maps_follow_the_file_and_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    whole = mmap.mmap

    def count(descriptor: int, length: int, **named: int) -> mmap.mmap:
        made.append(length)
        return whole(descriptor, length, **named)

    monkeypatch.setattr(mmap, "mmap", count)
    monkeypatch.setattr(ranges, "_MAX_MAPS", 3)
    store = LocalObjects(tmp_path)
    store.put("a", b"one")
    assert read(store, "a", 3) == read(store, "a", 3) == b"one"
    assert made == [3]
    LocalObjects(tmp_path).put("a", b"two")
    assert read(store, "a", 3) == b"two"
    os.truncate(tmp_path / "a", 2)
    with pytest.raises(CorruptionError, match="the file has 2 bytes"):
        read(store, "a", 3)
    for k in range(10):
        store.put(f"b/{k}", b"x")
        assert read(store, f"b/{k}", 1) == b"x"
    assert len(store._files._maps) == 3
    store.delete("b/9")
    assert len(store._files._maps) == 2


def test_processes_race_for_one_name(tmp_path: Path) -> None:
    program = """
import sys
from thinrow.core.errors import CommitConflict
from thinrow.storage.objects import LocalObjects
sys.stdin.readline()
try:
    LocalObjects(sys.argv[1]).put_if_absent("m/1", sys.argv[2].encode())
    print(sys.argv[2])
except CommitConflict:
    pass
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([*command, str(k)], **pipes) for k in range(4)]  # type: ignore[call-overload]
    for run in runs:
        run.stdin.write("\n")
        run.stdin.flush()
    winners = [w for run in runs if (w := run.communicate()[0].strip())]
    assert len(winners) == 1
    assert LocalObjects(tmp_path).get("m/1") == winners[0].encode()
    with pytest.raises(CommitConflict):
        LocalObjects(tmp_path).put_if_absent("m/1", b"later")
