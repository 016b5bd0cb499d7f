"""The contract of object stores: subclass, give ``make``, and pytest runs every promise of ``ObjectStore``.

::

    class TestMine(ObjectStoreContract):
        def make(self, folder: Path) -> ObjectStore:
            return MyObjects(folder)
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from thinrow.core.errors import CommitConflict, CorruptionError, InputError, ObjectNotFound
from thinrow.storage.objects import ObjectStore

DATA = bytes(range(256)) * 64


class ObjectStoreContract:
    """What every object store does; see the module."""

    def make(self, folder: Path) -> ObjectStore:
        """An empty store; ``folder`` is an empty directory that it may use."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        """The store under test."""
        return self.make(tmp_path)

    def test_put_get_size(self, store: ObjectStore) -> None:
        store.put("a/b/one", DATA)
        assert store.get("a/b/one") == DATA
        assert store.size("a/b/one") == len(DATA)
        store.put("a/b/one", b"")
        assert store.get("a/b/one") == b""
        assert store.size("a/b/one") == 0
        assert store.has("a/b/one")

    def test_put_if_absent_never_replaces(self, store: ObjectStore) -> None:
        store.put_if_absent("m/1", b"first")
        with pytest.raises(CommitConflict, match="m/1"):
            store.put_if_absent("m/1", b"second")
        assert store.get("m/1") == b"first"
        assert store.list("") == ["m/1"]

    def test_one_of_many_writers_wins(self, store: ObjectStore) -> None:
        winners: list[int] = []
        barrier = threading.Barrier(8)

        def write(k: int) -> None:
            barrier.wait()
            try:
                store.put_if_absent("race/1", bytes([k]) * 1000)
            except CommitConflict:
                return
            winners.append(k)

        threads = [threading.Thread(target=write, args=(k,)) for k in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(winners) == 1
        assert store.get("race/1") == bytes([winners[0]]) * 1000

    def test_what_is_missing_is_named(self, store: ObjectStore) -> None:
        store.put("folder/there", b"x")
        for name in ("nothing", "folder/nothing", "folder", "folder/there/deeper"):
            with pytest.raises(ObjectNotFound, match=name):
                store.get(name)
            with pytest.raises(ObjectNotFound, match=name):
                store.size(name)
            assert name == "folder" or not store.has(name)
            none = np.empty(0, np.int64)
            with pytest.raises(ObjectNotFound, match=name):
                store.read_into(name, none, none, np.empty(0, np.uint8), none)

    def test_list_is_sorted_and_by_prefix(self, store: ObjectStore) -> None:
        names = ["a/2", "a/10", "a/b/c", "ab", "b/1"]
        for name in names:
            store.put(name, b"")
        assert store.list("") == sorted(names)
        assert store.list("a/") == ["a/10", "a/2", "a/b/c"]
        assert store.list("a") == ["a/10", "a/2", "a/b/c", "ab"]
        assert store.list("a/1") == ["a/10"]
        assert store.list("none/at/all") == []
        assert store.list("", "a/2") == ["a/b/c", "ab", "b/1"]
        assert store.list("a/", "a/11") == ["a/2", "a/b/c"]
        assert store.list("a/", "b") == []

    def test_entries_tell_sizes_and_times(self, store: ObjectStore) -> None:
        assert store.entries("a/") == []
        before = time.time() - 60
        store.put("a/1", DATA)
        store.put("a/2", b"xy")
        store.put("b/1", b"")
        found = store.entries("a/")
        assert [(e.name, e.bytes) for e in found] == [("a/1", len(DATA)), ("a/2", 2)]
        # The clock of a server may differ from ours by some seconds.
        assert all(before < e.modified_ms / 1000 < time.time() + 60 for e in found)

    def test_sweep_leaves_whole_objects(self, store: ObjectStore) -> None:
        store.put("a/1", DATA)
        with store.create("a/2") as writer:
            writer.write(b"new")
            store.sweep(int(time.time() * 1000) - 3_600_000)
            writer.write(b" and whole")
        assert store.sweep(int(time.time() * 1000) + 3_600_000) == 0
        assert store.list("") == ["a/1", "a/2"]
        assert store.get("a/2") == b"new and whole"

    def test_delete(self, store: ObjectStore) -> None:
        store.put("a/1", b"x")
        store.delete("a/1")
        store.delete("a/1")
        store.delete("never/was")
        assert store.list("") == []
        store.put_if_absent("a/1", b"again")
        assert store.get("a/1") == b"again"

    def test_create_appears_whole_at_the_end(self, store: ObjectStore) -> None:
        with store.create("s/1") as writer:
            writer.write(b"ab")
            writer.write(memoryview(b"cd"))
            writer.write(np.arange(3, dtype="<u2"))
            writer.write(b"")
            assert store.list("") == []
            with pytest.raises(ObjectNotFound):
                store.get("s/1")
        assert store.get("s/1") == b"abcd\0\0\1\0\2\0"
        assert store.list("") == ["s/1"]

    def test_create_leaves_nothing_after_an_exception(self, store: ObjectStore) -> None:
        def stop_halfway(name: str) -> None:
            with store.create(name) as writer:
                writer.write(DATA)
                raise RuntimeError("halfway")

        with pytest.raises(RuntimeError, match="halfway"):
            stop_halfway("s/1")
        assert store.list("") == []
        store.put("s/2", b"old")
        with pytest.raises(RuntimeError, match="halfway"):
            stop_halfway("s/2")
        assert store.get("s/2") == b"old"

    @pytest.mark.parametrize(
        "name", ["", "/etc/passwd", "../up", "a/../b", "a//b", "a/", "./a", ".tmp-x", "a/.tmp-x", "a\0b"]
    )
    def test_names_that_leave_the_store_are_refused(self, store: ObjectStore, name: str) -> None:
        with pytest.raises(InputError, match="relative path"):
            store.put(name, b"")
        with pytest.raises(InputError, match="relative path"):
            store.put_if_absent(name, b"")
        with pytest.raises(InputError, match="relative path"):
            store.get(name)
        with pytest.raises(InputError, match="relative path"), store.create(name):
            pass
        with pytest.raises(InputError, match="relative path"):
            store.delete(name)

    @pytest.mark.parametrize("gap", [0, 16, 4096, 1 << 20])
    def test_read_into_any_ranges(self, store: ObjectStore, gap: int) -> None:
        store.put("d", DATA)
        rng = np.random.default_rng(gap)
        for n in (1, 5, 3000):
            offsets = rng.integers(0, len(DATA), n)
            lengths = np.minimum(rng.integers(0, 50, n), len(DATA) - offsets)
            self._check_read(store, offsets, lengths, rng.permutation(n), gap)
        ends = np.sort(rng.integers(0, len(DATA), 500))
        self._check_read(store, ends[:-1], np.diff(ends), np.arange(499), gap)

    def _check_read(
        self, store: ObjectStore, offsets: np.ndarray, lengths: np.ndarray, order: np.ndarray, gap: int
    ) -> None:
        places = np.zeros(len(offsets), np.int64)
        places[order] = 3 + np.concatenate([[0], np.cumsum(lengths[order])[:-1]])
        out = np.full(int(lengths.sum()) + 6, 200, np.uint8)
        expected = out.copy()
        for o, n, p in zip(offsets, lengths, places, strict=True):
            expected[p : p + n] = np.frombuffer(DATA[o : o + n], np.uint8)
        store.read_into("d", offsets, lengths, out, places, gap=gap)
        np.testing.assert_array_equal(out, expected)

    @pytest.mark.parametrize(
        ("offset", "length"), [(len(DATA) - 1, 2), (len(DATA) + 1, 0), (-1, 1), (0, -1), (1 << 62, 1 << 62)]
    )
    def test_ranges_outside_the_object_name_the_file(self, store: ObjectStore, offset: int, length: int) -> None:
        store.put("d", DATA)
        out = np.zeros(8, np.uint8)
        with pytest.raises(CorruptionError, match="file d") as caught:
            store.read_into("d", np.array([0, offset]), np.array([1, length]), out, np.array([0, 1]))
        assert caught.value.file == "d"

    def test_destinations_outside_the_buffer_are_refused(self, store: ObjectStore) -> None:
        store.put("d", DATA)
        for place in (-1, 5, 1 << 62):
            with pytest.raises(InputError, match="allocate more"):
                store.read_into("d", np.array([0]), np.array([4]), np.zeros(8, np.uint8), np.array([place]))

    def test_read_many_objects_at_once(self, store: ObjectStore) -> None:
        names = [f"m/{k}" for k in range(5)]
        contents = [bytes([k]) + DATA[k : 1000 * k + 200] for k in range(5)]
        for name, content in zip(names, contents, strict=True):
            store.put(name, content)
        rng = np.random.default_rng(5)
        n = 400
        which = rng.choice([0, 1, 3, 4], n)
        sizes = np.array([len(c) for c in contents])[which]
        offsets = rng.integers(0, sizes)
        lengths = np.minimum(rng.integers(0, 60, n), sizes - offsets)
        order = rng.permutation(n)
        places = np.zeros(n, np.int64)
        places[order] = np.cumsum(lengths[order]) - lengths[order]
        out = np.zeros(int(lengths.sum()), np.uint8)
        for gap in (None, 0, 100):
            out[:] = 0
            store.read_many(names, which, offsets, lengths, out, places, gap=gap)
            for k, o, m, p in zip(which, offsets, lengths, places, strict=True):
                assert out[p : p + m].tobytes() == contents[k][o : o + m]

    def test_read_many_says_which_object_is_wrong(self, store: ObjectStore) -> None:
        store.put("m/0", DATA)
        store.put("m/1", b"short")
        out, ones, zeros = np.zeros(8, np.uint8), np.ones(2, np.int64), np.zeros(2, np.int64)
        with pytest.raises(ObjectNotFound, match="m/2"):
            store.read_many(["m/0", "m/2"], np.array([0, 1]), zeros, ones, out, np.array([0, 1]))
        with pytest.raises(CorruptionError, match="file m/1"):
            store.read_many(["m/0", "m/1"], np.array([0, 1]), zeros, np.array([2, 6]), out, np.array([0, 2]))
        with pytest.raises(InputError, match="name them all"):
            store.read_many(["m/0"], np.array([0, 1]), zeros, ones, out, np.array([0, 1]))
        with pytest.raises(InputError, match="allocate more"):
            store.read_many(["m/0", "m/1"], np.array([0, 1]), zeros, ones, out, np.array([0, 8]))
