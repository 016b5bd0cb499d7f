"""Records of the training path: impressions (what a request saw and showed), outcomes, and their join, examples.

An impression is one *request*, not one candidate: candidate features are jagged columns of one shared shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError, SchemaError
from thinrow.examples.layout import (
    HIDE_FIELDS,
    VERSION_FIELDS,
    StoredField,
    arrow_schema,
    example_fields,
    load_int64,
    load_users,
    request_fields,
    store_column,
    store_jagged,
    store_users,
)
from thinrow.history.requests import RequestBatch
from thinrow.history.snapshot import Snapshot
from thinrow.jagged.column import Column, concat_columns, null_column
from thinrow.jagged.events import HIDE_DTYPE, Events, never_hidden
from thinrow.jagged.jagged import Jagged
from thinrow.schema.event_schema import EventSchema
from thinrow.schema.example_schema import ExampleSchema, FieldSpec
from thinrow.schema.version import VERSION_DTYPE

#: Key of a table's metadata: the event schema, as JSON, whose names the recent columns have.
WRITTEN_UNDER = b"thinrow.event_schema"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Impressions:
    """X requests as a model saw them.

    Attributes:
        request_id: (X,) int64, unique.
        snapshots: users, request times, versions, inline recent events and hides of the X requests.
        context: name -> (X,) Column, profile and context features.
        candidates: name -> X rows; every field has the same offsets.
        model_version: (X,) string Column.
        arm: (X,) string Column, the experiment arm.
        boundary: (X,) int64, how many of the newest visible events the model treated as the recent part.
    """

    request_id: npt.NDArray[np.int64]
    snapshots: RequestBatch
    context: dict[str, Column]
    candidates: dict[str, Jagged]
    model_version: Column
    arm: Column
    boundary: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.request_id)

    def take(self, rows: npt.NDArray[Any]) -> Impressions:
        """The requests at ``rows`` (positions), in that order, copied."""
        return Impressions(
            self.request_id[rows],
            self.snapshots.take(rows),
            {n: c.take(rows) for n, c in self.context.items()},
            take_rows(self.candidates, rows),
            self.model_version.take(rows),
            self.arm.take(rows),
            self.boundary[rows],
        )

    @classmethod
    def of(
        cls,
        schema: ExampleSchema,
        request_id: npt.ArrayLike,
        seen: Snapshot | RequestBatch,
        *,
        candidates: Mapping[str, Jagged | Sequence[Sequence[Any]]],
        context: Mapping[str, Column | Sequence[Any]] | None = None,
        model_version: str = "",
        arm: str = "",
        boundary: npt.ArrayLike | None = None,
    ) -> Impressions:
        """Impressions of one model version and arm, from plain lists or columns.

        ``Impressions.of(schema, [1, 2], store.snapshot([7, 9], now_ms), candidates={"item": [[3, 5], [4]]})`` is two
        requests, of users 7 and 9; the first shows items 3 and 5.

        Args:
            schema: names and dtypes of the fields.
            seen: what the requests saw, one each, in the order of ``request_id``.
            candidates: name -> a row of values for each request.
            context: name -> a value for each request.
            boundary: None for the number of recent events of each request.

        Raises:
            InputError: a name is missing or unknown, or there are more or fewer rows than ids.
            SchemaError: a value is not of its field's dtype.
        """
        ids = np.atleast_1d(np.asarray(request_id, np.int64))
        n = len(ids)
        snapshots = seen.requests if isinstance(seen, Snapshot) else seen
        context = context or {}
        _same_names("context field", context, [f.name for f in schema.context])
        _same_names("candidate field", candidates, [f.name for f in schema.candidates])
        columns = {f.name: _as_column(context[f.name], f) for f in schema.context}
        rows = {f.name: _as_rows(candidates[f.name], f) for f in schema.candidates}
        _same_length({"seen": snapshots, **columns, **rows}, n)
        recent = np.asarray(snapshots.inline.lengths if boundary is None else boundary, np.int64)
        if recent.ndim:
            _same_length({"boundary": recent}, n)
        labels = text_column(model_version, n), text_column(arm, n)
        return cls(ids, snapshots, columns, _share_offsets(rows), *labels, np.broadcast_to(recent, n).copy())

    @classmethod
    def empty(cls, events: EventSchema, examples: ExampleSchema) -> Impressions:
        """No requests."""
        return cls.from_arrow(arrow_schema(request_fields(events, examples)).empty_table(), events, examples)

    @staticmethod
    def concat(parts: Sequence[Impressions]) -> Impressions:
        """The requests of ``parts`` (one or more, of one schema) one after another."""
        if len(parts) == 1:
            return parts[0]
        return Impressions(
            np.concatenate([p.request_id for p in parts]),
            RequestBatch.concat([p.snapshots for p in parts]),
            {n: concat_columns([p.context[n] for p in parts]) for n in parts[0].context},
            concat_rows([p.candidates for p in parts]),
            concat_columns([p.model_version for p in parts]),
            concat_columns([p.arm for p in parts]),
            np.concatenate([p.boundary for p in parts]),
        )

    def to_arrow(self, events: EventSchema, examples: ExampleSchema) -> pa.Table:
        """One row a request, columns as ``layout.request_fields``.

        Raises:
            InputError: lengths disagree, a name is missing or unknown, a key is negative or null.
            SchemaError: a column is of another type than the schemas say.
        """
        impressions, events = _under_newest(self, events)
        fields = request_fields(events, examples)
        schema = arrow_schema(fields).with_metadata({WRITTEN_UNDER: events.to_json()})
        return pa.table(_request_arrays(impressions, events, examples, fields), schema=schema)

    @classmethod
    def from_arrow(cls, table: pa.Table, events: EventSchema, examples: ExampleSchema) -> Impressions:
        """Reverse of ``to_arrow``; recent events come as columns of the newer of ``events`` and the schema that the
        rows were written under, matched by column id: null where they lack one.

        Raises:
            SchemaError: another column is missing, or of another type.
        """
        table = table.combine_chunks()
        written = _written_under(table, events)
        _require_columns(table, request_fields(written, examples))
        return cls(
            load_int64(table["request_id"]),
            _load_snapshots(table, written).under(_newest(events, written)),
            {f.name: Column.from_arrow(table[f"ctx_{f.name}"], f.dtype) for f in examples.context},
            _load_rows(table, "cand_", [(f.name, f.dtype) for f in examples.candidates]),
            Column.from_arrow(table["model_version"], "string"),
            Column.from_arrow(table["arm"], "string"),
            load_int64(table["boundary"]),
        )


@dataclass(frozen=True, slots=True)
class Outcomes:
    """m outcomes of shown candidates.

    Attributes:
        request_id: (m,) int64, the request that showed the candidate.
        item: (m,) int64, which candidate, by the schema's ``item`` field.
        name: (m,) string Column, which outcome of the schema.
        ts: (m,) int64 ms, when it happened.
        value: (m,) int64, what becomes the label (1 for plain events), within int32.
        outcome_id: (m,) string Column, what names an outcome among those of its request, null where nothing does; or
            None. It tells an outcome that its source gave twice.
    """

    request_id: npt.NDArray[np.int64]
    item: npt.NDArray[np.int64]
    name: Column
    ts: npt.NDArray[np.int64]
    value: npt.NDArray[np.int64]
    outcome_id: Column | None = None

    def __len__(self) -> int:
        return len(self.request_id)

    @classmethod
    def of(
        cls,
        name: str,
        request_id: npt.ArrayLike,
        item: npt.ArrayLike,
        ts: npt.ArrayLike,
        value: npt.ArrayLike = 1,
    ) -> Outcomes:
        """Outcomes of one name; a scalar ``value`` holds for all of them."""
        ids = np.atleast_1d(np.asarray(request_id, np.int64))
        n = len(ids)
        return cls(
            ids,
            np.atleast_1d(np.asarray(item, np.int64)),
            text_column(name, n),
            np.atleast_1d(np.asarray(ts, np.int64)),
            np.broadcast_to(np.asarray(value, np.int64), n).copy(),
        )

    @classmethod
    def empty(cls) -> Outcomes:
        """No outcomes."""
        return cls.of("", [], [], [])

    def take(self, rows: npt.NDArray[Any]) -> Outcomes:
        """The outcomes at ``rows`` (positions or a mask)."""
        ids = None if self.outcome_id is None else self.outcome_id.take(rows)
        plain = self.request_id[rows], self.item[rows], self.name.take(rows), self.ts[rows], self.value[rows]
        return Outcomes(*plain, ids)

    @staticmethod
    def concat(parts: Sequence[Outcomes]) -> Outcomes:
        """The outcomes of ``parts`` one after another."""
        if not parts:
            return Outcomes.empty()
        return Outcomes(
            np.concatenate([p.request_id for p in parts]),
            np.concatenate([p.item for p in parts]),
            concat_columns([p.name for p in parts]),
            np.concatenate([p.ts for p in parts]),
            np.concatenate([p.value for p in parts]),
            None
            if all(p.outcome_id is None for p in parts)
            else concat_columns([p.outcome_id or null_column("string", len(p)) for p in parts]),
        )

    def to_arrow(self) -> pa.Table:
        """One row an outcome.

        Raises:
            InputError: lengths disagree, a name is null, or a value exceeds int32.
        """
        _same_length({"item": self.item, "name": self.name, "ts": self.ts, "value": self.value}, len(self))
        wide = np.flatnonzero(self.value.astype(np.int32) != self.value)
        if len(wide):
            raise InputError(f"outcome value {self.value[wide[0]]} exceeds int32, the type of a label; scale it down")
        name = store_column(self.name, StoredField("name", "string"))
        columns = {"request_id": self.request_id, "item": self.item, "name": name, "ts": self.ts, "value": self.value}
        if self.outcome_id is not None:
            columns["outcome_id"] = store_column(self.outcome_id, StoredField("outcome_id", "string", nullable=True))
        return pa.table(columns)

    @classmethod
    def from_arrow(cls, table: pa.Table) -> Outcomes:
        """Reverse of ``to_arrow``."""
        name = Column.from_arrow(table["name"], "string")
        return cls(
            load_int64(table["request_id"]),
            load_int64(table["item"]),
            name,
            load_int64(table["ts"]),
            load_int64(table["value"]),
            Column.from_arrow(table["outcome_id"], "string") if "outcome_id" in table.column_names else None,
        )


@dataclass(frozen=True, slots=True)
class ExampleBatch:
    """X examples: impressions joined with their outcomes. Fields as in ``Impressions``; further:

    Attributes:
        batch: what ``reconstruct`` takes (users, request times, versions, inline events, hides).
        labels: outcome name -> X rows of int32, aligned with the candidates; 0 where no outcome came.
    """

    request_id: npt.NDArray[np.int64]
    batch: RequestBatch
    context: dict[str, Column]
    candidates: dict[str, Jagged]
    labels: dict[str, Jagged]
    model_version: Column
    arm: Column
    boundary: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.request_id)

    @classmethod
    def label(cls, impressions: Impressions, labels: dict[str, Jagged]) -> ExampleBatch:
        """Impressions with their labels, nothing copied."""
        i = impressions
        return cls(i.request_id, i.snapshots, i.context, i.candidates, labels, i.model_version, i.arm, i.boundary)

    @property
    def impressions(self) -> Impressions:
        """The same requests without labels, nothing copied."""
        return Impressions(
            self.request_id, self.batch, self.context, self.candidates, self.model_version, self.arm, self.boundary
        )

    def take(self, rows: npt.NDArray[Any]) -> ExampleBatch:
        """The examples at ``rows`` (positions), in that order, copied."""
        return ExampleBatch.label(self.impressions.take(rows), take_rows(self.labels, rows))

    @staticmethod
    def concat(parts: Sequence[ExampleBatch]) -> ExampleBatch:
        """The examples of ``parts`` (one or more, of one schema) one after another."""
        if len(parts) == 1:
            return parts[0]
        impressions = Impressions.concat([p.impressions for p in parts])
        return ExampleBatch.label(impressions, concat_rows([p.labels for p in parts]))

    def to_arrow(self, events: EventSchema, examples: ExampleSchema) -> pa.Table:
        """One row an example, columns as ``layout.example_fields``. Raises as ``Impressions.to_arrow``."""
        impressions, events = _under_newest(self.impressions, events)
        fields = example_fields(events, examples)
        arrays = _request_arrays(impressions, events, examples, request_fields(events, examples))
        names = [n for n, _ in examples.outcomes]
        _same_names("label", self.labels, names)
        _same_shape(self.labels | {"": self.candidates[examples.item]}, len(self))
        by_name = {f.name: f for f in fields}
        arrays += [store_jagged(self.labels[n], by_name[f"label_{n}"]) for n in names]
        return pa.table(arrays, schema=arrow_schema(fields))

    @classmethod
    def from_arrow(cls, table: pa.Table, events: EventSchema, examples: ExampleSchema) -> ExampleBatch:
        """Reverse of ``to_arrow``. Raises as ``Impressions.from_arrow``."""
        table = table.combine_chunks()
        _require_columns(table, example_fields(_written_under(table, events), examples))
        labels = _load_rows(table, "label_", [(n, "int32") for n, _ in examples.outcomes])
        return cls.label(Impressions.from_arrow(table, events, examples), labels)


def text_column(text: str, n: int) -> Column:
    """(n,) string Column of one value, such as the model version of a whole batch.

    Raises:
        InputError: the text has no UTF-8 form.
    """
    try:
        return Column(np.zeros(n, np.int32), None, pa.array([text], pa.string()))
    except UnicodeEncodeError as e:
        raise InputError(f"{text[:40]!r} has no UTF-8 form ({e.reason}); pass valid Unicode") from e


def take_rows(rows_of: Mapping[str, Jagged], rows: npt.NDArray[Any]) -> dict[str, Jagged]:
    """Rows of several jagged columns; columns that share their offsets share them afterwards."""
    taken = {n: j.take(rows) for n, j in rows_of.items()}
    return _share_offsets(taken)


def concat_rows(parts: Sequence[Mapping[str, Jagged]]) -> dict[str, Jagged]:
    """Rows of ``parts`` one after another, name by name."""
    joined = {}
    for name in parts[0]:
        rows = [p[name] for p in parts]
        base = np.cumsum([0, *(r.offsets[-1] for r in rows[:-1])])
        offsets = np.concatenate([[0], *(r.offsets[1:] + b for r, b in zip(rows, base, strict=True))]).astype(np.int64)
        joined[name] = Jagged(concat_columns([r.column for r in rows]), offsets)
    return _share_offsets(joined)


def _as_column(values: Column | Sequence[Any], field: FieldSpec) -> Column:
    if isinstance(values, Column):
        return values
    return _typed(values, field, "values", lambda array: Column.from_arrow(array, field.dtype))


def _as_rows(rows: Jagged | Sequence[Sequence[Any]], field: FieldSpec) -> Jagged:
    if isinstance(rows, Jagged):
        return rows
    return _typed(rows, field, "rows of values", lambda array: Jagged.from_arrow(_rows(array), field.dtype))


def _typed(values: Any, field: FieldSpec, what: str, convert: Callable[[pa.Array], T]) -> T:
    """``values`` under the type that they have by themselves, converted where nothing is lost. Told the field's type at
    once, Arrow cuts 1.5 to 1, and takes a text or a dict for a sequence."""
    try:
        if isinstance(values, (str, bytes, Mapping)):
            raise TypeError(f"a {type(values).__name__} is no sequence of them")
        array = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values)
        kind = array.type.value_type if pa.types.is_nested(array.type) and what != "values" else array.type
        if not holds(kind, field.dtype):
            raise TypeError(f"these are of type {kind}")
        return convert(array)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as e:
        raise SchemaError(f"field {field.name!r} takes {what} of dtype {field.dtype}: {e}; cast them first") from e


def _rows(array: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Lists, none null. Raises TypeError."""
    if len(array) == 0 and pa.types.is_null(array.type):
        return pa.array([], pa.list_(array.type))
    if array.null_count or not pa.types.is_nested(array.type):
        raise TypeError("a row is no list")
    return array


def holds(kind: pa.DataType, dtype: str) -> bool:
    """Whether values of an Arrow type can be those of a field of ``dtype``: an integer is a float, 1.5 no integer, and
    what is true or false neither."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_null(kind):
        return True
    if dtype in ("string", "binary"):
        texts = pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view
        octets = pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view
        return any(is_kind(kind) for is_kind in (*texts, *(octets if dtype == "binary" else ())))
    return bool(pa.types.is_integer(kind) or (dtype.startswith("float") and pa.types.is_floating(kind)))


def _share_offsets(rows_of: Mapping[str, Jagged]) -> dict[str, Jagged]:
    first = next(iter(rows_of.values()), None)
    return {
        n: Jagged(j.column, first.offsets) if first is not None and np.array_equal(j.offsets, first.offsets) else j
        for n, j in rows_of.items()
    }


def _same_length(parts: Mapping[str, Sized], n: int) -> None:
    for name, part in parts.items():
        if len(part) != n:
            raise InputError(f"{name!r} has {len(part)} rows, but there are {n} ids; give one row an id")


def _same_names(what: str, have: Mapping[str, Any], want: Sequence[str]) -> None:
    for name in want:
        if name not in have:
            raise InputError(f"{what} {name!r} is missing; the example schema asks for {', '.join(want)}")
    for name in have:
        if name not in want:
            raise InputError(
                f"{what} {name!r} is not in the example schema, which has {', '.join(want) or 'none'}; drop it"
            )


def _same_shape(rows_of: Mapping[str, Jagged], n: int) -> None:
    first: Jagged | None = None
    for name, rows in rows_of.items():
        if len(rows) != n or rows.offsets[0] != 0 or rows.offsets[-1] != len(rows.column):
            raise InputError(
                f"{name!r} has {len(rows)} rows and {len(rows.column)} values between offsets {rows.offsets[0]} and "
                f"{rows.offsets[-1]}; {n} rows that cover all values are needed"
            )
        first = first or rows
        if not np.array_equal(rows.offsets, first.offsets):
            row = int(np.flatnonzero(rows.lengths != first.lengths)[0])
            raise InputError(
                f"{name!r} has {rows.lengths[row]} values in row {row}, others {first.lengths[row]}; "
                "give one value a candidate"
            )


def _newest(a: EventSchema, b: EventSchema) -> EventSchema:
    return b if b.schema_id > a.schema_id else a


def _under_newest(i: Impressions, events: EventSchema) -> tuple[Impressions, EventSchema]:
    """The impressions with recent events as columns of the newer of their schema and ``events``, and that schema."""
    newest = _newest(events, i.snapshots.schema or events)
    return replace(i, snapshots=i.snapshots.under(newest)), newest


def _written_under(table: pa.Table, events: EventSchema) -> EventSchema:
    """The schema whose names the recent columns have; ``events`` where the table does not say."""
    text = (table.schema.metadata or {}).get(WRITTEN_UNDER)
    return events if text is None else EventSchema.from_dict(json.loads(text))


def _request_arrays(
    i: Impressions, events: EventSchema, examples: ExampleSchema, fields: Sequence[StoredField]
) -> list[pa.Array]:
    n, s = len(i), i.snapshots
    _same_names("context field", i.context, [f.name for f in examples.context])
    _same_names("candidate field", i.candidates, [f.name for f in examples.candidates])
    _same_names("recent column", s.inline.columns, [c.name for c in events.columns])
    parts: dict[str, Sized] = {"users": s.users, "request_ts": s.request_ts, "versions": s.versions}
    parts |= {"inline events": s.inline.lengths, "hides": np.diff(s.hide_offsets), "boundary": i.boundary}
    _same_length(parts | {"model_version": i.model_version, "arm": i.arm} | i.context, n)
    _same_shape(i.candidates, n)
    negative = np.flatnonzero(s.request_ts < 0)
    if len(negative):
        raise InputError(f"request_ts is {s.request_ts[negative[0]]} in row {negative[0]}; times are 0 ms or more")
    checksum = s.versions["checksum"].view(np.int64)
    versions = {f: s.versions[f] if f != "checksum" else checksum for f in VERSION_FIELDS}
    recent = {"event_ts": Column(s.inline.event_ts), "arrival": Column(s.inline.arrival)} | s.inline.columns
    columns: dict[str, Column | Jagged] = {
        "request_id": Column(i.request_id),
        "request_ts": Column(s.request_ts),
        "model_version": i.model_version,
        "arm": i.arm,
        "boundary": Column(i.boundary),
        **{f"v_{f}": Column(np.ascontiguousarray(v)) for f, v in versions.items()},
        **{f"recent_{c}": Jagged(v, s.inline.offsets) for c, v in recent.items()},
        **{f"hide_{f}": Jagged(Column(np.ascontiguousarray(s.hides[f])), s.hide_offsets) for f in HIDE_FIELDS},
        **{f"ctx_{c}": v for c, v in i.context.items()},
        **{f"cand_{c}": v for c, v in i.candidates.items()},
    }
    users = store_users(s.users, events.user_kind)
    return [users if f.name == "user_id" else _stored(columns[f.name], f) for f in fields]


def _stored(column: Column | Jagged, field: StoredField) -> pa.Array:
    return store_jagged(column, field) if isinstance(column, Jagged) else store_column(column, field)


def _require_columns(table: pa.Table, fields: Iterable[StoredField]) -> None:
    have = set(table.column_names)
    for field in fields:
        added_later = field.nullable and field.jagged
        if field.name not in have and not added_later:
            raise SchemaError(
                f"no column {field.name!r} among {', '.join(table.column_names)}; it needs another schema"
            )


def _load_rows(table: pa.Table, prefix: str, fields: Sequence[tuple[str, str]]) -> dict[str, Jagged]:
    return _share_offsets({n: Jagged.from_arrow(table[prefix + n], d) for n, d in fields})


def _load_snapshots(table: pa.Table, events: EventSchema) -> RequestBatch:
    users = load_users(table["user_id"], events.user_kind)
    versions = np.empty(len(users), VERSION_DTYPE)
    for name in VERSION_FIELDS:
        values = load_int64(table[f"v_{name}"])
        versions[name] = values.view(np.uint64) if name == "checksum" else values
    event_ts = Jagged.from_arrow(table["recent_event_ts"], "int64")
    n_events = len(event_ts.column)
    columns = {}
    for c in events.columns:
        name = f"recent_{c.name}"
        if name in table.column_names:
            columns[c.name] = Jagged.from_arrow(table[name], c.dtype, ragged=c.ragged, size=c.size).column
        else:
            columns[c.name] = null_column(c.dtype, n_events, ragged=c.ragged, size=c.size)
    arrival = Jagged.from_arrow(table["recent_arrival"], "int64").column.values
    inline = Events(users, event_ts.offsets, event_ts.column.values, arrival, never_hidden(n_events), columns)
    hidden = {n: Jagged.from_arrow(table[f"hide_{n}"], "int64") for n in HIDE_FIELDS}
    hides = np.empty(len(hidden["event_ts"].column), HIDE_DTYPE)
    for name, rows in hidden.items():
        hides[name] = rows.column.values
    times, hide_offsets = load_int64(table["request_ts"]), hidden["event_ts"].offsets
    return RequestBatch(users, times, versions, inline, hides, hide_offsets, events)
