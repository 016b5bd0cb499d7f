"""The reader's side of the template: spawned once, asked for workers by every engine of this process."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

_CODE = "import sys; sys.path[:] = {path!r}; from thinrow.dpp.engines.template import main; main({fd})"
_lock = threading.Lock()
_held: list[Template] = []


class Template:
    """See ``thinrow.dpp.engines.template``."""

    def __init__(self) -> None:
        self._reader = os.getpid()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = _CODE.format(path=sys.path, fd=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )

    def fork(self, control: socket.socket, job: int) -> None:
        """A worker that talks over ``control`` and runs ``job``. Raises OSError where the template has ended."""
        reader = os.pidfd_open(os.getpid())
        try:
            socket.send_fds(self._requests, [b"w"], [control.fileno(), job, reader])
        finally:
            os.close(reader)

    def close(self) -> None:
        """End it; its workers go on."""
        self._requests.close()
        if self._reader == os.getpid():
            self._process.wait()

    @property
    def alive(self) -> bool:
        """Whether it takes requests of this process."""
        return self._reader == os.getpid() and self._process.poll() is None


def fork_worker(control: socket.socket, job: int) -> None:
    """A new worker, from the template of this process, which is spawned where there is none."""
    with _lock:
        if _held and not _held[0].alive:
            _held.pop().close()
        if not _held:
            _held.append(Template())
        try:
            _held[0].fork(control, job)
        except OSError:
            # It has ended, though the kernel may not say so yet.
            _held.pop().close()
            _held.append(Template())
            # One that ends right now closes the worker's socket: to the engine, a worker that ended.
            with suppress(OSError):
                _held[0].fork(control, job)


@atexit.register
def _end() -> None:
    while _held:
        _held.pop().close()
