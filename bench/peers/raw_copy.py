"""The limit of a copy: uncompressed columns in memory, slices copied by one compiled call a column."""

from __future__ import annotations

from typing import Any, ClassVar

from bench.datagen.requests import Batch
from bench.peers.peer import Out, Peer, copy_values


class RawCopy(Peer):
    """Columns in memory; the index (where a user begins) costs nothing."""

    name: ClassVar[str] = "raw_copy"

    def settings(self) -> dict[str, Any]:
        """What it holds."""
        return {"holds": "uncompressed columns in memory", "bytes": self.data.n_events * self.data.row_bytes}

    def read(self, batch: Batch, newest: int | None, out: Out) -> int:
        """Copy slices."""
        start, offsets = batch.cut(newest)
        for name, values in self.data.columns.items():
            copy_values(values, start, batch.stop - start, out[name], offsets[:-1])
        return int(offsets[-1])
