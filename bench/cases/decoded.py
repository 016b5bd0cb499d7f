"""Two sessions at once over one table, with decoded rows that both share, over the same without.

Each session has one worker process and reads the newest 256 events of shuffled batches of 1,024 examples with 30
candidates, epoch after epoch; the table is twice what a worker holds in memory, and was decoded before. ``vs_off`` is
rows a second of both. In the figures ``folder_bytes``, the decoded rows, and ``table_bytes``, the files they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.cases.dpp import stored
from bench.datagen.datasets import Work
from bench.datagen.histories import HistoriesSpec
from bench.harness import Options, Result, rates
from thinrow.dpp import Batch, loader
from thinrow.examples.decoded import FOLDER
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Archive
from thinrow.history.place import archive_objects

_CANDIDATES = 30


def run(options: Options) -> Result:
    """One table; quick: few users."""
    quick = options.quick
    spec = HistoriesSpec(users=40, events=40_000) if quick else HistoriesSpec(users=4_000, events=2_000_000)
    rounds, batches = options.rounds or (1 if quick else 5), 2 if quick else 48
    result = Result("decoded", {"users": spec.users, "events": spec.events, "candidates": _CANDIDATES})
    result.parameters |= {"sessions": 2, "rounds": rounds}
    with Work(options.work) as work:
        path, _, _ = stored(work, spec, _CANDIDATES)
        with ExitStack() as stack:
            works = {name: _sessions(stack, path, size, batches) for name, size in (("off", 0), ("on", 1 << 30))}
            # All of it is there before anything is timed.
            with ExampleTable.open(path / "table") as table:
                for _ in range(-(-table.rows() // (batches * 2_048))):
                    works["on"]()
                sizes = {"table_bytes": table.bytes()}
            seen = rates(works, rounds)
        sizes["folder_bytes"] = sum(f.stat().st_size for f in (path / "table" / FOLDER).rglob("*/*"))
    result.figures = {name: {m: round(v) for m, v in r.items()} for name, r in seen.items()} | sizes
    result.ratios["vs_off"] = seen["on"]["median"] / seen["off"]["median"]
    return result


def _sessions(stack: ExitStack, path: Path, cache_bytes: int, batches: int) -> Callable[[], int]:
    walks: list[Iterator[Batch]] = []
    for seed in range(2):
        generation, table = Archive(archive_objects(path / "store")).pin(), ExampleTable.open(path / "table")
        stack.callback(table.close)
        reader = loader(
            generation, table, engine="processes", workers=1, epochs=None, max_len=256, seed=seed,
            cache_bytes=cache_bytes,
        )  # fmt: skip
        walks.append(iter(stack.enter_context(reader)))
    return lambda: sum(len(next(walk)) for _ in range(batches) for walk in walks)
