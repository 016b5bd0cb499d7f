"""Data files of the training table: Parquet written so that a crash leaves no torn file behind a commit.

pyiceberg writes data files without fsync and in the order given; a commit in the (durable) SQLite catalog could then
outlive its files in a power cut. So files are written here: synced before the commit, with a checksum a page, rows
sorted, and their statistics handed to pyiceberg.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Sequence
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

#: Rows of a row group: the unit of a partial read of a bucket.
ROW_GROUP_ROWS = 4_096
ZSTD_LEVEL = 3
_GROWING = {
    *("request_id", "user_id", "request_ts"),
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


def sync_directory(path: str | Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: str | Path) -> None:
    """Make a file and its name durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(Path(path).parent)


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
        sync_file(self._path)


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
        is_list = pa.types.is_large_list(field.type)
        path = f"{field.name}.list.element" if is_list else field.name
        kind = field.type.value_type if is_list else field.type
        if field.name in _GROWING and pa.types.is_integer(kind):
            encoding[path] = "DELTA_BINARY_PACKED"
        else:
            dictionary.append(path)
    return {"use_dictionary": dictionary, "column_encoding": encoding}


def write_data_file(table: pa.Table, metadata: TableMetadata, bucket: int, sort_order_id: int) -> DataFile:
    """Write sorted rows of one bucket as a durable Parquet file under the table's location.

    The file belongs to the table once the returned record is committed.
    """
    folder = f"{metadata.location.rstrip('/')}/data/user_id_bucket={bucket}"
    location = f"{folder}/{uuid.uuid4().hex}.parquet"
    path = Path(local_path(location))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with pq.ParquetWriter(
            path,
            table.schema,
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            write_page_checksum=True,
            **_encodings(table.schema),
        ) as writer:
            writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        sync_file(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    schema = metadata.schema()
    statistics = data_file_statistics_from_parquet_metadata(
        parquet_metadata=writer.writer.metadata,
        stats_columns=compute_statistics_plan(schema, metadata.properties),
        parquet_column_mapping=parquet_path_to_id_mapping(schema),
    )
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=location,
        file_format=FileFormat.PARQUET,
        partition=Record(bucket),
        file_size_in_bytes=path.stat().st_size,
        sort_order_id=sort_order_id,
        spec_id=metadata.default_spec_id,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )


def read_rows(file: StoredFile, schema: pa.Schema, names: Sequence[str] | None, start: int, stop: int) -> pa.Table:
    """Rows ``[start, stop)`` of a data file, in stored order; only the row groups that hold them are read.

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
            have = set(parquet.schema_arrow.names)
            wanted = [n for n in (schema.names if names is None else names) if n in have]
            table = parquet.read_row_groups(groups, columns=wanted, use_threads=False)
    except FileNotFoundError as e:
        raise ObjectNotFound(f"data file {path} is missing; restore it, or read another snapshot") from e
    except (pa.ArrowException, OSError) as e:
        raise CorruptionError(str(e).splitlines()[0], file=path) from e
    return table.slice(skip, stop - start).select(wanted)


def _row_groups(metadata: Any, start: int, stop: int) -> tuple[list[int], int]:
    groups, first, row = [], None, 0
    for g in range(metadata.num_row_groups):
        end = row + metadata.row_group(g).num_rows
        if row < stop and end > start:
            groups.append(g)
            first = row if first is None else first
        row = end
    return groups, start - (first or 0)
