"""Vortex: one file sorted by (user, time), read by row ranges or by sorted row indices."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from bench.datagen.datasets import Histories, Ints, Work
from bench.datagen.requests import Batch
from bench.peers.peer import Out, Peer, copy_values, tree_bytes
from thinrow.core.ragged import offsets_of


class _Vortex(Peer):
    package: ClassVar[str | None] = "vortex"

    def __init__(self, work: Work, data: Histories) -> None:
        import vortex

        super().__init__(work, data)
        # The calling thread drives the reads; no other may help it.
        vortex.set_worker_threads(0)
        table = pa.table(data.columns)
        self.path = work.cached("vortex", data.parameters, lambda p: vortex.io.write(table, str(p)))
        self.file = vortex.open(str(self.path), memory_map=True)
        self.scan = self.file.to_repeated_scan()

    def settings(self) -> dict[str, Any]:
        """How it is written and read."""
        return {"writer": "default", "memory_map": True, "worker_threads": 0, "bytes": tree_bytes(self.path)}

    def _deliver(self, arrays: Any, begin: Ints, length: Ints, out: Out, at: Ints) -> None:
        """Copy ranges of the rows read to their places."""
        for name in self.data.columns:
            copy_values(arrays[name], begin, length, out[name], at)


class VortexRanges(_Vortex):
    """One ``execute(row_range=...)`` a run of rows, of a scan prepared once."""

    name: ClassVar[str] = "vortex_ranges"

    def read(self, batch: Batch, newest: int | None, out: Out) -> int:
        """Read each distinct run of overlapping ranges, then copy."""
        start, offsets = batch.cut(newest)
        first, last, run = _runs(start, batch.stop)
        for r, (a, b) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
            mine = np.flatnonzero(run == r)
            arrays = _columns(self.scan.execute(row_range=(a, b)).read_all().to_arrow_array())
            self._deliver(arrays, start[mine] - a, batch.stop[mine] - start[mine], out, offsets[:-1][mine])
        return int(offsets[-1])


class VortexIndices(_Vortex):
    """One scan a batch with the sorted indices of all rows."""

    name: ClassVar[str] = "vortex_indices"

    def read(self, batch: Batch, newest: int | None, out: Out) -> int:
        """Read the union of the ranges, then copy."""
        import vortex

        start, offsets = batch.cut(newest)
        first, last, run = _runs(start, batch.stop)
        place = offsets_of(last - first)
        rows = np.arange(place[-1]) + np.repeat(first - place[:-1], last - first)
        indices = vortex.array(pa.array(rows.astype(np.uint64)))
        arrays = _columns(self.file.scan(indices=indices).read_all().to_arrow_array())
        self._deliver(arrays, place[run] + start - first[run], batch.stop - start, out, offsets[:-1])
        return int(offsets[-1])


def _runs(start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Disjoint ascending runs of rows that hold all ranges, and the run of each range."""
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(stop[order])
    new = np.concatenate([[True], start[order][1:] > reach[:-1]])
    run = np.empty(len(start), np.int64)
    run[order] = np.cumsum(new) - 1
    begins = np.flatnonzero(new)
    return start[order][begins], reach[np.append(begins[1:], len(order)) - 1], run


def _columns(struct: Any) -> dict[str, Any]:
    if isinstance(struct, pa.ChunkedArray):
        struct = struct.combine_chunks()
    return {f.name: struct.field(i).to_numpy(zero_copy_only=False) for i, f in enumerate(struct.type)}
