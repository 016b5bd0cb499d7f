"""FatLayout: which column of a table of fat rows is what.

Worked example. Of the columns ``user_id, request_ts, request_id, hour`` and the lists ``event_ts, item, price`` (as
long as each other in every row), ``cand_item, label_click`` (of another length) it is inferred that the events have
columns item and price, the context is ``hour``, candidates are identified by ``item``, the outcome is ``click``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from thinrow.core.errors import SchemaError
from thinrow.core.units import HOUR_MS
from thinrow.schema.event_schema import DType, EventSchema
from thinrow.schema.example_schema import ExampleSchema, FieldSpec

_USER = ("user_id", "user", "customer_id", "member_id")
_TIME = ("request_ts", "request_time", "request_timestamp", "timestamp", "ts")
_EVENT_TIME = ("event_ts", "event_time", "event_times", "event_timestamps", "timestamps", "hist_ts", "history_ts")
_ID = ("request_id",)
#: Columns are known as what they are by these begins of their names; the rest of it names the field.
_CONTEXT, _CANDIDATE, _LABEL = "ctx_", "cand_", "label_"
#: Of an outcome whose window nobody says: rows come joined, only later outcomes would ask for it.
WINDOW_MS = HOUR_MS


@dataclass(frozen=True, slots=True)
class FatLayout:
    """Attributes:
    user, request_ts: columns of one value a row.
    event_ts: list column with the times of the row's events.
    events: list column -> name of the event column that it becomes.
    context: column -> name of the context field.
    candidates: column (a list, or one value of a row that shows one candidate) -> name of the candidate field.
    labels: column, as those of candidates -> name of the outcome.
    request_id: integer column, unique a row; None numbers rows in the order of the input.
    item: candidate field that identifies a candidate; None where there are none.
    newest_first: whether a row's first event is its newest.
    newest: rows hold the newest so many events at most; None for all (or: not known).
    horizon_ms: rows hold no events before ``request_ts - horizon_ms``; None for all.
    inclusive: whether rows see events at ``request_ts`` itself; None where a row that has one says so for itself.
    """

    user: str
    request_ts: str
    event_ts: str
    events: Mapping[str, str]
    context: Mapping[str, str] = field(default_factory=dict)
    candidates: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    request_id: str | None = None
    item: str | None = None
    newest_first: bool = False
    newest: int | None = None
    horizon_ms: int | None = None
    inclusive: bool | None = None

    def __post_init__(self) -> None:
        for name, value in (("newest", self.newest), ("horizon_ms", self.horizon_ms)):
            if value is not None and value < 1:
                raise SchemaError(f"{name}={value}; it must be 1 or more, or None for no bound")
        if self.horizon_ms is not None and self.inclusive is None:
            raise SchemaError("a horizon needs `inclusive` said, '<' or '<=': it is counted from that boundary")
        if self.candidates and self.item not in self.candidates.values():
            raise SchemaError(
                f"item {self.item!r} is not one of the candidate fields {', '.join(self.candidates.values())}; "
                "name the one that identifies a candidate"
            )

    @property
    def columns(self) -> list[str]:
        """All columns that are read."""
        ids = [] if self.request_id is None else [self.request_id]
        lists = [self.event_ts, *self.events, *self.context, *self.candidates, *self.labels]
        return [self.user, self.request_ts, *ids, *lists]

    @classmethod
    def infer(
        cls,
        sample: pa.Table,
        *,
        user: str | None = None,
        request_ts: str | None = None,
        event_ts: str | None = None,
        request_id: str | None = None,
        item: str | None = None,
        events: Iterable[str] | None = None,
        context: Iterable[str] | None = None,
        candidates: Iterable[str] | None = None,
        labels: Iterable[str] | None = None,
        newest: int | None = None,
        horizon_ms: int | None = None,
        inclusive: bool | None = None,
        newest_first: bool | None = None,
    ) -> FatLayout:
        """A layout for the columns of ``sample``, its first rows; what is given is not guessed.

        Event columns are the lists that are as long as the event times in every row of the sample. Of the others,
        names that begin with ``cand_`` and ``label_`` are candidates and outcomes, further lists are candidates, and
        single values are context.

        Raises:
            SchemaError: a column is missing, or cannot be guessed.
        """
        names = sample.column_names
        user = _named(names, user, _USER, "user")
        request_ts = _named(names, request_ts, _TIME, "request_ts")
        event_ts = _named(names, event_ts, _EVENT_TIME, "event_ts")
        if request_id is None and _ID[0] in names:
            request_id = _ID[0]
        said = {n for part in (events, context, candidates, labels) for n in part or ()}
        for name in [*said, *([] if request_id is None else [request_id])]:
            if name not in names:
                raise SchemaError(f"no column {name!r}; the rows have {', '.join(names)}")
        if not _is_list(sample.schema.field(event_ts)):
            raise SchemaError(f"event_ts {event_ts!r} is no list column; name the one that holds the events' times")
        lengths = _lengths(sample[event_ts])
        kinds: dict[str, list[str]] = {k: [] for k in ("events", "context", "candidates", "labels")}
        for kind, told in (("events", events), ("context", context), ("candidates", candidates), ("labels", labels)):
            kinds[kind] += told or ()
        for name in names:
            if name in said or name in (user, request_ts, event_ts, request_id):
                continue
            kind = _guess_kind(name, sample[name], lengths)
            told = {"events": events, "context": context, "candidates": candidates, "labels": labels}[kind]
            if told is None:
                kinds[kind].append(name)
        shown = {n: _short(n, _CANDIDATE) for n in kinds["candidates"]}
        return cls(
            user=user,
            request_ts=request_ts,
            event_ts=event_ts,
            request_id=request_id,
            events={n: n for n in kinds["events"]},
            context={n: _short(n, _CONTEXT) for n in kinds["context"]},
            candidates=shown,
            labels={n: _short(n, _LABEL) for n in kinds["labels"]},
            item=_item(item, shown),
            newest=newest,
            horizon_ms=horizon_ms,
            inclusive=inclusive,
            newest_first=_descends(sample[event_ts]) if newest_first is None else newest_first,
        )

    def event_schema(self, schema: pa.Schema) -> EventSchema:
        """The schema of the events. Raises SchemaError where a type has no counterpart."""
        fields = [pa.field(n, _element(schema.field(c)).type) for c, n in self.events.items()]
        fields = [f.with_nullable(_element(schema.field(c)).nullable) for c, f in zip(self.events, fields, strict=True)]
        user = pa.field(self.user, schema.field(self.user).type)
        time = pa.field(self.event_ts, _element(schema.field(self.event_ts)).type)
        if self.user in self.events.values() or self.event_ts in self.events.values():
            raise SchemaError(f"an event column has the name of {self.user!r} or {self.event_ts!r}; rename it")
        return EventSchema.infer(pa.schema([user, time, *fields]), user=self.user, time=self.event_ts)

    def example_schema(self, schema: pa.Schema, windows: Mapping[str, int] | None = None) -> ExampleSchema:
        """The schema of the examples; ``windows``: outcome -> attribution window, ms.

        Rows without candidates get a field ``item`` that is always empty.
        """
        shown = [FieldSpec(n, _dtype(schema.field(c))) for c, n in self.candidates.items()]
        shown = [FieldSpec(f.name, "int64") if f.name == self.item and "int" in f.dtype else f for f in shown]
        return ExampleSchema(
            context=tuple(FieldSpec(n, _dtype(schema.field(c))) for c, n in self.context.items()),
            candidates=tuple(shown) or (FieldSpec("item", "int64"),),
            item=self.item or "item",
            outcomes=tuple((n, (windows or {}).get(n, WINDOW_MS)) for n in self.labels.values()) if shown else (),
        )


def _named(names: list[str], given: str | None, usual: tuple[str, ...], role: str) -> str:
    if given is not None:
        if given not in names:
            raise SchemaError(f"no column {given!r} for {role}; the rows have {', '.join(names)}")
        return given
    found = [n for n in usual if n in names]
    if not found:
        raise SchemaError(f"which column is the {role}? None is called {', '.join(usual)}: name it")
    return found[0]


def _guess_kind(name: str, column: pa.ChunkedArray, lengths: npt.NDArray[Any]) -> str:
    if name.startswith(_LABEL):
        return "labels"
    if name.startswith(_CANDIDATE):
        return "candidates"
    if not _is_list_type(column.type):
        return "context"
    return "events" if np.array_equal(_lengths(column), lengths) else "candidates"


def _item(item: str | None, shown: Mapping[str, str]) -> str | None:
    if item is not None:
        return shown.get(item, item)
    for name in shown.values():
        if name in ("item", "item_id") or name.endswith("_id"):
            return name
    return next(iter(shown.values()), None)


def _short(name: str, begin: str) -> str:
    return name.removeprefix(begin)


def _is_list_type(kind: pa.DataType) -> bool:
    return bool(t.is_list(kind) or t.is_large_list(kind))


def _is_list(f: pa.Field) -> bool:
    return _is_list_type(f.type)


def _element(f: pa.Field) -> pa.Field:
    if not _is_list(f):
        raise SchemaError(f"column {f.name!r} has type {f.type}; events are lists")
    return f.type.value_field


def _lengths(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    return np.asarray(pc.fill_null(pc.list_value_length(column), 0))


def _descends(column: pa.ChunkedArray) -> bool:
    """Whether more rows of the sample end before they begin than the other way round."""
    lists = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    lists = lists.slice(0, 10_000)
    lengths = np.asarray(pc.fill_null(pc.list_value_length(lists), 0))
    flat = lists.flatten()
    values = np.asarray(pc.fill_null(flat.cast(pa.int64()) if not t.is_integer(flat.type) else flat, 0))
    stop = np.cumsum(lengths)
    some = lengths > 1
    first, last = values[(stop - lengths)[some]], values[stop[some] - 1]
    return bool((first > last).sum() > (first < last).sum())


def _dtype(f: pa.Field) -> DType:
    """The dtype of a field of one value, or of a list's elements."""
    kind = f.type.value_type if _is_list(f) else f.type
    one = pa.schema([pa.field("u", pa.int64()), pa.field("t", pa.int64()), pa.field(f.name, kind)])
    return EventSchema.infer(one, user="u", time="t").columns[0].dtype
