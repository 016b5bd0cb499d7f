"""Compaction in bounded memory: parts of a bucket instead of the whole, and the same segment comes out."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import CorruptionError
from thinrow.history import buckets as buckets_module
from thinrow.history import compact as compact_module
from thinrow.history.archive.verify import verify_generation
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait

SCHEMA = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "main"),))


def filled(path: Path, n: int) -> HistoryStore:
    """A bucket of three segments, and events in the recent tier."""
    rng = np.random.default_rng(0)
    store = HistoryStore.create(path, SCHEMA, 1, sync=False)
    for k, rows in enumerate((n, n // 8, n // 64, n // 64)):
        who, ts = rng.integers(0, n // 50, rows), rng.integers(0, 1000, rows) + k
        table = pa.table({"user_id": who, "event_ts": ts, "item": rng.integers(0, 1 << 40, rows)})
        store.append(table) if k == 3 else store.bulk_load(table)
    return store


def compacted(path: Path, n: int, part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, int]]:
    """Peak of traced memory in bytes, and the digests of the one segment."""
    monkeypatch.setattr(buckets_module, "PART_BYTES", part_bytes)
    monkeypatch.setattr(compact_module, "PART_BYTES", part_bytes)
    with filled(path, n) as store:
        assert len(store.pin().segments) == 3
        tracemalloc.start()
        store.compact(full=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        generation = store.pin()
        assert verify_generation(generation) == []
        ((_, info),) = generation.segments
        assert info.n_rows == generation.n_rows == n + n // 8 + 2 * (n // 64)
        return peak, info.digests


def test_memory_is_that_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinrow.storage.spool.Spool.__init__.__defaults__", (None, 1 << 16))
    n = 120_000
    whole, digests = compacted(tmp_path / "whole", n, 1 << 40, monkeypatch)
    parts, same = compacted(tmp_path / "parts", n, n, monkeypatch)
    assert same == digests
    assert parts < whole / 2


def test_one_long_user_is_merged_span_by_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, late events and new ones in between: the same events come out as from one merge of everything."""
    stripe_rows, found = 8, []
    monkeypatch.setattr(buckets_module, "STRIPE_ROWS", stripe_rows)
    rng = np.random.default_rng(4)
    tables = [
        pa.table({"user_id": np.full(n, 5), "event_ts": rng.integers(0, 60, n), "item": rng.integers(0, 9, n)})
        for n in (300, 70, 40)
    ]
    for part_bytes in (1 << 40, 0):
        monkeypatch.setattr(buckets_module, "PART_BYTES", part_bytes)
        with HistoryStore.create(tmp_path / str(part_bytes), SCHEMA, 1, sync=False) as store:
            for table in tables[:2]:
                store.bulk_load(table)
            store.append(tables[2])
            store.compact(full=True)
            assert verify_generation(store.pin()) == []
            ((_, info),) = store.pin().segments
            pieces = store.pin().segment(0).pieces
            assert [int(n) for _, page, _ in pieces.scan() for n in page["n_rows"]] == [8] * 51 + [2]
            found.append(info.digests)
    assert found[0] == found[1]


def test_what_would_be_lost_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that drops an event is found by the digests; its segment is deleted."""
    original = buckets_module.read_everything

    def lossy(*args: object) -> object:
        events = original(*args)  # type: ignore[arg-type]
        keep = np.arange(len(events)) != 7
        offsets = np.concatenate([[0], np.cumsum(keep)])[events.offsets]
        return events.take_rows(np.flatnonzero(keep), offsets)

    with filled(tmp_path, 2_000) as store:
        before, files = store.pin().number, set(store.archive.objects.list("segments/"))
        monkeypatch.setattr(buckets_module, "read_everything", lossy)
        with pytest.raises(CorruptionError, match="compaction would change"):
            store.compact(full=True)
        assert store.pin().number == before
        assert set(store.archive.objects.list("segments/")) == files


def test_errors_and_generations_travel(tmp_path: Path) -> None:
    error = CorruptionError("it is wrong", file="a.seg", user=5, column="item")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.what, again.file, again.user, again.column) == (
        str(error), "it is wrong", "a.seg", 5, "item",
    )  # fmt: skip
    with filled(tmp_path, 500) as store:
        base = store.pin()
        there = pickle.loads(pickle.dumps(base))
        assert (there.number, there.segments) == (base.number, base.segments)
        assert verify_generation(there) == []
