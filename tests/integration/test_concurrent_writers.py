"""Processes append, compact, bulk-load, collect garbage and read at once, and are killed (SIGKILL) at random moments.

Nothing is lost and nothing doubled, and who holds a generation can read it to the last byte. Run as a script, this file
is one such process: operation j of process i appends or loads twenty events of users that are its own.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.units import NEVER
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.verify import verify_generation
from thinrow.history.archive.window import read_everything
from thinrow.history.recent.lmdb import LmdbRecent
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait
from thinrow.storage.objects import LocalObjects
from thinrow.storage.pins import Pins

SCHEMA = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "item"),))
PER_OP, USERS, OPS = 20, 5, 1_000_000
LEASE_MS = 4_000


def opened(path: Path) -> HistoryStore:
    """With short leases, so that those of killed processes end within the test."""
    objects = LocalObjects(path / "archive")
    archive = Archive(objects, pins=Pins(objects, lease_ms=LEASE_MS, skew_ms=0))
    return HistoryStore(path, archive, LmdbRecent(path / "recent", SCHEMA, sync=False))


def users_of(process: int, load: bool) -> np.ndarray:
    return process * 100 + 50 * load + np.arange(USERS)


def table(process: int, op: int) -> pa.Table:
    item = (process * OPS + op) * PER_OP + np.arange(PER_OP)
    users = users_of(process, op % 3 == 2)[np.arange(PER_OP) % USERS]
    return pa.table({"user_id": users, "event_ts": op * PER_OP + np.arange(PER_OP), "item": item})


def work(path: Path, process: int, start: int) -> None:
    with opened(path) as store:
        rng = random.Random(process * 1000 + start)
        print("ready", flush=True)
        for op in range(start, OPS):
            events = table(process, op)
            if op % 3 == 2:
                store.bulk_load(events)
            else:
                store.append(events)
            print(op, flush=True)
            if rng.random() < 0.4:
                store.compact(full=rng.random() < 0.2)
            if rng.random() < 0.3:
                store.collect_garbage(keep=1, grace_s=0)
            if rng.random() < 0.3:
                held = store.pin()
                with held.hold():
                    time.sleep(rng.random() / 20)
                    read_everything(held, held.users(), [], ReadStats())
                    assert verify_generation(held) == []


def spawn(path: Path, process: int, start: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(path), str(process), str(start)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check(store: HistoryStore, done: list[int]) -> None:
    """``done[i]``: operations of process i that were acknowledged; of the next one everything or nothing is there."""
    held = store.read(store.users(), NEVER - 1).histories.to_jagged("item").values
    counts = Counter(held.tolist())
    assert max(counts.values(), default=1) == 1, "an event is there twice"
    for process, n in enumerate(done):
        own = sorted(v for v in counts if v // (PER_OP * OPS) == process)
        first = process * OPS * PER_OP
        assert len(own) in (n * PER_OP, (n + 1) * PER_OP), "an event was lost"
        assert own == list(range(first, first + len(own)))
        done[process] = len(own) // PER_OP


def run(path: Path, processes: int, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    HistoryStore.create(path, SCHEMA, 3, sync=False).close()
    done = [0] * processes
    for _ in range(rounds):
        running = [spawn(path, i, done[i]) for i in range(processes)]
        try:
            for p in running:
                assert p.stdout is not None
                assert p.stdout.readline() == "ready\n", p.communicate()[1]
            firsts = [p.stdout.readline() for p in running if p.stdout is not None]
            for p in running:
                time.sleep(rng.uniform(0.2, 1.5))
                p.send_signal(signal.SIGKILL)
        finally:
            for p in running:
                p.kill()
        for i, p in enumerate(running):
            # Not communicate(): it would miss what the lines read so far left in the buffer.
            assert p.stdout is not None
            assert p.stderr is not None
            with p.stdout, p.stderr:
                out, err = p.stdout.read(), p.stderr.read()
            assert p.wait() == -signal.SIGKILL, err
            acknowledged = [int(line) for line in (firsts[i] + out).split("\n")[:-1]]
            assert acknowledged == list(range(done[i], done[i] + len(acknowledged)))
            done[i] += len(acknowledged)
        with opened(path) as store:
            check(store, done)
            assert verify_generation(store.pin()) == []
            assert store.verify_recent() == []
    with opened(path) as store:
        store.compact(full=True)
        check(store, done)
        time.sleep(LEASE_MS / 1000)
        newest = store.pin()
        store.collect_garbage(keep=1, grace_s=0)
        assert store.archive.numbers() == [newest.number]
        assert store.archive.objects.list("segments/") == sorted(info.name for _, info in newest.segments)
        assert store.archive.objects.list("pins/") == []
        assert verify_generation(newest) == []


def test_processes_write_at_once_and_are_killed(tmp_path: Path) -> None:
    run(tmp_path / "store", processes=3, rounds=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_rounds(tmp_path: Path, seed: int) -> None:
    run(tmp_path / "store", processes=4, rounds=8, seed=seed)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
