"""Which columns of an input an event schema wants, of which Arrow types, and rows of Python values as such columns.

Worked example: a schema with the time column ``ts`` wants ``int64`` there, or a timestamp where the input gives texts
or datetimes; an ``int8`` column may come as booleans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from thinrow.jagged.column import ARROW_TYPES
from thinrow.schema import EventSchema, Trait
from thinrow.sources.source import SOURCE_ID, SOURCE_KEY, SOURCE_TS

TIMES = pa.timestamp("us", "UTC")

#: Column -> Arrow types that it may come as, the first by default.
Wanted: TypeAlias = Mapping[str, Sequence[pa.DataType]]


def wanted_of(schema: EventSchema) -> dict[str, list[pa.DataType]]:
    """The columns of ``schema`` but those that the source itself adds."""
    found = _all_of(schema)
    for name in (SOURCE_ID, SOURCE_KEY, SOURCE_TS):
        found.pop(name, None)
    return found


def empty_table(schema: EventSchema) -> pa.Table:
    """No events, of the columns of ``schema``."""
    # Arrow's own empty tables import pandas, which takes a second.
    return pa.Table.from_batches([], pa.schema([(name, kinds[0]) for name, kinds in _all_of(schema).items()]))


def with_missing(table: pa.Table, schema: EventSchema) -> pa.Table:
    """Null columns where the input has none and the schema allows that."""
    for spec in schema.columns:
        if spec.nullable and spec.name not in table.column_names:
            table = table.append_column(spec.name, pa.nulls(table.num_rows, _all_of(schema)[spec.name][0]))
    for name in (schema.supersedes_column,):
        if name is not None and name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, _all_of(schema)[name][0]))
    return table


def _all_of(schema: EventSchema) -> dict[str, list[pa.DataType]]:
    found: dict[str, list[pa.DataType]] = {schema.user_column: [ARROW_TYPES[schema.user_kind]]}
    for name in (schema.event_id_column, schema.supersedes_column):
        if name is not None and schema.event_id_dtype is not None:
            found[name] = [ARROW_TYPES[schema.event_id_dtype]]
    for name in (schema.time_column, schema.arrival_time_column):
        if name is not None:
            found[name] = [pa.int64(), TIMES]
    for spec in schema.columns:
        one = ARROW_TYPES[spec.dtype]
        if spec.ragged or spec.size:
            found[spec.name] = [pa.list_(one)]
        elif spec.dtype == "int8":
            found[spec.name] = [one, pa.bool_()]
        elif spec.trait is Trait.TIMESTAMP:
            found[spec.name] = [one, TIMES]
        else:
            found[spec.name] = [one]
    return found


def as_numbers(table: pa.Table) -> pa.Table:
    """Times as milliseconds and booleans as 0 and 1, so that tables of several inputs can be one."""
    for i, field in enumerate(table.schema):
        column = table.column(i)
        if pa.types.is_timestamp(field.type):
            finer = pc.CastOptions(pa.timestamp("ms", field.type.tz), allow_time_truncate=True)
            table = table.set_column(i, field.name, column.cast(options=finer).cast(pa.int64()))
        elif pa.types.is_boolean(field.type):
            table = table.set_column(i, field.name, column.cast(pa.int8()))
    return table


def added_by_source(schema: EventSchema) -> list[str]:
    """Columns of the schema that a source adds."""
    named = {schema.user_column, schema.time_column, schema.event_id_column, schema.arrival_time_column}
    named |= {c.name for c in schema.columns}
    return [name for name in (SOURCE_ID, SOURCE_KEY, SOURCE_TS) if name in named]


def choose(types: Sequence[pa.DataType], values: Iterable[Any]) -> pa.DataType | None:
    """Which of ``types`` most of the Python ``values`` are of; None where all are None."""
    seen = Counter(_kind_of(types, value) for value in values if value is not None)
    return seen.most_common(1)[0][0] if seen else None


def _kind_of(types: Sequence[pa.DataType], value: Any) -> pa.DataType:
    for kind in types:
        if isinstance(value, bool):
            fits = pa.types.is_boolean(kind)
        elif isinstance(value, (str, datetime, date)):
            fits = pa.types.is_timestamp(kind)
        else:
            fits = not pa.types.is_timestamp(kind) and not pa.types.is_boolean(kind)
        if fits:
            return kind
    return types[0]


def table_of_rows(rows: Sequence[Mapping[str, Any]], wanted: Wanted) -> tuple[pa.Table, list[int], dict[int, str]]:
    """Rows of Python values as a table: the table, the rows that it holds, and why the others are not in it."""
    bad: dict[int, str] = {}
    columns: dict[str, list[Any]] = {}
    types: dict[str, pa.DataType] = {}
    for name, kinds in wanted.items():
        values = [row.get(name) for row in rows]
        kind = kinds[0] if len(kinds) == 1 else choose(kinds, values) or kinds[0]
        try:
            _array(values, kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            for i, value in enumerate(values):
                try:
                    _array([value], kind)
                except (pa.ArrowException, OverflowError, TypeError, ValueError) as e:
                    bad.setdefault(i, f"column {name!r} is {value!r:.80}, no {kind}: {str(e).splitlines()[0][:200]}")
        columns[name], types[name] = values, kind
    kept = [i for i in range(len(rows)) if i not in bad]
    arrays = {n: _array(v if not bad else [v[i] for i in kept], types[n]) for n, v in columns.items()}
    return pa.table(arrays), kept, bad


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Python values as ``kind``. Times are texts (ISO 8601) or datetimes there, never numbers of an unknown unit.

    Raises ArrowException, TypeError, ValueError or OverflowError where a value is no such thing.
    """
    if pa.types.is_timestamp(kind):
        number = next((v for v in values if isinstance(v, (int, float))), None)
        if number is not None:
            raise TypeError("a number among texts")
        if any(isinstance(v, str) for v in values):
            texts = [v.isoformat() if isinstance(v, (datetime, date)) else v for v in values]
            return pc.cast(pa.array(texts, pa.string()), kind)
    return pa.array(values, kind)
