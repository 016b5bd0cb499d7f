"""One user at a time: the newest 200 events, all columns, of a warm local file.

The same random requests, one call each, one thread: ``thinrow`` reconstructs and verifies one request, LMDB and RocksDB
get the stripes that hold the events and copy these out. Ratios ``vs_<peer>.p50`` and ``vs_<peer>.p99`` are their time
over ours: 1 is as fast, more is faster.
"""

from __future__ import annotations

import time

import numpy as np

from bench.datagen.datasets import Work, load
from bench.datagen.requests import Batch, random_users
from bench.harness import Options, Result
from bench.peers.lmdb import Lmdb
from bench.peers.peer import Out, Peer, new_out
from bench.peers.rocksdb import RocksDb
from bench.peers.thinrow import Thinrow

_NEWEST = 200


def run(options: Options) -> Result:
    """2,000 requests; the contestants take turns at every one of them."""
    with Work(options.work) as work:
        data = load(options.data, work, quick=options.quick, git_file=options.git_file)
        rounds = options.rounds or (1 if options.quick else 4)
        batches = random_users(data, 1, 40 if options.quick else 500)
        singles = [b.slice(i, i + 1) for b in batches for i in range(len(b))]
        result = Result("single", {**data.parameters, "newest": _NEWEST, "requests": len(singles), "rounds": rounds})
        peers: list[Peer] = [Thinrow(work, data, singles), Lmdb(work, data)]
        if RocksDb.missing():
            result.skip(RocksDb.name, "rocksdict is not installed")
        else:
            peers.append(RocksDb(work, data))
        out = new_out(data, singles, _NEWEST)
        for peer in peers:
            _time(peer, singles[0], out)
        times: dict[str, list[float]] = {p.name: [] for p in peers}
        for _ in range(rounds):
            for single in singles:
                for peer in peers:
                    times[peer.name].append(_time(peer, single, out))
        seen = {n: np.percentile(t, (50, 99)) for n, t in times.items()}
        result.figures = result.figures | {n: {"p50_ms": p[0] * 1e3, "p99_ms": p[1] * 1e3} for n, p in seen.items()}
        for peer in peers[1:]:
            for i, name in enumerate(("p50", "p99")):
                result.ratios[f"vs_{peer.name}.{name}"] = seen[peer.name][i] / seen["thinrow"][i]
            peer.close()
    return result


def _time(peer: Peer, batch: Batch, out: Out) -> float:
    since = time.perf_counter()
    peer.read(batch, _NEWEST, out)
    return time.perf_counter() - since
