"""A small world that a ranker can learn: users buy what they bought before, and requests show it among other things.

Made through the real path: events are appended in time order, each request is a snapshot and an impression, outcomes
are joined, and the archive is compacted now and then. Some events arrive late.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from thinrow.core.units import DAY_MS
from thinrow.examples.joiner import join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.records import Impressions, Outcomes
from thinrow.examples.table import ExampleTable
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema, ExampleSchema

N_ITEMS, N_BRANDS, N_CANDIDATES = 60, 6, 8
WINDOW_MS = 1_000

EXAMPLES = ExampleSchema.of(
    context={"city": "string"},
    candidates={"item": "int64", "brand": "string"},
    item="item",
    outcomes={"buy": WINDOW_MS},
)


@dataclass(frozen=True, slots=True)
class World:
    """Attributes:
    store_path, table_path: the store, and the table of the joined examples.
    start_ms, end_ms: requests lie between, one a user and day.
    """

    store_path: Path
    table_path: Path
    start_ms: int
    end_ms: int

    def store(self) -> HistoryStore:
        """The store, opened."""
        return HistoryStore.open(self.store_path)

    def table(self) -> ExampleTable:
        """The training table, opened."""
        return ExampleTable.open(self.table_path)


def brand_of(items: np.ndarray) -> list[str]:
    """The brand of each item."""
    return [f"brand {i % N_BRANDS}" for i in items.tolist()]


def make_world(
    folder: str | Path,
    *,
    users: int = 12,
    days: int = 12,
    seed: int = 0,
    late: float = 0.1,
    archive: str | None = None,
    keep: bool = False,
) -> World:
    """A world under ``folder``: 5 events a user and day, then a request of 8 candidates of which some are bought.

    ``archive`` is as in ``HistoryStore.create``. With ``keep`` there is a second outcome: of what is bought, items of
    even number are kept (and now and then one that was not bought, which says nothing).
    """
    examples = replace(EXAMPLES, outcomes=(("buy", WINDOW_MS), ("keep", WINDOW_MS))) if keep else EXAMPLES
    folder, rng = Path(folder), np.random.default_rng(seed)
    start = 1_000 * DAY_MS
    taste = rng.integers(0, N_ITEMS, (users, 5))
    ids = np.arange(users) * 3 + 1
    empty = _events(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))
    schema = EventSchema.infer(empty.schema, user="user", time="ts")
    shown, bought = ImpressionLog(folder / "shown", schema, examples), OutcomeLog(folder / "bought")
    with HistoryStore.create(folder / "store", schema, 2, archive=archive) as store:
        for day in range(days):
            now = start + day * DAY_MS
            owner = np.repeat(np.arange(users), 5)
            liked = taste[owner, rng.integers(0, 5, len(owner))]
            items = np.where(rng.random(len(owner)) < 0.7, liked, rng.integers(0, N_ITEMS, len(owner)))
            at = now + rng.integers(0, DAY_MS // 2, len(owner))
            at -= np.where(rng.random(len(owner)) < late, 2 * DAY_MS, 0)
            store.append(_events(ids[owner], at, items))
            ask = now + DAY_MS - 1 - WINDOW_MS
            candidates = np.stack([rng.permutation(N_ITEMS)[:N_CANDIDATES] for _ in range(users)])
            candidates[:, 0] = taste[np.arange(users), rng.integers(0, 5, users)]
            candidates = rng.permuted(candidates, axis=1)
            hits = (candidates[:, :, None] == taste[:, None, :]).any(2)
            buys = rng.random(hits.shape) < np.where(hits, 0.8, 0.05)
            request = day * users + np.arange(users)
            seen = store.snapshot(ids, ask)
            rows = {"item": candidates.tolist(), "brand": [brand_of(row) for row in candidates]}
            city = [f"city {u % 3}" for u in range(users)]
            shown.append(Impressions.of(examples, request, seen, candidates=rows, context={"city": city}))
            who, which = np.nonzero(buys)
            bought.append(Outcomes.of("buy", request[who], candidates[who, which], np.full(len(who), ask + 1)))
            if keep:
                kept = np.flatnonzero(candidates.reshape(-1) % 2 == 0)
                who, which = np.divmod(kept[(buys.reshape(-1) | (np.arange(buys.size) % 7 == 0))[kept]], buys.shape[1])
                bought.append(Outcomes.of("keep", request[who], candidates[who, which], np.full(len(who), ask + 1)))
            if day % 3 == 2:
                store.compact()
        store.compact()
        table = ExampleTable.create(folder / "examples", event_schema=schema, example_schema=examples, n_buckets=2)
        with table:
            join_logs(shown, bought, table, start + days * DAY_MS + WINDOW_MS)
            table.cluster()
    return World(folder / "store", folder / "examples", start, start + days * DAY_MS)


def _events(users: np.ndarray, at: np.ndarray, items: np.ndarray) -> pa.Table:
    return pa.table({"user": users, "ts": at, "item": items, "brand": pa.array(brand_of(items), pa.string())})
