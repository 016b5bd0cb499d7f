"""Engines of embedding servers: what is urgent goes first, and connections move to where there is nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.core.errors import InputError
from thinrow.kernels.lookups import C_PENDING
from thinrow.serving.lookups import EmbeddingClient, EmbeddingServer, ServedTables, ServerLimits
from thinrow.serving.lookups.engines import available
from thinrow.serving.lookups.frames import Kind, Status, frame
from thinrow.serving.lookups.messages import Ask, Request, encode_request, parse_reply
from thinrow.testing.lookups import Peer, vectors_of, write_exports

_LONG_S = 60.0
KEYS = np.arange(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    write_exports(path, {"a.": 4})
    return path


def _request(number: int) -> list[Any]:
    return frame(Kind.REQUEST, number, encode_request(Request([Ask("a.", KEYS)])))


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + _LONG_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.skipif(not available(), reason="the compiled loop is there on Linux alone")
def test_what_is_urgent_is_answered_first_and_has_places_of_its_own(folder: Path) -> None:
    limits = ServerLimits(lookups=1, waiting=4)
    server = EmbeddingServer(ServedTables.open([folder]), limits, loop="compiled")
    address = server.listen("tcp:127.0.0.1:0").address
    try:
        peers = [Peer(address) for _ in range(4)]
        server.turns.acquire()
        body = encode_request(Request([Ask("a.", KEYS)]))
        # Of five places in all, bulk reads leave two, prefetches one.
        for taken, (peer, rank) in enumerate(((0, 2), (1, 2), (2, 2), (0, 1), (3, 0)), 1):
            peers[peer].send(frame(Kind.REQUEST, 1, body, rank))
            eventually(lambda taken=taken: server.inside.taken == taken)  # type: ignore[misc]
            if taken == 3:
                peers[3].send(frame(Kind.REQUEST, 2, body, 2))
                assert peers[3].next().header.status == Status.OVERLOADED
            if taken == 4:
                peers[1].send(frame(Kind.REQUEST, 3, body, 1))
                assert peers[1].next().header.status == Status.OVERLOADED
        peers[3].send(frame(Kind.REQUEST, 4, body, 0))
        eventually(lambda: int(server.engines.all[0].conns[:, C_PENDING].sum()) == 2)  # type: ignore[union-attr]
        server.turns.release()
        assert [peers[3].next().header.id for _ in range(2)] == [1, 4]
        assert [peers[i].next().header.status for i in (0, 0, 1, 2)] == [Status.OK] * 4
        eventually(lambda: server.inside.taken == 0 and server.memory.taken == 0)
    finally:
        server.close()
    with pytest.raises(InputError, match="urgency='now'"):
        EmbeddingClient([[address]], urgency="now")


@pytest.mark.skipif(not available(), reason="the compiled loop is there on Linux alone")
def test_connections_move_to_an_engine_that_has_nothing_to_do(folder: Path) -> None:
    server = EmbeddingServer(ServedTables.open([folder]), ServerLimits(engines=2, lookups=2), loop="compiled")
    address = server.listen("tcp:127.0.0.1:0").address
    try:
        peers = [Peer(address) for _ in range(6)]
        # Those of one engine go on together, the others are silent.
        busy, until, sent = peers[::2], time.monotonic() + _LONG_S, 0
        while server.stats.total("moved_connections") == 0:
            assert time.monotonic() < until
            for number in range(8):
                for peer in busy:
                    peer.send(_request(sent + number))
            for number in range(8):
                assert [peer.next().header.id for peer in busy] == [sent + number] * len(busy)
            sent += 8
        for peer in peers:
            peer.send(_request(1))
            np.testing.assert_array_equal(parse_reply(peer.next().body)[0].values, vectors_of(KEYS, 1, 0, 4))  # type: ignore[arg-type]
    finally:
        server.close()
    assert server.memory.taken == 0
    assert server.inside.taken == 0
