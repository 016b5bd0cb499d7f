"""What a live ranker waits for: the newest events of a user, the last 64 of them recent, as columns in memory.

The archive holds all events but the newest 64 of each user, which are in the recent tier. Contestants take turns, in an
order that is drawn anew, at the same random requests, one user at a time (``one``) and 64 users a call, as a service
gathers them (``batch_64``); one thread, warm files:

- ``thinrow.lmdb``, ``thinrow.redis``: ``store.read``: pin, recent events, checked archive, merged. It makes no version:
  ``store.snapshot`` does, for what is logged.
- ``parquet_redis``: the pipeline that most begin with: recent events packed in a Redis list a user, older ones in a
  Parquet table sorted by user (zstd, row groups of 64 Ki rows, read through an open dataset with one filter a call).
- ``lmdb``: an LMDB that holds everything, recent or not, as stripes of 256 events, which are copied out. It checks
  nothing, knows no version, no time of the request and no late or hidden event; ``lmdb_crc`` computes a CRC-32 of each
  stripe as well, as whoever trusts no disk would.

``alone_us`` are what a read cannot go below, in microseconds: a read transaction of LMDB with one look-up, a compiled
call of six arrays, six columns as arrays over memory that is there, a hundred Python calls, a round trip to Redis.
``vs_<peer>.<tier>.<one or batch_64>.newest_<n>.p50`` are their time a call over ours: 1 is as fast, more is faster.
"""

from __future__ import annotations

import copy
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from bench.cases.append import hundred_calls, microseconds
from bench.datagen.datasets import Histories, Ints, Work, load
from bench.datagen.histories import HistoriesSpec
from bench.datagen.requests import Batch
from bench.harness import Options, Result
from bench.peers.lmdb import Lmdb
from bench.peers.peer import new_out
from thinrow.history.recent.redis_link import RedisLink, RedisLocation, pack
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column
from thinrow.kernels import kernel
from thinrow.schema import Projection
from thinrow.testing.redis_server import MISSING, RedisServer, redis_is_installed

_RECENT = 64
_NEWEST = (200, 4_096)
_SPEC = HistoriesSpec(users=400, events=1_000_000, longest=20_000)
_BATCH = 64
#: Delivers the newest n of each of distinct users, ascending; how many events that were.
Read = Callable[[Ints, int], int]


def run(options: Options) -> Result:
    """Random users, one and many a call."""
    rounds = options.rounds or (1 if options.quick else 3)
    with ExitStack() as stack:
        work = stack.enter_context(Work(options.work))
        data = load("synthetic", work, quick=options.quick, spec=None if options.quick else _SPEC)
        requests = 40 if options.quick else 300
        result = Result("snapshot", {**data.parameters, "recent": _RECENT, "requests": requests, "rounds": rounds})
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=work.path)))
        contestants: dict[str, Read] = {}
        archived, recent = _split(data)
        contestants["thinrow.lmdb"] = _thinrow(stack, folder / "lmdb", data, archived, recent, None)
        contestants["lmdb"], contestants["lmdb_crc"] = _lmdb(stack, work, data)
        if redis_is_installed():
            server = stack.enter_context(RedisServer())
            url = server.url("bench")
            contestants["thinrow.redis"] = _thinrow(stack, folder / "redis", data, archived, recent, url)
            contestants["parquet_redis"] = _parquet_redis(stack, folder, server.port, archived, recent)
        else:
            result.skip("redis", MISSING)
        result.figures["alone_us"] = _alone(folder / "alone", server.port if redis_is_installed() else None)
        rng = np.random.default_rng(3)
        size = min(_BATCH, data.n_users)
        asked = {
            "one": [rng.integers(0, data.n_users, 1) for _ in range(requests)],
            f"batch_{_BATCH}": [np.sort(rng.permutation(data.n_users)[:size]) for _ in range(requests // 10)],
        }
        for name, calls in asked.items():
            for newest in _NEWEST:
                _compare(result, contestants, f"{name}.newest_{newest}", calls, newest, rounds)
    return result


def _alone(folder: Path, redis_port: int | None) -> dict[str, float]:
    """What parts of any read take alone, in microseconds."""
    folder.mkdir()
    with lmdb.open(str(folder), sync=False) as env, ExitStack() as stack:
        with env.begin(write=True) as txn:
            txn.put(b"key", b"value")

        def look_up() -> None:
            with env.begin() as txn:
                txn.get(b"key")

        data, row = np.empty(200 * 8 * 6, np.uint8), np.zeros(1, np.int64)

        def six_columns() -> None:
            for i in range(6):
                Column(np.ndarray((200,), np.int64, data, 1_600 * i))

        works: dict[str, Callable[[], object]] = {
            "lmdb_look_up": look_up,
            "compiled_call": partial(kernel("follows"), row, row, np.zeros(2, np.int64), row, row, row),
            "six_columns": six_columns,
            "100_python_calls": hundred_calls,
        }
        if redis_port is not None:
            link = RedisLink(RedisLocation("127.0.0.1", redis_port))
            stack.callback(link.close)
            works["redis_round_trip"] = partial(link.ask, b"PING")
        return microseconds(works)


def _compare(
    result: Result, contestants: dict[str, Read], variant: str, calls: list[Ints], newest: int, rounds: int
) -> None:
    delivered = {name: [read(users, newest) for users in calls[:20]] for name, read in contestants.items()}
    assert len({tuple(d) for d in delivered.values()}) == 1, delivered
    times: dict[str, list[float]] = {name: [] for name in contestants}
    # In another order each time: whoever comes after a scan finds nothing of its own in the caches.
    names, rng = list(contestants), np.random.default_rng(5)
    for _ in range(rounds):
        for users in calls:
            for i in rng.permutation(len(names)).tolist():
                name, read = names[i], contestants[names[i]]
                since = time.perf_counter()
                read(users, newest)
                times[name].append(time.perf_counter() - since)
    seen = {name: np.percentile(t, (50, 99)) for name, t in times.items()}
    result.figures[variant] = {n: {"p50_ms": p[0] * 1e3, "p99_ms": p[1] * 1e3} for n, p in seen.items()}
    for ours in (n for n in seen if n.startswith("thinrow.")):
        for peer in (n for n in seen if not n.startswith("thinrow.")):
            for i, name in enumerate(("p50", "p99")):
                key = f"vs_{peer}.{ours.partition('.')[2]}.{variant}.{name}"
                result.ratios[key] = seen[peer][i] / seen[ours][i]


def _split(data: Histories) -> tuple[pa.Table, pa.Table]:
    """The events of the archive, and the newest of each user."""
    table = data.table()
    rank = data.first[1:][data.users()] - np.arange(data.n_events)
    newest = pa.array(rank <= _RECENT)
    return table.filter(pc.invert(newest)), table.filter(newest)


def _thinrow(
    stack: ExitStack, path: Path, data: Histories, archived: pa.Table, recent: pa.Table, url: str | None
) -> Read:
    store = stack.enter_context(HistoryStore.create(path, data.schema, recent=url))
    store.bulk_load(archived)
    store.compact(full=True)
    store.append(recent)
    newest_of = {newest: Projection(max_len=newest) for newest in _NEWEST}
    names, end = [c.name for c in data.schema.columns], int(data.columns["event_ts"].max()) + 1

    def read(users: Ints, newest: int) -> int:
        found = store.read(users, end, newest_of[newest]).histories
        columns = [found.to_jagged(name).values for name in ("event_ts", *names)]
        return len(columns[0])

    return read


def _lmdb(stack: ExitStack, work: Work, data: Histories) -> tuple[Read, Read]:
    """Without and with CRCs, of one environment: a process may open it once."""
    peer = Lmdb(work, data)
    stack.callback(peer.close)
    checked = copy.copy(peer)
    checked.crc = True

    def whole(users: Ints) -> Batch:
        return Batch(users, np.zeros(len(users), np.int64), data.first[users], data.first[users + 1])

    longest = np.argsort(np.diff(data.first))[-_BATCH:]
    out = new_out(data, [whole(longest)], max(_NEWEST))
    return (
        lambda users, newest: peer.read(whole(users), newest, out),
        lambda users, newest: checked.read(whole(users), newest, out),
    )


def _parquet_redis(stack: ExitStack, folder: Path, port: int, archived: pa.Table, recent: pa.Table) -> Read:
    names = [n for n in archived.column_names if n not in ("user_id", "arrival_ts")]
    file = folder / "archived.parquet"
    pq.write_table(archived.select(["user_id", *names]), file, compression="zstd", row_group_size=1 << 16)
    table = ds.dataset(file)
    link = RedisLink(RedisLocation("127.0.0.1", port))
    stack.callback(link.close)
    arrays = {n: recent.column(n).to_numpy() for n in names}
    row = struct.Struct("<" + "".join(a.dtype.char.replace("l", "q") for a in arrays.values()))
    record = np.dtype([(n, a.dtype.newbyteorder("<")) for n, a in arrays.items()])
    packed = list(map(row.pack, *(a.tolist() for a in arrays.values())))
    owners = recent.column("user_id").to_pylist()
    link.read([pack(b"RPUSH", b"recent:%d" % user, value) for user, value in zip(owners, packed, strict=True)])

    def read(users: Ints, newest: int) -> int:
        asked = [pack(b"LRANGE", b"recent:%d" % u, b"%d" % -newest, b"-1") for u in users.tolist()]
        newer = [np.frombuffer(b"".join(rows), record) for rows in link.read(asked)]
        wanted = ds.field("user_id").isin(users) if len(users) > 1 else ds.field("user_id") == int(users[0])
        older = table.to_table(columns=["user_id", *names], filter=wanted)
        owner = older.column("user_id").to_numpy()
        stop = np.searchsorted(owner, users, side="right")
        left = newest - np.array([len(rows) for rows in newer])
        start = np.maximum(np.searchsorted(owner, users), stop - left)
        delivered = 0
        for name in names:
            old = older.column(name).to_numpy()
            parts = zip(start.tolist(), stop.tolist(), newer, strict=True)
            column = np.concatenate([piece for a, b, rows in parts for piece in (old[a:b], rows[name])])
            delivered = len(column)
        return delivered

    return read
