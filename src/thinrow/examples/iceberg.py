"""What the training table looks like to Iceberg: catalog, schema, properties, and what its metadata names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import (
    BinaryType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
)
from sqlalchemy.exc import OperationalError

from thinrow.core.errors import (
    CommitConflict,
    CorruptionError,
    InputError,
    NewerFormatError,
    ObjectNotFound,
    SchemaError,
    StoreError,
)
from thinrow.examples.datafiles import StoredFile, local_path
from thinrow.examples.layout import StoredField
from thinrow.schema.event_schema import EventSchema

FORMAT = 1
NAMESPACE = "thinrow"
#: Stored order of a clustered bucket.
SORT_COLUMNS = ("user_id", "request_ts", "request_id")
#: Key of a snapshot's summary that holds what the outcome join has done up to that snapshot.
JOIN_STATE = "thinrow.join"
#: The state of a table to which nothing was joined; written, so that its absence tells another engine's snapshot.
NO_STATE = "{}"
#: Table property that is set once a join was committed.
JOINED = "thinrow.joined"

_SYNTAX = "#?%;"
_ICEBERG_TYPES: dict[str, PrimitiveType] = {
    "int8": IntegerType(),
    "int16": IntegerType(),
    "int32": IntegerType(),
    "int64": LongType(),
    "float32": FloatType(),
    "float64": DoubleType(),
    "string": StringType(),
    "binary": BinaryType(),
}
TABLE_PROPERTIES = {
    "write.parquet.compression-codec": "zstd",
    "write.parquet.compression-level": "3",
    "write.metadata.metrics.default": "none",
    **{f"write.metadata.metrics.column.{c}": "full" for c in SORT_COLUMNS},
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "3",
    # A conflicting commit must fail: pyiceberg's retry would append what another joiner has just appended.
    "commit.retry.num-retries": "0",
}


def open_catalog(root: Path) -> SqlCatalog:
    """The catalog of the table directory ``root``.

    Raises:
        InputError: the path holds a character that Iceberg locations and SQLite URLs read as syntax.
    """
    root = root.absolute()
    strange = [c for c in _SYNTAX if c in str(root)]
    if strange:
        raise InputError(f"{root} holds {strange[0]!r}, which Iceberg takes for syntax; choose a path without it")
    return SqlCatalog(
        "thinrow",
        uri=f"sqlite:///{root / 'catalog.db'}",
        # Not as_uri(): pyiceberg takes the location as it stands, so a quoted space would name another directory.
        warehouse=f"file://{root}/warehouse",
        **{"py-io-impl": "thinrow.examples.datafiles.SyncedFileIO"},
    )


@contextmanager
def mapped_errors(name: str, path: Path) -> Iterator[None]:
    """What a commit to table ``name`` under ``path`` may be refused for, as CommitConflict and StoreError."""
    room = "nothing was committed; free space or check permissions, and run again"
    try:
        yield
    except (CommitFailedException, ValidationException) as e:
        raise CommitConflict(f"another writer committed to table {name!r} first ({e}); run again") from e
    except OperationalError as e:
        if "full" in str(e.orig):
            raise StoreError(f"the catalog of {path} cannot be written: {e.orig}; {room}") from e
        raise CommitConflict(f"another writer holds the catalog of {path} ({e.orig}); run again") from e
    except FileNotFoundError:
        raise
    except OSError as e:
        raise StoreError(f"files of {path} cannot be written: {e}; {room}") from e


class FrugalTransaction(Transaction):
    """A transaction that copies the metadata once a change: pyiceberg's own does so at every look, 15 times an append,
    which was 40% of the time of small appends to a table of 60 snapshots."""

    _seen: tuple[object, TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        """The metadata with the changes so far; not to be modified."""
        if self._seen is None or self._seen[0] is not self._updates:
            self._seen = (self._updates, super().table_metadata)
        return self._seen[1]


def iceberg_schema(fields: Sequence[StoredField]) -> Schema:
    result, next_id = [], len(fields) + 1
    for number, f in enumerate(fields, 1):
        kind: PrimitiveType | ListType = _ICEBERG_TYPES[f.dtype]
        if f.ragged or f.size:
            kind = ListType(element_id=next_id, element_type=kind, element_required=True)
            next_id += 1
        if f.jagged:
            kind = ListType(element_id=next_id, element_type=kind, element_required=not f.nullable)
            next_id += 1
        result.append(NestedField(number, f.name, kind, required=f.jagged or not f.nullable))
    return Schema(*result)


def evolve_columns(tx: Transaction, old: EventSchema, new: EventSchema) -> None:
    """Change the columns of recent events from those of one event schema to those of a later one, by column id: Iceberg
    keeps a field's id when it is renamed, and data files are read by it."""
    before, after = ({c.id: c for c in s.columns} for s in (old, new))
    moved = [c for c in old.columns if c.id in after and after[c.id].name != c.name]
    with tx.update_schema(allow_incompatible_changes=True) as update:
        for c in old.columns:
            if c.id not in after:
                update.delete_column((f"recent_{c.name}",))
        # By way of names that nothing has, so that two columns may swap theirs.
        for c in moved:
            update.rename_column((f"recent_{c.name}",), f"moving {c.id}")
    with tx.update_schema() as update:
        for c in moved:
            update.rename_column((f"moving {c.id}",), f"recent_{after[c.id].name}")
    with tx.update_schema() as update:
        for c in new.columns:
            kind: PrimitiveType | ListType = _ICEBERG_TYPES[c.dtype]
            nested = c.ragged or c.size > 0
            if c.id in before:
                if kind != _ICEBERG_TYPES[before[c.id].dtype]:
                    path = (f"recent_{c.name}", "element", *["element"] * nested)
                    update.update_column(path, field_type=_ICEBERG_TYPES[c.dtype])
                continue
            if nested:
                kind = ListType(element_id=0, element_type=kind, element_required=True)
            column = ListType(element_id=0, element_type=kind, element_required=False)
            update.add_column((f"recent_{c.name}",), column)
    tx.set_properties({"thinrow.event_schema": new.to_json()})


def check_format(properties: Mapping[str, str], path: Path, name: str) -> None:
    text = properties.get("thinrow.format", "")
    if not text.isdigit():
        raise SchemaError(f"table {name!r} in {path} has thinrow.format={text!r}; it was not written by thinrow")
    if int(text) > FORMAT:
        raise NewerFormatError(
            f"table {name!r} in {path} has format {text}, this thinrow reads up to {FORMAT}; update it"
        )


def buckets_of(table: Table) -> int:
    fields = table.spec().fields
    if len(fields) != 1 or not isinstance(fields[0].transform, BucketTransform):
        raise SchemaError(f"table {table.name()} is partitioned by {table.spec()}; bucket[N](user_id) is needed")
    return fields[0].transform.num_buckets


def state_chain(table: Table) -> tuple[list[int], str | None]:
    """Snapshots from the newest back to the one that holds the join's state, and that state (None: no join ever).

    Snapshots of other engines lack it, so it is looked for in ancestors.

    Raises:
        StoreError: the snapshot that held the state was expired.
    """
    chain: list[int] = []
    snapshot = table.current_snapshot()
    while snapshot is not None:
        chain.append(snapshot.snapshot_id)
        summary: Any = snapshot.summary
        state = None if summary is None else summary.additional_properties.get(JOIN_STATE)
        if state is not None:
            return chain, state
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else table.snapshot_by_id(parent)
    if JOINED in table.properties:
        raise StoreError(
            f"table {table.name()} was joined, but the snapshots that tell what was joined were expired by another "
            f"engine; roll back to a snapshot whose summary has {JOIN_STATE!r}"
        )
    return chain, None


def carried_state(table: Table) -> dict[str, str]:
    """The summary entry that passes the join's state on to the next snapshot. Raises as ``state_chain``."""
    return {JOIN_STATE: state_chain(table)[1] or NO_STATE}


def list_files(table: Table, snapshot: Snapshot) -> tuple[StoredFile, ...]:
    found = []
    try:
        for manifest in snapshot.manifests(table.io):
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                f = entry.data_file
                is_sorted = f.sort_order_id == table.sort_order().order_id
                file = StoredFile(int(f.partition[0]), f.file_path, f.record_count, f.file_size_in_bytes, is_sorted, f)
                found.append((file.bucket, entry.sequence_number or 0, file.path, file))
    except FileNotFoundError as e:
        raise ObjectNotFound(f"a manifest of snapshot {snapshot.snapshot_id} is missing: {e}; restore it") from e
    except (OSError, ValueError, EOFError, AssertionError, KeyError, IndexError, TypeError) as e:
        raise CorruptionError(f"unreadable manifest: {e}", file=str(snapshot.manifest_list)) from e
    return tuple(f for *_, f in sorted(found, key=lambda entry: entry[:3]))


def files_named(table: Table) -> set[str]:
    """Paths of every file that the metadata of the table names, all its snapshots and its log included."""
    named = {table.metadata_location, *(m.metadata_file for m in table.metadata.metadata_log)}
    for snapshot in table.metadata.snapshots:
        named.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            named.add(manifest.manifest_path)
            named |= {e.data_file.file_path for e in manifest.fetch_manifest_entry(table.io, discard_deleted=True)}
    return {local_path(n) for n in named}
