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
    """A snapshot of an example table and an archive generation; a split is a bucket of the table.

    Decoded rows are kept in chunks of 4,096 (a row group), the ``cached_chunks`` last used of them, so that the base
    batches of a bucket decode each row once.
    """

    def __init__(
        self, table: ExampleTable, snapshot_id: int | None, generation: Generation, *, cached_chunks: int
    ) -> None:
        table.check_buckets(generation.n_buckets)
        self._table, self._snapshot_id, self._generation = table, snapshot_id, generation
        rows = table.buckets(snapshot_id) if snapshot_id is not None else {}
        self._split_rows = tuple(rows.get(b, 0) for b in range(table.n_buckets))
        self._cached_chunks = cached_chunks
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[int, int], _Chunk] = OrderedDict()

    @property
    def split_rows(self) -> tuple[int, ...]:
        return self._split_rows

    @property
    def names(self) -> Collection[str]:
        schema = self._table.example_schema
        return {f"ctx.{f.name}" for f in schema.context} | {f"cand.{f.name}" for f in schema.candidates}

    def history_names(self, projection: Projection) -> Collection[str]:
        return {c.name for c in projection.resolve(self._generation.schema)}

    def examples(self, split: int, first_row: int, stop_row: int) -> ExampleBatch:
        parts = []
        for chunk in range(first_row // ROW_GROUP_ROWS, (stop_row - 1) // ROW_GROUP_ROWS + 1):
            base = chunk * ROW_GROUP_ROWS
            decoded = self._chunk(split, chunk)
            parts.append(decoded.take(_rows(max(first_row - base, 0), min(stop_row - base, len(decoded)))))
        return ExampleBatch.concat(parts)

    def rebuild(self, batch: RequestBatch, projection: Projection, verify: bool) -> Reconstruction:
        return reconstruct(self._generation, batch, projection, verify=verify)

    def _chunk(self, split: int, chunk: int) -> ExampleBatch:
        with self._lock:
            held = self._chunks.setdefault((split, chunk), _Chunk())
            self._chunks.move_to_end((split, chunk))
            while len(self._chunks) > self._cached_chunks:
                self._chunks.popitem(last=False)
        # One thread decodes; others that want the same chunk wait for it, not for other chunks.
        with held.lock:
            if held.examples is None:
                start = chunk * ROW_GROUP_ROWS
                stop = min(start + ROW_GROUP_ROWS, self._split_rows[split])
                held.examples = self._table.read_bucket(split, self._snapshot_id, start=start, stop=stop)
            return held.examples


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


def _rows(start: int, stop: int) -> npt.NDArray[np.int64]:
    return np.arange(start, stop, dtype=np.int64)


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
