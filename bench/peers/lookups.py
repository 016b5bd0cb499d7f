"""Look-ups over other transports: servers (``python -m bench.peers.lookups KIND FOLDER``) and clients of each.

All look keys up in the same exported table, and send float16 rows as bytes; what differs is how they travel:

- ``threads``: plain Python, a thread a connection, a length and the bytes; no checks, no versions, no bounds.
- ``zeromq``: a router, four worker threads behind it, request sockets.
- ``grpc``: its server with four workers, a generic method of bytes.
- ``flight``: Arrow Flight, keys as the ticket, a record batch of fixed-size binary back.

A server prints its port when it listens.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from thinrow.checkpoints import ServingTable

KINDS = {"threads": "socket", "zeromq": "zmq", "grpc": "grpc", "flight": "pyarrow.flight"}
WORKERS = 4
_LENGTH = struct.Struct("<I")
_METHOD = "/lookups/read"
Look = Callable[[Any], Any]
#: Keys (n,) int64 -> their rows (n, dim) float16.
Ask = Callable[[Any], Any]


def serve(kind: str, look: Look) -> None:
    """Serve until the process is killed."""
    {"threads": _threads, "zeromq": _zeromq, "grpc": _grpc, "flight": _flight}[kind](look)


def asker(kind: str, port: int, dim: int) -> Ask:
    """One connection."""
    make = {"threads": _ask_threads, "zeromq": _ask_zeromq, "grpc": _ask_grpc, "flight": _ask_flight}[kind]
    send = make(port)
    return lambda keys: np.frombuffer(send(keys), np.float16).reshape(-1, dim)


def _ready(port: int) -> None:
    print(port, flush=True)


def _receive(sock: socket.socket) -> bytearray | None:
    head = bytearray(4)
    if not _fill(sock, head):
        return None
    body = bytearray(_LENGTH.unpack(head)[0])
    return body if _fill(sock, body) else None


def _fill(sock: socket.socket, into: bytearray) -> bool:
    view = memoryview(into)
    while len(view):
        n = sock.recv_into(view)
        if not n:
            return False
        view = view[n:]
    return True


def _threads(look: Look) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    _ready(listener.getsockname()[1])

    def connection(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (keys := _receive(sock)) is not None:
            rows = look(np.frombuffer(keys, np.int64))
            sock.sendall(_LENGTH.pack(rows.nbytes))
            sock.sendall(rows.data)

    while True:
        threading.Thread(target=connection, args=(listener.accept()[0],), daemon=True).start()


def _ask_threads(port: int) -> Callable[[Any], Any]:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(keys: Any) -> Any:
        sock.sendall(_LENGTH.pack(keys.nbytes) + keys.tobytes())
        return _receive(sock)

    return send


def _zeromq(look: Look) -> None:
    import zmq

    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    back.bind("inproc://workers")

    def worker() -> None:
        sock = context.socket(zmq.REP)
        sock.connect("inproc://workers")
        while True:
            sock.send(look(np.frombuffer(sock.recv(), np.int64)), copy=False)

    for _ in range(WORKERS):
        threading.Thread(target=worker, daemon=True).start()
    _ready(port)
    zmq.proxy(front, back)


def _ask_zeromq(port: int) -> Callable[[Any], Any]:
    import zmq

    sock: Any = zmq.Context.instance().socket(zmq.REQ)
    sock.connect(f"tcp://127.0.0.1:{port}")

    def send(keys: Any) -> Any:
        sock.send(keys, copy=False)
        return sock.recv(copy=False).buffer

    return send


def _grpc(look: Look) -> None:
    import grpc

    server = grpc.server(ThreadPoolExecutor(WORKERS))
    handler = grpc.unary_unary_rpc_method_handler(lambda keys, _: look(np.frombuffer(keys, np.int64)).tobytes())
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("lookups", {"read": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _ready(port)
    server.wait_for_termination()


def _ask_grpc(port: int) -> Callable[[Any], Any]:
    import grpc

    # Without a pool of its own, channels to one address share a connection.
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
    call = channel.unary_unary(_METHOD)
    return lambda keys: call(keys.tobytes())


def _flight(look: Look) -> None:
    import pyarrow as pa
    from pyarrow import flight

    class Server(flight.FlightServerBase):  # type: ignore[misc]
        def do_get(self, context: Any, ticket: Any) -> Any:
            rows = look(np.frombuffer(ticket.ticket, np.int64))
            column = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(rows.shape[1] * 2), len(rows), [None, pa.py_buffer(rows)]
            )
            return flight.RecordBatchStream(pa.table({"rows": column}))

    server = Server("grpc://127.0.0.1:0")
    _ready(server.port)
    server.serve()


def _ask_flight(port: int) -> Callable[[Any], Any]:
    from pyarrow import flight

    client = flight.connect(f"grpc://127.0.0.1:{port}")

    def send(keys: Any) -> Any:
        column = client.do_get(flight.Ticket(keys.tobytes())).read_all().column(0)
        return column.chunk(0).buffers()[1]

    return send


def main(kind: str, folder: str) -> None:
    """Serve the table ``t.`` of an export."""
    table = ServingTable.open(folder, "t.")
    serve(kind, lambda keys: table.read(keys, "float16")[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
