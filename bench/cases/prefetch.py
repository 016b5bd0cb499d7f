"""Batches from an archive whose every read takes 5 ms longer, with and without reading ahead.

One worker process, batches of 1,024 examples in 16 base batches, the newest 256 events, so that reading takes longer
than decoding; blocks are not cached. ``vs_off`` is rows a second with ``prefetch=1`` over ``prefetch=0``, ``vs_off.3``
with three base batches read ahead. ``local`` in the figures: the same archive without latency, mapped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.cases.dpp import stored
from bench.datagen.datasets import Work
from bench.datagen.histories import HistoriesSpec
from bench.harness import Options, Result, rates
from thinrow.dpp import Batch, loader
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Archive
from thinrow.storage.objects import U8, LocalObjects

_LATENCY_S = 0.005


class Distant(LocalObjects):
    """A folder that answers after ``_LATENCY_S``, however many ranges a call asks for, as a bucket that is asked for
    all of them at once."""

    concurrency = 16

    def __reduce__(self) -> tuple[type[LocalObjects], tuple[Path]]:
        return Distant, (self.root,)

    def mapped(self, names: Sequence[str]) -> tuple[U8, ...] | None:
        """Never."""
        return None

    def get(self, name: str) -> bytes:
        """See ``ObjectStore.get``."""
        time.sleep(_LATENCY_S)
        return super().get(name)

    def read_many(self, *args: Any, **rest: Any) -> None:
        """See ``ObjectStore.read_many``."""
        time.sleep(_LATENCY_S)
        super().read_many(*args, **rest)


def run(options: Options) -> Result:
    """Off, one ahead, three ahead; quick: few users."""
    quick = options.quick
    spec = HistoriesSpec(users=40, events=40_000) if quick else HistoriesSpec(users=400, events=2_000_000)
    rounds, batches = options.rounds or (1 if quick else 5), 2 if quick else 24
    result = Result("prefetch", {"users": spec.users, "events": spec.events, "latency_ms": _LATENCY_S * 1e3})
    result.parameters |= {"base_rows": 64, "block": 16, "newest": 256, "workers": 1, "rounds": rounds}
    with Work(options.work) as work, ExitStack() as stack:
        path, _, _ = stored(work, spec)
        table = stack.enter_context(ExampleTable.open(path / "table"))

        def source(kind: type[LocalObjects], prefetch: int) -> Callable[[], int]:
            generation = Archive(kind(path / "store" / "archive")).pin()
            reader = stack.enter_context(
                loader(generation, table, engine="processes", workers=1, epochs=None, max_len=256, base_rows=64,
                       block=16, prefetch=prefetch)
            )  # fmt: skip
            walk: Iterator[Batch] = iter(reader)
            return lambda: sum(len(next(walk)) for _ in range(batches))

        works = {"off": source(Distant, 0), "1": source(Distant, 1), "3": source(Distant, 3)}
        seen = rates(works | {"local": source(LocalObjects, 0)}, rounds)
    result.figures = {name: {m: round(v) for m, v in r.items()} for name, r in seen.items()}
    off = seen["off"]["median"]
    result.ratios = {"vs_off": seen["1"]["median"] / off, "vs_off.3": seen["3"]["median"] / off}
    return result
