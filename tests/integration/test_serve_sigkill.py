"""The service is killed under load: what it acknowledged is in the table once, and rebuilt as it was seen."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.examples.joiner import join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.table import ExampleTable
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema, ExampleSchema

EXAMPLES = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 300})


class Load:
    """Clients that log impressions and outcomes of their own request ids, and what was acknowledged."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.next = 0
        self.seen: dict[int, tuple[int, int]] = {}
        self.acknowledged: set[int] = set()
        self.clicked: set[int] = set()

    def run(self, port: int, stop: threading.Event) -> None:
        rng = random.Random(port)
        while not stop.is_set():
            try:
                self._session(http.client.HTTPConnection("127.0.0.1", port, timeout=5), rng, stop)
            except (OSError, http.client.HTTPException):
                time.sleep(0.01)

    def _session(self, connection: http.client.HTTPConnection, rng: random.Random, stop: threading.Event) -> None:
        while not stop.is_set():
            users = rng.sample(range(30), 3)
            _, taken = self._post(connection, "/v1/snapshots", {"users": users})
            with self.lock:
                ids = list(range(self.next, self.next + 3))
                self.next += 3
            for i, request in zip(ids, taken["requests"], strict=True):
                self.seen[i] = request["user"], len(request["history"]["event_ts"])
            body = {"seen": taken["seen"], "request_id": ids, "candidates": {"item": [[1, 2]] * 3}}
            status, _ = self._post(connection, "/v1/impressions", body)
            if status == 201:
                self.acknowledged.update(ids)
                at = taken["requests"][0]["request_ts"] + 1
                clicks = {"request_id": ids[:1], "item": [2], "name": "click", "ts": [at]}
                if self._post(connection, "/v1/outcomes", clicks)[0] == 201:
                    self.clicked.add(ids[0])

    def _post(self, connection: http.client.HTTPConnection, path: str, body: Any) -> tuple[int, Any]:
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def start(folder: Path, *options: str) -> tuple[subprocess.Popen[str], int]:
    command = [str(Path(sys.executable).parent / "thinrow"), "serve", "snapshots", "--port", "0", "--commit-s", "0.2"]
    command += ["--store", str(folder / "s"), "--log", str(folder / "l"), "--table", str(folder / "t")]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving snapshots at http://"), line
    return process, int(line.rsplit(":", 1)[1])


def made(folder: Path) -> EventSchema:
    """A store of 30 users, events both archived and recent, and an empty table."""
    rng = np.random.default_rng(0)
    table = pa.table({"user": np.arange(600) % 30, "ts": rng.integers(0, 10**6, 600), "item": rng.integers(0, 9, 600)})
    schema = EventSchema.infer(table.schema, user="user", time="ts")
    with HistoryStore.create(folder / "s", schema, 2) as store:
        store.append(table.slice(0, 500))
        store.compact()
        store.append(table.slice(500))
    ExampleTable.create(folder / "t", event_schema=schema, example_schema=EXAMPLES, n_buckets=2).close()
    return schema


def test_drains_before_it_ends(tmp_path: Path) -> None:
    made(tmp_path)
    process, port = start(tmp_path, "--drain-s", "600")
    assert process.stdout is not None

    def status(how: str, path: str, body: str | None = None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request(how, path, body)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status

    # More than calls may be under way: connections that nobody uses refuse none.
    idle = [socket.create_connection(("127.0.0.1", port), timeout=300) for _ in range(600)]
    assert status("POST", "/v1/snapshots", '{"users": [1]}') == 200
    deadline = time.monotonic() + 300
    while status("GET", "/readyz") != 200 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert status("GET", "/readyz") == 200
    for connection in idle:
        connection.close()
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 120
    while status("GET", "/readyz") == 200 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert status("GET", "/readyz") == 503
    assert status("POST", "/v1/snapshots", '{"users": [1]}') == 200
    # Who asks twice does not want to wait.
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    process.stdout.close()


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path, rounds: int) -> None:
    schema = made(tmp_path)
    load = Load()
    for number in range(rounds + 1):
        process, port = start(tmp_path, "--drain-s", "0.3")
        stop = threading.Event()
        clients = [threading.Thread(target=load.run, args=(port, stop)) for _ in range(3)]
        for c in clients:
            c.start()
        before, deadline = len(load.acknowledged), time.monotonic() + 120
        while len(load.acknowledged) < before + 30 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.Random(number).random())
        # The last one is asked to end, and answers everybody before it does, a while later.
        process.send_signal(signal.SIGTERM if number == rounds else signal.SIGKILL)
        if number == rounds:
            assert process.wait(120) == 0
        stop.set()
        for c in clients:
            c.join()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert len(load.acknowledged) >= 30 * (rounds + 1)
    logs = ImpressionLog(tmp_path / "l" / "impressions", schema, EXAMPLES), OutcomeLog(tmp_path / "l" / "outcomes")
    with ExampleTable.open(tmp_path / "t") as examples, HistoryStore.open(tmp_path / "s") as store:
        report = join_logs(*logs, examples, int(time.time() * 1000) + 10**6)
        assert report.totals.repeated_requests == report.totals.repeated == 0
        parts = [examples.read_bucket(b) for b in examples.buckets()]
        found = np.concatenate([p.request_id for p in parts])
        assert len(found) == len(np.unique(found)), "an impression is there twice"
        assert load.acknowledged <= set(found.tolist()), "an acknowledged impression is lost"
        clicked = set()
        for part in parts:
            lengths = reconstruct(store.pin(), part.batch).histories.lengths()
            for i, user, n in zip(part.request_id.tolist(), part.batch.users.tolist(), lengths.tolist(), strict=True):
                assert load.seen[i] == (user, n)
            clicks = part.labels["click"].to_padded(2)
            clicked |= set(part.request_id[clicks[:, 1] == 1].tolist())
        # A click that came after its window had closed has no label: the join says so.
        assert len(load.clicked - clicked) <= report.totals.after_write + report.totals.late
