"""Training from an archive whose every read takes 5 ms longer, with its stages overlapped over one thing after another.

The HSTU ranker of ``shared`` on the newest 256 events, 20 requests a user, 8 candidates each; batches of 64 requests in
four base batches; blocks are not cached. Units are requests a second of the whole job, and both contestants have the
same losses.

- ``on``: ``Trainer`` as it is: two threads read ahead, another makes batches ready, a third learns.
- ``off``: ``Trainer(overlap=False)``: read, rebuilt, made ready and learned from in turn, on one thread.

``vs_off.local`` is the same without the 5 ms: what overlapping gains where reading is fast. ``waited_share`` is the
share of its time in which the trainer waited for a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.cases.dpp import stored
from bench.cases.prefetch import Distant
from bench.cases.shared import ranker
from bench.datagen.datasets import Work
from bench.datagen.histories import HistoriesSpec
from bench.harness import Options, Result, rates
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Archive
from thinrow.schema import Projection
from thinrow.storage.objects import LocalObjects
from thinrow.training import TrainConfig, Trainer

_CANDIDATES, _BASE_ROWS, _BLOCK = 8, 16, 4


def run(options: Options) -> Result:
    """Distant and local; quick: few users and steps."""
    quick = options.quick
    spec = HistoriesSpec(users=40, events=40_000) if quick else HistoriesSpec(users=200, events=400_000)
    rounds, steps = options.rounds or (1 if quick else 5), 2 if quick else 30
    result = Result("overlap", {"users": spec.users, "events": spec.events, "steps": steps, "rounds": rounds})
    result.parameters |= {"base_rows": _BASE_ROWS, "block": _BLOCK, "newest": 256, "latency_ms": 5}
    with Work(options.work) as work, ExitStack() as stack:
        path, _, _ = stored(work, spec, _CANDIDATES)
        for place, kind in (("", Distant), (".local", LocalObjects)):
            trainers = {n: _trainer(stack, path, kind, n == "on") for n in ("on", "off")}
            waits: dict[str, list[float]] = {n: [0.0, 0.0] for n in trainers}
            works = {n: _steps(trainer, steps, waits[n]) for n, trainer in trainers.items()}
            seen = rates(works, rounds)
            for n, rate in seen.items():
                result.figures[f"{n}{place}"] = {m: round(v, 1) for m, v in rate.items()}
                result.figures[f"{n}{place}"]["waited_share"] = round(waits[n][0] / waits[n][1], 3)
            result.ratios[f"vs_off{place}"] = seen["on"]["median"] / seen["off"]["median"]
    return result


def _trainer(stack: ExitStack, path: Path, kind: type[LocalObjects], overlap: bool) -> Trainer:
    generation = Archive(kind(path / "store" / "archive")).pin()
    table = stack.enter_context(ExampleTable.open(path / "table"))
    spec = dataclasses.replace(ranker(), projection=Projection(columns=("item",), max_len=256, align=128))
    config = TrainConfig(ranker=spec, epochs=1_000, base_rows=_BASE_ROWS, block=_BLOCK)
    return Trainer(config, generation, table, threads=2, overlap=overlap)


def _steps(trainer: Trainer, n: int, waits: list[float]) -> Callable[[], int]:
    def work() -> int:
        found = trainer.run(stop_after=trainer.steps + n)
        waits[0] += found.waited_s
        waits[1] += found.seconds
        return found.examples

    return work
