"""Writing: from events in memory and requests to what training reads, against writing fat rows of the same requests.

- ``thinrow``: bulk load into an archive, a snapshot of every request, and its example (version, three candidates, a
  label) appended to a training table, sorted within its buckets.
- ``sorted_fat_rows``: Parquet, K = 20 requests a user, each with its whole visible history, sorted by (user, time),
  plain, zstd-3. The events lie sorted in memory already.
- ``unsorted_fat_rows``: the same rows in order of request time; bytes only.

Units are *unique* events a second: both sides make the same events available to the same requests. Keys that start with
``vs_<peer>_bytes`` are ours (archive and table) over theirs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.datagen.datasets import Histories, Work, load
from bench.datagen.requests import Batch, K, clustered, unique_events
from bench.harness import Options, Result, rates
from bench.peers.fat_rows import in_time_order, write_fat_rows
from bench.peers.peer import tree_bytes
from bench.peers.thinrow import logged
from thinrow.core.ragged import ranges_index
from thinrow.examples.records import ExampleBatch, Impressions
from thinrow.examples.table import ExampleTable
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column, Jagged
from thinrow.schema import ExampleSchema

_CANDIDATES = 3
_EXAMPLES = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 86_400_000})


def run(options: Options) -> Result:
    """Some users' histories, and 20 requests of each."""
    rounds = options.rounds or (1 if options.quick else 3)
    with Work(options.work) as work, tempfile.TemporaryDirectory(dir=work.path) as folder:
        whole = load(options.data, work, quick=options.quick, git_file=options.git_file)
        data, batches = _part(whole, clustered(whole, *((2, 5) if options.quick else (8, 25)), K))
        n = unique_events(batches)
        parameters = {**whole.parameters, "users": data.n_users, "unique_events": n, "rounds": rounds}
        result = Result("write", parameters | {"requests": sum(len(b) for b in batches)})
        ours, fat, unsorted = (Path(folder) / name for name in ("ours", "sorted.parquet", "unsorted.parquet"))

        sizes: dict[str, int] = {}

        def write_ours() -> int:
            shutil.rmtree(ours, ignore_errors=True)
            sizes["examples"] = _write_ours(ours, data, batches)
            return n

        def write_theirs() -> int:
            write_fat_rows(fat, data, batches, None)
            return n

        seen = rates({"thinrow": write_ours, "sorted_fat_rows": write_theirs}, rounds)
        write_fat_rows(unsorted, data, in_time_order(batches), None)
        sizes["archive"] = tree_bytes(ours / "store" / "archive")
        sizes |= {"sorted_fat_rows": tree_bytes(fat), "unsorted_fat_rows": tree_bytes(unsorted)}
        result.figures = {n: {m: round(v) for m, v in r.items()} for n, r in seen.items()} | {"bytes": sizes}
        result.ratios["vs_sorted_fat_rows"] = seen["thinrow"]["median"] / seen["sorted_fat_rows"]["median"]
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


def _write_ours(folder: Path, data: Histories, batches: Sequence[Batch]) -> int:
    """Returns the bytes of the live data files of the table."""
    item = next(n for n, v in data.columns.items() if n != "event_ts")
    with (
        HistoryStore.create(folder / "store", data.schema) as store,
        ExampleTable.create(
            folder / "table", event_schema=data.schema, example_schema=_EXAMPLES, n_buckets=store.pin().n_buckets
        ) as table,
    ):
        store.bulk_load(data.table())
        seen = RequestBatch.concat([logged(store, b) for b in batches])
        offsets = np.arange(len(seen) + 1) * _CANDIDATES
        newest = np.concatenate([b.stop - 1 for b in batches])
        shown = data.columns[item][np.repeat(newest, _CANDIDATES)].astype(np.int64)
        candidates = {"item": Jagged(Column(shown), offsets)}
        impressions = Impressions.of(_EXAMPLES, np.arange(len(seen)), seen, candidates=candidates)
        labels = {"click": Jagged(Column(np.zeros(len(shown), np.int32)), offsets)}
        table.append(ExampleBatch.label(impressions, labels))
        return table.bytes()
