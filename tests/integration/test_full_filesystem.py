"""A file system with no room left: what was acknowledged stays, errors are clear, and it goes on when there is room.

Beside ``test_full_disk.py``, where a limit on the size of a file stands for the full disk, this is one: a tmpfs of some
megabytes, mounted by the test, which only root may. Run as a script, this file is the process that fills it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import StoreError
from thinrow.core.units import NEVER
from thinrow.examples import ExampleTable, ImpressionLog, Impressions, OutcomeLog, Outcomes, join_logs
from thinrow.history.archive.verify import verify_generation
from thinrow.history.dead_letters import DeadLetters, Letter
from thinrow.history.store import HistoryStore
from thinrow.online import Journal
from thinrow.schema import EventSchema, ExampleSchema
from thinrow.sources.files import FileSource
from thinrow.sources.ingest import Ingest, IngestOptions

ARROW = pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int64())])
SCHEMA = EventSchema.infer(ARROW, user="user", time="ts")
EXAMPLES = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 50})


def events(first: int, n: int) -> pa.Table:
    k = first + np.arange(n)
    return pa.table({"user": k % 50, "ts": k, "item": k}, ARROW)


def items(store: HistoryStore) -> list[int]:
    return sorted(store.read(store.users(), NEVER - 1).histories.to_jagged("item").values.tolist())


class Disk:
    """The file system at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path, self._filler = path, path / "filler"

    @contextmanager
    def full(self) -> Iterator[None]:
        """Not a byte is left within."""
        with self._filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 4_096, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue
        try:
            yield
        finally:
            self._filler.unlink()


def refused(do: Callable[[], Any], tries: int = 1) -> int:
    """How often ``do`` was done before it was refused: a file that is there may have room within. Raises otherwise."""
    for done in range(tries):
        try:
            do()
        except StoreError as e:
            if "space" not in str(e) and "disk" not in str(e):
                raise
            return done
    raise AssertionError("nobody noticed that the disk is full")


def appends(disk: Disk) -> HistoryStore:
    store = HistoryStore.create(disk.path / "store", SCHEMA, 2)
    store.append(events(0, 3_000))
    n = 3_000

    def more() -> None:
        nonlocal n
        store.append(events(n, 500))
        n += 500

    with disk.full():
        refused(more, 500)
        assert items(store) == list(range(n))
        assert store.verify_recent() == []
    more()
    assert items(store) == list(range(n))
    return store


def compactions(disk: Disk, store: HistoryStore) -> None:
    for full in (False, True):
        before = items(store)
        with disk.full():
            refused(lambda full=full: store.compact(full=full))
            assert items(store) == before
            assert verify_generation(store.pin()) == []
            assert store.verify_recent() == []
        store.compact(full=full)
        assert items(store) == before
        store.append(events(len(before), 100))


def sources(disk: Disk, store: HistoryStore, files: Path) -> None:
    first = len(items(store))
    path = files / "in.jsonl"
    rows = [{"user": i % 50, "ts": i, "item": i} for i in range(first, first + 20_000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "junk\n")
    ingest = Ingest(store, FileSource("in", [path]), IngestOptions(batch_events=500))
    with disk.full():
        refused(ingest.run)
        held = items(store)
        assert held == list(range(len(held)))
    report = ingest.run()
    assert report.refused == 1
    assert items(store) == list(range(first + 20_000))
    letters, n = DeadLetters(disk.path / "dead", lambda: 0), 0

    def add() -> None:
        nonlocal n
        letters.add([Letter("s", "0", str(n), "why", b"x" * 1_000)])
        n += 1

    add()
    with disk.full():
        refused(add, 10)
        assert letters.count() == n
    add()
    assert [x.where for x in letters.read()] == [str(i) for i in range(n)]


def logs_of(disk: Disk) -> tuple[ImpressionLog, OutcomeLog]:
    return ImpressionLog(disk.path / "shown", SCHEMA, EXAMPLES), OutcomeLog(disk.path / "clicks")


def journal(disk: Disk, store: HistoryStore) -> int:
    seen = store.snapshot([1], 100_000)
    acknowledged: list[int] = []
    number = 0

    def log() -> None:
        nonlocal number
        number += 1
        opened.impressions(Impressions.of(EXAMPLES, [number], seen, candidates={"item": [[number, 9]]})).result(120)
        acknowledged.append(number)

    opened = Journal(disk.path / "journal", *logs_of(disk), roll_s=0.05)
    log()
    with disk.full():
        # It cannot bring to the log what it holds, and then takes no more.
        time.sleep(0.2)
        refused(log, 50)
        assert opened.broken is None
    log()
    with disk.full():
        # What is acknowledged and cannot be brought to the log is there when the journal is opened again.
        opened.close()
    opened = Journal(disk.path / "journal", *logs_of(disk))
    log()
    opened.close()
    shown, clicks = logs_of(disk)
    assert sorted(int(r) for part in shown.scan() for r in part.request_id) == acknowledged
    n = len(acknowledged)
    clicked = Outcomes.of("click", acknowledged, [9] * n, [100_001] * n)
    with disk.full():
        refused(lambda: clicks.append(clicked))
    clicks.append(clicked)
    return n


def table(disk: Disk, n: int) -> None:
    shown, clicks = logs_of(disk)
    made = ExampleTable.create(disk.path / "examples", event_schema=SCHEMA, example_schema=EXAMPLES)
    with disk.full():
        refused(lambda: join_logs(shown, clicks, made, now_ms=NEVER - 1))
        assert not made.buckets()
    assert join_logs(shown, clicks, made, now_ms=NEVER - 1).examples == n
    rows = pa.concat_tables([made.scan_bucket(b) for b in made.buckets()])
    assert len(set(rows["request_id"].to_pylist())) == rows.num_rows == n
    made.close()


def work(disk: Disk, files: Path) -> None:
    with appends(disk) as store:
        print("append", flush=True)
        compactions(disk, store)
        print("compact", flush=True)
        sources(disk, store, files)
        print("sources", flush=True)
        n = journal(disk, store)
        print("journal", flush=True)
        table(disk, n)
        print("table", flush=True)


def test_a_file_system_without_room_loses_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place, files = tmp_path / "disk", tmp_path / "files"
    place.mkdir()
    files.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        done = subprocess.run([sys.executable, __file__, str(place), str(files)], capture_output=True, text=True)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["append", "compact", "sources", "journal", "table"]


if __name__ == "__main__":
    work(Disk(Path(sys.argv[1])), Path(sys.argv[2]))
