"""From a table of events to checked columns: what may enter a store, and the error that says why something may not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import DuplicateEventError, InputError, SchemaError, UserKindError
from thinrow.core.units import NEVER
from thinrow.core.users import Users, as_users, plain
from thinrow.history.recent.batch import check_lengths
from thinrow.history.recent.keys import MAX_EVENT_ID_BYTES
from thinrow.jagged import Column
from thinrow.schema import EventSchema

_Rows: TypeAlias = slice | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CheckedEvents:
    """Events in arrival order, (n,) each: ids, event_ts in ms, columns by name, and the optional ids of events;
    ``schema`` is the one that they were checked under (None: that of whoever takes them)."""

    users: Users
    event_ts: npt.NDArray[np.int64]
    columns: dict[str, Column]
    event_ids: Column | None
    supersedes: Column | None
    schema: EventSchema | None = None

    def __len__(self) -> int:
        return len(self.event_ts)

    def slice(self, start: int, stop: int) -> CheckedEvents:
        """Rows ``[start, stop)``, views."""
        return self.take(slice(start, stop))

    def take(self, rows: _Rows) -> CheckedEvents:
        """Some of the rows, in the order of ``rows``."""
        return CheckedEvents(
            self.users[rows],
            self.event_ts[rows],
            {n: c.take(rows) for n, c in self.columns.items()},
            None if self.event_ids is None else self.event_ids.take(rows),
            None if self.supersedes is None else self.supersedes.take(rows),
            self.schema,
        )


def check_table(table: pa.Table, schema: EventSchema) -> CheckedEvents:
    """Check every row of ``table`` against ``schema`` and put the rows in arrival order (by ``arrival_time`` where the
    schema has it, ties in input order; else input order). Raises as ``check_rows``."""
    checked, arrived = check_rows(table, schema)
    if arrived is None:
        return checked
    return checked.take(np.argsort(arrived, kind="stable"))


def check_rows(table: pa.Table, schema: EventSchema) -> tuple[CheckedEvents, npt.NDArray[np.int64] | None]:
    """Check every row of ``table`` against ``schema``: the rows in input order, and when each arrived (None where the
    schema has no arrival time).

    Raises:
        SchemaError: a column is missing, of the wrong type, or null where it must not be.
        UserKindError: user ids of the wrong kind.
        InputError: a null or negative time, a null or empty user.
        DuplicateEventError: one event id twice.
    """
    if not isinstance(table, pa.Table):
        raise InputError(
            f"events are a {type(table).__name__}; pass a pyarrow.Table (of pandas: pyarrow.Table.from_pandas(frame))"
        )
    users = user_ids(_get(table, schema.user_column, "user"), schema)
    event_ts = event_times(_get(table, schema.time_column, "time"), schema.time_column)
    columns = {}
    for spec in schema.columns:
        column = typed_column(
            _get(table, spec.name, "column"), spec.dtype, spec.name, ragged=spec.ragged, size=spec.size
        )
        if column.valid is not None and not spec.nullable:
            row = int(np.flatnonzero(~column.valid)[0])
            raise SchemaError(f"column {spec.name!r} is null in row {row}; fill it, or declare it nullable = true")
        columns[spec.name] = column
    event_ids = supersedes = None
    if schema.event_id_column is not None and schema.event_id_dtype is not None:
        event_ids = typed_column(
            _get(table, schema.event_id_column, "event_id"), schema.event_id_dtype, schema.event_id_column
        )
        _check_id_lengths(event_ids, schema.event_id_column)
        _check_distinct(users, event_ids)
    if schema.supersedes_column is not None and schema.event_id_dtype is not None:
        name = schema.supersedes_column
        supersedes = typed_column(_get(table, name, "supersedes"), schema.event_id_dtype, name)
        _check_id_lengths(supersedes, name)
    checked = CheckedEvents(users, event_ts, columns, event_ids, supersedes, schema)
    if schema.arrival_time_column is None:
        return checked, None
    return checked, event_times(_get(table, schema.arrival_time_column, "arrival_time"), schema.arrival_time_column)


def request_times(request_ts: object, n: int) -> npt.NDArray[np.int64]:
    """(n,) int64 ms of n requests: one time for all or one each, as integer milliseconds or ``datetime64`` of any unit.

    Raises:
        InputError: times of another type, or neither one nor n of them.
    """
    if type(request_ts) is int and 0 <= request_ts < NEVER:
        found = np.empty(n, np.int64)
        found.fill(request_ts)
        return found
    # An empty list says nothing of its type, and would be one of floats.
    times = np.empty(0, np.int64) if isinstance(request_ts, list | tuple) and not request_ts else np.asarray(request_ts)
    if times.dtype.kind == "M" and not np.isnat(times).any():
        times = times.astype("datetime64[ms]").view(np.int64)
    if times.dtype.kind not in "iu":
        first = times.ravel()[0] if times.size else request_ts
        raise InputError(
            f"request time {first!r} is of {times.dtype}; pass integer milliseconds since 1970, or datetime64"
        )
    if times.ndim > 1 or (times.ndim == 1 and len(times) != n):
        raise InputError(f"{times.size} request times for {n} users; give one for all, or one for each")
    return np.broadcast_to(times.astype(np.int64), n).copy()


def _get(table: pa.Table, name: str, role: str) -> pa.ChunkedArray:
    if name not in table.column_names:
        raise SchemaError(
            f"input has no column {name!r} (the schema's {role}); it has {', '.join(table.column_names)}; "
            "rename the column or the schema's entry"
        )
    return table.column(name)


def typed_column(array: pa.ChunkedArray, dtype: str, name: str, *, ragged: bool = False, size: int = 0) -> Column:
    """A column of the input as one of ``dtype``. Raises SchemaError where a value does not fit."""
    kind = array.type
    if (ragged or size) and pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        kind = kind.value_type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    wants_bytes = dtype in ("string", "binary")
    is_bytes = text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    if wants_bytes != is_bytes and not pa.types.is_null(kind):
        raise SchemaError(
            f"column {name!r} has type {array.type}, the schema says {dtype}; cast the column or change the schema"
        )
    try:
        column = Column.from_arrow(array, dtype, ragged=ragged, size=size)
    except SchemaError as e:
        raise SchemaError(f"column {name!r}: {e}") from e
    check_lengths(column, name)
    return column


def user_ids(array: pa.ChunkedArray, schema: EventSchema) -> Users:
    """(n,) ids of a user column. Raises UserKindError or InputError."""
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if text != (schema.user_kind == "string") or not (text or pa.types.is_integer(kind)):
        raise UserKindError(
            f"user column {schema.user_column!r} has type {array.type}, but this store holds {schema.user_kind} ids; "
            f"cast the column to {schema.user_kind}"
        )
    column = Column.from_arrow(array, schema.user_kind)
    if column.valid is not None and not column.valid.all():
        row = int(np.flatnonzero(~column.valid)[0])
        raise InputError(
            f"user {schema.user_column!r} is null in row {row}; every event needs its user: drop or fill the row"
        )
    if column.dictionary is None:
        return column.values
    distinct = as_users(np.array(column.dictionary.to_pylist(), object), "string")
    return distinct[column.values] if len(distinct) else distinct


def event_times(array: pa.ChunkedArray, name: str) -> npt.NDArray[np.int64]:
    """(n,) int64 ms of a time column. Raises SchemaError or InputError."""
    if not (pa.types.is_timestamp(array.type) or pa.types.is_integer(array.type) or pa.types.is_null(array.type)):
        raise SchemaError(
            f"time {name!r} has type {array.type}; it must be a timestamp or integer milliseconds: cast it"
        )
    column = Column.from_arrow(array, "int64")
    if column.valid is not None:
        row = int(np.flatnonzero(~column.valid)[0])
        raise InputError(f"time {name!r} is null in row {row}; every event needs a time: drop or fill the row")
    times = column.values
    if len(times) and (times.min() < 0 or times.max() >= NEVER - 1):
        row = int(np.flatnonzero((times < 0) | (times >= NEVER - 1))[0])
        raise InputError(
            f"time {name!r} is {times[row]} in row {row}; it must be 0 or more and under 2^63-2 "
            "milliseconds since 1970: drop or fix the row"
        )
    return times


def _check_id_lengths(ids: Column, name: str) -> None:
    """Checked before the first event is appended, although the recent tier checks it too."""
    if ids.dictionary is None or not len(ids.dictionary):
        return
    sizes = pc.binary_length(ids.dictionary.cast(pa.binary())).to_numpy(zero_copy_only=False)
    long = (sizes > MAX_EVENT_ID_BYTES)[ids.values]
    if ids.valid is not None:
        long &= ids.valid
    if long.any():
        row = int(np.flatnonzero(long)[0])
        raise InputError(
            f"event id {name!r} has {sizes[ids.values[row]]} UTF-8 bytes in row {row}; at most {MAX_EVENT_ID_BYTES} "
            "are allowed: hash longer ids"
        )


def _check_distinct(users: Users, ids: Column) -> None:
    """Within one user an id names one event."""
    shown = np.flatnonzero(ids.valid) if ids.valid is not None else np.arange(len(ids))
    who = users[shown] if users.dtype == np.int64 else np.unique(users[shown], return_inverse=True)[1]
    order = np.lexsort((ids.values[shown], who))
    a, b = order[:-1], order[1:]
    twice = np.flatnonzero((who[a] == who[b]) & (ids.values[shown[a]] == ids.values[shown[b]]))
    if len(twice):
        row = int(shown[b[twice[0]]])
        value = ids.take(np.array([row])).to_arrow()[0].as_py()
        raise DuplicateEventError(
            f"event id {value!r} of user {plain(users[row])!r} appears twice in the input (again in row {row}); "
            "an id names one event: drop the repeats"
        )
