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
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import Erased, InputError, NothingNew, ObjectNotFound
from thinrow.dpp.client import Loader, Pinnable
from thinrow.dpp.order import ROW_STREAM, Base, RowRefs, permutation, rows_of_rank
from thinrow.dpp.poison import OnPoison
from thinrow.dpp.spec import SessionSpec, projection_of
from thinrow.examples.records import ExampleBatch
from thinrow.examples.splits import Split, SplitLog
from thinrow.features import FeaturePlan
from thinrow.history.archive.generation import Generation
from thinrow.history.missing import OnMissing
from thinrow.history.reconstruct import Reconstruction, reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.schema import Projection

Ints = npt.NDArray[np.int64]

_CACHED_ROWS, _CACHED_SPLITS = 16_384, 64
#: Between two lists of a log that stands still, which show a lost split.
_LIST_S = 60.0


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

    Opening reads the newest split alone. Where a row stands is found by halving, in as many reads as the number of
    splits has bits; the splits after it follow from there.

    Args:
        poll_s: between two looks at the log.
        wait_s: without a new split, after which ``wait`` raises; None for no end.
    """

    def __init__(self, store: Pinnable, log: SplitLog, poll_s: float, wait_s: float | None) -> None:
        self._store, self._log, self._poll_s, self._wait_s = store, log, poll_s, wait_s
        self._generation = store.pin()
        self._changed, self._lock = threading.Condition(), threading.Lock()
        self._last, self._total = 0, 0
        self._grew = self._listed = time.monotonic()
        self._looked = -1.0
        self._left = False
        self._places, self._held = _Places(), _Held()
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
            NothingNew: no split came for ``wait_s``.
            CorruptionError: the next split is lost.
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
                    self._log.numbers()  # says where a split is lost
                    raise NothingNew(
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
            CorruptionError: such a split is lost.
        """
        parts: list[ExampleBatch] = []
        rows: list[Ints] = []
        try:
            # Of no rows the newest split tells the columns.
            number = self._find(first_row) if first_row < stop_row else self._last
            while True:
                one = self._read(number)
                at = one.rows + one.rows_before
                inside = np.flatnonzero((at >= first_row) & (at < stop_row))
                if len(inside) or not parts:
                    parts.append(one.examples.take(inside))
                    rows.append(at[inside] - first_row)
                if first_row >= stop_row or one.rows_before + one.n_rows >= stop_row:
                    return ExampleBatch.concat(parts), np.concatenate(rows)
                number += 1
        except ObjectNotFound as e:
            raise self._pruned(first_row) from e

    def split_of(self, row: int) -> int:
        """The number of the split that holds a row, or of the newest where that is yet to come. Raises as
        ``examples``."""
        try:
            return self._find(row) if row < self._total else self._last
        except ObjectNotFound as e:
            raise self._pruned(row) from e

    def _pruned(self, row: int) -> InputError:
        first = self._log.read(self._log.numbers()[0]).rows_before
        return InputError(f"row {row} of {self._log.name} was pruned, it begins at {first}")

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
        return reconstruct(self._pin(), batch, projection, verify=verify, on_missing=on_missing)

    def _pin(self) -> Generation:
        """The newest generation; another thread may have pinned a newer one meanwhile."""
        found = self._store.pin()
        with self._lock:
            if found.number > self._generation.number:
                self._generation = found
            return self._generation

    def _look(self) -> None:
        """Take in the splits that are new."""
        self._looked = time.monotonic()
        if self._looked - self._listed >= _LIST_S:
            self._listed = self._looked
            self._log.numbers()  # says where a split is lost
        newest = self._log.newest(self._last) or 0
        if newest <= self._last:
            return
        # Their requests may have seen what only this generation has.
        self._pin()
        split = self._read(newest)
        self._last, self._total = newest, split.rows_before + split.n_rows
        self._grew = self._listed = self._looked
        if split.sealed:
            self.end = self._total

    def _find(self, row: int) -> int:
        """The number of the split that holds a row. Raises ObjectNotFound where it was pruned."""
        while True:
            with self._lock:
                number, stop = self._places.around(row)
            if stop - number == 1:
                return number
            try:
                self._read((number + stop) // 2 if number else 1)
            except ObjectNotFound:
                first = self._log.numbers()[0]
                if self._read(first).rows_before > row:
                    raise
                with self._lock:
                    self._places.forget(first)

    def _read(self, number: int) -> Split:
        with self._lock:
            held = self._held.get(number)
        if held is None:
            held = self._log.read(number)
            with self._lock:
                self._held.put(number, held)
                self._places.note(number, held.rows_before)
                self._places.note(number + 1, held.rows_before + held.n_rows)
        return held


class _Places:
    """The first rows of those splits that were read or follow one that was; numbers and rows ascend together."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._starts: list[int] = []

    def note(self, number: int, start: int) -> None:
        at = bisect_left(self._numbers, number)
        if self._numbers[at : at + 1] != [number]:
            self._numbers.insert(at, number)
            self._starts.insert(at, start)

    def forget(self, below: int) -> None:
        """Nothing is known of splits numbered below ``below``."""
        at = bisect_left(self._numbers, below)
        del self._numbers[:at], self._starts[:at]

    def around(self, row: int) -> tuple[int, int]:
        """``[number, stop)``: the splits one of which holds a row that there is; number 0 where none before is known.
        Of splits without rows the row's own comes last."""
        at = bisect_right(self._starts, row)
        return self._numbers[at - 1] if at else 0, self._numbers[at]


class _Held:
    """The splits used last: ``_CACHED_ROWS`` rows and ``_CACHED_SPLITS`` of them, but two in any case."""

    def __init__(self) -> None:
        self._splits: OrderedDict[int, Split] = OrderedDict()
        self._rows = 0

    def get(self, number: int) -> Split | None:
        found = self._splits.get(number)
        if found is not None:
            self._splits.move_to_end(number)
        return found

    def put(self, number: int, split: Split) -> None:
        if number not in self._splits:
            self._splits[number] = split
            self._rows += split.n_rows
        while len(self._splits) > 2 and (self._rows > _CACHED_ROWS or len(self._splits) > _CACHED_SPLITS):
            self._rows -= self._splits.popitem(last=False)[1].n_rows


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

    def splits_done(self) -> int:
        """Splits numbered below it are not needed to go on from here, at any rank: ``SplitLog.prune`` may take them
        when no session that is to be resumed stands further back.

        Raises:
            InputError: they were pruned already, and this one cannot go on.
        """
        return self._stream.split_of(self._order.bases_of(self._t + 1).start * self.spec.base_rows)

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
    on_poison: OnPoison = "fail",
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
        wait_s: seconds without a new split after which iterating raises NothingNew; iterating again goes on after the
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
        workers=threads if threads is not None else os.cpu_count() or 1,
        verify=verify,
        on_missing=on_missing,
        on_poison=on_poison,
    )
    order = StreamOrder(StreamManifest(log.id, base_rows), source, spec)
    return Follower(spec, source, order, rank=rank, n_ranks=n_ranks)
