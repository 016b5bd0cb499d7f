"""Engines of an embedding server: threads that serve their connections in a compiled loop, each its own.

Worked example: two engines, four connections, two each. If those of the first send all requests, it is found to have
others waiting while the second has nothing to do, and one of its connections moves there, with what it has read and not
yet sent. Nothing on the way of a request is locked; what all share, the account of memory, is added to atomically.

The loop comes back for what is rare: new connections, newer tables, a request that is not plain (of a table that there
is not, of two versions at once, with a value that cannot be sent), which Python answers as the plain server does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError, ProtocolError, ThinrowError
from thinrow.kernels import compiled_loop
from thinrow.kernels import lookups as at
from thinrow.serving.lookups.frames import Kind, Status, frame
from thinrow.serving.lookups.messages import MOST_TABLES, encode_reply, parse_request
from thinrow.serving.lookups.served import status_of
from thinrow.serving.lookups.stats import BUCKETS
from thinrow.serving.lookups.streams import SocketStream

if TYPE_CHECKING:
    from thinrow.serving.lookups.server import EmbeddingServer

log = logging.getLogger(__name__)

_NOTHING = np.empty(0, np.uint8)
#: Bytes for what the loop reads at once, and for its events and clock.
_STAGING_BYTES = 1 << 17
_ASK_FIELDS = 7
_TEXTS = {
    Status.OVERLOADED: "more waits than may wait here",
    Status.EXPIRED: "its deadline passed before its turn",
    Status.DRAINING: "draining; ask another",
}


def available() -> bool:
    """Whether this system has the compiled loop."""
    return compiled_loop("serve_frames") is not None


class Shared:
    """One number of those that all engines share; as ``_Amount`` and a semaphore."""

    def __init__(self, numbers: npt.NDArray[np.int64], place: int, whole: int) -> None:
        self._numbers, self._place, self.whole = numbers, place, whole
        add = compiled_loop("add_shared")
        assert add is not None
        self._add: Callable[..., int] = add
        numbers[place] = whole

    def take(self, n: int) -> bool:
        """A part of it, where there is as much."""
        if self._add(self._numbers, self._place, -n) >= n:
            return True
        self.give(n)
        return False

    def give(self, n: int) -> None:
        self._add(self._numbers, self._place, n)

    @property
    def taken(self) -> int:
        return self.whole - int(self._numbers[self._place])

    def acquire(self, timeout: float | None = None) -> bool:
        """Take one, when there is one. Returns whether there was, in time."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.take(1):
            if until is not None and time.monotonic() >= until:
                return False
            time.sleep(0.0002)
        return True

    def release(self) -> None:
        self.give(1)


class Engines:
    """All engines of a server."""

    def __init__(self, server: EmbeddingServer, count: int) -> None:
        self.server, self.closed = server, False
        self.shared = np.zeros(at.S_IDLE + at.S_STEP * count, np.int64)
        self.memory = Shared(self.shared, at.S_MEMORY, server.limits.memory_bytes)
        lookups = server.limits.lookups or len(os.sched_getaffinity(0))
        self.turns = Shared(self.shared, at.S_TURNS, lookups)
        self.inside = Shared(self.shared, at.S_INSIDE, lookups + server.limits.waiting)
        self.shared[at.S_KEPT] = server.limits.waiting // 4
        self.shared[at.S_WHOLE] = server.limits.memory_bytes
        self.texts, self._held = _texts(server.limits.request_bytes)
        self.all = [_Engine(self, number, count) for number in range(count)]
        # Where it was never called, it is compiled now, before there are connections.
        self.all[0].command(at.TAKE, 0, np.zeros(8 * at.C_FIELDS, np.uint8))
        for engine in self.all:
            engine.thread.start()
        server.stats.sources.append(self._counted)

    def serve(self, stream: SocketStream) -> None:
        """Serve a connection, in the engine that has the fewest."""
        engine = min(self.all, key=lambda one: one.load)
        hello = b"".join(frame(Kind.HELLO, 0, [self.server.hello()]))
        descriptor = np.array([stream.sock.fileno()], np.int64).tobytes()
        engine.mail(at.ADD, np.frombuffer(descriptor + hello, np.uint8).copy(), stream)

    def renew(self) -> None:
        """Have all take up newer tables."""
        for engine in self.all:
            engine.renew()

    def drain(self) -> None:
        """Refuse requests from now on."""
        self.shared[at.S_DRAINING] = 1

    @property
    def holds(self) -> bool:
        """Memory is held by requests that are read, wait, or whose answers are sent."""
        return any(bool((engine.conns[:, at.C_HELD] > 0).any()) for engine in self.all)

    def close(self) -> None:
        """End all connections, and the threads."""
        self.closed = True
        for engine in self.all:
            engine.wake()
        for engine in self.all:
            if engine.thread is not threading.current_thread():
                engine.thread.join(5)

    def moved(self) -> int:
        """Connections that went from one engine to another."""
        return sum(engine.moved for engine in self.all)

    def _counted(self) -> tuple[dict[tuple[str, str], int], list[int], float]:
        numbers = np.sum([engine.engine for engine in self.all], axis=0)
        counts = {("requests", Status(i).name): int(numbers[at.E_STATUS + i]) for i in range(len(Status))}
        counts["requests", "CANCELLED"] = int(numbers[at.E_CANCELLED])
        counts["keys", ""] = int(numbers[at.E_KEYS])
        counts["bytes_in", ""], counts["bytes_out", ""] = int(numbers[at.E_BYTES_IN]), int(numbers[at.E_BYTES_OUT])
        counts["moved_connections", ""] = self.moved()
        times = numbers[at.E_TIMES : at.E_TIMES + at.TIMES].tolist()
        return {key: n for key, n in counts.items() if n}, times, int(numbers[at.E_SUM_NS]) / 1e9


class _Engine:
    """One thread and its connections."""

    def __init__(self, engines: Engines, number: int, count: int) -> None:
        limits = engines.server.limits
        loop = compiled_loop("serve_frames")
        assert loop is not None
        self._engines, self._loop, self.moved = engines, loop, 0
        self._epoll, self._wake = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._staging = np.zeros(_STAGING_BYTES, np.uint8)
        self.engine = np.zeros(at.E_FIELDS, np.int64)
        self.conns = np.zeros((limits.connections, at.C_FIELDS), np.int64)
        self.conns[:, at.C_FD] = -1
        self._rings = np.zeros((at.CLASSES, limits.connections + 1), np.int64)
        self._asks = np.zeros((MOST_TABLES, _ASK_FIELDS), np.int64)
        self._buckets = np.array([int(end * 1e9) for end in BUCKETS], np.int64)
        tick = max(1_000_000, min(250_000_000, int(min(limits.frame_s, limits.send_s) * 1e9 / 4)))
        for place, value in (
            (at.E_NUMBER, number),
            (at.E_ENGINES, count),
            (at.E_MIGRATES, int(limits.migrate and count > 1)),
            (at.E_EPOLL, self._epoll.fileno()),
            (at.E_WAKE, self._wake),
            (at.E_STAGING, self._staging.ctypes.data),
            (at.E_CREDITS, limits.credits),
            (at.E_REQUEST_BYTES, limits.request_bytes),
            (at.E_FRAME_NS, int(limits.frame_s * 1e9)),
            (at.E_SEND_NS, int(limits.send_s * 1e9)),
            (at.E_SCAN_NS, tick),
        ):
            self.engine[place] = value
        self._streams: dict[int, SocketStream] = {}
        self._free = list(range(limits.connections))[::-1]
        self._mail: deque[tuple[int, npt.NDArray[np.uint8], SocketStream]] = deque()
        self._lock, self._ended = threading.Lock(), False
        self.load = 0
        self.thread = threading.Thread(target=self._run, name=f"thinrow-engine-{number}", daemon=True)

    def mail(self, command: int, data: npt.NDArray[np.uint8], stream: SocketStream) -> bool:
        """Have it take a connection. Returns whether it still does."""
        with self._lock:
            if self._ended:
                return False
            self._mail.append((command, data, stream))
            self.load += 1
            os.eventfd_write(self._wake, 1)
        return True

    def wake(self) -> None:
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("an engine failed")
        finally:
            with self._lock:
                self._ended = True
                mail = list(self._mail)
            for _, _, stream in mail:
                self._engines.server.forget(stream)
            for stream in self._streams.values():
                self._engines.server.forget(stream)
            self._epoll.close()
            os.close(self._wake)

    def _serve(self) -> None:
        """Until the server is closed."""
        todo: deque[tuple[int, int, npt.NDArray[np.uint8]]] = deque([(at.RUN, 0, _NOTHING)])
        tables, catalog = None, self._engines.server.tables.catalog()
        while True:
            if tables is not self._engines.server.tables or self._stale:
                self._stale, tables = False, self._engines.server.tables
                catalog = tables.catalog()
                chosen = np.zeros(catalog.n_exports, np.int64)
            command, slot, data = todo.popleft() if todo else (at.RUN, 0, _NOTHING)
            if todo:
                # So that it comes back for the next.
                os.eventfd_write(self._wake, 1)
            event = self._loop(
                command, slot, data, self.engine, self.conns, self._rings, self._engines.shared, self._engines.texts,
                catalog.tables, catalog.n_newest, catalog.parts, catalog.names, chosen, self._asks, catalog.span,
                self._buckets,
            )  # fmt: skip
            slot = int(self.engine[at.E_SLOT])
            if event == at.WOKEN:
                self._read_mail(todo)
                if self._engines.closed and not todo:
                    if not self._streams:
                        return
                    self._drop(next(iter(self._streams)), todo)
                    os.eventfd_write(self._wake, 1)
            elif event == at.LEFT:
                self._answer(slot, todo)
            elif event == at.ENDED:
                self._engines.server.stats.add("ended_connections")
                self._drop(slot, todo)
            elif event == at.BROKEN:
                self._break(slot, at.WHY[int(self.engine[at.E_WHY])], todo)
            elif event == at.MOVED:
                self._move(slot, int(self.engine[at.E_TARGET]), todo)

    _stale = False

    def renew(self) -> None:
        """Take up newer tables."""
        self._stale = True
        self.wake()

    def _read_mail(self, todo: deque[tuple[int, int, npt.NDArray[np.uint8]]]) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._mail:
            command, data, stream = self._mail.popleft()
            slot = self._free.pop()
            self._streams[slot] = stream
            todo.append((command, slot, data))

    def _drop(self, slot: int, todo: deque[tuple[int, int, npt.NDArray[np.uint8]]]) -> None:
        """A connection has ended; its slot is free when the loop has let go of it."""
        self._engines.server.forget(self._streams.pop(slot))
        todo.appendleft((at.DROP, slot, _NOTHING))
        self._free.insert(0, slot)
        self.load -= 1

    def _break(self, slot: int, why: str, todo: deque[tuple[int, int, npt.NDArray[np.uint8]]]) -> None:
        self._engines.server.stats.add("protocol_errors")
        log.warning("a connection was closed: %s", why)
        self._drop(slot, todo)

    def _move(self, slot: int, target: int, todo: deque[tuple[int, int, npt.NDArray[np.uint8]]]) -> None:
        """Give a connection to another engine."""
        row = np.zeros(8 * at.C_FIELDS, np.uint8)
        self.command(at.TAKE, slot, row)
        stream = self._streams.pop(slot)
        self._free.insert(0, slot)
        self.load -= 1
        self.moved += 1
        if not self._engines.all[target].mail(at.GIVE, row, stream):
            self.mail(at.GIVE, row, stream)

    def command(self, command: int, slot: int, data: npt.NDArray[np.uint8]) -> None:
        """One that the loop returns from at once."""
        none = np.zeros(0, np.int64)
        two, text = none.reshape(0, at.T_FIELDS), np.empty(0, np.uint8)
        self._loop(
            command, slot, data, self.engine, self.conns, self._rings, self._engines.shared, self._engines.texts,
            two, 0, two.reshape(0, at.P_FIELDS), text, none, self._asks, np.zeros(2, np.uint64), self._buckets,
        )  # fmt: skip

    def _answer(self, slot: int, todo: deque[tuple[int, int, npt.NDArray[np.uint8]]]) -> None:
        """What the loop left to Python: a request that is first in its connection's queue and has its turn."""
        node = int(self.engine[at.E_NODE])
        number, length, since = (_word(node + place) for place in (at.N_ID, at.N_LENGTH, at.N_SINCE))
        body = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(node + at.NODE_BYTES))
        try:
            parts = answered(self._engines.server, number & ((1 << 64) - 1), body, since)
        except ProtocolError as error:
            self._engines.turns.release()
            self._break(slot, str(error), todo)
            return
        todo.appendleft((at.REPLY, slot, np.frombuffer(b"".join(parts), np.uint8).copy()))


def answered(server: EmbeddingServer, number: int, body: npt.NDArray[np.uint8], since_ns: int) -> list[Any]:
    """The frame that answers a request, in plain Python. Raises ProtocolError where it is none."""
    try:
        request = parse_request(body)
        need = server.tables.work_bytes(request)
        if need > server.memory.whole:
            raise InputError(f"an answer of {need} bytes; this server has {server.memory.whole}: ask for less")
        if not server.memory.take(need):
            return refused(server, number, Status.OVERLOADED, "no memory for the answer")
        try:
            parts = frame(Kind.REPLY, number, encode_reply(server.tables.answer(request), request.dtype))
        finally:
            server.memory.give(need)
    except ThinrowError as error:
        if isinstance(error, ProtocolError):
            raise
        return refused(server, number, status_of(error), str(error))
    server.stats.add("requests", "OK")
    server.stats.add("keys", n=sum(len(ask.keys) for ask in request.asks))
    server.stats.took((time.monotonic_ns() - since_ns) / 1e9)
    return parts


def refused(server: EmbeddingServer, number: int, status: Status, why: str) -> list[Any]:
    """The frame that says so."""
    server.stats.add("requests", status.name)
    return frame(Kind.REPLY, number, [why.encode()[:1024]], status)


def _word(address: int) -> int:
    return int(ctypes.c_int64.from_address(address).value)


def _texts(request_bytes: int) -> tuple[npt.NDArray[np.int64], list[Any]]:
    """Address and bytes of what is said with each status, and what keeps it."""
    said = {status: text for status, text in _TEXTS.items()}
    said[Status.INVALID] = f"a request of too many bytes; at most {request_bytes}: ask for less"
    out, held = np.zeros((at.STATUSES, 2), np.int64), []
    for status, text in said.items():
        raw = np.frombuffer(bytearray(text.encode()), np.uint8)
        out[status] = raw.ctypes.data, len(raw)
        held.append(raw)
    return out, held
