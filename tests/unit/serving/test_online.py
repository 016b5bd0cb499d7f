"""The ranker as a service: batches, bounds on what waits, arms, releases that are taken up whole, and HTTP."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from thinrow.checkpoints import Checkpoint, load
from thinrow.core.errors import InputError, Overloaded, StoreError
from thinrow.examples import ImpressionLog, OutcomeLog
from thinrow.examples.records import Impressions
from thinrow.history.store import HistoryStore
from thinrow.online.journal import Journal
from thinrow.serving import Ranker, publish
from thinrow.serving.lookups import EmbeddingServer, ServedTables
from thinrow.serving.online.app import RankService, WebLimits, create_app
from thinrow.serving.online.batcher import Batcher, BatchLimits, RankAnswer, RankRequest
from thinrow.serving.online.live import Arms, ArmSpec, Live, LookupOptions
from thinrow.testing.rankers import world_config
from thinrow.testing.world import World, brand_of, make_world
from thinrow.training import train

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LONG_S = 60.0
LOOKUPS = LookupOptions(deadline_s=LONG_S)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), days=6)


@pytest.fixture(scope="module")
def checkpoint(world: World, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    out = tmp_path_factory.mktemp("run")
    with world.store() as store, world.table() as table:
        train(world_config("hstu", epochs=1), store, table, out=out)
    return load(out)


@pytest.fixture
def store(world: World) -> Iterator[HistoryStore]:
    with world.store() as opened:
        yield opened


def later(checkpoint: Checkpoint, step: int) -> Checkpoint:
    tensors = {n: a + np.float32(0.25) if n == "table.values" else a for n, a in checkpoint.tensors.items()}
    return dataclasses.replace(checkpoint, step=step, tensors=tensors)


def asked(world: World, user: int = 4, number: int = 1, n: int = 3, **more: Any) -> RankRequest:
    items = np.arange(number % 7, n + number % 7)
    shown = {"item": items.tolist(), "brand": brand_of(items)}
    return RankRequest(number, user, world.end_ms, shown, {"city": "city 1"}, **more)


class Gate:
    """A ranker that waits until it may go on, and says how large its batches are."""

    def __init__(self, ranker: Ranker) -> None:
        self.ranker, self.open, self.inside = ranker, threading.Event(), threading.Semaphore(0)
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ranker, name)

    def rank(self, request_id: Any, *args: Any, **more: Any) -> Any:
        self.sizes.append(len(request_id))
        self.inside.release()
        assert self.open.wait(LONG_S)
        return self.ranker.rank(request_id, *args, **more)


def test_what_waits_is_ranked_together_each_user_once_and_as_if_alone(
    world: World, checkpoint: Checkpoint, store: HistoryStore
) -> None:
    gate: Any = Gate(Ranker(store, checkpoint))
    with Batcher(lambda _: gate, limits=BatchLimits(requests=3, deadline_s=LONG_S)) as batcher:
        first = batcher.submit(asked(world, 1, 1))
        gate.inside.acquire()
        # Users 4, 7, 4, 10: the second request of 4 waits for the next batch, and 10 does not wait for it.
        rest = [batcher.submit(asked(world, u, 2 + i, k=1 + i)) for i, u in enumerate((4, 7, 4, 10))]
        bad = batcher.submit(RankRequest(9, 13, 5, {"item": ["x"], "brand": ["b"]}, {"city": ""}))
        gate.open.set()
        answers = [future.result(LONG_S) for future in (first, *rest)]
        with pytest.raises(InputError):
            bad.result(LONG_S)
    assert gate.sizes[:2] == [1, 3]
    assert [len(a.scores) for a in answers] == [3, 1, 2, 3, 3]
    for answer in answers:
        r = answer.request
        alone = Ranker(store, checkpoint).rank(
            [r.request_id],
            [r.user],
            r.request_ts,
            candidates={n: [c] for n, c in r.candidates.items()},
            context={n: [c] for n, c in r.context.items()},
            k=r.k,
        )
        np.testing.assert_allclose(answer.scores, alone.scores.values, atol=1e-5)
        assert answer.candidates["item"] == alone.candidates["item"].values.tolist()
        assert answer.position == alone.position.values.tolist()
        assert {"waited", "snapshot", "features", "score", "best"} <= set(answer.took_ms)
    assert batcher.stats.read()["requests"] == {"answered": 5, "failed": 1}


def test_excess_is_refused_at_once_and_what_is_late_is_not_ranked(
    world: World, checkpoint: Checkpoint, store: HistoryStore
) -> None:
    gate: Any = Gate(Ranker(store, checkpoint))
    with Batcher(lambda _: gate, limits=BatchLimits(requests=1, waiting=2, deadline_s=0.05)) as batcher:
        first = batcher.submit(asked(world, 1))
        gate.inside.acquire()
        waiting = [batcher.submit(asked(world, 4, 2)), batcher.submit(asked(world, 7, 3))]
        with pytest.raises(Overloaded, match="2 requests wait, which is all"):
            batcher.submit(asked(world, 10, 4))
        time.sleep(0.06)
        gate.open.set()
        assert first.result(LONG_S).scores
        for one in waiting:
            with pytest.raises(Overloaded, match="longer than the"):
                one.result(LONG_S)
        assert batcher.stats.read()["requests"] == {"answered": 1, "refused": 1, "late": 2}
        # What it took is known now: the next one is refused where it would be late, and taken where nobody waits.
        gate.open.clear()
        batcher._each_s = 1.0
        second = batcher.submit(asked(world, 1, 5))
        gate.inside.acquire()
        with pytest.raises(Overloaded, match="would take"):
            batcher.submit(asked(world, 4, 6))
        gate.open.set()
        second.result(LONG_S)
    with pytest.raises(StoreError, match="the ranker ends"):
        batcher.submit(asked(world))


def test_an_answer_is_given_when_its_impression_is_on_disk(
    world: World, checkpoint: Checkpoint, store: HistoryStore
) -> None:
    logged: list[tuple[Impressions, Future[int]]] = []

    def log(impressions: Impressions) -> Future[int]:
        future: Future[int] = Future()
        logged.append((impressions, future))
        return future

    ranker = Ranker(store, checkpoint)
    with Batcher(lambda _: ranker, log=log, limits=BatchLimits(requests=1)) as batcher:
        first, second = batcher.submit(asked(world)), batcher.submit(asked(world, 7, 2))
        while len(logged) < 2:
            time.sleep(0.001)
        assert not first.done()
        assert not second.done()
        logged[0][1].set_result(1)
        assert first.result(LONG_S).model_version == logged[0][0].model_version.to_arrow().to_pylist()[0]
        logged[1][1].set_exception(StoreError("the disk is full"))
        with pytest.raises(StoreError, match="the disk is full"):
            second.result(LONG_S)
    assert batcher.stats.read()["impressions"] == {"": 1}


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"waiting": -1}, {"deadline_s": 0}, {"threads": 0}])
def test_limits_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        BatchLimits(**wrong)


def test_users_are_in_arms_by_share_and_stay_in_them(
    world: World, checkpoint: Checkpoint, store: HistoryStore, tmp_path: Path
) -> None:
    publish(checkpoint, tmp_path / "a")
    publish(later(checkpoint, 9), tmp_path / "b")
    specs = [ArmSpec(tmp_path / "a", name="control", share=3), ArmSpec(tmp_path / "b", name="wide", share=1)]
    lives = [Live(store, spec) for spec in specs]
    arms, other = Arms(lives, "one"), Arms(lives, "two")
    users = range(2_000)
    names = [arms.arm_of(u).spec.name for u in users]
    assert Counter(names)["wide"] == pytest.approx(500, abs=100)
    assert names[:99] == [Arms(lives, "one").arm_of(u).spec.name for u in users[:99]]
    # With another salt the arms are independent of these.
    both = sum(a == "wide" == other.arm_of(u).spec.name for a, u in zip(names, users, strict=True))
    assert both == pytest.approx(125, abs=50)
    with Batcher(arms.choose) as batcher:
        answers = [batcher.rank(asked(world, u, u)) for u in (1, 4, 7, 10, 13, 16, 19, 22, 25)]
    assert {a.arm for a in answers} == {"control", "wide"}
    for answer in answers:
        assert answer.arm == arms.arm_of(answer.request.user).spec.name
        assert answer.model_version == arms.arm_of(answer.request.user).release.name
    with pytest.raises(InputError, match="of a name of its own"):
        Arms([lives[0], lives[0]])
    with pytest.raises(InputError, match="share=0"):
        ArmSpec(tmp_path, share=0)


def test_a_release_is_taken_up_when_all_servers_have_it(
    world: World, checkpoint: Checkpoint, store: HistoryStore, tmp_path: Path
) -> None:
    from thinrow.core.routing import Routing

    folder = tmp_path / "r"
    publish(checkpoint, folder, shards=2)
    tables = [ServedTables.open([folder], shard=i, routing=Routing.even(2)) for i in range(2)]
    servers = [EmbeddingServer(one) for one in tables]
    addresses = [[server.listen("tcp:127.0.0.1:0").address] for server in servers]
    said: list[tuple[str, dict[str, Any]]] = []
    lookups = dataclasses.replace(LOOKUPS, cache_bytes=1 << 20, prefix_bytes=1 << 20)
    live = Live(store, ArmSpec(folder, addresses), lookups, say=lambda event, **fields: said.append((event, fields)))
    first = live.ranker.model_version
    assert not live.refresh()
    publish(later(checkpoint, checkpoint.step + 1), folder, shards=2, delta=True)
    assert tables[0].refresh()
    # One server lacks it: the one before goes on, and both still have that.
    assert not live.refresh()
    assert not live.refresh()
    assert live.ranker.model_version == first
    assert live.behind is not None
    assert "(1,) did not answer" in live.behind[1]
    assert [event for event, _ in said] == ["not_taken_up"]
    # A ranker that starts now takes the one that both have.
    assert Live(store, ArmSpec(folder, addresses), LOOKUPS).ranker.model_version == first
    assert tables[1].refresh()
    assert live.refresh()
    assert live.behind is None
    assert said[-1][0] == "swapped"
    assert live.ranker.model_version == live.release.name != first
    assert live.caches is not None
    assert live.caches.live is not None
    with Batcher(lambda _: live.ranker) as batcher:
        answer = batcher.rank(asked(world))
        live.caches.live.step()
        again = batcher.rank(asked(world, 4, 8))
    assert {"server 0", "server 1"} <= set(answer.took_ms)
    assert again.scores == answer.scores
    assert live.caches.live.read()["hit_rate"] > 0
    assert not answer.degraded
    # One that was asked for by name stays.
    fixed = Live(store, ArmSpec(folder / f"step-{checkpoint.step:08d}", addresses), LOOKUPS)
    assert not fixed.refresh()
    assert fixed.ranker.model_version == first
    # A damaged newer one is told, and the one that there is goes on.
    path = publish(later(checkpoint, checkpoint.step + 2), folder, shards=2)
    (path / "tensors.safetensors").write_bytes(b"")
    with pytest.warns(RuntimeWarning):
        assert not live.refresh()
    for server in servers:
        server.close()
    assert live.has(live.release) is not None
    for one in (live, fixed):
        one.close()


@pytest.fixture
def service(
    world: World, checkpoint: Checkpoint, store: HistoryStore, tmp_path: Path
) -> Iterator[Callable[..., RankService]]:
    publish(checkpoint, tmp_path / "r")
    live = Live(store, ArmSpec(tmp_path / "r", name="A"))
    schema = live.ranker.schema
    log = ImpressionLog(tmp_path / "log", store.schema, schema)
    journal = Journal(tmp_path / "journal", log, OutcomeLog(tmp_path / "bought"))
    with Batcher(lambda _: live.ranker, log=journal.impressions) as batcher:
        yield lambda **more: RankService(
            store, Arms([live]), batcher, journal=journal, clock=lambda: world.end_ms, **more
        )
    journal.close()


def body(**changes: Any) -> dict[str, Any]:
    shown = {"item": [3, 9, 27], "brand": brand_of(np.array([3, 9, 27]))}
    return {"user": 4, "candidates": shown, "context": {"city": "city 1"}, "k": 2, **changes}


def test_over_http(service: Callable[..., RankService], world: World, tmp_path: Path) -> None:
    made = service()
    with TestClient(create_app(made)) as http:
        found = http.post("/v1/rank", json=body(request_id=77)).json()
        assert found["request_id"] == 77
        assert len(found["ranked"]["score"]) == len(found["ranked"]["item"]) == len(found["position"]) == 2
        assert found["ranked"]["score"] == sorted(found["ranked"]["score"], reverse=True)
        assert found["arm"] == "A"
        assert found["request_ts"] == world.end_ms
        assert http.post("/v1/rank", json=body()).json()["request_id"] != 77
        outcome = {"request_id": [77], "item": [found["ranked"]["item"][0]], "name": "buy", "ts": [world.end_ms + 5]}
        assert http.post("/v1/outcomes", json=outcome).status_code == 201
        seen = http.get("/v1/history?user=4").json()
        assert seen["events"] == len(seen["history"]["item"]) == 30
        assert seen["version"]["seq_len"] + seen["recent_events"] == 30
        assert len(seen["version"]["bytes"]) == 2 * 53
        assert http.get("/v1/users").json() == {"users": [3 * i + 1 for i in range(12)], "of": 12}
        said = http.get("/v1/model").json()
        assert said["arms"][0]["release"] == found["model_version"]
        assert said["fields"] == {"context": {"city": "string"}, "candidates": {"item": "int64", "brand": "string"}}
        assert http.get("/readyz").json()["status"] == "ready"
        text = http.get("/metrics").text
        assert 'thinrow_ranker_requests_total{kind="answered"} 2' in text
        assert "thinrow_ranker_impressions_total 2" in text
        assert http.get("/openapi.json").json()["paths"]["/v1/rank"]["post"]["requestBody"]["required"]
        assert "POST /v1/rank" in http.get("/docs").text
        assert "<title>thinrow ranker</title>" in http.get("/").text
        made.draining = True
        assert http.get("/readyz").status_code == 503
        assert http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"user": None}, 400, "lacks 'user'"),
        ({"user": "four"}, 400, "user id"),
        ({"candidates": {"item": [1]}}, 400, "candidates lack 'brand'"),
        ({"candidates": {"item": [1], "brand": []}}, 400, "give each field one a candidate"),
        ({"candidates": {"item": [1] * 9, "brand": ["b"] * 9}}, 400, "9 candidates; at most 8"),
        ({"context": {"city": "c", "town": "t"}}, 400, "which the model does not read"),
        ({"context": {"city": True}}, 400, "true or false"),
        ({"candidates": {"item": [1, True], "brand": ["b", "b"]}}, 400, "true or false"),
        ({"K": 3}, 400, "unknown key 'K' of a request"),
        ({"k": 0}, 400, "k is 1|k 1 or more"),
        ({"request_ts": -1}, 400, "request_ts=-1"),
        ({"candidates": {"item": ["x"], "brand": ["b"]}}, 400, "item"),
        ({"context": {"city": "c" * 5_000}}, 413, "at most"),
    ],
)
def test_bad_requests_are_told(
    service: Callable[..., RankService], changes: dict[str, Any], status: int, message: str
) -> None:
    limits = WebLimits(body_bytes=2_000, candidates=8)
    with TestClient(create_app(service(limits=limits))) as http:
        answer = http.post("/v1/rank", json=body(**changes))
        assert answer.status_code == status, answer.text
        assert any(part in answer.json()["error"]["message"] for part in message.split("|"))
        assert http.get("/v1/history?user=x").status_code == 400


def test_an_overloaded_ranker_says_when_to_come_again(
    service: Callable[..., RankService], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = service()

    def refuse(_: RankRequest) -> Future[RankAnswer]:
        raise Overloaded("64 requests wait")

    monkeypatch.setattr(made.batcher, "submit", refuse)
    with TestClient(create_app(made)) as http:
        answer = http.post("/v1/rank", json=body())
    assert answer.status_code == 429
    assert answer.headers["retry-after"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; apt-get install chromium")
def test_the_page_is_tried_in_a_browser(service: Callable[..., RankService], tmp_path: Path) -> None:
    import uvicorn

    config = uvicorn.Config(create_app(service()), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    from urllib.parse import quote

    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    query = quote(json.dumps({k: v for k, v in body().items() if k != "user"}))

    def seen(path: str, *what: str) -> str:
        command = [CHROMIUM, *options, "--virtual-time-budget=30000", *what, f"http://127.0.0.1:{port}/{path}"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    dom = seen(f"?user=7&request={query}", "--dump-dom")
    assert 'data-ready="yes"' in dom
    assert "30 events" in dom
    assert "12 users" in dom
    assert "<td>brand 3</td>" in dom or "brand 3" in dom
    assert "model hstu@" in dom
    assert ", arm A" in dom
    assert "<td>score</td>" in dom
    assert "<td>features</td>" in dom
    # What a caller sends is shown as text.
    evil = {"candidates": {"item": [1], "brand": ["<b id=evil>x</b>"]}, "context": {"city": "c"}}
    assert "<b id=" not in seen(f"?user=7&request={quote(json.dumps(evil))}", "--dump-dom").split("textarea>")[-1]
    assert "400:" in seen("?user=nobody", "--dump-dom")
    picture = tmp_path / "page.png"
    seen(f"?user=7&request={query}", f"--screenshot={picture}", "--window-size=1200,900")
    assert picture.stat().st_size > 10_000
    server.should_exit = True
    thread.join(LONG_S)
