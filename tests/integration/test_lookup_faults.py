"""Embedding servers as processes: killed, stopped, started again and renewed under load. No vector is wrong, no read
outlives its deadline by more than the machine's delays, what is degraded is said."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.checkpoints import ServingTable
from thinrow.core.routing import Routing
from thinrow.serving.lookups import Bags, EmbeddingClient
from thinrow.testing.lookups import pooled_by_hand, write_exports

DIMS = {"a.": 8, "b.": 3}
_LONG_S = 120.0


class Process:
    """A server of one shard of two, at a fixed address."""

    def __init__(self, folder: Path, shard: int, name: str, *options: str) -> None:
        self.address = f"unix:{folder / name}"
        command = [str(Path(sys.executable).parent / "thinrow"), "serve", "embeddings", "--shard", f"{shard}/2"]
        command += ["--export", str(folder / "e"), "--listen", self.address, "--refresh-s", "0.05", *options]
        self._command = command
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"serving embeddings at {self.address}\n", line

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Process]]:
    """Shard 0 once, shard 1 twice."""
    write_exports(tmp_path / "e", DIMS, shards=2)
    found = [Process(tmp_path, shard, f"s{i}") for i, shard in enumerate((0, 1, 1))]
    yield found
    for one in found:
        one.end()


class Load:
    """Threads that read all the time, and check every answer against every version that there has been."""

    def __init__(self, folder: Path, servers: list[Process], threads: int = 2) -> None:
        self.folder, self.routing = folder / "e", Routing.even(2)
        addresses = [[servers[0].address], [one.address for one in servers[1:]]]
        self.client = EmbeddingClient(addresses, deadline_s=0.5, hedge_s=0.1)
        self.expected: dict[int, dict[str, Any]] = {}
        self.keys = np.arange(-5, 330)
        self.bags = Bags(self.keys, np.arange(0, 336, 5), "mean")
        self.answers = self.slowest = 0.0
        self.seen: set[tuple[int, tuple[int, ...]]] = set()
        self.errors: list[BaseException] = []
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def know(self) -> None:
        """What the newest version holds."""
        table = ServingTable.open(self.folder, "a.")
        step = table.version.step
        of = {"a.": table.read(self.keys)[0], "b.": pooled_by_hand(self.folder, "b.", self.bags, self.routing)}
        self.expected[step] = of

    def __enter__(self) -> Load:
        self.know()
        for thread in self._threads:
            thread.start()
        self.until(lambda: self.answers > 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.client.close()

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + _LONG_S
        while not holds():
            assert not self.errors, self.errors[0]
            assert time.monotonic() < end
            time.sleep(0.005)

    def more(self, missing: tuple[int, ...], n: int = 20) -> None:
        """Wait for ``n`` more answers without these shards, from now on."""
        with self._lock:
            self._counted, self._missing = 0, missing
        self.until(lambda: self._counted >= n)

    _counted, _missing = 0, ()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._read()
        except BaseException as error:
            self.errors.append(error)

    def _read(self) -> None:
        since = time.monotonic()
        answer = self.client.read({"a.": self.keys, "b.": self.bags})
        took = time.monotonic() - since
        steps = {version.step for version in answer.versions.values() if version is not None}
        assert len(steps) <= 1
        if steps:
            of = self.expected[steps.pop()]
            lost = np.isin(self.routing.shards(self.keys), answer.missing)
            np.testing.assert_array_equal(answer["a."].degraded, lost)
            np.testing.assert_array_equal(answer["a."].vectors[~lost], of["a."][~lost])
            whole = ~answer["b."].degraded
            np.testing.assert_array_equal(answer["b."].vectors[whole], of["b."][whole])
            assert (answer["a."].vectors[lost] == 0.25).all()
        else:
            assert answer.degraded
        with self._lock:
            self.answers += 1
            self.slowest = max(self.slowest, took)
            self._counted += answer.missing == self._missing


def _steps(process: Process, port: int) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/readyz")
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.mark.slow
def test_servers_are_killed_stopped_and_started_again_under_load(tmp_path: Path, servers: list[Process]) -> None:
    with Load(tmp_path, servers) as load:
        load.more(())
        servers[1].signal(signal.SIGKILL)
        load.more(())
        servers[2].signal(signal.SIGSTOP)
        load.more((1,))
        servers[2].signal(signal.SIGCONT)
        load.more(())
        servers[0].signal(signal.SIGKILL)
        load.more((0,))
        servers[0].end()
        servers[0].start()
        load.more(())
        servers[1].end()
        servers[1].start()
        servers[2].signal(signal.SIGSTOP)
        load.more(())
        counted = load.client.stats.read()["requests"]
        assert set(counted) == {"whole", "degraded"}
        # The deadline is half a second; a machine with other work may take its time to wake a thread.
        assert load.slowest < 5


@pytest.mark.slow
def test_deltas_under_load_never_mix_versions(tmp_path: Path, servers: list[Process]) -> None:
    with Load(tmp_path, servers) as load:
        for step in range(2, 8):
            # Known before a server can have it: rows of the next step are only compared once they are there.
            ahead = tmp_path / "next"
            write_exports(ahead / str(step), DIMS, shards=2, deltas=step - 1)
            load.folder = ahead / str(step)
            load.know()
            write_exports(tmp_path / "e", DIMS, shards=2, since=step, deltas=step - 1)
            servers[1].signal(signal.SIGSTOP if step % 2 else signal.SIGCONT)
            load.more((), 40)
        servers[1].signal(signal.SIGCONT)
        last = max(load.expected)
        load.until(lambda: load.client.read({"a.": load.keys}).versions["a."].step == last)  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_server_says_how_it_is_and_drains(tmp_path: Path) -> None:
    write_exports(tmp_path / "e", DIMS, shards=2)
    one = Process(tmp_path, 0, "s", "--http", "127.0.0.1:0", "--drain-s", "60", "--table", "a.")
    try:
        assert one.process.stdout is not None
        port = int(one.process.stdout.readline().rsplit(":", 1)[1])
        assert _steps(one, port) == (200, {"status": "ready", "steps": {"a.": 1}})
        keys = np.arange(300)
        mine = keys[Routing.even(2).shards(keys) == 0]
        with EmbeddingClient([[one.address], ["unix:none"]], deadline_s=_LONG_S) as client:
            assert not client.read({"a.": mine}).degraded
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            assert 'thinrow_embeddings_requests_total{kind="OK"} 1\n' in text
            assert f"thinrow_embeddings_keys_total {len(mine)}\n" in text
            assert "thinrow_embeddings_request_seconds_count 1\n" in text
            one.signal(signal.SIGTERM)
            end = time.monotonic() + _LONG_S
            while _steps(one, port)[0] != 503:
                assert time.monotonic() < end
            assert not client.read({"a.": mine}).degraded
        one.signal(signal.SIGTERM)
        assert one.process.wait(_LONG_S) == 0
    finally:
        one.end()
