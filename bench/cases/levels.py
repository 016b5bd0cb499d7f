"""What compaction to a single level is worth: one segment a bucket against 16 that were never merged.

The same events, loaded in 16 steps by time, and then fully compacted. ``vs_16_segments.<ours>.newest_<n>`` is the rate
of the single level over that of the 16 segments; the published figure for the gap is 3.4.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

import thinrow.history.buckets as buckets
from bench.datagen.datasets import Histories, Work, load
from bench.datagen.histories import HistoriesSpec
from bench.datagen.requests import random_users
from bench.harness import Options, Result, rates
from bench.peers.peer import new_out
from bench.peers.thinrow import Thinrow
from thinrow.history.store import HistoryStore

SEGMENTS = 16


class _Levels(Thinrow):
    """An archive in which nothing is merged."""

    def _build(self, path: Path) -> None:
        growth, buckets.GROWTH = buckets.GROWTH, 0
        try:
            with HistoryStore.create(path, self.data.schema) as store:
                table = self.data.table()
                place = np.arange(self.data.n_events) - np.repeat(self.data.first[:-1], np.diff(self.data.first))
                step = place * SEGMENTS // np.repeat(np.diff(self.data.first), np.diff(self.data.first))
                for i in range(SEGMENTS):
                    store.bulk_load(table.take(np.flatnonzero(step == i)))
        finally:
            buckets.GROWTH = growth


def run(options: Options) -> Result:
    """Newest 256, 4,096 and all of random users."""
    spec = HistoriesSpec(users=16, events=8_000) if options.quick else HistoriesSpec(users=600, events=3_000_000)
    rounds = options.rounds or (1 if options.quick else 5)
    result = Result("levels", {"users": spec.users, "events": spec.events, "segments": SEGMENTS, "rounds": rounds})
    with Work(options.work) as work:
        data = load("synthetic", work, spec=spec)
        batches = random_users(data, 2, 24 if options.quick else 512)
        one = Thinrow(work, data, batches)
        apart = _Levels(work, _renamed(data), batches)
        counts = {len(apart.generation.segments_of(b)) for b in range(apart.generation.n_buckets)} - {0}
        assert counts == {SEGMENTS}, f"buckets have {counts} segments: some were merged"
        for name, newest in (("newest_256", 256), ("newest_4096", 4_096), ("all", None)):
            out = new_out(data, batches, newest)
            works = {
                f"{levels}.{ours}": work_
                for levels, store in (("single_level", one), ("16_segments", apart))
                for ours, work_ in (
                    ("shared", partial(lambda s, n: sum(s.read_shared(b, n) for b in batches), store, newest)),
                    ("copies", partial(lambda s, n, o: sum(s.read(b, n, o) for b in batches), store, newest, out)),
                )
            }
            seen = rates(works, rounds)
            result.figures[name] = {n: {m: round(v) for m, v in r.items()} for n, r in seen.items()}
            for ours in ("shared", "copies"):
                gap = seen[f"single_level.{ours}"]["median"] / seen[f"16_segments.{ours}"]["median"]
                result.ratios[f"vs_16_segments.{ours}.{name}"] = gap
    return result


def _renamed(data: Histories) -> Histories:
    parameters = {**data.parameters, "levels": SEGMENTS}
    return Histories(data.name, parameters, data.schema, data.first, data.columns, data.arrival_ts)
