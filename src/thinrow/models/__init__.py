"""Models as plain torch modules: an HSTU ranker and a pooled-history DLRM.

Class / reads / gives: ``RankerInputs`` (a plan's outputs as tensors) -> ``HSTURanker`` or ``DLRM`` -> a logit a
candidate. ``RankerSpec`` holds what a ranker's weights mean, ``SavedRanker`` is one that a checkpoint held.
"""

from thinrow.core.errors import MissingExtraError

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError("torch", "train") from error

from thinrow.models.dlrm import DLRM, DLRMConfig
from thinrow.models.hstu import HSTUConfig, HSTURanker
from thinrow.models.inputs import InputSpec, RankerInputs
from thinrow.models.saved import SavedRanker
from thinrow.models.spec import MODELS, TABLE, RankerSpec, saved, weights_of

__all__ = [
    "DLRM",
    "MODELS",
    "TABLE",
    "DLRMConfig",
    "HSTUConfig",
    "HSTURanker",
    "InputSpec",
    "RankerInputs",
    "RankerSpec",
    "SavedRanker",
    "saved",
    "weights_of",
]
