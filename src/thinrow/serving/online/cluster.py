"""Embedding servers and a ranker on one machine, as processes that are started again when they end: ``thinrow serve
local``.

Worked example, two shards: ``embeddings-0`` and ``embeddings-1`` listen at sockets in a folder of their own, and when
both have mapped their tables ``ranker`` starts. ``embeddings-1`` is killed: answers are degraded, or its rows are read
from its replica, until it is started again, 0.1 s later; the next time after 0.2 s, and so on to 5. SIGTERM ends the
ranker first, when it has answered what is inside, then the servers.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from thinrow.core.errors import StoreError
from thinrow.serving.online.process import say

_LOOK_S, _FIRST_S, _MOST_S, _CALM_S = 0.05, 0.1, 5.0, 30.0
_END_S = 60.0
_DEATH_SIGNAL = 1


@dataclass(slots=True)
class Supervised:
    """A process that is started again when it ends.

    Attributes:
        name: of it, before each line that it prints.
        arguments: of ``thinrow``.
        ready: of a line that it prints when it serves.
        serving: set when it printed that.
        restarts: how often it was started again.
    """

    name: str
    arguments: Sequence[str]
    ready: str
    process: subprocess.Popen[str] | None = None
    serving: threading.Event = field(default_factory=threading.Event)
    restarts: int = 0
    _began: float = 0.0
    _delay_s: float = _FIRST_S
    _again_at: float | None = None

    def start(self) -> None:
        """Start it. From the main thread, since the kernel ends the child when the thread that made it does."""
        self.serving.clear()
        self._began, self._again_at = time.monotonic(), None
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from thinrow.cli.main import main; main()", *self.arguments],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_die_with_parent,
        )
        threading.Thread(target=self._repeat, args=(self.process.stdout,), daemon=True).start()

    def watch(self) -> None:
        """Start it again where it has ended and it is time."""
        assert self.process is not None
        status = self.process.poll()
        if status is None:
            return
        now = time.monotonic()
        if self._again_at is None:
            if now - self._began > _CALM_S:
                self._delay_s = _FIRST_S
            self._again_at = now + self._delay_s
            say("ended_unasked", name=self.name, status=status, again_in_s=self._delay_s)
            self._delay_s = min(2 * self._delay_s, _MOST_S)
        elif now >= self._again_at:
            self.restarts += 1
            self.start()

    def end(self, timeout_s: float = _END_S) -> None:
        """SIGTERM, and SIGKILL where it does not end in time."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            say("killed", name=self.name, after_s=timeout_s)
            self.process.kill()
            self.process.wait()

    def _repeat(self, lines: IO[str]) -> None:
        for line in lines:
            print(f"[{self.name}] {line}", end="", flush=True)
            if self.ready in line:
                self.serving.set()


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Attributes:
    model: a folder of releases.
    servers: shards of the tables.
    replicas: processes of each shard.
    sockets: a folder for the servers' sockets.
    embeddings, ranker: further arguments of ``thinrow serve embeddings`` and ``thinrow serve ranker``.
    start_s: the servers must have mapped their tables by then.
    """

    model: Path
    servers: int = 4
    replicas: int = 1
    sockets: Path = Path()
    embeddings: Sequence[str] = ()
    ranker: Sequence[str] = ()
    start_s: float = 300.0


class Cluster:
    """Attributes:
    servers: of the embeddings.
    ranker: the ranker.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self.servers = []
        asked: list[str] = []
        for shard in range(options.servers):
            addresses = []
            for replica in range(options.replicas):
                name = f"embeddings-{shard}" + (f".{replica}" if options.replicas > 1 else "")
                address = f"unix:{options.sockets / name}"
                what = ["serve", "embeddings", "--export", str(options.model), "--shard", f"{shard}/{options.servers}"]
                self.servers.append(
                    Supervised(name, [*what, "--listen", address, *options.embeddings], "serving embeddings")
                )
                addresses.append(address)
            asked += ["--servers", ",".join(addresses)]
        what = ["serve", "ranker", "--model", str(options.model), *asked, *options.ranker]
        self.ranker = Supervised("ranker", what, "serving rankings")
        self._asked = 0

    def run(self) -> None:
        """Until SIGTERM or SIGINT.

        Raises:
            StoreError: the servers did not start.
        """
        before = {n: signal.signal(n, self._ask) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            for server in self.servers:
                server.start()
            self._until(lambda: all(server.serving.is_set() for server in self.servers))
            if not self._asked:
                self.ranker.start()
            while not self._asked:
                for one in (*self.servers, self.ranker):
                    one.watch()
                time.sleep(_LOOK_S)
        finally:
            self.ranker.end()
            for server in self.servers:
                if server.process is not None and server.process.poll() is None:
                    server.process.terminate()
            for server in self.servers:
                server.end()
            for number, handler in before.items():
                signal.signal(number, handler)
        say("cluster_ended", restarts={one.name: one.restarts for one in (*self.servers, self.ranker)})

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1

    def _until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + self._options.start_s
        while not holds() and not self._asked:
            for server in self.servers:
                if server.process is not None and server.process.poll():
                    raise StoreError(f"{server.name} ended with status {server.process.poll()}; what it said is above")
            if time.monotonic() > end:
                raise StoreError(f"the embedding servers did not start within {self._options.start_s} s")
            time.sleep(_LOOK_S)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)


__all__ = ["Cluster", "ClusterOptions", "Supervised"]
