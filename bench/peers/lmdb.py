"""LMDB: stripes as values under (user, stripe), read in place from the memory map."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, ClassVar

import lmdb
import numpy as np

from bench.datagen.datasets import Histories, Work
from bench.datagen.requests import Batch
from bench.peers.peer import Out, Peer, Stripes, tree_bytes

STRIPE_ROWS = 256


class Lmdb(Peer):
    """A value is the columns of a stripe one after another, plain."""

    name: ClassVar[str] = "lmdb"

    def __init__(self, work: Work, data: Histories, crc: bool = False) -> None:
        """Load the stripes and open the environment for reading; with ``crc``, a stripe's CRC-32 is computed as it is
        read, which is what it would take to check it."""
        super().__init__(work, data)
        self.crc = crc
        self.stripes = Stripes(data, STRIPE_ROWS)
        self.path = work.cached("lmdb", {**data.parameters, "rows": STRIPE_ROWS}, self._build)
        self.db = lmdb.open(str(self.path), readonly=True, lock=False, readahead=False)

    def _build(self, path: Path) -> None:
        size = 2 * self.data.n_events * self.data.row_bytes + (64 << 20)
        with lmdb.open(str(path), map_size=size, sync=False) as db, db.begin(write=True) as txn:
            for s, (a, b) in enumerate(zip(self.stripes.start.tolist(), self.stripes.stop.tolist(), strict=True)):
                txn.put(
                    s.to_bytes(8, "big"), b"".join(v[a:b].tobytes() for v in self.data.columns.values()), append=True
                )

    def settings(self) -> dict[str, Any]:
        """How it was tuned."""
        return {"stripe_rows": STRIPE_ROWS, "read": "buffers", "bytes": tree_bytes(self.path)}

    def read(self, batch: Batch, newest: int | None, out: Out) -> int:
        """Get every stripe in place and copy its rows."""
        pieces = self.stripes.pieces(batch, newest)
        parts = zip(pieces.slot.tolist(), pieces.row.tolist(), pieces.length.tolist(), strict=True)
        rows = self.stripes.stop[pieces.stripes] - self.stripes.start[pieces.stripes]
        total = 0
        with self.db.begin(buffers=True) as txn:
            values = [txn.get(s.to_bytes(8, "big")) for s in pieces.stripes.tolist()]
            if self.crc:
                for value in values:
                    zlib.crc32(value or b"")
            for slot, row, length in parts:
                n, before = int(rows[slot]), 0
                for name, column in self.data.columns.items():
                    values_of = np.frombuffer(values[slot], column.dtype, n, before)
                    out[name][total : total + length] = values_of[row : row + length]
                    before += n * column.itemsize
                total += length
        return total

    def close(self) -> None:
        """Close the environment."""
        self.db.close()
