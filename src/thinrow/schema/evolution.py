"""Schema evolution: columns are added, dropped, renamed and widened, and no stored event is rewritten.

A column is its id. An id is never given twice, also after a drop, so that data of any age is read by ids alone.
Worked example: schema 1 has ``price`` (id 1, float32) and ``shop`` (id 2). One evolution renames and widens ``price``,
drops ``shop`` and adds ``city``; schema 2 has ``cost`` (id 1, float64) and ``city`` (id 3), and the change is::

    SchemaChange(schema_id=2, removed=(price 1 float32, shop 2), added=(cost 1 float64, city 3))

``cost`` of an event that was written under schema 1 is its ``price``, cast; ``city`` is null. Undoing the changes one
by one gives every earlier schema (``schema_at``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from thinrow.core.check import integer
from thinrow.core.errors import SchemaError
from thinrow.schema.event_schema import ColumnSpec, DType, EventSchema, Trait, check_new

#: dtype -> the dtypes that hold each of its values exactly.
WIDER: dict[str, tuple[str, ...]] = {
    "int8": ("int16", "int32", "int64"),
    "int16": ("int32", "int64"),
    "int32": ("int64",),
    "float32": ("float64",),
}


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """What made schema ``schema_id`` of the one before it: ``removed`` and ``added`` columns at ``created_ms``; a
    column that was renamed or widened is in both, under one id."""

    schema_id: int
    created_ms: int
    removed: tuple[ColumnSpec, ...]
    added: tuple[ColumnSpec, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; ``from_dict`` reverses it."""
        head = {"schema_id": self.schema_id, "created_ms": self.created_ms}
        return head | {"removed": _to_dicts(self.removed), "added": _to_dicts(self.added)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SchemaChange:
        """Reverse of ``to_dict``. Raises SchemaError on anything else."""
        try:
            parts = (EventSchema.from_dict({"columns": data[k]}).columns for k in ("removed", "added"))
            return cls(int(data["schema_id"]), int(data["created_ms"]), *parts)
        except (KeyError, TypeError, ValueError) as e:
            raise SchemaError(f"not a schema change: {e}") from e

    def describe(self) -> list[str]:
        """The change in words, one line a column."""
        before, after = ({c.id: c for c in side} for side in (self.removed, self.added))
        lines = [f"drop {c.name} (id {c.id})" for c in self.removed if c.id not in after]
        for c in self.added:
            old = before.get(c.id)
            if old is None:
                lines.append(f"add {c.name} (id {c.id}): {c.trait.value} {c.dtype} in group {c.group}")
                continue
            if old.name != c.name:
                lines.append(f"rename {old.name} to {c.name} (id {c.id})")
            if old.dtype != c.dtype:
                lines.append(f"widen {c.name} (id {c.id}) from {old.dtype} to {c.dtype}")
            if old.nullable != c.nullable:
                lines.append(f"let {c.name} (id {c.id}) be null")
        return lines


@dataclass(frozen=True, slots=True)
class Evolution:
    """Changes that are asked for, by the names that columns have now.

    Attributes:
        add: name -> what a schema file says of a column: ``{"trait": ..., "dtype": ..., "group": ...}``.
        drop: names.
        rename: name -> new name.
        widen: name -> new dtype (``WIDER``).
        nullable: names of columns that may be null from now on.
    """

    add: Mapping[str, Mapping[str, Any]]
    drop: Sequence[str]
    rename: Mapping[str, str]
    widen: Mapping[str, str]
    nullable: Sequence[str]

    def apply(
        self, schema: EventSchema, log: Sequence[SchemaChange], created_ms: int
    ) -> tuple[EventSchema, SchemaChange]:
        """The next schema, and the change that makes it.

        Raises:
            SchemaError: a column is unknown, a name is taken, a dtype is not wider, an added column could not be null,
                no column would be left, nothing would change, or a new name is none (``check_new``).
        """
        for name in (*self.drop, *self.rename, *self.widen, *self.nullable):
            schema.column(name)
        both = set(self.drop) & {*self.rename, *self.widen, *self.nullable}
        if both:
            raise SchemaError(f"column {min(both)!r} is dropped and changed at once; do one of the two")
        columns = [self._changed(c) for c in schema.columns if c.name not in self.drop]
        next_id = highest_id(schema, log) + 1
        columns += [_added(name, spec, next_id + i) for i, (name, spec) in enumerate(self.add.items())]
        if not columns:
            raise SchemaError(f"dropping {', '.join(self.drop)} would leave no column; keep one, or add one")
        new = replace(schema, columns=tuple(columns), schema_id=schema.schema_id + 1)
        kept = set(schema.columns) & set(columns)
        removed, added = (tuple(c for c in s.columns if c not in kept) for s in (schema, new))
        if not removed and not added:
            raise SchemaError(f"schema {schema.schema_id} would not change; add, drop, rename or widen a column")
        named = {(c.name, c.group) for c in schema.columns}
        check_new(c for c in added if (c.name, c.group) not in named)
        return new, SchemaChange(new.schema_id, created_ms, removed, added)

    def _changed(self, column: ColumnSpec) -> ColumnSpec:
        dtype = self.widen.get(column.name, column.dtype)
        changed = replace(
            column,
            name=self.rename.get(column.name, column.name),
            nullable=column.nullable or column.name in self.nullable,
        )
        if dtype == column.dtype:
            return changed
        if dtype not in WIDER.get(column.dtype, ()) or column.trait is Trait.BITMAP:
            what = "a bitmap of " * (column.trait is Trait.BITMAP) + column.dtype
            wider = ("" if column.trait is Trait.BITMAP else ", ".join(WIDER.get(column.dtype, ()))) or "nothing else"
            raise SchemaError(
                f"column {column.name!r} is {what} and cannot become {dtype!r}: {what} widens to {wider}; "
                "add a column instead, and backfill it"
            )
        return replace(changed, dtype=cast(DType, dtype))


def _added(name: str, spec: Mapping[str, Any], column_id: int) -> ColumnSpec:
    if not isinstance(spec, Mapping) or not {"trait", "dtype", "group"} <= set(spec):
        raise SchemaError(f'column {name!r}: say {{ trait = "numeric", dtype = "float32", group = "GROUP" }} of it')
    if spec.get("nullable", True) is not True:
        raise SchemaError(f"column {name!r}: nullable is {spec['nullable']!r}; old events lack it, leave nullable out")
    if "id" in spec:
        raise SchemaError(f"column {name!r}: id is {spec['id']!r}; ids are given out by the store, leave it out")
    try:
        trait = Trait(spec["trait"])
    except ValueError:
        known = ", ".join(t.value for t in Trait)
        raise SchemaError(f"column {name!r}: unknown trait {spec['trait']!r}; known: {known}") from None
    try:
        return ColumnSpec(**{**spec, "trait": trait, "id": column_id, "name": name, "nullable": True})
    except TypeError as e:
        raise SchemaError(f"column {name!r}: {e}; say trait, dtype and group of it") from e


def widens(old: ColumnSpec, new: ColumnSpec) -> bool:
    """Whether every value of ``old`` is one of ``new``, a column of the same id: of the same dtype, or a wider one. A
    bitmap has no wider one: its highest flag would become the sign of the number."""
    if (old.ragged, old.size) != (new.ragged, new.size):
        return False
    return old.dtype == new.dtype or (new.dtype in WIDER.get(old.dtype, ()) and old.trait is not Trait.BITMAP)


def highest_id(schema: EventSchema, log: Sequence[SchemaChange]) -> int:
    """The highest column id that a store ever gave out; 0 where it never had a column."""
    ever = (schema.columns, *(c.removed for c in log), *(c.added for c in log))
    return max((c.id for columns in ever for c in columns), default=0)


def schema_at(schema: EventSchema, log: Sequence[SchemaChange], schema_id: int) -> EventSchema:
    """Schema ``schema_id`` of a store whose schema is ``schema`` and whose changes, oldest first, are ``log``.

    Dropped columns stand at the end, else the order is today's.

    Raises:
        SchemaError: there was no such schema.
        InputError: ``schema_id`` is no number.
    """
    integer(0)(schema_id, "schema_id")
    for change in reversed(log):
        if schema.schema_id <= schema_id:
            break
        old = {c.id: c for c in change.removed}
        new = {c.id for c in change.added}
        kept = [old.pop(c.id, c) for c in schema.columns if c.id in old or c.id not in new]
        schema = replace(schema, columns=(*kept, *old.values()), schema_id=change.schema_id - 1)
    if schema.schema_id != schema_id:
        known = f"{log[0].schema_id - 1} to {log[-1].schema_id}" if log else f"only {schema.schema_id}"
        raise SchemaError(f"no schema {schema_id} in this store; it had {known}")
    return schema


def fitting(schema: EventSchema, log: Sequence[SchemaChange], names: Collection[str]) -> EventSchema:
    """The newest of a store's schemas all of whose columns are among ``names``, today's ``schema`` where none is: who
    does not know a new column, or the new name of one, may go on. ``log`` as for ``schema_at``.

    Not taken, nor those before it, is a schema that lacks a column of a later one which is among ``names``, or in which
    such a name is another column: its values would be dropped, or go to the wrong column."""
    found, later = schema, set[tuple[str, int]]()
    for change in (*reversed(log), None):
        here = {c.name: c.id for c in found.columns}
        if all(name in names for name in here):
            return found if all(here.get(name) == id_ for name, id_ in later if name in names) else schema
        if change is not None:
            later |= here.items()
            found = schema_at(found, [change], change.schema_id - 1)
    return schema


def _to_dicts(columns: tuple[ColumnSpec, ...]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = EventSchema(columns).to_dict()["columns"]
    return found
