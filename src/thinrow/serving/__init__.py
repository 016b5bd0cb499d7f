"""Serving: from a request to a ranked list and its impression, and the proof that training rebuilds what it read.

Class / does: ``publish`` writes a ``Release`` of a checkpoint, which servers and rankers take up; ``Ranker`` ranks and
logs impressions, with a table in memory or rows on servers (``ServerRows``); ``compare`` holds impressions against
their rebuilt inputs; ``lookups`` has the embedding servers and their client. A ranker needs torch, an embedding server
does not, so every name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinrow.core.errors import MissingExtraError

if TYPE_CHECKING:
    from thinrow.serving.parity import Parity, compare
    from thinrow.serving.ranker import Ranked, Ranker, served_schema
    from thinrow.serving.release import Release, publish
    from thinrow.serving.rows import ServerRows
    from thinrow.serving.scoring import Model

_WHERE = {
    "Model": "scoring",
    "Parity": "parity",
    "Ranked": "ranker",
    "Ranker": "ranker",
    "Release": "release",
    "ServerRows": "rows",
    "compare": "parity",
    "publish": "release",
    "served_schema": "ranker",
}

__all__ = [
    "Model",
    "Parity",
    "Ranked",
    "Ranker",
    "Release",
    "ServerRows",
    "compare",
    "publish",
    "served_schema",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinrow.serving' has no attribute {name!r}")
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise MissingExtraError("torch", "train") from error
    return getattr(importlib.import_module(f"thinrow.serving.{_WHERE[name]}"), name)
