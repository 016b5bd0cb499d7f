"""Aligned windows: requests of one user near each other start at one event, today and after every later change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait

SCHEMA = EventSchema(
    (ColumnSpec(1, "item", Trait.ID, "int64", "main"),),
    event_id_column="event_id",
    event_id_dtype="int64",
    supersedes_column="supersedes",
)


def append(store: HistoryStore, event_ts: list[int], ids: list[int], supersedes: list[int | None]) -> None:
    table = {"user_id": [1] * len(ids), "event_ts": event_ts, "item": ids, "event_id": ids}
    store.append(pa.table({**table, "supersedes": pa.array(supersedes, pa.int64())}))


def request(store: HistoryStore, ts: int) -> RequestBatch:
    return store.snapshot([1], [ts]).requests


def test_requests_near_each_other_share_a_start(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, n_buckets=1, sync=False) as store:
        logged = []
        for i in range(60):
            append(store, [10 * i], [i], [None])
            if i % 25 == 24:
                store.compact()
            logged.append(request(store, 10 * i + 5))
        store.compact(full=True)
        batch = RequestBatch.concat(logged)
        aligned = reconstruct(store.pin(), batch, Projection(max_len=16, align=8)).histories
        assert aligned.to_jagged("item").to_arrow().to_pylist() == [
            list(range(max(0, -(-(i + 1 - 16) // 8) * 8), i + 1)) for i in range(60)
        ]
        # Sixty requests, one start for every eight events; exact windows would have forty-five.
        assert len(np.unique(aligned.start)) == 7
        assert len(np.unique(reconstruct(store.pin(), batch, Projection(max_len=16)).histories.start)) == 45


def test_what_comes_later_moves_no_start(tmp_path: Path) -> None:
    """Late events and corrections after a request change neither its start nor its events; before it they count."""
    with HistoryStore.create(tmp_path / "s", SCHEMA, n_buckets=1, sync=False) as store:
        append(store, [10 * i for i in range(20)], list(range(20)), [None] * 20)
        store.compact()
        projection = Projection(max_len=6, align=4)
        before = request(store, 500)
        # A late event, and a correction of event 3: 21 are visible, the first of the window is the sixteenth.
        append(store, [5, 31], [100, 101], [None, 3])
        after = request(store, 500)
        for full in (None, False, True):
            if full is not None:
                store.compact(full=full)
            built = reconstruct(store.pin(), RequestBatch.concat([before, after]), projection)
            items = built.histories.to_jagged("item").to_arrow().to_pylist()
            assert items == [[16, 17, 18, 19], [15, 16, 17, 18, 19]]
        read = store.read([1], 500, projection)
        assert read.histories.to_jagged("item").to_arrow().to_pylist() == items[1:]
