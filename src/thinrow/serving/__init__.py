"""Serving: from a request to a ranked list and its impression, and the proof that training rebuilds what it read.

Class / does: ``Ranker`` ranks in process and logs impressions; ``compare`` holds impressions against their rebuilt
inputs.
"""

from thinrow.core.errors import MissingExtraError

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError("torch", "train") from error

from thinrow.serving.parity import Parity, compare
from thinrow.serving.ranker import Ranked, Ranker, served_schema

__all__ = ["Parity", "Ranked", "Ranker", "compare", "served_schema"]
