"""Traffic that is not as it should be: a user with a million events in an hour, a burst, a clock that is set back.

What docs/recent-tier.md says happens then, held on whole stores. Run as a script, this file is the process whose memory
is measured.
"""

from __future__ import annotations

import http.client
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import uvicorn

from thinrow.core.units import DAY_MS, HOUR_MS
from thinrow.examples.log import ImpressionLog
from thinrow.examples.records import Impressions
from thinrow.history.buckets import PART_BYTES
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.snapshot import MAX_INLINE_EVENTS
from thinrow.history.store import HistoryStore
from thinrow.online import Limits, create_app
from thinrow.schema import EventSchema, ExampleSchema, Projection
from thinrow.sources.calls import CallSource
from thinrow.sources.ingest import Ingest, IngestOptions
from thinrow.testing.redis_server import RedisServer
from thinrow.testing.servers import needs_redis

SCHEMA = EventSchema.infer(
    pa.schema({"user": pa.int64(), "ts": pa.int64(), "item": pa.int64()}), user="user", time="ts"
)
EXAMPLES = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 1_000})
BATCH, ASK_EVERY = 10_000, 5


def busy(first: int, n: int, total: int) -> pa.Table:
    """Events ``first`` to ``first + n`` of user 7, ``total`` of which fill an hour; one in ten came a minute late."""
    k = first + np.arange(n)
    ts = k * HOUR_MS // total
    return pa.table({"user": np.full(n, 7), "ts": np.where(k % 10 == 3, np.maximum(ts - 60_000, 0), ts), "item": k})


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one_busy_user(folder: Path, total: int, recent: str | None) -> None:
    """Append an hour of events, ask now and then, log what was asked, rebuild all of it at the end."""
    logged: list[tuple[RequestBatch, int]] = []
    log = ImpressionLog(folder / "shown", SCHEMA, EXAMPLES)
    with HistoryStore.create(folder / "store", SCHEMA, 2, recent=recent, sync=False) as store:
        early = 0.0
        for k, first in enumerate(range(0, total, BATCH)):
            store.append(busy(first, BATCH, total))
            if k % ASK_EVERY == ASK_EVERY - 1:
                # The request sees more recent events than are logged inline, so it compacts first.
                taken = store.snapshot([7, 8], 2 * HOUR_MS)
                assert int(taken.requests.inline.lengths.max()) <= MAX_INLINE_EVENTS
                assert len(store.recent.users()) == 0, "what is archived leaves the tier"
                log.append(Impressions.of(EXAMPLES, [2 * k, 2 * k + 1], taken, candidates={"item": [[1], [1]]}))
                logged.append((taken.requests, first + BATCH))
            if first + BATCH >= total // 2 and not early:
                early = memory_mb()
        late = memory_mb()
        written = sum(p.stat().st_size for p in (folder / "shown").rglob("*") if p.is_file())
        generation, everything = store.pin(), busy(0, total, total)
        ts = everything["ts"].to_numpy()
        for requests, n in logged:
            order = np.lexsort((np.arange(n), ts[:n]))[-256:]
            got: Any = reconstruct(generation, requests, Projection(max_len=256)).histories
            assert got.to_jagged("item").to_arrow().to_pylist() == [order.tolist(), []]
        assert generation.n_rows == total
    size = written / len(logged)
    print(f"{total} events: {early:.0f} MB half way, {late:.0f} MB at the end; {size:.0f} bytes a request")
    assert size < 10_000, "a request logs no more for a long history"
    # Merging takes about eight parts, however long the history is.
    assert (late - early) * 2**20 < 12 * PART_BYTES


def one_served_user(folder: Path, total: int, recent: str | None) -> None:
    """Ask the service for a user with ``total`` events, recent ones and then archived ones, past its bound and within.

    What a request that is refused costs is what its user's recent events take, and nothing once they are archived.
    """
    limits = Limits(events=1 << 16)
    with HistoryStore.create(folder / "store", SCHEMA, 2, recent=recent, sync=False) as store:
        for first in range(0, total, BATCH):
            store.append(busy(first, BATCH, total))
        with Served(store, limits) as served:
            status, answer = served.ask({"users": [7]})
            assert status == 429, answer
            assert f"{total} recent events would be logged, {total} of them of user 7" in answer["error"]["message"]
            # The compaction that the request asked for.
            until = time.monotonic() + 120
            while len(store.recent.users()) and time.monotonic() < until:
                time.sleep(0.05)
            before = memory_mb()
            for _ in range(20):
                status, answer = served.ask({"users": [7, 8]})
                assert status == 413
                assert f"the histories have {total} events, {total} of them of user 7" in answer["error"]["message"]
            refused = memory_mb()
            newest = {"columns": ["item"], "max_len": 5_000}
            for _ in range(20):
                status, answer = served.ask({"users": [7, 8], "projection": newest})
                assert status == 200
            ts = busy(0, total, total)["ts"].to_numpy()
            order = np.lexsort((np.arange(total), ts))[-5_000:]
            assert [r["history"]["item"] for r in answer["requests"]] == [order.tolist(), []]
            assert served.ask({"users": [7], "projection": {"max_len": limits.events}})[0] == 200
            assert served.ask({"users": [7], "projection": {"max_len": limits.events + 1}})[0] == 413
    late = memory_mb()
    print(f"{total} events: {before:.0f} MB before, {refused:.0f} MB after refusals, {late:.0f} MB at the end")
    assert refused - before < 20, "what is refused is not read"
    assert late - before < 250, "65,536 events as JSON, and no more"


class Served:
    """The service on a store, in threads of this process."""

    def __init__(self, store: HistoryStore, limits: Limits) -> None:
        self._server = uvicorn.Server(uvicorn.Config(create_app(store, limits=limits), port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> Served:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def ask(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("POST", "/v1/snapshots", json.dumps({"request_ts": 2 * HOUR_MS, **body}))
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read())
        connection.close()
        return found


def measured(folder: Path, total: int, recent: str = "", what: str = "appended") -> None:
    command = [sys.executable, __file__, str(folder), str(total), recent, what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


def test_a_busy_user_is_compacted_and_logged_short(tmp_path: Path) -> None:
    measured(tmp_path, 200_000)


@pytest.mark.slow
def test_a_million_events_of_one_user_in_an_hour(tmp_path: Path) -> None:
    measured(tmp_path, 1_000_000)


def test_the_service_answers_for_a_user_of_a_million_events_within_its_bound(tmp_path: Path) -> None:
    measured(tmp_path, 1_000_000, what="served")


@needs_redis
def test_a_busy_user_over_redis(tmp_path: Path) -> None:
    with RedisServer() as server:
        measured(tmp_path, 200_000, f"redis://127.0.0.1:{server.port}/0")
        # Without event ids nothing of archived events is left but the counter of their user.
        assert server.ask("MEMORY", "USAGE", server.ask("KEYS", "*:7}")[0].decode()) < 1_000


def test_a_burst_waits_in_a_bounded_queue_and_loses_nothing(tmp_path: Path) -> None:
    """Ten times what came before, from four callers, while requests are served: the callers wait, and nobody else."""
    room, users = 500, 20
    source, stop, most, grown = CallSource(max_events=room), threading.Event(), [], []

    def put(first: int, n: int) -> None:
        for k in range(first, first + n, 50):
            at = k + np.arange(50)
            source.put(pa.table({"user": at % users, "ts": at, "item": at}))
            most.append(source.lag() or 0)

    with HistoryStore.create(tmp_path / "store", SCHEMA, 2, sync=False) as store:
        ingest = Ingest(store, source, IngestOptions(batch_events=200))
        reader = threading.Thread(target=lambda: ingest.run(follow=True, stop=stop))
        reader.start()
        put(0, 1_000)
        # The first read compiles.
        store.read(np.arange(users), 10**6)
        callers = [threading.Thread(target=put, args=(1_000 + 2_500 * i, 2_500)) for i in range(4)]
        for caller in callers[:3]:
            caller.start()
        while len(grown) < 4 or any(c.is_alive() for c in callers):
            if len(grown) == 3:
                callers[3].start()
            grown.append(int(store.read(np.arange(users), 10**6).histories.lengths().sum()))
        until = time.monotonic() + 60
        while ingest.report.events < 11_000 and time.monotonic() < until:
            time.sleep(0.01)
        stop.set()
        reader.join()
        assert max(most) <= room
        assert grown == sorted(grown)
        assert len(grown) > 3, "requests are served meanwhile"
        items = store.read(np.arange(users), 10**6).histories.to_jagged("item").values
        assert np.array_equal(np.sort(items), np.arange(11_000))


def test_a_request_of_a_clock_that_was_set_back_sees_less_and_comes_back(tmp_path: Path) -> None:
    """The ranker's clock, the store's and the events' own go back by a day, each in turn; order is that of arrival."""
    now = [100 * DAY_MS]
    with HistoryStore.create(tmp_path / "store", SCHEMA, 2, sync=False, clock=lambda: now[0]) as store:

        def add(*ts: int) -> None:
            store.append(pa.table({"user": np.full(len(ts), 7), "ts": np.array(ts), "item": np.arange(len(ts))}))

        add(10, 20, 30)
        first = store.snapshot([7], 40)
        store.compact()
        # Events whose clock was set back are late events: earlier in order, later in arrival.
        now[0] -= DAY_MS
        add(5, 15, 25)
        second, behind = store.snapshot([7], 40), store.snapshot([7], 20)
        store.compact(full=True)
        assert store.collect_garbage(keep=1, grace_s=3_600).generations == ()
        now[0] += 2 * DAY_MS
        add(50)
        store.compact(full=True)
        logged = RequestBatch.concat([first.requests, second.requests, behind.requests])
        got: Any = reconstruct(store.pin(), logged).histories
        seen = [[10, 20, 30], [5, 10, 15, 20, 25, 30], [5, 10, 15]]
        assert got.to_jagged("event_ts").to_arrow().to_pylist() == seen
        assert got.to_jagged("arrival").to_arrow().to_pylist() == [[1, 2, 3], [4, 1, 5, 2, 6, 3], [4, 1, 5]]
        bounds = logged.versions["snapshot_arrival"].tolist()
        assert bounds == sorted(bounds) == [3, 6, 6]


if __name__ == "__main__":
    play = {"appended": one_busy_user, "served": one_served_user}[sys.argv[4]]
    play(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None)
