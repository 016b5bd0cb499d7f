"""Time to the first batch of a reader: at the start of an epoch, and after restore in the middle of one.

A reader is opened on an open store and table, gets a state (or none), and is timed until its first batch is there; what
the operating system has read once it holds. ``vs_start_ms.<engine>`` is the middle over the start, so that less is
better. ``fetch_and_drop`` is what a reader without random access does, PyTorch's ``DataLoader`` over an iterable among
them: it reads from the start and drops what came before.
"""

from __future__ import annotations

import statistics
import time
from itertools import islice
from typing import Any

from bench.cases.dpp import stored
from bench.datagen.datasets import Work
from bench.datagen.histories import HistoriesSpec
from bench.harness import Options, Result
from thinrow.dpp import loader
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Archive
from thinrow.history.place import archive_objects

_ENGINES = ("threads", "processes")


def run(options: Options) -> Result:
    """Both engines, whole histories; quick: few users, threads."""
    quick = options.quick
    spec = HistoriesSpec(users=40, events=40_000) if quick else HistoriesSpec(users=400, events=2_000_000)
    rounds, rows = options.rounds or (2 if quick else 9), 64 if quick else 256
    result = Result("resume", {"users": spec.users, "events": spec.events, "base_rows": rows, "rounds": rounds})
    with Work(options.work) as work:
        path, _, _ = stored(work, spec)
        generation = Archive(archive_objects(path / "store")).pin()
        with ExampleTable.open(path / "table") as table:
            middle = len(loader(generation, table, base_rows=rows, block=1)) // 2

            def first(engine: Any, t: int, dropped: int = 0) -> float:
                since = time.perf_counter()
                with loader(generation, table, base_rows=rows, block=1, engine=engine, workers=2) as reader:
                    if t:
                        reader.load_state_dict({**reader.state_dict(), "t": t - 1})
                    assert next(islice(reader, dropped, None)).t == t + dropped
                    return time.perf_counter() - since

            for engine in _ENGINES[: 1 if quick else 2]:
                ways = {"start": (0, 0), "middle": (middle, 0), "fetch_and_drop": (0, middle)}
                for way in ways.values():
                    first(engine, *way)
                seen: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(rounds):
                    for name, way in ways.items():
                        seen[name].append(first(engine, *way))
                ms = {name: statistics.median(s) * 1e3 for name, s in seen.items()}
                result.figures[engine] = {name: round(v, 2) for name, v in ms.items()}
                result.ratios[f"vs_start_ms.{engine}"] = ms["middle"] / ms["start"]
                result.ratios[f"vs_fetch_and_drop.{engine}"] = ms["fetch_and_drop"] / ms["middle"]
    return result
