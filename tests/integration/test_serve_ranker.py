"""``thinrow serve local`` as processes: servers and ranker are killed under load, releases change, and all that was
served is rebuilt without a difference."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.checkpoints import load
from thinrow.serving import publish
from thinrow.testing.rankers import world_config
from thinrow.testing.world import World, brand_of, make_world
from thinrow.training import train

pytestmark = pytest.mark.slow
THINROW = str(Path(sys.executable).parent / "thinrow")
LONG_S = 120.0


class Cluster:
    """One that runs: its processes by name, and where it ranks."""

    def __init__(self, *arguments: str) -> None:
        command = [THINROW, "serve", "local", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
        )
        self.lines: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for thread in self._threads:
            thread.start()
        eventually(lambda: self.url is not None or self.process.poll() is not None)
        assert self.process.poll() is None, self.lines

    @property
    def url(self) -> str | None:
        found = [line for line in self.lines if "serving rankings at" in line]
        return found[-1].split()[-1] if found else None

    def pid_of(self, what: str) -> int:
        """The process whose command line has ``what``."""
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            if what in Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "):
                return int(child)
        return 0

    def ask(self, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"{self.url}{path}", data, timeout=LONG_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except (OSError, ValueError) as error:
            return 0, {"error": str(error)}

    def end(self) -> int:
        self.process.terminate()
        status = self.process.wait(LONG_S)
        for thread in self._threads:
            thread.join(LONG_S)
        return status

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.lines.append(line.rstrip("\n"))


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = make_world(tmp_path / "world", days=6)
    with made.store() as store, made.table() as table:
        train(world_config("hstu", epochs=1), store, table, out=tmp_path / "run")
    publish(load(tmp_path / "run"), tmp_path / "releases", shards=2)
    return made


def body(number: int, user: int, now_ms: int) -> dict[str, Any]:
    items = (np.arange(20) * 7 + number) % 60
    shown = {"item": items.tolist(), "brand": brand_of(items)}
    return {"request_id": number, "user": user, "request_ts": now_ms, "candidates": shown, "context": {"city": "c"}}


def test_processes_are_killed_and_releases_change_under_load(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "releases"
    cluster = Cluster(
        *("--store", str(world.store_path), "--model", str(folder), "--servers", "2", "--log", str(tmp_path / "log")),
        *("--table", str(tmp_path / "served"), "--", "--refresh-s", "0.1", "--say-requests", "--lookup-s", "0.5"),
    )
    answered: list[dict[str, Any]] = []
    failed: list[tuple[int, dict[str, Any]]] = []
    stop = threading.Event()

    def load_it() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            status, found = cluster.ask("/v1/rank", body(number, 1 + 3 * (number % 12), world.end_ms + number))
            (answered.append(found) if status == 200 else failed.append((status, found)))

    thread = threading.Thread(target=load_it)
    try:
        eventually(lambda: cluster.ask("/readyz")[0] == 200)
        thread.start()
        eventually(lambda: len(answered) > 20)
        assert not any(a["degraded_rows"] for a in answered)
        assert not failed
        first = answered[0]["model_version"]
        # A server is killed: answers say so, and are whole again when it was started again.
        os.kill(cluster.pid_of("--shard 1/2"), signal.SIGKILL)
        eventually(lambda: any(a["degraded_rows"] for a in answered))
        eventually(lambda: len(answered) > 5 and not any(a["degraded_rows"] for a in answered[-5:]))
        # One is stopped: nobody waits longer than the deadline of a look-up.
        stopped = cluster.pid_of("--shard 0/2")
        os.kill(stopped, signal.SIGSTOP)
        before = len(answered)
        eventually(lambda: sum(bool(a["degraded_rows"]) for a in answered[before:]) > 3)
        os.kill(stopped, signal.SIGCONT)
        eventually(lambda: not any(a["degraded_rows"] for a in answered[-5:]))
        # Another release, and back to the one before, as a newer release.
        moved = load(tmp_path / "run")
        moved.tensors["table.values"][:7] += np.float32(0.5)
        object.__setattr__(moved, "step", moved.step + 1)
        publish(moved, folder, shards=2, delta=True)
        eventually(lambda: answered[-1]["model_version"] != first)
        ran = subprocess.run([THINROW, "rollback", str(folder)], capture_output=True, text=True, timeout=LONG_S)
        assert ran.returncode == 0, ran.stderr
        eventually(lambda: answered[-1]["model_version"] == ran.stdout.split()[0].rstrip(":"))
        assert cluster.ask("/v1/model")[1]["arms"][0]["release"] == answered[-1]["model_version"]
        # The ranker is killed, too; requests that it had answered are in the log.
        os.kill(cluster.pid_of("serve ranker"), signal.SIGKILL)
        eventually(lambda: bool(failed))
        n = len(answered)
        eventually(lambda: len([x for x in cluster.lines if "serving rankings at" in x]) == 2)
        eventually(lambda: len(answered) > n + 5)
    finally:
        stop.set()
        if thread.is_alive():
            thread.join(LONG_S)
        status = cluster.end()
    assert status == 0, cluster.lines[-20:]
    assert {s for s, _ in failed} <= {0, 429, 503}
    said = [json.loads(line) for line in cluster.lines if line.startswith("{")]
    assert {"started", "ranked", "swapped", "ended", "ended_unasked", "cluster_ended"} <= {s["event"] for s in said}
    # An impression of every answer, each rebuilt from the archive as it was read, with the model that it names.
    with world.store() as store:
        store.compact()
    replay = [THINROW, "replay", str(folder), "--store", str(world.store_path), "--table", str(tmp_path / "served")]
    ran = subprocess.run(replay, capture_output=True, text=True, timeout=LONG_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    requests = int(ran.stdout.split()[0])
    assert requests >= len({a["request_id"] for a in answered})
    assert "0 with other inputs, 0 with other scores" in ran.stdout
    assert "0 are of other models" in ran.stdout


def test_a_cluster_whose_supervisor_is_killed_leaves_no_process(world: World, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run")
    cluster = Cluster("--store", str(world.store_path), "--model", str(tmp_path / "releases"), "--servers", "1")
    children = [cluster.pid_of("serve embeddings"), cluster.pid_of("serve ranker")]
    assert all(children)
    cluster.process.kill()
    cluster.process.wait(LONG_S)
    eventually(lambda: not any(Path(f"/proc/{child}/cmdline").exists() for child in children))
