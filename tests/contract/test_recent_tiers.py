"""Every recent tier keeps one contract."""

from thinrow.history.recent import LmdbRecent, MemoryRecent
from thinrow.testing.recent import RecentTierContract


class TestMemoryRecent(RecentTierContract):
    durable = False

    def open_tier(self, path, schema):
        return MemoryRecent(schema)


class TestLmdbRecent(RecentTierContract):
    def open_tier(self, path, schema):
        # A map this small is full within a test, so that growth is part of the contract; sync costs time only.
        return LmdbRecent(path, schema, map_size=1 << 16, sync=False)
