"""A whole store whose recent events are on a Redis server: command line, many writers, random programs, erasure."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.test_whole_store import WEIGHTED, Play, many, program
from thinrow.core.errors import InputError, StoreError, StoreExists
from thinrow.core.units import EPOCH_BITS
from thinrow.history.recent.redis import RedisRecent
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.testing.forked import Commands
from thinrow.testing.redis_server import RedisServer
from thinrow.testing.servers import needs_redis

pytestmark = needs_redis
SCHEMA = EventSchema.infer(
    pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int64()), ("id", pa.int64())]),
    user="user",
    time="ts",
    event_id="id",
)


@pytest.fixture(scope="module")
def server():
    # Programs hold it to what it has acknowledged, and kill it.
    with RedisServer(appendfsync="always") as running:
        yield running


@pytest.fixture(autouse=True)
def emptied(server):
    server.ask("FLUSHALL")


def events(users, n, start=0):
    user = np.repeat(users, n)
    number = np.arange(len(user)) + start
    return pa.table({"user": user, "ts": number, "item": number % 7, "id": number})


def url(server):
    return f"redis://127.0.0.1:{server.port}/0"


def test_a_store_on_redis_is_like_any_other(server, tmp_path):
    with HistoryStore.create(tmp_path / "s", SCHEMA, 2, recent=url(server)) as store:
        assert isinstance(store.recent, RedisRecent)
        store.append(events([1, 2], 5))
        store.compact()
        store.append(events([1, 2, 3], 5, 100))
        asked = store.snapshot([1, 2, 3], 1_000)
        expected = store.read([1, 2, 3], 1_000).histories.to_jagged("item").to_arrow().to_pylist()
    with HistoryStore.open(tmp_path / "s") as store:
        assert len(store.recent.users()) == 3
        assert store.append(events([1, 2], 5)).duplicate.all()
        store.compact(full=True)
        assert len(store.recent.users()) == 0
        assert store.verify_recent() == []
        assert store.read([1, 2, 3], 1_000).histories.to_jagged("item").to_arrow().to_pylist() == expected
        assert asked.requests.versions["last_arrival"].tolist() == [5, 5, 0]
    assert "password" not in (tmp_path / "s" / "recent.json").read_text()
    assert not (tmp_path / "s" / "recent").exists()


def test_a_place_is_remembered_and_held_to(server, tmp_path):
    with HistoryStore.create(tmp_path / "s", SCHEMA, 2, recent=url(server) + "?name=shop"):
        pass
    with pytest.raises(StoreExists, match="choose another name"):
        HistoryStore.create(tmp_path / "t", SCHEMA, 2, recent=url(server) + "?name=shop")
    assert not HistoryStore.exists(tmp_path / "t")
    assert not (tmp_path / "t" / "recent.json").exists()
    with pytest.raises(InputError, match=r"not at redis://.*name=other"):
        HistoryStore.open(tmp_path / "s", recent=url(server) + "?name=other")
    server.ask("CONFIG", "SET", "appendfsync", "everysec")
    with pytest.raises(StoreError, match="CONFIG SET appendfsync always"):
        HistoryStore.open(tmp_path / "s", recent=url(server) + "?durability=always")
    server.ask("CONFIG", "SET", "appendfsync", "always")
    with HistoryStore.create(tmp_path / "local", SCHEMA, 2), pytest.raises(InputError, match="in its own folder"):
        HistoryStore.open(tmp_path / "local", recent=url(server) + "?name=shop")
    with HistoryStore.open(tmp_path / "s", recent=url(server) + "?timeout_s=7"):
        pass
    body = json.loads((tmp_path / "s" / "recent.json").read_text())["body"]
    assert body["recent"].endswith("/0?name=shop&timeout_s=7.0")


def test_a_lost_server_is_reported_and_counts_from_a_new_epoch(server, tmp_path):
    with HistoryStore.create(tmp_path / "s", SCHEMA, 2, recent=url(server)) as store:
        store.append(events([1], 3))
        store.compact()
        store.append(events([1], 3, 50))
    server.ask("FLUSHALL")
    with HistoryStore.open(tmp_path / "s") as store:
        assert ["it was lost" in d.what for d in store.verify_recent()] == [True]
        assert store.append(events([1], 1, 50)).arrivals.tolist() == [(1 << EPOCH_BITS) + 1]
        assert store.read([1], 1_000).histories.to_jagged("item").to_arrow().to_pylist() == [[0, 1, 2, 1]]


def test_the_command_line(server, tmp_path):
    file, path = str(tmp_path / "events.parquet"), str(tmp_path / "s")
    pq.write_table(events([1, 2, 3], 10), file)

    def run(*words, status=0):
        done = Commands.shared().run(*words)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    made = ("--create", "--user", "user", "--time", "ts", "--event-id", "id")
    assert "30 events appended" in run("ingest", file, "--store", path, *made, "--recent", url(server))
    assert "0 events appended, 30 known already" in run("ingest", file, "--store", path)
    assert "0 events in the archive, 10 recent" in run("inspect", "--store", path, "2")
    assert "30 events moved" in run("compact", "--store", path)
    assert "no damage" in run("verify", "--store", path)
    tag = server.ask("KEYS", "*:3}")[0].decode()
    server.ask("HSET", tag + ":i", "x" * 8, "y" * 20)
    assert "what to do next" in run("verify", "--store", path, status=1)


def test_erasing_leaves_nothing_on_the_server(server, tmp_path):
    with HistoryStore.create(tmp_path / "s", SCHEMA, 2, recent=url(server)) as store:
        store.append(events([1, 2], 5))
        store.compact()
        store.append(events([1, 2], 5, 100))
        report = store.erase([1], grace_s=0)
        assert report.events == 10
        assert store.recent.known_users().tolist() == [2]
        assert not server.ask("KEYS", "*:1}*")
        assert store.read([1, 2], 1_000).histories.lengths().tolist() == [0, 10]
        assert store.pending_erasures() == []


def test_processes_append_and_compact_at_once(server, tmp_path):
    HistoryStore.create(tmp_path / "s", SCHEMA, 4, recent=url(server)).close()
    code = """
import sys
import numpy as np, pyarrow as pa
from thinrow.history.store import HistoryStore
k = int(sys.argv[2])
with HistoryStore.open(sys.argv[1]) as store:
    for i in range(20):
        number = np.arange(30) + 1000 * i + 100_000 * k
        table = pa.table({"user": np.arange(30) % 10, "ts": number, "item": number, "id": number})
        store.append(table)
        assert store.append(table).duplicate.all()
        if i % 7 == k:
            store.compact()
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "s"), str(k)], stderr=subprocess.PIPE, text=True)
        for k in range(3)
    ]
    assert [run.communicate()[1] for run in runs] == ["", "", ""]
    with HistoryStore.open(tmp_path / "s") as store:
        held = store.read(np.arange(10), 10**9).histories
        assert held.lengths().tolist() == [180] * 10
        assert len(np.unique(held.to_jagged("item").values)) == 1_800
        assert store.verify_recent() == []


class RedisPlay(Play):
    """Programs over stores whose recent events are on a server that is restarted on the way."""

    server: RedisServer

    def recent_url(self):
        return url(self.server)

    def jolt(self, rng):
        """The server is killed and comes back: numbers go on above all that were given."""
        if not self.nested:
            self.server.kill()
            self.server.start()


def play(server, seed, steps, folder):
    RedisPlay.server = server
    played = RedisPlay(seed, folder)
    try:
        for step in steps:
            played.do(step)
        played.finish()
    finally:
        played.close()


def redis_program(seed, n):
    steps = program(seed, n)
    return [step for i, step in enumerate(steps) for step in ([step, ("jolt", i)] if i % 11 == 7 else [step])]


jolted = st.lists(
    st.tuples(st.sampled_from([*WEIGHTED, *["jolt"] * 7]), st.integers(0, 1 << 32)), min_size=5, max_size=20
)


@pytest.mark.parametrize("seed", range(3))
def test_programs(server, tmp_path, seed):
    assert "append" in WEIGHTED
    play(server, seed, redis_program(seed, 30), tmp_path)


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), steps=jolted)
def test_every_request_comes_back(server, seed, steps, tmp_path_factory):
    play(server, seed, steps, tmp_path_factory.mktemp("jolted"))


@pytest.mark.slow
def test_many_programs(server, tmp_path):
    def one(seed, folder):
        folder.mkdir()
        steps = redis_program(seed, 40)
        play(server, seed, steps, folder)
        shutil.rmtree(folder)
        server.ask("FLUSHALL")
        return len(steps)

    many(one, 5_000, tmp_path)
