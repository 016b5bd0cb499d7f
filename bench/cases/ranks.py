"""A sparse step (look-up, backward, Adagrad) of a table spread over two gloo ranks on one machine. Figures: bytes that
leave a rank in a step (counted), ids per second of both ranks (timed).

- ``deduplicated``: as ``ShardedEmbedding``: a distinct key of a batch is asked for, and its gradient sent, once.
- ``by_position``: the same with every position asked for and sent.
- ``bfloat16``: deduplicated, vectors and gradients in half the bytes.
- ``prefetched``: deduplicated, the ids of the next batch sent while the step computes. Both ranks share the processors
  here, so that this shows what the second thread costs rather than what a wait for a network would save.
- ``slow_wire``, ``slow_wire_prefetched``: deduplicated, without and with, where each message takes 5 ms more and a rank
  sends 125 MB a second.
- ``one_process``: all keys of both ranks in one process and one table, with the same processors.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness import Options, Result
from thinrow.embeddings import DynamicTable, Rates, SparseAdagrad, TableLoad, plan_tables
from thinrow.embeddings.gloo import GlooRanks
from thinrow.embeddings.ranks import Bytes, Ranks
from thinrow.embeddings.shards import Lookup, Shard
from thinrow.testing.ranks import GlooProcesses

_RANKS, _ZIPF, _BATCHES = 2, 1.05, 4
_DELAY_S, _WIRE_BYTES_A_S = 0.005, 125e6
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
        "kernel_threads_a_rank": int(os.environ.get("NUMBA_NUM_THREADS", os.cpu_count() or 1)),
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
    result.ratios["vs_without.prefetch.slow_wire"] = rate["slow_wire_prefetched"] / rate["slow_wire"]
    result.ratios["vs_one_process"] = rate["deduplicated"] / rate["one_process"]
    return result


class _ByPosition(Shard):
    """A shard that is asked for every position."""

    def distinct(self, keys: Ints) -> tuple[Ints, Ints]:
        return keys, np.arange(len(keys))


class _SlowRanks(GlooRanks):
    """Ranks with a network between them, which takes no processor."""

    def _swap(self, parts: Sequence[Bytes], sizes: Sequence[int]) -> list[Bytes]:
        leaving = sum(len(part) for rank, part in enumerate(parts) if rank != self.rank)
        time.sleep(_DELAY_S + leaving / _WIRE_BYTES_A_S)
        return super()._swap(parts, sizes)


def _measure(ranks: Ranks, rows: int, dim: int, ids: int, rounds: int) -> dict[str, dict[str, float]]:
    """On each rank: figures by contestant, medians over interleaved rounds of all batches."""
    table, every = DynamicTable(dim), np.arange(rows)
    plain = Shard(table, ranks)
    table.rows(every[plain.owners(every) == ranks.rank], insert=True)
    batches, slow = _ids(ranks.rank, rows, ids), _SlowRanks()
    gradient = np.random.default_rng(0).normal(size=(ids, dim)).astype(np.float32)
    works = {
        "deduplicated": _step(plain, batches, gradient),
        "by_position": _step(_ByPosition(table, ranks), batches, gradient),
        "bfloat16": _step(Shard(table, ranks, wire="bfloat16"), batches, gradient),
        "prefetched": _step(plain, batches, gradient, ahead=True),
        "slow_wire": _step(Shard(table, slow), batches, gradient),
        "slow_wire_prefetched": _step(Shard(table, slow), batches, gradient, ahead=True),
        "one_process": _alone(ranks, table, [_ids(rank, rows, ids) for rank in range(ranks.size)], gradient),
    }
    sent, seconds = {}, {name: [] for name in works}  # type: ignore[var-annotated]
    for name, work in works.items():
        before = ranks.sent_bytes + slow.sent_bytes
        work()
        sent[name] = (ranks.sent_bytes + slow.sent_bytes - before) / len(batches)
    for _ in range(rounds):
        for name, work in works.items():
            ranks.gather("begin", np.zeros(1))
            since = time.perf_counter()
            work()
            ranks.gather("end", np.zeros(1))
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


def _alone(
    ranks: Ranks, like: DynamicTable, by_rank: list[list[Ints]], gradient: npt.NDArray[Any]
) -> Callable[[], None]:
    """On the first rank what all do together; the others wait."""
    batches = [np.concatenate(parts) for parts in zip(*by_rank, strict=True)]
    table, twice = DynamicTable(like.dim), np.tile(gradient, (ranks.size, 1))
    optimizer = SparseAdagrad(table, lr=0.01)
    if ranks.rank == 0:
        for keys in batches:
            table.rows(keys, insert=True)

    def work() -> None:
        for keys in batches if ranks.rank == 0 else ():
            rows = table.rows(keys, insert=True)
            table.read(rows)
            table.add_gradient(rows, twice)
            optimizer.step()

    return work


def _ids(rank: int, rows: int, ids: int) -> list[Ints]:
    weights = 1 / (np.arange(rows) + 1.0) ** _ZIPF
    bounds = np.cumsum(weights / weights.sum())
    shuffled, random = np.random.default_rng(0).permutation(rows), np.random.default_rng(rank + 1)
    return [shuffled[np.minimum(np.searchsorted(bounds, random.random(ids)), rows - 1)] for _ in range(_BATCHES)]
