"""Records: what an event, a version, an impression and an example are, and what a tenant reads of them."""

from thinrow.schema.event_schema import ColumnSpec, EventSchema, Trait
from thinrow.schema.evolution import SchemaChange
from thinrow.schema.example_schema import ExampleSchema, FieldSpec
from thinrow.schema.projection import Projection
from thinrow.schema.version import VERSION_DTYPE, HistoryVersion

__all__ = [
    "VERSION_DTYPE",
    "ColumnSpec",
    "EventSchema",
    "ExampleSchema",
    "FieldSpec",
    "HistoryVersion",
    "Projection",
    "SchemaChange",
    "Trait",
]
