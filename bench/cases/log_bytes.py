"""Bytes that a request adds to the impression log, by length of its user's history, against logging the history.

Users of 1,000, 10,000 and 100,000 archived events and 20 recent ones, sixteen requests each that see all of them, 20
candidates with an item and a score. Ours: a file of the impression log as the service writes it (versions, recent
events, candidates; zstd). ``logged_history``: the same requests and candidates, the visible history in list columns,
Parquet, plain, zstd-3, the requests of a user side by side, which is what lets the codec remove copies.

Keys end in ``_bytes``: ours over the peer's. ``vs_shortest_bytes.<n>`` is ours over ours at the shortest history: 1 is
flat.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.datagen.datasets import Work
from bench.harness import Options, Result
from bench.peers.peer import tree_bytes
from thinrow.examples.log import ImpressionLog
from thinrow.examples.records import Impressions
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema, ExampleSchema

LENGTHS, QUICK_LENGTHS = (1_000, 10_000, 100_000), (1_000, 10_000)
USERS, REQUESTS, RECENT, CANDIDATES = 4, 16, 20, 20
_EXAMPLES = ExampleSchema.of(
    candidates={"item": "int64", "score": "float32"}, item="item", outcomes={"click": 3_600_000}
)


def run(options: Options) -> Result:
    """One measurement a length: sizes do not vary."""
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    result = Result("log_bytes", {"users": USERS, "requests": USERS * REQUESTS, "recent_events": RECENT})
    ours: dict[int, float] = {}
    with Work(options.work) as work:
        for n in lengths:
            folder = work.path / f"log_bytes-{n}"
            ours[n], theirs = _measure(folder, n)
            result.figures[str(n)] = {"thinrow": round(ours[n], 1), "logged_history": round(theirs, 1)}
            result.ratios[f"vs_logged_history_bytes.{n}"] = ours[n] / theirs
            result.ratios[f"vs_shortest_bytes.{n}"] = ours[n] / ours[lengths[0]]
    return result


def _measure(folder: Path, n: int) -> tuple[float, float]:
    """Bytes a request: of our log, and of rows that hold the history."""
    rng = np.random.default_rng(n)
    span = 365 * 86_400_000
    total, begin = USERS * (n + RECENT), span - span // 10
    table = pa.table(
        {
            "user_id": np.tile(np.arange(USERS), n + RECENT),
            "event_ts": np.sort(rng.integers(0, begin, total)),
            "item": rng.zipf(1.3, total) % 1_000_000,
            "action": rng.integers(0, 16, total).astype(np.int8),
            "price": (rng.integers(0, 10_000, total) / 100).astype(np.float32),
        }
    )
    schema = EventSchema.infer(table.schema, user="user_id", time="event_ts")
    users = np.repeat(np.arange(USERS), REQUESTS)
    times = np.tile(np.sort(rng.integers(begin, span, REQUESTS)), USERS)
    shown = [rng.integers(0, 1_000_000, CANDIDATES).tolist() for _ in users]
    scores = [rng.random(CANDIDATES).tolist() for _ in users]
    with HistoryStore.create(folder / "store", schema, 2, sync=False) as store:
        store.bulk_load(table.slice(0, USERS * n))
        store.append(table.slice(USERS * n))
        taken = store.snapshot(users, times)
        histories = reconstruct(taken.generation, taken.requests).histories
        candidates = {"item": shown, "score": scores}
        log = ImpressionLog(folder / "log", schema, _EXAMPLES)
        log.append(Impressions.of(_EXAMPLES, np.arange(len(users)), taken, candidates=candidates))
        lists = {c: histories.to_jagged(c).to_arrow() for c in ("event_ts", "item", "action", "price")}
    head = {"request_id": np.arange(len(users)), "user_id": users, "request_ts": times}
    fat = pa.table({**head, **lists, "cand_item": shown, "cand_score": pa.array(scores, pa.list_(pa.float32()))})
    path = folder / "fat.parquet"
    pq.write_table(fat, path, compression="zstd", compression_level=3, use_dictionary=False, data_page_size=4 << 20)
    return tree_bytes(folder / "log") / len(users), tree_bytes(path) / len(users)
