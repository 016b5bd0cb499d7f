"""Feature ops and plans: the same code online and offline."""

from thinrow.features.bag_of_words import BagOfWords
from thinrow.features.bucketize import Bucketize
from thinrow.features.clip import Clip
from thinrow.features.cross import Cross
from thinrow.features.custom import Custom, feature_function
from thinrow.features.dictionary_map import DictionaryMap
from thinrow.features.featurize import featurize
from thinrow.features.fill import Fill
from thinrow.features.hash import Hash
from thinrow.features.history_cross import HistoryCross, history_candidate_cross
from thinrow.features.history_match import HistoryMatch
from thinrow.features.log1p import Log1p
from thinrow.features.mod import Mod
from thinrow.features.multi_hash import MultiHash
from thinrow.features.node import EVENT_TS, REQUEST_TS, Node, Source
from thinrow.features.picture import explain, to_dot, to_svg
from thinrow.features.plan import FeaturePlan
from thinrow.features.time_delta import TimeDelta
from thinrow.features.truncate import Truncate

__all__ = [
    "EVENT_TS",
    "REQUEST_TS",
    "BagOfWords",
    "Bucketize",
    "Clip",
    "Cross",
    "Custom",
    "DictionaryMap",
    "FeaturePlan",
    "Fill",
    "Hash",
    "HistoryCross",
    "HistoryMatch",
    "Log1p",
    "Mod",
    "MultiHash",
    "Node",
    "Source",
    "TimeDelta",
    "Truncate",
    "explain",
    "feature_function",
    "featurize",
    "history_candidate_cross",
    "to_dot",
    "to_svg",
]
