"""Serving: from a request to a ranked list and its impression, and the proof that training rebuilds what it read.

Class / does: ``Ranker`` ranks in process and logs impressions; ``compare`` holds impressions against their rebuilt
inputs; ``lookups`` has the embedding servers and their client. A ranker needs torch, an embedding server does not, so
every name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinrow.core.errors import MissingExtraError

if TYPE_CHECKING:
    from thinrow.serving.parity import Parity, compare
    from thinrow.serving.ranker import Ranked, Ranker, served_schema

_WHERE = {"Parity": "parity", "Ranked": "ranker", "Ranker": "ranker", "compare": "parity", "served_schema": "ranker"}

__all__ = ["Parity", "Ranked", "Ranker", "compare", "served_schema"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinrow.serving' has no attribute {name!r}")
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise MissingExtraError("torch", "train") from error
    return getattr(importlib.import_module(f"thinrow.serving.{_WHERE[name]}"), name)
