"""Models as plain torch modules: sequence models (HSTU, MTGR, ARGUS) and baselines (DLRM, Wukong, SIM).

Class / reads / gives: ``RankerInputs`` (a plan's outputs as tensors) -> one of ``MODELS`` -> a logit a candidate, or
the losses of the items that came next. ``RankerSpec`` holds what a ranker's weights mean, ``SavedRanker`` is one that a
checkpoint held.
"""

from thinrow.core.errors import MissingExtraError

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError("torch", "train") from error

from thinrow.models.argus import ARGUS, ARGUSConfig
from thinrow.models.dlrm import DLRM, DLRMConfig
from thinrow.models.hstu import HSTUConfig, HSTURanker, MTGRConfig
from thinrow.models.inputs import InputSpec, RankerInputs
from thinrow.models.retrieval import HSTURetrieval, RetrievalConfig
from thinrow.models.saved import SavedRanker
from thinrow.models.sim import SIM, SIMConfig
from thinrow.models.spec import MODELS, TABLE, RankerSpec, saved, weights_of
from thinrow.models.wukong import Wukong, WukongConfig

__all__ = [
    "ARGUS",
    "DLRM",
    "MODELS",
    "SIM",
    "TABLE",
    "ARGUSConfig",
    "DLRMConfig",
    "HSTUConfig",
    "HSTURanker",
    "HSTURetrieval",
    "InputSpec",
    "MTGRConfig",
    "RankerInputs",
    "RankerSpec",
    "RetrievalConfig",
    "SIMConfig",
    "SavedRanker",
    "Wukong",
    "WukongConfig",
    "saved",
    "weights_of",
]
