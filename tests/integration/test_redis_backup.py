"""A store with its recent events on a Redis server is backed up while other processes append and compact, and restored
into an empty server, into a folder, and beside the original.

Run as a script, this file is a writer: its k-th event, over all users, has event time k, item k and id k.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import CorruptionError, ObjectNotFound, StoreError, StoreExists
from thinrow.core.units import EPOCH_BITS, NEVER
from thinrow.history.archive.verify import verify_generation
from thinrow.history.backup import verify_backup
from thinrow.history.recent import LmdbRecent, MemoryRecent
from thinrow.history.recent.redis import RedisRecent
from thinrow.history.recent.tier import Advance
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.history.tiers import remembered_tier
from thinrow.schema import ColumnSpec, EventSchema, Trait
from thinrow.testing.forked import Commands
from thinrow.testing.recent_model import append_rows, contract_schema, listed, read, values_of
from thinrow.testing.redis_server import RedisServer
from thinrow.testing.servers import needs_redis

pytestmark = needs_redis
SCHEMA = EventSchema(
    (ColumnSpec(1, "item", Trait.ID, "int64", "item"),), event_id_column="event_id", event_id_dtype="int64"
)
USERS = 7


@pytest.fixture(scope="module")
def server():
    with RedisServer(appendfsync="always") as running:
        yield running


@pytest.fixture(scope="module")
def other():
    with RedisServer(appendfsync="always") as running:
        yield running


@pytest.fixture(autouse=True)
def emptied(server, other):
    server.ask("FLUSHALL")
    other.ask("FLUSHALL")


def url(server: RedisServer) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


def table(first: int, stop: int) -> pa.Table:
    k = np.arange(first, stop)
    return pa.table({"user_id": k % USERS, "event_ts": k, "event_id": k, "item": k})


def write(path: Path) -> None:
    with HistoryStore.open(path) as store:
        for i in range(100_000):
            store.append(table(20 * i, 20 * i + 20))
            if i % 6 == 5:
                store.compact()
            if i % 12 == 11:
                store.collect_garbage(keep=1, grace_s=0)
            print(20 * i + 20, flush=True)


def items_of(store: HistoryStore) -> list[list[int]]:
    """Of each user, in order of arrival."""
    return store.read(np.arange(USERS), NEVER - 1).histories.to_jagged("item").to_arrow().to_pylist()


def ask(store: HistoryStore) -> tuple[RequestBatch, list[list[int]]]:
    """What a request of each user logs now, and what it saw; the writer may have collected the generation."""
    while True:
        asked = store.snapshot(np.arange(USERS), NEVER - 1)
        try:
            with store.archive.hold(asked.generation, "a test"):
                built = reconstruct(asked.generation, asked.requests)
        except ObjectNotFound:
            continue
        return asked.requests, built.histories.to_jagged("item").to_arrow().to_pylist()


def hold_to_the_stream(store: HistoryStore, at_least: int) -> None:
    """Each user has a beginning of its stream, all up to ``at_least``; and goes on where the copy ends."""
    assert verify_generation(store.pin()) == []
    assert store.verify_recent() == []
    held = items_of(store)
    for user, found in enumerate(held):
        assert found == list(range(user, user + USERS * len(found), USERS))
    assert sum(map(len, held)) >= at_least
    assert all(found[-1] >= at_least - USERS for found in held)
    last = max(map(max, held))
    again = store.append(table(0, last + 40))
    known = np.array([k <= held[k % USERS][-1] for k in range(last + 40)])
    assert again.duplicate.tolist() == known.tolist()
    assert (again.arrivals[~known] > 1 << EPOCH_BITS).all()
    store.compact(full=True)
    assert items_of(store) == [list(range(user, last + 40, USERS)) for user in range(USERS)]
    assert verify_generation(store.pin()) == []
    assert store.verify_recent() == []


def test_backups_while_a_process_writes_restore_into_an_empty_server(server, other, tmp_path):
    HistoryStore.create(tmp_path / "store", SCHEMA, 3, recent=url(server)).close()
    writer = subprocess.Popen([sys.executable, __file__, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
    logged, at_least = [], []
    try:
        with HistoryStore.open(tmp_path / "store") as store:
            for _ in range(4):
                for _ in range(8):
                    last = int(writer.stdout.readline())
                logged.append(ask(store))
                at_least.append(last)
                store.backup(tmp_path / "copy")
    finally:
        writer.kill()
        writer.communicate()
    for number, last in enumerate(at_least, 1):
        assert verify_backup(tmp_path / "copy", number)[2] == []
        path = tmp_path / f"restored-{number}"
        HistoryStore.restore(tmp_path / "copy", path, number, recent=url(other) + f"?name=r{number}&durability=always")
        assert not (path / "recent").exists()
        with HistoryStore.open(path) as store:
            assert isinstance(store.recent, RedisRecent)
            # What was logged before the backup began is rebuilt, and proved by its digest.
            for requests, saw in logged[:number]:
                built = reconstruct(store.pin(), requests).histories.to_jagged("item").to_arrow()
                assert built.to_pylist() == saw
            hold_to_the_stream(store, last)


def test_compactions_that_never_rest_delay_no_backup(server, tmp_path):
    with HistoryStore.create(tmp_path / "store", SCHEMA, 2, recent=url(server)) as store:
        stop, rounds = threading.Event(), []

        def work() -> None:
            while not stop.is_set():
                store.append(table(20 * len(rounds), 20 * len(rounds) + 20))
                store.compact()
                store.collect_garbage(keep=1, grace_s=0)
                rounds.append(1)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            begun = []
            for _ in range(4):
                while len(rounds) < 2 * len(begun) + 2:
                    stop.wait(0.01)
                begun.append(20 * len(rounds))
                store.backup(tmp_path / "copy")
        finally:
            stop.set()
            worker.join()
    for number, last in enumerate(begun, 1):
        HistoryStore.restore(tmp_path / "copy", tmp_path / f"r{number}", number)
        with HistoryStore.open(tmp_path / f"r{number}") as restored:
            assert isinstance(restored.recent, LmdbRecent)
            hold_to_the_stream(restored, last)


@pytest.fixture
def store(server, tmp_path):
    with HistoryStore.create(tmp_path / "store", SCHEMA, 3, recent=url(server) + "?name=shop") as store:
        store.append(table(0, 500))
        store.compact()
        store.append_checked(store.check(table(500, 600)), [Advance("clicks", "0", None, '{"offset": 600}')])
        yield store


def test_positions_come_along_and_the_place_does_not(store, tmp_path):
    store.backup(tmp_path / "copy")
    HistoryStore.restore(tmp_path / "copy", tmp_path / "new")
    assert remembered_tier(tmp_path / "new") is None
    with HistoryStore.open(tmp_path / "new") as new:
        assert new.recent.positions("clicks") == {"0": '{"offset": 600}'}
        hold_to_the_stream(new, 600)


def test_a_backup_of_a_folder_is_restored_into_a_server(server, tmp_path):
    with HistoryStore.create(tmp_path / "local", SCHEMA, 3, sync=False) as local:
        local.append(table(0, 500))
        local.compact()
        local.append(table(500, 600))
        local.backup(tmp_path / "copy")
    HistoryStore.restore(tmp_path / "copy", tmp_path / "new", recent=url(server))
    with HistoryStore.open(tmp_path / "new") as new:
        assert isinstance(new.recent, RedisRecent)
        hold_to_the_stream(new, 600)


def test_numbers_of_epochs_that_the_original_began_since_are_not_given_again(server, store, tmp_path):
    store.backup(tmp_path / "copy")
    for _ in range(3):
        server.kill()
        server.start()
        later = store.append(table(600, 1_000 + 100 * int(store.recent.floor >> EPOCH_BITS)))
    HistoryStore.restore(tmp_path / "copy", tmp_path / "new")
    with HistoryStore.open(tmp_path / "new") as new:
        assert new.append(table(600, 610)).arrivals.min() > later.arrivals.max()


def test_nothing_of_what_was_erased_while_it_was_copied_is_kept(store, tmp_path, monkeypatch):
    """The tier is copied, then a user is erased, then the generation is held."""
    real = LmdbRecent.fill

    def fill(self, source):
        real(self, source)
        store.erase([3], grace_s=0)

    monkeypatch.setattr(LmdbRecent, "fill", fill)
    store.backup(tmp_path / "copy")
    monkeypatch.undo()
    HistoryStore.restore(tmp_path / "copy", tmp_path / "new")
    with HistoryStore.open(tmp_path / "new") as new:
        assert new.recent.known_users().tolist() == [0, 1, 2, 4, 5, 6]
        assert [len(found) for found in items_of(new)] == [86, 86, 86, 0, 86, 85, 85]
        assert new.verify_recent() == []


def test_a_killed_restore_is_run_again(store, server, other, tmp_path, monkeypatch):
    store.backup(tmp_path / "copy")
    place = url(other) + "?name=new"

    def killed(self):
        raise KeyboardInterrupt

    for method in ("restored", "close"):
        monkeypatch.setattr(RedisRecent, method, killed)
        with pytest.raises(KeyboardInterrupt):
            HistoryStore.restore(tmp_path / "copy", tmp_path / "new", recent=place)
        monkeypatch.undo()
        assert not HistoryStore.exists(tmp_path / "new")
        assert other.ask("EXISTS", "{thinrow:new:3}") == 1
        if method == "restored":
            with pytest.raises(StoreError, match="is being filled by a restore"):
                RedisRecent(place, SCHEMA, lambda least: least)
    with pytest.raises(StoreExists, match="go on with that"):
        HistoryStore.restore(tmp_path / "copy", tmp_path / "new")
    HistoryStore.restore(tmp_path / "copy", tmp_path / "new", recent=place)
    with HistoryStore.open(tmp_path / "new") as new:
        hold_to_the_stream(new, 600)


def test_a_tier_that_is_there_is_not_restored_over(store, server, tmp_path):
    store.backup(tmp_path / "copy")
    for _ in range(2):
        with pytest.raises(StoreExists, match="choose another name"):
            HistoryStore.restore(tmp_path / "copy", tmp_path / "new", recent=url(server) + "?name=shop")
    assert len(items_of(store)[0]) == 86
    HistoryStore.restore(tmp_path / "copy", tmp_path / "other", recent=url(server))
    assert remembered_tier(tmp_path / "other").name != "shop"


def test_a_server_that_is_emptied_meanwhile_makes_no_backup(store, server, tmp_path, monkeypatch):
    real = RedisRecent.stored

    def stored(self):
        for part in real(self):
            yield part
            server.ask("FLUSHALL")

    monkeypatch.setattr(RedisRecent, "stored", stored)
    with pytest.raises(StoreError, match=r"has lost the recent tier 'shop' meanwhile; .*append again what was lost"):
        store.backup(tmp_path / "copy")


def test_damage_on_the_server_is_not_copied(store, server, tmp_path):
    server.ask("HSET", "{thinrow:shop:3}:i", "x" * 8, "y" * 20)
    with pytest.raises(CorruptionError, match="event ids"):
        store.backup(tmp_path / "copy")


def test_the_command_line(store, other, tmp_path):
    def run(*words, status=0):
        done = Commands.shared().run(*words)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    copy, new = str(tmp_path / "copy"), str(tmp_path / "new")
    assert "backup 1 of generation" in run("backup", copy, "--store", str(tmp_path / "store"))
    assert "no damage" in run("verify", "--store", copy)
    assert "backup 1 restored" in run("restore", copy, "--store", new, "--recent", url(other))
    assert "no damage" in run("verify", "--store", new)
    assert "no Redis server" in run("restore", copy, "--store", new + "2", "--recent", "cache:6379", status=1)
    assert not (tmp_path / "new2").exists()


@pytest.mark.parametrize("between", [MemoryRecent, LmdbRecent])
def test_a_tier_filled_from_another_is_the_same_tier(server, tmp_path, between):
    """Redis, then memory or LMDB, then Redis again: reads, ids, counters and numbers to come are the first one's."""
    schema = contract_schema()
    rng = np.random.default_rng(7)
    with RedisRecent(server.url("a"), schema, lambda least: max(least, 5 << EPOCH_BITS)) as first:
        for i in range(30):
            users = rng.integers(-3, 9, 40)
            append_rows(first, [(int(u), j, 40 * i + j, None, values_of(j)) for j, u in enumerate(users)])
            first.trim(np.unique(users), np.repeat((5 << EPOCH_BITS) + i, len(np.unique(users))))
        everyone = first.known_users()
        expected = listed(read(first, everyone))
        middle = MemoryRecent(schema) if between is MemoryRecent else LmdbRecent(tmp_path / "b", schema, sync=False)
        with middle, RedisRecent(server.url("c"), schema, lambda least: least) as last:
            middle.fill(first)
            last.fill(middle)
            for copy in (middle, last):
                assert copy.known_users().tolist() == everyone.tolist()
                assert listed(read(copy, everyone)) == expected
                copy.check_ids()
                again = [(int(u), 1, 9_999, None, values_of(1)) for u in (*everyone, 77)]
                known = [(int(users[3]), 3, 40 * 29 + 3, None, values_of(3))]
                results = [append_rows(tier, [*again, *known]) for tier in (copy, copy)]
                assert results[1].duplicate.all()
                assert results[0].duplicate.tolist() == [False] * len(again) + [True]
            assert append_rows(first, again).arrivals.tolist() == results[0].arrivals[:-1].tolist()


def test_a_user_of_more_ids_than_one_call_takes(server, tmp_path):
    schema = contract_schema()
    with LmdbRecent(tmp_path / "a", schema, sync=False) as first:
        n = 150_000
        append_rows(first, [(1, i, i, None, values_of(i % 1_000)) for i in range(n)])
        with RedisRecent(server.url("a"), schema, lambda least: least) as second:
            second.fill(first)
            assert read(second, [1]).top.tolist() == [n]
            assert append_rows(second, [(1, 0, i, None, values_of(0)) for i in (0, n // 2, n - 1)]).duplicate.all()
            assert server.ask("HLEN", "{thinrow:a:1}:i") == n


if __name__ == "__main__":
    write(Path(sys.argv[1]))
