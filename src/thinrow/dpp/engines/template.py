"""The processes that work: a template that has imported everything, and workers that are forked from it.

The template is spawned, by itself, from the reader's interpreter: nothing of the reader's memory, threads, locks or
device is in it, and the reader's script does not run again. It never runs a thread and opens no store, so that forking
it is safe, and a worker is there in milliseconds, also one that takes the place of another. Workers open what they read
themselves. All of them end when the reader does, however it ends: their sockets close, and its process file descriptor
says so, too.
"""

from __future__ import annotations

import mmap
import os
import queue
import select
import signal
import socket
import struct
import sys
import threading
from typing import Any

#: kind and three numbers; an error goes behind them.
MESSAGE = struct.Struct("<Bqqq")
#: From the worker: its process (with its descriptor); open; an item needs bytes; it is written; it failed.
HELLO, READY, SIZE, DONE, FAILED = range(1, 6)
#: To the worker: make an item; write it into a segment (with its descriptor where it is new); drop a segment.
LEASE, GRANT, RETIRE = range(11, 14)
#: Longest message.
MAX_MESSAGE = 1 << 17
#: Workers have a lower priority than the reader: while one of its threads waits for a core with the interpreter's lock
#: in hand, the trainer waits. What is there to make is made all the same, whenever the reader has nothing to do.
_NICE = 5


def main(fd: int) -> None:
    """The template: forks a worker for each request on the socket ``fd`` (its own socket, its job, the reader)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel takes in workers that ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _import_all()
    with socket.socket(fileno=fd) as requests:
        while True:
            data, fds, _, _ = socket.recv_fds(requests, 1, 3)
            if not data:
                return
            if os.fork() == 0:
                requests.close()
                try:
                    _Worker(*fds).run()
                except ConnectionError:
                    pass  # the reader closed the socket: nobody waits for what it has to say
                finally:
                    os._exit(1)
            for one in fds:
                os.close(one)


def _import_all() -> None:
    import gc

    import pyarrow as pa

    import thinrow.dpp.worker  # noqa: F401
    from thinrow.kernels import kernel

    kernel("crc32c")
    # One thread a worker: there are as many workers as were asked for.
    pa.set_cpu_count(1)
    gc.collect()
    gc.freeze()


class _Worker:
    def __init__(self, control: int, job: int, reader: int) -> None:
        self._control = socket.socket(fileno=control)
        self._job, self._reader = job, reader
        self._inbox: queue.SimpleQueue[tuple[int, int, int, int, list[int]]] = queue.SimpleQueue()
        self._segments: dict[int, mmap.mmap] = {}

    def run(self) -> None:
        os.nice(_NICE)
        own = os.pidfd_open(os.getpid())
        socket.send_fds(self._control, [MESSAGE.pack(HELLO, os.getpid(), 0, 0)], [own])
        os.close(own)
        threading.Thread(target=self._listen, daemon=True).start()
        from thinrow.dpp.engines.packing import unpack

        try:
            # A private map: what is opened may write to its arrays, other workers do not see it.
            job = mmap.mmap(self._job, 0, flags=mmap.MAP_PRIVATE)
            environment, folder, path, inner = unpack(memoryview(job))
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            sys.path[:] = path
            produce = unpack(inner.data)
        except BaseException as e:
            self._fail(-1, e)
            return
        self._say(READY)
        while True:
            kind, item, _, _, _ = self._inbox.get()
            if kind == LEASE:
                self._make(produce, item)
            else:
                self._segments.pop(item, None)

    def _make(self, produce: Any, item: int) -> None:
        from thinrow.dpp.engines.packing import Packed

        try:
            packed = Packed(produce(item))
        except BaseException as e:
            self._fail(item, e)
            return
        self._say(SIZE, item, packed.size)
        packed.write(self._granted(item))
        self._say(DONE, item, packed.size)

    def _granted(self, item: int) -> Any:
        import numpy as np

        while True:
            kind, a, number, size, fds = self._inbox.get()
            if kind == RETIRE:
                self._segments.pop(a, None)
            elif kind == GRANT and a == item:
                if fds:
                    self._segments[number] = mmap.mmap(fds[0], size)
                    os.close(fds[0])
                return np.frombuffer(self._segments[number], np.uint8)

    def _fail(self, item: int, error: BaseException) -> None:
        from thinrow.dpp.engines.failures import encode_error

        self._control.send(MESSAGE.pack(FAILED, item, 0, 0) + encode_error(error))

    def _say(self, kind: int, a: int = 0, b: int = 0) -> None:
        self._control.send(MESSAGE.pack(kind, a, b, 0))

    def _listen(self) -> None:
        """Messages into the inbox; ends the process with the reader."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._reader, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._reader in ready:
                os._exit(0)
            try:
                data, fds, _, _ = socket.recv_fds(self._control, MESSAGE.size, 1)
            except OSError:
                # The reader was killed with messages that it had not read.
                os._exit(0)
            if not data:
                os._exit(0)
            kind, a, b, c = MESSAGE.unpack(data)
            self._inbox.put((kind, a, b, c, fds))
