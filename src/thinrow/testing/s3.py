"""A real S3 server for tests and examples: moto's, in a process of its own, everything in its memory.

>>> with S3Server() as server:                                    # doctest: +SKIP
...     store = S3Objects(server.make_bucket("histories"))
...     store.put("a", b"1")
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from types import TracebackType
from urllib.parse import urlsplit

from thinrow.core.errors import MissingExtraError, StoreError

#: Any pair will do; moto takes all.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "thinrow", "AWS_SECRET_ACCESS_KEY": "thinrow", "AWS_REGION": "us-east-1"}
_SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=thinrow/20260101/us-east-1/s3/aws4_request"}

#: Prints its port, serves until its standard input ends, so that it never outlives whoever started it. Puts take turns:
#: moto looks whether an object is there and writes it in two steps, between which a second ``If-None-Match: *`` would
#: pass, as it does in no real store.
_PROGRAM = """
import functools, logging, sys, threading
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
put, turn = S3Response.put_object, threading.Lock()
@functools.wraps(put)
def put_in_turn(self):
    with turn:
        return put(self)
S3Response.put_object = put_in_turn
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class S3Server:
    """Attributes:
    endpoint: ``http://127.0.0.1:PORT``.
    """

    def __init__(self) -> None:
        """Start it; takes about a second. Raises MissingExtraError without moto."""
        try:
            import moto.server  # noqa: F401
        except ImportError:
            raise MissingExtraError("moto[server]", "dev") from None
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdigit():
                self.endpoint = f"http://127.0.0.1:{int(line)}"
                return
        raise StoreError(f"the S3 server ended with status {self._process.wait()} before it served; see its output")

    def make_bucket(self, name: str, endpoint: str | None = None) -> str:
        """Make a bucket; its URL, by way of ``endpoint`` (a proxy) if given. Sets credentials of this process that
        are not set."""
        for key, value in CREDENTIALS.items():
            os.environ.setdefault(key, value)
        connection = http.client.HTTPConnection(urlsplit(self.endpoint).netloc, timeout=30)
        connection.request("PUT", f"/{name}", headers=_SIGNED)
        status = connection.getresponse().status
        connection.close()
        if status != 200:
            raise StoreError(f"the S3 server answered {status} to a new bucket {name!r}; choose a fresh, valid name")
        return f"s3://{name}?endpoint={endpoint or self.endpoint}"

    def close(self) -> None:
        """Stop it; all that it held is gone."""
        self._process.terminate()
        self._process.communicate()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
