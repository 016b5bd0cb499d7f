"""What RedisRecent promises beyond the contract: settings checked at open, numbers that never repeat, full and slow
servers, lost answers, erased files."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from thinrow.core.errors import InputError, MissingExtraError, Overloaded, StoreError, StoreExists, Unacknowledged
from thinrow.core.units import EPOCH_BITS
from thinrow.history.recent import redis_guess, redis_transaction
from thinrow.history.recent.epochs import claim_epoch
from thinrow.history.recent.redis import RedisRecent
from thinrow.history.recent.redis_link import Elsewhere, RedisLink, RedisLocation
from thinrow.history.recent.redis_scripts import APPEND, GUESS, SHA, WRITE
from thinrow.storage.objects import LocalObjects
from thinrow.testing.recent_model import append_rows, contract_schema, listed, read, state_of, values_of
from thinrow.testing.redis_server import RedisServer
from thinrow.testing.servers import needs_redis

pytestmark = needs_redis
SCHEMA = contract_schema()
EPOCH = 1 << EPOCH_BITS
WRITES = (APPEND, WRITE, GUESS)


@pytest.fixture
def server():
    # With everysec a server that is killed may lose the last second or two.
    with RedisServer(appendfsync="always") as running:
        yield running


def opened(server, folder, **options):
    objects = LocalObjects(folder / "objects")
    new = options.pop("new", False)
    return RedisRecent(server.url("shop", **options), SCHEMA, lambda least: claim_epoch(objects, least), new=new)


def rows(users, n=1, start=0, ids=True):
    return [(u, start + i, start + i if ids else None, None, values_of(i)) for u in users for i in range(n)]


# --- where it is, and how it is set ------------------------------------------------------------------------------


def test_a_url_says_where_and_never_who():
    url = "rediss://cache.example:7000/3?durability=always&name=shop&replicas=2"
    found = RedisLocation.parse(url)
    assert (found.host, found.port, found.db, found.tls, found.replicas) == ("cache.example", 7000, 3, True, 2)
    assert str(found) == url
    assert str(RedisLocation.parse("redis://h")) == "redis://h:6379/0"
    for bad, message in (
        ("redis://u:secret@h/0", "REDIS_PASSWORD"),
        ("http://h", "is no Redis server"),
        ("redis://h/x", "number that is none"),
        ("redis://h?colour=1", "unknown option 'colour'"),
        ("redis://h?durability=maybe", "durability 'maybe'"),
        ("redis://h?name=a:b", "store name 'a:b'"),
        ("redis://h?timeout_s=0", "timeout_s 0"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            RedisLocation.parse(bad)
        assert "secret" not in str(caught.value)


def test_settings_that_lose_events_are_refused_with_the_command(server, tmp_path):
    for setting, value, options, command in (
        ("maxmemory-policy", "allkeys-lru", {}, "CONFIG SET maxmemory-policy noeviction"),
        ("appendfsync", "no", {}, "CONFIG SET appendfsync everysec"),
        ("appendfsync", "everysec", {"durability": "always"}, "CONFIG SET appendfsync always"),
        ("appendonly", "no", {}, "CONFIG SET appendonly yes"),
    ):
        server.ask("CONFIG", "SET", setting, value)
        with pytest.raises(StoreError, match=command):
            opened(server, tmp_path, **options)
        server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        server.ask("CONFIG", "SET", "appendfsync", "always")
        opened(server, tmp_path, **options).close() if setting != "appendonly" else None
    opened(server, tmp_path, durability="none").close()


def test_a_server_that_hides_its_settings_is_believed_with_a_warning(server, tmp_path):
    server.ask("ACL", "SETUSER", "default", "-config")
    with pytest.warns(RuntimeWarning, match="taken on trust"):
        opened(server, tmp_path).close()


def test_credentials_come_from_the_environment(server, tmp_path, monkeypatch):
    server.ask("CONFIG", "SET", "requirepass", "secret")
    with pytest.raises(StoreError, match="check its ACL, REDIS_USERNAME"):
        opened(server, tmp_path)
    monkeypatch.setenv("REDIS_PASSWORD", "secret")
    opened(server, tmp_path).close()


def test_a_new_tier_is_not_made_over_another(server, tmp_path):
    opened(server, tmp_path, new=True).close()
    with pytest.raises(StoreExists, match="choose another name"):
        opened(server, tmp_path, new=True)


def test_without_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'thinrow\[redis\]'"):
        RedisRecent("redis://h?name=a", SCHEMA, lambda least: least)


# --- numbers never repeat ----------------------------------------------------------------------------------------


def numbers(tier, user=1):
    return append_rows(tier, rows([user], ids=False)).arrivals.tolist()


def test_a_server_that_lost_all_goes_on_in_a_new_epoch(server, tmp_path):
    tier = opened(server, tmp_path)
    assert numbers(tier) == [1]
    for epoch in (1, 2):
        server.ask("FLUSHALL")
        with pytest.warns(RuntimeWarning, match="has lost the recent tier"):
            assert numbers(tier) == [epoch * EPOCH + 1]
        assert [e[0] for e in listed(read(tier, [1]))[1]] == [epoch * EPOCH + 1]
    server.kill()
    server.lose_files()
    server.start()
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="has lost the recent tier"):
            assert len(read(tier, [1]).events) == 0
    assert len(os.listdir(tmp_path / "objects" / "epochs")) == 3, "a reader claims none"
    with pytest.warns(RuntimeWarning, match="has lost the recent tier"):
        assert numbers(tier) == [3 * EPOCH + 1]
    tier.close()


def test_every_restart_begins_an_epoch_and_keeps_what_is_there(server, tmp_path):
    tier, other = opened(server, tmp_path), opened(server, tmp_path)
    assert numbers(tier) + numbers(other) == [1, 2]
    server.kill()
    server.start()
    assert numbers(other) + numbers(tier) + numbers(tier, 2) == [EPOCH + 1, EPOCH + 2, EPOCH + 1]
    assert [e[0] for e in listed(read(tier, [1]))[1]] == [1, 2, EPOCH + 1, EPOCH + 2]
    server.kill()
    server.start()
    late = opened(server, tmp_path)
    assert numbers(late) + numbers(tier) == [2 * EPOCH + 1, 2 * EPOCH + 2]
    assert sorted(os.listdir(tmp_path / "objects" / "epochs"))[-1] == "00000002.json"
    for t in (tier, other, late):
        t.close()


def in_step(replica):
    until = time.monotonic() + 120
    while b"master_link_status:up" not in replica.ask("INFO", "replication") and time.monotonic() < until:
        time.sleep(0.05)


def test_a_promoted_replica_that_lacks_events_gives_no_number_twice(server, tmp_path):
    given = {1: [], 5: []}

    def append(tier, user):
        given[user] += numbers(tier, user)

    tier = opened(server, tmp_path)
    append(tier, 1)
    with RedisServer("--replicaof", "127.0.0.1", str(server.port)) as replica:
        in_step(replica)
        # From here on the replica hears nothing, as over a network that is slow.
        replica.ask("REPLICAOF", "127.0.0.1", "1")
        append(tier, 1)
        append(tier, 5)
        replica.ask("REPLICAOF", "NO", "ONE")
        moved = opened(replica, tmp_path)
        assert [e[0] for e in listed(read(moved, [1]))[1]] == given[1][:1]
        append(moved, 1)
        append(moved, 5)
        # Back to the first one, which has lost two events and knows nothing of it.
        server.ask("REPLICAOF", "127.0.0.1", str(replica.port))
        in_step(server)
        server.ask("REPLICAOF", "NO", "ONE")
        append(tier, 1)
        append(tier, 5)
        assert [e[0] for e in listed(read(tier, [1]))[1]] == [given[1][0], *given[1][2:]]
        assert [e[0] for e in listed(read(tier, [5]))[5]] == given[5][1:]
        moved.close()
    for numbers_of in given.values():
        assert sorted(set(numbers_of)) == numbers_of
    tier.close()


def test_a_claimed_epoch_is_claimed_for_ever(tmp_path):
    objects = LocalObjects(tmp_path)
    assert [claim_epoch(objects, least) for least in (0, 0, 5, 7 << EPOCH_BITS, 1)] == [
        e << EPOCH_BITS for e in (0, 1, 2, 7, 8)
    ]


# --- replicas, a full server, a slow one -------------------------------------------------------------------------


def test_replicas_that_do_not_answer_leave_a_call_unacknowledged(server, tmp_path):
    tier = opened(server, tmp_path, replicas=1, timeout_s=0.3)
    with pytest.raises(Unacknowledged, match="fewer than 1 replicas") as caught:
        append_rows(tier, rows([1, 2]))
    assert caught.value.appended.tolist() == [True, True]
    assert not caught.value.unknown.any()
    with RedisServer("--replicaof", "127.0.0.1", str(server.port)) as replica:
        in_step(replica)
        patient = opened(server, tmp_path, replicas=1, timeout_s=20)
        assert append_rows(patient, rows([1, 2])).duplicate.tolist() == [True, True]
        assert append_rows(patient, rows([1, 2, 3])).duplicate.tolist() == [True, True, False]
        patient.close()
    tier.close()


def test_a_full_server_takes_nothing_and_a_trim_makes_room(tmp_path):
    with RedisServer("--maxmemory", "8mb") as server:
        tier = opened(server, tmp_path)
        n = 0
        with contextlib.suppress(Overloaded):
            for n in range(0, 1_000_000, 500):
                append_rows(tier, rows([1], 500, n))
        with pytest.raises(Overloaded, match="CONFIG SET maxmemory"):
            append_rows(tier, rows([1], 500, n))
        before = state_of(tier, [1, 2])
        assert before[2][0] == n
        with pytest.raises(Overloaded):
            append_rows(tier, rows([2, 1], 500, n))
        assert state_of(tier, [1, 2]) == before
        tier.trim(np.array([1]), np.array([n - 7]))
        assert append_rows(tier, rows([1], 500, n)).arrivals[0] == n + 1
        tier.close()


def test_a_server_that_is_full_half_way_says_whose_rows_are_there(server, tmp_path, monkeypatch):
    tier = opened(server, tmp_path)
    pipeline = RedisLink.pipeline

    def full_for_the_second(link, commands, under=""):
        if len(commands) == 2 and b"EVALSHA" in commands[0] and not armed:
            armed.append(1)
            first, _ = pipeline(link, commands[:1])
            server.ask("CONFIG", "SET", "maxmemory", "1")
            second, lost = pipeline(link, commands[1:])
            return first + second, lost
        return pipeline(link, commands, under)

    armed = []
    monkeypatch.setattr(RedisLink, "pipeline", full_for_the_second)
    given = [(1, 5, None, None, values_of(1)), (2, 5, None, None, values_of(1)), (1, 6, None, None, values_of(1))]
    with pytest.raises(Unacknowledged, match="of 3 rows 2 are there and 0 may be") as caught:
        append_rows(tier, given)
    assert caught.value.appended.tolist() == [True, False, True]
    assert isinstance(caught.value.__cause__, Overloaded)
    assert read(tier, [1, 2]).top.tolist() == [2, 0]
    tier.close()


def test_a_slow_server_is_waited_for_and_a_dead_one_named(server, tmp_path):
    tier = opened(server, tmp_path, timeout_s=0.2, patience_s=20)
    server.send(signal.SIGSTOP)
    threading.Timer(1.0, lambda: server.send(signal.SIGCONT)).start()
    # Sent several times over, done once: what was given up lies in the server's buffers and comes late.
    assert append_rows(tier, rows([1, 2], 3, ids=False)).arrivals.tolist() == [1, 2, 3] * 2
    assert read(tier, [1, 2]).top.tolist() == [3, 3]
    tier.close()
    impatient = opened(server, tmp_path, timeout_s=0.2, patience_s=0.5)
    server.kill()
    with pytest.raises(StoreError, match=r"did not answer within 0\.5 s"):
        append_rows(impatient, rows([1], start=9))
    with pytest.raises(StoreError, match=r"did not answer within 0\.5 s"):
        read(impatient, [1])


# --- lost answers ------------------------------------------------------------------------------------------------


def lose_answer(monkeypatch, after, meanwhile=lambda: None):
    """The next write is done, or only its first ``after`` commands, and no answer comes."""
    pipeline, lost = RedisLink.pipeline, []

    def once(link, commands, under=""):
        if not lost and any(SHA[s] in c for c in commands for s in WRITES):
            lost.append(1)
            pipeline(link, commands[:after])
            meanwhile()
            return [], ConnectionResetError("the answer is lost")
        return pipeline(link, commands, under)

    monkeypatch.setattr(RedisLink, "pipeline", once)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("ids", [True, False])
def test_a_lost_answer_doubles_nothing(server, tmp_path, monkeypatch, after, ids):
    tier = opened(server, tmp_path)
    append_rows(tier, rows([1, 2], 2, 100, ids=ids))
    lose_answer(monkeypatch, after)
    assert append_rows(tier, rows([1, 2], 3, ids=ids)).arrivals.tolist() == [3, 4, 5] * 2
    assert read(tier, [1, 2]).top.tolist() == [5, 5]
    tier.close()


@pytest.mark.parametrize(
    ("others", "ids", "known"), [(1, False, True), (3, False, True), (5, True, True), (5, False, False)]
)
def test_others_may_write_before_an_answer_is_looked_for(server, tmp_path, monkeypatch, others, ids, known):
    tier, other = opened(server, tmp_path), opened(server, tmp_path)
    append_rows(tier, rows([1], 1, 100, ids=ids))
    lose_answer(monkeypatch, 1, lambda: [append_rows(other, rows([1], 1, 200 + i)) for i in range(others)])
    if known:
        result = append_rows(tier, rows([1], 3, ids=ids))
        assert result.arrivals.tolist() == [2, 3, 4]
    else:
        with pytest.raises(Unacknowledged, match="others have written since") as caught:
            append_rows(tier, rows([1], 3, ids=ids))
        assert caught.value.unknown.tolist() == [True] * 3
    assert read(tier, [1]).top.tolist() == [4 + others]
    tier.close()
    other.close()


@pytest.mark.parametrize("after", [0, 1, 2])
def test_numbers_of_a_lost_answer_are_those_that_were_given(server, tmp_path, monkeypatch, after):
    def restart():
        server.kill()
        server.start()

    tier = opened(server, tmp_path)
    append_rows(tier, rows([1, 2], 2, 100))
    lose_answer(monkeypatch, after, restart)
    given = append_rows(tier, rows([1, 2], 1)).arrivals.tolist()
    assert given == [3 if i < after else EPOCH + 1 for i in range(2)]
    assert [events[-1][0] for events in listed(read(tier, [1, 2])).values()] == given
    tier.close()


def test_two_processes_number_one_user_without_gaps(server, tmp_path):
    tiers = [opened(server, tmp_path) for _ in range(4)]
    given = [[] for _ in tiers]

    def work(i):
        for k in range(25):
            given[i] += append_rows(tiers[i], rows([1], 2, 1_000 * i + 2 * k)).arrivals.tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(itertools.chain(*given)) == list(range(1, 201))
    for tier in tiers:
        tier.close()


# --- erasure -----------------------------------------------------------------------------------------------------


def test_files_of_the_server_hold_nothing_of_the_erased(tmp_path):
    mark = "only-in-this-note"
    schema = contract_schema("string", "string")
    with RedisServer("--save", "3600 1", "--aof-use-rdb-preamble", "no", "--rdbcompression", "no") as server:
        objects = LocalObjects(tmp_path)
        tier = RedisRecent(server.url("shop"), schema, lambda least: claim_epoch(objects, least))
        values = list(values_of(1))
        values[3] = mark.encode()
        append_rows(tier, [(u, 1, f"id-{u}", None, tuple(values)) for u in ("gone", "stays")])
        server.ask("SAVE")

        def count(text):
            files = [f.read_bytes() for f in server.folder.rglob("*") if f.is_file() and f.name != "log"]
            return sum(f.count(text.encode()) for f in files)

        assert count("id-gone") >= 2
        assert count(mark) >= 4
        bounds = np.array([0, 1]), np.array([1]), np.array([1])
        tier.erase(np.array(["gone"], object), *bounds, np.array([True]))
        until = time.monotonic() + 120
        while count("gone") and time.monotonic() < until:
            time.sleep(0.05)
        assert count("gone") == 0
        assert count("stays") >= 2
        server.ask("ACL", "SETUSER", "default", "-bgrewriteaof")
        with pytest.raises(StoreError, match="run BGREWRITEAOF there, then thinrow erase --resume"):
            tier.erase(np.array(["stays"], object), *bounds, np.array([True]))
        tier.close()


# --- guesses -----------------------------------------------------------------------------------------------------


def trips(monkeypatch):
    """Counts the pipelines that are sent, but for those whose connection was not the one that a guess needs."""
    sent, pipeline = [], RedisLink.pipeline

    def counted(link, commands, under=""):
        found = pipeline(link, commands, under)
        if not isinstance(found[1], Elsewhere):
            sent.append(commands)
        return found

    monkeypatch.setattr(RedisLink, "pipeline", counted)
    return sent


def test_a_right_guess_takes_one_round_trip_and_a_wrong_one_two(server, tmp_path, monkeypatch):
    monkeypatch.setattr(redis_transaction, "_STALE_S", 60.0)
    tier, other = opened(server, tmp_path), opened(server, tmp_path)
    append_rows(tier, rows([9]))
    sent = trips(monkeypatch)
    assert append_rows(tier, rows([1, 2], 2)).arrivals.tolist() == [1, 2, 1, 2]
    assert append_rows(tier, rows([1, 2], 1, start=5)).arrivals.tolist() == [3, 3]
    assert len(sent) == 2
    append_rows(other, rows([1, 3], 1, start=7))
    del sent[:]
    assert append_rows(tier, rows([1, 2, 3], 1, start=8)).arrivals.tolist() == [5, 4, 2]
    assert len(sent) == 2
    del sent[:]
    # Most of it was wrong: the next calls read first.
    assert append_rows(tier, rows([1], 1, start=9)).arrivals.tolist() == [6]
    assert len(sent) == 2
    assert len(sent[0]) == 4
    for user in (1, 2, 3):
        assert [e[0] for e in listed(read(tier, [user]))[user]] == list(range(1, {1: 6, 2: 4, 3: 2}[user] + 1))


def test_ids_that_are_there_make_a_guess_wrong_and_are_duplicates(server, tmp_path, monkeypatch):
    monkeypatch.setattr(redis_transaction, "_STALE_S", 60.0)
    tier = opened(server, tmp_path)
    append_rows(tier, rows([1], 4))
    sent = trips(monkeypatch)
    again = append_rows(tier, rows([1], 4, start=2))
    assert again.arrivals.tolist() == [3, 4, 5, 6]
    assert again.duplicate.tolist() == [True, True, False, False]
    assert len(sent) == 2


def test_nothing_is_guessed_of_a_server_that_was_emptied_or_met_long_ago(server, tmp_path, monkeypatch):
    tier = opened(server, tmp_path)
    assert numbers(tier) == [1]
    # At once, so that the server was met just before.
    monkeypatch.setattr(redis_transaction, "_STALE_S", 60.0)
    server.ask("FLUSHALL")
    with pytest.warns(RuntimeWarning, match="has lost the recent tier"):
        assert numbers(tier, 2) == [EPOCH + 1]
    server.kill()
    server.start()
    assert numbers(tier, 3) == [2 * EPOCH + 1], "another connection"
    monkeypatch.setattr(redis_transaction, "_STALE_S", 0.0)
    sent = trips(monkeypatch)
    assert numbers(tier, 2) == [2 * EPOCH + 1]
    assert not any(SHA[GUESS] in c for commands in sent for c in commands)


def test_a_call_too_large_for_one_script_is_not_guessed(server, tmp_path, monkeypatch):
    monkeypatch.setattr(redis_transaction, "_STALE_S", 60.0)
    tier = opened(server, tmp_path)
    append_rows(tier, rows([1]))
    assert append_rows(tier, rows([2], 2_500)).arrivals.tolist() == list(range(1, 2_501))
    assert append_rows(tier, rows([2], 3, start=2_499)).arrivals.tolist() == [2_500, 2_501, 2_502]


def test_records_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(redis_guess, "_MOST_USERS", 2)
    known = redis_guess.Remembered(True)
    known.keep({b"a": b"1", b"b": b"2", b"c": b"3"}, ())
    assert known.records == {b"b": b"2", b"c": b"3"}
    known.keep({b"b": b"4"}, [b"x"])
    known.keep({b"d": b"5"}, ())
    assert known.records == {b"b": b"4", b"d": b"5"}
    known.keep({b"d": b""}, [b"b"])
    assert known.records == {}


# --- clusters ----------------------------------------------------------------------------------------------------


def test_one_master_of_many_is_refused_with_the_remedy(tmp_path):
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(RedisServer("--cluster-enabled", "yes")) for _ in range(3)]
        nodes = [f"127.0.0.1:{s.port}" for s in servers]
        subprocess.run(["redis-cli", "--cluster", "create", *nodes, "--cluster-yes"], check=True, capture_output=True)
        for server in servers:
            until = time.monotonic() + 120
            while b"cluster_size:3" not in server.ask("CLUSTER", "INFO") and time.monotonic() < until:
                time.sleep(0.05)
            with pytest.raises(StoreError, match=r"is one of 3 masters of a cluster.*in no cluster"):
                opened(server, tmp_path)
