"""Worker: one base batch, from its number alone: read examples, rebuild histories, apply the plan.

A worker keeps nothing that matters: any worker, thread or process gives the same base batch for the same number.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.dpp.batch import Batch
from thinrow.dpp.order import VirtualOrder
from thinrow.dpp.row_filter import RowFilter
from thinrow.dpp.spec import SessionSpec
from thinrow.examples.datafiles import ROW_GROUP_ROWS
from thinrow.examples.records import ExampleBatch
from thinrow.examples.table import ExampleTable
from thinrow.features import FeaturePlan, featurize
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.reader import ReadStats
from thinrow.history.reconstruct import Reconstruction, reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.schema import Projection


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

    def examples(self, split: int, first_row: int, stop_row: int) -> ExampleBatch:
        """Rows ``[first_row, stop_row)`` of a split in stored order."""
        ...

    def rebuild(self, batch: RequestBatch, projection: Projection, verify: bool) -> Reconstruction:
        """The histories that the requests saw."""
        ...


class TableSource:
    """A snapshot of an example table and an archive generation; a split is a bucket of the table, of which ``rows`` are
    kept.

    Decoded rows are held by row group (4,096 stored rows), those last used, ``cached_rows`` in all, so that the base
    batches of a bucket decode each row once. Of a row group only the kept rows are decoded and held.
    """

    def __init__(
        self,
        table: ExampleTable,
        snapshot_id: int | None,
        generation: Generation,
        *,
        cached_rows: int,
        rows: RowFilter | None = None,
    ) -> None:
        table.check_buckets(generation.n_buckets)
        self._table, self._snapshot_id, self._generation = table, snapshot_id, generation
        stored = table.buckets(snapshot_id) if snapshot_id is not None else {}
        rows = rows or RowFilter()
        self._splits = []
        for bucket in range(table.n_buckets):
            kept = None
            if rows.columns and bucket in stored:
                kept = np.flatnonzero(rows.keep(table.scan_bucket(bucket, snapshot_id, columns=rows.columns)))
            self._splits.append(_Split.of(stored.get(bucket, 0), kept))
        self._cached_rows, self._held_rows = cached_rows, 0
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[int, int], _Chunk] = OrderedDict()

    @property
    def split_rows(self) -> tuple[int, ...]:
        return tuple(int(s.chunk_off[-1]) for s in self._splits)

    @property
    def names(self) -> Collection[str]:
        schema = self._table.example_schema
        return {f"ctx.{f.name}" for f in schema.context} | {f"cand.{f.name}" for f in schema.candidates}

    def history_names(self, projection: Projection) -> Collection[str]:
        return {c.name for c in projection.resolve(self._generation.schema)}

    def examples(self, split: int, first_row: int, stop_row: int) -> ExampleBatch:
        parts, off = [], self._splits[split].chunk_off
        first = int(np.searchsorted(off, first_row, side="right")) - 1
        for chunk in range(first, int(np.searchsorted(off, stop_row))):
            low, high = max(first_row, int(off[chunk])), min(stop_row, int(off[chunk + 1]))
            if low < high:
                inside = np.arange(low - off[chunk], high - off[chunk])
                parts.append(self._chunk(split, chunk).take(inside))
        return ExampleBatch.concat(parts)

    def rebuild(self, batch: RequestBatch, projection: Projection, verify: bool) -> Reconstruction:
        return reconstruct(self._generation, batch, projection, verify=verify)

    def _chunk(self, split: int, chunk: int) -> ExampleBatch:
        with self._lock:
            if (split, chunk) not in self._chunks:
                self._chunks[split, chunk] = _Chunk()
                self._held_rows += self._splits[split].rows_of(chunk)
            held = self._chunks[split, chunk]
            self._chunks.move_to_end((split, chunk))
            while self._held_rows > self._cached_rows and len(self._chunks) > 1:
                (old_split, old_chunk), _ = self._chunks.popitem(last=False)
                self._held_rows -= self._splits[old_split].rows_of(old_chunk)
        # One thread decodes; others that want the same chunk wait for it, not for other chunks.
        with held.lock:
            if held.examples is None:
                start, stop, rows = self._splits[split].stored_rows(chunk)
                held.examples = self._table.read_bucket(split, self._snapshot_id, start=start, stop=stop, rows=rows)
            return held.examples


@dataclass(frozen=True, slots=True)
class _Split:
    """The kept rows of a bucket. Chunk k is its k-th row group, of which rows ``[chunk_off[k], chunk_off[k + 1])`` of
    the kept ones are left; ``kept`` are their stored numbers, ascending, or None for all ``n_stored``."""

    n_stored: int
    kept: npt.NDArray[np.int64] | None
    chunk_off: npt.NDArray[np.int64]

    @classmethod
    def of(cls, n_stored: int, kept: npt.NDArray[np.int64] | None) -> _Split:
        bounds = np.minimum(np.arange(-(-n_stored // ROW_GROUP_ROWS) + 1) * ROW_GROUP_ROWS, n_stored)
        return cls(n_stored, kept, bounds if kept is None else np.searchsorted(kept, bounds))

    def rows_of(self, chunk: int) -> int:
        """How many rows of a chunk are kept."""
        return int(self.chunk_off[chunk + 1] - self.chunk_off[chunk])

    def stored_rows(self, chunk: int) -> tuple[int, int, npt.NDArray[np.int64] | None]:
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
    """A base batch and what it cost."""

    batch: Batch
    stats: ReadStats


class Worker:
    """Produces base batches of a spec by virtual index.

    Raises:
        InputError: the plan reads what the projection or the table does not have, or names an output like a column.
    """

    def __init__(self, spec: SessionSpec, order: VirtualOrder, source: Source) -> None:
        self._spec, self._order, self._source = spec, order, source
        if spec.plan is not None:
            _check_plan(spec.plan, spec.projection, source)

    def produce(self, v: int) -> Produced:
        """The base batch of virtual index ``v``; safe to call from several threads.

        Raises:
            VersionMismatch, CorruptionError: as ``reconstruct``.
            ObjectNotFound, StoreError: the table or the archive is no longer there.
        """
        base, stats = self._order.base(v), ReadStats()
        since = time.perf_counter()
        examples = self._source.examples(base.split, base.first_row, base.stop_row)
        stats.clock("examples", since)
        rebuilt = self._source.rebuild(examples.batch, self._spec.projection, self._spec.verify)
        stats.add(rebuilt.stats)
        since = time.perf_counter()
        request_ts = examples.batch.request_ts
        histories, features = featurize(
            self._spec.plan, rebuilt.histories, examples.context, examples.candidates, request_ts
        )
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
        )
        return Produced(batch, stats)


def _check_plan(plan: FeaturePlan, projection: Projection, source: Source) -> None:
    history = source.history_names(projection)
    known = {f"history.{n}" for n in (*history, "event_ts")} | set(source.names)
    for name in plan.sources:
        if name not in known:
            raise InputError(
                f"the plan reads {name!r}, but projection and table have {', '.join(sorted(known))}; "
                "add it to the projection's columns, or drop it from the plan"
            )
    for name in plan.outputs:
        if plan.domain(name) == "history" and name in (*history, "event_ts", "arrival"):
            raise InputError(f"output {name!r} of the plan is also a history column; give the output another name")
