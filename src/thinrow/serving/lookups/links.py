"""Links: a thread's own connections to servers, and what all threads know of a server's health.

Worked example: a server that ends is asked again after 50 ms, then after 100, up to 2 s; until then nobody waits for
it. One that three times in a row does not answer in time is left alone in the same way, and its connection is closed.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import ProtocolError
from thinrow.serving.lookups.frames import HEADER_BYTES, Frame, FrameReader, Kind, frame
from thinrow.serving.lookups.server import rest
from thinrow.serving.lookups.stats import Stats
from thinrow.serving.lookups.streams import Stream, check_address, connect

#: Bytes of an answer at most.
ANSWER_BYTES = 1 << 30
KEPT_BYTES = 1 << 24
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
#: Requests that go unanswered one after another before a server is left alone.
_LATE = 3
#: Requests under way on a connection before its server has said how many may be.
_CREDITS = 4


class Known:
    """The default of each table, and so its width, and which tables are of one export: as the server that said so last
    has it; all servers of a table agree."""

    def __init__(self) -> None:
        self.defaults: dict[str, npt.NDArray[np.float32]] = {}
        self._exports: dict[str, str] = {}

    def export_of(self, table: str) -> str:
        """A name that all tables of one export share."""
        return self._exports.get(table, table)

    def learn(self, hello: dict[str, Any]) -> None:
        """Raises ProtocolError: what a server says is not what servers say."""
        try:
            tables = hello["tables"].items()
            found = {name: np.array(table["default"], np.float32) for name, table in tables}
            exports = {name: str(table["export"]) for name, table in tables}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"a server that does not say which tables it has: {error}") from None
        self.defaults, self._exports = self.defaults | found, self._exports | exports


class Server:
    """What is known of one server; its numbers are only hints, so that threads need no lock."""

    def __init__(self, address: str) -> None:
        self.address = check_address(address)
        self._failures = self._late = 0
        #: When its pause ends.
        self.again_at = 0.0
        #: Of a request at most, as it said.
        self.request_bytes = (1 << 32) - 1

    def usable(self) -> bool:
        """Whether to ask it now."""
        return time.monotonic() >= self.again_at

    def answered(self) -> None:
        """It lives."""
        self._failures = self._late = 0
        self.again_at = 0.0

    def failed(self) -> None:
        """Its connection could not be made, or broke."""
        self._failures += 1
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures - 1, 10))
        self.again_at = time.monotonic() + pause

    def late(self) -> bool:
        """It let a deadline pass, or another answered first. Returns whether it is to be left alone for now."""
        self._late += 1
        if self._late >= _LATE:
            self.failed()
        return self._late >= _LATE


class Link:
    """One thread's connection to one server."""

    def __init__(self, server: Server, known: Known, stats: Stats) -> None:
        """Raises OSError: nobody listens."""
        self.server, self._known, self._stats = server, known, stats
        self.stream: Stream = connect(server.address)
        self._reader = FrameReader(ANSWER_BYTES, keep_bytes=KEPT_BYTES)
        self._credits = _CREDITS
        #: Ids of requests whose answers have not come, wanted or not.
        self.under_way: set[int] = set()
        self.unsent: list[memoryview] = []
        #: It has answered a request of ours, with what could be read.
        self.has_answered = False
        self.closed = False

    @property
    def full(self) -> bool:
        """The server has as many requests of this connection as it takes."""
        return len(self.under_way) >= self._credits

    @property
    def stuck(self) -> bool:
        """Not all was sent."""
        return bool(self.unsent)

    def ask(self, number: int, body: list[Any], rank: int = 0) -> None:
        """Send a request of the urgency ``URGENCIES[rank]``, as much of it as there is room for. Raises OSError."""
        self.under_way.add(number)
        parts = frame(Kind.REQUEST, number, body, rank)
        self._stats.add("bytes_out", n=sum(map(len, parts)))
        self.unsent += parts
        self.flush()

    def cancel(self, number: int) -> None:
        """Tell the server that nobody waits for an answer any longer. Raises OSError."""
        self.unsent += frame(Kind.CANCEL, number)
        # A cancelled request that still waited is not answered.
        self.under_way.discard(number)
        self.flush()

    def flush(self) -> None:
        """Send on. Raises OSError."""
        if self.unsent:
            self.unsent = rest(self.unsent, self.stream.send(self.unsent))

    def replies(self) -> Iterator[Frame]:
        """Answers that are there; the body of each is to be given back.

        Raises:
            OSError, EOFError, ProtocolError: the connection is of no more use.
        """
        while (found := self._reader.read(self.stream)) is not None:
            yield from self._checked(found)

    def _checked(self, found: Frame) -> Iterator[Frame]:
        """The frame, where it is an answer."""
        kind = found.header.kind
        self._stats.add("bytes_in", n=HEADER_BYTES + found.header.length)
        if kind == Kind.HELLO:
            self._hello(found)
            self.give_back(found.body)
        elif kind == Kind.REPLY:
            if found.header.id == 0:
                raise ConnectionRefusedError(said(found.body))
            self.under_way.discard(found.header.id)
            yield found
        elif kind != Kind.PONG:
            raise ProtocolError(f"a frame of kind {kind.name}, which servers do not send")

    def give_back(self, body: Any) -> None:
        """The memory of an answer that nobody looks at any longer."""
        self._reader.give_back(body)

    def _hello(self, found: Frame) -> None:
        assert found.body is not None
        try:
            hello = json.loads(found.body.tobytes())
            self._credits = max(1, int(hello["credits"]))
            self.server.request_bytes = int(hello["request_bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"a server whose first frame is no description: {error}") from None
        self._known.learn(hello)

    def close(self) -> None:
        self.closed = True
        self.stream.close()


def said(body: Any) -> str:
    """What a server says of a refusal."""
    return str(body.tobytes().decode(errors="replace"))


class _Mine(dict[Server, Link]):
    """One thread's links; they end with it."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __del__(self) -> None:
        for link in self.values():
            link.close()


class Links:
    """The links of all threads; each thread sees its own."""

    def __init__(self, known: Known, stats: Stats, make: Callable[[Server, Known, Stats], Link]) -> None:
        self._make, self._known, self._stats, self._mine = make, known, stats, threading.local()
        self._all = weakref.WeakSet[_Mine]()
        self._lock = threading.Lock()

    def of(self, server: Server) -> Link | None:
        """This thread's link, made where there is none; None where nobody listens."""
        links = self._links()
        link = links.get(server)
        if link is not None and not link.closed:
            return link
        try:
            link = links[server] = self._make(server, self._known, self._stats)
        except OSError:
            server.failed()
            return None
        return link

    def _links(self) -> _Mine:
        links: _Mine | None = getattr(self._mine, "links", None)
        if links is None:
            links = self._mine.links = _Mine()
            with self._lock:
                self._all.add(links)
        return links

    def after_fork(self) -> None:
        """In a child process, to which these are of no use: its parent reads from the same connections. No lock is
        taken, since whichever thread held it is not here to let it go."""
        for links in list(self._all):
            for link in links.values():
                link.close()

    def close(self) -> None:
        """Of all threads."""
        with self._lock:
            everything = [link for links in self._all for link in links.values()]
        for link in everything:
            link.close()
