"""Lance: a table with a row a stripe, every column a list; ``take`` of the stripes of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from bench.datagen.datasets import Histories, Work
from bench.datagen.requests import Batch
from bench.peers.peer import Out, Peer, Stripes, copy_values, tree_bytes

STRIPE_ROWS = 512


class Lance(Peer):
    """Stripes as list rows, by (user, time)."""

    name: ClassVar[str] = "lance"
    package: ClassVar[str | None] = "lance"
    #: Of the file format; from 2.1 on values are compressed.
    version: ClassVar[Literal["2.0", "2.2"]] = "2.2"

    def __init__(self, work: Work, data: Histories) -> None:
        """Write the table and open it."""
        import os

        # Read before the first use of the library: its thread pools are as large as these say.
        os.environ.setdefault("LANCE_CPU_THREADS", "1")
        os.environ.setdefault("LANCE_IO_THREADS", "1")
        import lance

        super().__init__(work, data)
        self.stripes = Stripes(data, STRIPE_ROWS)
        key = {**data.parameters, "rows": STRIPE_ROWS, "version": self.version}
        self.path = work.cached("lance", key, self._build)
        self.dataset = lance.dataset(str(self.path))

    def _build(self, path: Path) -> None:
        import lance

        offsets = np.append(self.stripes.start, self.data.n_events)
        lists = {
            n: pa.ListArray.from_arrays(
                pa.array(offsets.astype(np.int32)),
                pa.array(v),
                type=pa.list_(pa.field("item", pa.from_numpy_dtype(v.dtype), nullable=False)),
            )
            for n, v in self.data.columns.items()
        }
        lance.write_dataset(pa.table(lists), str(path), data_storage_version=self.version)

    def settings(self) -> dict[str, Any]:
        """How it was written and read."""
        return {
            "stripe_rows": STRIPE_ROWS, "file_version": self.version, "read": "take", "cpu_threads": 1, "io_threads": 1,
            "bytes": tree_bytes(self.path),
        }  # fmt: skip

    def read(self, batch: Batch, newest: int | None, out: Out) -> int:
        """Take the stripes once, then copy every piece."""
        pieces = self.stripes.pieces(batch, newest)
        table = self.dataset.take(pa.array(pieces.stripes)).combine_chunks()
        for name in self.data.columns:
            lists = table[name].chunk(0)
            begin = lists.offsets.to_numpy().astype(np.int64)[pieces.slot] + pieces.row
            copy_values(lists.values.to_numpy(), begin, pieces.length, out[name], pieces.at[:-1])
        return int(pieces.at[-1])


class LancePlain(Lance):
    """File format 2.0, which stores these values plain: larger, and faster."""

    name: ClassVar[str] = "lance_plain"
    version: ClassVar[Literal["2.0", "2.2"]] = "2.0"
