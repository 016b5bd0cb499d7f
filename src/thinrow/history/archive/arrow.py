"""Histories as a stream of Arrow record batches: what DuckDB, polars and any other Arrow reader query.

Worked example. User 7 has the archived events 1, 2 and 3; event 3 corrects event 2. The batches hold, for user 7, the
rows of arrivals 1 and 3, oldest first: what a request now would see. One group of users is read at a time, so that
memory holds one group, not the store::

    bucket 0: users [4, 7]   -> read both, together 900 events -> batches
    bucket 1: users [2]      -> read 100,000 events            -> batches of ``batch_rows``
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.check import integer
from thinrow.core.errors import InputError, SchemaError
from thinrow.core.units import NEVER
from thinrow.core.users import Users, as_users, bucket_of, distinct
from thinrow.history.archive.layout import StoredColumn
from thinrow.history.archive.lookup import look_up
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import Window, cut_windows
from thinrow.jagged import Column, SharedHistories
from thinrow.jagged.column import ARROW_TYPES
from thinrow.schema import ColumnSpec, Projection, Trait
from thinrow.schema.projection import PROJECTION

if TYPE_CHECKING:
    from thinrow.history.archive.generation import Generation

#: Rows of a record batch, unless the caller says otherwise.
BATCH_ROWS = 1 << 17
_TIME = pa.timestamp("ms", "UTC")
_USERS_AT_ONCE = 4_096

#: Reads the histories of distinct users, one example a user.
ReadUsers = Callable[[Users], SharedHistories]


def asked(projection: Projection | None, batch_rows: int | None) -> tuple[Projection, int]:
    """What a caller asks for, or what holds where he says nothing. Raises InputError on another type, or no rows."""
    if projection is not None:
        PROJECTION(projection, "projection")
    if batch_rows is not None:
        integer(1)(batch_rows, "batch_rows")
    return projection or Projection(), batch_rows or BATCH_ROWS


def arrow_schema(generation: Generation, projection: Projection) -> pa.Schema:
    """The rows' schema: ``user_id``, ``event_ts`` (timestamp of ms, UTC), ``arrival``, the projection's columns.

    Categorical strings are dictionary-encoded; what is of trait timestamp is a timestamp as ``event_ts`` is.

    Raises:
        SchemaError: the projection names what the schema does not have.
    """
    user = pa.int64() if generation.schema.user_kind == "int64" else pa.string()
    keys = [("user_id", user), ("event_ts", _TIME), ("arrival", pa.int64())]
    fields = [pa.field(name, kind, nullable=False) for name, kind in keys]
    return pa.schema(fields + [pa.field(c.name, _type(c)) for c in projection.resolve(generation.schema)])


def _type(spec: ColumnSpec) -> pa.DataType:
    element = ARROW_TYPES[spec.dtype]
    if spec.ragged:
        return pa.large_list(element)
    if spec.size:
        return pa.list_(element, spec.size)
    if spec.trait is Trait.TIMESTAMP:
        return _TIME
    return pa.dictionary(pa.int32(), element) if _coded(spec) else element


def _coded(spec: ColumnSpec) -> bool:
    return spec.trait is Trait.CATEGORICAL and spec.is_bytes


def stream(
    generation: Generation,
    projection: Projection,
    groups: Iterable[Users],
    read: ReadUsers,
    batch_rows: int,
    newest: Callable[[], Generation] | None = None,
) -> pa.RecordBatchReader:
    """A reader over the visible events of all ``groups``, read with ``read`` one group at a time.

    Args:
        newest: where ``read`` reads from what is newest then.

    Raises:
        SchemaError: the projection names what the schema does not have; or what ``require_same_columns`` refuses.
    """
    schema = arrow_schema(generation, projection)
    specs = projection.resolve(generation.schema)

    def batches() -> Iterator[pa.RecordBatch]:
        for users in groups:
            histories = read(users)
            if newest is not None:
                require_same_columns(generation, newest(), projection)
            positions, offsets = histories.positions()
            owner = np.repeat(histories.user_of, np.diff(offsets))
            for first in range(0, len(positions), batch_rows):
                rows = slice(first, first + batch_rows)
                yield _batch(histories, positions[rows], owner[rows], schema, specs)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _batch(
    histories: SharedHistories,
    positions: npt.NDArray[np.int64],
    owner: npt.NDArray[np.int64],
    schema: pa.Schema,
    specs: Iterable[ColumnSpec],
) -> pa.RecordBatch:
    events = histories.events
    arrays = [
        pa.array(events.users[owner], schema.field("user_id").type),
        pa.array(events.event_ts[positions]).cast(_TIME),
        pa.array(events.arrival[positions]),
    ]
    for spec in specs:
        column = events.columns[spec.name].take(positions)
        arrays.append(_codes(column) if _coded(spec) else column.to_arrow().cast(_type(spec)))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _codes(column: Column) -> pa.DictionaryArray:
    """The column with a dictionary of what it refers to: not of what the whole store holds."""
    assert column.dictionary is not None
    if not len(column.dictionary):
        return pa.nulls(len(column), pa.dictionary(pa.int32(), column.dictionary.type))
    used, codes = np.unique(column.values, return_inverse=True)
    mask = None if column.valid is None else ~column.valid
    return pa.DictionaryArray.from_arrays(
        pa.array(codes.astype(np.int32), mask=mask), pc.take(column.dictionary, pa.array(used))
    )


def require_same_columns(began: Generation, now: Generation, projection: Projection) -> None:
    """Hold a stream that began at one generation to what a later one calls its columns: two names may be swapped.

    Raises:
        SchemaError: a column that is read was dropped, renamed or widened since.
    """
    read = {c.id: c.name for c in projection.resolve(began.schema)}
    for change in now.schema_log:
        same = {(c.id, c.name, c.dtype) for c in change.added}
        other = [c.id for c in change.removed if c.id in read and (c.id, c.name, c.dtype) not in same]
        if change.schema_id > began.schema.schema_id and other:
            raise SchemaError(
                f"column {read[other[0]]!r} was dropped, renamed or widened while the events were read; begin again"
            )


def users_of_bucket(
    generation: Generation, bucket: int, more: Users | None = None, n_buckets: int | None = None
) -> Users:
    """All users of a bucket, ascending; of ``more``, which are sorted, those that belong to it too. ``n_buckets``: that
    the bucket is one of, where the generation may have been rebucketed to a multiple since."""
    n_buckets = n_buckets or generation.n_buckets
    parts = range(bucket, generation.n_buckets, n_buckets)
    users = generation.only([s for part in parts for s in generation.segments_of(part)]).users()
    if more is None or not len(more):
        return users
    mine = more[bucket_of(more, n_buckets) == bucket]
    joined: Users = np.unique(np.concatenate([users, mine])) if len(mine) else users
    return joined


def groups_of_users(
    generation: Generation, users: object, projection: Projection, rows: int, more: Users | None = None
) -> Iterator[Users]:
    """Groups of the ``users`` asked for, each once; of all, bucket by bucket, where None, ``more`` among them.

    Raises:
        UserKindError: the ids are of the wrong kind.
    """
    if users is not None:
        asked, row = distinct(as_users(users, generation.schema.user_kind))
        first = np.full(len(asked), len(row), np.int64)
        np.minimum.at(first, row, np.arange(len(row)))
        return _group(generation, asked[np.argsort(first)], projection, rows)
    return (
        group
        for bucket in range(generation.n_buckets)
        for group in _group(generation, users_of_bucket(generation, bucket, more), projection, rows)
    )


def _group(generation: Generation, users: Users, projection: Projection, rows: int) -> Iterator[Users]:
    """Distinct ``users`` in groups that read about ``rows`` archived rows, or one user."""
    for a in range(0, len(users), _USERS_AT_ONCE):
        some = users[a : a + _USERS_AT_ONCE]
        pieces = look_up(generation, some)
        sums = np.concatenate([[0], np.cumsum(pieces.records["n_rows"], dtype=np.int64)])[pieces.piece_off]
        lengths = np.diff(sums)
        if projection.max_len is not None:
            lengths = np.minimum(lengths, projection.max_len)
        group = (np.cumsum(lengths) - lengths) // rows
        cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(some)]
        for first, last in itertools.pairwise(cuts):
            yield some[first:last]


def read_archived(generation: Generation, projection: Projection, request_ts: int) -> ReadUsers:
    """How to read distinct users from a generation alone: what it shows of events before ``request_ts`` (exclusive)."""
    specs = projection.resolve(generation.schema)
    columns = [StoredColumn.of(c) for c in specs]

    def read(users: Users) -> SharedHistories:
        n = len(users)
        pieces = look_up(generation, users)
        at, who, bound = np.full(n, request_ts, np.int64), np.arange(n), pieces.watermark
        window = Window(generation, users, who, at, bound, ReadStats(), pieces)
        newest = projection.newest(window.summarize()[0])
        oldest = np.full(n, np.iinfo(np.int64).min, np.int64)
        if projection.horizon_ms is not None:
            oldest = at - projection.horizon_ms
        events = window.read(newest, oldest, columns)
        return cut_windows(events, who, at, bound, oldest, newest, window.all_visible())[0]

    return read


def time_of(at: int | None, projection: Projection) -> int:
    """The request time of a stream. Raises InputError where there is a horizon and no time that it is counted from, or
    the time is below 0 or of another type."""
    if at is not None:
        integer(0)(at, "at")
    if at is None and projection.horizon_ms is not None:
        raise InputError(f"horizon_ms={projection.horizon_ms} counts back from a time; pass at=, in ms")
    return NEVER - 1 if at is None else at
