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


class IcebergSource:
    """See the module."""

    reads_ahead = False

    def __init__(self, name: str, table: str | Path | Table) -> None:
        """``table``: a pyiceberg table, its folder (whose newest metadata is read), or one metadata file.

        Raises:
            InputError: it is no Iceberg table.
        """
        self.name = name
        self._place = table
        self._table = self._load()
        self._stored: str | None = None
        self._todo: list[Snapshot] = []
        self._batches: Iterator[tuple[pa.Table, int, str, int]] | None = None
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
            raise StoreError(f"snapshot {held} of {self._place}, up to which was read, is not there any more")
        self._todo = chain

    def read(self, max_events: int, timeout_s: float) -> Batch | None:
        """See ``Source``."""
        if not self._todo:
            if time.monotonic() - self._looked < _POLL_S:
                time.sleep(min(timeout_s, _POLL_S))
                return None
            self._look()
        while self._todo:
            snapshot = self._todo[0]
            held = self._stored
            if self._batches is None:
                self._batches = self._rows(snapshot, position(held))
            found = next(self._batches, None)
            if found is not None:
                return self._batch(held, snapshot, *found)
            self._batches = None
            self._todo.pop(0)
            self._stored = json.dumps({"files": 0, "snapshot": snapshot.snapshot_id}, sort_keys=True)
            return Batch(pa.table({}), {"": Move(held, self._stored)}, _no_origin)
        return None

    def _rows(self, snapshot: Snapshot, held: dict[str, Any]) -> Iterator[tuple[pa.Table, int, str, int]]:
        """Tables of the files that ``snapshot`` added, with the number of files read after each, and their names."""
        operation = "append" if snapshot.summary is None else snapshot.summary.operation.value
        first_of_all = held.get("snapshot") is None
        if operation == "replace" and not first_of_all:
            return
        if operation not in ("append", "replace"):
            raise StoreError(
                f"snapshot {snapshot.snapshot_id} of {self._place} is of kind {operation}: it takes rows away, and "
                "events are not taken away by a source; correct them by events that supersede, or erase them"
            )
        done = held.get("files", 0) if held.get("next") == snapshot.snapshot_id else 0
        for number, file in enumerate(self._new_files(snapshot, everything=first_of_all)):
            if number < done:
                continue
            scan = ArrowScan(self._table.metadata, self._table.io, self._table.schema(), AlwaysTrue())
            yield scan.to_table([FileScanTask(file)]), number + 1, file.file_path, snapshot.snapshot_id

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

    def _batch(
        self, held: str | None, snapshot: Snapshot, table: pa.Table, files: int, path: str, number: int
    ) -> Batch:
        before = position(held).get("snapshot")
        after = {"snapshot": before, "next": snapshot.snapshot_id, "files": files}
        self._stored = json.dumps(after, sort_keys=True)
        plain, name = table, path.rpartition("/")[2]

        def origin(row: int) -> Origin:
            event = plain.slice(row, 1).to_pylist()[0]
            where = json.dumps({"snapshot": number, "file": name, "row": row}, sort_keys=True)
            return Origin("", where, json.dumps(event, default=str).encode())

        if SOURCE_ID in self._added:
            table = table.append_column(
                SOURCE_ID, pa.array([f"{name}#{i}" for i in range(table.num_rows)], pa.string())
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
        return not self._todo

    def lag(self) -> int | None:
        """Snapshots that were not read."""
        return len(self._todo)

    def close(self) -> None:
        """Nothing is open."""


def _version(path: Path) -> tuple[int, float]:
    number = re.match(r"v?(\d+)", path.name)
    return (int(number[1]) if number else -1), path.stat().st_mtime


def _no_origin(row: int) -> Origin:
    raise AssertionError(f"a batch without rows was asked for row {row}")
