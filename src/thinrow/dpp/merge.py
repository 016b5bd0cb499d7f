"""Merging: the rows of a batch out of its base batches, by the reader or by a worker.

Where a batch is a block, or is cut from one by a budget, a worker makes the whole batch, and of base batches just the
rows that it needs: the reader gets it finished. With ``batch_rows``, base batches are what workers make, and the reader
merges them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.dpp.batch import Batch
from thinrow.dpp.order import Order, RowRefs
from thinrow.dpp.poison import Poisoned
from thinrow.dpp.worker import Produced, Worker
from thinrow.history.archive.reader import ReadStats
from thinrow.jagged import Events, SharedHistories

Ints = npt.NDArray[np.int64]


def merge(held: Mapping[int, Produced], refs: RowRefs, t: int) -> Batch:
    """The rows of ``refs`` that are there, in order; of base batches that are not needed whole, only these."""
    parts, position = [], np.full(len(refs.v), -1, np.int64)
    n_before = 0
    for v in np.unique(refs.v).tolist() or [next(iter(held))]:
        part, have = held[v].batch, held[v].rows
        at = np.flatnonzero(refs.v == v)
        place = np.searchsorted(have, refs.row[at])
        there = np.flatnonzero(have[np.minimum(place, len(have) - 1)] == refs.row[at]) if len(have) else place[:0]
        at, rows = at[there], place[there]
        if len(rows) < len(part):
            wanted = np.sort(rows)
            part, rows = part.take(wanted), np.searchsorted(wanted, rows)
        position[at] = n_before + rows
        n_before += len(part)
        parts.append(part)
    return Batch.concat(parts).take(position[position >= 0], t)


def poisoned_of(held: Mapping[int, Produced], refs: RowRefs, order: Order) -> list[Poisoned]:
    """What of ``refs`` was left out; other rows of these base batches are for other batches and ranks to tell."""
    found = []
    for v, produced in held.items():
        if not produced.poisoned:
            continue
        rows = order.base(v).first_row + refs.row[refs.v == v]
        counts = [(one, one.among(rows)) for one in produced.poisoned]
        found += [replace(one, left_out=n) for one, n in counts if n]
    return found


class Again:
    """``arrival`` and ``hidden_from`` of a batch's events, left out on the way where every example sees every event of
    its slice; whoever asks for them makes the batch again.

    Attributes:
        maker: what makes it; set where the batch has come.
    """

    travels = True

    def __init__(self, t: int) -> None:
        self.t = t
        self.maker: BatchMaker | None = None

    def __call__(self) -> tuple[Ints, Ints]:
        """(E,) each."""
        assert self.maker is not None
        events = self.maker.merged(self.t)[0].histories.events
        return events.arrival, events.hidden_from

    def __reduce__(self) -> tuple[Any, ...]:
        return Again, (self.t,)


@dataclass(frozen=True, slots=True)
class Whole:
    """A batch, what it cost, how many rows were read for it, what was left out, and what its events lack."""

    batch: Batch
    stats: ReadStats
    n_read: int
    poisoned: tuple[Poisoned, ...]
    again: Again | None

    @property
    def nbytes(self) -> int:
        """That of the batch."""
        return self.batch.nbytes


class BatchMaker:
    """Makes whole batches of one rank, of an order whose batches do not cross blocks."""

    def __init__(self, worker: Worker, order: Order, rank: int, n_ranks: int, prefetch: int = 0) -> None:
        self._worker, self._order, self._ranks, self._prefetch = worker, order, (rank, n_ranks), prefetch

    def make(self, t: int) -> Whole:
        """Batch ``t``. Raises as ``Worker.produce``."""
        batch, stats, n_read, poisoned = self.merged(t)
        histories, again = batch.histories, None
        events = histories.events
        if histories.exact.all() and not events.keys_known:
            again = Again(t)
            events = Events.lazy(events.users, events.offsets, events.event_ts, again, events.columns)
            rest = histories.user_of, histories.start, histories.stop, histories.bound, histories.exact
            batch = batch.with_histories(SharedHistories(events, *rest))
        return Whole(batch, stats, n_read, poisoned, again)

    def make_here(self, t: int) -> Whole:
        """Batch ``t`` for a reader of this process: nothing is left out on the way. Raises as ``Worker.produce``."""
        return Whole(*self.merged(t), None)

    def merged(self, t: int) -> tuple[Batch, ReadStats, int, tuple[Poisoned, ...]]:
        """The batch, what it cost, how many rows were read, and what was left out."""
        stats = ReadStats()
        refs = self._order.batch(t, *self._ranks)
        # A part without rows has the columns of others.
        bases = np.unique(refs.v).tolist() or self._order.bases_of(t)[:1]
        wanted = [np.sort(refs.row[refs.v == v]) for v in bases]
        if self._prefetch and len(bases) > 1:
            with ThreadPoolExecutor(1 + self._prefetch) as pool:
                made = list(pool.map(self._worker.produce, bases, wanted))
        else:
            made = list(map(self._worker.produce, bases, wanted))
        held = dict(zip(bases, made, strict=True))
        for produced in made:
            stats.add(produced.stats)
        poisoned = tuple(p for p in chain.from_iterable(p.poisoned for p in held.values()) if p.left_out)
        return merge(held, refs, t), stats, sum(len(p.rows) for p in held.values()), poisoned
