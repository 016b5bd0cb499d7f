"""Links whose requests and answers go through a compiled loop, without the interpreter.

Worked example: ``ask`` puts a request together in memory; ``first_ready([link], until_ns)`` sends it, waits, reads and
checks the answer in one call without the interpreter's lock, and ``link.replies()`` gives what was read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import ProtocolError
from thinrow.kernels import compiled_loop, kernel
from thinrow.kernels import lookups as at
from thinrow.serving.lookups.frames import HEADER_BYTES, Frame, as_bytes, header_of
from thinrow.serving.lookups.links import ANSWER_BYTES, KEPT_BYTES, Known, Link, Server
from thinrow.serving.lookups.stats import Stats
from thinrow.serving.lookups.streams import SocketStream

_FIRST_BYTES = 1 << 16


def link_to(server: Server, known: Known, stats: Stats) -> Link:
    """A connection: over a socket through the compiled loop, where this system has it. Raises OSError."""
    if server.address.startswith("memory:") or compiled_loop("exchange_frames") is None:
        return Link(server, known, stats)
    return CompiledLink(server, known, stats)


def prepare() -> None:
    """Compile what a read calls, where it never was: else the first read does, beyond its deadline."""
    kernel("widen_half")(np.empty(0, np.float16), np.empty(0, np.float32))
    loop = compiled_loop("exchange_frames")
    if loop is not None:
        loop(np.empty(0, np.int64), 0, np.zeros(2, np.int64))


class CompiledLink(Link):
    """One thread's connection to one server, over a socket."""

    def __init__(self, server: Server, known: Known, stats: Stats) -> None:
        super().__init__(server, known, stats)
        assert isinstance(self.stream, SocketStream)
        held = np.zeros(at.X_FIELDS, np.int64)
        # Through a memoryview: NumPy takes longer to give a number away.
        self._numbers: memoryview[int] = memoryview(held.data)
        #: For the loop: where this link's numbers are.
        self.place = held.ctypes.data
        self.alone, self.room = np.array([self.place], np.int64), np.zeros(3, np.int64)
        self._numbers[at.X_ADDRESS], self._numbers[at.X_FD] = self.place, self.stream.sock.fileno()
        self._numbers[at.X_LIMIT] = ANSWER_BYTES
        self._out = np.empty(_FIRST_BYTES, np.uint8)
        self._numbers[at.X_OUT] = self._out.ctypes.data
        #: Memory, and its address where that is known.
        self._spare: list[tuple[npt.NDArray[np.uint8], int | None]] = []
        self._lent: tuple[npt.NDArray[np.uint8], int] | None = None
        self._use(np.empty(_FIRST_BYTES, np.uint8))
        self._inside = False

    @property
    def stuck(self) -> bool:
        numbers = self._numbers
        return bool(self.unsent) or numbers[at.X_OUT_AT] < numbers[at.X_OUT_END]

    def ask(self, number: int, body: list[Any], rank: int = 0) -> None:
        """Put a request together; ``first_ready`` sends it."""
        self.under_way.add(number)
        parts = [as_bytes(part) for part in body]
        size = HEADER_BYTES + sum(map(len, parts))
        if size > len(self._out):
            self._out = np.empty(size + (size >> 2), np.uint8)
            self._numbers[at.X_OUT] = self._out.ctypes.data
        end = HEADER_BYTES
        for part in parts:
            self._out[end : end + len(part)] = part
            end += len(part)
        numbers = self._numbers
        numbers[at.X_OUT_AT], numbers[at.X_OUT_END] = 0, size
        numbers[at.X_NEW], numbers[at.X_NUMBER], numbers[at.X_RANK] = 1, number, rank
        self._stats.add("bytes_out", n=size)

    def replies(self) -> Iterator[Frame]:
        """As ``Link.replies``, of what ``first_ready`` found; one at most."""
        numbers = self._numbers
        event, why = numbers[at.X_EVENT], numbers[at.X_WHY]
        numbers[at.X_EVENT] = at.XE_NONE
        if event == at.XE_FAILED:
            raise OSError(why, os.strerror(why))
        if event == at.XE_ENDED:
            raise EOFError
        if event == at.XE_BROKEN:
            raise ProtocolError(at.XWHY[why])
        if event == at.XE_WHOLE:
            header = header_of(numbers[at.X_HEADER : at.X_HEADER + 4])
            body, self._lent = self._body[: header.length], (self._body, numbers[at.X_BODY])
            numbers[at.X_GOT] = numbers[at.X_LENGTH] = 0
            if self._spare:
                self._use(*self._spare.pop())
            else:
                self._use(np.empty(_FIRST_BYTES, np.uint8))
            yield from self._checked(Frame(header, body))

    def give_back(self, body: Any) -> None:
        memory = None if body is None else body.base
        if not isinstance(memory, np.ndarray) or memory.nbytes > KEPT_BYTES:
            return
        known = self._lent[1] if self._lent is not None and self._lent[0] is memory else None
        if memory.nbytes > len(self._body) and not self._numbers[at.X_GOT]:
            self._spare.append((self._body, self._numbers[at.X_BODY]))
            self._use(memory, known)
        else:
            self._spare.append((memory, known))
        del self._spare[2:]

    def is_ready(self) -> bool:
        """There is something to be read; what fills the memory of a body gets more, as it comes."""
        if self._numbers[at.X_EVENT] != at.XE_ROOM:
            return True
        length, got = self._numbers[at.X_LENGTH], len(self._body)
        larger = np.empty(min(length, 2 * got), np.uint8)
        larger[:got] = self._body
        self._use(larger)
        return False

    def enter(self) -> bool:
        """Before its numbers are in the loop. Returns whether they may: no other thread has closed it."""
        self._inside = True
        if self.closed:
            self._numbers[at.X_EVENT], self._numbers[at.X_WHY] = at.XE_FAILED, errno.ECONNABORTED
        return not self.closed

    def leave(self) -> None:
        self._inside = False
        if self.closed:
            self.stream.close()

    def close(self) -> None:
        """Also from another thread than its own, which then closes the descriptor when it is no longer in the loop."""
        self.closed = True
        assert isinstance(self.stream, SocketStream)
        self.stream.shutdown()
        if not self._inside:
            self.stream.close()

    def _use(self, memory: npt.NDArray[np.uint8], place: int | None = None) -> None:
        self._body = memory
        self._numbers[at.X_BODY] = memory.ctypes.data if place is None else place
        self._numbers[at.X_ROOM] = len(memory)


def first_ready(links: Sequence[CompiledLink], until_ns: int) -> CompiledLink | None:
    """Send what is unsent; the first link that has an answer, or has ended; None at ``until_ns`` of the monotonic
    clock."""
    loop = compiled_loop("exchange_frames")
    assert loop is not None
    try:
        for link in links:
            if not link.enter():
                return link
        if len(links) == 1:
            places, room = links[0].alone, links[0].room
        else:
            places, room = np.array([link.place for link in links], np.int64), np.zeros(len(links) + 2, np.int64)
        while True:
            found: int = loop(places, until_ns, room)
            if found < 0:
                return None
            if links[found].is_ready():
                return links[found]
    finally:
        for link in links:
            link.leave()
