"""What S3Objects does when the server or the network fails, against a real server behind a proxy that fails."""

from __future__ import annotations

import http.client
import pickle
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from thinrow.core.errors import CommitConflict, InputError, ObjectNotFound, StoreError
from thinrow.storage.fetch import FetchPolicy
from thinrow.storage.meter import Meter, metering
from thinrow.storage.s3 import PART_BYTES, S3Location, S3Objects
from thinrow.testing.faults import Fault, FaultProxy, Request
from thinrow.testing.s3 import S3Server

POLICY = FetchPolicy(tries=3, backoff_s=0.001, timeout_s=5.0, hedge_after_s=5.0)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as s:
        yield s


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.endpoint) as p:
        yield p


@pytest.fixture
def store(server: S3Server, proxy: FaultProxy, request: pytest.FixtureRequest) -> S3Objects:
    bucket = request.node.name.replace("_", "-").replace("[", "-").replace("]", "").lower()[:60].strip("-")
    return S3Objects(server.make_bucket(bucket, proxy.endpoint), POLICY)


def first(proxy: FaultProxy, method: str, fault: Fault, times: int = 1) -> None:
    """The first requests of that method from now on fail."""
    left = [times]

    def act(request: Request) -> Fault | None:
        if request.method != method or not left[0]:
            return None
        left[0] -= 1
        return fault

    proxy.fault = act


def read(store: S3Objects, name: str, length: int) -> bytes:
    out = np.zeros(length, np.uint8)
    store.read_into(name, np.array([0]), np.array([length]), out, np.array([0]))
    return out.tobytes()


def test_a_commit_whose_answer_is_lost_knows_itself(store: S3Objects, proxy: FaultProxy) -> None:
    first(proxy, "PUT", Fault("drop_answer"))
    store.put_if_absent("m/1", b"ours")
    assert [r.method for r in proxy.requests] == ["PUT", "PUT", "GET"]
    assert store.get("m/1") == b"ours"


def test_a_commit_that_failed_before_another_writer_came_has_lost(store: S3Objects, proxy: FaultProxy) -> None:
    rival = S3Objects(store.location, POLICY)

    def act(request: Request) -> Fault | None:
        if request.number == 0:
            rival.put_if_absent("m/1", b"ours")
            return Fault("drop")
        return None

    proxy.fault = act
    with pytest.raises(CommitConflict, match="m/1 exists already"):
        store.put_if_absent("m/1", b"ours")


def test_every_write_is_tried_again(store: S3Objects, proxy: FaultProxy) -> None:
    for method, call in (
        ("PUT", lambda: store.put("a", b"1")),
        ("PUT", lambda: store.put_if_absent("b", b"1")),
        ("HEAD", lambda: store.size("a")),
        ("GET", lambda: store.get("a")),
        ("GET", lambda: store.list("")),
        ("POST", lambda: store.delete("a")),
    ):
        first(proxy, method, Fault("status", 503), times=2)
        with metering(Meter()) as meter:
            call()
        assert (meter.requests, meter.retries) == (3, 2), method
        first(proxy, method, Fault("status", 503), times=3)
        with pytest.raises(StoreError, match=r"failed 3 times in a row.*503"):
            call()


@pytest.mark.parametrize("fault", [Fault("truncate"), Fault("drop"), Fault("shorten"), Fault("status", 500)])
def test_every_read_is_tried_again(store: S3Objects, proxy: FaultProxy, fault: Fault) -> None:
    store.put("a", b"0123456789")
    first(proxy, "GET", fault, times=2)
    with metering(Meter()) as meter:
        assert read(store, "a", 10) == b"0123456789"
    assert (meter.requests, meter.retries) == (3, 2)


def test_a_stalled_body_is_asked_for_again(store: S3Objects, proxy: FaultProxy) -> None:
    store.put("a", b"0123456789")
    quick = S3Objects(store.location, FetchPolicy(hedge_after_s=0.05))
    first(proxy, "GET", Fault("stall", 20.0))
    with metering(Meter()) as meter:
        assert read(quick, "a", 10) == b"0123456789"
    assert (meter.requests, meter.hedges) == (2, 1)


def uploads(server: S3Server, store: S3Objects) -> int:
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"))
    connection.request("GET", f"/{store.location.bucket}?uploads")
    return connection.getresponse().read().count(b"<Upload>")


def write_parts(store: S3Objects, name: str, fail: bool = False) -> None:
    with store.create(name) as writer:
        for k in range(5):
            writer.write(np.full(PART_BYTES // 2, k, np.uint8))
        if fail:
            raise RuntimeError("halfway")


def test_a_large_object_goes_up_in_parts_and_one_that_fails_is_aborted(
    server: S3Server, store: S3Objects, proxy: FaultProxy
) -> None:
    write_parts(store, "whole")
    assert sum("partNumber" in r.path for r in proxy.requests) == 3
    assert store.get("whole")[:: PART_BYTES // 2] == b"\0\1\2\3\4"
    with pytest.raises(RuntimeError, match="halfway"):
        write_parts(store, "half", fail=True)
    assert any(r.method == "DELETE" and "uploadId" in r.path for r in proxy.requests)
    proxy.fault = lambda r: Fault("status", 503) if "partNumber=2" in r.path else None
    with pytest.raises(StoreError, match="failed 3 times in a row for refused"):
        write_parts(store, "refused")
    assert uploads(server, store) == 0
    assert store.list("") == ["whole"]


def test_an_upload_whose_last_answer_is_lost_is_there(store: S3Objects, proxy: FaultProxy) -> None:
    done = []

    def act(request: Request) -> Fault | None:
        if request.method == "POST" and "uploadId=" in request.path and not done:
            done.append(request)
            return Fault("drop_answer")
        return None

    proxy.fault = act
    write_parts(store, "whole")
    assert store.list("") == ["whole"]
    assert store.size("whole") == 5 * (PART_BYTES // 2)


def test_what_cannot_pass_says_what_to_do(store: S3Objects, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = S3Objects(f"s3://nowhere?endpoint={proxy.endpoint}", POLICY)
    for call in (nowhere.list, nowhere.get):
        with pytest.raises(StoreError, match=r"no bucket 'nowhere'.*make it, or correct the URL"):
            call("x")
    with pytest.raises(StoreError, match=r"failed 3 times.*check the server and the network"):
        S3Objects("s3://bucket?endpoint=http://127.0.0.1:1", POLICY).list("")
    proxy.requests.clear()
    for status, remedy in ((403, "check AWS_ACCESS_KEY_ID"), (400, "check the URL")):
        proxy.fault = lambda r, status=status: Fault("status", status)
        for read_it in (lambda: store.get("a"), lambda: read(store, "a", 1), lambda: store.put("a", b"")):
            with pytest.raises(StoreError, match=f"{status}.*{remedy}"):
                read_it()
    assert len(proxy.requests) == 6
    # Credentials are looked for here next, where a cloud would give those of the machine.
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    quick = FetchPolicy(tries=1, timeout_s=0.5)
    with pytest.raises(StoreError, match=r"no credentials for .*set AWS_ACCESS_KEY_ID"):
        S3Objects(store.location, quick).list("")


def test_locations() -> None:
    parsed = S3Location.parse("s3://b/deep/prefix/?endpoint=http://127.0.0.1:9000&region=eu-west-1")
    assert parsed == S3Location("b", "deep/prefix", "http://127.0.0.1:9000", "eu-west-1")
    assert S3Location.parse(str(parsed)) == parsed
    assert str(S3Location.parse("s3://b")) == "s3://b"
    for wrong in ("b", "http://b/x", "s3://", "s3:///x", "s3://key:secret@b", "s3://b?key=1", "s3://b/a/../c"):
        with pytest.raises(InputError):
            S3Location.parse(wrong)


def test_a_task_elsewhere_opens_it_anew(store: S3Objects) -> None:
    store.put("a", b"0123")
    again = pickle.loads(pickle.dumps(store))
    assert (again.location, again.policy) == (store.location, store.policy)
    assert read(again, "a", 4) == b"0123"


def test_a_forked_process_is_told_to_spawn(store: S3Objects) -> None:
    program = """
import os, sys
from thinrow.core.errors import StoreError
from thinrow.storage.s3 import S3Objects
store = S3Objects(sys.argv[1])
store.put("a", b"0123")
child = os.fork()
if child == 0:
    for call in (lambda: store.get("a"), lambda: S3Objects(sys.argv[1])):
        try:
            call()
        except StoreError as e:
            print(e, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(store.get("a").decode())
"""
    command = [sys.executable, "-c", program, str(store.location)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("start processes with spawn") == 2
    assert done.stdout.endswith("0123\n")


def test_a_missing_object_is_named(store: S3Objects) -> None:
    with pytest.raises(ObjectNotFound, match="a/b"):
        read(store, "a/b", 1)
