"""Every example rebuilt through the batch reader: how fast, at what cost of verification, and whether it is right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinrow.cli.demo.compare import count_mismatches, fat_values
from thinrow.cli.demo.fat_rows import FatRowReader, FatRowSource
from thinrow.cli.demo.stages import Stages
from thinrow.dpp.batch import Batch
from thinrow.dpp.client import Loader, loader
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Generation
from thinrow.jagged import Column, SharedHistories

#: How many of the newest events are rebuilt; None for all.
LENGTHS: tuple[int | None, ...] = (16, 128, 1_024, None)
#: Examples of a base batch, about as many as a row group of fat rows holds; four of them make a shuffled batch.
_BASE_ROWS = 1_024


def length_name(newest: int | None) -> str:
    """``16`` -> ``"16"``, None -> ``"all"``."""
    return "all" if newest is None else str(newest)


@dataclass(frozen=True, slots=True)
class Rate:
    """Events delivered and the seconds it took."""

    events: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Events delivered per second."""
        return self.events / max(self.seconds, 1e-9)


class Rebuild:
    """Passes over all examples with one reader per pass."""

    def __init__(self, generation: Generation, table: ExampleTable, stages: Stages, seed: int) -> None:
        self._generation, self._table, self._stages, self._seed = generation, table, stages, seed
        self._threads = min(os.cpu_count() or 1, 2)

    def reader(self, newest: int | None, *, verify: bool = True) -> Loader:
        """The batch reader of a pass."""
        return loader(
            self._generation,
            self._table,
            max_len=newest,
            seed=self._seed,
            threads=self._threads,
            verify=verify,
            base_rows=_BASE_ROWS,
        )

    def shared(self, newest: int | None, *, verify: bool = True) -> tuple[Rate, Loader]:
        """Time to batches of shared views: each history is delivered as a slice of its user's one copy."""
        return self._timed(self.reader(newest, verify=verify), lambda h: int((h.stop - h.start).sum()))

    def copies(self, newest: int | None) -> Rate:
        """Time to batches with a copy of every column for every example, as fat rows give them."""
        return self._timed(self.reader(newest), _copy)[0]

    def _timed(self, reader: Loader, deliver: Callable[[SharedHistories], int]) -> tuple[Rate, Loader]:
        events, since = 0, time.perf_counter()
        with reader:
            for batch in reader:
                events += deliver(batch.histories)
        return Rate(events, time.perf_counter() - since), reader

    def compare(
        self, newest: int | None, fat: FatRowReader, source: FatRowSource, advance: Callable[[int], None]
    ) -> dict[str, int]:
        """Element for element against the fat rows; candidates, cross features and labels too where all is read.

        Returns:
            ``examples`` compared, ``mismatches`` among them, ``versions_verified``.
        """
        compared, wrong = 0, 0
        by_id = np.argsort(source.request_id)
        seen = np.zeros(len(by_id), np.bool_)
        with self.reader(newest) as reader:
            for batch in reader:
                rows = by_id[np.searchsorted(source.request_id, batch.request_id, sorter=by_id)]
                with self._stages.stage("compare"):
                    for places, part in fat.fetch(batch.request_id, newest):
                        wrong += count_mismatches(batch.histories.select(places), part, fat.dictionaries)
                    if newest is None:
                        wrong += _wrong_candidates(batch, rows, source)
                seen[rows] = True
                compared += len(batch)
                advance(len(batch))
        # A request that never came, or came twice, is a mismatch too.
        wrong += int((~seen).sum()) + abs(compared - int(seen.sum()))
        return {"examples": compared, "mismatches": wrong, "versions_verified": reader.stats.versions_verified}


def _copy(histories: SharedHistories) -> int:
    index, _ = histories.positions()
    for column in (Column(histories.events.event_ts), *histories.events.columns.values()):
        column.take(index)
    return len(index)


def _wrong_candidates(batch: Batch, rows: npt.NDArray[np.int64], source: FatRowSource) -> int:
    """Examples whose candidates, cross features or labels are not those that the fat row has."""
    wrong = np.zeros(len(rows), np.bool_)
    pairs = [(f"cand_{n}", j) for n, j in batch.candidates.items()] + [
        (f"label_{n}", j) for n, j in batch.labels.items()
    ]
    for name, ours in pairs:
        theirs = source.candidates[name].take(rows)
        if not np.array_equal(ours.offsets, theirs.offsets):
            wrong |= ours.lengths != theirs.lengths
            continue
        differs = fat_values(ours.column, theirs.column.dictionary) != theirs.values
        wrong[np.unique(np.repeat(np.arange(len(rows)), ours.lengths)[differs])] = True
    return int(wrong.sum())


def scan_rate(path: Path, source: FatRowSource, newest: int | None) -> Rate:
    """Time to read all fat rows of a file as arrays, candidates and labels included, in file order."""
    with_candidates = [*source.scalars, *source.candidates]
    reader = FatRowReader(path, list(source.columns), others=with_candidates, threads=True)
    since, events = time.perf_counter(), 0
    for batch in reader.scan(newest):
        events += len(batch.columns["event_ts"])
    return Rate(events, time.perf_counter() - since)
