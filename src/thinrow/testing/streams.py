"""The contract of streams (``thinrow.serving.lookups.streams``); subclass it for each kind. Needs pytest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from thinrow.core.errors import ProtocolError
from thinrow.serving.lookups.frames import Frame, FrameReader, Kind, frame
from thinrow.serving.lookups.server import rest
from thinrow.serving.lookups.streams import Stream, connect, listen, wait

_LONG_S = 30.0


class StreamContract:
    """What must hold of both ends of a connection."""

    #: Of an address to listen at; ``{folder}`` is a folder of the test's own.
    address: str

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Iterator[tuple[Stream, Stream]]:
        listener = listen(self.address.format(folder=tmp_path))
        near = connect(listener.address)
        far = listener.accept()
        yield near, far
        near.close()
        far.close()
        listener.close()

    def test_nothing_there_is_none_and_the_end_is_zero(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        room = memoryview(bytearray(10))
        assert far.recv_into(room) is None
        assert wait([far], [], 0.001) == (set(), set())
        assert near.send([b"ab", b"cde"]) == 5
        near.close()
        assert wait([far], [], _LONG_S)[0] == {far}
        assert _read(far, 5) == b"abcde"
        assert wait([far], [], _LONG_S)[0] == {far}
        assert far.recv_into(room) == 0

    def test_a_reader_that_does_not_read_stops_the_writer(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        whole = np.random.default_rng(0).integers(0, 256, 20 << 20, np.uint8)
        parts, sent = [whole[: 1 << 20].data, whole[1 << 20 :].data], 0
        while n := near.send(parts):
            parts, sent = rest(parts, n), sent + n
        assert sent < len(whole)
        assert wait([near], [near], 0.001) == (set(), set())
        received = bytearray()
        writer = threading.Thread(target=_send_all, args=(near, parts))
        writer.start()
        while len(received) < len(whole):
            received += _read(far, min(1 << 16, len(whole) - len(received)))
        writer.join()
        assert received == whole.tobytes()

    def test_close_wakes_who_waits_and_fails_who_writes(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        waiting = threading.Thread(target=wait, args=([far], [], None))
        waiting.start()
        near.close()
        waiting.join(_LONG_S)
        assert not waiting.is_alive()
        with pytest.raises(OSError):  # noqa: PT011
            _send_all(far, [memoryview(bytes(1 << 26))])

    def test_frames_arrive_however_they_are_cut(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        bodies = [b"", b"x" * 7, bytes(range(256)) * 700, b"end"]
        raw = b"".join(part for i, body in enumerate(bodies) for part in frame(Kind.REQUEST, i, [body]))
        reader, found = FrameReader(1 << 20), list[tuple[int, bytes]]()
        rng = np.random.default_rng(1)
        while len(found) < len(bodies):
            size = int(rng.choice([31, 32, 33, 4096, 70_000]))
            raw = raw[near.send([raw[:size]]) :] if raw else raw
            while (one := reader.read(far)) is not None:
                assert one.body is not None
                found.append((one.header.id, one.body.tobytes()))
                reader.give_back(one.body)
        assert found == list(enumerate(bodies))
        assert not reader.inside

    def test_a_frame_that_does_not_end_is_no_frame(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        near.send([b"".join(frame(Kind.REQUEST, 1, [b"body"]))[:-1]])
        near.close()
        wait([far], [], _LONG_S)
        with pytest.raises(ProtocolError, match="ended within a frame"):
            _next_frame(FrameReader(100), far)


def _next_frame(reader: FrameReader, stream: Stream) -> Frame:
    while (found := reader.read(stream)) is None:
        wait([stream], [], _LONG_S)
    return found


def _read(stream: Stream, n: int) -> bytes:
    room = memoryview(bytearray(n))
    got = 0
    while got < n:
        more = stream.recv_into(room[got:])
        if more is None:
            wait([stream], [], _LONG_S)
        else:
            assert more > 0
            got += more
    return bytes(room)


def _send_all(stream: Stream, parts: list[memoryview]) -> None:
    while parts:
        wait([], [stream], _LONG_S)
        parts = rest(parts, stream.send(parts))
