"""Three models over one table: what each reads, and how long it takes, under fat rows that are cut for the longest one.

A *long* model reads all events and columns, a *middle* one the newest 1,024 of two feature groups, a *short* one the
newest 256 of one. Batches have 25 users with 20 requests each; fat rows hold whole histories (Parquet, plain, zstd-3),
sorted by user and time, or in order of request time and then in batches of other users. All deliver a copy for each
example into arrays that were allocated before; one thread, files in the page cache. The three have the same 20
requests a user, which is what thinrow stores once and unsorted fat rows store 20 times.

``vs_<peer>_bytes.<tenant>`` and ``vs_<peer>_ms.<tenant>``: ours over the peer's, so that less is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bench.datagen.datasets import Histories, Work, load
from bench.datagen.histories import HistoriesSpec
from bench.datagen.requests import Batch, K, clustered
from bench.harness import Options, Result, rates
from bench.peers.fat_rows import SortedFatRows, UnsortedFatRows
from bench.peers.peer import Out, new_out
from bench.peers.thinrow import Thinrow
from thinrow.history.reconstruct import reconstruct
from thinrow.schema import Projection

#: Newest events (None: all) and feature groups (None: all).
_TENANTS: dict[str, tuple[int | None, tuple[str, ...] | None]] = {
    "long": (None, None),
    "middle": (1_024, ("item", "context")),
    "short": (256, ("item",)),
}


def run(options: Options) -> Result:
    """All three tenants; quick: few users."""
    quick = options.quick
    spec = HistoriesSpec(users=10, events=10_000) if quick else HistoriesSpec(users=100, events=500_000)
    rounds = options.rounds or (1 if quick else 5)
    result = Result("tenants", {"users": spec.users, "events": spec.events, "requests_a_user": K, "rounds": rounds})
    with Work(options.work) as work:
        data = load("synthetic", work, spec=spec)
        batches = clustered(data, spec.users, 5 if quick else 25, K)
        ours = Thinrow(work, data, batches)
        peers = [SortedFatRows(work, data, batches, None), UnsortedFatRows(work, data, batches, None)]
        for name, (newest, groups) in _TENANTS.items():
            _tenant(result, name, data, ours, peers, batches, newest, groups, rounds)
    return result


def _tenant(
    result: Result,
    tenant: str,
    data: Histories,
    ours: Thinrow,
    peers: Sequence[SortedFatRows],
    batches: Sequence[Batch],
    newest: int | None,
    groups: tuple[str, ...] | None,
    rounds: int,
) -> None:
    projection = Projection(groups=groups, max_len=newest)
    columns = ["event_ts", *(c.name for c in projection.resolve(data.schema))]
    every = [*batches, *(b for p in peers for b in p.rows)]
    out: Out = {name: values for name, values in new_out(data, every, newest).items() if name in columns}

    def read() -> int:
        for batch in batches:
            ours.copy(reconstruct(ours.generation, ours.requests(batch), projection).histories, out)
        return len(batches)

    def read_fat(peer: SortedFatRows) -> int:
        for batch in batches:
            peer.read(batch, newest, out)
        return len(batches)

    sizes = {p.name: sum(p.bytes_read(b, columns) for b in batches) for p in peers}
    mine = sum(reconstruct(ours.generation, ours.requests(b), projection).stats.bytes_read for b in batches)
    seen = rates({"thinrow": read, **{p.name: partial(read_fat, p) for p in peers}}, rounds)
    ms = {name: 1e3 / rate["median"] for name, rate in seen.items()}
    result.figures[tenant] = {"bytes": {"thinrow": mine, **sizes}, "ms": {n: round(v, 2) for n, v in ms.items()}}
    for peer in peers:
        result.ratios[f"vs_{peer.name}_bytes.{tenant}"] = mine / sizes[peer.name]
        result.ratios[f"vs_{peer.name}_ms.{tenant}"] = ms["thinrow"] / ms[peer.name]
