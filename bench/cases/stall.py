"""How long a trainer waits that takes a batch at a fixed time, with workers that make 1.2 times what it needs.

First the reader's own rate with two worker processes is measured, then a trainer that sleeps 1.2 times as long as a
batch takes; its share of time spent waiting is ``vs_step_share`` (less is better), after the first batches. What it
waits for is the handing over, mostly, which is the same however long a step is: so once with batches of 1,024 examples,
once with ``large`` ones of 4,096. ``next_ms`` are the median and the longest wait for one batch. Then one of
the two workers is killed: ``vs_five_seconds_share`` is the time from there until the buffer of ready batches is as full
as it was, over five seconds, and ``vs_step_share.killed`` the share of the time waited meanwhile. ``torch_dataloader``
is the same trainer in front of ``torch.utils.data.DataLoader(num_workers=2)`` over our reader; a killed worker ends its
run.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from bench.cases.dpp import stored, torch_batches
from bench.datagen.datasets import Work
from bench.datagen.histories import HistoriesSpec
from bench.harness import Options, Result
from thinrow.dpp import loader
from thinrow.dpp.engines.processes import ProcessEngine
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Archive
from thinrow.history.place import archive_objects

_MARGIN, _WARM = 1.2, 6


def run(options: Options) -> Result:
    """Whole histories; quick: few users and batches."""
    quick = options.quick
    spec = HistoriesSpec(users=40, events=40_000) if quick else HistoriesSpec(users=400, events=2_000_000)
    batches = 8 if quick else 60
    result = Result("stall", {"users": spec.users, "events": spec.events, "batches": batches, "margin": _MARGIN})
    with Work(options.work) as work, ExitStack() as stack:
        path, _, _ = stored(work, spec)
        generation = Archive(archive_objects(path / "store")).pin()
        table = stack.enter_context(ExampleTable.open(path / "table"))
        with loader(generation, table, engine="processes", workers=2, epochs=None, block=16) as reader:
            _book(result, "thinrow.large", iter(reader), batches)
        reader = stack.enter_context(loader(generation, table, engine="processes", workers=2, epochs=None))
        walk = iter(reader)
        step_s = _book(result, "thinrow", walk, batches)
        engine: Any = reader.engine
        assert isinstance(engine, ProcessEngine)
        full = engine.gauges().ready
        os.kill(engine.pids[0], signal.SIGKILL)
        since, waited = time.perf_counter(), 0.0
        while time.perf_counter() - since < 30:
            waited += sum(_timed(lambda: next(walk), 1, step_s, warm=0)[0])
            if engine.restarts and len(engine.pids) == 2 and engine.gauges().ready >= full:
                break
        seconds = time.perf_counter() - since
        result.ratios |= {"vs_five_seconds_share": seconds / 5, "vs_step_share.killed": waited / seconds}
        reader.close()
        result.figures["ready"] = full
        if quick and options.peers is None:
            result.skip("torch_dataloader", "starting its processes takes longer than all the rest; ask with --peers")
        else:
            _book(result, "torch_dataloader", torch_batches(stack, path), batches)
    return result


def _book(result: Result, name: str, source: Iterator[Any], n: int) -> float:
    """The share of its time that a timed trainer waits; returns seconds of a step."""
    free, _ = _timed(lambda: next(source), n, 0.0)
    step_s = sum(free) / n * _MARGIN
    waits, seconds = _timed(lambda: next(source), n, step_s)
    result.ratios[f"vs_step_share.{name}"] = sum(waits) / seconds
    next_ms = [round(s * 1e3, 2) for s in (statistics.median(waits), max(waits))]
    result.figures[name] = {"step_ms": round(step_s * 1e3, 2), "next_ms": next_ms}
    return step_s


def _timed(take: Callable[[], Any], n: int, step_s: float, warm: int = _WARM) -> tuple[list[float], float]:
    """Seconds waited in each of n calls and seconds in all, sleeping after each; after some that do not count."""
    for _ in range(warm):
        take()
        time.sleep(step_s)
    waits, begun = [], time.perf_counter()
    for _ in range(n):
        since = time.perf_counter()
        take()
        waits.append(time.perf_counter() - since)
        time.sleep(step_s)
    return waits, time.perf_counter() - begun
