"""Run ``thinrow`` commands in processes that are forked from one that has imported everything.

A command alone takes a second or two to import what it may need; tests run hundreds of them. Each still is a process of
its own, with its arguments, folder, environment, standard streams and exit status, which ends as any interpreter does.
The one that forks runs no thread, opens no store and ends with the process that started it.

Worked example: ``Commands.shared().run("read", "7", "--store", "S")`` is the completed process; a shell with
``Commands.shared().folder`` first in its PATH finds the same under the name ``thinrow``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from thinrow.cli.main import main

#: Imported by commands when they need them, besides thinrow's own modules.
_LIBRARIES = ("pandas", "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet", "pyiceberg.table")
_LENGTH = struct.Struct("<I")
_STATUS = struct.Struct("<i")

# Starts in a fiftieth of a second: without site-packages, and with nothing imported that it can do without.
_CLIENT = """#!{python} -SE
import json, os, signal, socket, struct, sys
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(link, [struct.pack("<I", len(request))], [0, 1, 2])
link.sendall(request)
child = struct.unpack("<i", link.recv(4))[0]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, _: os.kill(child, n))
answer = link.recv(4)
status = struct.unpack("<i", answer)[0] if answer else 1
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class Commands:
    """The process that forks, and a script ``thinrow`` that asks it to.

    Attributes:
        folder: of the script, for a shell's PATH.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="thinrow-commands-"))
        address = str(self.folder / "socket")
        script = self.folder / "thinrow"
        script.write_text(_CLIENT.format(python=sys.executable, address=address))
        script.chmod(0o755)
        until, self._alive = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            code = f"from thinrow.testing.forked import serve; serve({listener.fileno()}, {until})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[listener.fileno(), until],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
            )
        os.close(until)

    @staticmethod
    @functools.cache
    def shared() -> Commands:
        """The one of this process, which ends with it."""
        made = Commands()
        atexit.register(made.close)
        return made

    def run(
        self, *words: object, stdin: str | None = None, cwd: Path | None = None, timeout_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """``thinrow`` with these words, when it has ended."""
        command = [str(self.folder / "thinrow"), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, input=stdin, cwd=cwd, timeout=timeout_s)

    def close(self) -> None:
        """End the process that forks; commands that run go on."""
        os.close(self._alive)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def serve(listening: int, until: int) -> None:
    """Fork a process for each command that the socket ``listening`` is asked for, while the pipe ``until`` is open."""
    _import_all()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel takes in those that ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=listening) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(until, selectors.EVENT_READ)
        while until not in {key.fd for key, _ in selector.select()}:
            link, _ = listener.accept()
            if os.fork() == 0:
                selector.close()
                listener.close()
                os.close(until)
                _watch(link)
            link.close()


def _import_all() -> None:
    import thinrow

    for module in pkgutil.walk_packages(thinrow.__path__, "thinrow."):
        # Without an extra, or a compiler for a device, a module cannot be imported; then no command needs it.
        if not module.name.startswith("thinrow.testing"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _watch(link: socket.socket) -> NoReturn:
    """In a process of its own: forks the command, and says how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(link, _LENGTH.size, 3)
    request = link.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL)
    child = os.fork()
    if child == 0:
        link.close()
        words, folder, environment = json.loads(request)
        _run(words, folder, environment, streams)
    for stream in streams:
        os.close(stream)
    link.sendall(_STATUS.pack(child))
    link.sendall(_STATUS.pack(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    os._exit(0)


def _run(words: list[str], folder: str, environment: Mapping[str, str], streams: list[int]) -> NoReturn:
    """The command, and what the interpreter does at its end, but for taking apart what its parent has imported."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status: object = 0
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["thinrow", *words]
        main()
    except SystemExit as e:
        status = e.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
