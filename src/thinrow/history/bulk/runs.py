"""Sorted runs: the input, checked, cut into pieces that fit in memory, each sorted by (bucket, user), on disk.

Worked example: 100 million rows of 42 bytes with runs of 100 MB make 42 runs. A run is one Arrow IPC file, bucket
after bucket in batches of 4,096 rows, and a small file that says how many rows each of its users has. Rows of one user
stand in the order of the input, in a run and over the runs.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.core.ragged import inverse_of, offsets_of
from thinrow.core.users import Users, as_users, bucket_of
from thinrow.history.bulk import source as bulk_source
from thinrow.history.bulk.source import Chunk, Source
from thinrow.history.intake import CheckedEvents, check_rows
from thinrow.history.recast import recast
from thinrow.jagged import Column
from thinrow.jagged.column import concat_columns
from thinrow.kernels import kernel
from thinrow.schema import EventSchema
from thinrow.schema.evolution import SchemaChange, fitting
from thinrow.storage.objects import LocalObjects, Writer

Ints = npt.NDArray[np.int64]

BATCH_ROWS = 4_096
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One run; picklable.

    Attributes:
        rows: rows of each bucket, (B,).
        read: rows of the input up to the end of this run.
        path: its file; None where it is in memory.
        table: its rows, without their users; None where it is in a file.
        members: users of each bucket, ascending, and their rows; None where they are in a file.
    """

    rows: Ints
    read: int
    path: Path | None
    table: pa.Table | None
    members: list[tuple[Users, Ints]] | None

    def batches(self, bucket: int, rows: int) -> Iterator[pa.RecordBatch]:
        """The rows of a bucket, by user, in batches of at most ``BATCH_ROWS``, or ``rows`` of a run in memory."""
        if self.table is not None:
            yield from with_users(self.of(bucket), *self.users(bucket)).to_batches(rows)
            return
        first = int((-(-self.rows[:bucket] // BATCH_ROWS)).sum())
        with pa.OSFile(str(self.path)) as source, pa.ipc.open_file(source) as file:
            for i in range(first, first + -(-int(self.rows[bucket]) // BATCH_ROWS)):
                yield file.get_batch(i)

    def of(self, bucket: int) -> pa.Table:
        """The rows of a bucket, without their users, of a run in memory."""
        assert self.table is not None
        return self.table.slice(int(self.rows[:bucket].sum()), int(self.rows[bucket]))

    def users(self, bucket: int) -> tuple[Users, Ints]:
        """Users of a bucket, ascending, and how many rows each has here."""
        if self.members is not None:
            return self.members[bucket]
        with pa.OSFile(f"{self.path}.users") as source, pa.ipc.open_file(source) as file:
            batch = file.get_batch(bucket)
        return users_array(batch.column(0)), batch.column(1).to_numpy()


def with_users(table: pa.Table, users: Users, counts: Ints) -> pa.Table:
    """Rows with the column of their users, of whom each has so many."""
    if users.dtype == np.int64:
        column = pa.array(np.repeat(users, counts))
    else:
        column = pa.array(users, pa.string()).take(pa.array(np.repeat(np.arange(len(users)), counts)))
    return table.add_column(0, "user", column)


def users_array(column: pa.Array) -> Users:
    """User ids of an Arrow column, int64 or string."""
    if pa.types.is_integer(column.type):
        return cast(Users, column.to_numpy(zero_copy_only=False))
    return np.array(column.to_pylist(), object)


def read_runs(
    source: Source,
    schema: EventSchema,
    log: Sequence[SchemaChange],
    n_buckets: int,
    *,
    after: int,
    run_bytes: int,
    spill: Callable[[Run], Run],
    progress: Callable[[int, int], None],
) -> Iterator[Run]:
    """Check the input after its first ``after`` rows and cut it into runs of about ``run_bytes``.

    What has all columns of an earlier schema only, by the ``log`` of changes, is taken under that one. The last run
    stays in memory where it is the only one; every other goes through ``spill``. ``progress`` gets rows and bytes of
    each chunk.

    Raises:
        InputError and its kinds: a bad row, named with its file.
    """
    held: list[tuple[CheckedEvents, Ints | None]] = []
    n_bytes, read, first = 0, after, True
    for chunk in source.chunks(after, input_columns(schema), bulk_source.CHUNK_ROWS):
        rows = _checked(chunk, schema, log)
        if n_bytes and n_bytes + chunk.table.nbytes > run_bytes:
            yield spill(_sorted_run(held, schema, n_buckets, read))
            held, n_bytes, first = [], 0, False
        held.append(rows)
        n_bytes += chunk.table.nbytes
        read += chunk.table.num_rows
        progress(chunk.table.num_rows, chunk.table.nbytes)
    if held:
        run = _sorted_run(held, schema, n_buckets, read)
        yield run if first and not after else spill(run)


def input_columns(schema: EventSchema) -> list[str]:
    """Names of the input columns that are stored."""
    names = [schema.user_column, schema.time_column, *(c.name for c in schema.columns)]
    return names if schema.arrival_time_column is None else [*names, schema.arrival_time_column]


def write_run(run: Run, objects: LocalObjects, name: str) -> Run:
    """Put a run in memory into the files ``name`` and ``name.users``, whole and durable. Raises StoreError."""
    assert run.table is not None
    assert run.members is not None
    with objects.create(f"{name}.users") as writer:
        kind = pa.int64() if run.members[0][0].dtype == np.int64 else pa.string()
        tables = [pa.record_batch({"user": pa.array(users, kind), "n": counts}) for users, counts in run.members]
        write_batches(writer, tables[0].schema, iter(tables))
    with objects.create(name) as writer:
        slices = (with_users(run.of(bucket), *members) for bucket, members in enumerate(run.members))
        schema = run.table.schema.insert(0, pa.field("user", kind))
        write_batches(writer, schema, (b for s in slices for b in whole_batches(s)))
    return Run(run.rows, run.read, objects.root / name, None, None)


def whole_batches(table: pa.Table) -> list[pa.RecordBatch]:
    """Rows of a table in batches of exactly ``BATCH_ROWS``, the last one shorter."""
    return [b for b in table.combine_chunks().to_batches(BATCH_ROWS) if b.num_rows]


def write_batches(writer: Writer, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """An Arrow IPC file of ``batches``. Raises StoreError where the disk refuses."""
    with io.BufferedWriter(_Raw(writer), _BUFFER_BYTES) as sink, pa.ipc.new_file(sink, schema) as out:
        for batch in batches:
            out.write_batch(batch)


class _Raw(io.RawIOBase):
    """A writer of the object store as a file that Arrow can write to."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._writer.write(view)
        return len(view)


def _checked(chunk: Chunk, schema: EventSchema, log: Sequence[SchemaChange]) -> tuple[CheckedEvents, Ints | None]:
    known = fitting(schema, log, chunk.table.column_names)
    try:
        events, arrived = check_rows(chunk.table, known)
    except InputError as e:
        # The check counts rows of the chunk; the reader of the message has the file.
        text = re.sub(r"\brow (\d+)", lambda m: f"row {int(m[1]) + chunk.first_row}", str(e))
        raise type(e)(f"{chunk.name}: {text}" if chunk.name else text) from e
    if known.schema_id != schema.schema_id:
        columns = recast(events.columns, known, schema.columns, len(events))
        events = replace(events, columns=columns, schema=schema)
    return events, arrived


def _sorted_run(
    held: Sequence[tuple[CheckedEvents, Ints | None]], schema: EventSchema, n_buckets: int, read: int
) -> Run:
    codes, distinct, counts = _codes([rows.users for rows, _ in held])
    bucket = bucket_of(distinct, n_buckets)
    order = np.lexsort((distinct, bucket))
    starts = np.empty(len(distinct), np.int64)
    starts[order] = offsets_of(counts[order])[:-1]
    places = kernel("places_by_code")(codes, starts)
    del codes
    distinct, counts, bucket = distinct[order], counts[order], bucket[order]
    bounds = np.searchsorted(bucket, np.arange(n_buckets + 1))
    members = [(distinct[a:b], counts[a:b]) for a, b in pairwise(bounds.tolist())]
    rows_of_bucket = np.array([int(n.sum()) for _, n in members], np.int64)
    arrays = {"event_ts": pa.array(_scattered([rows.event_ts for rows, _ in held], places))}
    arrived = [a for _, a in held if a is not None]
    if arrived:
        arrays["arrived"] = pa.array(_scattered(arrived, places))
    for spec in schema.columns:
        column = _placed([rows.columns[spec.name] for rows, _ in held], places)
        arrays[f"c.{spec.name}"] = column.to_arrow()
    return Run(rows_of_bucket, read, None, pa.table(arrays), members)


def _placed(parts: Sequence[Column], places: npt.NDArray[Any]) -> Column:
    """Columns one after another, row i at ``places[i]``."""
    if any(c.valid is not None or c.dictionary is not None or c.offsets is not None or c.size for c in parts):
        return concat_columns(parts).take(inverse_of(places))
    return Column(_scattered([c.values for c in parts], places))


def _scattered(parts: Sequence[npt.NDArray[Any]], places: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Arrays one after another, value i at ``places[i]``: read in order, and written where few lines are open."""
    out, at = np.empty(len(places), parts[0].dtype), 0
    for part in parts:
        kernel("scatter_rows")(part, places[at : at + len(part)], out)
        at += len(part)
    return out


def _codes(parts: Sequence[Users]) -> tuple[npt.NDArray[np.uint32], Users, Ints]:
    """A code for each row's user, the users that they stand for, and how many rows each has."""
    if parts[0].dtype == np.int64:
        distinct, codes, counts = kernel("group_keys")(parts)
        return codes, distinct, counts
    encoded = pa.array(np.concatenate(parts), pa.string()).dictionary_encode()
    names = as_users(np.array(encoded.dictionary.to_pylist(), object), "string")
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.uint32)
    return codes, names, np.bincount(codes, minlength=len(names))


def read_column(array: pa.ChunkedArray | pa.Array, spec: Any) -> Column:
    """A column of a run as it was checked."""
    return Column.from_arrow(array, spec.dtype, ragged=spec.ragged, size=spec.size)
