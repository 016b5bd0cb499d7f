"""EmbeddingServer: rows and partial sums of tables over connections, within stated bounds: in engines of a compiled
loop, or in this plain one, a thread a connection.

Worked example::

    server = EmbeddingServer(ServedTables.open(["exports/model"]))
    listener = server.listen("tcp:127.0.0.1:0")
    ...
    server.drain(); server.close()

A connection has ``credits``: requests that may wait. What comes beyond them, or beyond the memory or the look-ups that
may wait in all, is answered OVERLOADED when its header is read, and its body is read over. A request whose time is up
is answered EXPIRED without a look-up. A peer that sends no frames of ours, half of one, or does not read its answers
loses its connection, nobody else theirs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from thinrow.core.errors import InputError, ProtocolError, ThinrowError
from thinrow.serving.lookups.engines import Engines, available
from thinrow.serving.lookups.frames import HEADER_BYTES, Frame, FrameReader, Header, Kind, Status, frame
from thinrow.serving.lookups.messages import Request, encode_reply, parse_request
from thinrow.serving.lookups.served import ServedTables, status_of
from thinrow.serving.lookups.stats import Stats
from thinrow.serving.lookups.streams import Listener, SocketStream, Stream, listen, wait

log = logging.getLogger(__name__)

#: Of a request that is read over: all that a header can say.
_MOST_BYTES = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Attributes:
    connections: at once; one more is told OVERLOADED and closed.
    credits: requests of one connection that may wait.
    request_bytes: of one request.
    memory_bytes: of requests that wait and answers that are made, all together.
    lookups: that run at once; None for one a processor.
    waiting: requests that may wait for their turn to look up, of all connections.
    frame_s: a frame that has begun ends within it.
    send_s: an answer is read within it.
    engines: threads of the compiled loop; None for as many as look-ups that run at once, a processor each at most.
    migrate: connections move from an engine whose requests wait to one that has nothing to do.
    """

    connections: int = 256
    credits: int = 8
    request_bytes: int = 4 << 20
    memory_bytes: int = 1 << 30
    lookups: int | None = None
    waiting: int = 64
    frame_s: float = 10.0
    send_s: float = 5.0
    engines: int | None = None
    migrate: bool = True


class _Amount:
    """A number of which a part may be taken while there is enough."""

    def __init__(self, whole: int) -> None:
        self._left, self._lock = whole, threading.Lock()
        self.whole = whole

    def take(self, n: int) -> bool:
        with self._lock:
            if n > self._left:
                return False
            self._left -= n
            return True

    def give(self, n: int) -> None:
        with self._lock:
            self._left += n

    @property
    def taken(self) -> int:
        return self.whole - self._left


LOOPS = ("compiled", "python")


class EmbeddingServer:
    """Serves until it is closed.

    Attributes:
        tables: what it serves; ``refresh`` them whenever, or put others in their place.
        stats: what it counted.
        draining: new requests are answered DRAINING.
    """

    def __init__(self, tables: ServedTables, limits: ServerLimits | None = None, *, loop: str | None = None) -> None:
        """
        Args:
            loop: of connections over sockets: ``compiled``, or ``python``, a thread a connection, which is what the
                first is held to. None for the first where this system has it. In memory it is always the second.

        Raises:
            InputError: there is no such loop, or not here.
        """
        if loop not in (None, *LOOPS) or (loop == "compiled" and not available()):
            raise InputError(f"loop={loop!r}; it must be one of {', '.join(LOOPS)}, the first on Linux alone")
        self._tables, self.limits, self.stats = tables, limits or ServerLimits(), Stats()
        self.draining = self.closed = False
        processors = len(os.sched_getaffinity(0))
        lookups = self.limits.lookups or processors
        self.engines: Engines | None = None
        self.memory: Any = _Amount(self.limits.memory_bytes)
        self.turns: Any = threading.Semaphore(lookups)
        self.inside: Any = _Amount(lookups + self.limits.waiting)
        if loop == "compiled" or (loop is None and available()):
            self.engines = Engines(self, self.limits.engines or min(lookups, processors))
            self.memory, self.turns, self.inside = self.engines.memory, self.engines.turns, self.engines.inside
        self.tables = tables
        self._listeners: list[Listener] = []
        self._accepting: list[threading.Thread] = []
        self._connections: set[_Connection] = set()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self.stats.gauges |= {
            "connections": lambda: len(self._connections),
            "inside": lambda: self.inside.taken,
            "memory_bytes": lambda: self.memory.taken,
            "draining": lambda: float(self.draining),
            "step": lambda: max(version.step for version in tables.versions().values()),
        }

    @property
    def tables(self) -> ServedTables:
        """What is served."""
        return self._tables

    @tables.setter
    def tables(self, tables: ServedTables) -> None:
        self._tables = tables
        if self.engines is not None:
            tables.watchers.append(self.engines.renew)
            self.engines.renew()

    def listen(self, address: str) -> Listener:
        """Take connections at ``address`` on a thread of their own. Raises as ``streams.listen``."""
        listener = listen(address)
        self._listeners.append(listener)
        thread = threading.Thread(target=self._accept, args=(listener,), name="thinrow-accept", daemon=True)
        self._accepting.append(thread)
        thread.start()
        return listener

    @property
    def accepting(self) -> bool:
        """Connections are taken at all addresses."""
        return all(thread.is_alive() for thread in self._accepting)

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                stream = listener.accept()
            except OSError as error:
                if self.closed or self.draining:
                    return
                # Out of descriptors, or a peer that is gone already: the next one may do.
                log.warning("a connection was not taken: %s", error)
                time.sleep(0.05)
                continue
            try:
                self.serve(stream)
            except Exception:
                # Whatever becomes of one connection, the next is taken.
                log.exception("a connection was not served")

    def serve(self, stream: Stream) -> None:
        """Serve one connection on a thread of its own."""
        connection = _Connection(self, stream)
        with self._lock:
            full = len(self._connections) >= self.limits.connections or self.closed
            if not full:
                self._connections.add(connection)
        if full:
            self.stats.add("refused_connections")
            # The peer may be gone already.
            with contextlib.suppress(OSError):
                stream.send(frame(Kind.REPLY, 0, [b"no more connections"], Status.OVERLOADED))
            stream.close()
            return
        try:
            if self.engines is not None and isinstance(stream, SocketStream):
                self.engines.serve(stream)
            else:
                threading.Thread(target=self._run, args=(connection,), name="thinrow-lookups", daemon=True).start()
        except RuntimeError:
            # The system gives no more threads.
            with self._lock:
                self._connections.discard(connection)
            stream.close()
            raise

    def _run(self, connection: _Connection) -> None:
        try:
            connection.run()
        except (OSError, EOFError):
            self.stats.add("ended_connections")
        except ProtocolError as error:
            self.stats.add("protocol_errors")
            log.warning("a connection was closed: %s", error)
        except Exception:
            self.stats.add("failed_connections")
            log.exception("a connection failed")
        finally:
            connection.let_go()
            connection.stream.close()
            with self._lock:
                self._connections.discard(connection)

    def hello(self) -> bytes:
        """What the first frame of a connection says."""
        limits = {"credits": self.limits.credits, "request_bytes": self.limits.request_bytes}
        return json.dumps(self.tables.describe() | limits).encode()

    def forget(self, stream: Stream) -> None:
        """A connection of an engine has ended."""
        stream.close()
        with self._lock:
            self._connections = {one for one in self._connections if one.stream is not stream}

    def refresh_every(self, seconds: float) -> None:
        """Take up newer versions of the tables, on a thread of its own, until the server is closed."""

        def refresh() -> None:
            while not self._ended.wait(seconds):
                try:
                    if self.tables.refresh():
                        self.stats.add("refreshes")
                        log.info("tables are now at %s", self.tables.versions())
                except Exception as error:
                    # What was served still is.
                    self.stats.add("failed_refreshes")
                    log.warning("no newer tables: %s", error)

        threading.Thread(target=refresh, name="thinrow-refresh", daemon=True).start()

    def drain(self, timeout_s: float = 5.0) -> bool:
        """Refuse new connections and requests, and wait until those inside are answered. Returns whether all were."""
        self.draining = True
        if self.engines is not None:
            self.engines.drain()
        for listener in self._listeners:
            listener.close()
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            held = self.engines is not None and self.engines.holds
            if not held and not any(connection.inside for connection in list(self._connections)):
                return True
            time.sleep(0.005)
        return False

    def close(self) -> None:
        """End all connections."""
        self.draining = self.closed = True
        self._ended.set()
        for listener in self._listeners:
            listener.close()
        if self.engines is not None:
            # First, since they close what they serve themselves.
            self.engines.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.stream.close()


class _Connection:
    """One connection, on its thread."""

    def __init__(self, server: EmbeddingServer, stream: Stream) -> None:
        self.server, self.stream, self.limits = server, stream, server.limits
        self.pending: deque[tuple[Header, Any, float]] = deque()
        self.busy = False
        self._reader = FrameReader(_MOST_BYTES, self._admit)
        self._began: float | None = None
        self._held = 0

    @property
    def inside(self) -> bool:
        """A request was taken and is not answered; of one that is still read, memory is held."""
        return bool(self.pending) or self.busy or self._held > 0

    def run(self) -> None:
        self._send(frame(Kind.HELLO, 0, [self.server.hello()]))
        while True:
            self._take_frames()
            if self.pending:
                self.busy = True
                header, body, since = self.pending.popleft()
                try:
                    self._answer(header, body, since)
                finally:
                    self.busy = False
                    self._give_back(header, body)

    def _take_frames(self) -> None:
        """What is there; the next frame where nothing waits."""
        # A peer that never stops sending gets answers, too.
        for _ in range(2 * self.limits.credits):
            # Most clients send the next request when they have read this one's answer: there is nothing to read yet.
            if not self.pending and not self._reader.inside:
                self._wait()
            found = self._reader.read(self.stream)
            if found is not None:
                self._began = None
                self._take(found)
            elif self.pending:
                return
            else:
                self._wait()

    def _wait(self) -> None:
        left = None
        if self._reader.inside:
            now = time.monotonic()
            self._began = self._began or now
            left = self._began + self.limits.frame_s - now
            if left <= 0:
                raise ProtocolError(f"a frame had not ended {self.limits.frame_s:g} s after it began")
        wait([self.stream], [], left)

    def _admit(self, header: Header) -> Status | None:
        """Asked before the body of a frame is read."""
        if header.kind not in (Kind.REQUEST, Kind.CANCEL, Kind.PING):
            raise ProtocolError(f"a frame of kind {header.kind.name}, which clients do not send")
        if header.kind != Kind.REQUEST:
            if header.length:
                raise ProtocolError(f"a {header.kind.name} frame with a body of {header.length} bytes")
            return None
        if header.length > self.limits.request_bytes:
            return Status.INVALID
        if self.server.draining:
            return Status.DRAINING
        return None if len(self.pending) < self.limits.credits and self._hold(header.length) else Status.OVERLOADED

    def _take(self, found: Frame) -> None:
        header = found.header
        if found.refused is not None:
            self._refuse(header, found.refused, self._why(header, found.refused))
        elif header.kind == Kind.REQUEST:
            self.server.stats.add("bytes_in", n=HEADER_BYTES + header.length)
            self.pending.append((header, found.body, time.monotonic()))
        elif header.kind == Kind.PING:
            self._send(frame(Kind.PONG, header.id, [], Status.DRAINING if self.server.draining else Status.OK))
        else:
            waiting, self.pending = self.pending, deque()
            for entry in waiting:
                if entry[0].id != header.id:
                    self.pending.append(entry)
                    continue
                self._give_back(*entry[:2])
                self.server.stats.add("requests", "CANCELLED")

    def _why(self, header: Header, refused: Status) -> str:
        if refused == Status.INVALID:
            return f"a request of {header.length} bytes; at most {self.limits.request_bytes}: ask for less"
        return "draining; ask another" if refused == Status.DRAINING else "more waits than may wait here"

    def _answer(self, header: Header, body: Any, since: float) -> None:
        request = parse_request(body)
        until = since + request.left_us / 1e6 if request.left_us else None
        held = self._held
        try:
            parts = self._turn(header, request, until)
            if parts is not None:
                self.server.stats.add("requests", "OK")
                self.server.stats.add("keys", n=sum(len(ask.keys) for ask in request.asks))
                self.server.stats.took(time.monotonic() - since)
                self._send(parts)
        except ThinrowError as error:
            if isinstance(error, ProtocolError):
                raise
            self._refuse(header, status_of(error), str(error))
        finally:
            self._let_go_to(held)

    def _turn(self, header: Header, request: Request, until: float | None) -> list[memoryview] | None:
        """The answer's frame; None where it is another status, which is sent. Its memory is held."""
        server = self.server
        need = server.tables.work_bytes(request)
        if need > server.memory.whole:
            raise InputError(f"an answer of {need} bytes; this server has {server.memory.whole}: ask for less")
        if not self._hold(need):
            self._refuse(header, Status.OVERLOADED, "no memory for the answer")
            return None
        if not server.inside.take(1):
            self._refuse(header, Status.OVERLOADED, "as many look-ups wait as may wait")
            return None
        try:
            left = None if until is None else until - time.monotonic()
            if (left is not None and left <= 0) or not server.turns.acquire(timeout=left):
                self._refuse(header, Status.EXPIRED, "its deadline passed before its turn")
                return None
            try:
                return frame(Kind.REPLY, header.id, encode_reply(server.tables.answer(request), request.dtype))
            finally:
                server.turns.release()
        finally:
            server.inside.give(1)

    def _hold(self, n: int) -> bool:
        taken: bool = self.server.memory.take(n)
        self._held += n * taken
        return taken

    def _let_go_to(self, held: int) -> None:
        self.server.memory.give(self._held - held)
        self._held = held

    def _refuse(self, header: Header, status: Status, why: str) -> None:
        self.server.stats.add("requests", status.name)
        self._send(frame(Kind.REPLY, header.id, [why.encode()[:1024]], status))

    def _send(self, parts: list[memoryview]) -> None:
        self.server.stats.add("bytes_out", n=sum(map(len, parts)))
        until = time.monotonic() + self.limits.send_s
        while parts:
            parts = rest(parts, self.stream.send(parts))
            if parts and not wait([], [self.stream], until - time.monotonic())[1] and time.monotonic() >= until:
                raise ProtocolError(f"an answer was not read within {self.limits.send_s:g} s")

    def _give_back(self, header: Header, body: Any) -> None:
        self._reader.give_back(body)
        self._let_go_to(self._held - header.length)

    def let_go(self) -> None:
        """Of the memory that is still taken."""
        self.pending.clear()
        self._let_go_to(0)


def rest(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What of ``parts`` is left after ``sent`` bytes."""
    for number, part in enumerate(parts):
        if sent < len(part):
            return [part[sent:], *parts[number + 1 :]]
        sent -= len(part)
    return []
