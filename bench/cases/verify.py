"""What always-on verification costs, by the share of stripes that hold visible and hidden events (*mixed* ones).

Histories with a growing share of events that are 60 days late on average; every request sees what had arrived by its
time, so a stripe with a late event is mixed for the requests before that. ``vs_unverified.late_<rate>`` is the rate
with verification over the rate without it, on the same requests: newest 4,096 of random users, shared views. What is
left out without it is the count and the digest of every version; CRCs are checked either way, and figures give their
share of the time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bench.datagen.datasets import Work, load
from bench.datagen.histories import HistoriesSpec
from bench.datagen.requests import random_users
from bench.harness import Options, Result, rates
from bench.peers.thinrow import Thinrow, logged_at_its_time
from thinrow.history.archive.reader import ReadStats
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.schema import Projection

RATES = (0.0, 0.05, 0.1, 0.2, 0.3)
_NEWEST = 4_096
_LATE_DAYS = 60.0


def run(options: Options) -> Result:
    """Five rates of late events."""
    spec = HistoriesSpec(users=16, events=8_000) if options.quick else HistoriesSpec(users=600, events=3_000_000)
    rounds = options.rounds or (1 if options.quick else 15)
    result = Result("verify", {"users": spec.users, "events": spec.events, "newest": _NEWEST, "rounds": rounds})
    with Work(options.work) as work:
        for rate in RATES:
            data = load("synthetic", work, spec=replace(spec, late_rate=rate, late_days=_LATE_DAYS))
            ours = Thinrow(work, data)
            batches = random_users(data, 2, 24 if options.quick else 512)
            requests = [logged_at_its_time(ours.generation, data, b) for b in batches]
            seen = rates(
                {"verified": partial(_read, ours, requests, True), "unverified": partial(_read, ours, requests, False)},
                rounds,
            )
            stats = ReadStats()
            for batch in requests:
                stats.add(reconstruct(ours.generation, batch, Projection(max_len=_NEWEST)).stats)
            total = sum(stats.seconds.values())
            result.figures[f"late_{rate}"] = {
                **{n: {m: round(v) for m, v in r.items()} for n, r in seen.items()},
                "mixed_share": round(stats.mixed_pieces / max(stats.pieces, 1), 4),
                "seconds_share": {n: round(s / total, 4) for n, s in stats.seconds.items()},
            }
            result.ratios[f"vs_unverified.late_{rate}"] = seen["verified"]["median"] / seen["unverified"]["median"]
    return result


def _read(ours: Thinrow, requests: list[RequestBatch], verify: bool) -> int:
    return sum(
        int(reconstruct(ours.generation, b, Projection(max_len=_NEWEST), verify=verify).histories.lengths().sum())
        for b in requests
    )
