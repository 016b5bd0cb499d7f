"""Streams: both ends of a connection, over TCP, unix sockets or memory, none of which ever blocks but in ``wait``.

Worked example::

    listener = listen("tcp:127.0.0.1:0")       # listener.address says which port
    stream = connect(listener.address)
    stream.send([b"ab", b"c"])                 # 3, or fewer where the other end reads slowly; 0 where it does not read
    stream.recv_into(memoryview(room))         # None where nothing is there yet; 0 when the other end has closed
    wait([stream], [], timeout=0.1)            # ({stream}, set()) when there is something

Addresses are ``tcp:HOST:PORT``, ``unix:PATH`` and ``memory:NAME``, within the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from thinrow.core.errors import InputError

#: Buffers that one system call takes.
_MOST_PARTS = 64
_BACKLOG = 512
#: Of a socket each way; the system may grant less.
_BUFFER_BYTES = 1 << 20
#: Seconds without a byte before a peer is asked whether it lives, and between such questions; how many it may miss.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
#: Bytes that wait in a stream of memory at most.
MEMORY_BYTES = 1 << 18


class Stream(Protocol):
    """One end of a connection; one thread at a time may read, and one may write."""

    def recv_into(self, room: memoryview) -> int | None:
        """Bytes that were written to ``room``: None where there are none yet, 0 at the end. Raises OSError."""

    def send(self, parts: Sequence[Any]) -> int:
        """Bytes of ``parts`` that were taken, from the first on; 0 where there is no room. Raises OSError."""

    def close(self) -> None:
        """End it for both sides; whoever waits for it is woken."""


class Listener(Protocol):
    """Takes connections."""

    address: str

    def accept(self) -> Stream:
        """The next one. Raises OSError when the listener is closed."""

    def close(self) -> None:
        """Take no more."""


class SocketStream:
    """A connected socket, or one that is being connected."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        # An answer that fits is one call on either side, not one for each piece that the other has made room for.
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self._process = sock, os.getpid()

    def recv_into(self, room: memoryview) -> int | None:
        try:
            return self.sock.recv_into(room)
        except (BlockingIOError, InterruptedError):
            return None

    def send(self, parts: Sequence[Any]) -> int:
        try:
            return self.sock.sendmsg(parts[:_MOST_PARTS])
        except (BlockingIOError, InterruptedError):
            return 0

    def shutdown(self) -> None:
        """End it for both sides and wake whoever waits for it; its descriptor stays."""
        # A child lets its own descriptor go alone.
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # Another thread may be in ``wait``: only a shutdown wakes it.
        self.shutdown()
        self.sock.close()


class _SocketListener:
    def __init__(self, sock: socket.socket, address: str) -> None:
        self._sock, self.address, self._process = sock, address, os.getpid()
        self._file = _identity(address.removeprefix("unix:")) if address.startswith("unix:") else None
        self._closed = False

    def accept(self) -> Stream:
        sock = self._sock.accept()[0]
        if sock.family != socket.AF_UNIX:
            # A peer whose machine is gone does not hold its connection for ever.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        return SocketStream(sock)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._process:
            # Another server may listen at this path by now: its file stays. Ours goes before anybody is refused at it.
            path = self.address.removeprefix("unix:")
            with contextlib.suppress(OSError):
                if self._file is not None and _identity(path) == self._file:
                    os.unlink(path)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


#: Of all streams in memory: something happened to one.
_changed = threading.Condition()
_listeners: dict[str, _MemoryListener] = {}


class _Pipe:
    """One direction of a stream in memory."""

    def __init__(self) -> None:
        self.held, self.closed = bytearray(), False


class MemoryStream:
    """One end of a connection within the process."""

    def __init__(self, inward: _Pipe, outward: _Pipe) -> None:
        self._in, self._out = inward, outward

    @classmethod
    def pair(cls) -> tuple[MemoryStream, MemoryStream]:
        """Two connected ends."""
        a, b = _Pipe(), _Pipe()
        return cls(a, b), cls(b, a)

    def recv_into(self, room: memoryview) -> int | None:
        with _changed:
            n = min(len(room), len(self._in.held))
            if n == 0:
                return 0 if self._in.closed else None
            room[:n] = self._in.held[:n]
            del self._in.held[:n]
            _changed.notify_all()
            return n

    def send(self, parts: Sequence[Any]) -> int:
        with _changed:
            if self._out.closed:
                raise BrokenPipeError(errno.EPIPE, "the other end is closed")
            before = len(self._out.held)
            for part in parts:
                self._out.held += memoryview(part)[: MEMORY_BYTES - len(self._out.held)]
            _changed.notify_all()
            return len(self._out.held) - before

    def close(self) -> None:
        with _changed:
            self._in.closed = self._out.closed = True
            _changed.notify_all()

    def readable(self) -> bool:
        return bool(self._in.held) or self._in.closed

    def writable(self) -> bool:
        return len(self._out.held) < MEMORY_BYTES or self._out.closed


class _MemoryListener:
    def __init__(self, address: str) -> None:
        self.address, self._waiting, self._closed = address, deque[MemoryStream](), False

    def accept(self) -> Stream:
        with _changed:
            _changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                raise OSError(errno.EBADF, "the listener is closed")
            return self._waiting.popleft()

    def connect(self) -> MemoryStream:
        ours, theirs = MemoryStream.pair()
        with _changed:
            self._waiting.append(theirs)
            _changed.notify_all()
        return ours

    def close(self) -> None:
        with _changed:
            _listeners.pop(self.address, None)
            self._closed = True
            for stream in self._waiting:
                stream._in.closed = stream._out.closed = True
            _changed.notify_all()


def listen(address: str) -> Listener:
    """Listen at an address; port 0 takes any free one. A socket file that nobody listens at is replaced.

    Raises:
        InputError: it is no address.
        OSError: it is taken, or not ours.
    """
    kind, where = _parse(address)
    if kind == "memory":
        if address in _listeners:
            raise OSError(errno.EADDRINUSE, f"{address} is taken")
        _listeners[address] = _MemoryListener(address)
        return _listeners[address]
    if kind == "unix":
        _remove_dead(where)
        sock = socket.socket(socket.AF_UNIX)
    else:
        sock = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    bound = address if kind == "unix" else f"tcp:{address.split(':', 1)[1].rsplit(':', 1)[0]}:{sock.getsockname()[1]}"
    return _SocketListener(sock, bound)


def connect(address: str) -> Stream:
    """The near end of a new connection, which may still be under way: ``send`` then takes nothing yet.

    Raises:
        InputError: it is no address.
        OSError: nobody listens there.
    """
    kind, where = _parse(address)
    if kind == "memory":
        if address not in _listeners:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {address}")
        return _listeners[address].connect()
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
    else:
        host, port = where
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family)
    sock.setblocking(False)
    failed = sock.connect_ex(where)
    if failed not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(failed, f"{os.strerror(failed)}: {address}")
    return SocketStream(sock)


def wait(readers: Collection[Any], writers: Collection[Any], timeout: float | None) -> tuple[set[Any], set[Any]]:
    """Which of ``readers`` have bytes, or an end, and which of ``writers`` have room, or are broken, once any is; none
    after ``timeout`` seconds. All streams are of one kind."""
    some = next(iter(readers), None) or next(iter(writers), None)
    if isinstance(some, MemoryStream):
        return _wait_in_memory(readers, writers, timeout)
    poll, streams = select.poll(), {}
    for stream in {*readers, *writers}:
        number = stream.sock.fileno()
        if number < 0:
            return {s for s in readers if s is stream}, {s for s in writers if s is stream}
        streams[number] = stream
        poll.register(number, select.POLLIN * (stream in readers) | select.POLLOUT * (stream in writers))
    events = [(streams[n], event) for n, event in poll.poll(None if timeout is None else max(0.0, timeout * 1e3))]
    ended = ~(select.POLLIN | select.POLLOUT)
    return (
        {s for s, event in events if s in readers and event & (select.POLLIN | ended)},
        {s for s, event in events if s in writers and event & (select.POLLOUT | ended)},
    )


def _wait_in_memory(
    readers: Collection[Any], writers: Collection[Any], timeout: float | None
) -> tuple[set[Any], set[Any]]:
    until = None if timeout is None else time.monotonic() + timeout
    with _changed:
        while True:
            ready = {s for s in readers if s.readable()}, {s for s in writers if s.writable()}
            left = None if until is None else until - time.monotonic()
            if any(ready) or (left is not None and left <= 0):
                return ready
            _changed.wait(left)


def check_address(address: str) -> str:
    """``address``. Raises InputError where it is none."""
    _parse(address)
    return address


def _parse(address: str) -> tuple[str, Any]:
    kind, _, rest = address.partition(":")
    if kind in ("unix", "memory") and rest:
        return kind, rest
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdecimal() and int(port) < 1 << 16:
        return kind, (host.strip("[]"), int(port))
    raise InputError(f"address {address!r}; it must be tcp:HOST:PORT or unix:PATH")


def _remove_dead(path: str) -> None:
    """Remove a socket file whose process is gone."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)
