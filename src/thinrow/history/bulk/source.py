"""What a bulk load reads: tables, streams and files, in chunks that know where they come from.

Worked example: ``open_source("logs/")`` finds ``a.parquet`` of 500,000 rows and ``b.parquet`` of 300,000, in order.
``chunks(after=600_000)`` begins with row 100,000 of ``b.parquet``: a load that was killed reads on where its last run
ended. A stream cannot be asked for its middle: it has no ``identity`` and its load begins anew.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thinrow.core.errors import InputError

#: Everything that ``open_source`` takes.
BulkInput: TypeAlias = "pa.Table | pa.RecordBatchReader | Iterable[pa.RecordBatch] | str | Path | Sequence[str | Path]"

CHUNK_ROWS = 1 << 18
_SUFFIXES = (".parquet", ".arrow", ".arrows", ".feather", ".ipc")
#: The length that begins an Arrow IPC stream.
_STREAM = b"\xff\xff\xff\xff"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one file (or of the whole input): ``name`` says which, ``first_row`` the number of the first there."""

    table: pa.Table
    name: str
    first_row: int


class Source(Protocol):
    """An input that is read once from some row on."""

    @property
    def identity(self) -> str | None:
        """What tells this input from every other; None where nothing does."""
        ...

    @property
    def about(self) -> dict[str, Any]:
        """What is known of this input before it is read, as JSON: files, sizes and times, or columns of a stream."""
        ...

    @property
    def n_rows(self) -> int | None:
        """Rows in all, where that is known before."""
        ...

    def chunks(self, after: int, columns: Sequence[str], rows: int) -> Iterator[Chunk]:
        """Everything after the first ``after`` rows, ``rows`` at a time; of wide files only ``columns`` need be read.

        Raises:
            InputError: a file is missing, damaged or of another kind.
        """
        ...


def open_source(source: Any) -> Source:
    """The source behind a table, a reader, an iterable of record batches, a path, a folder, a pattern, several paths.

    Raises:
        InputError: it is none of these, or no file is there.
    """
    if isinstance(source, pa.Table):
        return TableSource(source)
    if isinstance(source, (str, Path)):
        return FileSource(_files([source]))
    if isinstance(source, Sequence) and source and all(isinstance(s, (str, Path)) for s in source):
        return FileSource(_files(source))
    if isinstance(source, (pa.RecordBatchReader, Iterable)) and not isinstance(source, (dict, bytes)):
        return StreamSource(iter(source), source.schema if isinstance(source, pa.RecordBatchReader) else None)
    raise InputError(
        f"events are a {type(source).__name__}; pass a pyarrow.Table, a RecordBatchReader, record batches, or paths of "
        "Parquet or Arrow files"
    )


class TableSource:
    """A table in memory."""

    identity: str | None = None

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.n_rows: int | None = table.num_rows
        self.about = _stream(table.schema)

    def chunks(self, after: int, columns: Sequence[str], rows: int) -> Iterator[Chunk]:
        """See ``Source.chunks``. An empty table is one chunk, so that its columns are checked."""
        for at in range(after, max(self._table.num_rows, 1), rows):
            yield Chunk(self._table.slice(at, rows), "", at)


class StreamSource:
    """Record batches that come once."""

    identity: str | None = None
    n_rows: int | None = None

    def __init__(self, batches: Iterator[Any], schema: pa.Schema | None = None) -> None:
        self._batches = batches
        self.about = _stream(schema)

    def chunks(self, after: int, columns: Sequence[str], rows: int) -> Iterator[Chunk]:
        """See ``Source.chunks``."""
        assert after == 0, "a stream is read from its begin"
        at = 0
        for batch in self._batches:
            if not isinstance(batch, (pa.RecordBatch, pa.Table)):
                raise InputError(f"the stream gave a {type(batch).__name__}; it must give pyarrow record batches")
            table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
            for first in range(0, table.num_rows, rows):
                yield Chunk(table.slice(first, rows), "", at + first)
            at += table.num_rows


class FileSource:
    """Parquet and Arrow IPC files, one after another."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the number of rows of every file. Raises InputError."""
        self._paths = paths
        self._rows = [_count(path) for path in paths]
        self.n_rows: int | None = sum(self._rows)
        stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
        self.identity: str | None = hashlib.sha256(repr(stats).encode()).hexdigest()[:32]
        self.about: dict[str, Any] = {"files": [list(s) for s in stats]}

    def chunks(self, after: int, columns: Sequence[str], rows: int) -> Iterator[Chunk]:
        """See ``Source.chunks``."""
        for path, n_rows in zip(self._paths, self._rows, strict=True):
            if after >= n_rows:
                after -= n_rows
                continue
            for first, table in _tables(path, after, columns, rows):
                yield Chunk(table, str(path), first)
            after = 0


def _stream(schema: pa.Schema | None) -> dict[str, Any]:
    """A table, too, is of no use from its middle, and read from its begin."""
    return {"columns": None if schema is None else [[f.name, str(f.type)] for f in schema]}


def difference(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What tells the input ``now`` from the one that a load was begun with, both as ``Source.about``; None where
    nothing does."""
    if begun.keys() != now.keys():
        kinds = ["files" if "files" in about else "a stream or table" for about in (begun, now)]
        return f"that was {kinds[0]}, this is {kinds[1]}"
    if "files" not in now:
        old, new = begun["columns"], now["columns"]
        if old == new or old is None or new is None:
            return None
        return f"its columns were {_shown(old)}; now they are {_shown(new)}"
    before, after = ({path: (size, ns) for path, size, ns in about["files"]} for about in (begun, now))
    for path in (*before, *after):
        if path not in after:
            return f"{path} was one of its files, and is none now"
        if path not in before:
            return f"{path} is new among its files"
        if before[path] != after[path]:
            (size, ns), (new_size, new_ns) = before[path], after[path]
            return f"{path} had {size} bytes, changed {_time(ns)}; now it has {new_size}, changed {_time(new_ns)}"
    return None if begun["files"] == now["files"] else f"its {len(after)} files come in another order now"


def _shown(columns: list[list[str]]) -> str:
    return ", ".join(f"{name} ({dtype})" for name, dtype in columns) or "none"


def _time(ns: int) -> str:
    return str(np.datetime64(ns, "ns"))


def arrow_schema(sources: Sequence[str | Path]) -> pa.Schema:
    """Columns of the first of the files that ``open_source`` would read. Raises InputError."""
    path = _files(sources)[0]
    kind = _kind(path)
    try:
        if kind == b"PAR1":
            return pq.read_schema(path)
        with pa.OSFile(str(path)) as source:
            return (pa.ipc.open_stream if kind == _STREAM else pa.ipc.open_file)(source).schema
    except (pa.ArrowException, OSError) as e:
        raise _unreadable(path, e) from e


def _files(sources: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            members = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and not _hidden(p, path))
            if not members:
                raise InputError(f"{path} holds no file that ends in {', '.join(_SUFFIXES)}; check the path")
            found += members
        elif path.is_file():
            found.append(path)
        else:
            members = [Path(p) for p in sorted(glob.glob(str(source), recursive=True)) if Path(p).is_file()]
            if not members:
                raise InputError(f"no file at {source}; check the path")
            found += members
    return found


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.relative_to(root).parts)


def _kind(path: Path) -> bytes:
    with path.open("rb") as source:
        begin = source.read(6)
    if not begin:
        raise InputError(f"{path} is empty (0 bytes); it must be a Parquet or Arrow IPC file")
    for kind in (b"PAR1", b"ARROW1", _STREAM):
        if begin.startswith(kind):
            return kind
    raise InputError(f"{path} is neither Parquet nor Arrow IPC (it begins with {begin!r}); convert it first")


def _unreadable(path: Path, error: Exception) -> InputError:
    reason = str(error).partition("\n")[0][:200]
    return InputError(f"{path} cannot be read as Parquet or Arrow: {reason}; write the file again")


def _count(path: Path) -> int:
    kind = _kind(path)
    try:
        if kind == b"PAR1":
            return int(pq.read_metadata(path).num_rows)
        return sum(batch.num_rows for batch in _ipc_batches(path, kind))
    except (pa.ArrowException, OSError) as e:
        raise _unreadable(path, e) from e


def _tables(path: Path, after: int, columns: Sequence[str], rows: int) -> Iterator[tuple[int, pa.Table]]:
    """(number of the first row, rows) after the first ``after`` rows of a file."""
    try:
        kind = _kind(path)
        if kind == b"PAR1":
            yield from _parquet(path, after, columns, rows)
            return
        at = 0
        for batch in _ipc_batches(path, kind):
            skip = min(max(after - at, 0), batch.num_rows)
            for first in range(skip, batch.num_rows, rows):
                yield at + first, pa.Table.from_batches([batch.slice(first, rows)])
            at += batch.num_rows
    except (pa.ArrowException, OSError) as e:
        raise _unreadable(path, e) from e


def _parquet(path: Path, after: int, columns: Sequence[str], n_rows: int) -> Iterator[tuple[int, pa.Table]]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        # Where a column is missing all are read, so that the message can say which there are.
        wanted = list(columns) if set(columns) <= set(names) else None
        at = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if at + rows <= after:
                at += rows
                continue
            for batch in file.iter_batches(n_rows, [group], columns=wanted, use_threads=False):
                skip = min(max(after - at, 0), batch.num_rows)
                if skip < batch.num_rows:
                    yield at + skip, pa.Table.from_batches([batch.slice(skip)])
                at += batch.num_rows


def _ipc_batches(path: Path, kind: bytes) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(path)) as source:
        if kind == _STREAM:
            with pa.ipc.open_stream(source) as stream:
                yield from stream
            return
        with pa.ipc.open_file(source) as file:
            for i in range(file.num_record_batches):
                yield file.get_batch(i)
