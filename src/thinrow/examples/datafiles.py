"""Data files of the training table: Parquet written so that a crash leaves no torn file behind a commit.

pyiceberg writes data files without fsync and in the order given; a commit in the (durable) SQLite catalog could then
outlive its files in a power cut. So files are written here: synced before the commit, with a checksum a page, rows
sorted, and their statistics handed to pyiceberg.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import OutputStream
from pyiceberg.io.pyarrow import (
    PyArrowFile,
    PyArrowFileIO,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record

from thinrow.core.errors import CorruptionError, ObjectNotFound
from thinrow.examples.layout import HIDE_FIELDS, VERSION_FIELDS
from thinrow.storage.objects import sync_directory

#: Rows of a row group: the unit of a partial read of a bucket.
ROW_GROUP_ROWS = 4_096
ZSTD_LEVEL = 3
_GROWING = {
    *("request_id", "user_id", "request_ts", "event_ts", "arrival"),
    *(f"v_{n}" for n in VERSION_FIELDS if n != "checksum"),
    *("recent_event_ts", "recent_arrival"),
    *(f"hide_{n}" for n in HIDE_FIELDS),
}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A live data file: its ``bucket``, ``path``, ``rows``, ``bytes``, whether its rows are ``sorted``, and pyiceberg's
    record of it."""

    bucket: int
    path: str
    rows: int
    bytes: int
    sorted: bool
    record: DataFile


def local_path(location: str) -> str:
    """The path of a ``file:`` URI, or the path itself."""
    return unquote(urlsplit(location).path) if location.startswith("file:") else location


def _sync(path: str | Path) -> None:
    """Make the content of a file durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _SyncedStream(io.BufferedWriter):
    """A new local file that is durable once closed."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        super().__init__(io.FileIO(path, "w"))

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        _sync(self._path)
        sync_directory(Path(self._path).parent)


class _SyncedFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        if not overwrite and self.exists():
            raise FileExistsError(f"{self.location} is there already")
        return cast(OutputStream, _SyncedStream(self._path))


class SyncedFileIO(PyArrowFileIO):
    """pyiceberg's file access, with every local file that it writes (manifests, metadata) synced when closed."""

    def new_output(self, location: str) -> PyArrowFile:
        scheme, netloc, path = self.parse_location(location, self.properties)
        if scheme != "file":
            return super().new_output(location)
        return _SyncedFile(fs=self.fs_by_scheme(scheme, netloc), location=location, path=path)


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    """Dictionaries for all but times, ids and arrival numbers, which grow within a user: those as deltas."""
    dictionary, encoding = [], {}
    for field in schema:
        path, kind = field.name, field.type
        while pa.types.is_large_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        if field.name in _GROWING and (pa.types.is_integer(kind) or pa.types.is_timestamp(kind)):
            encoding[path] = "DELTA_BINARY_PACKED"
        else:
            dictionary.append(path)
    return {"use_dictionary": dictionary, "column_encoding": encoding}


class DataFileWriter:
    """Writes the data files of one commit: ``write`` each, ``sync`` all, then commit; or ``discard`` them."""

    def __init__(self, metadata: TableMetadata) -> None:
        schema = metadata.schema()
        self._folder = f"{metadata.location.rstrip('/')}/data"
        self._schema = schema.as_arrow()
        self._encodings = _encodings(self._schema)
        self._statistics = compute_statistics_plan(schema, metadata.properties)
        self._field_ids = parquet_path_to_id_mapping(schema)
        self._spec_id, self._sort_order_id = metadata.default_spec_id, metadata.default_sort_order_id
        self._paths: list[Path] = []

    def write(self, rows: pa.Table, bucket: int) -> DataFile:
        """Write sorted rows of one bucket; durable after ``sync``, the table's once the result is committed."""
        return self.write_parts([rows], bucket, ROW_GROUP_ROWS)

    def write_parts(self, parts: Iterable[pa.Table], bucket: int, row_group_rows: int) -> DataFile:
        """``write`` of rows that come in parts, each cut into row groups of at most so many rows."""
        location = f"{self._folder}/{bucket:05d}-{uuid.uuid4().hex}.parquet"
        path = Path(local_path(location))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._paths.append(path)
        with pq.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            write_page_checksum=True,
            **self._encodings,
        ) as writer:
            for rows in parts:
                writer.write_table(rows.select(self._schema.names).cast(self._schema), row_group_size=row_group_rows)
        statistics = data_file_statistics_from_parquet_metadata(
            parquet_metadata=writer.writer.metadata,
            stats_columns=self._statistics,
            parquet_column_mapping=self._field_ids,
        )
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=location,
            file_format=FileFormat.PARQUET,
            partition=Record(bucket),
            file_size_in_bytes=path.stat().st_size,
            sort_order_id=self._sort_order_id,
            spec_id=self._spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    def sync(self) -> None:
        """Make all files and their names durable."""
        if not self._paths:
            return
        # Side by side, so that the file system may put them into one journal commit.
        with ThreadPoolExecutor(min(16, len(self._paths))) as pool:
            list(pool.map(_sync, self._paths))
        sync_directory(self._paths[0].parent)

    def discard(self) -> None:
        """Delete the files, which no commit names."""
        for path in self._paths:
            path.unlink(missing_ok=True)


def read_rows(file: StoredFile, ids: Mapping[str, int], names: Sequence[str], start: int, stop: int) -> pa.Table:
    """Rows ``[start, stop)`` of a data file, in stored order; only the row groups that hold them are read.

    Columns are found by Iceberg field id (``ids``: name -> id), whatever name they had when the file was written; those
    that the file lacks are left out.

    Raises:
        ObjectNotFound: the file is missing.
        CorruptionError: the file is not what was written.
    """
    path = local_path(file.path)
    try:
        if os.path.getsize(path) != file.bytes:
            raise CorruptionError(f"{os.path.getsize(path)} bytes, {file.bytes} were written", file=path)
        with pq.ParquetFile(path, page_checksum_verification=True, memory_map=True) as parquet:
            groups, skip = _row_groups(parquet.metadata, start, stop)
            have = {_field_id(f): f.name for f in parquet.schema_arrow}
            wanted = [n for n in names if ids[n] in have]
            stored = [have[ids[n]] for n in wanted]
            table = parquet.read_row_groups(groups, columns=stored, use_threads=False)
    except FileNotFoundError as e:
        raise ObjectNotFound(f"data file {path} is missing; restore it, or read another snapshot") from e
    except (pa.ArrowException, OSError) as e:
        raise CorruptionError(str(e).splitlines()[0], file=path) from e
    return table.slice(skip, stop - start).select(stored).rename_columns(wanted)


def _field_id(field: pa.Field) -> int:
    return int((field.metadata or {}).get(b"PARQUET:field_id", -1))


def _row_groups(metadata: Any, start: int, stop: int) -> tuple[list[int], int]:
    groups, first, row = [], None, 0
    for g in range(metadata.num_row_groups):
        end = row + metadata.row_group(g).num_rows
        if row < stop and end > start:
            groups.append(g)
            first = row if first is None else first
        row = end
    return groups, start - (first or 0)
