"""The training path's records: impression log, outcome join, and the thin training table in Iceberg.

Every name loads its module when it is first used: pyiceberg takes most of a second to import, and a process that only
logs impressions needs none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinrow.examples.joiner import JoinReport, join_logs
    from thinrow.examples.log import ImpressionLog, OutcomeLog
    from thinrow.examples.outcomes import JoinCounts, join
    from thinrow.examples.records import ExampleBatch, Impressions, Outcomes, text_column
    from thinrow.examples.splits import SplitLog
    from thinrow.examples.streaming import IdleRule, heartbeat, join_stream
    from thinrow.examples.table import ExampleTable

_WHERE = {
    "ExampleBatch": "records",
    "ExampleTable": "table",
    "IdleRule": "streaming",
    "ImpressionLog": "log",
    "Impressions": "records",
    "JoinCounts": "outcomes",
    "JoinReport": "joiner",
    "OutcomeLog": "log",
    "Outcomes": "records",
    "SplitLog": "splits",
    "heartbeat": "streaming",
    "join": "outcomes",
    "join_logs": "joiner",
    "join_stream": "streaming",
    "text_column": "records",
}

__all__ = [
    "ExampleBatch",
    "ExampleTable",
    "IdleRule",
    "ImpressionLog",
    "Impressions",
    "JoinCounts",
    "JoinReport",
    "OutcomeLog",
    "Outcomes",
    "SplitLog",
    "heartbeat",
    "join",
    "join_logs",
    "join_stream",
    "text_column",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinrow.examples' has no attribute {name!r}")
    return getattr(importlib.import_module(f"thinrow.examples.{_WHERE[name]}"), name)
