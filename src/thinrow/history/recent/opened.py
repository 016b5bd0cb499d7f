"""Blocks of one kind opened in one compiled call: what a snapshot of a user or some reads.

A call that finds another kind of block among them, or anything wrong, says nothing; ``rows.decode_blocks`` then decodes
them, or says what is wrong. Worked example: one user's two blocks of 40 and 24 rows, of which the first 8 are below the
watermark: each field of the 56 rows lies in one piece of memory, and columns are views of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.history.recent.rows import CORRECTIONS, HEADER_DTYPE, Rows, layout_of
from thinrow.jagged import Column
from thinrow.jagged.column import cast_column, null_column
from thinrow.kernels import kernel
from thinrow.schema import EventSchema

Ints = npt.NDArray[np.int64]
_HEADER = HEADER_DTYPE.itemsize
_MAX_PLANS = 64
#: By ids of both schemas, which are kept so that no others get them, and flags.
_plans: dict[tuple[int, int, int], tuple[EventSchema, EventSchema, _Plan | None]] = {}


@dataclass(frozen=True, slots=True)
class _Field:
    """Attributes:
    begin, end: bytes of a row.
    dtype, size: of an element, and elements; 0 of a single value.
    null: place among the null bits, -1 of what is never null.
    """

    begin: int
    end: int
    dtype: np.dtype[np.generic]
    size: int
    null: int


class _Plan:
    """How rows that were written under one schema are read under another."""

    def __init__(self, schema: EventSchema, written: EventSchema, flags: int) -> None:
        layout = layout_of(written, flags)
        names = layout.dtype.names or ()
        offsets: Mapping[str, Any] = layout.dtype.fields or {}
        places = [offsets[name][1] for name in names]
        self.row_bytes, self.head, self.n_nulls = layout.dtype.itemsize, layout.head, len(layout.nullable)
        self.fields: Ints = np.array([*places, self.row_bytes], np.int64)
        of_name = {}
        for name, begin, end in zip(names, self.fields.tolist(), self.fields.tolist()[1:], strict=False):
            kind = layout.dtype[name]
            size = kind.shape[0] if kind.shape else 0
            null = layout.nullable.index(name) if name in layout.nullable else -1
            of_name[name] = _Field(begin, end, kind.base, size, null)
        self.event_ts, self.nulls = of_name["event_ts"], of_name.get("nulls")
        self.targets = (of_name["target_ts"], of_name["target_arrival"]) if flags & CORRECTIONS else None
        self.event_id = of_name.get("event_id")
        held = {c.id: c for c in written.columns}
        self.columns = [
            (c, of_name[f"c{c.id}"] if c.id in held else None, c.id in held and held[c.id].dtype != c.dtype)
            for c in schema.columns
        ]


def _plan(schema: EventSchema, written: EventSchema, flags: int) -> _Plan | None:
    """None where rows have parts of variable length."""
    key = id(schema), id(written), flags
    held = _plans.get(key)
    if held is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plain = not layout_of(written, flags).heaped and flags <= CORRECTIONS
        held = _plans[key] = schema, written, _Plan(schema, written, flags) if plain else None
    return held[2]


def open_blocks(
    schema: EventSchema,
    schema_of: Callable[[int], EventSchema | None],
    blocks: Ints,
    after: Ints,
    keys: list[bytes],
    values: list[bytes],
) -> tuple[Rows, Ints, Ints] | None:
    """(rows above ``after[u]`` of each user's ``blocks[u]`` blocks, arrivals, (U + 1,) offsets by user), as columns of
    ``schema``; None where blocks are of several kinds, newer than it or damaged, or have strings."""
    first = values[0]
    if len(first) < _HEADER:
        return None
    number = int.from_bytes(first[4:8], "little")
    written = schema_of(number) or (schema if number == schema.schema_id else None)
    plan = None if number > schema.schema_id or written is None else _plan(schema, written, first[1])
    if plan is None:
        return None
    parts = list(chain.from_iterable(zip(keys, values, strict=True)))
    data, lengths = b"".join(parts), np.array(list(map(len, parts)), np.int64)
    capacity = (len(data) // plan.row_bytes + 7) & ~7
    out, arrival = np.empty(capacity * plan.row_bytes, np.uint8), np.empty(capacity, np.int64)
    offsets = np.empty(len(blocks) + 1, np.int64)
    sound = kernel("open_blocks")(
        np.frombuffer(data, np.uint8), lengths, blocks, after, plan.head, plan.row_bytes, plan.fields, capacity, out,
        arrival, offsets,
    )  # fmt: skip
    if not sound:
        return None
    n = int(offsets[-1])
    bits = None
    if plan.nulls is not None:
        raw = _view(plan.nulls, out, capacity, n)
        if raw.any():
            bits = np.unpackbits(raw.reshape(n, -1), axis=1, count=plan.n_nulls, bitorder="little")

    def column(field: _Field) -> Column:
        valid = None
        if bits is not None and field.null >= 0 and bits[:, field.null].any():
            valid = bits[:, field.null] == 0
        return Column(_view(field, out, capacity, n), valid)

    columns = {}
    for spec, field, widened in plan.columns:
        if field is None:
            columns[spec.name] = null_column(spec.dtype, n, ragged=spec.ragged, size=spec.size)
        else:
            columns[spec.name] = cast_column(column(field), spec.dtype) if widened else column(field)
    event_ids = None
    if schema.event_id_dtype is not None:
        event_ids = null_column(schema.event_id_dtype, n) if plan.event_id is None else column(plan.event_id)
    targets = plan.targets and [_view(field, out, capacity, n) for field in plan.targets]
    target_ts, target_arrival = targets or (None, None)
    rows = Rows(_view(plan.event_ts, out, capacity, n), target_ts, target_arrival, event_ids, columns)
    return rows, arrival[:n], offsets


def _view(field: _Field, out: npt.NDArray[np.uint8], capacity: int, n: int) -> npt.NDArray[Any]:
    shape = (n, field.size) if field.size else (n,)
    return np.ndarray(shape, field.dtype, out, capacity * field.begin)
