"""A schema registry for tests and examples: the part of its HTTP API that serializers and readers use, in a thread.

>>> with SchemaRegistry() as registry:                                    # doctest: +SKIP
...     number = registry.add('{"type": "record", "name": "E", "fields": []}')
...     SchemaRegistryClient({"url": registry.url}).get_schema(number)
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final

#: Avro: an outcome as its fields are named by default, with an id.
CLICK_RECORD: Final[dict[str, Any]] = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "request_id", "type": "long"},
        {"name": "item", "type": "long"},
        {"name": "name", "type": "string"},
        {"name": "ts", "type": "long"},
        {"name": "value", "type": ["null", "long"], "default": None},
        {"name": "id", "type": "string"},
    ],
}


class SchemaRegistry:
    """Attributes:
    url: of the server.
    schemas: id -> (schema, kind).
    requests: paths that were asked for, in order.
    fails: an HTTP status that every request gets from now on; 0 for none.
    """

    def __init__(self) -> None:
        """Start it."""
        self.schemas: dict[int, tuple[str, str]] = {}
        self.requests: list[str] = []
        self.fails = 0
        self._lock = threading.Lock()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                """Silent."""

            def do_GET(self) -> None:
                self._reply(*registry._get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                registry.requests.append(self.path)
                number = registry.add(body["schema"], body.get("schemaType", "AVRO"))
                self._reply(
                    registry.fails or 200, {"id": number, "version": 1, "subject": self.path.split("/")[2], **body}
                )

            def _reply(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def add(self, schema: str, kind: str = "AVRO") -> int:
        """The id of a schema, which it keeps."""
        with self._lock:
            for number, held in self.schemas.items():
                if held == (schema, kind):
                    return number
            number = len(self.schemas) + 1
            self.schemas[number] = (schema, kind)
            return number

    def _get(self, path: str) -> tuple[int, Any]:
        self.requests.append(path)
        if self.fails:
            return self.fails, {"error_code": self.fails * 100 + 1, "message": "as told"}
        found = re.match(r"/schemas/ids/(\d+)", path)
        if found and int(found[1]) in self.schemas:
            schema, kind = self.schemas[int(found[1])]
            return 200, {"schema": schema, **({} if kind == "AVRO" else {"schemaType": kind})}
        return 404, {"error_code": 40403, "message": "Schema not found"}

    def close(self) -> None:
        """Stop it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> SchemaRegistry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
