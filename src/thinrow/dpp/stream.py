"""A session that follows a log of sealed splits: the same batches now, seconds behind the join, as later from the log.

The rows of all splits, in the order of the log, are one stream. It is cut into base batches and blocks of a constant
number of rows, whatever the splits' sizes; rows are permuted inside a block, by seed and number, as in ``VirtualOrder``
over one split. So a batch depends on the log alone: not on when a split came, nor on how often the session was killed.

Worked trace, base batches of 2 rows, blocks of 2, splits of 3, 4 and 2 rows, then the seal::

    split 1 there    rows 0-2    block 0 (rows 0-3) waits for its last row
    split 2 there    rows 3-6    block 0 is a batch; block 1 (rows 4-7) waits
    split 3 there    rows 7-8    block 1 is a batch; block 2 waits
    sealed           9 rows      block 2 is a batch of the one row left; the session ends
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import Erased, InputError, ObjectNotFound, StoreError
from thinrow.dpp.client import Loader, Pinnable
from thinrow.dpp.order import ROW_STREAM, Base, RowRefs, permutation, rows_of_rank
from thinrow.dpp.spec import SessionSpec, projection_of
from thinrow.examples.records import ExampleBatch
from thinrow.examples.splits import Split, SplitLog
from thinrow.features import FeaturePlan
from thinrow.history.missing import OnMissing
from thinrow.history.reconstruct import Reconstruction, reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.schema import Projection

Ints = npt.NDArray[np.int64]

_CACHED_ROWS = 16_384


class _Left(Exception):
    """The session was left while a worker waited."""


class StreamManifest:
    """What a state must agree on: the log and the size of base batches. The log grows, so its rows count not."""

    snapshot_id, n_rows = 0, -1

    def __init__(self, table: str, base_rows: int) -> None:
        self.table, self.base_rows = table, base_rows

    def fingerprint(self) -> str:
        """16 hex digits; equal manifests have equal ones."""
        return hashlib.sha256(f"{self.table} {self.base_rows}".encode()).hexdigest()[:16]


class StreamSource:
    """The rows of a split log, and histories from the newest generation of a store. Safe for threads.

    Args:
        poll_s: between two looks at the log.
        wait_s: without a new split, after which ``wait`` raises; None for no end.
    """

    def __init__(self, store: Pinnable, log: SplitLog, poll_s: float, wait_s: float | None) -> None:
        self._store, self._log, self._poll_s, self._wait_s = store, log, poll_s, wait_s
        self._generation = store.pin()
        self._changed = threading.Condition()
        self._numbers: list[int] = []
        self._starts: list[int] = []
        self._total = 0
        self._grew, self._looked = time.monotonic(), -1.0
        self._left = False
        self._held: OrderedDict[int, Split] = OrderedDict()
        self.end: int | None = None
        with self._changed:
            self._look()

    @property
    def split_rows(self) -> tuple[int, ...]:
        """One split: the stream so far."""
        return (self._total,)

    @property
    def names(self) -> Collection[str]:
        """See ``Source.names``."""
        schema = self._log.example_schema
        return {f"ctx.{f.name}" for f in schema.context} | {f"cand.{f.name}" for f in schema.candidates}

    def history_names(self, projection: Projection) -> Collection[str]:
        """See ``Source.history_names``."""
        return {c.name for c in projection.resolve(self._generation.schema)}

    def wait(self, stop_row: int) -> int:
        """Until the log has ``stop_row`` rows or is sealed; returns ``stop_row``, or the rows there are in the end.

        Raises:
            StoreError: no split came for ``wait_s``.
        """
        with self._changed:
            while self._total < stop_row and self.end is None:
                if self._left:
                    raise _Left
                now = time.monotonic()
                if now - self._looked >= self._poll_s:
                    self._look()
                    self._changed.notify_all()
                elif self._wait_s is not None and now - self._grew >= self._wait_s:
                    raise StoreError(
                        f"{self._log.name} has {self._total} rows and had no new split for {self._wait_s} s: does the "
                        "join run? Iterate again to go on, or seal the log to end"
                    )
                else:
                    self._changed.wait(self._poll_s)
            return min(stop_row, self._total)

    def begin(self) -> None:
        """Wait from now on."""
        with self._changed:
            self._left, self._grew = False, time.monotonic()

    def leave(self) -> None:
        """End all waiting."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def examples(self, split: int, first_row: int, stop_row: int) -> tuple[ExampleBatch, Ints]:
        """Rows ``[first_row, stop_row)`` of the stream, see ``Source.examples``.

        Raises:
            InputError: splits with these rows were pruned.
        """
        if self._starts and first_row < self._starts[0] and first_row < stop_row:
            raise InputError(f"row {first_row} of {self._log.name} was pruned, it begins at {self._starts[0]}")
        parts: list[ExampleBatch] = []
        rows: list[Ints] = []
        at = max(int(np.searchsorted(self._starts, first_row, side="right")) - 1, 0)
        for position in range(at, len(self._numbers)):
            start = self._starts[position]
            if start >= stop_row and parts:
                break
            one = self._read(self._numbers[position])
            inside = np.flatnonzero((one.rows + start >= first_row) & (one.rows + start < stop_row))
            if len(inside) or not parts:
                parts.append(one.examples.take(inside))
                rows.append(one.rows[inside] + start - first_row)
        return ExampleBatch.concat(parts), np.concatenate(rows)

    def rebuild(
        self, batch: RequestBatch, projection: Projection, verify: bool, on_missing: OnMissing
    ) -> Reconstruction:
        """The histories that the requests saw, from a generation that was the newest after they were logged."""
        try:
            return reconstruct(self._generation, batch, projection, verify=verify, on_missing=on_missing)
        except ObjectNotFound:
            pass  # collected: a newer one has it all
        except Erased as e:
            if e.user is not None:
                raise
        self._generation = self._store.pin()
        return reconstruct(self._generation, batch, projection, verify=verify, on_missing=on_missing)

    def _look(self) -> None:
        """Take in the splits that are new."""
        self._looked = time.monotonic()
        last = self._numbers[-1] if self._numbers else 0
        new = [number for number in self._log.numbers() if number > last]
        if new:
            # Their requests may have seen what only this generation has.
            self._generation = self._store.pin()
        for number in new:
            split = self._log.read(number)
            self._numbers.append(number)
            self._starts.append(split.rows_before)
            self._keep(number, split)
            self._total, self._grew = split.rows_before + split.n_rows, self._looked
            if split.sealed:
                self.end = self._total

    def _read(self, number: int) -> Split:
        with self._changed:
            held = self._held.get(number)
            if held is not None:
                self._held.move_to_end(number)
                return held
        split = self._log.read(number)
        with self._changed:
            self._keep(number, split)
        return split

    def _keep(self, number: int, split: Split) -> None:
        self._held[number] = split
        while len(self._held) > 2 and sum(s.n_rows for s in self._held.values()) > _CACHED_ROWS:
            self._held.popitem(last=False)


class StreamOrder:
    """``VirtualOrder`` over the one endless split of a stream: see the module."""

    def __init__(self, manifest: StreamManifest, source: StreamSource, spec: SessionSpec) -> None:
        self.manifest, self._source, self._seed = manifest, source, spec.seed
        self._block, self._block_rows = spec.block, spec.block * spec.base_rows
        self._batch_rows = self._block_rows if spec.batch_rows is None else spec.batch_rows
        if self._batch_rows < 1:
            raise InputError(f"batch_rows={spec.batch_rows}; it must be 1 or more")

    @property
    def n_bases(self) -> int | None:
        """Base batches; None while the log is open."""
        return None if self._source.end is None else -(-self._source.end // self.manifest.base_rows)

    @property
    def n_batches(self) -> int | None:
        """Global batches; None while the log is open."""
        return None if self._source.end is None else -(-self._source.end // self._batch_rows)

    def base(self, v: int) -> Base:
        """The base batch ``v``, when it is there; an empty one after the end. Raises as ``StreamSource.wait``."""
        first = v * self.manifest.base_rows
        return Base(v, 0, 0, first, max(self._source.wait(first + self.manifest.base_rows), first))

    def bases_of(self, t: int) -> range:
        """Base batches that batch ``t`` is cut from: those of every block it touches."""
        first, stop = self._rows_of(t)
        v_stop = ((stop - 1) // self._block_rows + 1) * self._block
        v_end = self.n_bases
        return range(first // self._block_rows * self._block, v_stop if v_end is None else min(v_stop, v_end))

    def batch(self, t: int, rank: int = 0, n_ranks: int = 1) -> RowRefs:
        """Rows of global batch ``t`` for one rank, see ``VirtualOrder.batch``; its base batches must be there."""
        first, stop = rows_of_rank(*self._rows_of(t), rank, n_ranks)
        places = [np.empty(0, np.int64)]
        for block in range(first // self._block_rows, -(-stop // self._block_rows)):
            start = block * self._block_rows
            end = self._source.end
            end = start + self._block_rows if end is None else min(start + self._block_rows, end)
            order = start + permutation(end - start, self._seed, ROW_STREAM, block)
            places.append(order[max(first - start, 0) : stop - start])
        place = np.concatenate(places)
        return RowRefs(place // self.manifest.base_rows, place % self.manifest.base_rows)

    def _rows_of(self, t: int) -> tuple[int, int]:
        first, stop = t * self._batch_rows, (t + 1) * self._batch_rows
        end = self._source.end
        return first, stop if end is None else max(min(stop, end), first + 1)


class Follower(Loader):
    """A ``Loader`` over a log that grows: iterating waits for splits, and ends after the last row of a sealed log."""

    def __init__(
        self, spec: SessionSpec, source: StreamSource, order: StreamOrder, *, rank: int = 0, n_ranks: int = 1
    ) -> None:
        super().__init__(spec, source, rank=rank, n_ranks=n_ranks, hold=self._waiting, order=order)
        self._stream = source

    def _waiting(self) -> AbstractContextManager[object]:
        self._stream.begin()
        return nullcontext()

    def _leave(self) -> None:
        self._stream.leave()


def follow(
    store: Pinnable,
    log: SplitLog,
    *,
    projection: Projection | None = None,
    max_len: int | None = None,
    plan: FeaturePlan | None = None,
    batch_rows: int | None = None,
    seed: int = 0,
    threads: int | None = None,
    verify: bool = True,
    on_missing: OnMissing = "fail",
    base_rows: int = 64,
    block: int = 4,
    rank: int = 0,
    n_ranks: int = 1,
    poll_s: float = 0.2,
    wait_s: float | None = None,
) -> Follower:
    """A session over a log of splits, from its first row on, or from where a state says.

    A block of ``base_rows * block`` rows is yielded when its last row is there, so that smaller ones are fresher. An
    open log makes the reader wait; a sealed one (``SplitLog.seal``) ends it.

    Args:
        poll_s: seconds between two looks at the log while it is waited for.
        wait_s: seconds without a new split after which iterating raises StoreError; iterating again goes on after the
            last batch yielded. None waits for ever.

    The rest are as in ``loader``.

    Raises:
        InputError: arguments out of bounds, or both ``projection`` and ``max_len``.
    """
    projection = projection_of(projection, max_len)
    if not poll_s > 0:
        raise InputError(f"poll_s={poll_s}; it must be above 0")
    source = StreamSource(store, log, poll_s, wait_s)
    spec = SessionSpec(
        table=log.id,
        snapshot_id=0,
        generation=0,
        projection=projection,
        plan=plan,
        base_rows=base_rows,
        block=block,
        batch_rows=batch_rows,
        seed=seed,
        interleave=1,
        threads=threads if threads is not None else os.cpu_count() or 1,
        verify=verify,
        on_missing=on_missing,
    )
    order = StreamOrder(StreamManifest(log.id, base_rows), source, spec)
    return Follower(spec, source, order, rank=rank, n_ranks=n_ranks)
