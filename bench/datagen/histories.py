"""Synthetic histories in the shape of the real ones: lognormal lengths, zipf items, ties and late events.

The retail data gives the popularity skew, the git data the rates of ties (79% of neighbours) and of late events (15%).
Times have the resolution of a millisecond, items are hashed to 40 bits, prices are whole cents in a float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.schema import ColumnSpec, EventSchema, Trait

_YEAR_MS = 365 * 86_400_000


@dataclass(frozen=True, slots=True)
class HistoriesSpec:
    """Attributes:
    users, events: how many, exactly.
    longest: the longest history is cut here.
    sigma: of the lognormal of lengths.
    items: how many there are; the popularity of the i-th is proportional to 1 / i^zipf.
    zipf: that exponent.
    tie_rate: share of neighbours with the same time.
    late_rate: share of events that arrive after later ones.
    late_days: how late those are on average (exponential).
    """

    users: int = 2_000
    events: int = 10_000_000
    longest: int = 100_000
    sigma: float = 1.2
    items: int = 1_000_000
    zipf: float = 1.1
    tie_rate: float = 0.2
    late_rate: float = 0.0
    late_days: float = 3.0
    seed: int = 7


SCHEMA = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "item"),
        ColumnSpec(2, "action", Trait.CATEGORICAL, "int8", "context"),
        ColumnSpec(3, "surface", Trait.CATEGORICAL, "int8", "context"),
        ColumnSpec(4, "dwell", Trait.NUMERIC, "int32", "context"),
        ColumnSpec(5, "price", Trait.NUMERIC, "float32", "price"),
    ),
    arrival_time_column="arrival_ts",
)


def histories(spec: HistoriesSpec) -> pa.Table:
    """Events of all users, by user and time: user_id, event_ts, arrival_ts (ms) and the columns of ``SCHEMA``."""
    rng = np.random.default_rng(spec.seed)
    lengths = _lengths(spec, rng)
    n = int(lengths.sum())
    user = np.repeat(np.arange(spec.users, dtype=np.int64), lengths)
    event_ts = _times(spec, rng, lengths)
    late = rng.random(n) < spec.late_rate
    delay = np.where(late, rng.exponential(86_400_000 * spec.late_days, n), 0).astype(np.int64)
    ids = (np.arange(spec.items, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(24)
    weight = np.cumsum(1.0 / np.arange(1, spec.items + 1) ** spec.zipf)
    rank = np.minimum(np.searchsorted(weight, rng.random(n) * weight[-1]), spec.items - 1)
    return pa.table(
        {
            "user_id": user,
            "event_ts": event_ts,
            "arrival_ts": event_ts + delay,
            "item": ids[rank].astype(np.int64),
            "action": np.minimum(rng.geometric(0.4, n) - 1, 15).astype(np.int8),
            "surface": rng.integers(0, 32, n).astype(np.int8),
            "dwell": np.minimum(rng.exponential(8_000, n), 65_000).astype(np.int32),
            "price": np.round(rng.lognormal(2.0, 1.0, n) * 100).astype(np.float32),
        }
    )


def _lengths(spec: HistoriesSpec, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    raw = rng.lognormal(0.0, spec.sigma, spec.users)
    scale = spec.events / raw.sum()
    # What the cut takes from the longest, the others get: a few rounds, as more of them reach the cut.
    for _ in range(20):
        lengths = np.clip(raw * scale, 1, spec.longest)
        scale *= spec.events / lengths.sum()
    whole = lengths.astype(np.int64)
    free = np.flatnonzero(whole < spec.longest)
    whole[free[: int(spec.events - whole.sum())]] += 1
    return np.asarray(whole, np.int64)


def _times(spec: HistoriesSpec, rng: np.random.Generator, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    n = int(lengths.sum())
    gap = rng.exponential(1.0, n) * (rng.random(n) >= spec.tie_rate)
    total = np.cumsum(gap)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    within = total - np.repeat(total[starts] - gap[starts], lengths)
    ends = within[np.cumsum(lengths) - 1]
    scale = np.where(ends > 0, _YEAR_MS / np.maximum(ends, 1e-9), 0.0)
    return np.asarray(1_700_000_000_000 + (within * np.repeat(scale, lengths)).astype(np.int64), np.int64)
