"""``event_ts < T`` is one contract: whatever path a history takes, it ends before the request's time, ties and all.

Each path gets users, times and a store with all events, and gives the event times that it shows. Times asked are those
of every event, and a millisecond before and after; half the events share theirs with another.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.dpp import loader
from thinrow.examples.joiner import join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.records import Impressions
from thinrow.examples.table import ExampleTable
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.online import AsyncSnapshots, create_app
from thinrow.schema import EventSchema, ExampleSchema, Projection
from thinrow.sources.calls import CallSource
from thinrow.sources.ingest import Ingest
from thinrow.testing.redis_server import RedisServer
from thinrow.testing.servers import needs_redis

USERS = (7, -3, 12)
Times = list[list[int]]
SCHEMA = EventSchema.infer(
    pa.schema({"user": pa.int64(), "ts": pa.int64(), "item": pa.int64()}), user="user", time="ts"
)
EXAMPLES = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 5})


def events() -> pa.Table:
    """In order of arrival: forty events a user, ties among them, a third of them late."""
    rng = np.random.default_rng(8)
    ts = np.sort(rng.integers(1, 60, 120))
    arrives = np.argsort(ts + np.where(rng.random(120) < 1 / 3, 30, 0), kind="stable")
    return pa.table({"user": rng.choice(USERS, 120), "ts": ts[arrives], "item": np.arange(120)})


def asked(table: pa.Table) -> tuple[list[int], list[int]]:
    """Users and times of the requests."""
    user, ts = table["user"].to_numpy(), table["ts"].to_numpy()
    rows = [(u, t + d) for u in USERS for t in np.unique(ts[user == u]).tolist() for d in (-1, 0, 1)]
    return [u for u, _ in rows], [t for _, t in rows]


def times_of(histories: Any) -> Times:
    return histories.to_jagged("event_ts").to_arrow().to_pylist()


def in_process(store: HistoryStore, users: list[int], times: list[int], folder: Path) -> Times:
    return times_of(store.read(users, times).histories)


def batch(store: HistoryStore, users: list[int], times: list[int], folder: Path) -> Times:
    """Logged, and rebuilt when all has moved to the archive."""
    logged = store.snapshot(users, times).requests
    store.compact(full=True)
    return times_of(reconstruct(store.pin(), logged).histories)


def newest(store: HistoryStore, users: list[int], times: list[int], folder: Path) -> Times:
    """The newest four, the rest from another reconstruction: a cut has the same end."""
    logged = store.snapshot(users, times).requests
    cut = times_of(reconstruct(store.pin(), logged, Projection(max_len=4)).histories)
    whole = times_of(reconstruct(store.pin(), logged).histories)
    return [row[:-4] + end for row, end in zip(whole, cut, strict=True)]


def arrow(store: HistoryStore, users: list[int], times: list[int], folder: Path) -> Times:
    """Tables as of a time."""
    found = []
    for user, at in zip(users, times, strict=True):
        table = store.to_arrow([user], at=at).read_all()
        found.append(table["event_ts"].cast(pa.int64()).to_pylist())
    return found


def coroutines(store: HistoryStore, users: list[int], times: list[int], folder: Path) -> Times:
    async def all_of() -> list[Any]:
        with AsyncSnapshots(store, threads=2, waiting=len(users)) as snapshots:
            return await asyncio.gather(*(snapshots.read([u], [t]) for u, t in zip(users, times, strict=True)))

    return [times_of(built.histories)[0] for _, built in asyncio.run(all_of())]


def over_http(store: HistoryStore, users: list[int], times: list[int], folder: Path) -> Times:
    uvicorn = pytest.importorskip("uvicorn")
    server = uvicorn.Server(uvicorn.Config(create_app(store), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        connection = http.client.HTTPConnection(*server.servers[0].sockets[0].getsockname()[:2], timeout=300)
        connection.request("POST", "/v1/snapshots", json.dumps({"users": users, "request_ts": times}))
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return [r["history"]["event_ts"] for r in answer["requests"]]
    finally:
        server.should_exit = True
        thread.join()


def examples(store: HistoryStore, users: list[int], times: list[int], folder: Path) -> Times:
    """Logged as impressions, joined, and read as training batches."""
    n = len(users)
    log = ImpressionLog(folder / "shown", SCHEMA, EXAMPLES)
    log.append(Impressions.of(EXAMPLES, np.arange(n), store.snapshot(users, times), candidates={"item": [[1]] * n}))
    table = ExampleTable.create(folder / "table", event_schema=SCHEMA, example_schema=EXAMPLES, n_buckets=1)
    found: dict[int, list[int]] = {}
    with table:
        join_logs(log, OutcomeLog(folder / "clicks"), table, 1_000)
        for read in loader(store, table, batch_rows=32, threads=1):
            found |= dict(zip(read.request_id.tolist(), times_of(read.histories), strict=True))
    return [found[i] for i in range(n)]


PATHS = (in_process, batch, newest, arrow, coroutines, over_http, examples)


def appended(store: HistoryStore, table: pa.Table) -> None:
    store.append(table)


def archived(store: HistoryStore, table: pa.Table) -> None:
    store.append(table)
    store.compact()


def loaded(store: HistoryStore, table: pa.Table) -> None:
    store.bulk_load(table)


def mixed(store: HistoryStore, table: pa.Table) -> None:
    """Ties of one time on both sides of a compaction."""
    store.append(table.slice(0, 70))
    store.compact()
    store.append(table.slice(70))


def streamed(store: HistoryStore, table: pa.Table) -> None:
    """Through a source, in batches, while a compaction runs now and then."""
    source, stop = CallSource(), threading.Event()
    reader = threading.Thread(target=lambda: Ingest(store, source).run(follow=True, stop=stop))
    reader.start()
    for begin in range(0, table.num_rows, 15):
        source.put(table.slice(begin, 15)).wait(300)
        if begin == 45:
            store.compact()
    stop.set()
    reader.join()


PLACES = (appended, archived, loaded, mixed, streamed)


def hold(store: HistoryStore, path: Callable[..., Times], place: Callable[..., None], folder: Path) -> None:
    table = events()
    place(store, table)
    users, times = asked(table)
    user, ts = table["user"].to_numpy(), table["ts"].to_numpy()
    want = [np.sort(ts[(user == u) & (ts < t)]).tolist() for u, t in zip(users, times, strict=True)]
    assert path(store, users, times, folder) == want


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("path", PATHS, ids=lambda f: f.__name__)
def test_the_boundary_is_strict(path: Callable[..., Times], place: Callable[..., None], tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "store", SCHEMA, 2, sync=False) as store:
        hold(store, path, place, tmp_path)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@needs_redis
@pytest.mark.parametrize("place", [appended, mixed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("path", PATHS, ids=lambda f: f.__name__)
def test_the_boundary_is_strict_over_redis(
    path: Callable[..., Times], place: Callable[..., None], server: RedisServer, tmp_path: Path
) -> None:
    server.ask("FLUSHALL")
    recent = f"redis://127.0.0.1:{server.port}/0"
    with HistoryStore.create(tmp_path / "store", SCHEMA, 2, recent=recent, sync=False) as store:
        hold(store, path, place, tmp_path)
