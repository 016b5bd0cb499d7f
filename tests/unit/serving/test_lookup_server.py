"""An embedding server's bounds, statuses and versions, in process."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.core.errors import InputError, StoreError, Unavailable
from thinrow.core.routing import Routing
from thinrow.serving.lookups import Bags, EmbeddingClient, EmbeddingServer, ServedTables, ServerLimits
from thinrow.serving.lookups.engines import available
from thinrow.serving.lookups.frames import FrameReader, Kind, Status, frame
from thinrow.serving.lookups.messages import Ask, Request, encode_request, encoded, parse_reply
from thinrow.serving.lookups.process import EmbeddingsOptions, _http, serve
from thinrow.serving.lookups.server import LOOPS
from thinrow.serving.lookups.stats import prometheus_text
from thinrow.serving.lookups.streams import MemoryStream, connect, listen, wait
from thinrow.testing.lookups import Peer, servers, vectors_of, write_exports

_LONG_S = 60.0
KEYS = np.arange(300)
_names = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    write_exports(path, {"a.": 4, "b.": 4})
    return path


@pytest.fixture(params=[loop for loop in LOOPS if loop != "compiled" or available()])
def start(folder: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[EmbeddingServer, str]]]:
    made: list[EmbeddingServer] = []

    def one(limits: ServerLimits | None = None, address: str = "tcp:127.0.0.1:0") -> tuple[EmbeddingServer, str]:
        server = EmbeddingServer(ServedTables.open([folder]), limits, loop=request.param)
        made.append(server)
        return server, server.listen(address).address

    yield one
    for server in made:
        server.close()


def request(number: int, keys: Any = KEYS, table: str = "a.", left_us: int = 0, **more: Any) -> list[Any]:
    return frame(Kind.REQUEST, number, encode_request(Request([Ask(table, keys, **more)], left_us=left_us)))


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + _LONG_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_frames_by_hand_and_statuses(start: Any, folder: Path) -> None:
    server, address = start()
    peer = Peer(address)
    assert peer.hello["tables"]["a."]["default"] == [0.25] * 4
    peer.send(request(7), frame(Kind.PING, 8), request(9, table="c."), request(10, left_us=1 << 30))
    found = [peer.next() for _ in range(4)]
    by_id = {one.header.id: one for one in found}
    assert {i: one.header.status for i, one in by_id.items()} == {7: 0, 8: 0, 9: Status.UNKNOWN_TABLE, 10: 0}
    assert b"'a.', 'b.'" in by_id[9].body.tobytes()  # type: ignore[union-attr]
    rows = parse_reply(by_id[7].body)[0]  # type: ignore[arg-type]
    np.testing.assert_array_equal(rows.values, vectors_of(KEYS, 1, 0, 4))
    version = server.tables.versions()["a."]
    for pin, status in ((version, Status.OK), (type(version)(0, 5), Status.OTHER_VERSION)):
        peer.send(request(1, pin=pin))
        assert peer.next().header.status == status
    half = EmbeddingServer(ServedTables.open([folder], shard=1, routing=Routing.even(2)))
    other = Peer(half.listen("tcp:127.0.0.1:0").address)
    other.send(request(1))
    assert other.next().header.status == Status.MISROUTED
    half.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(20),
        bytes(64),
        b"".join(frame(Kind.REPLY, 1)),
        b"".join(frame(Kind.CANCEL, 1, [b"body"])),
        b"".join(frame(Kind.REQUEST, 1, [b"no request at all"])),
        b"".join(request(1))[:-1] + b"\xff",
    ],
)
def test_a_hostile_peer_loses_its_connection_and_nobody_else_does(start: Any, raw: bytes) -> None:
    server, address = start(ServerLimits(request_bytes=1 << 16))
    good, bad = Peer(address), Peer(address)
    bad.send([raw])
    assert bad.ended()
    good.send(request(1))
    assert good.next().header.status == Status.OK
    eventually(lambda: server.memory.taken == 0 and server.stats.total("protocol_errors") == 1)


def test_half_a_frame_and_answers_that_nobody_reads_end_a_connection(start: Any) -> None:
    server, address = start(ServerLimits(frame_s=0.05, send_s=0.05, credits=1000))
    slow = Peer(address)
    slow.send([b"".join(request(1))[:-5]])
    assert slow.ended()
    deaf = Peer(address)
    many = np.zeros(100_000, np.int64)
    with pytest.raises(OSError):  # noqa: PT011
        deaf.send(*([request(1, many)] * 10_000))
    eventually(lambda: server.stats.total("protocol_errors") == 2 and server.memory.taken == 0)


def test_excess_is_refused_and_what_is_accepted_is_answered(start: Any) -> None:
    server, address = start(ServerLimits(credits=2, lookups=1, waiting=0, connections=3))
    peers = [Peer(address) for _ in range(3)]
    extra = connect(address)
    reader, found = FrameReader(100), None
    while found is None:
        wait([extra], [], _LONG_S)
        found = reader.read(extra)
    assert found.header.status == Status.OVERLOADED
    # While the only turn is taken, one request waits for it, others of its connection up to the credits, no more.
    server.turns.acquire()
    peers[0].send(request(1))
    eventually(lambda: server.inside.taken == 1)
    peers[1].send(request(2))
    assert peers[1].next().header.status == Status.OVERLOADED
    peers[0].send(*(request(i) for i in (3, 4, 5)), frame(Kind.CANCEL, 4), request(6))
    server.turns.release()
    statuses = {(one := peers[0].next()).header.id: one.header.status for _ in range(4)}
    assert statuses == {1: 0, 3: 0, 5: Status.OVERLOADED, 6: 0}
    small, where = start(ServerLimits(memory_bytes=5_000))
    peer = Peer(where)
    peer.send(request(1), request(2, KEYS[:100]))
    assert peer.next().header.status == Status.INVALID
    assert peer.next().header.status == Status.OK
    eventually(lambda: small.memory.taken == 0)


def test_a_request_whose_time_is_up_is_not_looked_up(start: Any) -> None:
    server, address = start(ServerLimits(lookups=1))
    server.turns.acquire()
    peer = Peer(address)
    peer.send(request(1, left_us=1_000))
    assert peer.next().header.status == Status.EXPIRED
    server.turns.release()
    assert server.stats.read()["requests"] == {"EXPIRED": 1}


def test_draining_answers_what_is_inside_and_refuses_the_rest(start: Any) -> None:
    server, address = start(ServerLimits(lookups=1))
    server.turns.acquire()
    inside, late = Peer(address), Peer(address)
    inside.send(request(1))
    eventually(lambda: server.inside.taken == 1)
    done: list[bool] = []
    draining = threading.Thread(target=lambda: done.append(server.drain(_LONG_S)))
    draining.start()
    eventually(lambda: server.draining)
    late.send(request(2), frame(Kind.PING, 3))
    assert [late.next().header.status for _ in range(2)] == [Status.DRAINING] * 2
    server.turns.release()
    assert inside.next().header.status == Status.OK
    draining.join(_LONG_S)
    assert done == [True]
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1]))):  # noqa: PT011
        pass


def test_replicas_are_asked_when_one_refuses_or_does_not_answer(start: Any) -> None:
    stuck, first = start(ServerLimits(lookups=1))
    _, second = start()
    stuck.turns.acquire()
    with EmbeddingClient([[first, second]], deadline_s=_LONG_S, hedge_s=0.002) as client:
        for _ in range(6):
            answer = client.read({"a.": KEYS})
            assert not answer.degraded
            np.testing.assert_array_equal(answer["a."].vectors, vectors_of(KEYS, 1, 0, 4))
        assert client.stats.total("hedges") >= 1
        stuck.turns.release()
        stuck.drain()
        for _ in range(4):
            assert not client.read({"a.": KEYS}).degraded


def test_without_an_answer_the_default_is_read_and_said_or_the_read_fails(start: Any) -> None:
    stuck, address = start(ServerLimits(lookups=1))
    bags = Bags(KEYS, np.array([0, 100, 100, 300]), "mean")
    with EmbeddingClient([[address]], deadline_s=_LONG_S) as client:
        whole = client.read({"a.": KEYS, "b.": bags})
        stuck.turns.acquire()
        since = time.monotonic()
        answer = client.read({"a.": KEYS, "b.": bags}, deadline_s=0.05)
        assert time.monotonic() - since < _LONG_S / 2
        assert answer.missing == (0,)
        assert answer.versions == {"a.": None, "b.": None}
        assert answer["a."].degraded.all()
        np.testing.assert_array_equal(answer["a."].vectors, np.full((300, 4), 0.25))
        np.testing.assert_array_equal(answer["b."].vectors, [[1.25] * 4, [0] * 4, [1.25] * 4])
        assert answer["b."].degraded.tolist() == [True, False, True]
        stuck.turns.release()
        eventually(lambda: not client.read({"a.": KEYS, "b.": bags}).degraded)
        np.testing.assert_array_equal(client.read({"b.": bags})["b."].vectors, whole["b."].vectors)
        assert client.stats.read()["requests"]["degraded"] >= 1
    stuck.close()
    with (
        EmbeddingClient([[address]], policy="fail") as failing,
        pytest.raises(Unavailable, match=r"shard 0: .*(cannot be reached|refused)") as caught,
    ):
        failing.read({"a.": KEYS})
    assert caught.value.shards == (0,)
    with EmbeddingClient([[address]]) as blind, pytest.raises(Unavailable, match="no server has yet said"):
        blind.read({"a.": KEYS})


def test_servers_that_come_to_a_version_at_other_times_answer_from_one(tmp_path: Path) -> None:
    write_exports(tmp_path, {"a.": 3, "b.": 3})
    addresses = [f"memory:versions-{next(_names)}" for _ in range(2)]
    with (
        servers([tmp_path], addresses, Routing.even(2)) as started,
        EmbeddingClient([[a] for a in addresses], deadline_s=_LONG_S) as client,
    ):
        before = client.read({"a.": KEYS, "b.": KEYS})
        (ahead, _), (behind, _) = started
        write_exports(tmp_path, {"a.": 3, "b.": 3}, since=2, deltas=1)
        assert ahead.tables.refresh()
        mixed = client.read({"a.": KEYS, "b.": KEYS})
        assert mixed.versions == before.versions
        for name in ("a.", "b."):
            np.testing.assert_array_equal(mixed[name].vectors, before[name].vectors)
        assert client.stats.total("again") == 1
        # Tables of one export, of which each shard is asked for another.
        shards = Routing.even(2).shards(KEYS)
        apart = client.read({"a.": KEYS[shards == 0], "b.": KEYS[shards == 1]})
        assert set(apart.versions.values()) == set(before.versions.values())
        behind.tables.refresh()
        after = client.read({"a.": KEYS})
        assert after.versions["a."] is not None
        assert after.versions["a."].step == 2
        assert not np.array_equal(after["a."].vectors, before["a."].vectors)


def test_an_export_that_is_damaged_in_one_table_is_left_for_the_one_before(tmp_path: Path) -> None:
    tables = {"a.": 3, "b.": 3}
    write_exports(tmp_path, tables)
    served = ServedTables.open([tmp_path], check=False)
    write_exports(tmp_path, tables, since=2, deltas=1)
    alone = ServedTables.open([tmp_path / "step-00000001"])
    assert not alone.refresh()
    assert {version.step for version in alone.versions().values()} == {1}
    for file in (tmp_path / "step-00000002").glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        n = int.from_bytes(raw[:8], "little")
        entry = json.loads(raw[8 : 8 + n]).get("a.index")
        if entry is not None:
            raw[8 + n + entry["data_offsets"][0]] ^= 1
            file.write_bytes(raw)
    with pytest.warns(RuntimeWarning, match="in place of a newer one"):
        assert not served.refresh()
    with pytest.warns(RuntimeWarning, match="in place of a newer one"):
        opened = ServedTables.open([tmp_path], check=False)
    for one in (served, opened):
        assert {version.step for version in one.versions().values()} == {1}
        np.testing.assert_array_equal(one.answer(Request([Ask("b.", KEYS)]))[0].values, vectors_of(KEYS, 1, 1, 3))
    with pytest.raises(InputError, match=r"no table \['zz'\] .*there are \['a\.', 'b\.'\]"):
        ServedTables.open([tmp_path], tables=["zz"], check=False)


def test_a_signal_ends_a_process_that_still_opens_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def opens(*_: Any, **more: Any) -> Any:
        raise StoreError("asked" if signal.getsignal(signal.SIGTERM) == before else "kept waiting")

    monkeypatch.setattr(ServedTables, "open", opens)
    with pytest.raises(StoreError, match="asked"):
        serve(EmbeddingsOptions((Path("none"),)))


def test_large_steps_are_whole_in_metrics_and_an_http_port_is_checked(start: Any) -> None:
    server, address = start()
    server.stats.gauges["step"] = lambda: 1_234_567_890
    assert "x_step 1234567890\n" in prometheus_text(server.stats, "x")
    with pytest.raises(InputError, match="below 65,536"):
        _http("127.0.0.1:70000", server, threading.Event())
    peer = Peer(address)
    accepted = next(iter(server._connections)).stream
    assert accepted.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)  # type: ignore[attr-defined]
    peer.stream.close()


@pytest.mark.parametrize(("shards", "ahead", "missing", "step"), [(2, 0, (1,), 2), (3, 1, (1,), 1)])
def test_servers_without_a_common_version_settle_on_what_most_have(
    tmp_path: Path, shards: int, ahead: int, missing: tuple[int, ...], step: int
) -> None:
    write_exports(tmp_path, {"a.": 3})
    addresses = [f"memory:versions-{next(_names)}" for _ in range(shards)]
    routing = Routing.even(shards)
    with servers([tmp_path], addresses, routing) as started:
        write_exports(tmp_path, {"a.": 3}, since=2, deltas=1)
        # Started after the step, so that it has no other.
        started[ahead][0].tables = ServedTables.open([tmp_path], shard=ahead, routing=routing)
        with EmbeddingClient([[a] for a in addresses], deadline_s=_LONG_S) as client:
            for _ in range(3):
                since = time.monotonic()
                answer = client.read({"a.": KEYS})
                assert time.monotonic() - since < _LONG_S / 2
                assert answer.missing == missing
                assert answer.versions["a."] is not None
                assert answer.versions["a."].step == step


def test_bad_input_is_named(start: Any) -> None:
    _, address = start()
    with EmbeddingClient([[address]], deadline_s=_LONG_S, dtype="float16") as client:
        two = np.array([1, 2])
        for wanted, message in (
            ({}, "no table"),
            ({"a.": [1, 2]}, "'a.' must be a one-dimensional int64"),
            ({"z.": two}, "no table 'z.' here; there are 'a.', 'b.'"),
            ({"a.": Bags(two, np.array([0, 1]))}, "ascend from 0 to 2"),
            ({"a.": Bags(two, np.array([0, 2]), "max")}, "pooling='max'"),
            ({"a.": Bags(two, np.array([0, 2]), "sum", np.ones(3, np.float32))}, r"must be \(2,\) float32"),
            ({"a.": Bags(two, np.array([0, 2]), "sum", np.array([1, np.nan], np.float32))}, "nan is not"),
            ({"a.": Bags(two, np.array([0, 2]), "sum", np.full(2, 1e6, np.float32))}, "ask for float32"),
            ({"a.": Bags(two, np.array([0, 2]), "sum", np.full(2, 3e38, np.float32))}, "not finite"),
        ):
            with pytest.raises(InputError, match=message):
                client.read(wanted)
    for bad, message in (
        ({"servers": []}, "at least one server"),
        ({"servers": [["a"]]}, "tcp:HOST:PORT or unix:PATH"),
        ({"servers": [[address]], "policy": "x"}, "policy='x'"),
        ({"servers": [[address]], "deadline_s": 0}, "deadline_s=0"),
        ({"servers": [[address]], "routing": Routing.even(2)}, "routing of 2"),
    ):
        with pytest.raises(InputError, match=message):
            EmbeddingClient(**bad)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_sum_that_is_not_finite_is_refused(dtype: str) -> None:
    for value in (np.inf, np.nan):
        with pytest.raises(InputError, match="not finite"):
            encoded(np.array([[1, value]], np.float32), dtype)


class _Gone(MemoryStream):
    def send(self, parts: Any) -> int:
        raise BrokenPipeError


def test_a_refusal_that_cannot_be_sent_and_a_thread_that_does_not_start_leave_nothing(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = start(ServerLimits(connections=1))
    peer = Peer(address)
    server.serve(_Gone.pair()[0])
    assert server.stats.total("refused_connections") == 1
    peer.stream.close()
    eventually(lambda: server.stats.total("ended_connections") == 1 and not server._connections)
    if server.engines is not None:
        # Which has its threads from the beginning.
        return
    with monkeypatch.context() as patch:

        def none(thread: Any) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", none)
        refused = connect(address)
        assert wait([refused], [], _LONG_S)[0]
    with pytest.raises((OSError, EOFError)):
        FrameReader(100).read(refused)
    assert server.accepting
    assert Peer(address).hello["tables"]


@pytest.mark.parametrize("says", ["full", "nonsense"])
def test_a_server_that_refuses_or_answers_nonsense_is_left_and_its_replica_asked(start: Any, says: str) -> None:
    _, good = start()
    _, bad = start(ServerLimits(connections=1))
    kept: Any = None
    if says == "full":
        kept = Peer(bad)
    else:
        hello = Peer(good).hello
        kept = nonsense = listen("tcp:127.0.0.1:0")
        bad = nonsense.address

        def answer() -> None:
            while True:
                try:
                    stream = nonsense.accept()
                except OSError:
                    return
                reader, found = FrameReader(1 << 24), None
                while found is None:
                    wait([stream], [], _LONG_S)
                    found = reader.read(stream)
                stream.send(
                    frame(Kind.HELLO, 0, [json.dumps(hello).encode()]) + frame(Kind.REPLY, found.header.id, [b"x"])
                )

        threading.Thread(target=answer, daemon=True).start()
    with EmbeddingClient([[bad, good]], deadline_s=_LONG_S) as client:
        for _ in range(4):
            assert not client.read({"a.": KEYS}).degraded
        assert 1 <= client.stats.total("lost") <= 4
    (kept.stream if says == "full" else kept).close()


def test_a_child_process_has_connections_of_its_own(start: Any) -> None:
    _, address = start()
    with EmbeddingClient([[address]], deadline_s=_LONG_S) as client:

        def reads(keys: Any) -> bool:
            return all(
                np.array_equal(client.read({"a.": keys})["a."].vectors, vectors_of(keys, 1, 0, 4)) for _ in range(50)
            )

        assert reads(KEYS)
        child = os.fork()
        if not child:
            try:
                sound = reads(KEYS[::2]) and client.stats.total("lost") == 0
                client.close()
            except BaseException:
                sound = False
            os._exit(0 if sound else 1)
        assert reads(KEYS[1::2])
        assert os.waitpid(child, 0)[1] == 0
        assert reads(KEYS)
        assert client.stats.total("lost") == 0


def test_a_server_that_ends_leaves_the_socket_file_of_the_next(start: Any, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    first, _ = start(address=address)
    first.drain()
    start(address=address)
    first.close()
    assert Peer(address).hello["tables"]
    # Nor does one whose file was replaced while it listened.
    os.unlink(tmp_path / "s")
    last, _ = start(address=address)
    first, second = last._listeners[0], listen(f"unix:{tmp_path / 't'}")
    os.rename(tmp_path / "t", tmp_path / "s")
    first.close()
    assert (tmp_path / "s").exists()
    second.close()


def test_a_request_that_is_too_long_is_refused_and_the_connection_goes_on(start: Any) -> None:
    server, address = start(ServerLimits(request_bytes=1 << 12))
    peer = Peer(address)
    peer.send(request(1, np.arange(100_000)), request(2))
    assert [peer.next().header.status for _ in range(2)] == [Status.INVALID, Status.OK]
    with EmbeddingClient([[address]], deadline_s=_LONG_S) as client:
        # The first is sent before the server has said what it takes.
        for _ in range(3):
            with pytest.raises(InputError, match=r"a request of .+ bytes.*at most 4096"):
                client.read({"a.": np.arange(1_000)})
        assert server.stats.read()["requests"]["INVALID"] == 2
        assert not client.read({"a.": KEYS}).degraded
        assert client.stats.total("lost") == 0
        for tables, message in ({"a" * 513: KEYS}, "513 bytes"), ({str(i): KEYS for i in range(1025)}, "1025 tables"):
            with pytest.raises(InputError, match=message):
                client.read(tables)
    eventually(lambda: server.memory.taken == 0)


def test_a_server_is_not_blamed_for_the_caller(start: Any) -> None:
    (stuck, first), (_, second) = start(ServerLimits(lookups=1)), start()
    bags = Bags(KEYS, np.arange(0, 301, 150), "sum", np.where(Routing.even(2).shards(KEYS), 3e38, 1).astype(np.float32))
    with EmbeddingClient([[first], [second]], deadline_s=_LONG_S) as client:
        assert not client.read({"a.": KEYS}).degraded
        stuck.turns.acquire()
        for _ in range(4):
            with pytest.raises(InputError, match="not finite"):
                client.read({"a.": bags})
        stuck.turns.release()
        assert client._servers[0][0].usable()
        for _ in range(10):
            client.read({"a.": KEYS}, deadline_s=1e-6)
        # Even where all seem to be gone, one is asked.
        client._servers[0][0].again_at = time.monotonic() + _LONG_S
        assert not client.read({"a.": KEYS}).degraded


def test_a_newer_export_of_another_width_is_read(start: Any, tmp_path: Path) -> None:
    server, address = start()
    with EmbeddingClient([[address]], deadline_s=_LONG_S) as client:
        assert client.read({"a.": KEYS})["a."].vectors.shape == (300, 4)
        write_exports(tmp_path, {"a.": 6})
        server.tables = ServedTables.open([tmp_path])
        answer = client.read({"a.": KEYS})
        assert not answer.degraded
        np.testing.assert_array_equal(answer["a."].vectors, vectors_of(KEYS, 1, 0, 6))


def test_draining_waits_for_a_request_that_is_half_read(start: Any) -> None:
    server, address = start()
    peer, raw = Peer(address), b"".join(request(1))
    peer.send([raw[:100]])
    eventually(lambda: server.memory.taken > 0)
    assert not server.drain(0.02)
    peer.send([raw[100:]])
    assert peer.next().header.status == Status.OK
    assert server.drain(_LONG_S)
