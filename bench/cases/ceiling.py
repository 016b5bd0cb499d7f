"""How near reconstruction comes to what no reader of these files can leave out, and what that would be over each bar.

The *floor* of a batch does only this, in one compiled call each: a CRC over as many bytes as were read, in as many runs
at places as far apart; one store of every row that was decoded (``shared``); and, for ``copies`` and ``codes``, the
copy of every example's events out of these rows. It decodes nothing, looks nothing up and verifies no version: no
reader of these bytes is faster on this machine than ``shared``, and none that shares rows between examples than
``copies``. The requests are those of ``reconstruct``, one thread.

- ``vs_floor.<ours>.<pattern>.<newest>``: ours over the floor; 1 is the limit.
- ``vs_<peer>.floor.<ours>...``: the floor over a copy of raw columns in memory, and (k20) over sorted fat rows: the
  most that ``vs_<peer>`` of the case ``reconstruct`` can be.
- ``threads_2_over_1.raw_copy...``: the copy of raw columns by two threads over one: what the memory allows.

``distinct_share`` in the figures: the events of a batch, each counted once, over the events delivered. Sharing saves
the rest, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.cases.reconstruct import NEWEST, PATTERNS, batches_of
from bench.datagen.datasets import Ints, Work, load
from bench.datagen.requests import Batch
from bench.harness import Options, Result, rates
from bench.harness import Work as Timed
from bench.peers.fat_rows import SortedFatRows
from bench.peers.peer import Bytes, Out, Peer, copy_values, new_out
from bench.peers.raw_copy import RawCopy
from bench.peers.thinrow import Thinrow
from thinrow.core.ragged import offsets_of
from thinrow.history.reconstruct import reconstruct
from thinrow.kernels import kernel
from thinrow.schema import Projection


def run(options: Options) -> Result:
    """Every pattern and newest n."""
    rounds = options.rounds or (1 if options.quick else 5)
    newest = options.choice("newest", tuple(NEWEST))
    with Work(options.work) as work:
        data = load(options.data, work, quick=options.quick, git_file=options.git_file)
        result = Result("ceiling", {**data.parameters, "rounds": rounds, "threads": 1})
        for pattern in options.choice("patterns", PATTERNS):
            batches = batches_of(data, pattern, options.quick)
            ours = Thinrow(work, data, batches)
            stored = _stored(ours)
            for name in newest:
                _run(work, ours, stored, batches, pattern, name, rounds, result)
    return result


def _run(
    work: Work,
    ours: Thinrow,
    stored: Bytes,
    batches: Sequence[Batch],
    pattern: str,
    name: str,
    rounds: int,
    result: Result,
) -> None:
    data, newest, label = ours.data, NEWEST[name], f"newest_{name}" if NEWEST[name] else "all"
    raw, floors = RawCopy(work, data), [_floor(ours, stored, b, newest) for b in batches]
    peers: list[Peer] = [raw]
    sizes = list(batches)
    if pattern == "k20":
        fat = SortedFatRows(work, data, batches, 4096 if name == "256" else newest)
        peers.append(fat)
        sizes += fat.rows
    outs = [new_out(data, sizes, newest) for _ in range(2)]
    works: dict[str, Timed] = {p.name: partial(_all, p, batches, newest, outs[0]) for p in peers} | {
        "thinrow.shared": lambda: sum(ours.read_shared(b, newest) for b in batches),
        "thinrow.copies": partial(_all, ours, batches, newest, outs[0]),
        "floor.shared": lambda: sum(f.read() for f in floors),
        "thinrow.codes": lambda: sum(ours.read_codes(b, newest, outs[0]) for b in batches),
        "floor.copies": lambda: sum(f.read(outs[0]) for f in floors),
        "floor.codes": lambda: sum(f.read(outs[0], codes=True) for f in floors),
        "raw_copy.2_threads": partial(_two_threads, raw, batches, newest, outs),
    }
    seen = rates(works, rounds)
    result.figures.setdefault(pattern, {})[label] = {n: {m: round(v) for m, v in r.items()} for n, r in seen.items()}
    medians = {n: r["median"] for n, r in seen.items()}
    for variant in ("shared", "copies", "codes"):
        floor = medians[f"floor.{variant}"]
        result.ratios[f"vs_floor.{variant}.{pattern}.{label}"] = medians[f"thinrow.{variant}"] / floor
        for peer in peers:
            result.ratios[f"vs_{peer.name}.floor.{variant}.{pattern}.{label}"] = floor / medians[peer.name]
    asked = sum(int(f.length.sum()) for f in floors)
    result.figures[pattern][label]["distinct_share"] = round(sum(f.distinct for f in floors) / asked, 4)
    result.ratios[f"threads_2_over_1.raw_copy.{pattern}.{label}"] = medians["raw_copy.2_threads"] / medians["raw_copy"]


@dataclass(frozen=True, slots=True)
class _Floor:
    """One batch's.

    Attributes:
        stored: bytes of the archive.
        offset, size: (R,) the runs of them that are checked.
        rows: columns of as many rows as were decoded; they are written.
        start, length: (B,) where in ``rows`` each example's events are.
        distinct: events that at least one example has.
        coded: names of the columns of 64-bit integers that are not the time.
    """

    stored: Bytes
    offset: Ints
    size: Ints
    rows: Out
    start: Ints
    length: Ints
    distinct: int
    coded: tuple[str, ...]

    def read(self, out: Out | None = None, *, codes: bool = False) -> int:
        """Events delivered; with ``codes``, columns of 64-bit integers as 32-bit ones, as ``reconstruct`` does."""
        kernel("crc32c_many")(self.stored, self.offset, self.size)
        narrow = self.coded if codes else ()
        rows = {n: v.view(np.int32)[: len(v)] if n in narrow else v for n, v in self.rows.items()}
        for column in rows.values():
            column.fill(1)
        if out is not None:
            at = offsets_of(self.length)[:-1]
            for name, column in rows.items():
                copy_values(column, self.start, self.length, out[name].view(column.dtype), at)
        return int(self.length.sum())


def _floor(ours: Thinrow, stored: Bytes, batch: Batch, newest: int | None) -> _Floor:
    read = reconstruct(ours.generation, ours.requests(batch), Projection(max_len=newest))
    start, length = read.histories.start, read.histories.stop - read.histories.start
    rows = {n: np.zeros(read.stats.events_decoded, v.dtype) for n, v in ours.data.columns.items()}
    runs = len(np.unique(batch.users)) * (len(ours.data.schema.groups) + 1)
    size = np.full(runs, read.stats.bytes_read // runs, np.int64)
    offset = np.random.default_rng(len(batch)).integers(0, len(stored) - size[0], runs)
    return _Floor(stored, offset, size, rows, start, length, _distinct(start, length), ours.coded())


def _distinct(start: Ints, length: Ints) -> int:
    """Rows in the union of ranges."""
    order = np.argsort(start, kind="stable")
    stop = np.maximum.accumulate((start + length)[order])
    since = np.maximum(start[order], np.concatenate([[0], stop[:-1]]))
    return int(np.maximum(stop - since, 0).sum())


def _stored(ours: Thinrow) -> Bytes:
    files = sorted(p for p in Path(ours.path, "archive").rglob("*") if p.is_file())
    return np.concatenate([np.fromfile(p, np.uint8) for p in files])


def _all(peer: Peer, batches: Sequence[Batch], newest: int | None, out: Out) -> int:
    return sum(peer.read(b, newest, out) for b in batches)


def _two_threads(peer: Peer, batches: Sequence[Batch], newest: int | None, outs: Sequence[Out]) -> int:
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda i: _all(peer, batches[i::2], newest, outs[i]), range(2)))
