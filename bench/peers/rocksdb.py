"""RocksDB: stripes as values under (user, stripe), fetched with one multi-get a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.datagen.datasets import Histories, Work
from bench.datagen.requests import Batch
from bench.peers.peer import Out, Peer, Stripes, tree_bytes
from thinrow.core.ragged import offsets_of
from thinrow.kernels import kernel

STRIPE_ROWS = 256
_CACHE_BYTES = 64 << 20


class RocksDb(Peer):
    """A value is the columns of a stripe one after another, plain; RocksDB compresses its blocks."""

    name: ClassVar[str] = "rocksdb"
    package: ClassVar[str | None] = "rocksdict"
    compression: ClassVar[str] = "lz4"

    def __init__(self, work: Work, data: Histories) -> None:
        """Load the stripes, compact them to one level, reopen for reading."""
        import rocksdict

        super().__init__(work, data)
        self.stripes = Stripes(data, STRIPE_ROWS)
        key = {**data.parameters, "rows": STRIPE_ROWS, "compression": self.compression}
        self.path = work.cached("rocksdb", key, self._build)
        self.db = rocksdict.Rdict(str(self.path), self._options(), access_type=rocksdict.AccessType.read_only())

    def _options(self) -> Any:
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(getattr(rocksdict.DBCompressionType, self.compression)())
        options.set_allow_mmap_reads(self.compression == "none")
        table = rocksdict.BlockBasedOptions()
        table.set_block_size(4096)
        table.set_block_cache(rocksdict.Cache(_CACHE_BYTES))
        table.set_bloom_filter(10, False)
        options.set_block_based_table_factory(table)
        return options

    def _build(self, path: Path) -> None:
        import rocksdict

        db = rocksdict.Rdict(str(path), self._options())
        for s, (a, b) in enumerate(zip(self.stripes.start.tolist(), self.stripes.stop.tolist(), strict=True)):
            db[s.to_bytes(8, "big")] = b"".join(v[a:b].tobytes() for v in self.data.columns.values())
        db.flush()
        db.compact_range(None, None)
        db.close()

    def settings(self) -> dict[str, Any]:
        """How it was tuned."""
        return {
            "stripe_rows": STRIPE_ROWS, "compression": self.compression, "block_bytes": 4096, "bloom_bits": 10,
            "block_cache_bytes": _CACHE_BYTES, "read": "multi-get", "bytes": tree_bytes(self.path),
        }  # fmt: skip

    def read(self, batch: Batch, newest: int | None, out: Out) -> int:
        """Fetch the stripes once, then copy every piece of every column in compiled calls."""
        pieces = self.stripes.pieces(batch, newest)
        found: Any = self.db.get([s.to_bytes(8, "big") for s in pieces.stripes.tolist()])
        buffer = np.frombuffer(b"".join(found), np.uint8)
        rows = self.stripes.stop[pieces.stripes] - self.stripes.start[pieces.stripes]
        begin = offsets_of(rows * self.data.row_bytes)[:-1][pieces.slot]
        copy, before = kernel("copy_ranges"), 0
        for name, values in self.data.columns.items():
            size = values.itemsize
            source = begin + before * rows[pieces.slot] + pieces.row * size
            bad = copy(buffer, source, pieces.length * size, out[name].view(np.uint8), pieces.at[:-1] * size)
            assert bad < 0
            before += size
        return int(pieces.at[-1])

    def close(self) -> None:
        """Close the database."""
        self.db.close()


class RocksDbPlain(RocksDb):
    """The same without compression, through a memory map: larger than the columns in memory, and faster."""

    name: ClassVar[str] = "rocksdb_plain"
    compression: ClassVar[str] = "none"
