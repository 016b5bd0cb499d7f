"""What it is worth that the examples of a user stand together, in the buckets of the archive, and are read together.

The same requests, 20 a user, in batches of 500: ``clustered``, as the training table has them (by bucket and user), and
``random``, in an order drawn over all of them. Whole histories, as shared views, one thread. ``vs_random_bytes`` is
clustered over random (less is better), ``vs_random_rows`` rows a second.

Files opened and blocks found in a cache are counted with the same archive behind a cache of a quarter of its bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.datagen.datasets import Work, load
from bench.datagen.histories import HistoriesSpec
from bench.datagen.requests import Batch, K, clustered
from bench.harness import Options, Result, rates
from bench.peers.fat_rows import in_time_order
from bench.peers.thinrow import Thinrow
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.reader import ReadStats
from thinrow.history.reconstruct import reconstruct
from thinrow.storage.cache import CachedObjects
from thinrow.storage.garbage import FOLDERS
from thinrow.storage.objects import U8, LocalObjects


class Counted(LocalObjects):
    """A folder that is read by ranges, and counts the files that each call touches."""

    opened = 0

    def mapped(self, names: Sequence[str]) -> tuple[U8, ...] | None:
        """Never."""
        return None

    def read_many(self, names: Sequence[str], which: Any, *rest: Any, **more: Any) -> None:
        """See ``ObjectStore.read_many``."""
        self.opened += len(np.unique(which))
        super().read_many(names, which, *rest, **more)


def run(options: Options) -> Result:
    """Both orders; quick: few users."""
    quick = options.quick
    spec = HistoriesSpec(users=100, events=20_000) if quick else HistoriesSpec(users=4_000, events=2_000_000)
    rounds = options.rounds or (1 if quick else 3)
    result = Result("affinity", {"users": spec.users, "events": spec.events, "requests_a_user": K, "rounds": rounds})
    with Work(options.work) as work:
        data = load("synthetic", work, spec=spec)
        by_user = sorted(clustered(data, spec.users, 25, K), key=lambda b: int(b.users[0]))
        orders = {"clustered": by_user, "random": _shuffled(by_user)}
        ours = Thinrow(work, data, [b for batches in orders.values() for b in batches])
        works = {}
        for name, batches in orders.items():
            works[name] = lambda batches=batches: _read(ours, ours.generation, batches)[0]
            result.figures[name] = {"bytes": _read(ours, ours.generation, batches)[1].bytes_read}
            result.figures[name] |= _behind_a_cache(ours, batches)
        for name, rate in rates(works, rounds).items():
            result.figures[name] |= {"rows": {m: round(v) for m, v in rate.items()}}
    both = result.figures["clustered"], result.figures["random"]
    result.ratios["vs_random_bytes"] = both[0]["bytes"] / both[1]["bytes"]
    result.ratios["vs_random_rows"] = both[0]["rows"]["median"] / both[1]["rows"]["median"]
    return result


def _shuffled(batches: Sequence[Batch]) -> list[Batch]:
    (whole,) = in_time_order(batches, one=True)
    order, size = np.random.default_rng(7).permutation(len(whole)), len(batches[0])
    # Requests of a batch are by user, as everywhere: only which of them meet is drawn.
    parts = [np.sort(order[a : a + size]) for a in range(0, len(order), size)]
    parts = [p[np.argsort(whole.users[p], kind="stable")] for p in parts]
    return [Batch(whole.users[p], whole.request_ts[p], whole.start[p], whole.stop[p]) for p in parts]


def _read(ours: Thinrow, generation: Generation, batches: Sequence[Batch]) -> tuple[int, ReadStats]:
    stats = ReadStats()
    for batch in batches:
        stats.add(reconstruct(generation, ours.requests(batch)).stats)
    return sum(map(len, batches)), stats


def _behind_a_cache(ours: Thinrow, batches: Sequence[Batch]) -> dict[str, float]:
    """Files and cached blocks a batch."""
    objects = Counted(ours.path / "archive")
    with tempfile.TemporaryDirectory() as folder:
        cached = CachedObjects(objects, folder, FOLDERS, max_bytes=max(ours.generation.bytes // 4, 1 << 20))
        generation, some = Archive(cached).pin(), batches[:16]
        io = _read(ours, generation, some)[1].io
    asked = io.cache_hits + io.cache_misses
    each = {"files": objects.opened, "cache_hits": io.cache_hits, "cache_misses": io.cache_misses}
    return {n: round(v / len(some), 1) for n, v in each.items()} | {"hit_share": round(io.cache_hits / asked, 3)}
