from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from thinrow.core.errors import InputError, ObjectNotFound, StoreError
from thinrow.storage import cache
from thinrow.storage.cache import CachedObjects
from thinrow.storage.meter import Meter, metering
from thinrow.storage.objects import LocalObjects, MemoryObjects

DATA = np.random.default_rng(2).integers(0, 256, 10_000).astype(np.uint8).tobytes()


class Distant(MemoryObjects):
    """Counts what is asked of it; ``before`` runs ahead of each read."""

    concurrency = 4

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []
        self.before = lambda: None

    def read_many(self, names, which, offsets, lengths, out, out_offsets, gap=None):  # type: ignore[no-untyped-def]
        self.before()
        self.reads += [(names[w], int(o), int(n)) for w, o, n in zip(which, offsets, lengths, strict=True)]
        super().read_many(names, which, offsets, lengths, out, out_offsets, gap)


@pytest.fixture
def distant() -> Distant:
    store = Distant()
    store.put("s/a", DATA)
    store.put("s/b", DATA[::-1])
    store.put("m/1", b"first")
    return store


def cached(distant: Distant, folder: Path, max_bytes: int = 1 << 20) -> CachedObjects:
    return CachedObjects(distant, folder, ("s/",), max_bytes=max_bytes, block_bytes=1000)


def read(store: CachedObjects, name: str, offset: int, length: int) -> tuple[bytes, Meter]:
    out = np.zeros(length, np.uint8)
    with metering(Meter()) as meter:
        store.read_into(name, np.array([offset]), np.array([length]), out, np.array([0]))
    return out.tobytes(), meter


def blocks(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*/*") if p.parent.name != "purged")


def test_a_block_is_fetched_once_and_survives_a_restart(distant: Distant, tmp_path: Path) -> None:
    store = cached(distant, tmp_path)
    data, meter = read(store, "s/a", 1900, 1200)
    assert data == DATA[1900:3100]
    assert (meter.cache_hits, meter.cache_misses) == (0, 3)
    assert distant.reads == [("s/a", 1000, 1000), ("s/a", 2000, 1000), ("s/a", 3000, 1000)]
    for again in (store, cached(distant, tmp_path)):
        data, meter = read(again, "s/a", 2100, 900)
        assert data == DATA[2100:3000]
        assert (meter.cache_hits, meter.cache_misses, meter.bytes_fetched) == (1, 0, 0)
    assert len(distant.reads) == 3


def test_what_may_change_is_never_cached(distant: Distant, tmp_path: Path) -> None:
    store = cached(distant, tmp_path)
    assert read(store, "m/1", 0, 5)[0] == b"first"
    distant.put("m/1", b"other")
    assert read(store, "m/1", 0, 5)[0] == b"other"
    assert store.get("m/1") == b"other"
    assert blocks(tmp_path) == []


def test_an_object_written_again_through_the_cache_is_read_anew(distant: Distant, tmp_path: Path) -> None:
    store = cached(distant, tmp_path)
    read(store, "s/a", 0, 100)
    store.put("s/a", b"short")
    assert read(store, "s/a", 0, 5)[0] == b"short"
    with store.create("s/a") as writer:
        writer.write(b"again")
    assert read(store, "s/a", 0, 5)[0] == b"again"


def test_a_damaged_block_is_fetched_again_never_served(distant: Distant, tmp_path: Path) -> None:
    store = cached(distant, tmp_path)
    read(store, "s/a", 0, 2000)
    block = next(p for p in blocks(tmp_path) if p.name == "1")
    whole = block.read_bytes()
    rng = np.random.default_rng(0)
    for place in [*range(40), *rng.integers(40, len(whole), 60).tolist()]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        block.write_bytes(damaged)
        data, meter = read(store, "s/a", 0, 2000)
        assert data == DATA[:2000]
        assert (meter.cache_hits, meter.cache_misses) == (1, 1), place
        assert block.read_bytes() == whole
    for other in (whole[:-1], b"", whole[:20]):
        block.write_bytes(other)
        assert read(store, "s/a", 0, 2000)[0] == DATA[:2000]
        assert block.read_bytes() == whole


def test_a_block_in_the_place_of_another_is_not_served(distant: Distant, tmp_path: Path) -> None:
    store = cached(distant, tmp_path)
    read(store, "s/a", 0, 2000)
    read(store, "s/b", 0, 2000)
    a0, b0 = (p for p in blocks(tmp_path) if p.name == "0")
    a0.write_bytes(b0.read_bytes())
    assert read(store, "s/a", 0, 1000)[0] == DATA[:1000]
    assert read(store, "s/b", 0, 1000)[0] == DATA[::-1][:1000]
    a0.write_bytes((a0.parent / "1").read_bytes())
    b0.write_bytes((b0.parent / "1").read_bytes())
    assert read(store, "s/a", 0, 1000)[0] == DATA[:1000]
    assert read(store, "s/b", 0, 1000)[0] == DATA[::-1][:1000]


def test_the_folder_stays_within_its_bound_and_keeps_what_is_read(distant: Distant, tmp_path: Path) -> None:
    store = cached(distant, tmp_path, max_bytes=5_500)
    for k in range(40):
        assert read(store, "s/a", 200, 300)[0] == DATA[200:500]
        at = 1000 * (k % 9 + 1)
        assert read(store, "s/b", at, 500)[0] == DATA[::-1][at : at + 500]
        assert store.cached_bytes() <= 5_500
    assert distant.reads.count(("s/a", 0, 1000)) == 1
    assert len(distant.reads) > 30


def test_after_a_purge_no_byte_is_left_and_none_comes_back(distant: Distant, tmp_path: Path) -> None:
    store, other = cached(distant, tmp_path), cached(distant, tmp_path)
    read(store, "s/a", 0, 5000)
    read(store, "s/b", 0, 1000)
    # Another reader is between its fetch and the cache when the purge comes.
    distant.before = lambda: store.purge(["s/a"])
    assert read(other, "s/a", 5000, 5000)[0] == DATA[5000:]
    distant.before = lambda: None
    assert read(other, "s/a", 0, 1000)[0] == DATA[:1000]
    names = {p.parent.name for p in blocks(tmp_path)}
    assert len(names) == 1
    assert not any(DATA[k : k + 16] in p.read_bytes() for p in blocks(tmp_path) for k in range(0, 9000, 500))
    store.delete("s/a")
    with pytest.raises(ObjectNotFound, match="s/a"):
        read(other, "s/a", 0, 1000)
    assert read(other, "s/b", 0, 1000)[1].cache_hits == 1


def test_a_deleted_object_is_gone_for_all_who_share_the_folder(distant: Distant, tmp_path: Path) -> None:
    store, other = cached(distant, tmp_path), cached(distant, tmp_path)
    read(other, "s/a", 0, 5000)
    store.delete("s/a")
    with pytest.raises(ObjectNotFound):
        read(other, "s/a", 0, 1000)
    with pytest.raises(ObjectNotFound):
        other.size("s/a")


def test_forgotten_objects_may_be_cached_again(distant: Distant, tmp_path: Path) -> None:
    store = cached(distant, tmp_path)
    read(store, "s/a", 0, 1000)
    store.forget("s/a")
    assert blocks(tmp_path) == []
    assert read(store, "s/a", 0, 1000)[1].cache_misses == 1
    assert read(store, "s/a", 0, 1000)[1].cache_hits == 1


def test_a_fetch_that_took_too_long_is_not_stored_and_old_marks_go(
    distant: Distant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = cached(distant, tmp_path)
    clock = [1e9]
    monkeypatch.setattr(cache.time, "time", lambda: clock[0])

    def wait() -> None:
        clock[0] += cache._STALE_S

    store.size("s/a")
    distant.before = wait
    assert read(store, "s/a", 0, 1000)[0] == DATA[:1000]
    assert [p.name for p in blocks(tmp_path)] == ["size"]
    monkeypatch.undo()
    store.purge(["s/a", "s/b"])
    old, _ = sorted((tmp_path / "purged").iterdir())
    os.utime(old, (0, 0))
    store._evict()
    assert len(list((tmp_path / "purged").iterdir())) == 1


def test_a_full_disk_costs_the_caching_not_the_read(
    distant: Distant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = cached(distant, tmp_path)

    def fail(*args: object, **named: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", fail)
    assert read(store, "s/a", 0, 5000)[0] == DATA[:5000]
    assert blocks(tmp_path) == []
    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(StoreError, match=r"no cache at .*choose another folder"):
        cached(distant, tmp_path / "x")


def test_sizes_that_cannot_work_are_refused(distant: Distant, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_bytes=10"):
        cached(distant, tmp_path, max_bytes=10)
    cached(distant, tmp_path)
    with pytest.raises(InputError, match="blocks of 1000 bytes, not 500"):
        CachedObjects(distant, tmp_path, ("",), block_bytes=500)


def test_long_ranges_are_read_in_bounded_memory(
    distant: Distant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_STAGED_BYTES", 3000)
    store = cached(distant, tmp_path)
    whole = store._staged
    staged: list[int] = []

    def watch(*args):  # type: ignore[no-untyped-def]
        buffer, places = whole(*args)
        staged.append(len(buffer))
        return buffer, places

    monkeypatch.setattr(store, "_staged", watch)
    assert read(store, "s/a", 500, 9000)[0] == DATA[500:9500]
    assert max(staged) <= 2 * 3000
    assert len(staged) >= 3


def test_a_task_elsewhere_opens_it_anew(tmp_path: Path) -> None:
    local = LocalObjects(tmp_path / "objects")
    local.put("s/a", DATA)
    store = CachedObjects(local, tmp_path / "cache", ("s/",), max_bytes=50_000, block_bytes=1000)
    read(store, "s/a", 0, 1000)
    again = pickle.loads(pickle.dumps(store))
    assert (again.max_bytes, again.block_bytes, again.folder) == (50_000, 1000, tmp_path / "cache")
    data, meter = read(again, "s/a", 0, 2000)
    assert data == DATA[:2000]
    assert (meter.cache_hits, meter.cache_misses) == (1, 1)


def test_threads_share_it(distant: Distant, tmp_path: Path) -> None:
    store = cached(distant, tmp_path, max_bytes=4_000)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(150):
            offset = int(rng.integers(0, 9000))
            if read(store, "s/a", offset, 900)[0] != DATA[offset : offset + 900]:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_processes_share_it(tmp_path: Path) -> None:
    local = LocalObjects(tmp_path / "objects")
    local.put("s/a", DATA)
    program = """
import sys
import numpy as np
from thinrow.storage.cache import CachedObjects
from thinrow.storage.meter import Meter, metering
from thinrow.storage.objects import LocalObjects
folder, seed = sys.argv[1], int(sys.argv[2])
local = LocalObjects(folder + "/objects")
data = local.get("s/a")
store = CachedObjects(local, folder + "/cache", ("",), max_bytes=6_000, block_bytes=1000)
rng = np.random.default_rng(seed)
with metering(Meter()) as meter:
    for k in range(100):
        at = int(rng.integers(0, 9000))
        out = np.zeros(900, np.uint8)
        store.read_into("s/a", np.array([at]), np.array([900]), out, np.array([0]))
        assert out.tobytes() == data[at : at + 900]
        if k % 30 == 29:
            store.forget("s/a")
assert meter.cache_hits and meter.cache_misses
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    runs = [subprocess.Popen([*command, str(k)], stderr=subprocess.PIPE, text=True) for k in range(2)]
    assert [run.communicate()[1] for run in runs] == ["", ""]
    assert [run.returncode for run in runs] == [0, 0]
    assert sum(p.stat().st_size for p in blocks(tmp_path / "cache")) <= 6_000 * 1.1
