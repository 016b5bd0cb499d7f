"""A process that appends and trims is killed (SIGKILL) at random moments: nothing acknowledged is lost or doubled.

Run as a script, this file is the process: it works through numbered operations and writes each one's number to a file
when the tier has acknowledged it. What operation i does follows from the model after operations 0 to i - 1, so that
the test knows the two states that are allowed: with the operation in flight, or without it, never with a part of it.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from thinrow.history.recent import LmdbRecent, MemoryRecent
from thinrow.testing.recent_model import ModelTier, append_rows, contract_schema, state_of, users_of, values_of

USERS = ["a", "a\0", "b", "é"]
SCHEMA = contract_schema("string", "string")


def operation(i, model):
    """Rows to append, or (users, through) to trim."""
    rng = random.Random(i)
    if i % 4 == 3:
        users = rng.sample(USERS, 2)
        tops = [model.of[u].counter if u in model.of else 0 for u in users]
        return users, [max(0, top - rng.randrange(30)) for top in tops]
    rows = []
    for j in range(rng.randrange(1, 120)):
        user = rng.choice(USERS)
        held = list(model.of[user].ids) if user in model.of else []
        target = rng.choice(held) if held and rng.random() < 0.1 else None
        rows.append((user, 1000 * i + j, f"{i}.{j}", target, values_of(i + j)))
    return rows


def apply_to_model(model, op):
    if isinstance(op, tuple):
        for user, through in zip(*op, strict=True):
            model.trim(user, through)
    else:
        model.append(op)


def apply_to_tier(tier, op):
    if isinstance(op, tuple):
        tier.trim(users_of(op[0], "string"), np.array(op[1]))
        return None
    return append_rows(tier, op)


def replay(n):
    model = ModelTier()
    for i in range(n):
        apply_to_model(model, operation(i, model))
    return model


def agrees(model, tier):
    try:
        model.check(tier, USERS, [0] * len(USERS))
    except AssertionError:
        return False
    return True


def work(path, start, acknowledged):
    model = replay(start)
    out = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # A small map, so that some kills meet its growth.
    tier = LmdbRecent(path, SCHEMA, map_size=1 << 18)
    # What is imported and loaded on first use would fill the time until the kill.
    warm, idle = MemoryRecent(SCHEMA), ModelTier()
    for i in range(8):
        op = operation(i, idle)
        apply_to_tier(warm, op)
        apply_to_model(idle, op)
    print("ready", flush=True)
    for i in range(start, start + 100_000):
        op = operation(i, model)
        apply_to_tier(tier, op)
        os.write(out, f"{i}\n".encode())
        apply_to_model(model, op)


def killed_after(operations, seconds, path, start, acknowledged):
    """Run ``work`` until so many ``operations`` are acknowledged and about ``seconds`` more, and kill it.

    Returns how many operations were acknowledged in all.
    """
    process = subprocess.Popen([sys.executable, __file__, path, str(start), acknowledged], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    end = time.monotonic() + 120
    while Path(acknowledged).read_bytes().count(b"\n") < start + operations:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.001)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    with open(acknowledged) as lines:
        numbers = [int(line) for line in lines]
    assert numbers == list(range(len(numbers)))
    return len(numbers)


def kill_and_check(tmp_path, rounds, seed):
    rng = random.Random(seed)
    path, acknowledged = str(tmp_path / "recent"), str(tmp_path / "acknowledged")
    open(acknowledged, "w").close()
    done = in_flight = 0
    for _ in range(rounds):
        done = killed_after(rng.randrange(0, 13), rng.uniform(0.0, 0.05), path, done, acknowledged)
        model = replay(done)
        op = operation(done, model)
        with LmdbRecent(path, SCHEMA) as tier:
            applied = not agrees(model, tier)
            apply_to_model(model, op)
            if applied:
                assert agrees(model, tier), f"after {done} acknowledged operations the tier holds part of the next"
                in_flight += 1
            before = state_of(tier, USERS)
            # The client retries what was not acknowledged.
            result = apply_to_tier(tier, op)
            if result is not None:
                assert result.duplicate.tolist() == [applied] * len(result.duplicate)
            assert not applied or state_of(tier, USERS) == before
            assert agrees(model, tier)
        done += 1
        with open(acknowledged, "a") as lines:
            lines.write(f"{done - 1}\n")
    assert done > 4 * rounds
    return in_flight


def test_killed_at_random_moments(tmp_path):
    kill_and_check(tmp_path, rounds=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_many_times(tmp_path, seed):
    kill_and_check(tmp_path, rounds=50, seed=seed)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), sys.argv[3])
