"""Which schemas the events of one tier may have."""

from __future__ import annotations

from thinrow.core.errors import SchemaError
from thinrow.schema import ColumnSpec, EventSchema
from thinrow.schema.evolution import widens


def check_evolution(new: EventSchema, stored: EventSchema) -> None:
    """Whether events of both schemas can be read together.

    Raises:
        SchemaError: one schema id with two layouts, a column id whose dtype is not the older schema's or wider, or
            event ids of two dtypes.
    """
    if new.event_id_dtype and stored.event_id_dtype and new.event_id_dtype != stored.event_id_dtype:
        raise SchemaError(
            f"event ids are {new.event_id_dtype}, but the tier holds {stored.event_id_dtype} ids; cast the column"
        )
    held = {c.id: c for c in stored.columns}
    for c in new.columns:
        older, newer = (held.get(c.id, c), c)[:: 1 if new.schema_id >= stored.schema_id else -1]
        if not widens(older, newer):
            raise SchemaError(
                f"column {c.name!r} (id {c.id}) is {_kind(c)}, but the tier holds {_kind(held[c.id])} under this id; "
                "use a new id"
            )
    if new.schema_id == stored.schema_id and shape_of(new) != shape_of(stored):
        raise SchemaError(f"schema {new.schema_id} is stored with other columns; raise schema_id when columns change")


def shape_of(schema: EventSchema) -> tuple[object, ...]:
    """What two schemas of one id have in common."""
    return (schema.event_id_dtype, *sorted((c.id, _kind(c), c.nullable) for c in schema.columns))


def _kind(spec: ColumnSpec) -> str:
    """What a value of the column is, in words."""
    if spec.ragged:
        return f"lists of {spec.dtype}"
    return f"vectors of {spec.size} {spec.dtype}" if spec.size else spec.dtype
