"""A sparse step (look-up, backward, Adagrad) of a table spread over two gloo ranks on one machine. Figures: bytes that
leave a rank in a step (counted), ids per second of both ranks (timed).

- ``deduplicated``: as ``ShardedEmbedding``: a distinct key of a batch is asked for, and its gradient sent, once.
- ``by_position``: the same with every position asked for and sent.
- ``bfloat16``: deduplicated, vectors and gradients in half the bytes.
- ``prefetched``: deduplicated, the ids of the next batch sent while the step computes. Both ranks share the processors
  here, so that this shows what the second thread costs rather than what a wait for a network would save.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness import Options, Result
from thinrow.embeddings import DynamicTable, Rates, SparseAdagrad, TableLoad, plan_tables
from thinrow.embeddings.ranks import Ranks
from thinrow.embeddings.shards import Lookup, Shard
from thinrow.testing.ranks import GlooProcesses

_RANKS, _ZIPF, _BATCHES = 2, 1.05, 4
Ints = npt.NDArray[np.int64]


def run(options: Options) -> Result:
    """A million rows of 64, 100,000 ids a rank and step; with ``quick`` a hundredth of that."""
    rows, dim, ids, rounds = (10_000, 64, 1_000, 1) if options.quick else (1_000_000, 64, 100_000, 7)
    rounds = options.rounds or rounds
    with GlooProcesses(_RANKS) as processes:
        first, _ = processes.run(_RANKS, _measure, rows, dim, ids, rounds)
    parameters = {
        "rows": rows,
        "dim": dim,
        "ids_a_rank_and_step": ids,
        "distinct_ids_a_rank_and_step": [len(np.unique(b)) for b in _ids(0, rows, ids)],
        "zipf": _ZIPF,
        "ranks": _RANKS,
        "threads_a_rank": 1,
        "rounds": rounds,
    }
    rates = first.pop("rates")
    plan = plan_tables(
        [TableLoad(name="items", rows=rows, dim=dim, lookups=ids, distinct=len(np.unique(_ids(0, rows, ids)[0])))],
        ranks=_RANKS,
        memory_bytes=rows * 1000 // _RANKS,
        rates=Rates(**rates),
    )
    result = Result("ranks", parameters, dict(first))
    result.figures["planned_ms"] = round(plan.ms, 1)
    result.figures["measured_ms"] = round(1e3 * ids * _RANKS / first["deduplicated"]["ids_per_s"], 1)
    rate = {name: found["ids_per_s"] for name, found in first.items()}
    sent = {name: found["bytes_a_step"] for name, found in first.items()}
    result.ratios["vs_by_position_bytes"] = sent["deduplicated"] / sent["by_position"]
    result.ratios["vs_by_position"] = rate["deduplicated"] / rate["by_position"]
    result.ratios["vs_float32_bytes.bfloat16"] = sent["bfloat16"] / sent["deduplicated"]
    result.ratios["vs_float32.bfloat16"] = rate["bfloat16"] / rate["deduplicated"]
    result.ratios["vs_without.prefetch"] = rate["prefetched"] / rate["deduplicated"]
    return result


class _ByPosition(Shard):
    """A shard that is asked for every position."""

    def distinct(self, keys: Ints) -> tuple[Ints, Ints]:
        return keys, np.arange(len(keys))


def _measure(ranks: Ranks, rows: int, dim: int, ids: int, rounds: int) -> dict[str, dict[str, float]]:
    """On each rank: figures by contestant, medians over interleaved rounds of all batches."""
    table, every = DynamicTable(dim), np.arange(rows)
    plain = Shard(table, ranks)
    table.rows(every[plain.owners(every) == ranks.rank], insert=True)
    batches = _ids(ranks.rank, rows, ids)
    gradient = np.random.default_rng(0).normal(size=(ids, dim)).astype(np.float32)
    works = {
        "deduplicated": _step(plain, batches, gradient),
        "by_position": _step(_ByPosition(table, ranks), batches, gradient),
        "bfloat16": _step(Shard(table, ranks, wire="bfloat16"), batches, gradient),
        "prefetched": _step(plain, batches, gradient, ahead=True),
    }
    sent, seconds = {}, {name: [] for name in works}  # type: ignore[var-annotated]
    for name, work in works.items():
        before = ranks.sent_bytes
        work()
        sent[name] = (ranks.sent_bytes - before) / len(batches)
    for _ in range(rounds):
        for name, work in works.items():
            ranks.gather("begin", np.zeros(1))
            since = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - since)
    rates = Rates.measure(ranks, dim)
    units = ids * len(batches) * ranks.size
    return {
        "rates": dataclasses.asdict(rates),
    } | {
        n: {"bytes_a_step": round(sent[n]), "ids_per_s": round(units / statistics.median(s))}
        for n, s in seconds.items()
    }


def _step(shard: Shard, batches: list[Ints], gradient: npt.NDArray[Any], ahead: bool = False) -> Callable[[], None]:
    lookup, optimizer = Lookup([shard]), SparseAdagrad(shard, lr=0.01)

    def work() -> None:
        for keys, following in zip(batches, [*batches[1:], None], strict=True):
            (found,) = lookup([keys], insert=True)
            if ahead and following is not None:
                lookup.prefetch([following])
            vectors = np.take(found.vectors, found.places, axis=0)
            assert vectors.shape == gradient.shape
            shard.add_gradient(found.keys, found.places, gradient)
            optimizer.step()

    return work


def _ids(rank: int, rows: int, ids: int) -> list[Ints]:
    weights = 1 / (np.arange(rows) + 1.0) ** _ZIPF
    bounds = np.cumsum(weights / weights.sum())
    shuffled, random = np.random.default_rng(0).permutation(rows), np.random.default_rng(rank + 1)
    return [shuffled[np.minimum(np.searchsorted(bounds, random.random(ids)), rows - 1)] for _ in range(_BATCHES)]
