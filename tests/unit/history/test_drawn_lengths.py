"""Drawn lengths: each request reads its own newest m, the same in any batch and generation, online and offline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait

SCHEMA = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "main"),))
DRAWN = Projection(max_len=9, shortest=3)


def items(store: HistoryStore, batch: RequestBatch, projection: Projection | None = None) -> list[list[int]]:
    found: list[list[int]] = (
        reconstruct(store.pin(), batch, projection).histories.to_jagged("item").to_arrow().to_pylist()
    )
    return found


def test_a_request_reads_the_same_newest_wherever_it_stands(tmp_path: Path) -> None:
    rng, logged = np.random.default_rng(1), []
    with HistoryStore.create(tmp_path / "s", SCHEMA, n_buckets=2, sync=False) as store:
        for day in range(30):
            n = 40
            ts = rng.integers(10 * day, 10 * day + 12, n)
            store.append(pa.table({"user_id": rng.integers(0, 6, n), "event_ts": ts, "item": np.arange(n) + day * n}))
            if day % 7 == 6:
                store.compact()
            logged.append(store.snapshot([0, 1, 2, 3, 4, 5], 10 * day + 8).requests)
        batch = RequestBatch.concat(logged)
        whole, drawn = items(store, batch), items(store, batch, DRAWN)
        lengths = [len(row) for row in drawn]
        for row, all_of_it in zip(drawn, whole, strict=True):
            assert row == all_of_it[len(all_of_it) - len(row) :]
            assert 3 <= len(row) <= 9 or row == all_of_it
        assert set(lengths) >= set(range(3, 10))
        # Alone, in another order, over later generations, with another seed.
        assert [items(store, batch.take(np.array([i])), DRAWN)[0] for i in range(0, len(batch), 7)] == drawn[::7]
        store.compact(full=True)
        order = rng.permutation(len(batch))
        assert items(store, batch.take(order), DRAWN) == [drawn[i] for i in order]
        assert items(store, batch, Projection(max_len=9, shortest=3, draw_seed=1)) != drawn
        assert items(store, batch, Projection(max_len=9, shortest=9)) == items(store, batch, Projection(max_len=9))
        # What is served is what will be trained on.
        served = store.read([0, 1, 2], 295, DRAWN).histories.to_jagged("item").to_arrow().to_pylist()
        assert served == items(store, store.snapshot([0, 1, 2], 295).requests, DRAWN)
