"""A proxy between a client and an HTTP server that fails on purpose: what a network and a busy store do to requests.

Worked example: every second GET is answered by 503, all others pass::

    def fault(request):
        return Fault("status", 503) if request.method == "GET" and request.number % 2 else None

    with FaultProxy(server.endpoint, fault) as proxy:
        store = S3Objects(server.make_bucket("histories", proxy.endpoint))
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

Kind = Literal["drop", "drop_answer", "status", "truncate", "shorten", "stall", "flip", "delay"]

_STALL_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request.

    ``drop``: the connection closes, the server sees nothing. ``drop_answer``: the server acts, its answer is lost.
    ``status``: the answer is ``value`` (503), the server sees nothing. ``truncate``: half of the body, then the
    connection closes. ``shorten``: half of the body, with a header that says so. ``stall``: half of the body, then
    silence for ``value`` seconds. ``flip``: one bit of the body is wrong. ``delay``: it takes ``value`` seconds longer.
    """

    kind: Kind
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """``number`` counts from 0; ``path`` has the query; ``range`` is the header, "" without one."""

    number: int
    method: str
    path: str
    range: str


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up, as hedged requests do, is no news."""


class FaultProxy:
    """Attributes:
    endpoint: ``http://127.0.0.1:PORT``.
    requests: those that came, in order.
    latency_s: added to every answer; may be set at any time.
    """

    def __init__(
        self, upstream: str, fault: Callable[[Request], Fault | None] = lambda r: None, latency_s: float = 0.0
    ) -> None:
        self.fault, self.latency_s = fault, latency_s
        self.requests: list[Request] = []
        self._upstream = urlsplit(upstream).netloc
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; requests under way are cut off."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, method: str, path: str, asked: str) -> Request:
        with self._lock:
            request = Request(len(self.requests), method, path, asked)
            self.requests.append(request)
        return request

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = 1 << 16

            def setup(self) -> None:
                super().setup()
                self.upstream = http.client.HTTPConnection(proxy._upstream, timeout=_STALL_S)

            def finish(self) -> None:
                self.upstream.close()
                super().finish()

            def log_message(self, format: str, *args: object) -> None:
                pass

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = proxy._note(self.command, self.path, self.headers.get("Range", ""))
                fault = proxy.fault(request)
                kind = None if fault is None else fault.kind
                time.sleep(proxy.latency_s + (fault.value if fault is not None and kind == "delay" else 0.0))
                if kind == "drop":
                    self.close_connection = True
                elif fault is not None and kind == "status":
                    self.answer(int(fault.value), [], b"<Error><Code>Injected</Code></Error>", None)
                else:
                    self.upstream.request(self.command, self.path, body, dict(self.headers))
                    answer = self.upstream.getresponse()
                    data = answer.read()
                    if kind == "drop_answer":
                        self.close_connection = True
                    else:
                        self.answer(answer.status, answer.getheaders(), data, fault)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

            def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, fault: Fault | None) -> None:
                kind = None if fault is None else fault.kind
                half = len(data) // 2
                if kind == "flip" and data:
                    data = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
                said = half if kind == "shorten" else len(data)
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                length = dict((n.lower(), v) for n, v in headers).get("content-length", "0")
                self.send_header("Content-Length", length if self.command == "HEAD" else str(said))
                self.end_headers()
                if self.command == "HEAD":
                    return
                self.wfile.write(data[:half] if kind in ("truncate", "shorten", "stall") else data)
                self.wfile.flush()
                if kind == "stall":
                    assert fault is not None
                    proxy._closing.wait(fault.value or _STALL_S)
                self.close_connection = kind in ("truncate", "stall")

        return Handler
