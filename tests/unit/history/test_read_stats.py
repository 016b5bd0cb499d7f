"""What a read counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from thinrow.history.archive.layout import stored_columns
from thinrow.history.archive.lookup import look_up
from thinrow.history.archive.reader import ReadStats, RowReader
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema


def test_keys_that_planning_and_reading_both_need_are_counted_once(tmp_path: Path) -> None:
    n = 700
    table = pa.table(
        {
            "user": np.repeat(np.arange(3), n),
            "ts": np.tile(np.arange(n) * 1_000, 3),
            "item": np.arange(3 * n) * 977 % 1_009,
        }
    )
    with HistoryStore.create(tmp_path, EventSchema.infer(table.schema, user="user", time="ts"), 1) as store:
        store.append(table)
        store.compact()
        # Every request cuts its user's first stripe: its keys decide what is visible, and are delivered.
        snapshot = store.snapshot(np.arange(3), np.full(3, 100_500))
        stats = reconstruct(snapshot.generation, snapshot.requests).stats
        assert stats.events_delivered == 3 * 101
        assert stats.mixed_pieces == 3
        pieces = look_up(snapshot.generation, np.arange(3))
        first = pieces.piece_off[:-1]
        once = ReadStats()
        zero = np.zeros(3, np.int64)
        RowReader(snapshot.generation, pieces, first, zero, zero + 101, once).columns(
            stored_columns(snapshot.generation.schema)
        )
        assert stats.bytes_read == once.bytes_read
