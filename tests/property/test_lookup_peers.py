"""Whatever a peer sends, the compiled loop of a server answers or ends as the plain one does; then it holds nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import ProtocolError
from thinrow.core.routing import Routing
from thinrow.serving.lookups import EmbeddingServer, ServerLimits
from thinrow.serving.lookups.engines import available
from thinrow.serving.lookups.frames import Kind, frame
from thinrow.serving.lookups.messages import DTYPES, Ask, Pooling, Request, encode_request
from thinrow.serving.lookups.server import LOOPS
from thinrow.testing.lookups import Peer, servers, write_exports

pytestmark = pytest.mark.skipif(not available(), reason="the compiled loop is there on Linux alone")
_LONG_S = 60.0
Pair = list[tuple[EmbeddingServer, str]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A server of half of the keys through either loop."""
    folder = tmp_path_factory.mktemp("export")
    write_exports(folder, {"a.": 4, "bc.": 3}, deltas=1, dtype="float16")
    limits, routing, address = ServerLimits(request_bytes=4096), Routing((0, 1 << 63)), ["tcp:127.0.0.1:0"] * 2
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(servers([folder], address, routing, limits, loop)) for loop in LOOPS]
        yield [shards[0] for shards in started]


_asks = st.builds(
    lambda table, keys, pooling: Ask(
        table,
        np.array(keys, np.int64),
        pooling,
        np.array([len(keys) - len(keys) // 2, len(keys) // 2], np.uint32) if pooling else None,
        np.arange(len(keys), dtype=np.float32) if pooling == Pooling.WEIGHTED else None,
    ),
    st.sampled_from(["a.", "bc.", "d", ""]),
    # Those of the first half of the range, and one of the other.
    st.lists(st.sampled_from([0, 1, 3, 4, 9, 310, 2]), max_size=9),
    st.sampled_from(Pooling),
)


@st.composite
def _bodies(draw: st.DrawFn) -> bytes:
    request = Request(draw(st.lists(_asks, min_size=1, max_size=3)), draw(st.sampled_from(DTYPES)))
    body = bytearray(b"".join(bytes(part) for part in encode_request(request)))
    for at, value in draw(st.lists(st.tuples(st.integers(0, len(body) - 1), st.integers(0, 255)), max_size=3)):
        # Not the time that is left, which would be up in one loop and not in the other.
        if not 4 <= at < 8:
            body[at] = value
    return bytes(body[: draw(st.one_of(st.none(), st.integers(0, len(body))))])


def _outcome(address: str, raw: bytes) -> tuple[int, bytes] | None:
    """Status and body of the answer; None where the connection ends instead."""
    peer = Peer(address)
    try:
        peer.send([memoryview(raw)])
        found = peer.next()
    except (EOFError, OSError, ProtocolError):
        return None
    else:
        assert found.body is not None
        return found.header.status, found.body.tobytes()
    finally:
        peer.stream.close()


def _holds_nothing(pair: Pair) -> None:
    until = time.monotonic() + _LONG_S
    while any(server.memory.taken or server.inside.taken or server._connections for server, _ in pair):
        assert time.monotonic() < until
        time.sleep(0.002)


@settings(max_examples=60)
@given(body=_bodies(), rank=st.integers(0, 4))
def test_requests_that_are_none_are_answered_alike(pair: Pair, body: bytes, rank: int) -> None:
    raw = b"".join(frame(Kind.REQUEST, 7, [body], rank))
    assert _outcome(pair[0][1], raw) == _outcome(pair[1][1], raw)
    _holds_nothing(pair)


@settings(max_examples=30)
@given(
    frames=st.lists(
        st.tuples(st.sampled_from(Kind), _bodies(), st.integers(0, 5), st.booleans()), min_size=1, max_size=4
    ),
    cuts=st.lists(st.integers(1, 200), max_size=4),
    flip=st.tuples(st.integers(0, 400), st.integers(0, 255)),
)
def test_a_peer_that_sends_anything_leaves_nothing(pair: Pair, frames, cuts, flip) -> None:  # type: ignore[no-untyped-def]
    raw = bytearray()
    for kind, body, number, empty in frames:
        raw += b"".join(frame(kind, number, [b"" if empty else body]))
    raw[flip[0] % len(raw)] = flip[1]
    for _, address in pair:
        peer, at = Peer(address), 0
        with contextlib.suppress(OSError):
            for cut in (*cuts, len(raw)):
                peer.send([memoryview(bytes(raw[at : at + cut]))])
                at += cut
        peer.stream.close()
    _holds_nothing(pair)
