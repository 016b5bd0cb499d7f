"""Reconstruction of K requests a user against fat rows and against a bare copy.

Every contestant delivers the newest n events of the same requests, all columns, into arrays, user after user. Units are
events *delivered* (an event that two requests see counts twice), per second of one thread.

- ``thinrow.shared``: look-up, fetch, CRC, decode, verify; slices of one copy per user (what a batch carries).
- ``thinrow.copies``: the same, then every example's events copied into preallocated arrays.
- ``raw_copy``: the columns uncompressed in memory, slices copied into preallocated arrays: the limit of a copy.
- ``sorted_fat_rows``: Parquet, one row a request, sorted by (user, time), plain encoding, zstd-3, whole row groups.
- ``unsorted_fat_rows``: the same file in order of request time.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from bench.datagen.histories import SCHEMA, HistoriesSpec, histories
from bench.harness import Result, Work, rates
from thinrow.core.ragged import copy_ranges, offsets_of, ranges_index
from thinrow.core.units import format_bytes
from thinrow.core.users import bucket_of
from thinrow.history.archive.generation import Generation
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.kernels import kernel
from thinrow.schema import Projection

Ints = npt.NDArray[np.int64]
_NAMES = ("event_ts", *(c.name for c in SCHEMA.columns))


@dataclass(frozen=True, slots=True)
class _Data:
    """The same requests for everybody: histories by user in memory, logged requests, files of fat rows."""

    generation: Generation
    batches: list[RequestBatch]
    columns: dict[str, npt.NDArray[Any]]
    slices: list[tuple[Ints, Ints]]
    sorted_file: Path
    unsorted_file: Path


def run(*, quick: bool = False) -> Result:
    """Newest 256, 4,096 and all; K = 20 requests at uniform times in the later half of each history."""
    spec = HistoriesSpec(users=60, events=60_000) if quick else HistoriesSpec(users=400, events=2_000_000)
    k, users_a_batch, rounds = 20, 25, 1 if quick else 5
    result = Result(
        "reconstruct",
        {
            "users": spec.users, "events": spec.events, "K": k, "users_a_batch": users_a_batch, "rounds": rounds,
            "threads": 1, "fat_rows": "parquet plain zstd-3, row groups of 65,536 events, page cache warm",
        },
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        data = _prepare(Path(folder), spec, k, users_a_batch, result)
        for name, newest in (("newest_256", 256), ("newest_4096", 4096), ("all", None)):
            seen = rates(_works(data, newest), rounds)
            result.figures[name] = {n: {m: round(v) for m, v in r.items()} for n, r in seen.items()}
            for ours in ("shared", "copies"):
                for peer in ("raw_copy", "sorted_fat_rows", "unsorted_fat_rows"):
                    ratio = seen[f"thinrow.{ours}"]["median"] / seen[peer]["median"]
                    result.ratios[f"vs_{peer}.{ours}.{name}"] = ratio
    return result


def _prepare(folder: Path, spec: HistoriesSpec, k: int, users_a_batch: int, result: Result) -> _Data:
    table = histories(spec)
    store = HistoryStore.create(folder / "store", SCHEMA)
    store.bulk_load(table)
    store.compact(full=True)
    columns = {n: table[n].to_numpy() for n in _NAMES}
    user = table["user_id"].to_numpy()
    first = np.searchsorted(user, np.arange(spec.users + 1))
    rng = np.random.default_rng(spec.seed)
    batches: list[RequestBatch] = []
    slices: list[tuple[Ints, Ints]] = []
    users: list[Ints] = []
    times: list[Ints] = []
    # Clustered as the training table is: bucket by bucket, user by user.
    by_bucket = np.lexsort((np.arange(spec.users), bucket_of(np.arange(spec.users), store.pin().n_buckets)))
    for a in range(0, spec.users, users_a_batch):
        members = by_bucket[a : a + users_a_batch]
        span = first[members + 1] - first[members]
        at = first[members] + ((0.5 + 0.5 * np.sort(rng.random((k, len(members))), axis=0)) * (span - 1)).astype(
            np.int64
        )
        asked = columns["event_ts"][at] + 1
        parts = [store.snapshot(members, asked[i]).requests for i in range(k)]
        order = np.arange(k * len(members)).reshape(k, len(members)).T.ravel()
        batches.append(RequestBatch.concat(parts).take(order))
        who, when = np.repeat(members, k), asked.T.ravel()
        ends = [
            f + np.searchsorted(columns["event_ts"][f:t], w)
            for f, t, w in zip(first[who], first[who + 1], when, strict=True)
        ]
        slices.append((first[who], np.array(ends, np.int64)))
        users.append(who)
        times.append(when)
    generation = store.pin()
    data = _Data(generation, batches, columns, slices, folder / "sorted.parquet", folder / "unsorted.parquet")
    start, stop = (np.concatenate([s[i] for s in slices]) for i in (0, 1))
    _write_fat_rows(data.sorted_file, columns, np.concatenate(users), start, stop)
    order = np.argsort(np.concatenate(times), kind="stable")
    _write_fat_rows(data.unsorted_file, columns, np.concatenate(users)[order], start[order], stop[order])
    sizes = {
        "thinrow": generation.bytes,
        "sorted_fat_rows": data.sorted_file.stat().st_size,
        "unsorted_fat_rows": data.unsorted_file.stat().st_size,
    }
    result.figures["bytes"] = sizes
    result.figures["bytes_text"] = {n: format_bytes(b) for n, b in sizes.items()}
    result.ratios["vs_sorted_fat_rows_bytes"] = sizes["thinrow"] / sizes["sorted_fat_rows"]
    result.ratios["vs_unsorted_fat_rows_bytes"] = sizes["thinrow"] / sizes["unsorted_fat_rows"]
    store.close()
    return data


def _write_fat_rows(path: Path, columns: dict[str, npt.NDArray[Any]], users: Ints, start: Ints, stop: Ints) -> None:
    kinds = {n: pa.list_(pa.field("element", pa.from_numpy_dtype(v.dtype), nullable=False)) for n, v in columns.items()}
    schema = pa.schema([pa.field("user_id", pa.int64()), *(pa.field(n, t) for n, t in kinds.items())])
    group = np.cumsum(stop - start) // 65_536
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(group)) + 1, [len(users)]])
    with pq.ParquetWriter(path, schema, compression="zstd", compression_level=3, use_dictionary=False) as writer:
        for a, b in pairwise(cuts.tolist()):
            index, offsets = ranges_index(start[a:b], stop[a:b])
            lists = [
                pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(v[index]), type=kinds[n])
                for n, v in columns.items()
            ]
            writer.write_table(pa.table([pa.array(users[a:b]), *lists], schema=schema), row_group_size=int(b - a))


def _works(data: _Data, newest: int | None) -> dict[str, Work]:
    largest = max(int(_cut(start, stop, newest)[1][-1]) for start, stop in data.slices)
    out = {n: np.empty(largest, v.dtype) for n, v in data.columns.items()}
    projection = Projection(max_len=newest)

    def ours(*, copies: bool) -> int:
        total = 0
        for batch in data.batches:
            histories = reconstruct(data.generation, batch, projection).histories
            if not copies:
                total += int(histories.lengths().sum())
                continue
            assert histories.exact.all()
            n = int((histories.stop - histories.start).sum())
            total += n
            for name in _NAMES:
                source = histories.events.event_ts if name == "event_ts" else histories.events.columns[name].values
                copy_ranges(source, histories.start, histories.stop, out[name][:n])
        return total

    def raw_copy() -> int:
        total = 0
        for start, stop in data.slices:
            total += _copy_slices(data.columns, start, stop, newest, out)
        return total

    def fat(path: Path) -> int:
        file = pq.ParquetFile(path)
        total = 0
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=list(_NAMES), use_threads=False)
            total += _newest_of_lists(table, newest)
        return total

    return {
        "thinrow.shared": lambda: ours(copies=False),
        "thinrow.copies": lambda: ours(copies=True),
        "raw_copy": raw_copy,
        "sorted_fat_rows": lambda: fat(data.sorted_file),
        "unsorted_fat_rows": lambda: fat(data.unsorted_file),
    }


def _cut(start: Ints, stop: Ints, newest: int | None) -> tuple[Ints, Ints]:
    lengths = stop - start if newest is None else np.minimum(stop - start, newest)
    return lengths, offsets_of(lengths)


def _copy_slices(
    columns: dict[str, npt.NDArray[Any]], start: Ints, stop: Ints, newest: int | None, out: dict[str, npt.NDArray[Any]]
) -> int:
    lengths, offsets = _cut(start, stop, newest)
    copy = kernel("copy_ranges")
    for name, values in columns.items():
        size = values.itemsize
        source, target = values.view(np.uint8), out[name].view(np.uint8)
        copy(source, (stop - lengths) * size, lengths * size, target, offsets[:-1] * size)
    return int(offsets[-1])


def _newest_of_lists(table: pa.Table, newest: int | None) -> int:
    """Flat arrays of every list column; the newest n of each row copied out where n cuts."""
    total = 0
    for name in _NAMES:
        lists = table[name].chunk(0)
        offsets = lists.offsets.to_numpy().astype(np.int64)
        values = lists.values.to_numpy()
        if newest is None:
            total = len(values)
            continue
        index, cut = ranges_index(np.maximum(offsets[:-1], offsets[1:] - newest), offsets[1:])
        values = values[index]
        total = int(cut[-1])
    return total
