"""The engines of an embedding server, and a client's threads, on one machine.

- ``credits``: an interactive reader at a fixed rate while bursts of bulk reads come over 16 connections; with urgencies
  and the usual bounds, over the same with all reads alike and bounds that nobody meets. Latency from when a read was
  due, median and 99th percentile.
- ``migration``: ten connections over two engines, of which two on one engine make four fifths of the reads and keep it
  busy; latency of all with connections that move over without.
- ``threads``: eight threads with connections of their own over eight that share two, each of which one takes at a time.
- ``routing``: bytes of the routing of 4,096 shards over a sorted map of ids and shards, 100 M ids (measured on 1 M).
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.datagen.datasets import Work as Folder
from bench.harness import Options, Result, rates
from thinrow.checkpoints import export
from thinrow.core.routing import Routing
from thinrow.serving.lookups import Bags, EmbeddingClient, EmbeddingServer, ServedTables, ServerLimits

_DIM, _KEYS, _LONG_S = 64, 2_000, 60.0
_BULK_KEYS = 8_000
Latencies = dict[str, list[float]]


def run(options: Options) -> Result:
    """With ``quick`` a small table and short runs."""
    rows, seconds, rounds = (20_000, 0.3, 1) if options.quick else (1_000_000, 2.0, options.rounds or 3)
    result = Result("engines", {"rows": rows, "dim": _DIM, "keys": _KEYS, "seconds": seconds, "rounds": rounds})
    with Folder(options.work) as work:
        folder = work.path / "engines"
        values = np.random.default_rng(0).normal(size=(rows, _DIM)).astype(np.float32)
        export(folder, 1, {"t.": {"keys": np.arange(rows), "values": values}}, dtype="float16")
        _compare(result, "credits", _credits(folder, rows, seconds), rounds)
        _compare(result, "migration", _migration(folder, rows, seconds), rounds)
        _threads(result, folder, rows, 3 if options.quick else 100, rounds)
    _routing(result)
    return result


def _compare(result: Result, name: str, ways: dict[str, Callable[[], list[float]]], rounds: int) -> None:
    """Latencies ``with`` over ``without``, each round one after the other, all rounds together."""
    seen: Latencies = {way: [] for way in ways}
    for _ in range(rounds):
        for way, latencies in ways.items():
            seen[way] += latencies()
    at = {
        way: dict(zip(("p50", "p99"), np.percentile(times, [50, 99]).tolist(), strict=True))
        for way, times in seen.items()
    }
    result.figures[f"{name}_ms"] = {w: {p: round(1e3 * t, 3) for p, t in of.items()} for w, of in at.items()}
    for p in ("p50", "p99"):
        result.ratios[f"vs_without_ms.{name}.{p}"] = at["with"][p] / at["without"][p]


def _credits(folder: Path, rows: int, seconds: float) -> dict[str, Callable[[], list[float]]]:
    open_bounds = {"credits": 1_000, "waiting": 10_000}

    def latencies(urgency: str, limits: dict[str, Any]) -> list[float]:
        with _process("serve", str(folder), limits) as address, _process("burst", address, urgency, rows):
            return _open_loop([_reader(address, rows)], [0.01], seconds)

    return {"with": lambda: latencies("bulk", {}), "without": lambda: latencies("interactive", open_bounds)}


def _migration(folder: Path, rows: int, seconds: float) -> dict[str, Callable[[], list[float]]]:
    with _process("serve", str(folder), {"engines": 1}) as address:
        read = _reader(address, rows, _BULK_KEYS)
        pause = float(np.median([_time_of(read) for _ in range(50)])) * 16

    def latencies(migrate: bool) -> list[float]:
        with _process("serve", str(folder), {"engines": 2, "lookups": 2, "migrate": migrate}) as address:
            readers = [_reader(address, rows, _BULK_KEYS) for _ in range(10)]
            # Connections go to engines in turn: the first and the third, which read all the time, are one engine's; the
            # others make about a fifth of all reads.
            every = [0.0 if i in (0, 2) else pause for i in range(10)]
            return _open_loop(readers, every, seconds)

    return {"with": lambda: latencies(True), "without": lambda: latencies(False)}


def _time_of(read: Callable[[], Any]) -> float:
    since = time.perf_counter()
    read()
    return time.perf_counter() - since


def _reader(address: str, rows: int, n: int = _KEYS) -> Callable[[], Any]:
    """Sums of one bag, so that the server has most of the work; on a connection that exists."""
    client = EmbeddingClient([[address]], deadline_s=_LONG_S, dtype="float16")
    bag = Bags(np.random.default_rng(1).integers(0, rows, n), np.array([0, n]))
    return lambda: client.read({"t.": bag})


def _open_loop(readers: list[Callable[[], Any]], every: list[float], seconds: float) -> list[float]:
    """Seconds from when each read was due to its answer: reads wait for those before them on their connection."""
    times: list[float] = []
    ready, start = threading.Semaphore(0), threading.Event()

    def one(read: Callable[[], Any], pause: float) -> None:
        read()
        ready.release()
        start.wait()
        due, mine = time.perf_counter(), list[float]()
        until = due + seconds
        while due < until:
            time.sleep(max(0.0, due - time.perf_counter()))
            read()
            mine.append(time.perf_counter() - due)
            # Without a pause the next is due when this is answered.
            due = due + pause if pause else time.perf_counter()
        times.extend(mine)

    threads = []
    for read, pause in zip(readers, every, strict=True):
        threads.append(threading.Thread(target=one, args=(read, pause)))
        threads[-1].start()
        # One after another, so that each is in the engine that it should be in.
        ready.acquire()
    start.set()
    for thread in threads:
        thread.join()
    return times


def _threads(result: Result, folder: Path, rows: int, requests: int, rounds: int) -> None:
    keys = np.random.default_rng(2).integers(0, rows, _KEYS)
    with _process("serve", str(folder), {}) as address, contextlib.ExitStack() as stack:
        own = [_on_a_thread(address, keys, stack) for _ in range(8)]
        pool: queue.Queue[Callable[[], Any]] = queue.Queue()
        for _ in range(2):
            pool.put(_on_a_thread(address, keys, stack))

        def shared() -> Any:
            ask = pool.get()
            try:
                return ask()
            finally:
                pool.put(ask)

        seen = rates({"own": _all(own, requests), "shared": _all([shared] * 8, requests)}, rounds)
    result.figures["threads"] = {name: {m: round(v) for m, v in of.items()} for name, of in seen.items()}
    result.ratios["vs_shared_pool.threads"] = seen["own"]["median"] / seen["shared"]["median"]


def _on_a_thread(address: str, keys: Any, stack: contextlib.ExitStack) -> Callable[[], Any]:
    """A connection that any thread may use, one at a time."""
    from thinrow.serving.lookups.compiled import CompiledLink, first_ready, link_to
    from thinrow.serving.lookups.links import Known, Server
    from thinrow.serving.lookups.messages import Ask, Request, encode_request, parse_reply
    from thinrow.serving.lookups.stats import Stats

    link = link_to(Server(address), Known(), Stats())
    assert isinstance(link, CompiledLink)
    stack.callback(link.close)

    def ask() -> Any:
        link.ask(1, encode_request(Request([Ask("t.", keys)], "float16")))
        while True:
            first_ready([link], time.monotonic_ns() + int(_LONG_S * 1e9))
            for reply in link.replies():
                assert reply.body is not None
                rows = parse_reply(reply.body)[0].as_float()
                link.give_back(reply.body)
                return rows

    return ask


def _all(asks: list[Callable[[], Any]], requests: int) -> Callable[[], int]:
    def work() -> int:
        threads = [threading.Thread(target=_repeat, args=(ask, requests)) for ask in asks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(asks) * requests

    return work


def _repeat(ask: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        ask()


def _routing(result: Result) -> None:
    n, all_ids = 1_000_000, 100_000_000
    ids = np.arange(n, dtype=np.int64)
    shards = Routing.even(4_096).shards(ids).astype(np.uint16)
    of_map = (ids.nbytes + shards.nbytes) * (all_ids // n)
    routing = Routing.even(4_096)
    of_routing = sys.getsizeof(routing) + sys.getsizeof(routing.starts) + sum(map(sys.getsizeof, routing.starts))
    result.figures["routing_bytes"] = {"ranges": of_routing, "map": of_map}
    result.ratios["vs_map_bytes.routing"] = of_routing / of_map


@contextlib.contextmanager
def _process(what: str, *arguments: Any) -> Iterator[str]:
    """This module as a process: its first line, and its end."""
    command = [
        sys.executable,
        "-c",
        f"from bench.cases.engines import {what}; {what}(*{arguments!r})".replace("PosixPath", "str"),
    ]
    surroundings = os.environ | {"NUMBA_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def serve(folder: str, limits: dict[str, Any]) -> None:
    """A server in a process of its own."""
    server = EmbeddingServer(ServedTables.open([folder], check=False), ServerLimits(**limits))
    print(server.listen("tcp:127.0.0.1:0").address, flush=True)
    threading.Event().wait()


def burst(address: str, urgency: str, rows: int) -> None:
    """Sixteen connections that read many keys all at once, each 100 ms."""
    bag = Bags(np.random.default_rng(3).integers(0, rows, _BULK_KEYS), np.array([0, _BULK_KEYS]))
    client = EmbeddingClient([[address]], deadline_s=_LONG_S, dtype="float16", urgency=urgency)
    together = threading.Barrier(17)

    def one() -> None:
        client.read({"t.": bag})
        while True:
            together.wait()
            with contextlib.suppress(Exception):
                for _ in range(4):
                    client.read({"t.": bag})

    for _ in range(16):
        threading.Thread(target=one, daemon=True).start()
    print("ready", flush=True)
    while True:
        together.wait()
        time.sleep(0.1)
