"""Usage by column: what is counted, that files add up whoever merges them, and that no read fails for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import StoreError
from thinrow.history.store import HistoryStore
from thinrow.history.usage import FLUSH_MS, UsageRecorder, read_usage, stored_bytes, usage_rows
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait
from thinrow.storage.objects import MemoryObjects

SCHEMA = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "main"),
        ColumnSpec(2, "price", Trait.NUMERIC, "float32", "main"),
        ColumnSpec(3, "dead", Trait.NUMERIC, "float64", "other"),
    )
)
NOVEMBER = 1_763_000_000_000


def events(n: int) -> pa.Table:
    values = np.random.default_rng(0).random(n)
    data = {
        "user_id": np.arange(n) % 2,
        "event_ts": np.arange(n),
        "item": np.arange(n),
        "price": values,
        "dead": values,
    }
    return pa.table(data)


def test_reads_are_counted_by_column_and_dead_ones_come_first(tmp_path: Path) -> None:
    now = [NOVEMBER]
    with HistoryStore.create(tmp_path / "s", SCHEMA, n_buckets=2, sync=False, clock=lambda: now[0]) as store:
        store.append(events(2_000))
        store.compact()
        store.read([0, 1], 10**6, Projection(columns=("item",), max_len=100))
        now[0] += 1_000
        store.read([0], 10**6, Projection(columns=("item", "price"), max_len=100))
    with HistoryStore.open(tmp_path / "s") as store:
        dead, price, item = usage_rows(store.pin())
        assert [r["column"] for r in (dead, price, item)] == ["dead", "price", "item"]
        assert (dead["last_ms"], dead["requests"], dead["events"], dead["bytes"]) == (0, 0, 0, 0)
        assert (price["last_ms"], price["requests"], price["events"]) == (NOVEMBER + 1_000, 1, 100)
        assert (item["requests"], item["events"]) == (3, 300)
        assert item["bytes_by_month"] == {"2025-11": item["bytes"]}
        assert 0 < price["bytes"] < price["stored_bytes"]
        stored = stored_bytes(store.pin())
        assert stored[3] > stored[2] > 0
        # Keys, columns, headers, index and meta are all that there is.
        assert 0.8 * store.pin().bytes < sum(stored.values()) < store.pin().bytes
        store.read([0], 10**6)
    with HistoryStore.open(tmp_path / "s") as store:
        assert [r["requests"] for r in usage_rows(store.pin())] == [1, 2, 4]


def test_files_add_up_however_they_are_merged() -> None:
    objects = MemoryObjects()
    for i in range(200):
        recorder = UsageRecorder(objects, lambda: NOVEMBER)
        recorder.add({1: 10, 2: i}, requests=2, events=5)
        recorder.flush()
        recorder.flush()
    assert len(objects.list("usage/")) <= 65
    assert len(objects.list("usage-sums/")) == 1
    (figures,) = read_usage(objects)["1"].values()
    assert figures == {"batches": 200, "requests": 400, "events": 1_000, "bytes": 2_000, "last_ms": NOVEMBER}
    assert read_usage(objects)["2"]["2025-11"]["bytes"] == sum(range(200))


def test_a_file_that_outlives_its_sum_counts_once() -> None:
    objects = MemoryObjects()
    delete, objects.delete = objects.delete, lambda name: None  # type: ignore[method-assign]
    for _ in range(66):
        recorder = UsageRecorder(objects, lambda: NOVEMBER)
        recorder.add({1: 1}, 1, 1)
        recorder.flush()
    objects.delete = delete  # type: ignore[method-assign]
    assert len(objects.list("usage/")) == 66
    assert read_usage(objects)["1"]["2025-11"]["batches"] == 66


def test_a_store_that_takes_no_writes_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StoreError("read-only")

    objects = MemoryObjects()
    monkeypatch.setattr(objects, "put", refuse)
    now = [0]
    recorder = UsageRecorder(objects, lambda: now[0])
    recorder.add({1: 1}, 1, 1)
    recorder.flush()
    now[0] = 2 * FLUSH_MS
    recorder.add({1: 1}, 1, 1)
    recorder.flush()
    assert read_usage(objects) == {}


def test_what_could_not_be_written_is_written_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    objects, now = MemoryObjects(), [NOVEMBER]
    real, fails = objects.put, [True]

    def put(name: str, data: bytes) -> None:
        if fails[0] is True:
            raise StoreError("503 once")
        real(name, data)
        if fails[0] is None:
            raise StoreError("the answer was lost")

    monkeypatch.setattr(objects, "put", put)
    recorder = UsageRecorder(objects, lambda: now[0])
    # Not written, written without an answer, written.
    for fails[0] in (True, None, False):
        recorder.add({1: 10}, requests=2, events=5)
        recorder.flush()
    (figures,) = read_usage(objects)["1"].values()
    assert figures == {"batches": 3, "requests": 6, "events": 15, "bytes": 30, "last_ms": NOVEMBER}
    recorder.flush()
    assert len(objects.list("usage/")) == 1


def test_a_sum_that_fails_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = MemoryObjects()
    recorder = UsageRecorder(objects, lambda: NOVEMBER)

    def refuse(*_: Any) -> None:
        raise StoreError("503")

    monkeypatch.setattr(objects, "list", refuse)
    for _ in range(3):
        recorder.add({1: 10}, requests=2, events=5)
        recorder.flush()
    monkeypatch.undo()
    assert read_usage(objects)["1"]["2025-11"]["batches"] == 3
