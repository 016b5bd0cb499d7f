"""The snapshot service: histories for rankers in any language, and the log of what they showed.

Every name loads its module when it is first used: the service needs the extra ``[serve]``, the rest does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinrow.online.app import Limits, create_app
    from thinrow.online.journal import Journal
    from thinrow.online.outcome_fields import OutcomeFields
    from thinrow.online.outcome_ingest import OutcomeIngest, OutcomeOptions
    from thinrow.online.outcome_retry import outcome_letters, retry_outcomes
    from thinrow.online.snapshots import AsyncSnapshots
    from thinrow.online.tables import TableWriter

_WHERE = {
    "AsyncSnapshots": "snapshots",
    "Journal": "journal",
    "Limits": "app",
    "OutcomeFields": "outcome_fields",
    "OutcomeIngest": "outcome_ingest",
    "OutcomeOptions": "outcome_ingest",
    "TableWriter": "tables",
    "create_app": "app",
    "outcome_letters": "outcome_retry",
    "retry_outcomes": "outcome_retry",
}

__all__ = [
    "AsyncSnapshots",
    "Journal",
    "Limits",
    "OutcomeFields",
    "OutcomeIngest",
    "OutcomeOptions",
    "TableWriter",
    "create_app",
    "outcome_letters",
    "retry_outcomes",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinrow.online' has no attribute {name!r}")
    return getattr(importlib.import_module(f"thinrow.online.{_WHERE[name]}"), name)
