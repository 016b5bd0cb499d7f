"""The manifest log: commits that race, and files that are damaged, renamed or from the future."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from thinrow.core.errors import CommitConflict, CorruptionError, InputError, NewerFormatError, ObjectNotFound
from thinrow.storage.manifest import ManifestLog
from thinrow.storage.objects import LocalObjects, MemoryObjects

NAME = "manifests/00000000000000000002.json"


def body(n: int, **more: Any) -> dict[str, Any]:
    return {"generation": n, "segments": [["größe", 1.5, None]], "big": 2**70, **more}


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def log(objects: MemoryObjects) -> ManifestLog:
    log = ManifestLog(objects)
    assert log.latest() is None
    assert log.list() == []
    for n in (1, 2):
        log.commit(n, body(n))
    return log


def test_round_trip(log: ManifestLog, objects: MemoryObjects) -> None:
    assert log.list() == [1, 2]
    assert log.latest() == (2, body(2))
    assert log.load(1) == body(1)
    assert objects.list("") == ["manifests/00000000000000000001.json", NAME]


def test_other_files_are_not_generations(log: ManifestLog, objects: MemoryObjects) -> None:
    objects.put("manifests/readme.json", b"")
    objects.put("manifests/3.json", b"")
    objects.put("manifests/sub/00000000000000000009.json", b"")
    assert log.list() == [1, 2]


def test_what_is_missing(log: ManifestLog) -> None:
    with pytest.raises(ObjectNotFound):
        log.load(3)


def test_a_number_is_committed_once(log: ManifestLog) -> None:
    with pytest.raises(CommitConflict, match=NAME):
        log.commit(2, body(2, note="other"))
    assert log.load(2) == body(2)


def test_one_of_racing_writers_wins(tmp_path: Path) -> None:
    won: list[int] = []
    barrier = threading.Barrier(6)

    def write(k: int) -> None:
        barrier.wait()
        try:
            ManifestLog(LocalObjects(tmp_path)).commit(1, body(1, writer=k))
        except CommitConflict:
            return
        won.append(k)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(won) == 1
    assert ManifestLog(LocalObjects(tmp_path)).load(1)["writer"] == won[0]


@pytest.mark.parametrize(
    "bad", [{"generation": 4}, {}, {"generation": 3, "x": float("nan")}, {"generation": 3, "x": b""}]
)
def test_bodies_that_cannot_be_committed(log: ManifestLog, bad: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        log.commit(3, bad)
    assert log.list() == [1, 2]


@pytest.mark.parametrize("bad", [{"x": {1: 2}}, {"x": (1, 2)}])
def test_bodies_that_would_read_back_otherwise(log: ManifestLog, bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="read back"):
        log.commit(3, {"generation": 3, **bad})


@pytest.mark.parametrize("n", [-1, 10**20])
def test_numbers_that_do_not_fit(log: ManifestLog, n: int) -> None:
    with pytest.raises(InputError, match=str(n)):
        log.load(n)


def test_no_changed_byte_changes_what_is_read(log: ManifestLog, objects: MemoryObjects) -> None:
    """White space may change; anything else is noticed."""
    good = objects.get(NAME)
    for at in range(len(good)):
        for flip in (0x01, 0x10, 0x80):
            bad = bytearray(good)
            bad[at] ^= flip
            objects.put(NAME, bytes(bad))
            read = None
            with suppress(CorruptionError, NewerFormatError):
                read = log.load(2)
            assert read in (None, body(2))


def test_a_copy_under_another_number(log: ManifestLog, objects: MemoryObjects) -> None:
    objects.put("manifests/00000000000000000007.json", objects.get(NAME))
    with pytest.raises(CorruptionError, match="describes generation 2"):
        log.latest()


def test_newer_formats_are_refused_by_number(log: ManifestLog, objects: MemoryObjects) -> None:
    objects.put(NAME, json.dumps({"format": 3, "unknown": 1}).encode())
    with pytest.raises(NewerFormatError, match=f"{NAME} has format 3, this thinrow reads up to 2"):
        log.latest()


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"[]", b"1", b'{"format": 1}', b'{"format": "1", "body": {}}', b'{"format": 0}']
)
def test_files_that_are_no_manifest(log: ManifestLog, objects: MemoryObjects, text: bytes) -> None:
    objects.put(NAME, text)
    with pytest.raises(CorruptionError, match=NAME):
        log.load(2)
