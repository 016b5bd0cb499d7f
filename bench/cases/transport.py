"""Handing over batches of 50 MB from a worker process to the reader, against a plain copy in shared memory.

A worker gives the same ready-made arrays again and again (six columns, 34 bytes an event), so that what is timed is the
way to the reader: packing, one write into shared memory, messages, unpacking. The reader touches one value of each
array. Units are bytes of batches a second, one worker.

- ``shared_memory_copy``: the same bytes copied into memory that two processes share, by one ``memcpy`` a batch in the
  reader itself, into four such places in turn, with all pages there: what nothing that writes them once can beat.
- ``segment_a_batch``: a worker writes each batch into a new named segment (what ``multiprocessing.shared_memory``
  makes) and sends its name; the reader maps and unlinks it.
- ``arrow_ipc``: the same with an Arrow record batch, written by Arrow's IPC into such a segment.
- ``pipe_pickle``: pickle through a pipe, as ``multiprocessing.Queue`` does.

``copied_bytes`` in the figures: what was copied after the worker's write, as the engine counts it.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pyarrow as pa

from bench.harness import Options, Result, Work, rates
from thinrow.dpp.engines import Processes
from thinrow.dpp.engines.packing import Packed, unpack

_EVENT_BYTES, _WINDOW = 34, 4
Arrays = dict[str, Any]
_made: dict[int, Arrays] = {}


def run(options: Options) -> Result:
    """Batches of 50 MB (quick: 2 MB)."""
    size = (2 if options.quick else 50) * 1_000_000
    rounds, n = options.rounds or (1 if options.quick else 5), 4 if options.quick else 16
    result = Result("transport", {"batch_bytes": size, "batches": n, "rounds": rounds, "workers": 1})
    with ExitStack() as stack:
        engine = Processes(buffer_bytes=8 * size).start(Ready(size), first=0, stop=None, workers=1, window=_WINDOW)
        stack.callback(engine.close)
        works: dict[str, Work] = {
            "thinrow": lambda: sum(_touched(engine.next()) for _ in range(n)),
            "shared_memory_copy": _copies(size, n),
        }
        for name, peer in (("segment_a_batch", _segments), ("arrow_ipc", _arrow), ("pipe_pickle", _pickles)):
            ask = stack.enter_context(_sender(peer, size))
            works[name] = lambda ask=ask: sum(_touched(arrays) for arrays in ask(n))  # type: ignore[misc]
        seen = rates(works, rounds)
    result.figures = {name: {m: round(v) for m, v in r.items()} for name, r in seen.items()}
    result.figures |= {"copied_bytes": engine.copied_bytes, "restarts": engine.restarts}
    ours = seen["thinrow"]["median"]
    result.ratios = {f"vs_{name}": ours / r["median"] for name, r in seen.items() if name != "thinrow"}
    return result


class Ready:
    """Makes batches of about ``size`` bytes, the arrays of which are there already."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, item: int) -> Arrays:
        """One batch, the same for every item."""
        if self.size not in _made:
            n = self.size // _EVENT_BYTES
            kinds = {"event_ts": "i8", "item": "i8", "price": "f4", "dwell": "i4", "surface": "i2", "user": "i8"}
            _made[self.size] = {name: np.arange(n).astype(kind) for name, kind in kinds.items()}
        return _made[self.size]


def _touched(arrays: Arrays) -> int:
    """Bytes of arrays that have come."""
    assert all(int(a[-1]) or True for a in arrays.values())
    return sum(int(a.nbytes) for a in arrays.values())


def _copies(size: int, n: int) -> Work:
    source = np.ones(size, np.uint8)
    places: list[Any] = [np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(_WINDOW)]

    def copy() -> int:
        for i in range(n):
            np.copyto(places[i % _WINDOW], source)
        return n * size

    return copy


Send = Callable[[Connection, Arrays], None]


@contextmanager
def _sender(peer: Callable[[], tuple[Send, Callable[[Connection], Iterator[Arrays]]]], size: int) -> Iterator[Any]:
    """A process that sends as many batches as it is asked for; what asks it, and gives them."""
    send, receive = peer()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, send, size), daemon=True)
    process.start()
    theirs.close()

    def ask(n: int) -> Iterator[Arrays]:
        ours.send(n)
        for _ in range(n):
            yield from receive(ours)

    yield ask
    ours.close()
    process.join()


def _serve(connection: Connection, send: Send, size: int) -> None:
    arrays = Ready(size)(0)
    try:
        while True:
            for _ in range(connection.recv()):
                send(connection, arrays)
    except EOFError:
        return


def _segments() -> tuple[Send, Callable[[Connection], Iterator[Arrays]]]:
    return _send_segment, _receive_segment


def _send_segment(connection: Connection, arrays: Arrays) -> None:
    packed = Packed(arrays)
    name, pages = _new_segment(packed.size)
    packed.write(np.frombuffer(pages, np.uint8))
    connection.send(name)


def _receive_segment(connection: Connection) -> Iterator[Arrays]:
    yield unpack(memoryview(_mapped(connection.recv())))


def _arrow() -> tuple[Send, Callable[[Connection], Iterator[Arrays]]]:
    return _send_arrow, _receive_arrow


def _send_arrow(connection: Connection, arrays: Arrays) -> None:
    batch = pa.record_batch({name: pa.array(a) for name, a in arrays.items()})
    name, pages = _new_segment(pa.ipc.get_record_batch_size(batch) + (1 << 16))
    with pa.ipc.new_stream(pa.FixedSizeBufferWriter(pa.py_buffer(pages)), batch.schema) as writer:
        writer.write_batch(batch)
    connection.send(name)


def _receive_arrow(connection: Connection) -> Iterator[Arrays]:
    batch = pa.ipc.open_stream(pa.py_buffer(_mapped(connection.recv()))).read_next_batch()
    yield {name: batch[name].to_numpy() for name in batch.schema.names}


def _pickles() -> tuple[Send, Callable[[Connection], Iterator[Arrays]]]:
    return _send_pickle, _receive_pickle


def _send_pickle(connection: Connection, arrays: Arrays) -> None:
    connection.send_bytes(pickle.dumps(arrays, 5))


def _receive_pickle(connection: Connection) -> Iterator[Arrays]:
    yield pickle.loads(connection.recv_bytes())


def _new_segment(size: int) -> tuple[str, mmap.mmap]:
    fd, name = tempfile.mkstemp(dir="/dev/shm")
    os.ftruncate(fd, size)
    pages = mmap.mmap(fd, size)
    os.close(fd)
    return name, pages


def _mapped(name: str) -> mmap.mmap:
    fd = os.open(name, os.O_RDWR)
    os.unlink(name)
    pages = mmap.mmap(fd, 0)
    os.close(fd)
    return pages
