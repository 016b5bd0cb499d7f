"""At which history length a trainer's data outgrows its host: CPU seconds of reading per second of training.

A trainer takes 1,000 rows a second, whatever their length. Each user has 20 requests; histories have 1,000 to 100,000
events of all columns. CPU seconds are those of one thread that reads all batches; where they cross 0.25, 1 and 4 for a
second of training, so many cores do nothing but feed the trainer. ``crossings`` are lengths, by interpolation between
the two that were measured; null where even 100,000 events do not take so much.

- ``thinrow``: shared views, as batches carry them, verified; ``copies``: with a copy for each example, as fat rows are.
- ``sorted_fat_rows``, ``unsorted_fat_rows``: Parquet, plain, zstd-3; by user and time, and in order of request time.

``vs_<peer>.<length>`` is the peer's CPU over ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from bench.datagen.datasets import Work, load
from bench.datagen.histories import HistoriesSpec
from bench.datagen.requests import K, clustered
from bench.harness import Options, Result
from bench.peers.fat_rows import SortedFatRows, UnsortedFatRows
from bench.peers.peer import new_out
from bench.peers.thinrow import Thinrow

_LENGTHS, _ROWS_S, _CORES = (1_000, 4_000, 16_000, 100_000), 1_000, (0.25, 1, 4)
_OURS = "thinrow"


def run(options: Options) -> Result:
    """Four lengths; quick: two short ones."""
    quick = options.quick
    lengths, events = ((100, 400), 4_000) if quick else (_LENGTHS, 400_000)
    rounds = options.rounds or (1 if quick else 3)
    result = Result("wall", {"lengths": lengths, "rows_a_trainer_second": _ROWS_S, "requests_a_user": K})
    result.parameters["rounds"] = rounds
    with Work(options.work) as work:
        for length in lengths:
            cpu = _cpu_s_a_row(work, length, max(events // length, 4), rounds)
            result.figures[str(length)] = {name: round(s * _ROWS_S, 4) for name, s in cpu.items()}
            result.ratios |= {f"vs_{n}.{length}": s / cpu[_OURS] for n, s in cpu.items() if n.endswith("fat_rows")}
    names = result.figures[str(lengths[0])]
    result.figures["crossings"] = {
        name: {c: _crossing({n: result.figures[str(n)][name] for n in lengths}, c) for c in _CORES} for name in names
    }
    return result


def _cpu_s_a_row(work: Work, length: int, users: int, rounds: int) -> dict[str, float]:
    """CPU seconds of each contestant for a row with a history of ``length`` events, the least of some rounds."""
    spec = HistoriesSpec(users=users, events=users * length, longest=4 * length, sigma=0.1)
    data = load("synthetic", work, spec=spec)
    batches = clustered(data, users, 25, K)
    ours = Thinrow(work, data, batches)
    peers = [SortedFatRows(work, data, batches, None), UnsortedFatRows(work, data, batches, None)]
    out = new_out(data, [*batches, *(b for p in peers for b in p.rows)], None)
    works: dict[str, Callable[[], object]] = {
        _OURS: lambda: [ours.read_shared(b, None) for b in batches],
        "copies": lambda: [ours.read(b, None, out) for b in batches],
    }
    works |= {p.name: lambda p=p: [p.read(b, None, out) for b in batches] for p in peers}  # type: ignore[misc]
    least = dict.fromkeys(works, np.inf)
    for _ in range(rounds + 1):
        for name, read in works.items():
            since = time.process_time()
            read()
            least[name] = min(least[name], time.process_time() - since)
    return {name: float(s) / sum(map(len, batches)) for name, s in least.items()}


def _crossing(cost: Mapping[int, float], cores: float) -> int | None:
    """The length at which the cost, a second of training, is ``cores``; None where it is less everywhere."""
    lengths, values = list(cost), list(cost.values())
    if max(values) < cores:
        return None
    above = next(i for i, v in enumerate(values) if v >= cores)
    if above == 0:
        # Through nothing: a row of no events costs next to nothing.
        return round(lengths[0] * cores / values[0])
    at = np.interp(np.log(cores), np.log(values[above - 1 : above + 1]), np.log(lengths[above - 1 : above + 1]))
    return round(float(np.exp(at)))
