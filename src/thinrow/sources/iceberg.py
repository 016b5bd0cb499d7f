"""The snapshots of an Iceberg table, one after another: what each appended, read once.

Worked example: the table stands at snapshot 3, whose parents are 2 and 1. The store's position is
``{"snapshot": 1, "files": 0}``: the data files that snapshot 2 added are read, then those of 3. After the second of the
three files of 3 the position is ``{"snapshot": 2, "next": 3, "files": 2}``.

Snapshots that only rearrange files (``replace``) add no events. One that deletes or overwrites rows cannot be followed:
a store's events are corrected by events (``supersedes``) or erased.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.exceptions import NoSuchTableError, ValidationError
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFileContent, ManifestEntryStatus
from pyiceberg.table import FileScanTask, StaticTable, Table
from pyiceberg.table.snapshots import Snapshot

from thinrow.core.errors import InputError, StoreError
from thinrow.schema import EventSchema
from thinrow.sources.source import SOURCE_ID, Batch, Move, Origin, Positions, position
from thinrow.sources.wanted import added_by_source

_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one file from ``first`` on; ``at`` is how far the snapshot is read after them."""

    table: pa.Table
    first: int
    at: dict[str, int]
    path: str


class IcebergSource:
    """See the module."""

    reads_ahead = False

    def __init__(self, name: str, table: str | Path | Table, begin: str = "earliest") -> None:
        """Args:
        table: a pyiceberg table, its folder (whose newest metadata is read), or one metadata file.
        begin: where no position is stored, "earliest" reads the whole table; "latest" what comes after its newest
            snapshot, and the number of a snapshot what comes after that.

        Raises:
            InputError: it is no Iceberg table, or ``begin`` is none of these.
        """
        if begin not in ("earliest", "latest") and not begin.isdecimal():
            raise InputError(f"begin={begin!r}; it must be earliest, latest or the number of a snapshot")
        self.name = name
        self._place, self._begin = table, begin
        self._table = self._load()
        self._stored: str | None = None
        self._todo: list[Snapshot] = []
        self._batches: Iterator[_Part] | None = None
        self._due: str | None = None
        self._looked = 0.0
        self._added: list[str] = []

    def _load(self) -> Table:
        if isinstance(self._place, Table):
            return self._place.refresh()
        place = Path(self._place)
        if place.is_dir():
            found = list((place / "metadata").glob("*.metadata.json"))
            if not found:
                raise InputError(f"{place} has no metadata/*.metadata.json; name the folder of an Iceberg table")
            place = max(found, key=_version)
        try:
            return StaticTable.from_metadata(str(place))
        except (OSError, ValueError, NoSuchTableError, ValidationError) as e:
            raise InputError(f"{place} is not the metadata of an Iceberg table: {e}; check the path") from e

    def start(self, schema: EventSchema, positions: Positions) -> None:
        """See ``Source``."""
        self.use(schema)
        self._stored = positions().get("")
        self._batches, self._todo = None, []
        self._look()

    def sample(self, n: int) -> pa.Table:
        """About ``n`` of the table's events; see ``sample.Sampled``."""
        return self._table.scan(limit=n).to_arrow()

    def use(self, schema: EventSchema) -> None:
        """See ``Source``."""
        self._added = added_by_source(schema)
        if set(self._added) - {SOURCE_ID}:
            raise InputError(f"a table has no {max(set(self._added) - {SOURCE_ID})}; name a column that it has")

    def _look(self) -> None:
        """Snapshots after the stored one, oldest first."""
        self._looked = time.monotonic()
        self._table = self._load()
        held = position(self._stored).get("snapshot")
        chain: list[Snapshot] = []
        snapshot = self._table.current_snapshot()
        if self._stored is None and self._begin != "earliest":
            # Of a table that is empty yet, all that comes is after that.
            latest = None if snapshot is None else snapshot.snapshot_id
            held = latest if self._begin == "latest" else int(self._begin)
            self._due = json.dumps({"files": 0, "snapshot": held}, sort_keys=True)
        while snapshot is not None and snapshot.snapshot_id != held:
            chain.insert(0, snapshot)
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
            if parent is not None and snapshot is None and held is not None:
                raise StoreError(
                    f"snapshot {held} of {self._place}, up to which was read, is not among the parents of the newest: "
                    "it expired, or the table was rolled back. To read all that the table holds, give the source "
                    "another name"
                )
        under_way = position(self._stored).get("next")
        if under_way is not None and (not chain or chain[0].snapshot_id != under_way):
            raise StoreError(f"snapshot {under_way} of {self._place}, of which a part was read, is not there any more")
        if held is not None and snapshot is None:
            if self._stored is None:
                raise InputError(f"begin={held}: {self._place} has no such snapshot among those before its newest")
            raise StoreError(f"snapshot {held} of {self._place}, up to which was read, is not there any more")
        self._todo = chain

    def read(self, max_events: int, timeout_s: float) -> Batch | None:
        """See ``Source``."""
        if self._due is not None:
            # Stored before anything is read, or "latest" would be another snapshot the next time.
            self._stored, self._due = self._due, None
            return Batch(pa.table({}), {"": Move(None, self._stored)}, _no_origin)
        if not self._todo:
            if time.monotonic() - self._looked < _POLL_S:
                time.sleep(min(timeout_s, _POLL_S))
                return None
            self._look()
        while self._todo:
            snapshot = self._todo[0]
            held = self._stored
            if self._batches is None:
                self._batches = self._rows(snapshot, position(held), max_events)
            found = next(self._batches, None)
            if found is not None:
                return self._batch(held, snapshot, found)
            self._batches = None
            self._todo.pop(0)
            self._stored = json.dumps({"files": 0, "snapshot": snapshot.snapshot_id}, sort_keys=True)
            return Batch(pa.table({}), {"": Move(held, self._stored)}, _no_origin)
        return None

    def _rows(self, snapshot: Snapshot, held: dict[str, Any], max_events: int) -> Iterator[_Part]:
        """The files that ``snapshot`` added, in parts of ``max_events`` rows."""
        operation = "append" if snapshot.summary is None else snapshot.summary.operation.value
        first_of_all = held.get("snapshot") is None
        if operation == "replace" and not first_of_all:
            return
        if operation not in ("append", "replace"):
            raise StoreError(
                f"snapshot {snapshot.snapshot_id} of {self._place} is of kind {operation}: it takes rows away, and "
                "events are not taken away by a source; correct them by events that supersede, or erase them. To read "
                f"what comes after it, under another name: iceberg:FOLDER?begin={snapshot.snapshot_id}"
            )
        under_way = held.get("next") == snapshot.snapshot_id
        done, rows = (held.get("files", 0), held.get("rows", 0)) if under_way else (0, 0)
        for number, file in enumerate(self._new_files(snapshot, everything=first_of_all)):
            if number < done:
                continue
            scan = ArrowScan(self._table.metadata, self._table.io, self._table.schema(), AlwaysTrue())
            table = scan.to_table([FileScanTask(file)])
            for first in range(rows, table.num_rows, max_events):
                part = table.slice(first, max_events)
                whole = first + part.num_rows == table.num_rows
                at = {"files": number + 1} if whole else {"files": number, "rows": first + part.num_rows}
                yield _Part(part, first, at, file.file_path)
            rows = 0

    def _new_files(self, snapshot: Snapshot, *, everything: bool) -> list[Any]:
        found = []
        for manifest in snapshot.manifests(self._table.io):
            if not everything and manifest.added_snapshot_id != snapshot.snapshot_id:
                continue
            for entry in manifest.fetch_manifest_entry(self._table.io, discard_deleted=True):
                if entry.data_file.content != DataFileContent.DATA:
                    raise StoreError(f"snapshot {snapshot.snapshot_id} has files of deletes; they cannot be followed")
                if everything or (
                    entry.status == ManifestEntryStatus.ADDED and entry.snapshot_id in (None, snapshot.snapshot_id)
                ):
                    found.append(entry.data_file)
        return sorted(found, key=lambda f: f.file_path)

    def _batch(self, held: str | None, snapshot: Snapshot, part: _Part) -> Batch:
        before = position(held).get("snapshot")
        after = {"snapshot": before, "next": snapshot.snapshot_id, **part.at}
        self._stored = json.dumps(after, sort_keys=True)
        plain, table, first = part.table, part.table, part.first
        name = _below(part.path, self._table.location())

        def origin(row: int) -> Origin:
            event = plain.slice(row, 1).to_pylist()[0]
            at = {"snapshot": snapshot.snapshot_id, "file": name, "row": first + row}
            where = json.dumps(at, sort_keys=True)
            return Origin("", where, json.dumps(event, default=str).encode())

        if SOURCE_ID in self._added:
            table = table.append_column(
                SOURCE_ID, pa.array([f"{name}#{first + i}" for i in range(table.num_rows)], pa.string())
            )
        return Batch(
            table,
            {"": Move(held, self._stored)},
            origin,
            n_bytes=table.nbytes,
            made_of_messages=False,
            how={"format": "json"},
        )

    def acknowledge(self, batch: Batch) -> None:
        """Nobody is to be told."""

    def ended(self) -> bool:
        """See ``Source``."""
        return not self._todo and self._due is None

    def lag(self) -> int | None:
        """Snapshots that were not read."""
        return len(self._todo)

    def close(self) -> None:
        """Nothing is open."""


def _below(path: str, location: str) -> str:
    """A file's path below its table: the base name alone may be that of many files, as of Hive partitions."""
    folder = f"{location.rstrip('/')}/"
    return path.removeprefix(folder) if path.startswith(folder) else path


def _version(path: Path) -> tuple[int, float]:
    number = re.match(r"v?(\d+)", path.name)
    return (int(number[1]) if number else -1), path.stat().st_mtime


def _no_origin(row: int) -> Origin:
    raise AssertionError(f"a batch without rows was asked for row {row}")
