"""Every recent tier keeps one contract."""

import pytest

from thinrow.history.recent import LmdbRecent, MemoryRecent
from thinrow.history.recent.epochs import claim_epoch
from thinrow.history.recent.redis import RedisRecent
from thinrow.storage.objects import LocalObjects
from thinrow.testing.recent import RecentTierContract
from thinrow.testing.redis_server import RedisServer
from thinrow.testing.servers import needs_redis


class TestMemoryRecent(RecentTierContract):
    durable = False

    def open_tier(self, path, schema):
        return MemoryRecent(schema)


class TestLmdbRecent(RecentTierContract):
    def open_tier(self, path, schema):
        # A map this small is full within a test, so that growth is part of the contract; sync costs time only.
        return LmdbRecent(path, schema, map_size=1 << 16, sync=False)


@needs_redis
class TestRedisRecent(RecentTierContract):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls):
        # A cluster of one refuses scripts whose keys are not of one slot.
        with RedisServer("--cluster-enabled", "yes") as server:
            server.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
            cls.redis = server
            yield

    def open_tier(self, path, schema):
        name = f"{abs(hash(path)):x}"
        objects = LocalObjects(path)
        return RedisRecent(self.redis.url(name), schema, lambda least: claim_epoch(objects, least))
