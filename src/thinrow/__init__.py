"""thinrow: ultra-long user histories, stored once and rebuilt exactly.

Everything that a user needs first is here and loads when it is named::

    store = thinrow.create("store", thinrow.EventSchema.infer(table.schema, user="user", time="ts"))
    store.append(table)
    store.compact()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinrow.dpp import loader
    from thinrow.examples import ExampleTable
    from thinrow.history.erase import EventsOf, Retention
    from thinrow.history.reconstruct import reconstruct
    from thinrow.history.store import HistoryStore
    from thinrow.schema import ColumnSpec, EventSchema, ExampleSchema, FieldSpec, HistoryVersion, Projection, Trait

    create, open_store = HistoryStore.create, HistoryStore.open

__version__ = "0.1.0"

_WHERE = {
    "ColumnSpec": "schema",
    "EventSchema": "schema",
    "ExampleSchema": "schema",
    "FieldSpec": "schema",
    "HistoryVersion": "schema",
    "Projection": "schema",
    "Trait": "schema",
    "EventsOf": "history.erase",
    "Retention": "history.erase",
    "HistoryStore": "history.store",
    "reconstruct": "history.reconstruct",
    "ExampleTable": "examples",
    "loader": "dpp",
}

__all__ = [
    "ColumnSpec",
    "EventSchema",
    "EventsOf",
    "ExampleSchema",
    "ExampleTable",
    "FieldSpec",
    "HistoryStore",
    "HistoryVersion",
    "Projection",
    "Retention",
    "Trait",
    "create",
    "loader",
    "open_store",
    "reconstruct",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("create", "open_store"):
        store = importlib.import_module("thinrow.history.store").HistoryStore
        return store.create if name == "create" else store.open
    if name not in _WHERE:
        raise AttributeError(f"module 'thinrow' has no attribute {name!r}")
    return getattr(importlib.import_module(f"thinrow.{_WHERE[name]}"), name)
