"""Frames: what goes over a connection, each with a checked header and a checked body (docs/format/frames-v1.md).

Worked example::

    parts = frame(PING, 7)                     # 32 bytes: magic, version, kind, id 7, no body, CRCs
    reader = FrameReader(limit=1 << 20)
    reader.read(stream)                        # Frame(kind=PING, id=7, ...), or None where not all of it is there yet

A reader takes memory as bytes come in, not as a header promises them, and refuses what is no frame with one error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import ProtocolError
from thinrow.kernels import kernel
from thinrow.serving.lookups.streams import Stream

Bytes = npt.NDArray[np.uint8]

MAGIC = b"trow"
VERSION = 1
#: magic, version, kind, status, id, length and CRC of the body, zero; the header's CRC follows.
_HEADER = struct.Struct("<4sBBHQIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
#: A body's first memory, and the least that it grows to.
_FIRST_BYTES = 1 << 16


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    REQUEST = 2
    REPLY = 3
    CANCEL = 4
    PING = 5
    PONG = 6


#: What requests are for; servers answer the first before the others, and the others before the last.
URGENCIES = ("interactive", "prefetch", "bulk")


class Status(IntEnum):
    """What a reply says of its request; all but OK have a text as body."""

    OK = 0
    OVERLOADED = 1
    EXPIRED = 2
    UNKNOWN_TABLE = 3
    DRAINING = 4
    MISROUTED = 5
    OTHER_VERSION = 6
    INVALID = 7
    FAILED = 8


@dataclass(frozen=True, slots=True)
class Header:
    """The first 32 bytes of a frame."""

    kind: Kind
    status: int
    id: int
    length: int
    crc: int


@dataclass(frozen=True, slots=True)
class Frame:
    """Attributes:
    body: (length,) uint8, memory of the reader until it is given back; None where ``admit`` refused it.
    refused: what ``admit`` said.
    """

    header: Header
    body: Bytes | None
    refused: Any = None


def frame(kind: Kind, id: int, body: Sequence[Any] = (), status: int = 0) -> list[memoryview]:
    """Buffers of one frame, in order: its header and ``body``, which are contiguous arrays or bytes."""
    parts = [as_bytes(part) for part in body]
    crc = 0
    for part in parts:
        crc = int(kernel("crc32c")(part, crc))
    head = bytearray(HEADER_BYTES)
    _HEADER.pack_into(head, 0, MAGIC, VERSION, kind, status, id, sum(map(len, parts)), crc, 0)
    _CRC.pack_into(head, _HEADER.size, crc_of(head, _HEADER.size))
    return [memoryview(head), *(part.data for part in parts if len(part))]


def as_bytes(part: Any) -> Bytes:
    """``part``, a contiguous array or a buffer, as (n,) uint8 over the same memory where it may be written to."""
    if isinstance(part, np.ndarray):
        return part.reshape(-1).view(np.uint8)
    return np.frombuffer(part if isinstance(part, bytearray) else bytearray(part), np.uint8)


def crc_of(data: bytearray | memoryview, n: int) -> int:
    """CRC-32C of the first ``n`` bytes of what can be written to."""
    return int(kernel("crc32c")(np.frombuffer(data, np.uint8, n), 0))


class FrameReader:
    """Puts frames together from a stream that gives what is there.

    Args:
        limit: bytes of a body at most.
        admit: asked when a header is there; what it returns, where that is not None, is ``Frame.refused``, and the body
            is read over without being kept.
        keep_bytes: memory of a body that is kept for later ones, of two bodies at most.
    """

    def __init__(
        self, limit: int, admit: Callable[[Header], Any] | None = None, keep_bytes: int = 4 * _FIRST_BYTES
    ) -> None:
        self._limit, self._admit, self._keep_bytes = limit, admit, keep_bytes
        self._head = bytearray(HEADER_BYTES)
        self._head_view = memoryview(self._head)
        self._header: Header | None = None
        self._body: Bytes | None = None
        self._got = 0
        self._refused: Any = None
        self._spare: list[Bytes] = []

    @property
    def inside(self) -> bool:
        """Some of a frame is there, and not all."""
        return self._header is not None or self._got > 0

    def read(self, stream: Stream) -> Frame | None:
        """The next frame, or None until more bytes come.

        Raises:
            ProtocolError: what came is no frame, or longer than may be; nothing more can be read from the stream.
            EOFError: the stream ended.
            OSError: it broke.
        """
        if self._header is None and not self._read_header(stream):
            return None
        header = self._header
        assert header is not None
        while self._got < header.length:
            n = stream.recv_into(self._room(header.length))
            if n is None:
                return None
            self._ended(n)
            self._got += n
        body, refused, self._header = self._body, self._refused, None
        self._body, self._refused, self._got = None, None, 0
        if refused is not None:
            return Frame(header, None, refused)
        whole = np.empty(0, np.uint8) if body is None else body[: header.length]
        if int(kernel("crc32c")(whole, 0)) != header.crc:
            raise ProtocolError(f"the body of a {header.kind.name} frame of {header.length} bytes fails its CRC")
        return Frame(header, whole)

    def give_back(self, body: Bytes | None) -> None:
        """The memory of a frame's body, for a later one; nobody may look at it any longer."""
        memory = None if body is None else body.base
        if isinstance(memory, np.ndarray) and memory.nbytes <= self._keep_bytes and len(self._spare) < 2:
            self._spare.append(memory)

    def _read_header(self, stream: Stream) -> bool:
        while self._got < HEADER_BYTES:
            n = stream.recv_into(self._head_view[self._got :])
            if n is None:
                return False
            self._ended(n)
            self._got += n
        header = parse_header(self._head, self._limit)
        self._refused = self._admit(header) if self._admit is not None else None
        self._header, self._got = header, 0
        return True

    def _ended(self, n: int) -> None:
        if n == 0:
            if self.inside:
                raise ProtocolError("the connection ended within a frame")
            raise EOFError

    def _room(self, length: int) -> memoryview:
        """Where the next bytes of the body go."""
        if self._refused is not None:
            if self._body is None:
                self._body = np.empty(_FIRST_BYTES, np.uint8)
            return self._body[: min(len(self._body), length - self._got)].data
        if self._body is None:
            self._body = self._spare.pop() if self._spare else np.empty(min(length, _FIRST_BYTES), np.uint8)
        if self._got == len(self._body):
            larger = np.empty(min(length, 2 * max(self._got, _FIRST_BYTES // 2)), np.uint8)
            larger[: self._got] = self._body
            self._body = larger
        return self._body[self._got : length].data


def header_of(words: memoryview[int]) -> Header:
    """Of 32 bytes that were checked."""
    _, _, kind, status, id, length, crc, _ = _HEADER.unpack_from(words)
    return Header(Kind(kind), status, id, length, crc)


def parse_header(head: bytearray, limit: int) -> Header:
    """Check and read 32 bytes. Raises ProtocolError, which says what is wrong."""
    magic, version, kind, status, id, length, crc, zero = _HEADER.unpack_from(head)
    if magic != MAGIC:
        raise ProtocolError(f"a frame begins with {bytes(head[:4])!r}, not {MAGIC!r}; is this an embedding server?")
    if crc_of(head, _HEADER.size) != _CRC.unpack_from(head, _HEADER.size)[0]:
        raise ProtocolError("the header of a frame fails its CRC")
    if version != VERSION:
        raise ProtocolError(f"a frame of version {version}; this thinrow speaks {VERSION}: update the older side")
    if zero != 0 or kind not in Kind._value2member_map_:
        raise ProtocolError(f"a frame of kind {kind} with {zero} where 0 must be")
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes; at most {limit}")
    return Header(Kind(kind), status, id, length, crc)
