"""Feature ops and plans: the same code online and offline."""

from thinrow.features.bucketize import Bucketize
from thinrow.features.cross import Cross
from thinrow.features.featurize import featurize
from thinrow.features.hash import Hash
from thinrow.features.history_cross import HistoryCross, history_candidate_cross
from thinrow.features.history_match import HistoryMatch
from thinrow.features.mod import Mod
from thinrow.features.node import Node, Source
from thinrow.features.plan import FeaturePlan
from thinrow.features.truncate import Truncate

__all__ = [
    "Bucketize",
    "Cross",
    "FeaturePlan",
    "Hash",
    "HistoryCross",
    "HistoryMatch",
    "Mod",
    "Node",
    "Source",
    "Truncate",
    "featurize",
    "history_candidate_cross",
]
