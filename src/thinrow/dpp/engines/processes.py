"""Processes that produce items ahead of one reader, handed over in shared memory, delivered in order.

One thread of the reader talks to the workers over a socket each, in small messages. Worked trace of an item::

    reader  LEASE 7                 worker   makes item 7 in memory of its own
    worker  SIZE 7, 40 MB           reader   grants a segment (see arena), or, where all is taken, waits with it
    reader  GRANT 7, segment 3      worker   writes the item: the one time that its bytes are put anywhere
    worker  DONE 7                  reader   keeps the segment's number; delivers views of it when 7's turn comes

A worker holds nothing that matters. When its socket closes, whatever ended it, its item is leased to another one; so is
that of a worker which has had an item for longer than its lease: it is killed first, and a segment that it might still
write is used again only when it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np

from thinrow.core.errors import InputError
from thinrow.dpp.engines.arena import Arena, Segment
from thinrow.dpp.engines.clocks import Times, of_process
from thinrow.dpp.engines.failures import check_settings, decode_error
from thinrow.dpp.engines.leased import LeasedEngine
from thinrow.dpp.engines.packing import Packed, pack_job, unpack
from thinrow.dpp.engines.spawn import fork_worker
from thinrow.dpp.engines.template import DONE, FAILED, GRANT, HELLO, LEASE, MAX_MESSAGE, MESSAGE, READY, RETIRE, SIZE

T = TypeVar("T")
#: Until a killed process is gone.
_GONE_S = 30.0


@dataclass(frozen=True, slots=True)
class Processes:
    """Worker processes of this machine (Linux).

    Attributes:
        buffer_bytes: shared memory of batches that wait for the reader or are being written, see ``arena``; the batches
            that the reader keeps may take as much again.
        lease_s: seconds that a worker may have an item before it is killed and the item made by another one.
    """

    in_process: ClassVar[bool] = False
    buffer_bytes: int = 512 << 20
    lease_s: float = 300.0

    def __post_init__(self) -> None:
        check_settings(buffer_bytes=self.buffer_bytes, lease_s=self.lease_s)

    def start(
        self, produce: Callable[[int], T], *, first: int, stop: int | None, workers: int, window: int
    ) -> ProcessEngine[T]:
        """See ``EngineChoice.start``."""
        if sys.platform != "linux":
            raise InputError("worker processes need Linux; pass engine='threads'")
        return ProcessEngine(produce, self, first=first, stop=stop, workers=workers, window=window)


class _Wake:
    """An event descriptor that anybody may signal at any time: closed when nobody is left who could."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # ``os.eventfd_write`` lets go of the interpreter's lock: the thread that it wakes takes it, and the reader
        # waits for it, a millisecond and more a batch.
        self._write = ctypes.PyDLL(None).eventfd_write
        self._write.argtypes = (ctypes.c_int, ctypes.c_uint64)
        self._said = False

    def __call__(self) -> None:
        # Waking a thread takes 30 us: once until it has looked, however much there is to see.
        if not self._said:
            self._said = True
            self._write(self.fd, 1)

    def heard(self) -> None:
        """Called before looking at what has changed."""
        os.eventfd_read(self.fd)
        self._said = False

    def __del__(self) -> None:
        os.close(self.fd)


class _Worker:
    """A worker as the reader knows it.

    Attributes:
        pid, process: its id and process descriptor, once it has said hello; -1 before.
        since: when its lease, or its start, began.
        wants: item and bytes that it needs a segment for; None else.
        segment: what it was granted.
    """

    def __init__(self, job: int) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fork_worker(theirs, job)
        self.pid = self.process = -1
        self.ready = False
        self.since = time.monotonic()
        self.wants: tuple[int, int] | None = None
        self.segment: Segment | None = None

    def say(self, kind: int, a: int, b: int = 0, c: int = 0, fd: int = -1) -> None:
        """A message to it. One that ended, or takes none, is met where its socket closes."""
        with suppress(OSError):
            message = [MESSAGE.pack(kind, a, b, c)]
            if fd < 0:
                self.socket.sendmsg(message, (), socket.MSG_DONTWAIT)
            else:
                socket.send_fds(self.socket, message, [fd], socket.MSG_DONTWAIT)

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        # The segment names its owner: as a cycle, its memory would stay until the next collection of garbage.
        self.segment = None
        self.socket.close()
        if self.process < 0:
            return  # it meets the closed socket when it says hello
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)
        gone = select.poll()
        gone.register(self.process, select.POLLIN)
        gone.poll(_GONE_S * 1000)
        os.close(self.process)
        self.process = -1


class ProcessEngine(LeasedEngine[_Worker, tuple[Segment, int]], Generic[T]):
    """An ``Engine`` of worker processes; see ``Processes`` and ``EngineChoice.start``."""

    def __init__(
        self,
        produce: Callable[[int], T],
        settings: Processes,
        *,
        first: int,
        stop: int | None,
        workers: int,
        window: int,
    ) -> None:
        super().__init__(
            "thinrow-dpp-processes",
            first=first,
            stop=stop,
            workers=workers,
            window=window,
            lease_s=settings.lease_s,
        )
        self._job = _shared(produce)
        self._event = _Wake()
        #: The head's bytes, where they were lent before it was taken, and what they are.
        self._ahead: tuple[memoryview, T | None] | None = None
        self._arena = Arena(settings.buffer_bytes, self._retired, self._event)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._event.fd, selectors.EVENT_READ)
        self._thread.start()

    def _wake(self) -> None:
        self._event()

    @property
    def copied_bytes(self) -> int:
        """Bytes of items that were copied because the reader keeps too many, see ``arena``."""
        return self._arena.copied

    @property
    def peak_bytes(self) -> int:
        """The most shared memory that there was at a time."""
        return self._arena.peak

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are open."""
        with self._changed:
            return [w.pid for w in self._workers if w.ready]

    def next(self) -> T:
        """See ``Engine.next``. Arrays of the item are views of shared memory, writable, and live as long as they are
        kept."""
        with self._changed:
            segment, n = self._take()
            data, ahead = self._ahead or (self._arena.lend(segment, n), None)
            self._ahead = None
            del segment
        self._wake()
        item: T = unpack(data) if ahead is None else ahead
        return item

    def _unpack(self) -> None:
        """Unpack what the reader takes next, while it is at what it has."""
        head = self._done.get(self._leases.head)
        if self._ahead is None and head is not None and self._arena.lends:
            data = self._arena.lend(*head)
            self._ahead = data, None
            # What cannot be unpacked is raised where it is taken.
            with suppress(Exception):
                self._ahead = data, unpack(data)

    def _manage(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._closed:
                        break
                    self._serve()
                    self._unpack()
                    timeout = self._expire(self._at_work())
                for key, _ in self._selector.select(timeout):
                    with self._changed:
                        if key.data is None:
                            self._event.heard()
                        elif not self._closed:
                            self._hear(key.data)
        except BaseException as e:
            with self._changed:
                self._broken = e
                self._changed.notify_all()
        finally:
            with self._changed:
                for worker in self._workers:
                    worker.end()
                self._workers.clear()
                self._done.clear()
                self._ahead = None
                self._arena.close()
                self._selector.close()
                os.close(self._job)

    def _serve(self) -> None:
        """Start workers that are missing, grant what is waited for, lease to who is idle."""
        self._arena.collect()
        self._shrink()
        while len(self._workers) < self._n_workers and self._broken is None:
            worker = _Worker(self._job)
            self._workers.append(worker)
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        for worker in sorted((w for w in self._workers if w.wants), key=lambda w: w.wants or ()):
            self._grant(worker)
        for worker in self._workers:
            if worker.ready:
                item = self._leases.take(worker)
                if item is not None:
                    worker.since = time.monotonic()
                    worker.say(LEASE, item)

    def _grant(self, worker: _Worker) -> None:
        assert worker.wants is not None
        item, n = worker.wants
        segment = self._arena.grant(worker, n, item == self._leases.head)
        if segment is None:
            return
        worker.wants, worker.segment = None, segment
        worker.since = time.monotonic()
        worker.say(GRANT, item, segment.number, segment.size, segment.fd)
        if segment.fd >= 0:
            segment.sent()

    def _hear(self, worker: _Worker) -> None:
        """One message of a worker."""
        try:
            data, fds, _, _ = socket.recv_fds(worker.socket, MAX_MESSAGE, 1)
        except OSError:
            data, fds = b"", []
        if not data:
            self._lost(worker, "it was killed, or crashed")
            return
        kind, item, n, _ = MESSAGE.unpack_from(data)
        if kind == HELLO:
            worker.pid, worker.process = item, fds[0]
        elif kind == READY:
            worker.ready, self._failed_starts = True, 0
        elif kind == SIZE:
            worker.wants = item, n
        elif kind == DONE:
            assert worker.segment is not None
            segment, worker.segment = worker.segment, None
            if self._leases.settle(item, worker):
                self._done[item] = segment, n
            else:
                self._arena.back(segment)
        elif kind == FAILED:
            error = decode_error(data[MESSAGE.size :])
            if item < 0:
                self._broken = error
            elif self._leases.settle(item, worker):
                self._fail(item, error)
        self._changed.notify_all()

    def _blocked(self, worker: _Worker) -> bool:
        return worker.wants is not None

    def _times(self, worker: _Worker) -> Times | None:
        return of_process(worker.pid)

    def _drop(self, worker: _Worker) -> None:
        self._selector.unregister(worker.socket)
        self._workers.remove(worker)
        segment = worker.segment
        worker.end()
        if segment is not None:
            self._arena.back(segment)
        self._arena.ended(worker)

    def _at_work(self) -> list[_Worker]:
        return [w for w in self._workers if not w.ready or (self._leases.held(w) is not None and not w.wants)]

    def _retired(self, segment: Segment) -> None:
        owner = segment.owner
        if isinstance(owner, _Worker) and owner.process >= 0:
            owner.say(RETIRE, segment.number)


def _shared(produce: Callable[[int], object]) -> int:
    """A descriptor of memory that holds what workers run, and where; they share its arrays."""
    job = Packed((dict(os.environ), os.getcwd(), sys.path, pack_job(produce).data()))
    fd = os.memfd_create("thinrow-job")
    os.ftruncate(fd, job.size)
    with mmap.mmap(fd, job.size) as pages:
        job.write(np.frombuffer(pages, np.uint8))
    return fd
