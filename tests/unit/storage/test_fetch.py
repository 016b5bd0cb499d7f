"""Retries, hedges, deadlines and concurrency, against a get that fails as told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import pytest

from thinrow.core.errors import CorruptionError, InputError, ObjectNotFound, StoreError
from thinrow.storage.fetch import Fetcher, FetchPolicy, Transient
from thinrow.storage.meter import Meter
from thinrow.storage.ranges import plan_requests

BODY = bytes(range(200))
FAST = FetchPolicy(backoff_s=0.001, hedge_after_s=10.0, tries=4)


class Server:
    """``act(number of the request)`` may wait, raise, or give other bytes."""

    def __init__(self, act: Callable[[int], object]) -> None:
        self.act, self.sent, self.running, self.most = act, 0, 0, 0

    async def get(self, name: str, start: int, stop: int) -> tuple[bytes, int]:
        n, self.sent = self.sent, self.sent + 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            done = self.act(n)
            if isinstance(done, float):
                await asyncio.sleep(done)
            return (done if isinstance(done, bytes) else BODY[start:stop]), len(BODY)
        finally:
            self.running -= 1


def fetch(server: Server, policy: FetchPolicy, ranges: int = 1, length: int = 4) -> tuple[bytes, Meter]:
    offsets = np.arange(ranges, dtype=np.int64) * length
    plan = plan_requests(offsets * 0, offsets, offsets * 0 + length, offsets, -1, 1 << 20)
    out, meter = np.zeros(ranges * length, np.uint8), Meter()
    Fetcher(server.get, policy, "s3://b").fetch(["o"], plan, out, meter)
    return out.tobytes(), meter


def fail(times: int, error: Exception) -> Callable[[int], object]:
    def act(n: int) -> object:
        if n < times:
            raise error
        return None

    return act


def test_what_may_pass_is_tried_again_and_counted() -> None:
    data, meter = fetch(Server(fail(3, Transient("503"))), FAST)
    assert data == BODY[:4]
    assert (meter.requests, meter.retries, meter.bytes_fetched) == (4, 3, 4)


def test_it_gives_up_after_so_many_tries_and_says_why() -> None:
    server = Server(fail(99, Transient("503 slow down")))
    with pytest.raises(StoreError, match=r"s3://b failed 4 times in a row for o: 503 slow down; check the server"):
        fetch(server, FAST)
    assert server.sent == 4


def test_what_is_final_is_not_tried_again() -> None:
    server = Server(fail(1, ObjectNotFound("no object 'o'")))
    with pytest.raises(ObjectNotFound):
        fetch(server, FAST)
    assert server.sent == 1


def test_a_short_body_is_never_taken() -> None:
    assert fetch(Server(lambda n: b"xx" if n == 0 else None), FAST)[0] == BODY[:4]
    with pytest.raises(StoreError, match="2 bytes came of 4"):
        fetch(Server(lambda n: b"xx"), FAST)


def test_an_object_that_ends_early_is_damaged() -> None:
    with pytest.raises(CorruptionError, match=r"file o.*the file has 200 bytes"):
        fetch(Server(lambda n: None), FAST, ranges=51)


def test_a_straggler_is_asked_twice_and_the_first_answer_counts() -> None:
    server = Server(lambda n: 60.0 if n == 0 else None)
    policy = FetchPolicy(hedge_after_s=0.02)
    data, meter = fetch(server, policy)
    assert data == BODY[:4]
    assert (meter.requests, meter.hedges, meter.retries) == (2, 1, 0)


def test_hedges_are_few_where_everything_is_slow() -> None:
    server = Server(lambda n: 0.05)
    _, meter = fetch(server, FetchPolicy(hedge_after_s=0.0, concurrency=100), ranges=50)
    assert 8 <= meter.hedges <= 8 + 0.1 * meter.requests + 1
    assert meter.requests == 50 + meter.hedges


def test_a_request_times_out_and_is_tried_again() -> None:
    server = Server(lambda n: 60.0 if n == 0 else None)
    policy = FetchPolicy(timeout_s=0.05, hedge_after_s=10.0, backoff_s=0.001)
    data, meter = fetch(server, policy)
    assert data == BODY[:4]
    assert meter.retries == 1


def test_a_call_ends_by_its_deadline() -> None:
    since = time.monotonic()
    with pytest.raises(StoreError, match=r"did not answer 3 requests in 0.1 s"):
        fetch(Server(lambda n: 60.0), FetchPolicy(deadline_s=0.1), ranges=3)
    assert time.monotonic() - since < 30


def test_no_more_are_in_flight_than_allowed() -> None:
    server = Server(lambda n: 0.002)
    data, _ = fetch(server, FetchPolicy(concurrency=3), ranges=40)
    assert data == BODY[:160]
    assert server.most == 3


def test_waits_grow_are_random_and_bounded() -> None:
    waits = [[FetchPolicy(backoff_s=0.1).wait_s(tried) for _ in range(200)] for tried in (1, 3, 30)]
    for some, most in zip(waits, (0.1, 0.4, 5.0), strict=True):
        assert most / 2 < max(some) <= most
        assert min(some) < most / 2


@pytest.mark.parametrize(
    "wrong", [{"concurrency": 0}, {"tries": 0}, {"gap_bytes": -1}, {"timeout_s": 0.0}, {"deadline_s": float("nan")}]
)
def test_policies_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        FetchPolicy(**wrong)  # type: ignore[arg-type]
