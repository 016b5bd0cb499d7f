"""Checks of what a caller appends, before anything is locked or written."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import DuplicateEventError, InputError, SchemaError
from thinrow.core.ragged import offsets_of
from thinrow.core.units import NEVER
from thinrow.core.users import UserKind, Users, as_users, plain
from thinrow.history.recent.keys import NO_ROWS, Grouped, group_by_number, group_by_text, id_keys
from thinrow.history.recent.rows import Rows
from thinrow.jagged import Column
from thinrow.schema import ColumnSpec, EventSchema
from thinrow.schema.event_schema import MAX_ELEMENTS

_INT64 = np.dtype(np.int64)


@dataclass(slots=True)
class Batch:
    """n checked rows, sorted by user (stably); ``position`` below counts sorted rows.

    Attributes:
        grouped: users and how input rows map to positions.
        event_ts: (n,) int64 ms.
        columns: name -> (n,) Column, in schema order.
        event_ids: (n,) ids, or None where no row has one.
        id_rows: positions of rows with an id; ``id_keys`` are their keys in ``ids``, all distinct.
        supersedes: (n,) ids, or None where no row corrects another.
        correction_rows: positions of the corrections.
        target_keys: the key in ``ids`` of each correction's target.
    """

    grouped: Grouped
    event_ts: npt.NDArray[np.int64]
    columns: dict[str, Column]
    event_ids: Column | None
    id_rows: npt.NDArray[np.intp]
    id_keys: list[bytes]
    supersedes: Column | None
    correction_rows: npt.NDArray[np.intp]
    target_keys: list[bytes]

    def __len__(self) -> int:
        return len(self.event_ts)

    def input_row(self, position: int) -> int:
        """The caller's row number of a position."""
        return position if self.grouped.order is None else int(self.grouped.order[position])

    def user_at(self, position: int) -> int | str:
        """The user of a position, as a Python value."""
        u = int(np.searchsorted(self.grouped.offsets, position, side="right")) - 1
        found: int | str = self.grouped.users[u : u + 1].tolist()[0]
        return found


class Fresh:
    """The rows of a batch that are not there yet.

    Attributes:
        index: (m,) their positions.
        offsets: (U + 1,) int64; those of user u are ``[offsets[u], offsets[u + 1])`` of the m.
        event_ts: (m,) int64.
        id_rows, id_keys: which of the m have an id, and the keys of the ids.
    """

    def __init__(self, batch: Batch) -> None:
        """All of them."""
        self.index: slice | npt.NDArray[np.intp] = slice(None)
        self.offsets, self.event_ts = batch.grouped.offsets, batch.event_ts
        self.id_rows, self.id_keys = batch.id_rows, batch.id_keys

    @classmethod
    def of_new(cls, batch: Batch, new: npt.NDArray[np.bool_]) -> Fresh:
        """Those that ``new`` (n,) marks."""
        self, place = cls(batch), offsets_of(new)
        self.index = np.flatnonzero(new)
        self.offsets, self.event_ts = place[batch.grouped.offsets], batch.event_ts[self.index]
        kept = np.flatnonzero(new[batch.id_rows])
        self.id_rows, self.id_keys = place[batch.id_rows[kept]], [batch.id_keys[i] for i in kept.tolist()]
        return self

    def rows(self, batch: Batch, targets: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None) -> Rows:
        """They, with the (event_ts, arrival) of what each row of the batch supersedes."""
        target_ts, target_arrival = targets or (None, None)
        rows = Rows(batch.event_ts, target_ts, target_arrival, batch.event_ids, batch.columns)
        return rows if isinstance(self.index, slice) else rows.take(self.index)


class BatchCheck:
    """What the rows of one schema are held to, looked up once."""

    def __init__(self, schema: EventSchema) -> None:
        self.schema = schema
        self._ids_are_numbers = schema.user_kind == "int64" and schema.event_id_dtype == "int64"
        #: Name, spec, and the dtype of values that need no further look; None where there is none.
        self._columns = [
            (c.name, c, None if c.is_bytes or c.ragged or c.size else np.dtype(c.dtype)) for c in schema.columns
        ]
        self._names = frozenset(c.name for c in schema.columns)

    def __call__(
        self,
        users: Users,
        event_ts: npt.NDArray[np.int64] | Column,
        columns: dict[str, Column],
        event_ids: Column | None,
        supersedes: Column | None,
    ) -> Batch:
        """Check rows and sort them by user. Raises as ``RecentTier.append`` says."""
        n = len(users)
        times, id_keys_of, sound = _plain_times(event_ts, n), None, False
        if self.schema.user_kind == "int64":
            ids = (
                event_ids.values
                if self._ids_are_numbers and event_ids is not None and _is_plain(event_ids, n)
                else None
            )
            grouped, sound, keys = group_by_number(
                users, np.zeros(n, np.int64) if times is None else times, NO_ROWS if ids is None else ids
            )
            id_keys_of = None if ids is None else keys
        else:
            grouped = group_by_text(users)
        checked = self._check_columns(columns, n)
        if times is None or not sound:
            times = _check_times(event_ts, n)
        if event_ids is not None and id_keys_of is None:
            _check_ids("event_id", event_ids, self.schema, n)
        if supersedes is not None:
            _check_ids("supersedes", supersedes, self.schema, n)
        order = grouped.order
        if order is not None:
            times = times[order]
            checked = {name: column.take(order) for name, column in checked.items()}
            event_ids = None if event_ids is None else event_ids.take(order)
            supersedes = None if supersedes is None else supersedes.take(order)
        if id_keys_of is None:
            id_rows, id_keys_of = _keys(event_ids, grouped)
        else:
            id_rows = np.arange(n)
        correction_rows, target_keys = _keys(supersedes, grouped) if supersedes is not None else (NO_ROWS, [])
        batch = Batch(
            grouped,
            times,
            checked,
            event_ids if len(id_rows) else None,
            id_rows,
            id_keys_of,
            supersedes if len(correction_rows) else None,
            correction_rows,
            target_keys,
        )
        if id_keys_of and len(set(id_keys_of)) != len(id_keys_of):
            _raise_duplicate(batch)
        return batch

    def _check_columns(self, columns: dict[str, Column], n: int) -> dict[str, Column]:
        if not columns.keys() <= self._names:
            unknown = columns.keys() - self._names
            raise SchemaError(f"column {min(unknown)!r} is not in the schema; leave it out or evolve the schema")
        checked: dict[str, Column] = {}
        shape = (n,)
        for name, spec, dtype in self._columns:
            column = columns.get(name)
            if column is None:
                raise SchemaError(
                    f"column {name!r} is missing; the schema has {', '.join(c.name for c in self.schema.columns)}"
                )
            values = column.values
            # ``_is_plain``, which is called for each column of each call.
            if (
                dtype is None
                or values.dtype != dtype
                or values.shape != shape
                or column.valid is not None
                or column.dictionary is not None
                or column.offsets is not None
            ):
                _check_column(spec, column, n)
            if n:
                checked[name] = column
        return checked


def _is_plain(column: Column, n: int, dtype: np.dtype[Any] = _INT64) -> bool:
    """Whether it is n values of that dtype, one a row and none null."""
    values = column.values
    return (
        values.dtype == dtype
        and values.shape == (n,)
        and column.valid is None
        and column.dictionary is None
        and column.offsets is None
    )


def _plain_times(event_ts: npt.NDArray[np.int64] | Column, n: int) -> npt.NDArray[np.int64] | None:
    """The times where they are n int64, none of them null."""
    if isinstance(event_ts, Column):
        return event_ts.values if _is_plain(event_ts, n) else None
    plain = isinstance(event_ts, np.ndarray) and event_ts.dtype == _INT64 and event_ts.shape == (n,)
    return event_ts if plain else None


def check_bounds(
    what: str, users: Users, bounds: npt.NDArray[np.int64], kind: UserKind
) -> tuple[Users, npt.NDArray[np.int64]]:
    """Users that are distinct, and one arrival number for each.

    Raises:
        InputError: a user appears twice, the lengths differ, or a bound is not in ``[0, NEVER)``.
        UserKindError: the ids are not of ``kind``.
    """
    ids = as_users(users, kind)
    values = np.ascontiguousarray(bounds)
    if values.dtype != np.int64 or len(values) != len(ids):
        raise InputError(f"{what} is {len(values)} x {values.dtype} for {len(ids)} users; pass one int64 a user")
    if len(ids) == 1 and 0 <= values[0] < NEVER:
        return ids, values
    wrong = np.flatnonzero((values < 0) | (values >= NEVER))
    if len(wrong):
        raise InputError(f"{what}[{wrong[0]}] is {values[wrong[0]]}; it must be an arrival number in [0, 2^63 - 2]")
    listed = ids.tolist()
    if len(set(listed)) != len(listed):
        listed.sort()
        twice = next(a for a, b in pairwise(listed) if a == b)
        raise InputError(f"user {twice!r} is asked for twice; pass each user once")
    return ids, values


def refuse_overflow(users: Users, counters: npt.NDArray[np.int64], added: npt.NDArray[np.int64]) -> None:
    """Raises InputError where ``added`` numbers above the ``counters`` of users would end beyond all numbers."""
    over = counters > NEVER - 1 - added
    if over.any():
        u = int(np.argmax(over))
        raise InputError(f"user {plain(users[u])!r} has counter {counters[u]}; arrival numbers end at {NEVER - 1}")


def _check_times(event_ts: npt.NDArray[np.int64] | Column, n: int) -> npt.NDArray[np.int64]:
    column = event_ts if isinstance(event_ts, Column) else Column(np.asarray(event_ts))
    _check_length("event_ts", column, n)
    if n and column.values.dtype != np.int64:
        raise InputError(f"event_ts has dtype {column.values.dtype}; pass int64 milliseconds since the epoch")
    _refuse_nulls("event_ts", column)
    negative = np.flatnonzero(column.values < 0)
    if len(negative):
        row = int(negative[0])
        raise InputError(f"row {row}: event_ts is {column.values[row]} ms; times start at 0, the Unix epoch")
    late = np.flatnonzero(column.values >= NEVER - 1)
    if len(late):
        row = int(late[0])
        raise InputError(f"row {row}: event_ts is {column.values[row]} ms; times end at {NEVER - 2} (2^63 - 3)")
    return column.values.astype(np.int64, copy=False)


def _check_column(spec: ColumnSpec, column: Column, n: int) -> None:
    _check_length(spec.name, column, n)
    if n:
        _check_shape(spec, column)
        _check_type(spec.name, column, spec.dtype)
        check_lengths(column, spec.name)
        if not spec.nullable:
            _refuse_nulls(spec.name, column)


def _check_ids(what: str, ids: Column, schema: EventSchema, n: int) -> None:
    _check_length(what, ids, n)
    if schema.event_id_dtype is None:
        raise InputError(f"{what} is given, but the schema has no event ids; name an event_id column in the schema")
    if n:
        _check_type(what, ids, schema.event_id_dtype)


def _check_length(what: str, column: Column, n: int) -> None:
    if len(column) != n or (column.valid is not None and len(column.valid) != n):
        raise InputError(f"{what} has {len(column)} values for {n} users; pass one a row")


def _check_shape(spec: ColumnSpec, column: Column) -> None:
    if (column.offsets is not None) != spec.ragged or column.size != spec.size:
        wanted = "lists" if spec.ragged else f"vectors of {spec.size}" if spec.size else "single values"
        raise SchemaError(
            f"column {spec.name!r} holds {column.shape_name}, but the schema says {wanted}; "
            "use Column.from_arrow(..., ragged=..., size=...)"
        )


def check_lengths(column: Column, name: str) -> None:
    """Lists as ``Column`` says, each as long as the archive can hold. Raises InputError."""
    if column.offsets is None:
        return
    lengths = np.diff(column.offsets)
    if column.offsets[0] != 0 or column.offsets[-1] != len(column.values) or (lengths < 0).any():
        raise InputError(
            f"column {name!r} has offsets from {column.offsets[0]} to {column.offsets[-1]} for {len(column.values)} "
            "elements; they must ascend from 0 to the number of elements"
        )
    full = np.empty(0) if column.valid is None else np.flatnonzero((lengths > 0) & ~column.valid)
    if len(full):
        raise InputError(f"column {name!r} is null in row {full[0]}, which has elements; a null list must be empty")
    long = np.flatnonzero(lengths > MAX_ELEMENTS)
    if len(long):
        raise InputError(
            f"column {name!r} holds a list of {lengths[long[0]]} elements in row {long[0]}; at most {MAX_ELEMENTS} are "
            "allowed: keep the ones that count, or split the event"
        )


def _check_type(what: str, column: Column, dtype: str) -> None:
    text = dtype in ("string", "binary")
    if (column.dictionary is not None) != text or (not text and column.values.dtype != np.dtype(dtype)):
        found = "a dictionary" if column.dictionary is not None else str(column.values.dtype)
        raise SchemaError(
            f"column {what!r} holds {found}, but the schema says {dtype}; use Column.from_arrow(..., {dtype!r})"
        )
    if column.dictionary is None:
        return
    if column.dictionary.null_count:
        raise InputError(f"column {what!r} has a null in its dictionary; mark null rows in Column.valid")
    every = column.valid is None or column.offsets is not None
    codes = column.values if every else column.values[column.valid]
    if len(codes) and (codes.min() < 0 or codes.max() >= len(column.dictionary)):
        raise InputError(
            f"column {what!r} has codes {codes.min()} to {codes.max()} for {len(column.dictionary)} strings"
        )
    if dtype == "string" and pa.types.is_binary(column.dictionary.type):
        raise SchemaError(f"column {what!r} holds binary values, but the schema says string; cast it first")


def _refuse_nulls(what: str, column: Column) -> None:
    if column.valid is not None and not column.valid.all():
        row = int(np.flatnonzero(~column.valid)[0])
        raise InputError(f"row {row}: {what} is null, which the schema does not allow; fill it or make it nullable")


def _keys(ids: Column | None, grouped: Grouped) -> tuple[npt.NDArray[np.intp], list[bytes]]:
    if ids is None:
        return NO_ROWS, []
    rows = np.arange(len(ids)) if ids.valid is None else np.flatnonzero(ids.valid)
    lengths = np.diff(np.searchsorted(rows, grouped.offsets))
    prefixes = [key for key, count in zip(grouped.keys, lengths.tolist(), strict=True) for _ in range(count)]
    return rows, id_keys(ids, rows, prefixes)


def _raise_duplicate(batch: Batch) -> None:
    first: dict[bytes, int] = {}
    for i, key in enumerate(batch.id_keys):
        j = first.setdefault(key, i)
        if j != i:
            a, b = int(batch.id_rows[j]), int(batch.id_rows[i])
            assert batch.event_ids is not None
            rows = sorted((batch.input_row(a), batch.input_row(b)))
            raise DuplicateEventError(
                f"rows {rows[0]} and {rows[1]}: event id {id_value(batch.event_ids, b)!r} of user {batch.user_at(b)!r} "
                "appears twice; an id may appear once an input"
            )


def id_value(ids: Column, row: int) -> int | str:
    """One id as a Python value."""
    value = int(ids.values[row])
    return value if ids.dictionary is None else str(ids.dictionary[value].as_py())
