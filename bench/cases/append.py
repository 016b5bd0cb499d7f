"""Appending to the recent tier, by tier, batch size and durability, against plain stores that write the same bytes.

A call has 1, 100 or 1,000 users with ten events each, with event ids (which every tier checks against all that it has
seen) or without. Contestants write the same calls into fresh stores, round by round.

- ``lmdb``, ``redis``: the tiers: rows are checked, ids looked up, numbered, encoded, stored, acknowledged.
- ``raw_lmdb``, ``raw_redis``: the same by hand: rows packed one by one, numbered, ids looked up, stored, acknowledged.
- ``ready_lmdb``, ``ready_redis``: the very bytes that the tier stored, ready-made, and nothing else: a floor under all.

Both Redis peers use the tier's own client, which is faster than redis-py's pipeline. ``alone_us`` are what a call
cannot go below, in microseconds: a write transaction of LMDB that puts one value, a round trip to Redis, a compiled
call of six arrays, a hundred Python calls.
``vs_raw_lmdb.<durability>.<batch>.<ids>`` are events a second of ours over theirs.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from bench.datagen.histories import SCHEMA
from bench.harness import Options, Result
from bench.peers.raw_kv import Call, ReadyLmdb, ReadyRedis, RowsLmdb, RowsRedis, recorded
from thinrow.history.recent import LmdbRecent, MemoryRecent, RecentTier
from thinrow.history.recent.redis import RedisRecent
from thinrow.history.recent.redis_link import RedisLink, RedisLocation
from thinrow.jagged import Column
from thinrow.kernels import kernel
from thinrow.schema import EventSchema
from thinrow.testing.redis_server import MISSING, RedisServer, redis_is_installed

_EVENTS = 10
_USERS = 20_000
#: Users a call -> calls a round.
_BATCHES = {1: 300, 100: 40, 1_000: 10}
_QUICK = {1: 10, 100: 2}
Run = Callable[[], float]


def run(options: Options) -> Result:
    """All tiers, batches and durabilities."""
    rounds = options.rounds or (1 if options.quick else 5)
    batches = _QUICK if options.quick else _BATCHES
    result = Result(
        "append", {"events_a_user": _EVENTS, "rounds": rounds, "calls": {str(k): v for k, v in batches.items()}}
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.work)))
        servers: dict[str, RedisServer] = {}
        if redis_is_installed():
            servers = {d: stack.enter_context(RedisServer(appendfsync=d)) for d in ("always", "everysec")}
        else:
            result.skip("redis", MISSING)
        result.figures["alone_us"] = _alone(folder / "alone", servers)
        for users, n_calls in batches.items():
            for ids in (True, False):
                calls = _calls(users, n_calls, ids)
                name = f"batch_{users}.{'ids' if ids else 'no_ids'}"
                _compare(result, name, calls, folder / name, servers, rounds)
    return result


def _alone(folder: Path, servers: dict[str, RedisServer]) -> dict[str, float]:
    """What parts of any append take alone, in microseconds."""
    folder.mkdir(parents=True)
    with lmdb.open(str(folder), sync=False) as env:

        def transaction() -> None:
            with env.begin(write=True) as txn:
                txn.put(b"key", b"value")

        works: dict[str, Callable[[], object]] = {"lmdb_transaction": transaction}
        row = np.zeros(1, np.int64)
        works["compiled_call"] = partial(kernel("follows"), row, row, np.zeros(2, np.int64), row, row, row)
        works["100_python_calls"] = hundred_calls
        if servers:
            link = RedisLink(RedisLocation("127.0.0.1", servers["everysec"].port))
            works["redis_round_trip"] = partial(link.ask, b"PING")
        found = microseconds(works)
        if servers:
            link.close()
    return found


def microseconds(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """What each call takes alone, warm."""
    found = {}
    for name, work in works.items():
        work()
        seen = []
        for _ in range(7):
            since = time.perf_counter()
            for _ in range(200):
                work()
            seen.append((time.perf_counter() - since) / 200)
        found[name] = round(statistics.median(seen) * 1e6, 2)
    return found


def hundred_calls() -> None:
    """Of a function that does nothing."""
    for _ in range(100):
        _nothing()


def _nothing() -> None:
    pass


def _calls(users: int, n_calls: int, ids: bool) -> list[Call]:
    rng = np.random.default_rng(users)
    calls = []
    for i in range(n_calls):
        who = np.repeat(np.sort(rng.choice(_USERS, users, replace=False)), _EVENTS)
        n = len(who)
        columns = {
            "item": rng.integers(0, 1 << 40, n),
            "action": rng.integers(0, 16, n),
            "surface": rng.integers(0, 32, n),
            "dwell": rng.integers(0, 65_000, n),
            "price": rng.integers(1, 1_000_000, n) / np.float32(100),
        }
        typed = {c.name: Column(columns[c.name].astype(c.numpy_dtype)) for c in SCHEMA.columns}
        names = Column(np.arange(n, dtype=np.int64) + i * 1_000_000) if ids else None
        calls.append(Call(who, np.arange(n, dtype=np.int64) + i, typed, names))
    return calls


def _schema(calls: Sequence[Call]) -> EventSchema:
    if calls[0].event_ids is None:
        return SCHEMA
    return EventSchema(SCHEMA.columns, event_id_column="id", event_id_dtype="int64")


def _compare(
    result: Result, name: str, calls: list[Call], folder: Path, servers: dict[str, RedisServer], rounds: int
) -> None:
    schema, n = _schema(calls), sum(len(c.users) for c in calls)
    written = recorded(folder / "recorded", schema, calls)
    runs: dict[str, Run] = {"memory": partial(_timed, lambda: _Tier(MemoryRecent(schema)), calls)}
    for durability, sync in (("sync", True), ("no_sync", False)):
        path = folder / "store"
        ours = partial(_lmdb_tier, path, schema, sync)
        runs |= {
            f"lmdb.{durability}": partial(_timed, ours, calls),
            f"raw_lmdb.{durability}": partial(_timed, partial(_emptied, path, RowsLmdb, sync), calls),
            f"ready_lmdb.{durability}": partial(_timed, partial(_emptied, path, ReadyLmdb, sync), written),
        }
    for durability, server in servers.items():
        runs |= {
            f"redis.{durability}": partial(_timed, partial(_redis_tier, server, schema, durability), calls),
            f"raw_redis.{durability}": partial(_timed, partial(_flushed, server, RowsRedis), calls),
            f"ready_redis.{durability}": partial(_timed, partial(_flushed, server, ReadyRedis), written),
        }
    seen: dict[str, list[float]] = {key: [] for key in runs}
    for i in range(rounds + 1):
        for key, work in runs.items():
            seconds = work()
            if i:
                seen[key].append(n / seconds)
    rate = {key: statistics.median(values) for key, values in seen.items()}
    result.figures[name] = {
        k: {"median": round(rate[k]), "min": round(min(v)), "max": round(max(v))} for k, v in seen.items()
    }
    for key in rate:
        peer, _, durability = key.partition(".")
        kind, _, store = peer.partition("_")
        if store:
            result.ratios[f"vs_{kind}_{store}.{durability}.{name}"] = rate[f"{store}.{durability}"] / rate[key]


class _Tier:
    """A tier with the face of the peers."""

    def __init__(self, tier: RecentTier) -> None:
        self._tier = tier
        self.close = tier.close

    def write(self, call: Call) -> None:
        self._tier.append(call.users, call.event_ts, call.columns, call.event_ids)


def _lmdb_tier(path: Path, schema: EventSchema, sync: bool) -> _Tier:
    shutil.rmtree(path, ignore_errors=True)
    return _Tier(LmdbRecent(path, schema, sync=sync))


def _redis_tier(server: RedisServer, schema: EventSchema, durability: str) -> _Tier:
    server.ask("FLUSHALL")
    return _Tier(RedisRecent(server.url("bench", durability=durability), schema, lambda least: least))


def _emptied(path: Path, peer: Callable[[Path, bool], Any], sync: bool) -> Any:
    shutil.rmtree(path, ignore_errors=True)
    return peer(path, sync)


def _flushed(server: RedisServer, peer: Callable[[int], Any]) -> Any:
    server.ask("FLUSHALL")
    return peer(server.port)


def _timed(opened: Callable[[], Any], calls: Sequence[Any]) -> float:
    store = opened()
    since = time.perf_counter()
    for call in calls:
        store.write(call)
    took = time.perf_counter() - since
    store.close()
    return took
