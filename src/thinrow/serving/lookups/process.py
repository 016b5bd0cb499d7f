"""An embedding server as a process: ``thinrow serve embeddings``.

Worked example of its end: SIGTERM, and ``/readyz`` answers 503 while requests are still taken for ``drain_s``, so that
clients and balancers look elsewhere; then new ones are answered DRAINING, those inside are answered, and the process
ends with status 0. A second SIGTERM ends the waiting.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from thinrow.core.errors import InputError, StoreError
from thinrow.core.routing import Routing
from thinrow.serving.lookups.served import ServedTables
from thinrow.serving.lookups.server import EmbeddingServer, ServerLimits
from thinrow.serving.lookups.stats import prometheus_text

#: Between looks whether a signal came, which need not wake the main thread.
_LOOK_S = 0.05
#: A cap on how long answers under way are waited for.
_ANSWERS_S = 5.0


@dataclass(frozen=True, slots=True)
class EmbeddingsOptions:
    """Attributes:
    exports: folders of exports.
    shard, n_shards: which of how many equal ranges.
    listen: addresses.
    tables: prefixes; None for all.
    http: HOST:PORT of health and metrics; None for neither.
    refresh_s: newer exports are looked for so often; 0 for never.
    drain_s: requests are taken so long after SIGTERM.
    check: read every byte once against its CRC before it is served.
    """

    exports: tuple[Path, ...]
    shard: int = 0
    n_shards: int = 1
    listen: tuple[str, ...] = ("tcp:127.0.0.1:7000",)
    tables: tuple[str, ...] | None = None
    http: str | None = None
    refresh_s: float = 1.0
    drain_s: float = 0.0
    check: bool = True
    limits: ServerLimits = field(default_factory=ServerLimits)


def serve(options: EmbeddingsOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        As ``ServedTables.open``; StoreError: an address is taken.
    """
    # Before the handlers, which a signal would otherwise wait in until every byte was read: it ends the opening.
    tables = ServedTables.open(
        options.exports,
        shard=options.shard,
        routing=Routing.even(options.n_shards),
        tables=options.tables,
        check=options.check,
    )
    # A list, since a handler that takes a lock may wait for the very code that it interrupts.
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        _serve(options, tables, asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(options: EmbeddingsOptions, tables: ServedTables, asked: list[int]) -> None:
    """Until ``asked`` to end once; a second time, at once."""
    server = EmbeddingServer(tables, options.limits)
    leaving = threading.Event()
    http = None if options.http is None else _http(options.http, server, leaving)
    try:
        for address in options.listen:
            try:
                bound = server.listen(address).address
            except OSError as error:
                raise StoreError(f"cannot listen at {address}: {error}") from error
            print(f"serving embeddings at {bound}", flush=True)
        if http is not None:
            print(f"health and metrics at http://{http.server_address[0]!s}:{http.server_port}", flush=True)
        if options.refresh_s:
            server.refresh_every(options.refresh_s)
        while not asked:
            time.sleep(_LOOK_S)
        leaving.set()
        until = time.monotonic() + options.drain_s
        while len(asked) < 2 and (left := until - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, left))
        if not server.drain(_ANSWERS_S):
            print("answers under way were cut off", file=sys.stderr, flush=True)
    finally:
        server.close()
        if http is not None:
            http.shutdown()
            http.server_close()


def _http(address: str, server: EmbeddingServer, leaving: threading.Event) -> ThreadingHTTPServer:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise InputError(f"http address {address!r}; it must be HOST:PORT, with a port below 65,536")

    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            if self.path == "/healthz":
                self._answer(200, {"status": "ok"})
            elif self.path == "/readyz":
                gone = leaving.is_set() or server.draining or not server.accepting
                versions = {name: version.step for name, version in server.tables.versions().items()}
                self._answer(503 if gone else 200, {"status": "draining" if gone else "ready", "steps": versions})
            elif self.path == "/metrics":
                self._answer(200, prometheus_text(server.stats, "thinrow_embeddings"))
            else:
                self._answer(404, {"error": "there are /healthz, /readyz and /metrics"})

        def _answer(self, status: int, body: Any) -> None:
            text = isinstance(body, str)
            raw = body.encode() if text else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "text/plain; version=0.0.4" if text else "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: whoever scrapes knows that they did."""

    try:
        http = ThreadingHTTPServer((host, int(port)), Handler)
    except OSError as error:
        raise StoreError(f"cannot listen at {address}: {error}") from error
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return http
