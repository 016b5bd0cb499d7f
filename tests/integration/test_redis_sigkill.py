"""Writers on one Redis tier, and its server, are killed (SIGKILL) at random moments under load: nothing acknowledged is
lost, nothing is doubled, each user has all of a call or none of it, and no number is given twice.

Run as a script, this file is a writer. It works through numbered calls, each over some of the shared users, and writes
down each call and its arrival numbers when it is acknowledged. A writer that starts again makes the first call that is
not acknowledged again, as a source would that is replayed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from thinrow.history.recent.epochs import claim_epoch
from thinrow.history.recent.redis import RedisRecent
from thinrow.storage.objects import LocalObjects
from thinrow.testing.recent_model import append_rows, contract_schema, listed, read, values_of
from thinrow.testing.redis_server import RedisServer
from thinrow.testing.servers import needs_redis

pytestmark = needs_redis
USERS = [1, 2, 3, 4, 5]
WRITERS = 3
SCHEMA = contract_schema()


def opened(url, folder):
    objects = LocalObjects(folder)
    return RedisRecent(url, SCHEMA, lambda least: claim_epoch(objects, least))


def call_of(writer, i):
    """Rows of one call, by id."""
    rng = random.Random(1_000_000 * writer + i)
    users = rng.sample(USERS, rng.randrange(1, len(USERS) + 1))
    picked = [user for user in users for _ in range(rng.randrange(1, 6))]
    rng.shuffle(picked)
    base = (writer * 100_000 + i) * 100
    return [(user, 1_000 * i + j, base + j, None, values_of((base + j) % 9_973)) for j, user in enumerate(picked)]


def work(url, folder, writer, path):
    with open(path) as lines:
        done = sum(1 for _ in lines)
    out = os.open(path, os.O_WRONLY | os.O_APPEND)
    tier = opened(url, folder)
    print("ready", flush=True)
    for i in range(done, 100_000):
        arrivals = append_rows(tier, call_of(writer, i)).arrivals.tolist()
        os.write(out, f"{json.dumps(arrivals)}\n".encode())


def spawn(url, tmp_path, writer):
    command = [sys.executable, __file__, url, str(tmp_path / "epochs"), str(writer), str(tmp_path / f"{writer}.log")]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def check(url, tmp_path):
    tier = opened(url, tmp_path / "epochs")
    held = listed(read(tier, USERS))
    where = {}
    for user, events in held.items():
        arrivals = [e[0] for e in events]
        assert arrivals == sorted(set(arrivals)), "a number was given twice"
        for arrival, _, name, values in events:
            assert (user, name) not in where, "an event is there twice"
            assert values == values_of(name % 9_973)
            where[user, name] = arrival
    calls = 0
    for writer in range(WRITERS):
        with open(tmp_path / f"{writer}.log") as lines:
            acknowledged = [json.loads(line) for line in lines]
        for i, arrivals in enumerate(acknowledged):
            for row, arrival in zip(call_of(writer, i), arrivals, strict=True):
                assert where.pop((row[0], row[2]), None) == arrival, "an acknowledged event was lost, or moved"
        in_flight = call_of(writer, len(acknowledged))
        for user in USERS:
            there = [where.pop((user, row[2]), None) for row in in_flight if row[0] == user]
            assert None not in there or not any(there), "a user has a part of a call"
        calls += len(acknowledged)
    assert not where
    known = tier.known_users().tolist()
    assert set(known) <= set(USERS)
    tier.check_ids()
    tier.close()
    return calls


def acknowledged(tmp_path):
    return sum((tmp_path / f"{writer}.log").read_bytes().count(b"\n") for writer in range(WRITERS))


def kill_and_check(tmp_path, rounds, seed):
    rng = random.Random(seed)
    for writer in range(WRITERS):
        (tmp_path / f"{writer}.log").touch()
    with RedisServer(appendfsync="always") as server:
        url = server.url("shop", durability="always", patience_s=60)
        opened(url, tmp_path / "epochs").close()
        running = [spawn(url, tmp_path, writer) for writer in range(WRITERS)]
        try:
            for process in running:
                assert process.stdout.readline() == b"ready\n"
            for _ in range(rounds):
                time.sleep(rng.uniform(0.0, 0.3))
                if rng.random() < 0.5:
                    server.kill()
                    time.sleep(rng.choice([0.0, 0.2]))
                    server.start()
                else:
                    writer = rng.randrange(WRITERS)
                    running[writer].send_signal(signal.SIGKILL)
                    assert running[writer].wait() == -signal.SIGKILL
                    running[writer].stdout.close()
                    running[writer] = spawn(url, tmp_path, writer)
                    if rng.random() < 0.5:
                        assert running[writer].stdout.readline() == b"ready\n"
            end = time.monotonic() + 120
            while acknowledged(tmp_path) <= rounds and time.monotonic() < end:
                assert [process.poll() for process in running] == [None] * WRITERS, "a writer gave up"
                time.sleep(0.05)
        finally:
            for process in running:
                process.kill()
            statuses = [process.wait() for process in running]
            for process in running:
                process.stdout.close()
        assert statuses == [-signal.SIGKILL] * WRITERS, "a writer gave up"
        assert check(url, tmp_path) > rounds
        # What was cut short is made whole.
        with opened(url, tmp_path / "epochs") as tier:
            for writer in range(WRITERS):
                with open(tmp_path / f"{writer}.log", "a+") as lines:
                    lines.seek(0)
                    arrivals = append_rows(tier, call_of(writer, sum(1 for _ in lines))).arrivals
                    lines.write(f"{json.dumps(np.asarray(arrivals).tolist())}\n")
        check(url, tmp_path)


def test_killed_at_random_moments(tmp_path):
    kill_and_check(tmp_path, rounds=4, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_many_times(tmp_path, seed):
    kill_and_check(tmp_path, rounds=50, seed=seed)


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
