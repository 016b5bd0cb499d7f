"""FatRows: rows as a pipeline logged them, oldest event first, as flat columns.

Worked example: two rows of ``event_ts`` ``[[30, 20], [40, 30, 20]]``, newest first, are offsets ``[0, 2, 5]`` and times
``[20, 30, 20, 30, 40]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import InputError, SchemaError
from thinrow.core.ragged import offsets_of
from thinrow.core.users import Users
from thinrow.history.intake import event_times, typed_column, user_ids
from thinrow.jagged import Column, Jagged
from thinrow.jagged.column import one_array
from thinrow.kernels import kernel
from thinrow.moving.layout import FatLayout
from thinrow.schema import EventSchema, ExampleSchema

__all__ = ["FatLayout", "FatRows", "columns_differ", "event_keys"]

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_NULL_WORD = np.uint64(0x6E75_6C6C_0F0F_A5A5)
_SEED = 0x51ED


@dataclass(frozen=True, slots=True)
class FatRows:
    """X fat rows over E events.

    Attributes:
        request_id: (X,) int64.
        users: (X,) ids.
        request_ts: (X,) int64 ms, as logged.
        offsets: (X + 1,) int64; the events of row i are ``[offsets[i], offsets[i + 1])``, oldest first.
        event_ts: (E,) int64 ms.
        columns: name -> (E,) Column.
        ragged: (X,) bool, whether the row's lists were of different lengths; such a row has no events here.
        context, candidates, labels: as of an example.
    """

    request_id: Ints
    users: Users
    request_ts: Ints
    offsets: Ints
    event_ts: Ints
    columns: dict[str, Column]
    ragged: npt.NDArray[np.bool_]
    context: dict[str, Column]
    candidates: dict[str, Jagged]
    labels: dict[str, Jagged]

    def __len__(self) -> int:
        return len(self.request_id)

    @property
    def lengths(self) -> Ints:
        """(X,) number of events of each row."""
        return np.diff(self.offsets)

    def take(self, rows: npt.NDArray[Any]) -> FatRows:
        """The rows at ``rows`` (positions), in that order, copied."""
        start, stop = self.offsets[:-1][rows], self.offsets[1:][rows]
        return FatRows(
            self.request_id[rows],
            self.users[rows],
            self.request_ts[rows],
            offsets_of(stop - start),
            Column(self.event_ts).take_ranges(start, stop).values,
            {n: c.take_ranges(start, stop) for n, c in self.columns.items()},
            self.ragged[rows],
            {n: c.take(rows) for n, c in self.context.items()},
            {n: j.take(rows) for n, j in self.candidates.items()},
            {n: j.take(rows) for n, j in self.labels.items()},
        )

    @classmethod
    def from_arrow(
        cls,
        table: pa.Table,
        layout: FatLayout,
        events: EventSchema,
        examples: ExampleSchema | None = None,
        *,
        first_row: int = 0,
    ) -> FatRows:
        """Rows of a table with the columns of ``layout``.

        Args:
            examples: None to leave out context, candidates and labels.
            first_row: number of the first row in the input: the request ids where the layout names none.

        Raises:
            SchemaError, UserKindError: a column is missing or of another type than the schemas say.
            InputError: a user, a time or a request id is null or out of bounds.
        """
        missing = [c for c in layout.columns if c not in table.column_names]
        if missing:
            raise SchemaError(f"no column {missing[0]!r}; the rows have {', '.join(table.column_names)}")
        users = user_ids(table[layout.user], replace(events, user_column=layout.user))
        request_ts = event_times(table[layout.request_ts], layout.request_ts)
        request_id = np.arange(first_row, first_row + len(table), dtype=np.int64)
        if layout.request_id is not None:
            request_id = _request_ids(table[layout.request_id], layout.request_id)
        lists = {"": table[layout.event_ts]} | {n: table[c] for c, n in layout.events.items()}
        lengths = {n: np.asarray(pc.fill_null(pc.list_value_length(c), 0)).astype(np.int64) for n, c in lists.items()}
        ragged = np.zeros(len(table), np.bool_)
        for some in lengths.values():
            ragged |= some != lengths[""]
        kept = np.where(ragged, 0, lengths[""])
        flat = {n: _flat(c, lengths[n], ragged) for n, c in lists.items()}
        columns = {}
        for spec in events.columns:
            columns[spec.name] = typed_column(
                flat[spec.name], spec.dtype, spec.name, ragged=spec.ragged, size=spec.size
            )
        event_ts = event_times(flat[""], layout.event_ts)
        offsets = offsets_of(kept)
        if layout.newest_first:
            turned = _turned(offsets)
            event_ts, columns = event_ts[turned], {n: c.take(turned) for n, c in columns.items()}
        made = cls(request_id, users, request_ts, offsets, event_ts, columns, ragged, {}, {}, {})
        return made if examples is None else replace(made, **_beside(table, layout, examples))

    def keys(self, seed: int = _SEED) -> Words:
        """(E,) words over the values of each event; see ``event_keys``."""
        return event_keys(self.columns, len(self.event_ts), seed)


def event_keys(columns: Mapping[str, Column], n: int, seed: int = _SEED) -> Words:
    """(n,) a 64-bit word over the values of each event, whatever codes they have; the names in alphabetical order.

    Equal values have equal words; that different ones have different words is checked where it matters
    (``columns_differ``).
    """
    key = np.full(n, seed, np.uint64)
    mix = kernel("mix64")
    for name in sorted(columns):
        key = mix(mix(key) ^ _words(columns[name].decoded(), seed))
    return key


def columns_differ(a: Mapping[str, Column], i: Ints, b: Mapping[str, Column], j: Ints) -> npt.NDArray[np.bool_]:
    """(n,) whether event ``i[k]`` of a and ``j[k]`` of b differ in a value; exact, of columns that both have."""
    out = np.zeros(len(i), np.bool_)
    for name in a.keys() & b.keys():
        out |= _differ(a[name].decoded().take(i), b[name].decoded().take(j))
    return out


def _differ(a: Column, b: Column) -> npt.NDArray[np.bool_]:
    n = len(a)
    valid = [np.ones(n, np.bool_) if c.valid is None else c.valid for c in (a, b)]
    if a.offsets is not None and b.offsets is not None:
        out = np.diff(a.offsets) != np.diff(b.offsets)
        same = np.flatnonzero(~out)
        parts = [c.take(same) for c in (a, b)]
        wrong = _differ(parts[0].elements(), parts[1].elements())
        counts, bounds = offsets_of(wrong), offsets_of(np.diff(a.offsets)[same])
        out[same] = counts[bounds[1:]] > counts[bounds[:-1]]
    elif a.is_text and b.is_text:
        out = _texts_differ(a, b)
    else:
        x, y = (_bits(c.values) for c in (a, b))
        out = x != y if x.ndim == 1 else (x != y).any(axis=1)
    both = valid[0] & valid[1]
    differ: npt.NDArray[np.bool_] = np.where(both, out, valid[0] != valid[1])
    return differ


def _texts_differ(a: Column, b: Column) -> npt.NDArray[np.bool_]:
    assert a.dictionary is not None
    assert b.dictionary is not None
    if not len(a.dictionary) or not len(b.dictionary):
        return np.zeros(len(a), np.bool_)
    known = pc.index_in(b.dictionary, value_set=a.dictionary)
    code = np.asarray(pc.fill_null(known, -1))
    differ: npt.NDArray[np.bool_] = a.values != code[b.values]
    return differ


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What tells values apart: of floats their bits, so that NaN is itself."""
    return values.view(f"u{values.dtype.itemsize}") if values.dtype.kind == "f" else values


def _words(column: Column, seed: int) -> Words:
    if column.offsets is not None or column.size:
        offsets = np.arange(len(column) + 1) * column.size if column.offsets is None else column.offsets
        words = kernel("fold_words")(offsets, _words(column.elements(), seed))
    elif column.dictionary is not None:
        words = _text_words(column.dictionary, seed)[column.values] if len(column.dictionary) else 0
        words = np.broadcast_to(np.asarray(words, np.uint64), len(column))
    elif column.values.dtype.kind == "f":
        words = _bits(np.ascontiguousarray(column.values)).astype(np.uint64)
    else:
        words = column.values.astype(np.int64).view(np.uint64)
    if column.valid is not None:
        words = np.where(column.valid, words, _NULL_WORD)
    return np.ascontiguousarray(words, np.uint64)


def _text_words(dictionary: pa.Array, seed: int) -> Words:
    data = dictionary.cast(pa.large_binary())
    _, offsets, raw = data.buffers()
    at = np.frombuffer(offsets, np.int64)[data.offset : data.offset + len(data) + 1]
    values = np.frombuffer(raw, np.uint8) if raw is not None else np.empty(0, np.uint8)
    words: Words = kernel("hash_bytes")(at, values, seed).view(np.uint64)
    return words


def _flat(column: pa.ChunkedArray, lengths: Ints, ragged: npt.NDArray[np.bool_]) -> pa.ChunkedArray:
    """The elements of the rows that are not ragged."""
    flat = one_array(column).flatten()
    if ragged.any():
        flat = flat.filter(pa.array(np.repeat(~ragged, lengths)))
    return pa.chunked_array([flat])


def _turned(offsets: Ints) -> Ints:
    """Positions of the events of each row from its last to its first."""
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    turned: Ints = offsets[:-1][row] + offsets[1:][row] - 1 - np.arange(offsets[-1])
    return turned


def _request_ids(column: pa.ChunkedArray, name: str) -> Ints:
    if not pa.types.is_integer(column.type) or column.null_count:
        raise SchemaError(
            f"request ids {name!r} have type {column.type} and {column.null_count} nulls; they must be integers. "
            "Without a column of them rows are numbered: name it as context"
        )
    return Column.from_arrow(column, "int64").values


def _beside(table: pa.Table, layout: FatLayout, examples: ExampleSchema) -> dict[str, Any]:
    context = {f.name: f.dtype for f in examples.context}
    shown = {f.name: f.dtype for f in examples.candidates}
    n = len(table)
    candidates = {name: _rows(table[c], shown[name], c) for c, name in layout.candidates.items()}
    labels = {name: _rows(table[c], "int32", c) for c, name in layout.labels.items()} if candidates else {}
    if not candidates:
        candidates = {examples.item: Jagged(Column(np.empty(0, np.int64)), np.zeros(n + 1, np.int64))}
    return {
        "context": {name: _full(table[c], context[name], c) for c, name in layout.context.items()},
        "candidates": candidates,
        "labels": labels,
    }


def _rows(column: pa.ChunkedArray, dtype: str, name: str) -> Jagged:
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return Jagged(_full(column, dtype, name), np.arange(len(column) + 1))
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    return Jagged(_full(pa.chunked_array([one_array(column).flatten()]), dtype, name), offsets_of(lengths))


def _full(column: pa.ChunkedArray, dtype: str, name: str) -> Column:
    made = typed_column(column, dtype, name)
    if made.valid is not None and not made.valid.all():
        raise InputError(f"column {name!r} holds a null; fields of a request are never null: fill it, or leave it out")
    return made
