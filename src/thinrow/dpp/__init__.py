"""The reader of training batches: a fixed order, workers that rebuild, a client that merges and resumes."""

from thinrow.dpp.batch import Batch
from thinrow.dpp.budget import BatchBudget
from thinrow.dpp.client import Loader, LoaderStats, loader
from thinrow.dpp.poison import Poisoned, Quarantine
from thinrow.dpp.row_filter import RowFilter
from thinrow.dpp.spec import SessionSpec
from thinrow.dpp.stream import Follower, follow

__all__ = [
    "Batch",
    "BatchBudget",
    "Follower",
    "Loader",
    "LoaderStats",
    "Poisoned",
    "Quarantine",
    "RowFilter",
    "SessionSpec",
    "follow",
    "loader",
]
