"""Fat rows as pipelines log them, from a seed: late events, restated ones, ties, truncation and either boundary.

Worked example: ``random_fat_rows(rng, newest=3)`` is a table of rows of at most 3 events each, in which a later row of
a user may hold an older event that an earlier one lacks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


def random_fat_rows(
    rng: np.random.Generator,
    *,
    n_users: int = 4,
    n_rows: int = 30,
    n_events: int = 20,
    newest: int | None = None,
    horizon_ms: int | None = None,
    inclusive: bool = False,
    newest_first: bool = False,
    restated: float = 0.1,
    span: int = 200,
    text_users: bool = False,
) -> pa.Table:
    """Rows of a pipeline that sees, at a request, what has arrived by then.

    Args:
        n_events: of each user; few distinct times and items, so that there are ties and repeats.
        newest, horizon_ms, inclusive, newest_first: what rows hold, and how.
        restated: share of events that are replaced later, by one of the same time or none.
        span: times are in ``[0, span)``.
    """
    columns: dict[str, list[Any]] = {
        n: [] for n in ("request_id", "user_id", "request_ts", "hour", "event_ts", "item", "price", "tag", "bag")
    }
    shown: dict[str, list[Any]] = {"cand_item_id": [], "cand_score": [], "label_click": []}
    for number in range(n_rows):
        user, now = int(rng.integers(0, n_users)), int(rng.integers(1, span))
        history = _history(np.random.default_rng([user, n_events, span]), n_events, restated, span)
        seen = _seen(history, now, inclusive)
        if horizon_ms is not None:
            seen = [e for e in seen if e[0] >= now - horizon_ms]
        seen = seen[-newest:] if newest is not None else seen
        seen = seen[::-1] if newest_first else seen
        columns["request_id"].append(number * 7)
        columns["user_id"].append(f"u{user}" if text_users else user * 3)
        columns["request_ts"].append(now)
        columns["hour"].append(now % 24)
        for k, name in enumerate(("event_ts", "item", "price", "tag", "bag")):
            columns[name].append([e[k] for e in seen])
        k = int(rng.integers(1, 4))
        shown["cand_item_id"].append(rng.integers(0, 9, k).tolist())
        shown["cand_score"].append(rng.random(k).tolist())
        shown["label_click"].append(rng.integers(0, 2, k).tolist())
    kinds = {
        "event_ts": pa.int64(),
        "item": pa.int32(),
        "price": pa.float64(),
        "tag": pa.string(),
        "bag": pa.list_(pa.int64()),
    }
    arrays = {n: pa.array(v, pa.list_(kinds[n])) if n in kinds else pa.array(v) for n, v in columns.items()}
    return pa.table(arrays | shown)


def _history(rng: np.random.Generator, n: int, restated: float, span: int) -> list[tuple[Any, ...]]:
    """(time, item, price, tag, bag, arrived, gone) of all events of a user."""
    events: list[tuple[Any, ...]] = []
    for _ in range(n):
        ts = int(rng.integers(0, span // 3)) * 3
        arrived = ts if rng.random() < 0.7 else ts + int(rng.integers(1, span // 2))
        gone = arrived + int(rng.integers(1, span)) if rng.random() < restated else 1 << 40
        events.append((ts, *_values(rng), arrived, gone))
        if gone < 1 << 40 and rng.random() < 0.7:
            events.append((ts, *_values(rng), gone, 1 << 40))
    return events


def _values(rng: np.random.Generator) -> tuple[Any, ...]:
    tag = [None, "", "a", "b"][rng.integers(0, 4)]
    price = [float("nan"), 1.5, None, -0.0][rng.integers(0, 4)]
    return int(rng.integers(0, 3)), price, tag, rng.integers(0, 2, rng.integers(0, 3)).tolist()


def _seen(history: list[tuple[Any, ...]], now: int, inclusive: bool) -> list[tuple[Any, ...]]:
    known = [e for e in history if e[0] < now + inclusive and e[5] <= now < e[6]]
    return sorted(known, key=lambda e: (e[0], e[5]))
