"""Writers are killed (SIGKILL) at random moments; what is newest afterwards is whole, and leftovers go.

Run as a script, this file is the process whose children write and are killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from thinrow.checkpoints import commit, load, manifest, save, save_shard, steps
from thinrow.checkpoints.scratch import scratch, sweep
from thinrow.core.routing import Routing
from thinrow.storage import swap


def arrays(step: int) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(step)
    return {f"t{i}": rng.random((200 + step % 100, 97)) for i in range(4)} | {"step": np.array(step)}


def write_until_killed(folder: Path, start: int, keep: int, out: int) -> None:
    for step in range(start, start + 10_000):
        save(folder, step, tensors=arrays(step), meta={"step": step}, keep=keep)
        os.write(out, step.to_bytes(8, "little"))


def acknowledged_by_killed(folder: Path, start: int, keep: int, wait: bool, seconds: float) -> int:
    """Last step that a writer reported before it was killed; ``start - 1`` where it came to none.

    It is killed after ``seconds``, counted from its first report where ``wait`` says so.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        write_until_killed(folder, start, keep, write)
    os.close(write)
    reported = os.read(read, 8) if wait else b""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    with open(read, "rb") as pipe:
        reported += pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return int.from_bytes(reported[-8:], "little") if reported else start - 1


def kill_and_check(folder: Path, rounds: int, seed: int) -> None:
    warnings.simplefilter("error")
    rng = random.Random(seed)
    keep, done, left = 3, 0, 0
    save(folder, 0, tensors=arrays(0), meta={"step": 0}, keep=keep)
    for i in range(rounds):
        acknowledged = acknowledged_by_killed(folder, done + 1, keep, i % 3 == 0, rng.expovariate(1 / 0.05))
        # A whole checkpoint is newest, with no warning of a damaged one; and none that was reported is lost.
        found = load(folder)
        assert found.step in (acknowledged, acknowledged + 1)
        assert found.meta == {"step": found.step}
        assert found.tensors.keys() == arrays(found.step).keys()
        assert all(np.array_equal(found.tensors[n], a) for n, a in arrays(found.step).items())
        # One is in flight at most: being written, or being removed.
        held = steps(folder)
        assert held == list(range(held[0], found.step + 1))
        assert len(held) <= keep + 2
        hidden = [p.name for p in folder.iterdir() if p.name.startswith(".tmp-")]
        left += len(hidden) > 0
        done = found.step
    save(folder, done + 1, tensors=arrays(done + 1), meta={}, keep=keep)
    assert [p.name for p in sorted(folder.iterdir())] == [f"step-{s:08d}" for s in range(done - 1, done + 2)]
    print(done, left)


def kills(folder: Path, rounds: int, seed: int) -> tuple[int, int]:
    """Steps written, and rounds in which the killed writer left something hidden."""
    command = [sys.executable, __file__, str(folder), str(rounds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written, left = map(int, done.stdout.split())
    return written, left


def test_killed_at_random_moments(tmp_path: Path) -> None:
    written, left = kills(tmp_path, rounds=25, seed=1)
    assert written > 8
    assert left > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_many_times(tmp_path: Path, seed: int) -> None:
    kills(tmp_path, rounds=400, seed=seed)


HALF_WRITTEN = """
import os, sys
from pathlib import Path
from thinrow.checkpoints.scratch import scratch
with scratch(Path(sys.argv[1])) as path:
    path.mkdir()
    (path / "tensors.safetensors").write_bytes(b"half")
    print(path.name, flush=True)
    sys.stdin.readline()
    path.rename(path.parent / "ready")
"""


def hidden(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.name.startswith(".tmp-")}


def half_writing(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HALF_WRITTEN, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_live_writer_keeps_its_files_and_a_dead_one_does_not(tmp_path: Path) -> None:
    with half_writing(tmp_path) as live, half_writing(tmp_path) as dead:
        assert live.stdout is not None
        assert dead.stdout is not None
        kept, left = live.stdout.readline().strip(), dead.stdout.readline().strip()
        dead.kill()
        dead.communicate()
        assert hidden(tmp_path) == {kept, f"{kept}.lock", left, f"{left}.lock"}
        save(tmp_path, 1, tensors={}, meta={})
        assert hidden(tmp_path) == {kept, f"{kept}.lock"}
        live.communicate("go on\n")
        assert live.returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ready", "step-00000001"]


def test_a_failed_owner_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with scratch(tmp_path) as path:
            path.mkdir()
            assert hidden(tmp_path) == {path.name, f"{path.name}.lock"}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert hidden(tmp_path) == set()


def test_a_sweep_between_creation_and_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thinrow.checkpoints import scratch as module

    lock = module.fcntl.flock

    def late(descriptor: int, how: int) -> None:
        monkeypatch.setattr(module.fcntl, "flock", lock)
        sweep(tmp_path)
        lock(descriptor, how)

    monkeypatch.setattr(module.fcntl, "flock", late)
    with scratch(tmp_path) as path:
        sweep(tmp_path)
        assert hidden(tmp_path) == {f"{path.name}.lock"}


def test_where_there_are_no_locks_nothing_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thinrow.checkpoints import scratch as module

    def none(descriptor: int, how: int) -> None:
        raise OSError(95, "no locks")

    (tmp_path / ".tmp-1").mkdir()
    (tmp_path / ".tmp-1.lock").touch()
    monkeypatch.setattr(module.fcntl, "flock", none)
    save(tmp_path, 1, tensors=arrays(1), meta={})
    assert hidden(tmp_path) == {".tmp-1", ".tmp-1.lock"}
    assert load(tmp_path).step == 1


@pytest.mark.parametrize("swaps", [True, False])
def test_a_step_that_is_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool) -> None:
    """Where the system can swap folders, there is no moment without the old one or the new one."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    if swaps and not swap.folders(tmp_path / "one", tmp_path / "other"):
        pytest.skip("folders cannot be swapped here")
    removed: list[Path] = []
    remove = manifest.remove
    monkeypatch.setattr(manifest, "remove", lambda path: (removed.append(path), remove(path)))
    if not swaps:
        monkeypatch.setattr(swap, "folders", lambda one, other: False)
    run, routing = tmp_path / "run", Routing.even(1)
    for meta in ({"at": 1}, {"at": 2}):
        save(run, 1, tensors=arrays(1), meta=meta)
        save_shard(run, 2, 0, routing, tensors={})
        commit(run, 2, routing, meta=meta)
        assert load(run / "step-00000001").meta == load(run).meta == meta
    assert bool(removed) != swaps
    assert sorted(p.name for p in run.iterdir()) == ["step-00000001", "step-00000002"]


def test_many_writers_at_once(tmp_path: Path) -> None:
    failed: list[Exception] = []

    def write(first: int) -> None:
        try:
            for step in range(first, 40, 4):
                save(tmp_path, step, tensors=arrays(step), meta={})
                save(tmp_path, 100, tensors=arrays(100), meta={})
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failed == []
    assert steps(tmp_path) == [*range(40), 100]
    assert hidden(tmp_path) == set()
    assert np.array_equal(load(tmp_path).tensors["t0"], arrays(100)["t0"])


if __name__ == "__main__":
    kill_and_check(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
