"""Writing: from raw events and requests to what training reads, against writing fat rows of the same requests.

Both sides begin with the same: all events in one table in memory, in order of arrival, and K = 20 requests a user (user
and time), in order of time. Both end with files that are durable, from which every request's whole history is read.

- ``thinrow``: bulk load into an archive (sorted by bucket and user, numbered, encoded, digested, indexed, committed), a
  snapshot of every request, and its example (version, three candidates, a label) appended to a training table, sorted
  within its buckets.
- ``sorted_fat_rows``: the events sorted by (user, time), each request's place in them found, its history copied into a
  row of Parquet, plain, zstd-3, by (user, time) of the request.
- ``unsorted_fat_rows``: the same rows in order of request time, once through, for its bytes and for
  ``logged_then_sorted_fat_rows``: fat rows that were logged as requests came and are sorted later are written twice
  (the reading between is left out).

Units are *unique* events a second, on one thread. Keys that start with ``vs_<peer>_bytes`` are ours (archive and table)
over theirs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.datagen.datasets import Histories, Work, load
from bench.datagen.requests import Batch, K, clustered, unique_events
from bench.harness import Options, Result, rates
from bench.peers.fat_rows import in_time_order, write_fat_rows
from bench.peers.peer import tree_bytes
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.examples.records import ExampleBatch, Impressions
from thinrow.examples.table import ExampleTable
from thinrow.history.engines import LocalEngine
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column, Jagged
from thinrow.schema import ExampleSchema

_CANDIDATES = 3
_EXAMPLES = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 86_400_000})
#: Rows of a batch of fat rows: no row group spans two.
_ROWS = 500
#: Enough that the events are sorted in memory, as those of the fat rows are.
_MEMORY_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class _Input:
    """``events`` in order of arrival and ``requests`` in order of time."""

    data: Histories
    events: pa.Table
    requests: Batch


def run(options: Options) -> Result:
    """All users' histories (quick: those of ten), and 20 requests of each."""
    rounds = options.rounds or (1 if options.quick else 3)
    with Work(options.work) as work, tempfile.TemporaryDirectory(dir=work.path) as folder:
        whole = load(options.data, work, quick=options.quick, git_file=options.git_file)
        data, batches = _part(whole, clustered(whole, *((2, 5) if options.quick else (whole.n_users, 25)), K))
        given = _Input(data, _as_it_arrived(data), in_time_order(batches, one=True)[0])
        n, size = unique_events(batches), len(given.requests)
        parameters = {**whole.parameters, "users": data.n_users, "unique_events": n, "rounds": rounds}
        result = Result("write", parameters | {"requests": size})
        ours, fat, unsorted = (Path(folder) / name for name in ("ours", "sorted.parquet", "unsorted.parquet"))
        sizes: dict[str, int] = {}

        def write_ours() -> int:
            shutil.rmtree(ours, ignore_errors=True)
            sizes["examples"] = _write_ours(ours, given)
            return n

        def write_theirs() -> int:
            _write_sorted(fat, given)
            return n

        seen = rates({"thinrow": write_ours, "sorted_fat_rows": write_theirs}, rounds)
        since = time.perf_counter()
        _write_unsorted(unsorted, given)
        logged = n / (time.perf_counter() - since)
        sizes["archive"] = tree_bytes(ours / "store" / "archive")
        sizes |= {"sorted_fat_rows": tree_bytes(fat), "unsorted_fat_rows": tree_bytes(unsorted)}
        result.figures = {name: {m: round(v) for m, v in r.items()} for name, r in seen.items()}
        result.figures |= {"unsorted_fat_rows": round(logged), "bytes": sizes}
        rate, sorted_rate = seen["thinrow"]["median"], seen["sorted_fat_rows"]["median"]
        result.ratios["vs_sorted_fat_rows"] = rate / sorted_rate
        result.ratios["vs_logged_then_sorted_fat_rows"] = rate / sorted_rate + rate / logged
        for peer in ("sorted_fat_rows", "unsorted_fat_rows"):
            result.ratios[f"vs_{peer}_bytes"] = (sizes["archive"] + sizes["examples"]) / sizes[peer]
    return result


def _part(data: Histories, batches: Sequence[Batch]) -> tuple[Histories, list[Batch]]:
    """The histories of the batches' users, cut at the newest event that a request sees; users are numbered anew."""
    users = np.concatenate([np.unique(b.users) for b in batches])
    last = {int(u): int(s) for b in batches for u, s in zip(b.users, b.stop, strict=True)}
    start, stop = data.first[users], np.array([last[int(u)] for u in users])
    index, first = ranges_index(start, stop)
    columns = {n: v[index] for n, v in data.columns.items()}
    arrival_ts = None if data.arrival_ts is None else data.arrival_ts[index]
    part = Histories(data.name, data.parameters, data.schema, first, columns, arrival_ts)
    number = {int(u): i for i, u in enumerate(users)}
    moved = []
    for batch in batches:
        row = np.array([number[int(u)] for u in batch.users])
        moved.append(Batch(row, batch.request_ts, first[row], first[row] + batch.stop - batch.start))
    return part, moved


def _as_it_arrived(data: Histories) -> pa.Table:
    """The events of all users, as they became known."""
    order = np.argsort(data.columns["event_ts"] if data.arrival_ts is None else data.arrival_ts, kind="stable")
    table = data.table()
    return pa.table({n: table.column(n).to_numpy()[order] for n in table.column_names})


def _write_ours(folder: Path, given: _Input) -> int:
    """Returns the bytes of the live data files of the table."""
    requests, schema = given.requests, given.data.schema
    item = next(n for n in given.data.columns if n != "event_ts")
    with (
        HistoryStore.create(folder / "store", schema) as store,
        ExampleTable.create(
            folder / "table", event_schema=schema, example_schema=_EXAMPLES, n_buckets=store.pin().n_buckets
        ) as table,
    ):
        store.bulk_load(given.events, memory_bytes=_MEMORY_BYTES, engine=LocalEngine(slots=1))
        seen = store.snapshot(requests.users, requests.request_ts).requests
        assert np.array_equal(seen.versions["seq_len"], requests.stop - requests.start)
        offsets = np.arange(len(seen) + 1) * _CANDIDATES
        shown = given.data.columns[item][np.repeat(requests.stop - 1, _CANDIDATES)].astype(np.int64)
        candidates = {"item": Jagged(Column(shown), offsets)}
        impressions = Impressions.of(_EXAMPLES, np.arange(len(seen)), seen, candidates=candidates)
        labels = {"click": Jagged(Column(np.zeros(len(shown), np.int32)), offsets)}
        table.append(ExampleBatch.label(impressions, labels))
        return table.bytes()


def _write_sorted(path: Path, given: _Input) -> None:
    """From raw events and requests to sorted fat rows."""
    events, requests = given.events, given.requests
    user, event_ts = (events.column(n).to_numpy() for n in ("user_id", "event_ts"))
    # NumPy sorts 16 bits by radix; what arrived in order of time is then sorted.
    order = np.argsort(user.astype(np.uint16) if user.max() < 1 << 16 else user, kind="stable")
    new_user = np.diff(user[order]) > 0
    if not (new_user | (np.diff(event_ts[order]) >= 0)).all():
        order = np.lexsort((event_ts, user))
    columns = {n: np.take(events.column(n).to_numpy(), order) for n in given.data.columns}
    first = offsets_of(np.bincount(user))
    data = Histories(given.data.name, {}, given.data.schema, first, columns)
    row = np.lexsort((requests.request_ts, requests.users))
    users, request_ts = requests.users[row], requests.request_ts[row]
    stop = first[users].copy()
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(users)) + 1, [len(users)]])
    for a, b in pairwise(cuts.tolist()):
        u = users[a]
        stop[a:b] += np.searchsorted(columns["event_ts"][first[u] : first[u + 1]], request_ts[a:b])
    _write(path, data, Batch(users, request_ts, first[users], stop))


def _write_unsorted(path: Path, given: _Input) -> None:
    """Fat rows as they are logged; where the histories lie is known to the server."""
    _write(path, given.data, given.requests)


def _write(path: Path, data: Histories, rows: Batch) -> None:
    write_fat_rows(path, data, [rows.slice(a, a + _ROWS) for a in range(0, len(rows), _ROWS)], None)
    with path.open("rb") as file:
        os.fsync(file.fileno())
