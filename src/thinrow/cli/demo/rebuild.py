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
from thinrow.jagged import SharedHistories

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


@dataclass(frozen=True, slots=True)
class Compared:
    """``examples`` compared (each once a length), ``mismatches`` among them, ``versions_verified`` (one a request)."""

    examples: int
    mismatches: int
    versions_verified: int


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
        """Time to batches of shared views: each history is delivered as a slice of its user's one copy, and where late
        events lie in a slice, with the finding of those that are visible."""
        return self._timed(self.reader(newest, verify=verify), lambda h: int(h.lengths().sum()))

    def copies(self, newest: int | None) -> Rate:
        """Time to batches with a copy of every column for every example, as fat rows give them."""
        return self._timed(self.reader(newest), _copy)[0]

    def _timed(self, reader: Loader, deliver: Callable[[SharedHistories], int]) -> tuple[Rate, Loader]:
        events, since = 0, time.perf_counter()
        with reader:
            for batch in reader:
                events += deliver(batch.histories)
        return Rate(events, time.perf_counter() - since), reader

    def compare(self, fat: FatRowReader, source: FatRowSource, advance: Callable[[int], None]) -> Compared:
        """Every example at every length against its fat row, element for element; candidates, cross features and labels
        too. The readers of the lengths go side by side, so that each fat row is read once."""
        compared, wrong = 0, 0
        by_id = np.argsort(source.request_id)
        seen = np.zeros(len(by_id), np.int64)
        readers = [self.reader(n) for n in LENGTHS]
        for batches in zip(*readers, strict=True):
            ids = batches[-1].request_id
            rows = by_id[np.searchsorted(source.request_id, ids, sorter=by_id)]
            with self._stages.stage("compare"):
                wrong += _wrong_candidates(batches[-1], rows, source)
                for places, part in fat.fetch(ids):
                    for newest, batch in zip(LENGTHS, batches, strict=True):
                        assert np.array_equal(batch.request_id, ids)
                        ours = batch.histories.select(places)
                        wrong += count_mismatches(ours, part.newest(newest), fat.dictionaries)
            seen[rows] += 1
            compared += len(batches) * len(ids)
            advance(len(ids))
        # A request that never came, or came twice, is a mismatch too.
        wrong += int((seen != 1).sum())
        return Compared(compared, wrong, readers[-1].stats.versions_verified)


def _copy(histories: SharedHistories) -> int:
    return max(len(histories.to_jagged(name).values) for name in ("event_ts", *histories.events.columns))


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


def scan_rates(path: Path, source: FatRowSource) -> dict[str, Rate]:
    """Time to read all fat rows of a file as arrays, candidates and labels included, in file order; by length.

    What is decoded is the same at every length, so it is decoded and timed once; cutting out the newest is timed for
    each length.
    """
    others = [*source.scalars, *source.candidates]
    reader = FatRowReader(path, list(source.columns), others=others, threads=True)
    decoding = 0.0
    cutting = dict.fromkeys(LENGTHS, 0.0)
    events = dict.fromkeys(LENGTHS, 0)
    for group in range(reader.n_groups):
        since = time.perf_counter()
        batch = reader.read_group(group)
        decoding += time.perf_counter() - since
        for newest in LENGTHS:
            since = time.perf_counter()
            events[newest] += int(batch.newest(newest).offsets[-1])
            cutting[newest] += time.perf_counter() - since
    return {length_name(n): Rate(events[n], decoding + cutting[n]) for n in LENGTHS}
