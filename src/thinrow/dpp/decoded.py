"""Decoded rows of a table in files that all its readers on a machine share: workers, sessions, epochs, other jobs.

A file holds one row group as it is after Parquet: an Arrow file, mapped, behind a head with a CRC over all of it. It is
found by a hash of all that decides what is in it: table, snapshot, bucket, which rows. Nothing there is ever the only
copy, so that a file that is damaged or missing is made again, and a disk that refuses costs the caching alone.

An erasure removes the folder (``ExampleTable.rewrite``). A reader of the snapshot before it may put a file there
afterwards: it asks for a successor when it has, and takes the file away.
"""

from __future__ import annotations

import hashlib
import os
import struct
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.examples.table import ExampleTable
from thinrow.kernels import kernel

#: Changes with what is in a file.
_FORMAT = 1
#: Magic, CRC of what follows, zeros to a multiple of 64 bytes.
_HEAD = struct.Struct("<8sI52x")
_MAGIC = b"TRROWS\0\1"


class DecodedRows:
    """Args:
    folder: of this cache alone; made when something is put there.
    max_bytes: of all files; those that were not read for longest go first.

    Raises:
        InputError: ``max_bytes`` is negative.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        if max_bytes < 0:
            raise InputError(f"cache_bytes={max_bytes}; it must be 0 (nothing is kept) or more")
        self.folder, self.max_bytes = folder, max_bytes

    @staticmethod
    def key(table: ExampleTable, snapshot_id: int, bucket: int, start: int, stop: int, rows: object) -> str:
        """Names a row group: rows ``[start, stop)`` of a bucket, or of them those at ``rows``."""
        kept = b"" if rows is None else np.asarray(rows, np.int64).tobytes()
        what = _FORMAT, table.name, table.event_schema.schema_id, snapshot_id, bucket, start, stop, rows is None
        return hashlib.sha256(repr(what).encode() + kept).hexdigest()[:32]

    def get(self, key: str) -> pa.Table | None:
        """The rows; None where they are not there, or not whole."""
        path = self.folder / key
        try:
            with pa.memory_map(str(path)) as file:
                data = file.read_buffer()
            os.utime(path)
        except OSError:
            return None
        if len(data) > _HEAD.size:
            body = data.slice(_HEAD.size)
            magic, crc = _HEAD.unpack(data.slice(0, _HEAD.size))
            if magic == _MAGIC and int(kernel("crc32c")(np.frombuffer(body, np.uint8), 0)) == crc:
                return pa.ipc.open_file(body).read_all()
        path.unlink(missing_ok=True)
        return None

    def put(self, key: str, rows: pa.Table) -> Path | None:
        """Keep the rows; where they are, or None where they are not kept."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows)
        body = sink.getvalue()
        if len(body) + _HEAD.size > self.max_bytes:
            return None
        path, part = self.folder / key, self.folder / f".{uuid.uuid4().hex}"
        try:
            self.folder.mkdir(exist_ok=True)
            self._make_room(len(body) + _HEAD.size)
            with open(part, "wb") as file:
                file.write(_HEAD.pack(_MAGIC, int(kernel("crc32c")(np.frombuffer(body, np.uint8), 0))))
                file.write(body)
            os.replace(part, path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            return None
        return path

    def _make_room(self, size: int) -> None:
        found = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                found.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        total = sum(n for _, n, _ in found)
        for _, n, path in sorted(found):
            if total + size <= self.max_bytes:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= n
