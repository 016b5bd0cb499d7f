"""The service over HTTP: the same histories as in process, limits that answer early, and a log that fits them."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest
import uvicorn

from thinrow.core.errors import Overloaded, StoreError
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.records import WRITTEN_UNDER
from thinrow.examples.table import ExampleTable
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.online import AsyncSnapshots, Journal, Limits, TableWriter, app, create_app, wire
from thinrow.online.snapshots import some_users
from thinrow.schema import EventSchema, ExampleSchema, HistoryVersion

EXAMPLES = ExampleSchema.of(
    candidates={"item": "int64", "score": "float32"}, item="item", outcomes={"click": 50}, context={"hour": "int8"}
)


class Client:
    """The service in a thread, and one connection to it."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        rng = np.random.default_rng(4)
        self.table = pa.table(
            {
                "user": rng.integers(0, 20, 400),
                "ts": rng.integers(0, 1_000, 400),
                "item": rng.integers(0, 50, 400),
                "price": pa.array(rng.random(400), mask=rng.random(400) < 0.2),
                "tag": pa.array(rng.choice(["a", "b"], 400)),
            }
        )
        schema = EventSchema.infer(self.table.schema, user="user", time="ts")
        self.store = HistoryStore.create(folder / "s", schema, 2, sync=False)
        self.store.append(self.table.slice(0, 300))
        self.store.compact()
        self.store.append(self.table.slice(300))
        self.logs = ImpressionLog(folder / "i", schema, EXAMPLES), OutcomeLog(folder / "o")
        self.journal = Journal(folder / "j", *self.logs)
        self.app = create_app(self.store, journal=self.journal, examples=EXAMPLES, limits=limits, clock=lambda: 900)
        self.service = self.app.state.service
        config = uvicorn.Config(self.app, port=0, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def send(self, how: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(how, path, data, headers or {})
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        status, data = self.send("POST", path, body)
        return status, json.loads(data)

    def wait_ready(self) -> None:
        while self.send("GET", "/readyz")[0] != 200:
            time.sleep(0.01)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.journal.close()
        self.store.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    made = Client(tmp_path)
    yield made
    made.close()


def test_the_same_history_in_both_formats_and_in_process(client: Client) -> None:
    users, at = [3, 5, 99, 3], [500, 1_000, 700, 900]
    built = client.store.read(users, at).histories
    status, answer = client.post("/v1/snapshots", {"users": users, "request_ts": at, "request_id": ["a", 2, 3, 4]})
    assert status == 200
    for name in ("event_ts", "item", "price", "tag"):
        want = built.to_jagged(name).to_arrow().to_pylist()
        assert [r["history"][name] for r in answer["requests"]] == want
    assert [r["request_id"] for r in answer["requests"]] == ["a", 2, 3, 4]
    versions = [base64.b64decode(r["version"]) for r in answer["requests"]]
    assert all(len(v) == wire.VERSION_BYTES < 64 for v in versions)
    taken = client.store.peek(users, at).requests.versions
    assert [HistoryVersion.decode(v) for v in versions] == [HistoryVersion(*row.tolist()) for row in taken]
    body = {"users": users, "request_ts": at, "projection": {"columns": ["item"], "max_len": 4}}
    status, data = client.send("POST", "/v1/snapshots", body, {"accept": wire.ARROW})
    table = pa.ipc.open_stream(data).read_all()
    assert status == 200
    assert table.column_names == ["user_id", "request_ts", "version", "event_ts", "item"]
    assert table["item"].to_pylist() == [row[-4:] for row in built.to_jagged("item").to_arrow().to_pylist()]
    assert table["version"].to_pylist() == versions
    assert wire.SEEN in table.schema.metadata


def test_the_boundary_is_the_same_everywhere(client: Client) -> None:
    """``event_ts < T``: recent tier, archive, batch reconstruction and HTTP agree on every time that there is."""
    user, ts = (client.table[c].to_numpy() for c in ("user", "ts"))
    times = np.unique(ts[user == 7])
    users = [7] * len(times)
    want = [int((ts[user == 7] < t).sum()) for t in times]
    for step in range(2):
        taken = client.store.snapshot(users, times)
        assert reconstruct(taken.generation, taken.requests).histories.lengths().tolist() == want
        assert (taken.requests.inline.lengths.sum() > 0) == (step == 0)
        _, answer = client.post("/v1/snapshots", {"users": users, "request_ts": times.tolist()})
        assert [len(r["history"]["event_ts"]) for r in answer["requests"]] == want
        client.store.compact()


def logged(client: Client, answer: dict[str, Any], ids: list[int], **more: Any) -> tuple[int, dict[str, Any]]:
    body = {
        "seen": answer["seen"],
        "request_id": ids,
        "context": {"hour": [1] * len(ids)},
        "candidates": {"item": [[1, 2]] * len(ids), "score": [[0.5, 0.25]] * len(ids)},
        "model_version": "m",
    }
    return client.post("/v1/impressions", body | more)


def test_what_is_logged_is_what_was_seen(client: Client, tmp_path: Path) -> None:
    _, answer = client.post("/v1/snapshots", {"users": [3, 5, 9], "histories": False})
    assert logged(client, answer, [10, 11, 12]) == (201, {"logged": 3})
    # What comes later, archived or not, does not change what the impression stands for.
    want = client.store.read([3, 5, 9], 900).histories.to_jagged("item").to_arrow().to_pylist()
    client.store.append(
        pa.table({"user": [3, 5], "ts": [1, 2], "item": [7, 7], "price": [1.0, 1.0], "tag": ["a", "a"]})
    )
    client.store.compact()
    outcomes = {"request_id": [10, 12], "item": [2, 1], "name": "click", "ts": [905, 910]}
    assert client.post("/v1/outcomes", outcomes) == (201, {"logged": 2})
    client.journal.close()
    with ExampleTable.create(
        tmp_path / "t", event_schema=client.store.schema, example_schema=EXAMPLES, n_buckets=2
    ) as table:
        writer = TableWriter(*client.logs, table, commit_s=1e9, cluster_every=1, clock=lambda: 10_000)
        writer.close()
        assert writer.error is None
        assert writer.last is not None
        assert writer.last.examples == 3
        assert all(len(table._by_bucket(table.data_files())[b]) == 1 for b in table.buckets())
        parts = [table.read_bucket(b) for b in table.buckets()]
    found: dict[int, Any] = {}
    for part in parts:
        built = reconstruct(client.store.pin(), part.batch).histories.to_jagged("item").to_arrow().to_pylist()
        for i, items, clicks in zip(part.request_id, built, part.labels["click"].to_arrow().to_pylist(), strict=True):
            found[int(i)] = items, clicks
    assert [found[i][0] for i in (10, 11, 12)] == want
    assert [found[i][1] for i in (10, 11, 12)] == [[0, 1], [0, 0], [1, 0]]


def test_impressions_as_an_arrow_stream(client: Client) -> None:
    _, data = client.send("POST", "/v1/snapshots", {"users": [3, 5]}, {"accept": wire.ARROW})
    seen = pa.ipc.open_stream(data).read_all().schema.metadata[wire.SEEN]
    table = pa.table(
        {
            "request_id": [1, 2],
            "ctx_hour": pa.array([3, 4], pa.int8()),
            "cand_item": [[1], [2, 3]],
            "cand_score": pa.array([[0.5], [1, 2]], pa.list_(pa.float32())),
        }
    ).replace_schema_metadata({wire.SEEN: seen, b"model_version": b"m7"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    body = sink.getvalue().to_pybytes()
    assert client.send("POST", "/v1/impressions", body, {"content-type": wire.ARROW})[0] == 201
    assert client.send("POST", "/v1/impressions", body[:-60], {"content-type": wire.ARROW})[0] == 400
    for strange, message in (
        (table.append_column("outcome_id", pa.array(["a", "b"])), b"unknown key 'outcome_id'"),
        (table.set_column(0, "request_id", pa.array([1.0, 2.0])), b"give integers"),
        (table.set_column(0, "request_id", pa.array([1, None])), b"give integers"),
        (table.set_column(2, "cand_item", pa.array([[True], [False]])), b"dtype int64"),
        (table.set_column(2, "cand_item", pa.array([[1], None])), b"a row is no list"),
        (table.set_column(2, "cand_item", pa.array([1, 2])), b"a row is no list"),
        (table.replace_schema_metadata({wire.SEEN: seen, b"arm": b"\xff"}), b"no UTF-8 form"),
    ):
        status, said = client.send("POST", "/v1/impressions", wire._ipc(strange, None), {"content-type": wire.ARROW})
        assert (status, message in said) == (400, True), said
    client.journal.close()
    found = next(client.logs[0].scan())
    assert found.candidates["item"].to_arrow().to_pylist() == [[1], [2, 3]]
    assert found.model_version.to_arrow().to_pylist() == ["m7", "m7"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/snapshots", b"{", "no JSON"),
        ("/v1/snapshots", [], "is a list"),
        ("/v1/snapshots", {}, "lacks 'users'"),
        ("/v1/snapshots", {"users": ["x"]}, "kind string"),
        ("/v1/snapshots", {"users": [1], "request_ts": [1, 2]}, "request times"),
        ("/v1/snapshots", {"users": [1], "request_ts": 1.5}, "'request_ts' is 1.5"),
        ("/v1/snapshots", {"users": [1], "projection": {"newest": 3}}, "unknown key 'newest'"),
        ("/v1/snapshots", {"users": [1], "projection": {"columns": ["no"]}}, "no column 'no'"),
        ("/v1/snapshots", {"users": [1], "request_id": []}, "0 request ids"),
        ("/v1/snapshots", b'{"users": [1], "request_id": [NaN]}', "cannot be given back"),
        ("/v1/snapshots", {"users": [1], "request_ts": 1 << 63}, "no 64-bit integer"),
        ("/v1/snapshots", {"users": [1, True]}, "true or false"),
        ("/v1/snapshots", {"users": [1], "max_len": 3}, "unknown key 'max_len' of a snapshot"),
        ("/v1/impressions", {"seen": "AAAA", "request_id": [1], "candidates": {}}, "not a token"),
        ("/v1/impressions", {"seen": "?", "request_id": [1], "candidates": {}}, "no base64"),
        ("/v1/outcomes", {"request_id": [1], "item": [1, 2], "name": "click", "ts": [1]}, "give one each"),
        ("/v1/outcomes", {"request_id": [1.5], "item": [1], "name": "click", "ts": [1]}, "no 64-bit integer"),
        *(
            ("/v1/outcomes", {"request_id": [1], "item": [1], "name": "click", "ts": [1]} | change, message)
            for change, message in (
                ({"ts": [1_700_000_000_000_000]}, "look at the sender's clock"),
                ({"ts": [(1 << 63) - 1]}, "look at the sender's clock"),
                ({"ts": [-1]}, "ts is -1 in row 0"),
                ({"request_id": [-(1 << 63)]}, "heartbeats"),
                ({"value": 1 << 63}, "no 64-bit integer"),
                ({"value": 1 << 40}, "exceeds int32"),
                ({"value": [True]}, "no 64-bit integer"),
                ({"name": "\ud800"}, "no UTF-8 form"),
                ({"name": ["\ud800"]}, "no UTF-8 form"),
                ({"outcome_id": ["x"]}, "unknown key 'outcome_id' of an outcome"),
                ({"\ud800": ["x"]}, "unknown key"),
            )
        ),
    ],
)
def test_bad_requests_say_why(client: Client, path: str, body: Any, message: str) -> None:
    status, answer = client.post(path, body)
    assert status == 400
    assert message in answer["error"]["message"]


def test_bad_impressions_log_nothing(client: Client) -> None:
    _, answer = client.post("/v1/snapshots", {"users": [3, 5]})
    for more, message in (
        ({"request_id": [1]}, "there are 1 ids"),
        ({"rows": [2]}, "counted from 0"),
        ({"candidates": {"item": [[1], [2]]}}, "'score' is missing"),
        ({"candidates": {"item": [1, 2], "score": [[1], [2]]}}, "not a list of lists"),
        ({"context": {"hour": ["x", "y"]}}, "dtype int8"),
        ({"context": {"hour": "xy"}}, "a list of one value a request"),
        ({"context": {"hour": {"a": 1, "b": 2}}}, "a list of one value a request"),
        ({"context": {"hour": 4}}, "a list of one value a request"),
        ({"context": {"hour": [1.0, True]}}, "true or false"),
        ({"context": {"hour": [1.0, 2.0]}}, "dtype int8"),
        ({"candidates": {"item": 5, "score": [[1], [2]]}}, "not a list of lists"),
        ({"candidates": {"item": ["12", "3"], "score": [[1], [2]]}}, "not a list of lists"),
        ({"candidates": {"item": [[1.5], [2]], "score": [[1], [2]]}}, "dtype int64"),
        ({"candidates": {"item": [[1 << 63], [2]], "score": [[1], [2]]}}, "dtype int64"),
        ({"candidates": {"item": [[1], [2]], "score": [[1.5, True], [2]]}}, "true or false"),
        ({"candidates": {"item": [[1], [2]], "score": [[1e300], [2]]}}, "dtype float32"),
        ({"boundary": []}, "0 values for 2 requests"),
        ({"boundary": [0, -5]}, "boundary is -5 in row 1"),
        ({"boundary": [10**15, 0]}, "boundary is 1000000000000000 in row 0"),
        ({"model_version": "\ud800"}, "no UTF-8 form"),
        ({"arm": "\ud800"}, "no UTF-8 form"),
        ({"request_id": [-(1 << 63), 1]}, "heartbeats"),
        ({"arms": ["a"]}, "unknown key 'arms' of an impression"),
    ):
        status, said = logged(client, answer, [1, 2], **more)
        assert (status, message in said["error"]["message"]) == (400, True), said
    assert logged(client, answer, [1], rows=[1])[0] == 201
    client.journal.close()
    assert [p.snapshots.users.tolist() for p in client.logs[0].scan()] == [[5]]
    assert logged(client, answer, [1, 2])[0] == 503


def test_times_that_no_join_may_see_are_not_logged(client: Client) -> None:
    at = (1 << 63) - 1
    status, answer = client.post("/v1/snapshots", {"users": [3], "request_ts": at})
    assert status == 200
    status, said = logged(client, answer, [1])
    assert (status, f"request_ts is {at} in row 0" in said["error"]["message"]) == (400, True), said


def test_request_ids_of_an_arrow_answer_are_of_one_type(client: Client) -> None:
    for ids in ([1, "a"], [{}, []], [1 << 70, 1]):
        body = {"users": [3, 5], "request_id": ids}
        status, said = client.send("POST", "/v1/snapshots", body, {"accept": wire.ARROW})
        assert (status, b"cannot be given back" in said) == (400, True), said
        assert client.send("POST", "/v1/snapshots", body)[0] == 200


def forged(token: str, change: Callable[[pa.Table], pa.Table]) -> str:
    changed = wire._ipc(change(wire._table(base64.b64decode(token)[8:])), None)
    return base64.b64encode(wire._MAGIC + zlib.crc32(changed).to_bytes(4, "little") + changed).decode()


def test_a_token_of_another_store_is_refused(client: Client) -> None:
    _, answer = client.post("/v1/snapshots", {"users": [3, 5]})

    def put(name: str, values: pa.Array) -> Callable[[pa.Table], pa.Table]:
        return lambda table: table.set_column(table.schema.get_field_index(name), name, values)

    for change in (
        put("user_id", pa.array(["a", "b"])),
        put("user_id", pa.array([None, 3], pa.int64())),
        lambda table: table.drop(["v_seq_len"]),
        put("v_seq_len", pa.array([-5, 3], pa.int64())),
        lambda table: table.replace_schema_metadata(dict.fromkeys(table.schema.metadata, b"{")),
        lambda table: table.replace_schema_metadata(
            {WRITTEN_UNDER: replace(client.store.schema, user_kind="string", schema_id=9).to_json()}
        ),
    ):
        status, said = logged(client, answer | {"seen": forged(answer["seen"], change)}, [1, 2])
        assert (status, "of another store" in said["error"]["message"]) == (400, True), said


def test_a_fault_of_the_service_is_json_and_counted(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(wire, "projection_of", fail)
    status, said = client.post("/v1/snapshots", {"users": [3]})
    assert (status, said["error"]["type"]) == (500, "InternalError")
    assert "secret" not in json.dumps(said)
    assert "secret" in caplog.text
    metrics = client.send("GET", "/metrics")[1].decode()
    assert 'thinrow_requests_total{path="/v1/snapshots",status="500"} 1.0' in metrics


def test_it_is_ready_when_it_is_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, once = threading.Event(), app._Service._try_once

    def wait(service: app._Service) -> None:
        assert go.wait(300)
        once(service)
        assert sorted(some_users(service.store)) == [0, 0]
        raise RuntimeError("it serves none the less")

    monkeypatch.setattr(app._Service, "_try_once", wait)
    client = Client(tmp_path)
    try:
        status, said = client.send("GET", "/readyz")
        assert (status, json.loads(said)) == (503, {"status": "warming up"})
        assert client.send("GET", "/healthz")[0] == 200
        go.set()
        client.wait_ready()
    finally:
        client.close()


def test_bodies_that_come_in_are_bounded_and_health_is_not(tmp_path: Path) -> None:
    client = Client(tmp_path, Limits(threads=1, waiting=1, writes=1, body_s=0.2))
    try:
        client.service.reading = 3
        assert client.send("POST", "/v1/snapshots", {"users": [3]})[0] == 429
        assert client.send("GET", "/healthz")[0] == 200
        client.service.reading = 0
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=300)
        connection.putrequest("POST", "/v1/outcomes")
        connection.putheader("content-length", "100")
        connection.endheaders(b"{")
        answer = connection.getresponse()
        assert (answer.status, b"not there after 0.2 s" in answer.read()) == (400, True)
        connection.close()
        assert client.service.reading == 0
    finally:
        client.close()


def test_limits_answer_early(tmp_path: Path) -> None:
    client = Client(tmp_path, Limits(body_bytes=9_000, users=3, threads=1, waiting=0, writes=0))
    try:
        assert client.post("/v1/snapshots", {"users": [1, 2, 3, 4]})[0] == 413
        assert client.send("POST", "/v1/snapshots", b" " * 9_001)[0] == 413
        _, answer = client.post("/v1/snapshots", {"users": [3], "histories": False})
        outcomes = {"request_id": [1], "item": [2], "name": "click", "ts": [905]}
        assert client.post("/v1/outcomes", outcomes)[0] == 429
        client.service.snapshots._inside = 1
        status, answer = client.post("/v1/snapshots", {"users": [3]})
        assert (status, answer["error"]["type"]) == (429, "Overloaded")
        client.service.snapshots._inside = 0
        assert client.post("/v1/snapshots", {"users": [3]})[0] == 200
    finally:
        client.close()


def test_an_answer_has_no_more_events_than_it_may(tmp_path: Path) -> None:
    client = Client(tmp_path, Limits(events=60))
    try:
        users = np.arange(20)
        held = client.store.read(users, 900).histories.lengths()
        recent = client.store.peek(users, 900).requests.inline.lengths
        busiest = int(users[recent.argmax()])
        status, answer = client.post("/v1/snapshots", {"users": users.tolist()})
        assert (status, answer["error"]["type"]) == (429, "Overloaded")
        assert (
            f"{recent.sum()} recent events would be logged, {recent.max()} of them of user"
            in answer["error"]["message"]
        )
        for _ in range(3_000):
            if not client.store.peek(users, 900).requests.inline.lengths.sum():
                break
            time.sleep(0.02)
        assert client.post("/v1/snapshots", {"users": users.tolist(), "histories": False})[0] == 200
        status, answer = client.post("/v1/snapshots", {"users": users.tolist()})
        assert status == 413
        assert f"the histories have {held.sum()} events" in answer["error"]["message"]
        assert "at most 60 a call: ask for the newest ones (max_len of the projection)" in answer["error"]["message"]
        asked = {"users": users.tolist(), "projection": {"max_len": 3}}
        assert client.post("/v1/snapshots", asked)[0] == (200 if np.minimum(held, 3).sum() <= 60 else 413)
        # Of one user there is room: exactly so many as there may be.
        assert client.post("/v1/snapshots", {"users": [busiest]})[0] == 200
        client.service.snapshots._max_events = int(held[busiest])
        assert client.post("/v1/snapshots", {"users": [busiest]})[0] == 200
        client.service.snapshots._max_events -= 1
        assert client.post("/v1/snapshots", {"users": [busiest]})[0] == 413
        document = json.loads(client.send("GET", "/openapi.json")[1])
        body = document["paths"]["/v1/snapshots"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["properties"]["users"]["maxItems"] == 1_024
        assert "at most 60 events" in body["properties"]["projection"]["properties"]["max_len"]["description"]
    finally:
        client.close()


def test_a_token_that_no_impression_could_bring_back_is_not_given(client: Client) -> None:
    asked = {"users": list(range(20)), "histories": False}
    size = len(client.post("/v1/snapshots", asked)[1]["seen"])
    client.service.limits = Limits(body_bytes=size - 100)
    status, answer = client.post("/v1/snapshots", asked)
    assert status == 429
    assert f"bytes in base64; an impression has at most {size - 100}" in answer["error"]["message"]
    client.store.compact()
    assert client.post("/v1/snapshots", asked)[0] == 200


def test_health_metrics_and_description(client: Client) -> None:
    client.post("/v1/snapshots", {"users": [3]})
    client.wait_ready()
    assert client.send("GET", "/healthz")[0] == 200
    client.service.draining = True
    assert client.send("GET", "/readyz")[0] == 503
    metrics = client.send("GET", "/metrics")[1].decode()
    assert 'thinrow_requests_total{path="/v1/snapshots",status="200"} 1.0' in metrics
    document = json.loads(client.send("GET", "/openapi.json")[1])
    served = {r.path for r in client.app.routes} - {"/openapi.json", "/docs"}
    assert set(document["paths"]) == served
    status, text = client.send("GET", "/docs")
    shown = ElementTree.fromstring(text.decode().replace("<!doctype html>", "").replace('<meta charset="utf-8">', ""))
    assert status == 200
    assert {h.text for h in shown.iterfind(".//h2/code")} == {
        f"{how.upper()} {path}" for path, calls in document["paths"].items() for how in calls
    }
    rows = [tuple("".join(cell.itertext()) for cell in row) for row in shown.iter("tr")]
    assert ("users", "integer[]", "required", "at most 1024") in rows
    assert any(row[0] == "requests[].history.item" for row in rows)
    history = document["paths"]["/v1/snapshots"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    columns = history["properties"]["requests"]["items"]["properties"]["history"]["properties"]
    assert list(columns) == ["event_ts", "item", "price", "tag"]
    assert json.loads(client.send("GET", "/v1/schema")[1])["examples"] == EXAMPLES.to_dict()


def test_async_snapshots(client: Client) -> None:
    async def many(snapshots: AsyncSnapshots) -> list[Any]:
        calls = [snapshots.read([u % 20], 900) for u in range(60)]
        return await asyncio.gather(*calls, return_exceptions=True)

    with AsyncSnapshots(client.store, threads=2, waiting=8) as snapshots:
        found = asyncio.run(many(snapshots))
        refused = [f for f in found if isinstance(f, Overloaded)]
        assert 0 < len(refused) < 60
        assert snapshots.inside == 0
        for user, one in enumerate(found):
            if not isinstance(one, Exception):
                want = client.store.read([user % 20], 900).histories.to_jagged("item").values
                assert np.array_equal(one[1].histories.to_jagged("item").values, want)
        assert len(snapshots.submit([3], 900).result().requests) == 1
    with pytest.raises(StoreError, match="closed"):
        snapshots.submit([3], 900)


def test_a_long_recent_history_asks_for_a_compaction(client: Client) -> None:
    client.store.max_inline = 1
    before = client.store.pin().number
    client.post("/v1/snapshots", {"users": list(range(20)), "request_ts": 2_000})
    for _ in range(3_000):
        if client.store.pin().number > before:
            break
        time.sleep(0.02)
    assert client.store.pin().number == before + 1
