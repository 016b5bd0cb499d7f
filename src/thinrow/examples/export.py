"""Export: the visible events of a store as an Iceberg table that any engine reads, one row an event.

Worked example, a store of 4 buckets: ``export_events(store, "out")`` writes at most 4 Parquet files, each sorted by
(user_id, event_ts, arrival), and commits them as table ``thinrow.events``, partitioned by ``bucket[4](user_id)``, in
one commit that also creates the table. Until then there is no table; a killed export leaves files that the next one
removes.
"""

from __future__ import annotations

import fcntl
import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.table import CreateTableTransaction
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.transforms import BucketTransform, IdentityTransform

from thinrow.core.check import checked, function, instance, integer
from thinrow.core.check import path as path_like
from thinrow.core.errors import CommitConflict, InputError, StoreExists
from thinrow.examples.datafiles import DataFileWriter, local_path
from thinrow.examples.iceberg import NAMESPACE, open_catalog
from thinrow.history.archive.arrow import arrow_schema, require_same_columns, users_of_bucket
from thinrow.history.archive.generation import Generation
from thinrow.history.store import HistoryStore
from thinrow.schema import Projection
from thinrow.schema.projection import PROJECTION

#: Keys of a row, the first columns of the table, by which each file is sorted.
SORT_COLUMNS = ("user_id", "event_ts", "arrival")
ROW_GROUP_ROWS = 1 << 17
_FIELD_ID = "PARQUET:field_id"
#: One folder below the namespace's, and no other: it is emptied before a table is made in it.
_NAME = re.compile(r"\w[\w .-]*")
_NAME_BYTES = 200
_PROPERTIES = {
    "write.parquet.compression-codec": "zstd",
    "write.metadata.metrics.default": "none",
    **{f"write.metadata.metrics.column.{c}": "full" for c in SORT_COLUMNS},
}


@dataclass(frozen=True, slots=True)
class Export:
    """What was written: ``rows`` in ``files`` of ``bytes`` together; ``metadata`` is the URI of the table's metadata
    file, by which engines without a catalog open it."""

    rows: int
    files: int
    bytes: int
    metadata: str


@checked(
    store=instance(HistoryStore, "open one: thinrow.open_store(path)"),
    path=path_like,
    name=instance(str, "give the table's name"),
    projection=PROJECTION,
    at=integer(0),
    progress=function,
)
def export_events(
    store: HistoryStore,
    path: str | Path,
    name: str = "events",
    projection: Projection | None = None,
    *,
    at: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Export:
    """Write the visible events of all users to a new Iceberg table, bucket by bucket, in one commit.

    Columns and rows are those of ``HistoryStore.to_arrow``; times are ``timestamptz``, vectors are lists. Memory: some
    hundred thousand events, or one user.

    Args:
        path: directory of ``catalog.db`` and ``warehouse/``, made if absent; cannot be moved, Iceberg keeps absolute
            paths.
        name: the table's, in the namespace ``thinrow``.
        projection: columns, the newest n, a horizon back from ``at``.
        at: only events before this time (ms, exclusive).
        progress: called after each bucket with (done, in all).

    Raises:
        StoreExists: the catalog has a table of this name.
        CommitConflict: another export to ``path`` is running.
        InputError, SchemaError: as ``to_arrow``; or a time is beyond what Iceberg's microseconds hold, or ``name`` is
            no name of a folder.
        CorruptionError: the store is damaged. Nothing is left in any of these cases.
    """
    if not _NAME.fullmatch(name) or len(name.encode()) > _NAME_BYTES:
        raise InputError(
            f"table name {name[:40]!r}; use 1 to {_NAME_BYTES} bytes of letters, digits, '_', '-', '.' and spaces, a "
            "letter, a digit or '_' first"
        )
    projection, began = projection or Projection(), store.pin()
    root = Path(path).absolute()
    schema = _table_schema(arrow_schema(began, projection))
    store.to_arrow([], projection, at=at).close()
    root.mkdir(parents=True, exist_ok=True)
    with _only_one(root):
        catalog = open_catalog(root)
        catalog.create_namespace_if_not_exists(NAMESPACE)
        if catalog.table_exists((NAMESPACE, name)):
            raise StoreExists(f"table {name!r} is in {root} already; export under another name, or to another place")
        transaction = _new_table(catalog, name, schema, began.n_buckets)
        folder = Path(local_path(transaction.table_metadata.location))
        # There is no table: what lies here was left by an export that was killed.
        shutil.rmtree(folder, ignore_errors=True)
        try:
            files = _write(store, began, transaction, projection, at, progress)
            table = transaction.commit_transaction()
        except (CommitFailedException, TableAlreadyExistsError) as e:
            raise CommitConflict(f"another writer made table {name!r} in {root} first; use another name") from e
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    sizes = sum(f.file_size_in_bytes for f in files)
    return Export(sum(f.record_count for f in files), len(files), sizes, table.metadata_location)


def _write(
    store: HistoryStore,
    began: Generation,
    transaction: CreateTableTransaction,
    projection: Projection,
    at: int | None,
    progress: Callable[[int, int], None] | None,
) -> list[DataFile]:
    out = DataFileWriter(transaction.table_metadata)
    files: list[DataFile] = []
    n_buckets = began.n_buckets
    for bucket in range(n_buckets):
        # The recent tier first: whom a compaction moves meanwhile the generation has.
        recent = store.recent.users()
        users = users_of_bucket(store.pin(), bucket, recent, n_buckets)
        batches = iter(store.to_arrow(users, projection, at=at, batch_rows=ROW_GROUP_ROWS))
        require_same_columns(began, store.pin(), projection)
        first = next(batches, None)
        if first is not None:
            files.append(out.write_parts(_tables(first, batches), bucket, ROW_GROUP_ROWS))
        if progress is not None:
            progress(bucket + 1, n_buckets)
    out.sync()
    append = transaction.update_snapshot().fast_append()
    for file in files:
        append.append_data_file(file)
    append.commit()
    return files


def _tables(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The batches as tables whose types Iceberg has."""
    while True:
        table = pa.Table.from_batches([first])
        try:
            yield table.cast(_table_schema(table.schema))
        except pa.ArrowInvalid as e:
            raise InputError(f"a time does not fit Iceberg's microseconds: {e}; leave out later ones with at=") from e
        following = next(rest, None)
        if following is None:
            return
        first = following


def _table_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([f.with_type(_stored(f.type)) for f in schema])


def _stored(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _stored(kind.value_type)
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.large_list(pa.field("element", _stored(kind.value_type), nullable=False))
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_int8(kind) or pa.types.is_int16(kind):
        return pa.int32()
    if pa.types.is_string(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary(kind) else kind


def _new_table(catalog: SqlCatalog, name: str, schema: pa.Schema, n_buckets: int) -> CreateTableTransaction:
    table = pyarrow_to_schema(_numbered(schema))
    ids = {c: table.find_field(c).field_id for c in SORT_COLUMNS}
    # Columns and parts share one space of names.
    part = "user_id_bucket"
    while part in schema.names:
        part += "_"
    spec = PartitionSpec(PartitionField(ids["user_id"], 1000, BucketTransform(n_buckets), part))
    order = SortOrder(*(SortField(source_id=i, transform=IdentityTransform()) for i in ids.values()), order_id=1)
    return catalog.create_table_transaction(
        (NAMESPACE, name), table, partition_spec=spec, sort_order=order, properties=_PROPERTIES
    )


def _numbered(schema: pa.Schema) -> pa.Schema:
    """The fields with the ids by which Iceberg knows them, elements of lists after all others."""
    ids = itertools.count(len(schema) + 1)
    fields = []
    for i, field in enumerate(schema, 1):
        if pa.types.is_large_list(field.type):
            element = field.type.value_field.with_metadata({_FIELD_ID: str(next(ids))})
            field = field.with_type(pa.large_list(element))
        fields.append(field.with_metadata({_FIELD_ID: str(i)}))
    return pa.schema(fields)


@contextmanager
def _only_one(root: Path) -> Iterator[None]:
    """Hold the directory's export lock, which the system lets go of when the process ends."""
    with open(root / "export.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise CommitConflict(f"another export to {root} is running; wait for it, or export to another place") from e
        yield
