"""Opening a store of ten million users takes milliseconds, and its index is not loaded whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from thinrow.core.users import as_users, bucket_of
from thinrow.history.archive.hides import Hides
from thinrow.history.archive.writer import SegmentWriter
from thinrow.history.store import HistoryStore
from thinrow.jagged import HIDE_DTYPE, Column, Events
from thinrow.jagged.events import never_hidden
from thinrow.schema import ColumnSpec, EventSchema, Trait

SCHEMA = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "item"),))
PER_USER, BUCKETS = 3, 16


def part(users: np.ndarray) -> Events:
    n = len(users) * PER_USER
    arrival = np.tile(np.arange(1, PER_USER + 1), len(users))
    item = np.repeat(users, PER_USER) * 10 + arrival
    offsets = np.arange(0, n + 1, PER_USER)
    return Events(users, offsets, 1_700_000_000_000 + 1000 * arrival, arrival, never_hidden(n), {"item": Column(item)})


def build(path: Path, n_users: int) -> None:
    """Users 0, 7, 14, ... with three events each."""
    none = Hides(as_users([], "int64"), np.zeros(1, np.int64), np.empty(0, HIDE_DTYPE))
    with HistoryStore.create(path, SCHEMA, BUCKETS, sync=False) as store, store.archive.writing() as base:
        users = 7 * np.arange(n_users)
        buckets = bucket_of(users, BUCKETS)
        changed = {}
        for bucket in range(BUCKETS):
            own = users[buckets == bucket]
            name = f"segments/{bucket:05d}/all.seg"
            with SegmentWriter(base.objects, name, SCHEMA, bucket=bucket, n_buckets=BUCKETS) as writer:
                for a in range(0, len(own), 100_000):
                    writer.add(part(own[a : a + 100_000]))
                changed[bucket] = [writer.finish(none)]
        store.archive.commit(base, changed, "test")


def measure(path: Path, n_users: int) -> dict[str, float]:
    """In a process of its own: ms to open, of first and later look-ups, and bytes of memory that they took."""
    with HistoryStore.create(path.parent / "warm", SCHEMA, 1, sync=False) as small:
        # Imports and kernels load here.
        small.recent.append(np.arange(5), np.arange(5), {"item": Column(np.arange(5))})
        small.compact()
        small.read([1, 2], 10)
    before, since = _rss(), time.perf_counter()
    with HistoryStore.open(path) as store:
        opened = time.perf_counter()
        held = store.read(np.array([7 * (n_users // 2)]), 1 << 60).histories
        first = time.perf_counter()
        assert held.to_jagged("item").values.tolist() == [70 * (n_users // 2) + k for k in (1, 2, 3)]
        rng = np.random.default_rng(0)
        users = np.unique(7 * rng.integers(0, n_users, 512))
        store.read(users, 1 << 60)
        batch = time.perf_counter()
        for user in users[:100]:
            store.read(np.array([user]), 1 << 60)
        single = (time.perf_counter() - batch) / 100
        grown = _rss() - before
        index = sum(
            store.pin().segment(i).container.section(s)[1]
            for i in range(len(store.pin().segments))
            for s in ("pieces", "stripes")
        )
    return {
        "open_ms": 1e3 * (opened - since),
        "first_read_ms": 1e3 * (first - opened),
        "first_batch_of_512_ms": 1e3 * (batch - first),
        "single_read_ms": 1e3 * single,
        "memory_bytes": grown,
        "index_bytes": index,
    }


def _rss() -> int:
    """Anonymous memory: pages of mapped files are the system's, to take back."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def run(path: Path, n_users: int) -> dict[str, float]:
    build(path, n_users)
    command = [sys.executable, __file__, str(path), str(n_users)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout
    found: dict[str, float] = json.loads(out)
    return found


@pytest.mark.slow
def test_ten_million_users(tmp_path: Path) -> None:
    figures = run(tmp_path / "store", 10_000_000)
    print(json.dumps(figures))
    assert figures["index_bytes"] > 640_000_000
    assert figures["memory_bytes"] < figures["index_bytes"] / 10


def test_the_index_is_read_by_the_page(tmp_path: Path) -> None:
    figures = run(tmp_path / "store", 400_000)
    assert figures["index_bytes"] > 25_000_000
    assert figures["memory_bytes"] < figures["index_bytes"]


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
