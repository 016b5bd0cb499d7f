"""Projection: what one tenant reads of a history."""

from __future__ import annotations

from dataclasses import dataclass

from thinrow.core.errors import InputError, SchemaError
from thinrow.schema.event_schema import ColumnSpec, EventSchema


@dataclass(frozen=True, slots=True)
class Projection:
    """Columns, length and age that a model needs; pushed down to byte ranges.

    Attributes:
        columns: names of columns; None for all of ``groups``, or all there are.
        groups: names of feature groups, added to ``columns``.
        max_len: the *newest* n visible events; None for all.
        horizon_ms: only events with ``event_ts >= request_ts - horizon_ms`` (inclusive); None for all.
    """

    columns: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    max_len: int | None = None
    horizon_ms: int | None = None

    def __post_init__(self) -> None:
        for name, names in (("columns", self.columns), ("groups", self.groups)):
            if isinstance(names, str):
                raise InputError(f"{name}={names!r} is one string; give a tuple of names: {name}=({names!r},)")
        for name, value, least in (("max_len", self.max_len, 1), ("horizon_ms", self.horizon_ms, 0)):
            if value is not None and value < least:
                raise InputError(f"{name}={value}; it must be {least} or more, or None for no bound")

    def resolve(self, schema: EventSchema) -> tuple[ColumnSpec, ...]:
        """The columns asked for, in schema order. Raises SchemaError on an unknown column or group."""
        for name in self.columns or ():
            schema.column(name)
        for group in self.groups or ():
            if group not in schema.groups:
                raise SchemaError(f"no feature group {group!r}; the schema has {', '.join(schema.groups)}")
        if self.columns is None and self.groups is None:
            return schema.columns
        return tuple(c for c in schema.columns if c.name in (self.columns or ()) or c.group in (self.groups or ()))
