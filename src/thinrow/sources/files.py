"""Files and folders of events: Parquet, Arrow IPC, JSON lines, CSV; new files, and new lines of text files.

Worked example: ``logs/`` holds ``a.jsonl`` (read up to byte 1,000) and ``b.parquet`` (read whole)::

    a.jsonl     {"bytes": 1000, "size": 1000}
    b.parquet   {"rows": 5000, "size": 81234}

A partition is a file, so that a file that comes late is read whatever its name. Lines that are appended to ``a.jsonl``
are read from byte 1,000 on. A Parquet or Arrow file must come whole: written under another name and renamed, or under
one that begins with ``.`` or ``_`` or ends with ``.tmp`` until then.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from thinrow.core.errors import InputError, StoreError
from thinrow.schema import EventSchema
from thinrow.sources.lines import CsvLines, JsonLines, Lines
from thinrow.sources.source import (
    SOURCE_ID,
    SOURCE_KEY,
    SOURCE_TS,
    Batch,
    Move,
    Origin,
    Positions,
    Refused,
    position,
    position_text,
)
from thinrow.sources.wanted import Wanted, added_by_source, wanted_of

_TABLES = (".parquet", ".arrow", ".arrows", ".feather", ".ipc")
_LINES: dict[str, type[JsonLines] | type[CsvLines]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": JsonLines,
    ".csv": CsvLines,
    ".tsv": CsvLines,
}
#: A file that was written to in the last seconds may still be unfinished.
_SETTLE_S = 2.0
_POLL_S = 0.5
_CHUNK_BYTES = 4 << 20
#: The length that begins an Arrow IPC stream.
_STREAM = b"\xff\xff\xff\xff"


class FileSource:
    """See the module."""

    reads_ahead = False

    def __init__(self, name: str, paths: Sequence[str | Path], *, follow: bool = False) -> None:
        """Args:
        paths: files, and folders of which all files count, those below too.
        follow: a last line without an end is unfinished, and waited for.

        Raises:
            InputError: a path is not there, or of a kind that is not known.
        """
        self.name = name
        self._roots = [Path(p) for p in paths]
        self._follow = follow
        for root in self._roots:
            if not root.exists():
                raise InputError(f"no file or folder at {root}; check the path")
            if root.is_file() and root.suffix not in (*_TABLES, *_LINES):
                known = ", ".join((*_TABLES, *_LINES))
                raise InputError(f"{root} has none of the endings {known}; rename it, or convert it")
        folders = [p if p.is_dir() else p.parent for p in (root.absolute() for root in self._roots)]
        self._base = Path(os.path.commonpath(folders))
        self._stored: dict[str, str] = {}
        self._todo: list[tuple[str, Path]] = []
        self._tables: Iterator[tuple[pa.Table, int]] | None = None
        self._readers: dict[str, Lines] = {}
        self._listed = 0.0
        self._wanted: Wanted = {}
        self._added: list[str] = []

    def start(self, schema: EventSchema, positions: Positions) -> None:
        """See ``Source``."""
        self.use(schema)
        self._stored = dict(positions())
        self._tables, self._readers, self._todo = None, {}, []
        files = sorted(self._files())
        self._refuse_other_base([partition for partition, _ in files])
        self._list(files)

    def sample(self, n: int) -> pa.Table:
        """About ``n`` of the first file's events; see ``sample.Sampled``. Raises InputError where there is none."""
        for _, path in sorted(self._files()):
            if path.suffix in _TABLES:
                table, _ = next(_tables(path, 0, n), (pa.table({}), 0))
                return table
            data, _ = _whole_lines(path, 0, _LINES[path.suffix].quotes, last_too=True)
            table = _LINES[path.suffix](path).decode(data, 0, None).table
            if table.num_rows:
                return table.slice(0, n)
        raise InputError(f"no events in {', '.join(map(str, self._roots))}; name a file or folder with some")

    def use(self, schema: EventSchema) -> None:
        """See ``Source``."""
        self._wanted, self._added = wanted_of(schema), added_by_source(schema)
        if SOURCE_KEY in self._added or SOURCE_TS in self._added:
            raise InputError(f"files have no {SOURCE_KEY} and no {SOURCE_TS}; name columns that they have")

    def _refuse_other_base(self, here: Sequence[str]) -> None:
        """Files that were read under other names, since another folder held all that was named then, would be read
        again."""
        if not self._stored.keys().isdisjoint(here):
            return
        for held in sorted(self._stored):
            now = next((p for p in here if p.endswith(f"/{held}") or held.endswith(f"/{p}")), None)
            if now is not None:
                raise InputError(
                    f"source {self.name!r} has read {held!r}, which is {now!r} now, below {self._base}: the "
                    "folder that holds all that is named; name what was named then, and read others under another name"
                )

    def _list(self, files: Sequence[tuple[str, Path]]) -> None:
        """Files with something that was not read."""
        self._listed = time.monotonic()
        self._todo = []
        for partition, path in files:
            stat, held = path.stat(), position(self._stored.get(partition))
            size = stat.st_size
            if held.get("bad"):
                if (size, stat.st_mtime_ns) != (held["size"], held.get("mtime_ns", stat.st_mtime_ns)):
                    self._todo.append((partition, path))
                continue
            if held and size < held["size"]:
                raise StoreError(
                    f"{path} has {size} bytes, and had {held['size']} when it was read: it was replaced, and of what "
                    "it holds now nobody can tell what is in the store; give new events a new name"
                )
            grown = not held or size > held.get("bytes", held["size"])
            if grown and held and path.suffix in _TABLES:
                raise StoreError(f"{path} has changed since it was read; give new events a file of their own")
            if grown or held.get("rows", 0) < held.get("of", 0):
                self._todo.append((partition, path))

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Partition and path of each; a partition is a path below the folder that holds them all."""
        for root in self._roots:
            if root.is_file():
                yield str(root.absolute().relative_to(self._base)), root
                continue
            for path in root.rglob("*"):
                hidden = any(part.startswith((".", "_")) for part in path.relative_to(root).parts)
                if path.suffix in (*_TABLES, *_LINES) and not hidden and path.is_file():
                    yield str(path.absolute().relative_to(self._base)), path

    def read(self, max_events: int, timeout_s: float) -> Batch | None:
        """See ``Source``."""
        if not self._todo and self._follow:
            if time.monotonic() - self._listed < _POLL_S:
                time.sleep(min(timeout_s, _POLL_S))
                return None
            self._list(sorted(self._files()))
        while self._todo:
            partition, path = self._todo[0]
            found = self._table(partition, path, max_events) if path.suffix in _TABLES else self._lines(partition, path)
            if found is not None:
                return found
            self._todo.pop(0)
        return None

    def _table(self, partition: str, path: Path, max_events: int) -> Batch | None:
        held = self._stored.get(partition)
        size = path.stat().st_size
        try:
            if self._tables is None:
                self._tables = _tables(path, position(held).get("rows", 0), max_events)
            table, of = next(self._tables, (None, 0))
        except (pa.ArrowException, OSError, InputError) as e:
            self._tables = None
            if isinstance(e, OSError) and e.errno is not None:
                # The disk, the network or the process is to blame, not what the file holds.
                raise StoreError(f"cannot read {path}: {e}; see to that, and run it again") from e
            return self._unreadable(partition, path, held, str(e))
        if table is None:
            self._tables = None
            if not position(held):
                return self._batch(partition, path, held, {"rows": 0, "of": 0, "size": size}, pa.table({}), 0)
            return None
        first = position(held).get("rows", 0)
        after = {"rows": first + table.num_rows, "of": of, "size": size}
        if after["rows"] >= of:
            self._tables = None
            self._todo.pop(0)
        return self._batch(partition, path, held, after, table, first)

    def _unreadable(self, partition: str, path: Path, held: str | None, why: str) -> Batch | None:
        """A file that is no such file is refused from its first row that cannot be read on; when it has changed it is
        read from there."""
        stat, rows = path.stat(), position(held).get("rows", 0)
        if self._follow and time.time() - stat.st_mtime < _SETTLE_S:
            return None
        at = {"rows": rows} if rows else {}
        after = position_text(bad=True, size=stat.st_size, mtime_ns=stat.st_mtime_ns, **at)
        self._stored[partition] = after
        self._todo.pop(0)
        reason = f"{path.name} cannot be read{f' beyond row {rows}' if rows else ''}: {why.splitlines()[0][:200]}"
        refused = [Refused(Origin(partition, after, None), reason)]
        return Batch(pa.table({}), {partition: Move(held, after)}, _no_origin, refused)

    def _batch(
        self, partition: str, path: Path, held: str | None, after: dict[str, Any], table: pa.Table, first: int
    ) -> Batch:
        text = json.dumps(after, sort_keys=True)
        self._stored[partition] = text
        if not table.num_rows:
            return Batch(pa.table({}), {partition: Move(held, text)}, _no_origin)
        plain = table

        def origin(row: int) -> Origin:
            event = plain.slice(row, 1).to_pylist()[0]
            payload = json.dumps(event, default=str).encode()
            return Origin(partition, json.dumps({"row": first + row}), payload)

        if SOURCE_ID in self._added:
            ids = pa.array([f"{path.absolute()}#{first + i}" for i in range(table.num_rows)], pa.string())
            table = table.append_column(SOURCE_ID, ids)
        moves = {partition: Move(held, text)}
        return Batch(table, moves, origin, n_bytes=table.nbytes, made_of_messages=False, how={"format": "json"})

    def _lines(self, partition: str, path: Path) -> Batch | None:
        held = self._stored.get(partition)
        at = position(held).get("bytes", 0)
        reader = self._readers.get(partition)
        if reader is None:
            reader = self._readers[partition] = _LINES[path.suffix](path)
        data, size = _whole_lines(path, at, reader.quotes, last_too=not self._follow)
        if not data:
            return None
        decoded = reader.decode(data, at, self._wanted)
        end = len(data) if data.endswith(b"\n") else _end_of_lines(data, reader.quotes)
        last = len(decoded.rows) + len(decoded.refused) - 1
        if end < len(data) and last in decoded.refused and reader.is_half(data[end:]):
            # Its writer may be at it, or was killed.
            warnings.warn(f"{path} ends within a line, which is read when it has an end", stacklevel=2)
            data = data[:end]
            if not data:
                return None
            decoded = reader.decode(data, at, self._wanted)
            size = at + len(data)
        text = json.dumps({"bytes": at + len(data), "size": max(size, at + len(data))}, sort_keys=True)
        self._stored[partition] = text
        if at + len(data) >= size:
            self._todo.pop(0)

        def origin(row: int) -> Origin:
            return Origin(partition, json.dumps({"bytes": at, "line": row}), reader.payload(data, row))

        table, rows = decoded.table, decoded.rows
        if SOURCE_ID in self._added:
            ids = pa.array([f"{path.absolute()}#{at}+{i}" for i in rows], pa.string())
            table = table.append_column(SOURCE_ID, ids)
        refused = [Refused(origin(row), why) for row, why in sorted(decoded.refused.items())]
        moves = {partition: Move(held, text)}
        return Batch(table, moves, lambda row: origin(rows[row]), refused, 0, len(data), how=reader.how)

    def acknowledge(self, batch: Batch) -> None:
        """Nobody is to be told."""

    def ended(self) -> bool:
        """See ``Source``."""
        return not self._todo

    def lag(self) -> int | None:
        """Files with something that was not read."""
        return len(self._todo)

    def close(self) -> None:
        """Let go of the open file."""
        self._tables = None


def _no_origin(row: int) -> Origin:
    raise AssertionError(f"a batch without rows was asked for row {row}")


def _whole_lines(path: Path, at: int, quotes: bool, *, last_too: bool) -> tuple[bytes, int]:
    """Lines from byte ``at`` on, some megabytes of them, and the size of the file; a line is never parted, nor a quoted
    value that holds the end of one."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(at)
        data = file.read(_CHUNK_BYTES)
        while True:
            at_end = at + len(data) >= size
            if at_end and last_too:
                return data, size
            end = _end_of_lines(data, quotes)
            if end or at_end:
                return data[:end], size
            more = file.read(_CHUNK_BYTES)
            if not more:
                return b"", size
            data += more


def _end_of_lines(data: bytes, quotes: bool) -> int:
    """Where the last whole line ends; with ``quotes``, one that ends outside of them."""
    end = data.rfind(b"\n") + 1
    while quotes and data.count(b'"', 0, end) % 2:
        end = data.rfind(b"\n", 0, end - 1) + 1
    return end


def _tables(path: Path, after: int, rows: int) -> Iterator[tuple[pa.Table, int]]:
    """Tables of about ``rows`` rows, from row ``after`` on, and how many rows the file has."""
    with path.open("rb") as file:
        begin = file.read(6)
    if begin.startswith(b"PAR1"):
        yield from _parquet(path, after, rows)
    elif begin == b"ARROW1" or begin.startswith(_STREAM):
        with pa.memory_map(str(path)) as source:
            opened = pa.ipc.open_file(source) if begin == b"ARROW1" else pa.ipc.open_stream(source)
            table = opened.read_all()
            for first in range(after, table.num_rows, rows):
                yield table.slice(first, rows), table.num_rows
    else:
        raise InputError(f"it is neither Parquet nor Arrow IPC: it begins with {begin!r}")


def _parquet(path: Path, after: int, rows: int) -> Iterator[tuple[pa.Table, int]]:
    with pq.ParquetFile(path) as file:
        total, groups, skip = file.metadata.num_rows, list(range(file.num_row_groups)), after
        while groups and skip >= file.metadata.row_group(groups[0]).num_rows:
            skip -= file.metadata.row_group(groups.pop(0)).num_rows
        for batch in file.iter_batches(rows, row_groups=groups) if groups else ():
            table = pa.Table.from_batches([batch])
            if skip >= table.num_rows:
                skip -= table.num_rows
                continue
            yield table.slice(skip), total
            skip = 0
