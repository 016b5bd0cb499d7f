"""Reconstruction against what a user would pick instead, and against a bare copy.

Every contestant delivers the newest n events of the same requests, all columns, into preallocated arrays, request
after request. Units are events *delivered* (an event that two requests see counts twice), per second of one thread. The
files of all are in the page cache. Patterns:

- ``random``: batches of 512 random users, one request each.
- ``k20``: batches of 25 users that are neighbours in the training table, with the 20 requests of each together.

Ours:

- ``copies``: look-up, fetch, CRC, decode, verify, then every example's events copied into the arrays.
- ``codes``: the same, columns of 64-bit integers as codes and one dictionary a batch. Compared with ``raw_copy`` alone,
  which copies values.
- ``shared``: as ``copies`` without the copy: slices of one copy per user, which is what a batch carries.

A ratio is ours over a peer: ``vs_<peer>.<ours>.<pattern>.<newest>``. ``threads_2_over_1`` is two Python threads on
different batches over one. ``docs/benchmarks.md`` says how each peer is laid out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from bench.datagen.datasets import Histories, Work, load
from bench.datagen.requests import Batch, clustered_batches, random_users
from bench.harness import Options, Rates, Result, rates
from bench.harness import Work as Timed
from bench.peers.duckdb import DuckDb
from bench.peers.fat_rows import SortedFatRows, UnsortedFatRows
from bench.peers.lance import Lance, LancePlain
from bench.peers.peer import Out, Peer, new_out, same
from bench.peers.raw_copy import RawCopy
from bench.peers.rocksdb import RocksDb, RocksDbPlain
from bench.peers.thinrow import Thinrow
from bench.peers.vortex import VortexIndices, VortexRanges

_PEERS: tuple[type[Peer], ...] = (
    RawCopy,
    VortexRanges,
    VortexIndices,
    RocksDb,
    RocksDbPlain,
    Lance,
    LancePlain,
    DuckDb,
)
_FAT_ROWS = (SortedFatRows, UnsortedFatRows)
NEWEST: dict[str, int | None] = {"256": 256, "4096": 4096, "16384": 16384, "all": None}
PATTERNS = ("random", "k20")


def run(options: Options) -> Result:
    """Every pattern and newest n; the peers that are installed."""
    patterns = options.choice("patterns", PATTERNS)
    newest = options.choice("newest", tuple(NEWEST))
    rounds = options.rounds or (1 if options.quick else 5)
    with Work(options.work) as work:
        data = load(options.data, work, quick=options.quick, git_file=options.git_file)
        result = Result("reconstruct", {**data.parameters, "rounds": rounds, "threads": 1})
        for pattern in patterns:
            batches = batches_of(data, pattern, options.quick)
            result.parameters[pattern] = {"batches": len(batches), "requests": sum(len(b) for b in batches)}
            _run_pattern(work, data, pattern, batches, newest, rounds, options, result)
    return result


def batches_of(data: Histories, pattern: str, quick: bool) -> list[Batch]:
    if pattern == "random":
        return random_users(data, 2 if quick else 4, 24 if quick else 512)
    return clustered_batches(data, quick)


def _run_pattern(
    work: Work,
    data: Histories,
    pattern: str,
    batches: list[Batch],
    newest: Sequence[str],
    rounds: int,
    options: Options,
    result: Result,
) -> None:
    with _opened(work, data, options, result) as peers:
        ours = Thinrow(work, data, batches)
        result.figures.setdefault("settings", {})[ours.name] = ours.settings()
        for name in newest:
            contestants, sizes = [*peers], list(batches)
            if pattern == "k20":
                longest = 4096 if name == "256" else NEWEST[name]
                wanted = options.choice("peers", tuple(f.name for f in _FAT_ROWS), partial=True)
                for kind in (f for f in _FAT_ROWS if f.name in wanted):
                    fat = kind(work, data, batches, longest)
                    result.figures["settings"][f"{fat.name}.{name}"] = fat.settings()
                    contestants.append(fat)
                    sizes += fat.rows
            out = new_out(data, sizes, NEWEST[name])
            _require_same(ours, contestants, batches[0], NEWEST[name], data)
            works: dict[str, Timed] = {
                "thinrow.shared": partial(_all_shared, ours, batches, NEWEST[name]),
                "thinrow.copies": partial(_all, ours, batches, NEWEST[name], out),
                "thinrow.codes": partial(_all_codes, ours, batches, NEWEST[name], out),
            }
            works |= {c.name: partial(_all, c, batches, NEWEST[name], out) for c in contestants}
            threads = {
                f"thinrow.{v}.2_threads": partial(_two_threads, ours, batches, NEWEST[name], v, [out, _like(out)])
                for v in ("shared", "copies")
            }
            seen = rates(works | threads, rounds)
            _report(result, pattern, f"newest_{name}" if NEWEST[name] else "all", seen)


@contextmanager
def _opened(work: Work, data: Histories, options: Options, result: Result) -> Iterator[list[Peer]]:
    """The peers asked for that are installed; the others are named in the result."""
    wanted = options.choice("peers", tuple(p.name for p in _PEERS), partial=True)
    peers: list[Peer] = []
    try:
        for kind in _PEERS:
            if kind.name in wanted and kind.missing():
                result.skip(kind.name, f"{kind.package} is not installed")
            elif kind.name in wanted:
                peers.append(kind(work, data))
                result.figures.setdefault("settings", {})[kind.name] = peers[-1].settings()
        yield peers
    finally:
        for peer in peers:
            peer.close()


def _require_same(ours: Thinrow, peers: Sequence[Peer], batch: Batch, newest: int | None, data: Histories) -> None:
    """Every contestant delivers the same bytes; rows in order of request time hold other requests in a batch."""
    expected, got = new_out(data, [batch], newest), new_out(data, [batch], newest)
    n = RawCopy.read(ours, batch, newest, expected)  # type: ignore[arg-type]
    for peer in (ours, *(p for p in peers if not isinstance(p, UnsortedFatRows))):
        for column in got.values():
            column[:] = 0
        assert peer.read(batch, newest, got) == n, f"{peer.name} delivers another number of events"
        assert same(expected, got, n), f"{peer.name} delivers other events"
    assert ours.check_codes(batch, newest), "codes stand for other values"


def _all(peer: Peer, batches: Sequence[Batch], newest: int | None, out: Out) -> int:
    return sum(peer.read(b, newest, out) for b in batches)


def _all_shared(ours: Thinrow, batches: Sequence[Batch], newest: int | None) -> int:
    return sum(ours.read_shared(b, newest) for b in batches)


def _all_codes(ours: Thinrow, batches: Sequence[Batch], newest: int | None, out: Out) -> int:
    return sum(ours.read_codes(b, newest, out) for b in batches)


def _like(out: Out) -> Out:
    return {n: v.copy() for n, v in out.items()}


def _two_threads(ours: Thinrow, batches: Sequence[Batch], newest: int | None, variant: str, outs: list[Out]) -> int:
    def half(i: int) -> int:
        mine = batches[i::2]
        return _all_shared(ours, mine, newest) if variant == "shared" else _all(ours, mine, newest, outs[i])

    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(half, range(2)))


def _report(result: Result, pattern: str, newest: str, seen: Rates) -> None:
    result.figures.setdefault(pattern, {})[newest] = {n: {m: round(v) for m, v in r.items()} for n, r in seen.items()}
    medians = {n: r["median"] for n, r in seen.items()}
    vortex = [m for n, m in medians.items() if n.startswith("vortex")]
    peers = {n: m for n, m in medians.items() if not n.startswith(("thinrow", "vortex"))}
    if vortex:
        peers["vortex"] = max(vortex)
    if "raw_copy" in peers:
        result.ratios[f"vs_raw_copy.codes.{pattern}.{newest}"] = medians["thinrow.codes"] / medians["raw_copy"]
    for ours in ("shared", "copies"):
        mine = medians[f"thinrow.{ours}"]
        for peer, theirs in peers.items():
            result.ratios[f"vs_{peer}.{ours}.{pattern}.{newest}"] = mine / theirs
        result.ratios[f"threads_2_over_1.{ours}.{pattern}.{newest}"] = medians[f"thinrow.{ours}.2_threads"] / mine
