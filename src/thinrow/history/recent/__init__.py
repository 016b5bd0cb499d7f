"""The recent tier: events since the last compaction, kept durably by user and arrival.

``MemoryRecent``, ``LmdbRecent`` and ``RedisRecent`` (in ``recent.redis``) implement the ``RecentTier`` protocol; one
contract suite (``thinrow.testing.recent``) holds them, and any tier of yours, to it.
"""

from thinrow.history.recent.lmdb import LmdbRecent
from thinrow.history.recent.memory import MemoryRecent
from thinrow.history.recent.tier import AppendResult, RecentRead, RecentTier, Resolve

__all__ = ["AppendResult", "LmdbRecent", "MemoryRecent", "RecentRead", "RecentTier", "Resolve"]
