"""Frames and messages: what was written is read; what is no frame is refused with one error, in bounded memory."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from thinrow.checkpoints import Version
from thinrow.core.errors import InputError, ProtocolError
from thinrow.serving.lookups.frames import HEADER_BYTES, FrameReader, Kind, as_bytes, frame
from thinrow.serving.lookups.messages import (
    Ask,
    Pooling,
    Request,
    Rows,
    encode_reply,
    encode_request,
    encoded,
    parse_reply,
    parse_request,
)
from thinrow.serving.lookups.streams import MemoryStream


def _body(parts: list[object]) -> np.ndarray:
    return np.concatenate([as_bytes(part) for part in parts])


def _request() -> Request:
    keys = np.array([5, -9, 1 << 62], np.int64)
    lengths, weights = np.array([1, 0, 2], np.uint32), np.array([1, 0.5, -2], np.float32)
    asks = [
        Ask("user.", keys),
        Ask("", keys, Pooling.SUM, lengths, pin=Version(3, 7)),
        Ask("é", keys, Pooling.WEIGHTED, lengths, weights),
        Ask("none", keys[:0]),
    ]
    return Request(asks, "int8", 1234)


def test_requests_and_replies_are_read_as_written() -> None:
    request = _request()
    found = parse_request(_body(encode_request(request)))
    assert (found.dtype, found.left_us) == ("int8", 1234)
    for a, b in zip(found.asks, request.asks, strict=True):
        assert (a.table, a.pooling, a.pin) == (b.table, b.pooling, b.pin)
        np.testing.assert_array_equal(a.keys, b.keys)
        for name in ("lengths", "weights"):
            mine, theirs = getattr(a, name), getattr(b, name)
            assert (mine is None) == (theirs is None)
            np.testing.assert_array_equal(mine, theirs)
    values = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    for dtype in ("float32", "float16", "int8"):
        of, scales = encoded(values, dtype)
        rows = [
            Rows(of, scales, np.array([1, 0, 1, 1, 0], np.bool_), Version(9, 1)),
            Rows(of[:0], None if scales is None else scales[:0], np.empty(0, np.uint32), Version(8, 2)),
        ]
        for a, b in zip(parse_reply(_body(encode_reply(rows, dtype))), rows, strict=True):
            assert a.version == b.version
            assert a.found.dtype == b.found.dtype
            np.testing.assert_array_equal(a.found, b.found)
            np.testing.assert_array_equal(a.as_float(), b.as_float())


def test_int8_is_that_of_exports_and_float16_says_what_it_cannot_hold() -> None:
    values = np.array([[1, -127, 63.5], [0, 0, 0]], np.float32)
    of, scales = encoded(values, "int8")
    assert of.tolist() == [[1, -127, 64], [0, 0, 0]]
    assert scales is not None
    assert scales.tolist() == [1, 0]
    with pytest.raises(InputError, match="65504; ask for float32"):
        encoded(np.array([[1e6]], np.float32), "float16")


@pytest.mark.parametrize("kind", ["request", "reply"])
def test_damaged_bodies_are_refused_with_one_error(kind: str) -> None:
    rows = [Rows(np.ones((3, 2), np.float16), None, np.array([1, 0, 1], np.bool_), Version(1, 2))]
    parse = parse_request if kind == "request" else parse_reply
    body = _body(encode_request(_request()) if kind == "request" else encode_reply(rows, "float16"))
    rng = random.Random(5)
    refused = 0
    for _ in range(1_500):
        damaged = body[: rng.randrange(len(body) + 1)].copy() if rng.random() < 0.3 else body.copy()
        for _ in range(rng.randrange(1, 4) if len(damaged) else 0):
            damaged[rng.randrange(len(damaged))] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
        try:
            parse(damaged)
        except ProtocolError:
            refused += 1
    assert refused > 500
    with pytest.raises(ProtocolError, match="behind the end"):
        parse(np.concatenate([body, np.zeros(8, np.uint8)]))


def test_what_is_no_frame_is_refused_and_takes_no_memory() -> None:
    good = b"".join(frame(Kind.REQUEST, 1, [b"12345678"]))
    cases = [(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nmore bytes", "is this an embedding server")]
    for at in range(4, HEADER_BYTES):
        cases.append((good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :], "fails its CRC"))
    cases.append((good[:-1] + b"9", "body of a REQUEST frame of 8 bytes fails its CRC"))
    for raw, message in cases:
        near, far = MemoryStream.pair()
        near.send([raw])
        with pytest.raises(ProtocolError, match=message):
            FrameReader(1 << 20).read(far)
    near, far = MemoryStream.pair()
    near.send(frame(Kind.REQUEST, 1, [bytes(101)]))
    with pytest.raises(ProtocolError, match="a frame of 101 bytes; at most 100"):
        FrameReader(100).read(far)


def test_memory_grows_with_what_came_not_with_what_was_promised() -> None:
    head = frame(Kind.REQUEST, 1, [np.zeros(1 << 26, np.uint8)])[0]
    readers = [FrameReader(1 << 27) for _ in range(20)]
    pairs = [MemoryStream.pair() for _ in readers]
    tracemalloc.start()
    try:
        for reader, (near, far) in zip(readers, pairs, strict=True):
            near.send([head, bytes(1000)])
            assert reader.read(far) is None
            assert reader.inside
        assert tracemalloc.get_traced_memory()[0] < len(readers) << 18
    finally:
        tracemalloc.stop()


def test_a_body_that_is_not_admitted_is_read_over() -> None:
    near, far = MemoryStream.pair()
    near.send(frame(Kind.REQUEST, 1, [bytes(200_000)]) + frame(Kind.PING, 2))
    reader = FrameReader(1 << 20, lambda header: "no" if header.length else None)
    first, second = reader.read(far), reader.read(far)
    assert first is not None
    assert second is not None
    assert (first.header.id, first.body, first.refused) == (1, None, "no")
    assert (second.header.id, second.refused) == (2, None)
