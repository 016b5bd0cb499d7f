"""Fat rows in Parquet: every request carries a copy of its history, plain encoding, zstd-3, whole row groups.

Rows are cut at the longest tenant's need. Sorted by (user, time), the codec finds most of the copies of a user's
history again; in order of request time it finds none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.datagen.datasets import Histories, Ints, Work
from bench.datagen.requests import Batch
from bench.peers.peer import Out, Peer, copy_values, tree_bytes
from thinrow.core.ragged import offsets_of

_GROUP_EVENTS = 1 << 20
_PAGE_BYTES = 4 << 20
LEVEL = 3


class SortedFatRows(Peer):
    """One file of the batches' requests, in their order: by user, then time."""

    name: ClassVar[str] = "sorted_fat_rows"

    def __init__(self, work: Work, data: Histories, batches: Sequence[Batch], longest: int | None) -> None:
        """Write the rows of ``batches``, each cut at its newest ``longest`` events."""
        super().__init__(work, data)
        self.longest, self._place = longest, {id(b): i for i, b in enumerate(batches)}
        self.rows = rows = self._ordered(batches)
        key = {**data.parameters, "longest": longest, "order": self.name, "requests": sum(len(b) for b in rows)}
        key |= {"K": len(rows[0]) // max(len(np.unique(rows[0].users)), 1), "group": _GROUP_EVENTS, "page": _PAGE_BYTES}
        self.path = work.cached(self.name, key, lambda p: write_fat_rows(p, data, rows, longest))
        self.file = pq.ParquetFile(self.path, memory_map=True)
        counts = [self.file.metadata.row_group(g).num_rows for g in range(self.file.num_row_groups)]
        ends, reach = np.cumsum([len(b) for b in rows]), np.cumsum(counts)
        first = np.concatenate([[0], np.searchsorted(reach, ends[:-1], side="right")])
        self._groups = [range(a, b) for a, b in pairwise([*first.tolist(), len(counts)])]

    def _ordered(self, batches: Sequence[Batch]) -> list[Batch]:
        return list(batches)

    def settings(self) -> dict[str, Any]:
        """How it was written."""
        return {
            "format": "parquet, plain, zstd-3", "row_group_events": _GROUP_EVENTS, "page_bytes": _PAGE_BYTES,
            "memory_map": True, "use_threads": False, "rows_hold_newest": self.longest or "all",
            "bytes": tree_bytes(self.path),
        }  # fmt: skip

    def read(self, batch: Batch, newest: int | None, out: Out) -> int:
        """Read the columns of ``out`` of the row groups of the batch, then copy the newest n of every row."""
        total = 0
        for group in self._groups[self._place[id(batch)]]:
            table = self.file.read_row_group(group, columns=list(out), use_threads=False)
            done = total
            for name in out:
                lists = table[name].chunk(0)
                offsets = lists.offsets.to_numpy().astype(np.int64)
                length = np.diff(offsets) if newest is None else np.minimum(np.diff(offsets), newest)
                at = np.cumsum(length)
                copy_values(lists.values.to_numpy(), offsets[1:] - length, length, out[name], done + at - length)
                total = done + int(at[-1])
        return total

    def bytes_read(self, batch: Batch, columns: Collection[str]) -> int:
        """Bytes of the file that ``read`` of these columns takes."""
        chunks = [
            group.column(i)
            for group in map(self.file.metadata.row_group, self._groups[self._place[id(batch)]])
            for i in range(group.num_columns)
        ]
        return sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)


class UnsortedFatRows(SortedFatRows):
    """The same rows in order of request time, cut into batches of the same sizes."""

    name: ClassVar[str] = "unsorted_fat_rows"

    def _ordered(self, batches: Sequence[Batch]) -> list[Batch]:
        return in_time_order(batches)


def in_time_order(batches: Sequence[Batch], *, one: bool = False) -> list[Batch]:
    """The same requests by time, cut into batches of the same sizes, or all in ``one``."""
    fields = ("users", "request_ts", "start", "stop")
    joined = Batch(*(np.concatenate([getattr(b, f) for b in batches]) for f in fields))
    order = np.argsort(joined.request_ts, kind="stable")
    joined = Batch(*(getattr(joined, f)[order] for f in fields))
    cuts = np.array([0, len(order)]) if one else np.cumsum([0, *(len(b) for b in batches)])
    return [joined.slice(a, b) for a, b in pairwise(cuts.tolist())]


def write_fat_rows(path: Path, data: Histories, batches: Sequence[Batch], longest: int | None) -> None:
    """Write the requests of ``batches`` with their newest ``longest`` events; no row group spans two batches."""
    element = {n: pa.field("element", pa.from_numpy_dtype(v.dtype), nullable=False) for n, v in data.columns.items()}
    schema = pa.schema(
        [pa.field("user_id", pa.int64()), *(pa.field(n, pa.list_(e), nullable=False) for n, e in element.items())]
    )
    with pq.ParquetWriter(
        path, schema, compression="zstd", compression_level=LEVEL, use_dictionary=False, data_page_size=_PAGE_BYTES,
        write_statistics=False,
    ) as writer:  # fmt: skip
        for batch in batches:
            start, offsets = batch.cut(longest)
            group = offsets[:-1] // _GROUP_EVENTS
            cuts = np.concatenate([[0], np.flatnonzero(np.diff(group)) + 1, [len(batch)]])
            for a, b in pairwise(cuts.tolist()):
                _write_group(writer, schema, data, batch.users[a:b], start[a:b], batch.stop[a:b])


def _write_group(
    writer: pq.ParquetWriter, schema: pa.Schema, data: Histories, users: Ints, start: Ints, stop: Ints
) -> None:
    offsets = offsets_of(stop - start)
    lists = []
    for name, values in data.columns.items():
        copies = np.empty(int(offsets[-1]), values.dtype)
        copy_values(values, start, stop - start, copies, offsets[:-1])
        kind = schema.field(name).type
        lists.append(pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(copies), type=kind))
    writer.write_table(pa.table([pa.array(users), *lists], schema=schema), row_group_size=len(users))
