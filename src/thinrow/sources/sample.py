"""A schema inferred from the first events of a source, as the file that the user then edits.

Worked example: messages ``{"user": 7, "ts": 1000, "tags": ["a"], "extra": {}}`` give::

    user = "user"
    time = "ts"

    [groups.main]
    tags = { trait = "id_list", dtype = "string", nullable = true }
    # extra = struct<>: no such column can be kept; flatten it, or leave it out
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import InputError, SchemaError
from thinrow.schema import EventSchema
from thinrow.schema.event_schema import RESERVED_NAMES
from thinrow.sources.source import SOURCE_ID, SOURCE_KEY, SOURCE_TS
from thinrow.sources.wanted import TIMES

_LIKELY: Mapping[str, Sequence[str]] = {
    "user": ("user", "user_id", "userid", "uid", "member_id", "customer_id", "household_id", "author"),
    "time": ("ts", "time", "timestamp", "event_ts", "event_time", "occurred_at", "created_at", "date"),
    "event_id": ("event_id", "eventid", "id", "uuid"),
    "supersedes": ("supersedes", "corrects", "replaces"),
    "arrival_time": ("arrival_ts", "arrival_time", "received_at", "committed_at"),
}


class Sampled(Protocol):
    """A source that shows some of its events."""

    def sample(self, n: int) -> pa.Table:
        """About ``n`` events, all columns, of types that Arrow infers. No position moves."""
        ...


def settled(table: pa.Table) -> pa.Table:
    """Columns of ISO 8601 texts as timestamps."""
    for i, field in enumerate(table.schema):
        column = table.column(i)
        if pa.types.is_string(field.type) and column.null_count < len(column):
            try:
                table = table.set_column(i, field.name, pc.cast(column, TIMES))
            except pa.ArrowException:
                continue
    return table


def roles_of(arrow: pa.Schema, given: Mapping[str, str | None]) -> dict[str, str]:
    """Which column is the user, the time and so on: as ``given``, else by its name."""
    found = {role: name for role, name in given.items() if name}
    for role, names in _LIKELY.items():
        if role not in found:
            likely = [n for n in names if n in arrow.names and n not in found.values()]
            if likely:
                found[role] = likely[0]
    if "event_id" not in found:
        found.pop("supersedes", None)
    return found


def schema_file(table: pa.Table, given: Mapping[str, str | None]) -> str:
    """The TOML of a schema for events like ``table``'s.

    Raises:
        InputError: no column looks like the user or the time, and none is given.
    """
    arrow = settled(table).schema
    roles = roles_of(arrow, given)
    for role in ("user", "time"):
        if role not in roles:
            raise InputError(f"no column looks like the {role}; name one of {', '.join(arrow.names)}: --{role} COLUMN")
    lines = [f"{role} = {json.dumps(name)}" for role, name in roles.items()]
    lines += ["", "[groups.main]"]
    for field in arrow:
        if field.name in roles.values():
            continue
        name = field.name if re.fullmatch(r"[A-Za-z0-9_-]+", field.name) else json.dumps(field.name)
        try:
            if field.name in RESERVED_NAMES:
                raise SchemaError("its name is reserved; rename it")
            if pa.types.is_null(field.type):
                raise SchemaError("it is null in all that was looked at; give trait and dtype")
            two = pa.schema([pa.field("u", pa.int64()), pa.field("t", pa.int64()), field])
            spec = EventSchema.infer(two, user="u", time="t").columns[0]
        except SchemaError as e:
            what = str(e).partition(";")
            lines.append(f"# {name}: {' '.join(what[0].split())};{what[2]}")
            continue
        size = f", size = {spec.size}" if spec.size else ""
        lines.append(f'{name} = {{ trait = "{spec.trait.value}", dtype = "{spec.dtype}", nullable = true{size} }}')
    return "\n".join(lines) + "\n"


def arrow_of(table: pa.Table) -> pa.Schema:
    """The Arrow schema that a schema file is read against, with what a source adds."""
    fields = list(settled(table).schema)
    fields += [pa.field(SOURCE_ID, pa.string()), pa.field(SOURCE_KEY, pa.string()), pa.field(SOURCE_TS, pa.int64())]
    return pa.schema([f for i, f in enumerate(fields) if f.name not in [g.name for g in fields[:i]]])
