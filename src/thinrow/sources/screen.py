"""Which rows of a batch may enter a store, and why the others may not: the checks of an append, row by row.

A batch that is all good costs one check. Else what is plain to see goes first (null users, times out of bounds, nulls
where none may be, repeated ids), and what is left is halved until every bad row stands alone.

Worked example: of 65,536 rows, one has a null user and one a text of 300 bytes as its event id. The first goes by a
mask; the second is found in 17 halvings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import DuplicateEventError, InputError
from thinrow.core.units import NEVER
from thinrow.history.intake import CheckedEvents, check_rows
from thinrow.schema import EventSchema
from thinrow.sources.wanted import empty_table, with_missing


@dataclass(frozen=True, slots=True)
class Screened:
    """Attributes:
    events: what may enter, in arrival order.
    rows: (n,) row of the table that each of ``events`` is.
    refused: row -> why it may not.
    repeated: how many rows were left out because an earlier row has their user and event id.
    """

    events: CheckedEvents
    rows: npt.NDArray[np.int64]
    refused: dict[int, str]
    repeated: int


def screen(table: pa.Table, schema: EventSchema, max_ts: int = NEVER, *, blame_rows: bool = True) -> Screened:
    """Sort out the rows of ``table``.

    Args:
        max_ts: event times above it are refused, ms.
        blame_rows: False where the input has one schema for all rows: a wrong type is then an error of the input.

    Raises:
        InputError: the input lacks a column; or, unless ``blame_rows``, has one of the wrong type.
    """
    table = with_missing(table, schema)
    check_rows(_columns_only(table, schema) if blame_rows else table.schema.empty_table(), schema)
    refused: dict[int, str] = {}
    rows = np.arange(table.num_rows)
    repeated = 0
    try:
        table.validate(full=True)
        checked, arrived = check_rows(table, schema)
        late = checked.event_ts > max_ts
        if not late.any():
            return _screened(checked, arrived, rows, refused, 0)
    except (InputError, pa.ArrowInvalid):
        pass
    for mask, reason in _plain_faults(table, schema, max_ts):
        for row in np.flatnonzero(mask).tolist():
            refused.setdefault(row, reason)
    rows = np.array([r for r in rows.tolist() if r not in refused], np.int64)
    rows = _halved(table, schema, rows, refused)
    again = _repeats(table.take(pa.array(rows)), schema)
    repeated, rows = int(again.sum()), rows[~again]
    checked, arrived = check_rows(table.take(pa.array(rows)), schema)
    return _screened(checked, arrived, rows, refused, repeated)


def _columns_only(table: pa.Table, schema: EventSchema) -> pa.Table:
    """No rows, and of the right types what the table has of columns: so that only a missing column is an error."""
    empty = empty_table(schema)
    return empty.select([n for n in empty.column_names if n in table.column_names])


def _screened(
    checked: CheckedEvents,
    arrived: npt.NDArray[np.int64] | None,
    rows: npt.NDArray[np.int64],
    refused: dict[int, str],
    repeated: int,
) -> Screened:
    if arrived is None:
        return Screened(checked, rows, refused, repeated)
    order = np.argsort(arrived, kind="stable")
    return Screened(checked.take(order), rows[order], refused, repeated)


def _plain_faults(table: pa.Table, schema: EventSchema, max_ts: int) -> list[tuple[npt.NDArray[np.bool_], str]]:
    found = [(_nulls(table, schema.user_column), f"user {schema.user_column!r} is null; every event needs its user")]
    for name in (schema.time_column, schema.arrival_time_column):
        if name is None:
            continue
        found.append((_nulls(table, name), f"time {name!r} is null; every event needs a time"))
        ms = _milliseconds(table.column(name))
        if ms is not None:
            top = min(max_ts, NEVER - 2) if name == schema.time_column else NEVER - 2
            wrong = (ms < 0) | (ms > top)
            found.append((wrong, f"time {name!r} is out of bounds; it must be from 0 to {top} ms since 1970"))
    for spec in schema.columns:
        if not spec.nullable:
            found.append((_nulls(table, spec.name), f"column {spec.name!r} is null; the schema does not allow that"))
    return found


def _nulls(table: pa.Table, name: str) -> npt.NDArray[np.bool_]:
    return np.asarray(pc.is_null(table.column(name)).combine_chunks(), np.bool_)


def _milliseconds(column: pa.ChunkedArray) -> npt.NDArray[np.int64] | None:
    """Times, 0 where null; None where they are none."""
    if pa.types.is_timestamp(column.type):
        finer = pc.CastOptions(pa.timestamp("ms", column.type.tz), allow_time_truncate=True)
        column = column.cast(options=finer).cast(pa.int64())
    if not pa.types.is_integer(column.type):
        return None
    try:
        return np.asarray(pc.fill_null(column.cast(pa.int64()), 0).combine_chunks())
    except pa.ArrowInvalid:
        return None


def _halved(
    table: pa.Table, schema: EventSchema, rows: npt.NDArray[np.int64], refused: dict[int, str]
) -> npt.NDArray[np.int64]:
    """The rows that pass alone."""
    good: list[npt.NDArray[np.int64]] = [rows[:0]]
    todo = [rows] if len(rows) else []
    while todo:
        some = todo.pop()
        part = table.take(pa.array(some))
        try:
            part.validate(full=True)
            check_rows(part, schema)
        except DuplicateEventError:
            good.append(some)
        except (InputError, pa.ArrowInvalid) as e:
            if len(some) == 1:
                refused[int(some[0])] = str(e).partition("\n")[0].replace(" in row 0", "")[:300]
            else:
                half = len(some) // 2
                todo += [some[half:], some[:half]]
        else:
            good.append(some)
    return np.concatenate(good)


def _repeats(table: pa.Table, schema: EventSchema) -> npt.NDArray[np.bool_]:
    """Whether an earlier row has the row's user and event id."""
    again = np.zeros(table.num_rows, np.bool_)
    if schema.event_id_column is None or not table.num_rows:
        return again
    ids = table.column(schema.event_id_column).combine_chunks()
    shown = np.flatnonzero(np.asarray(pc.is_valid(ids)))
    if len(shown):
        users = table.column(schema.user_column).combine_chunks().dictionary_encode().indices.to_numpy()[shown]
        codes = ids.take(pa.array(shown)).dictionary_encode().indices.to_numpy()
        pair = users.astype(np.int64) * (int(codes.max()) + 1) + codes
        again[shown] = True
        again[shown[np.unique(pair, return_index=True)[1]]] = False
    return again
