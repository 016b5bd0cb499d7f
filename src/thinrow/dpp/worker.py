"""Worker: one base batch, from its number alone: read examples, rebuild histories, apply the plan.

A worker keeps nothing that matters: any worker, thread or process gives the same base batch for the same number.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import CorruptionError, Erased, InputError, ObjectNotFound, StoreNotFound
from thinrow.core.users import plain
from thinrow.dpp.batch import Batch
from thinrow.dpp.budget import DRAW_COLUMNS, SIZE_COLUMNS, RowSizes, row_draws, row_sizes
from thinrow.dpp.order import Base, Order
from thinrow.dpp.poison import Poisoned, halve, told
from thinrow.dpp.row_filter import RowFilter
from thinrow.dpp.spec import SessionSpec
from thinrow.examples.datafiles import ROW_GROUP_ROWS
from thinrow.examples.decoded import DecodedRows, claim, key_of
from thinrow.examples.records import ExampleBatch
from thinrow.examples.table import ExampleTable
from thinrow.features import EVENT_TS, REQUEST_TS, FeaturePlan, featurize
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.reader import ReadStats
from thinrow.history.missing import OnMissing
from thinrow.history.reconstruct import Reconstruction, reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.schema import Projection
from thinrow.storage.objects import ObjectStore

Ints = npt.NDArray[np.int64]


class Source(Protocol):
    """Where a worker reads. Safe to use from several threads; equal arguments give equal results."""

    @property
    def split_rows(self) -> tuple[int, ...]:
        """Examples of each split."""
        ...

    @property
    def names(self) -> Collection[str]:
        """What a plan can read beside the history: ``ctx.NAME`` and ``cand.NAME``."""
        ...

    def history_names(self, projection: Projection) -> Collection[str]:
        """Names of the history columns that a projection reads."""
        ...

    def examples(self, split: int, first_row: int, stop_row: int) -> tuple[ExampleBatch, Ints]:
        """Rows ``[first_row, stop_row)`` of a split in stored order; those that were erased since are left out.

        Returns the examples, and of each its row, counted from ``first_row``: ascending.
        """
        ...

    def rebuild(
        self, batch: RequestBatch, projection: Projection, verify: bool, on_missing: OnMissing
    ) -> Reconstruction:
        """The histories that the requests saw."""
        ...


class TableSource:
    """A snapshot of an example table and an archive generation; a split is a bucket of the table, of which ``rows`` are
    kept.

    Decoded rows are held by row group (4,096 stored rows), those last used, ``cached_rows`` in all, so that the base
    batches of a bucket decode each row once. Of a row group only the kept rows are decoded and held.

    Where an erasure takes the snapshot or the generation away, reading goes on in those that came after: rows keep
    their numbers, and those that were erased are missing.
    """

    def __init__(
        self,
        table: ExampleTable,
        snapshot_id: int | None,
        generation: Generation,
        *,
        cached_rows: int,
        rows: RowFilter | None = None,
        shared_bytes: int = 0,
        skip_damaged: bool = False,
    ) -> None:
        """With ``skip_damaged`` rows that a filter or ``sizes`` cannot read are taken in, as of no event and of a user
        each: they are met again where they are read. Else CorruptionError."""
        table.check_buckets(generation.n_buckets)
        cache = _Cache(cached_rows, shared_bytes)
        self._skip_damaged = skip_damaged
        self._set(table, generation, cache, _open_view(table, snapshot_id, rows or RowFilter(), cache, skip_damaged))

    def _set(self, table: ExampleTable, generation: Generation, cache: _Cache, view: _View) -> None:
        self._table, self._generation = table, generation
        self._cache = cache
        self._lock = threading.Lock()
        self._view = view

    def __reduce__(self) -> tuple[Any, ...]:
        """Opened again in another process, on the rows that this one has: what was kept or erased is not asked anew."""
        table, generation, view = self._table, self._generation, self._view
        place = table.path, table.name, generation.objects, generation.number
        return _reopened, (*place, self._cache, view.snapshot_id, view.splits)

    @property
    def split_rows(self) -> tuple[int, ...]:
        return tuple(s.n_rows for s in self._view.splits)

    @property
    def names(self) -> Collection[str]:
        schema = self._table.example_schema
        return {f"ctx.{f.name}" for f in schema.context} | {f"cand.{f.name}" for f in schema.candidates}

    def history_names(self, projection: Projection) -> Collection[str]:
        return {c.name for c in projection.resolve(self._generation.schema)}

    def sizes(self, projection: Projection) -> RowSizes:
        """How many events each row saw, by what was logged, and whose it is; reads three columns of the table, and two
        more where the projection draws lengths.

        Raises:
            Erased: rows of the snapshot were erased, so that it cannot be told how batches were cut.
        """
        return self._view.sizes(self._skip_damaged, projection)

    def examples(self, split: int, first_row: int, stop_row: int) -> tuple[ExampleBatch, Ints]:
        while True:
            view = self._view
            try:
                return view.examples(split, first_row, stop_row)
            except (ObjectNotFound, StoreNotFound):
                with self._lock:
                    # Another thread may have gone over already.
                    if self._view is view:
                        self._view = view.succeeded()

    def rebuild(
        self, batch: RequestBatch, projection: Projection, verify: bool, on_missing: OnMissing
    ) -> Reconstruction:
        generation = self._generation
        try:
            return reconstruct(generation, batch, projection, verify=verify, on_missing=on_missing)
        except Erased as e:
            if e.user is not None:
                raise
            # It was revoked. Any later generation gives the same, less what was erased.
            self._generation = generation.newest()
            return reconstruct(self._generation, batch, projection, verify=verify, on_missing=on_missing)


def _reopened(
    path: Path,
    name: str,
    objects: ObjectStore,
    number: int,
    cache: _Cache,
    snapshot_id: int | None,
    splits: list[_Split],
) -> TableSource:
    archive = Archive(objects)
    try:
        generation = archive.generation(number)
    except ObjectNotFound:
        # Revoked and collected, as in ``rebuild``.
        generation = archive.pin()
        if generation.number < number:
            raise
    table = ExampleTable.open(path, name)
    source = TableSource.__new__(TableSource)
    source._set(table, generation, cache, _View(table, snapshot_id, splits, cache))
    return source


def _open_view(
    table: ExampleTable, snapshot_id: int | None, rows: RowFilter, cache: _Cache, skip_damaged: bool
) -> _View:
    if snapshot_id is None:
        return _View(table, None, [_Split.of(0, None, None)] * table.n_buckets, cache)
    try:
        stored = table.buckets(snapshot_id)
        gone: dict[int, Ints] = {}
    except StoreNotFound:
        later = table.successor(snapshot_id)
        if later is None:
            raise
        if rows.columns:
            raise Erased(
                f"rows of snapshot {snapshot_id} of table {table.name!r} were erased, and it cannot be told which of "
                "them a filter kept; begin a new run on the newest snapshot"
            ) from None
        snapshot_id, gone = later
        stored = table.buckets(snapshot_id)
    splits = []
    for bucket in range(table.n_buckets):
        kept = None
        n = stored.get(bucket, 0)
        if rows.columns and n:
            found, readable = _scan(table, bucket, snapshot_id, rows.columns, n if skip_damaged else None)
            keep = ~readable
            keep[readable] = rows.keep(found)
            kept = np.flatnonzero(keep)
        lost = gone.get(bucket)
        present = None if lost is None else np.delete(np.arange(n + len(lost)), lost)
        splits.append(_Split.of(n, kept, present, 0 if lost is None else n + len(lost)))
    return _View(table, snapshot_id, splits, cache)


@dataclass(frozen=True, slots=True)
class _Cache:
    """How many decoded rows a reader holds, and how many bytes of them it shares with others."""

    rows: int
    shared_bytes: int


class _View:
    """The splits of one snapshot, and decoded rows of it. Safe for threads."""

    def __init__(self, table: ExampleTable, snapshot_id: int | None, splits: list[_Split], cache: _Cache) -> None:
        self.splits, self.snapshot_id = splits, snapshot_id
        self._table = table
        self._cache, self._held_rows = cache, 0
        self._shared: DecodedRows | None = None
        if cache.shared_bytes and snapshot_id is not None:
            self._shared = claim(table.path, cache.shared_bytes, lambda: _stands(table, snapshot_id))
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[int, int], _Chunk] = OrderedDict()

    def examples(self, split: int, first_row: int, stop_row: int) -> tuple[ExampleBatch, Ints]:
        """See ``Source.examples``."""
        first, stop, rows = self.splits[split].there(first_row, stop_row)
        parts, off = [], self.splits[split].chunk_off
        start = int(np.searchsorted(off, first, side="right")) - 1
        for chunk in range(start, int(np.searchsorted(off, stop))):
            low, high = max(first, int(off[chunk])), min(stop, int(off[chunk + 1]))
            if low < high:
                inside = np.arange(low - off[chunk], high - off[chunk])
                parts.append(self._chunk(split, chunk).take(inside))
        if not parts:
            parts.append(self._table.read_bucket(split, self.snapshot_id, start=0, stop=0))
        return ExampleBatch.concat(parts), rows

    def sizes(self, skip_damaged: bool, projection: Projection) -> RowSizes:
        """See ``TableSource.sizes``."""
        events, users, n_users = [np.empty(0, np.int32)], [np.empty(0, np.int32)], 0
        drawn, reads = projection.shortest is not None, [np.empty(0, np.int32)]
        columns = (*SIZE_COLUMNS, *(DRAW_COLUMNS if drawn else ()))
        for bucket, split in enumerate(self.splits):
            if split.present is not None:
                raise Erased(
                    f"rows of table {self._table.name!r} were erased after the run began, and it cannot be told how a "
                    "budget had cut them; begin a new run on the newest snapshot"
                )
            if not split.n_rows:
                continue
            n = split.n_stored if skip_damaged else None
            stored, readable = _scan(self._table, bucket, self.snapshot_id, columns, n)
            seen, user, read = (np.zeros(len(readable), np.int32) for _ in range(3))
            seen[readable], user[readable] = row_sizes(stored)
            if drawn:
                read[readable] = np.minimum(seen[readable], row_draws(stored, projection))
            user[~readable] = stored.num_rows + np.arange(len(readable) - stored.num_rows)
            if split.kept is not None:
                seen, user, read = seen[split.kept], user[split.kept], read[split.kept]
            events.append(seen)
            reads.append(read)
            users.append(user + np.int32(n_users))
            n_users += int(user.max()) + 1
        return RowSizes(
            np.concatenate(events), np.concatenate(users), n_users, np.concatenate(reads) if drawn else None
        )

    def succeeded(self) -> _View:
        """The view in which readers of this one go on. Raises ObjectNotFound where there is none: a file is lost."""
        found = None if self.snapshot_id is None else self._table.successor(self.snapshot_id)
        if found is None:
            raise ObjectNotFound(
                f"files of snapshot {self.snapshot_id} of table {self._table.name!r} are gone, and no later one says "
                "that it took its place; restore them, or begin a new run on the newest snapshot"
            )
        snapshot_id, gone = found
        splits = [s.without(gone.get(bucket)) for bucket, s in enumerate(self.splits)]
        return _View(self._table, snapshot_id, splits, self._cache)

    def _chunk(self, split: int, chunk: int) -> ExampleBatch:
        with self._lock:
            if (split, chunk) not in self._chunks:
                self._chunks[split, chunk] = _Chunk()
                self._held_rows += self.splits[split].rows_of(chunk)
            held = self._chunks[split, chunk]
            self._chunks.move_to_end((split, chunk))
            while self._held_rows > self._cache.rows and len(self._chunks) > 1:
                (old_split, old_chunk), _ = self._chunks.popitem(last=False)
                self._held_rows -= self.splits[old_split].rows_of(old_chunk)
        # One thread decodes; others that want the same chunk wait for it, not for other chunks.
        with held.lock:
            if held.examples is None:
                held.examples = self._decoded(split, *self.splits[split].stored_rows(chunk))
            return held.examples

    def _decoded(self, split: int, start: int, stop: int, kept: Ints | None) -> ExampleBatch:
        table, shared = self._table, self._shared
        if shared is None:
            return table.read_bucket(split, self.snapshot_id, start=start, stop=stop, rows=kept)
        schemas = table.event_schema, table.example_schema
        key = key_of((table.name, *schemas, self.snapshot_id, split, start, stop), kept)
        rows = shared.get(key)
        if rows is None:
            rows = table.scan_bucket(split, self.snapshot_id, start=start, stop=stop)
            rows = rows if kept is None else rows.take(pa.array(kept))
            # Another thread may have met a later schema meanwhile: then these rows may have its columns.
            if schemas == (table.event_schema, table.example_schema):
                shared.put(key, rows)
            schemas = table.event_schema, table.example_schema
        return ExampleBatch.from_arrow(rows, *schemas)


def _scan(
    table: ExampleTable, bucket: int, snapshot_id: int | None, columns: Sequence[str], n_rows: int | None
) -> tuple[pa.Table, npt.NDArray[np.bool_]]:
    """Columns of those rows of a bucket that can be read, and (n,) which they are.

    Args:
        n_rows: of the bucket, where row groups that are damaged are left out; None where they are an error.

    Raises:
        CorruptionError: see ``n_rows``.
    """
    try:
        stored = table.scan_bucket(bucket, snapshot_id, columns=columns)
        return stored, np.ones(stored.num_rows, np.bool_)
    except CorruptionError:
        if n_rows is None:
            raise
    parts = [table.scan_bucket(bucket, snapshot_id, columns=columns, stop=0)]
    readable = np.zeros(n_rows, np.bool_)
    for start in range(0, n_rows, ROW_GROUP_ROWS):
        stop = min(start + ROW_GROUP_ROWS, n_rows)
        with suppress(CorruptionError):
            parts.append(table.scan_bucket(bucket, snapshot_id, columns=columns, start=start, stop=stop))
            readable[start:stop] = True
    return pa.concat_tables(parts), readable


def _stands(table: ExampleTable, snapshot_id: int) -> bool:
    """Whether no erasure has taken a snapshot's place. Asked of the table opened anew: a reader goes on with the schema
    that it began with."""
    with ExampleTable.open(table.path, table.name) as now:
        return now.stands(snapshot_id)


@dataclass(frozen=True, slots=True)
class _Split:
    """The kept rows of a bucket: ``n_rows`` when the reader began, of which those at ``present`` (None: all) are there
    still. Chunk k is its k-th row group, of which rows ``[chunk_off[k], chunk_off[k + 1])`` of the kept ones are left;
    ``kept`` are their stored numbers, ascending, or None for all ``n_stored``."""

    n_stored: int
    kept: Ints | None
    chunk_off: Ints
    n_rows: int
    present: Ints | None

    @classmethod
    def of(cls, n_stored: int, kept: Ints | None, present: Ints | None, n_rows: int = 0) -> _Split:
        bounds = np.minimum(np.arange(-(-n_stored // ROW_GROUP_ROWS) + 1) * ROW_GROUP_ROWS, n_stored)
        off = bounds if kept is None else np.searchsorted(kept, bounds)
        return cls(n_stored, kept, off, int(off[-1]) if present is None else n_rows, present)

    def there(self, first_row: int, stop_row: int) -> tuple[int, int, Ints]:
        """Of rows ``[first_row, stop_row)`` those that are there: their range among the kept ones, and which they are,
        counted from ``first_row``."""
        if self.present is None:
            return first_row, stop_row, np.arange(stop_row - first_row)
        first, stop = np.searchsorted(self.present, [first_row, stop_row]).tolist()
        return first, stop, self.present[first:stop] - first_row

    def without(self, gone: Ints | None) -> _Split:
        """The same rows where those stored at ``gone`` (ascending) are no longer."""
        if gone is None or not len(gone):
            return self
        kept = np.arange(self.n_stored) if self.kept is None else self.kept
        stays = ~np.isin(kept, gone)
        present = np.flatnonzero(stays) if self.present is None else self.present[stays]
        left = kept[stays]
        moved = None if self.kept is None else left - np.searchsorted(gone, left)
        return _Split.of(self.n_stored - len(gone), moved, present, self.n_rows)

    def rows_of(self, chunk: int) -> int:
        """How many rows of a chunk are kept."""
        return int(self.chunk_off[chunk + 1] - self.chunk_off[chunk])

    def stored_rows(self, chunk: int) -> tuple[int, int, Ints | None]:
        """A chunk's first stored row, its last one + 1, and which of them are kept, counted from the first."""
        start = chunk * ROW_GROUP_ROWS
        stop = min(start + ROW_GROUP_ROWS, self.n_stored)
        if self.kept is None or self.rows_of(chunk) == stop - start:
            return start, stop, None
        return start, stop, self.kept[self.chunk_off[chunk] : self.chunk_off[chunk + 1]] - start


class _Chunk:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.examples: ExampleBatch | None = None


@dataclass(frozen=True, slots=True)
class Produced:
    """A base batch and what it cost; ``rows`` are those of the base that are there, ascending, one an example.
    ``poisoned`` were left out because they cannot be made."""

    batch: Batch
    stats: ReadStats
    rows: Ints
    poisoned: tuple[Poisoned, ...] = ()

    @property
    def nbytes(self) -> int:
        """That of the batch."""
        return self.batch.nbytes


class Worker:
    """Produces base batches of a spec by virtual index.

    Raises:
        InputError: the plan reads what the projection or the table does not have, or names an output like a column.
    """

    def __init__(self, spec: SessionSpec, order: Order, source: Source) -> None:
        self._spec, self._order, self._source = spec, order, source
        if spec.plan is not None:
            _check_plan(spec.plan, spec.projection, source)

    def produce(self, v: int, wanted: Ints | None = None) -> Produced:
        """The base batch of virtual index ``v``; safe to call from several threads.

        Args:
            v: which one.
            wanted: rows of it that are needed, ascending; None for all.

        Raises:
            Erased, Expired: what an example saw, or an example itself, is gone, and the policy is to fail.
            VersionMismatch, CorruptionError: as ``reconstruct``, where poison fails; so does what a feature op raises.
            ObjectNotFound, StoreError: the table or the archive is no longer there.
        """
        base, stats, spec = self._order.base(v), ReadStats(), self._spec
        since = time.perf_counter()
        poisoned: list[Poisoned] = []
        examples, rows = self._read(base, wanted, poisoned)
        n_wanted = base.stop_row - base.first_row
        if wanted is not None and len(wanted) < n_wanted:
            n_wanted, kept = len(wanted), np.flatnonzero(np.isin(rows, wanted, assume_unique=True))
            examples, rows = examples.take(kept), rows[kept]
        erased = 0 if poisoned else n_wanted - len(rows)
        if erased and spec.on_missing == "fail":
            raise Erased(
                f"{erased} examples of rows {base.first_row} to {base.stop_row - 1} of split {base.split} were erased "
                "since; pass on_missing='skip' or 'shorten' to go on without them"
            )
        stats.clock("examples", since)
        if spec.on_poison == "fail":
            batch, rows = self._make(examples, rows, stats)
            return Produced(batch, stats, rows)
        return self._without_poison(base, examples, rows, stats, poisoned)

    def _read(self, base: Base, wanted: Ints | None, poisoned: list[Poisoned]) -> tuple[ExampleBatch, Ints]:
        """The stored examples of a base batch; none where they are damaged and the policy is not to fail."""
        try:
            return self._source.examples(base.split, base.first_row, base.stop_row)
        except CorruptionError as e:
            if self._spec.on_poison == "fail":
                raise
            n = base.stop_row - base.first_row
            left_out = n if wanted is None else len(wanted)
            poisoned.append(Poisoned(base.split, base.first_row, n, None, None, *told(e), left_out))
            return self._source.examples(base.split, base.first_row, base.first_row)

    def _without_poison(
        self, base: Base, examples: ExampleBatch, rows: Ints, stats: ReadStats, poisoned: list[Poisoned]
    ) -> Produced:
        def make(first: int, stop: int) -> tuple[Batch, Ints]:
            if (first, stop) == (0, len(rows)):
                return self._make(examples, rows, stats)
            return self._make(examples.take(np.arange(first, stop)), rows[first:stop], stats)

        def note(i: int, error: Exception) -> None:
            at = base.first_row + int(rows[i])
            user = plain(examples.batch.users[i])
            poisoned.append(Poisoned(base.split, at, 1, int(examples.request_id[i]), user, *told(error)))

        made = halve(make, 0, len(rows), note) or [make(0, 0)]
        batch = Batch.concat([part for part, _ in made])
        return Produced(batch, stats, np.concatenate([kept for _, kept in made]), tuple(poisoned))

    def _make(self, examples: ExampleBatch, rows: Ints, stats: ReadStats) -> tuple[Batch, Ints]:
        """Histories and features of examples; those that are left out by ``on_missing`` are in neither."""
        spec = self._spec
        rebuilt = self._source.rebuild(examples.batch, spec.projection, spec.verify, spec.on_missing)
        stats.add(rebuilt.stats)
        since = time.perf_counter()
        status = rebuilt.status[rebuilt.kept]
        if len(rebuilt.kept) < len(examples):
            examples, rows = examples.take(rebuilt.kept), rows[rebuilt.kept]
        request_ts = examples.batch.request_ts
        histories, features = featurize(spec.plan, rebuilt.histories, examples.context, examples.candidates, request_ts)
        stats.clock("features", since)
        batch = Batch(
            examples.request_id,
            request_ts,
            histories,
            examples.context,
            examples.candidates,
            examples.labels,
            features,
            examples.model_version,
            examples.arm,
            examples.boundary,
            status,
        )
        return batch, rows


def _check_plan(plan: FeaturePlan, projection: Projection, source: Source) -> None:
    history = source.history_names(projection)
    known = {f"history.{n}" for n in history} | {EVENT_TS, REQUEST_TS} | set(source.names)
    for name in plan.sources:
        if name not in known:
            raise InputError(
                f"the plan reads {name!r}, but projection and table have {', '.join(sorted(known))}; "
                "add it to the projection's columns, or drop it from the plan"
            )
    for name in plan.outputs:
        if plan.domain(name) == "history" and name in (*history, "event_ts", "arrival"):
            raise InputError(f"output {name!r} of the plan is also a history column; give the output another name")
