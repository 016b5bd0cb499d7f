"""Look-ups in embedding servers over TCP on one machine, against the same look-ups over other transports.

First part: 2,000 keys a request of a table of 64 float16, one server, 4 connections, a client thread each:

- ``client``: ``EmbeddingClient``, which checks every frame, holds a deadline, gives float32 rows and what was found.
- ``frames``: the same server over the client's connections alone: frames checked, float16 rows as they lie in the
  frame, no deadline and nothing put together; what the other transports give, too.
- ``threads``, ``zeromq``, ``grpc``, ``flight``: see ``bench.peers.lookups``; all look up in the same table. Those that
  are not installed are left out, and said to be.

Second part: sums of bags of 100 keys, 4 servers, float16: pooled by the servers, over rows that the ranker adds up.
Bytes are counted on the connections, headers included; requests a second from one thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.datagen.datasets import Work as Folder
from bench.harness import Options, Result, Work, rates
from bench.peers import lookups as peers
from thinrow.checkpoints import ServingTable, export
from thinrow.serving.lookups import Bags, EmbeddingClient
from thinrow.serving.lookups.compiled import CompiledLink, first_ready, link_to
from thinrow.serving.lookups.links import Known, Server
from thinrow.serving.lookups.messages import Ask, Request, encode_request, parse_reply
from thinrow.serving.lookups.stats import Stats

_KEYS, _DIM, _CONNECTIONS, _SERVERS, _BAG = 2_000, 64, 4, 4, 100
_LONG_S = 60.0


def run(options: Options) -> Result:
    """With ``quick`` a small table and few requests."""
    rows, requests, rounds = (20_000, 5, 1) if options.quick else (1_000_000, 100, options.rounds or 7)
    bags = 8 if options.quick else 64
    parameters = {"rows": rows, "dim": _DIM, "keys": _KEYS, "connections": _CONNECTIONS, "bag": _BAG, "bags": bags}
    result = Result("lookups", parameters | {"servers": _SERVERS, "requests": requests, "rounds": rounds})
    with Folder(options.work) as work, contextlib.ExitStack() as stack:
        rng = np.random.default_rng(0)
        values = rng.normal(size=(rows, _DIM)).astype(np.float32)
        folder = work.path / "lookups"
        export(folder, 1, {"t.": {"keys": np.arange(rows), "values": values}}, dtype="float16")
        asked = [rng.integers(0, rows, _KEYS) for _ in range(8)]
        seen = _transports(result, folder, asked, requests, rounds, stack)
        for peer in ("threads", "zeromq", "grpc", "flight"):
            for ours in ("client", "frames") if peer in seen else ():
                result.ratios[f"vs_{peer}.{ours}"] = seen[ours]["median"] / seen[peer]["median"]
        _pooling(result, folder, rng.integers(0, rows, bags * _BAG), requests, rounds, stack)
    return result


def _transports(
    result: Result, folder: Path, asked: list[Any], requests: int, rounds: int, stack: contextlib.ExitStack
) -> dict[str, dict[str, float]]:
    expected = ServingTable.open(folder, "t.").read(asked[0], "float16")[0]
    address = stack.enter_context(_ours(folder))
    client = stack.enter_context(EmbeddingClient([[address]], deadline_s=_LONG_S, dtype="float16"))
    asks: dict[str, list[peers.Ask]] = {
        "client": [lambda keys: client.read({"t.": keys})["t."].vectors] * _CONNECTIONS,
        "frames": [_by_hand(address) for _ in range(_CONNECTIONS)],
    }
    for kind, module in peers.KINDS.items():
        if not _is_there(module):
            result.skip(kind, f"{module} is not installed")
            continue
        port = stack.enter_context(_process([sys.executable, "-m", "bench.peers.lookups", kind, str(folder)]))
        asks[kind] = [peers.asker(kind, int(port), _DIM) for _ in range(_CONNECTIONS)]
    for name, some in asks.items():
        for ask in some:
            assert np.array_equal(ask(asked[0]), expected), name
    seen = rates({name: _threads(some, asked, requests) for name, some in asks.items()}, rounds)
    result.figures["requests_a_second"] = {
        name: {m: round(v / len(asked[0])) for m, v in of.items()} for name, of in seen.items()
    }
    return seen


def _pooling(result: Result, folder: Path, keys: Any, requests: int, rounds: int, stack: contextlib.ExitStack) -> None:
    addresses = [stack.enter_context(_ours(folder, f"{shard}/{_SERVERS}")) for shard in range(_SERVERS)]
    bounds = np.arange(0, len(keys) + 1, _BAG)
    client = stack.enter_context(EmbeddingClient([[a] for a in addresses], deadline_s=_LONG_S, dtype="float16"))

    def on_servers() -> Any:
        return client.read({"t.": Bags(keys, bounds)})["t."].vectors

    def on_ranker() -> Any:
        return np.add.reduceat(client.read({"t.": keys})["t."].vectors, bounds[:-1], axis=0)

    np.testing.assert_allclose(on_servers(), on_ranker(), atol=0.1)
    bytes_of = {}
    for name, read in (("on_servers", on_servers), ("on_ranker", on_ranker)):
        before = client.stats.read()
        read()
        after = client.stats.read()
        bytes_of[name] = {way: after[way][""] - before[way][""] for way in ("bytes_in", "bytes_out")}
    seen = rates(
        {name: _repeat(read, requests) for name, read in (("on_servers", on_servers), ("on_ranker", on_ranker))}, rounds
    )
    result.figures["pooling"] = {
        name: {"replies_bytes": of["bytes_in"], "requests_bytes": of["bytes_out"]} | seen[name]
        for name, of in bytes_of.items()
    }
    ours, theirs = bytes_of["on_servers"], bytes_of["on_ranker"]
    result.ratios["vs_ranker_side_bytes.replies"] = ours["bytes_in"] / theirs["bytes_in"]
    result.ratios["vs_ranker_side_bytes.with_ids"] = sum(ours.values()) / sum(theirs.values())
    result.ratios["vs_ranker_side.requests"] = seen["on_servers"]["median"] / seen["on_ranker"]["median"]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def _ours(folder: Path, shard: str = "0/1") -> Iterator[str]:
    program = "import sys; from thinrow.cli.main import main; sys.exit(main())"
    options = ["--export", str(folder), "--shard", shard, "--listen", "tcp:127.0.0.1:0"]
    with _process([sys.executable, "-c", program, "serve", "embeddings", *options]) as line:
        yield line.split()[-1]


@contextlib.contextmanager
def _process(command: Sequence[str]) -> Iterator[str]:
    """The first line of a process that is killed in the end. All servers look up on one thread a request."""
    surroundings = os.environ | {"NUMBA_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings)
    assert process.stdout is not None
    try:
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{' '.join(command)} did not start")
        yield line
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _by_hand(address: str) -> peers.Ask:
    link = link_to(Server(address), Known(), Stats())
    assert isinstance(link, CompiledLink)

    def ask(keys: Any) -> Any:
        link.ask(1, encode_request(Request([Ask("t.", keys)], "float16")))
        while True:
            first_ready([link], time.monotonic_ns() + int(_LONG_S * 1e9))
            for reply in link.replies():
                assert reply.body is not None
                link.give_back(reply.body)
                return parse_reply(reply.body)[0].values

    return ask


def _threads(asks: list[peers.Ask], asked: list[Any], requests: int) -> Work:
    def work() -> int:
        def one(ask: peers.Ask) -> None:
            for number in range(requests):
                ask(asked[number % len(asked)])

        threads = [threading.Thread(target=one, args=(ask,)) for ask in asks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(asks) * requests * len(asked[0])

    return work


def _repeat(read: Callable[[], Any], requests: int) -> Work:
    def work() -> int:
        for _ in range(requests):
            read()
        return requests

    return work
