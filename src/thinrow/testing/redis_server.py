"""A real Redis server for tests and examples, on a free port, with its files in a folder of its own.

>>> with RedisServer() as server:                                 # doctest: +SKIP
...     tier = RedisRecent(server.url("shop"), schema, claim)
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from thinrow.core.errors import StoreError
from thinrow.history.recent.redis_link import RedisLink, RedisLocation

MISSING = "redis-server is not installed; on Debian and Ubuntu: apt-get install redis-server"
_START_S = 30.0


def redis_is_installed() -> bool:
    """Whether there is a server to start."""
    return shutil.which("redis-server") is not None


class RedisServer:
    """Attributes:
    port: of the server, the same after a restart.
    folder: of its files.
    """

    def __init__(self, *settings: str, appendfsync: str = "everysec") -> None:
        """Start it with its log of writes on; ``settings`` as on its command line, ``"--maxmemory", "10mb"``.

        Raises:
            StoreError: it is not installed, or does not start.
        """
        if not redis_is_installed():
            raise StoreError(MISSING)
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.port = _free_port()
        usual = {"appendonly": "yes", "appendfsync": appendfsync, "save": "", "repl-diskless-sync-delay": "0"}
        self._settings = [*(word for k, v in usual.items() for word in (f"--{k}", v)), *settings]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, or start it again on the files that it left."""
        for _ in range(3):
            options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), *self._settings]
            with open(self.folder / "log", "ab") as log:
                self._process = subprocess.Popen(["redis-server", *options], stdout=log, stderr=log)
            if self._answers():
                return
            # Another process may have taken the port.
            self.kill()
            self.port = _free_port()
        raise StoreError(f"redis-server does not start: {(self.folder / 'log').read_text()[-500:]}")

    def _answers(self) -> bool:
        link = RedisLink(RedisLocation("127.0.0.1", self.port, timeout_s=2))
        until = time.monotonic() + _START_S
        try:
            while time.monotonic() < until and self._process is not None and self._process.poll() is None:
                replies, _ = link.pipeline([b"*1\r\n$4\r\nPING\r\n"])
                if replies == [b"PONG"]:
                    return True
                time.sleep(0.01)
        finally:
            link.close()
        return False

    def url(self, name: str, **options: object) -> str:
        """Location of a store's tier."""
        more = "".join(f"&{k}={v}" for k, v in options.items())
        return f"redis://127.0.0.1:{self.port}/0?name={name}{more}"

    def ask(self, *words: str) -> Any:
        """Reply to one command. Raises StoreError where it refuses."""
        link = RedisLink(RedisLocation("127.0.0.1", self.port))
        try:
            return link.ask(*(w.encode() for w in words))
        finally:
            link.close()

    def kill(self) -> None:
        """SIGKILL; its files stay."""
        self._end(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send it a signal: SIGSTOP makes it a server that does not answer, SIGCONT wakes it."""
        assert self._process is not None
        self._process.send_signal(number)

    def lose_files(self) -> None:
        """Remove all that it keeps on disk; it must not run."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "log":
                path.unlink()

    def close(self) -> None:
        """Stop it and remove its files."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port
