"""The flat columns of logged and stored requests: one row a request, the same in the log and in the table.

Worked example: an event schema with one column ``price`` (float32), one context field ``hour`` (int8), candidates
``item`` and ``ctr``, one outcome ``click``::

    request_id long, user_id long, request_ts long, v_start_ts ... v_schema_id,
    recent_event_ts list<long>, recent_arrival list<long>, recent_price list<float>,
    hide_event_ts, hide_arrival, hide_hidden_from list<long>,
    ctx_hour int, cand_item list<long>, cand_ctr list<float>, model_version string, arm string, boundary long,
    label_click list<int>

Iceberg has no 8 or 16 bit integers and keeps times in microseconds, so those are stored as ``int`` and times as
``long``; readers cast back by the schemas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError, SchemaError
from thinrow.core.users import UserKind, Users, as_users
from thinrow.jagged.column import Column
from thinrow.jagged.jagged import Jagged
from thinrow.schema.event_schema import DType, EventSchema
from thinrow.schema.example_schema import ExampleSchema

#: Arrow type in which a value of a dtype is stored (Iceberg's types; large offsets, so that no batch overflows them).
STORED_TYPES: dict[str, pa.DataType] = {
    "int8": pa.int32(),
    "int16": pa.int32(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.large_string(),
    "binary": pa.large_binary(),
}

#: Field of a HistoryVersion -> dtype of its column ``v_<field>``. The checksum is the int64 view of its 64 bits.
VERSION_FIELDS: dict[str, DType] = {
    "start_ts": "int64",
    "end_ts": "int64",
    "seq_len": "int64",
    "checksum": "int64",
    "last_arrival": "int64",
    "snapshot_arrival": "int64",
    "schema_id": "int32",
}
HIDE_FIELDS = ("event_ts", "arrival", "hidden_from")


@dataclass(frozen=True, slots=True)
class StoredField:
    """One flat column: ``name``, ``dtype`` of its values, whether it is a ``jagged`` list of them, and whether a
    value (of the list, where jagged) may be null. A value that is itself a list (``ragged``) or a vector of ``size``
    elements is stored as a list: Iceberg has none of a fixed size."""

    name: str
    dtype: DType
    jagged: bool = False
    nullable: bool = False
    ragged: bool = False
    size: int = 0

    @property
    def arrow(self) -> pa.Field:
        """The Arrow field."""
        stored = STORED_TYPES[self.dtype]
        if self.ragged or self.size:
            stored = pa.large_list(pa.field("element", stored, nullable=False))
        if not self.jagged:
            return pa.field(self.name, stored, nullable=self.nullable)
        return pa.field(self.name, pa.large_list(pa.field("element", stored, nullable=self.nullable)), nullable=False)


def request_fields(events: EventSchema, examples: ExampleSchema) -> tuple[StoredField, ...]:
    """The columns of an impression, in order."""
    return (
        StoredField("request_id", "int64"),
        StoredField("user_id", events.user_kind),
        StoredField("request_ts", "int64"),
        *(StoredField(f"v_{n}", d) for n, d in VERSION_FIELDS.items()),
        StoredField("recent_event_ts", "int64", jagged=True),
        StoredField("recent_arrival", "int64", jagged=True),
        # Nullable whatever the schema says: an event appended before its column was added reads as null.
        *(StoredField(f"recent_{c.name}", c.dtype, True, True, c.ragged, c.size) for c in events.columns),
        *(StoredField(f"hide_{n}", "int64", jagged=True) for n in HIDE_FIELDS),
        *(StoredField(f"ctx_{f.name}", f.dtype) for f in examples.context),
        *(StoredField(f"cand_{f.name}", f.dtype, jagged=True) for f in examples.candidates),
        StoredField("model_version", "string"),
        StoredField("arm", "string"),
        StoredField("boundary", "int64"),
    )


def example_fields(events: EventSchema, examples: ExampleSchema) -> tuple[StoredField, ...]:
    """The columns of an example, in order: those of its impression, then one label list an outcome."""
    labels = (StoredField(f"label_{n}", "int32", jagged=True) for n, _ in examples.outcomes)
    return (*request_fields(events, examples), *labels)


def arrow_schema(fields: Iterable[StoredField]) -> pa.Schema:
    """The Arrow schema of the columns."""
    return pa.schema([f.arrow for f in fields])


def store_column(column: Column, field: StoredField) -> pa.Array:
    """The values as the plain Arrow array in which they are stored.

    Raises:
        SchemaError: the values are of another type, or one does not fit.
        InputError: a value is null where none may be.
    """
    if column.size != field.size or (column.offsets is not None) != field.ragged:
        raise SchemaError(
            f"{field.name!r} holds {column.shape_name}, which the schema does not say; rebuild the column"
        )
    if field.ragged or field.size:
        return _store_lists(column, field)
    column = column.decoded()
    stored, have = STORED_TYPES[field.dtype], column.values.dtype
    is_bytes = field.dtype in ("string", "binary")
    target = np.dtype(np.int32 if is_bytes else field.dtype)
    fits = np.can_cast(have, target) or (have.kind in "iu" and target.kind in "iu")
    if is_bytes != (column.dictionary is not None) or not fits:
        raise SchemaError(
            f"{field.name!r} holds {_kind(column)} values, the schema says {field.dtype}; cast them first"
        )
    if not field.nullable and column.valid is not None and not column.valid.all():
        row = int(np.flatnonzero(~column.valid)[0])
        raise InputError(f"{field.name!r} is null at position {row}; fill it, fields of a request are never null")
    if not is_bytes and have.kind in "iu" and have != target:
        lost = np.flatnonzero(column.values.astype(target) != column.values)
        if len(lost):
            value = column.values[lost[0]]
            raise SchemaError(f"{field.name!r} holds {value}, which does not fit {field.dtype}; widen the field")
    try:
        return column.to_arrow().cast(stored)
    except pa.ArrowInvalid as e:
        raise SchemaError(f"{field.name!r} does not fit {field.dtype}: {e}; cast it first") from e


def _store_lists(column: Column, field: StoredField) -> pa.Array:
    elements = store_column(column.elements(), StoredField(field.name, field.dtype))
    offsets = np.arange(len(column) + 1) * column.size if column.offsets is None else column.offsets
    mask = None if column.valid is None else pa.array(~column.valid)
    kind = pa.large_list(pa.field("element", elements.type, nullable=False))
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), elements, type=kind, mask=mask)


def store_jagged(jagged: Jagged, field: StoredField) -> pa.Array:
    """Rows as the Arrow list array in which they are stored. Raises as ``store_column``."""
    offsets = np.ascontiguousarray(jagged.offsets, np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), store_column(jagged.column, field), type=field.arrow.type)


def store_users(users: Users, kind: UserKind) -> pa.Array:
    """Ids as a stored column. Raises UserKindError where they are of another kind."""
    return pa.array(as_users(users, kind), STORED_TYPES[kind])


def load_users(array: pa.ChunkedArray, kind: UserKind) -> Users:
    """Reverse of ``store_users``."""
    values = array.to_numpy()
    return np.ascontiguousarray(values, np.int64) if kind == "int64" else values.astype(object)


def load_int64(array: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """A stored integer column as int64."""
    return np.ascontiguousarray(array.to_numpy(), np.int64)


def _kind(column: Column) -> str:
    return str(column.values.dtype if column.dictionary is None else column.dictionary.type)
