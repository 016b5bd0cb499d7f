"""The training table: Iceberg, partitioned by ``bucket[N](user_id)``, each bucket sorted by user and request time.

Worked example: two appends, then ``cluster``, with N = 2 (rows as ``user@request_ts``)::

    append  bucket 0: [4@10 8@12]   bucket 1: [3@11]
    append  bucket 0: [4@20]        bucket 1: [3@19 7@15]
    scan    bucket 0: 4@10 8@12 4@20
    cluster bucket 0: [4@10 4@20 8@12]   bucket 1: [3@11 3@19 7@15]      one file a bucket, one commit

``N`` is the archive's, and the hash is Iceberg's own, so a bucket of examples needs one bucket of the archive.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
    ValidationException,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.table import Table, Transaction
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.transforms import BucketTransform, IdentityTransform
from sqlalchemy.exc import OperationalError

from thinrow.core.check import path as checked_path
from thinrow.core.errors import (
    CommitConflict,
    InputError,
    ObjectNotFound,
    SchemaError,
    StoreError,
    StoreExists,
    StoreNotFound,
)
from thinrow.core.users import bucket_of
from thinrow.examples.datafiles import DataFileWriter, StoredFile, local_path, read_rows
from thinrow.examples.decoded import nothing_kept
from thinrow.examples.iceberg import (
    FORMAT,
    JOIN_STATE,
    JOINED,
    NAMESPACE,
    NO_STATE,
    SORT_COLUMNS,
    TABLE_PROPERTIES,
    FrugalTransaction,
    buckets_of,
    carried_state,
    check_format,
    evolve_columns,
    files_named,
    iceberg_schema,
    list_files,
    mapped_errors,
    open_catalog,
    state_chain,
)
from thinrow.examples.layout import arrow_schema, example_fields, load_users
from thinrow.examples.records import ExampleBatch
from thinrow.examples.successors import Successors, stands
from thinrow.schema.event_schema import EventSchema
from thinrow.schema.example_schema import ExampleSchema

#: Age at which a file that no snapshot ever named is taken for one left by a killed writer.
ORPHAN_AGE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Removed:
    """Files removed from disk, and their bytes."""

    files: int
    bytes: int


class ExampleTable:
    """A table of examples in an Iceberg catalog (SQLite) and warehouse (a local directory).

    Safe to read from several threads. Writers in several processes exclude each other at the commit: the loser gets
    CommitConflict, has changed nothing, and may run again.

    Attributes:
        path: the directory of catalog and warehouse.
        name: the table's name in the catalog, namespace ``thinrow``.
        event_schema: of the inline events.
        example_schema: of context, candidates and labels.
        n_buckets: N of the partition transform ``bucket[N](user_id)``.
    """

    def __init__(self, path: Path, name: str, catalog: SqlCatalog, table: Table) -> None:
        self.path, self.name = path, name
        self._catalog, self._table = catalog, table
        self._lock = threading.Lock()
        self._files: dict[int | None, tuple[StoredFile, ...]] = {}
        check_format(table.metadata.properties, path, name)
        self.n_buckets = buckets_of(table)
        self._read_schemas(table)

    def _read_schemas(self, table: Table) -> None:
        properties = table.metadata.properties
        try:
            self.event_schema = EventSchema.from_dict(json.loads(properties["thinrow.event_schema"]))
            self.example_schema = ExampleSchema.from_dict(json.loads(properties["thinrow.example_schema"]))
        except (KeyError, ValueError) as e:
            where = f"table {self.name!r} in {self.path}"
            raise SchemaError(f"{where} has no readable thinrow schemas: {e}; it is not ours") from e
        self._schemas_text = properties["thinrow.event_schema"]
        self._fields = example_fields(self.event_schema, self.example_schema)
        self._schema = arrow_schema(self._fields)
        self._ids = {f.name: f.field_id for f in table.schema().fields}

    @classmethod
    def create(
        cls,
        path: str | Path,
        name: str = "examples",
        *,
        event_schema: EventSchema,
        example_schema: ExampleSchema,
        n_buckets: int = 16,
    ) -> ExampleTable:
        """Create an empty table, and its directory where that is absent.

        Args:
            path: a directory for ``catalog.db`` and ``warehouse/``; cannot be moved, Iceberg keeps absolute paths.
            n_buckets: the archive's number of buckets, 1 or more.

        Raises:
            StoreExists: the catalog has a table of this name.
            InputError: ``n_buckets`` is below 1, or the path is a URL.
        """
        if n_buckets < 1:
            raise InputError(f"n_buckets={n_buckets}; it must be 1 or more, the archive's own number")
        root = checked_path(path, "path").absolute()
        root.mkdir(parents=True, exist_ok=True)
        catalog = open_catalog(root)
        schema = iceberg_schema(example_fields(event_schema, example_schema))
        source = {c: schema.find_field(c).field_id for c in SORT_COLUMNS}
        spec = PartitionSpec(PartitionField(source["user_id"], 1000, BucketTransform(n_buckets), "user_id_bucket"))
        order = SortOrder(
            *(SortField(source_id=source[c], transform=IdentityTransform()) for c in SORT_COLUMNS), order_id=1
        )
        properties = {
            **TABLE_PROPERTIES,
            "thinrow.format": str(FORMAT),
            "thinrow.event_schema": event_schema.to_json(),
            "thinrow.example_schema": json.dumps(example_schema.to_dict()),
        }
        catalog.create_namespace_if_not_exists(NAMESPACE)
        try:
            table = catalog.create_table(
                (NAMESPACE, name), schema, partition_spec=spec, sort_order=order, properties=properties
            )
        except TableAlreadyExistsError as e:
            raise StoreExists(f"table {name!r} is in {root} already; open it, or choose another name") from e
        return cls(root, name, catalog, table)

    @classmethod
    def open(cls, path: str | Path, name: str = "examples", *, n_buckets: int | None = None) -> ExampleTable:
        """Open a table; ``n_buckets``, where given, must be the table's (pass the archive's).

        Raises:
            StoreNotFound: there is no such table at the path.
            NewerFormatError: a newer thinrow wrote it.
            SchemaError: its N is another, or it was not written by thinrow.
        """
        root = checked_path(path, "path").absolute()
        if not (root / "catalog.db").is_file():
            raise StoreNotFound(f"no example table at {root} (no catalog.db); create one with ExampleTable.create")
        catalog = open_catalog(root)
        try:
            table = catalog.load_table((NAMESPACE, name))
        except (NoSuchTableError, NoSuchNamespaceError) as e:
            raise StoreNotFound(f"no table {name!r} in {root}; create it with ExampleTable.create") from e
        except FileNotFoundError as e:
            raise ObjectNotFound(f"the metadata of table {name!r} in {root} is missing: {e}; restore it") from e
        opened = cls(root, name, catalog, table)
        if n_buckets is not None:
            opened.check_buckets(n_buckets)
        return opened

    def close(self) -> None:
        """Close the catalog's connections."""
        self._catalog.close()

    def __enter__(self) -> ExampleTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_buckets(self, n_buckets: int) -> None:
        """Hold the table to an archive of ``n_buckets``: a bucket of the table must be whole buckets of the archive.

        Raises:
            SchemaError: ``n_buckets`` is not the table's N or a multiple of it.
        """
        if n_buckets % self.n_buckets:
            raise SchemaError(
                f"table {self.name!r} has bucket[{self.n_buckets}](user_id), the archive {n_buckets} buckets, "
                f"which is no multiple; create the table with n_buckets={n_buckets}"
            )

    @property
    def arrow_schema(self) -> pa.Schema:
        """The Arrow schema of stored rows."""
        return self._schema

    @property
    def snapshot_id(self) -> int | None:
        """The newest committed snapshot (of any writer); None while the table is empty and never joined."""
        snapshot = self._refreshed().current_snapshot()
        return None if snapshot is None else snapshot.snapshot_id

    def append(self, examples: ExampleBatch | pa.Table, *, join_state: str | None = None) -> int:
        """Append rows, sorted within each bucket, in one commit; durable when it returns.

        Args:
            join_state: what the outcome join has done, committed with the rows; None keeps the last one.

        Returns:
            The new snapshot's id.

        Raises:
            InputError, SchemaError: rows that do not fit the table; nothing was appended.
            CommitConflict: another writer committed first; nothing was appended.
        """
        return self._append(self._refreshed(), examples, join_state)

    def append_after(self, snapshot_id: int | None, examples: ExampleBatch | pa.Table, join_state: str) -> int:
        """``append`` that fails with CommitConflict unless ``snapshot_id`` is still the newest snapshot."""
        table = self._refreshed()
        current = table.current_snapshot()
        if (None if current is None else current.snapshot_id) != snapshot_id:
            raise CommitConflict(
                f"table {self.name!r} moved on from snapshot {snapshot_id}; read its state and run again"
            )
        return self._append(table, examples, join_state)

    def cluster(self) -> int | None:
        """Rewrite each bucket that is not one sorted file as one, all in one commit; a second call changes nothing.

        Memory: one bucket at a time. Returns the newest snapshot's id.

        Raises:
            CommitConflict: another writer committed first; nothing was changed.
        """
        table = self._refreshed()
        current = table.current_snapshot()
        if current is None:
            return None
        by_bucket = self._by_bucket(self._files_of(table, current.snapshot_id))
        todo = {b: files for b, files in by_bucket.items() if len(files) > 1 or not files[0].sorted}
        if not todo:
            return current.snapshot_id
        properties = carried_state(table)
        with self._committing(table) as (tx, out):
            update = tx.update_snapshot(snapshot_properties=properties).overwrite()
            for bucket, files in todo.items():
                for file in files:
                    update.delete_data_file(file.record)
                update.append_data_file(out.write(_sorted(self._read(files)), bucket))
            update.commit()
        return self._committed(table)

    def rewrite(self, change: Callable[[ExampleBatch], tuple[ExampleBatch, npt.NDArray[np.int64]] | None]) -> None:
        """Write anew, in one commit, each data file whose rows ``change``; then nothing older than that is left.

        Every earlier snapshot expires, and every file goes that the newest one does not name. Whoever reads an earlier
        snapshot can go on in the new one: ``successor`` says which rows are gone. A file that another process wrote and
        has not committed goes too: its commit would fail, for the table moved on.

        Args:
            change: of the rows of a file, those that stay and their positions, ascending; None where all stay as they
                are.

        Raises:
            CommitConflict: another writer committed first; nothing was changed.
        """
        table = self._refreshed()
        current = table.current_snapshot()
        before = None if current is None else current.snapshot_id
        files = () if before is None else self._files_of(table, before)
        left = [f for f in Path(local_path(table.metadata.location)).rglob("*") if f.is_file()]
        history = Successors.of(current)
        rows_of = {b: len(f) for b, f in self._by_bucket(files).items()}
        with ExitStack() as until_committed, self._committing(table) as (tx, out):
            update = tx.update_snapshot(snapshot_properties=carried_state(table)).overwrite()
            for file in files:
                rows = self._read([file])
                changed = change(ExampleBatch.from_arrow(rows, self.event_schema, self.example_schema))
                if changed is not None:
                    history.lose(file.bucket, file.rows, changed[1], in_order=rows_of[file.bucket] == 1 and file.sorted)
                    update.delete_data_file(file.record)
                    if len(changed[0]):
                        kept = self._conformed(changed[0].to_arrow(self.event_schema, self.example_schema))
                        update.append_data_file(out.write(_sorted(kept), file.bucket))
            if history.changed:
                update.commit()
            out.sync()
            until_committed.enter_context(nothing_kept(self.path))
            # The manifest of what an overwrite deleted has its bounds. This snapshot, the newest, does without; it is
            # made even where no row changed, so that a join that read a log before starts over.
            properties = carried_state(table) | history.after(before)
            tx.update_snapshot(snapshot_properties=properties).fast_append().commit()
        self._committed(table)
        self.remove_unreferenced()
        live = files_named(self._refreshed())
        for stray in left:
            if str(stray) not in live:
                stray.unlink(missing_ok=True)

    def successor(self, snapshot_id: int) -> tuple[int, dict[int, npt.NDArray[np.int64]]] | None:
        """The snapshot in which readers of ``snapshot_id`` go on after an erasure, and the rows that are gone.

        Returns:
            The snapshot, and by bucket the ascending positions, in ``snapshot_id``, of the rows that are gone: the
            others are there in their order. None where there is no such snapshot.
        """
        for snapshot in reversed(self._refreshed().metadata.snapshots):
            gone = Successors.of(snapshot).find(snapshot_id)
            if gone is not None:
                return snapshot.snapshot_id, gone
        return None

    def stands(self, snapshot_id: int) -> bool:
        """Whether a snapshot is there and no erasure came after it."""
        return stands(self._refreshed().metadata.snapshots, snapshot_id)

    def buckets(self, snapshot_id: int | None = None) -> dict[int, int]:
        """Rows of each bucket that has any, ascending; of the newest snapshot unless one is named."""
        by_bucket = self._by_bucket(self.data_files(snapshot_id))
        return {b: sum(f.rows for f in files) for b, files in by_bucket.items()}

    def rows(self, snapshot_id: int | None = None) -> int:
        """Rows of a snapshot (None: the newest)."""
        return sum(f.rows for f in self.data_files(snapshot_id))

    def bytes(self, snapshot_id: int | None = None) -> int:
        """Bytes of the data files of a snapshot (None: the newest)."""
        return sum(f.bytes for f in self.data_files(snapshot_id))

    def data_files(self, snapshot_id: int | None = None) -> tuple[StoredFile, ...]:
        """The data files of a snapshot (None: the newest) by bucket, each bucket's in the order they are scanned.

        Raises:
            StoreNotFound: the snapshot is not, or no longer, in the table.
        """
        table = self._table if snapshot_id is not None and snapshot_id in self._files else self._refreshed()
        return self._files_of(table, snapshot_id)

    def scan_bucket(
        self,
        bucket: int,
        snapshot_id: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> pa.Table:
        """Rows ``[start, stop)`` of a bucket in stored order; after ``cluster`` that is ``SORT_COLUMNS`` order.

        Args:
            columns: names of stored columns, in the order wanted; None for all.
            stop: exclusive; None for the end. Reads whole row groups of 4,096 rows.

        Raises:
            InputError: the bucket is not in ``[0, n_buckets)``.
            CorruptionError: a data file is not what was written.
            ObjectNotFound: a data file is missing.
        """
        if not 0 <= bucket < self.n_buckets:
            raise InputError(f"bucket {bucket} is not in [0, {self.n_buckets}); see ExampleTable.buckets()")
        files = self._by_bucket(self.data_files(snapshot_id)).get(bucket, [])
        return self._read(files, columns, start, stop)

    def read_bucket(
        self,
        bucket: int,
        snapshot_id: int | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> ExampleBatch:
        """``scan_bucket`` as records, or of them those at positions ``rows``, counted from ``start``. Raises as it
        does."""
        table = self.scan_bucket(bucket, snapshot_id, start=start, stop=stop)
        table = table if rows is None else table.take(pa.array(rows))
        return ExampleBatch.from_arrow(table, self.event_schema, self.example_schema)

    def join_state(self) -> tuple[int | None, str | None]:
        """The newest snapshot's id, and what the outcome join had done by then (None: nothing yet).

        Raises:
            StoreError: the snapshot that held the state was expired by another engine.
        """
        table = self._refreshed()
        current = table.current_snapshot()
        state = carried_state(table)[JOIN_STATE]
        return (None if current is None else current.snapshot_id), (None if state == NO_STATE else state)

    def remove_unreferenced(self, keep: Sequence[int] = (), orphan_age_s: float = ORPHAN_AGE_S) -> Removed:
        """Expire every snapshot but the newest, tagged ones and ``keep``, and delete the files that only they needed.

        Files that no snapshot ever named are left by killed writers or belong to writers at work; they are deleted
        when older than ``orphan_age_s`` seconds. Pass the snapshots that running readers have pinned in ``keep``.
        """
        table = self._refreshed()
        before = files_named(table)
        # Without the snapshots back to the one that holds the join's state, the next join would not find it.
        spared = {r.snapshot_id for r in table.metadata.refs.values()} | set(keep) | set(state_chain(table)[0])
        expired = [s.snapshot_id for s in table.metadata.snapshots if s.snapshot_id not in spared]
        if expired:
            with self._mapped_errors():
                table.maintenance.expire_snapshots().by_ids(expired).commit()
            table = self._refreshed()
            with self._lock:
                self._files = {s: f for s, f in self._files.items() if s not in expired}
        live = files_named(table)
        oldest = time.time() - orphan_age_s
        removed = []
        for file in sorted(Path(local_path(table.metadata.location)).rglob("*")):
            dead = str(file) in before or (file.is_file() and file.stat().st_mtime < oldest)
            if file.is_file() and str(file) not in live and dead:
                removed.append(file.stat().st_size)
                file.unlink()
        return Removed(len(removed), sum(removed))

    def _append(self, table: Table, examples: ExampleBatch | pa.Table, join_state: str | None) -> int:
        if isinstance(examples, ExampleBatch):
            newer = examples.batch.schema
            if newer is not None and newer.schema_id > self.event_schema.schema_id:
                table = self._evolve(table, newer)
            examples = examples.to_arrow(self.event_schema, self.example_schema)
        rows = self._conformed(examples)
        properties = carried_state(table) if join_state is None else {JOIN_STATE: join_state}
        with self._committing(table) as (tx, out):
            if join_state is not None and JOINED not in table.properties:
                tx.set_properties({JOINED: "true"})
            update = tx.update_snapshot(snapshot_properties=properties).fast_append()
            for bucket, part in self._partitioned(rows):
                update.append_data_file(out.write(_sorted(part), bucket))
            update.commit()
        return self._committed(table)

    def evolve(self, event_schema: EventSchema) -> None:
        """Take the columns of a later event schema of the store: rows that are there read by column id, null in columns
        that were added. ``append`` does it by itself where its rows are of a later schema.

        Raises:
            SchemaError: the schema is older than the table's, or another one of the same id.
            CommitConflict: another writer committed first; nothing was changed.
        """
        table = self._refreshed()
        if event_schema.schema_id < self.event_schema.schema_id or (
            event_schema.schema_id == self.event_schema.schema_id and event_schema != self.event_schema
        ):
            raise SchemaError(
                f"event schema {event_schema.schema_id} for table {self.name!r}, which has "
                f"{self.event_schema.schema_id}; pass the newest schema of the store"
            )
        if event_schema != self.event_schema:
            self._evolve(table, event_schema)

    def _evolve(self, table: Table, event_schema: EventSchema) -> Table:
        with self._mapped_errors(), Transaction(table) as tx:
            evolve_columns(tx, self.event_schema, event_schema)
        return self._refreshed()

    def _conformed(self, rows: pa.Table) -> pa.Table:
        missing = [n for n in self._schema.names if n not in rows.column_names]
        extra = [n for n in rows.column_names if n not in self._schema.names]
        if missing or extra:
            what = f"lack column {missing[0]!r}" if missing else f"have an unknown column {extra[0]!r}"
            raise SchemaError(f"rows {what}; table {self.name!r} has {', '.join(self._schema.names)}")
        try:
            rows = rows.select(self._schema.names).cast(self._schema)
            rows.validate()
        except (pa.ArrowException, ValueError) as e:
            raise SchemaError(f"rows do not fit table {self.name!r}: {e}; build them with ExampleBatch.to_arrow") from e
        for field in self._schema:
            if not field.nullable and rows[field.name].null_count:
                raise InputError(f"column {field.name!r} has {rows[field.name].null_count} nulls; it may have none")
        return rows

    def _partitioned(self, rows: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        users = load_users(rows["user_id"], self.event_schema.user_kind)
        bucket = bucket_of(users, self.n_buckets) if len(users) else np.empty(0, np.int64)
        order = np.argsort(bucket, kind="stable")
        present, first = np.unique(bucket[order], return_index=True)
        bounds = np.append(first, len(order))
        for b, low, high in zip(present.tolist(), bounds[:-1], bounds[1:], strict=True):
            yield b, rows.take(pa.array(order[low:high]))

    def _read(
        self, files: Sequence[StoredFile], columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
    ) -> pa.Table:
        parts, row = [], 0
        for file in files:
            low, high = max(start - row, 0), file.rows if stop is None else min(stop - row, file.rows)
            if low < high:
                parts.append(read_rows(file, self._ids, self._schema.names if columns is None else columns, low, high))
            row += file.rows
        names = self._schema.names if columns is None else list(columns)
        schema = pa.schema([self._schema.field(n) for n in names])
        return pa.concat_tables([_complete(p, schema) for p in parts]) if parts else schema.empty_table()

    @staticmethod
    def _by_bucket(files: Sequence[StoredFile]) -> dict[int, list[StoredFile]]:
        found: dict[int, list[StoredFile]] = {}
        for file in files:
            found.setdefault(file.bucket, []).append(file)
        return found

    def _files_of(self, table: Table, snapshot_id: int | None) -> tuple[StoredFile, ...]:
        snapshot = table.current_snapshot() if snapshot_id is None else table.snapshot_by_id(snapshot_id)
        if snapshot is None:
            if snapshot_id is None:
                return ()
            raise StoreNotFound(f"table {self.name!r} has no snapshot {snapshot_id}; it was expired, or never was")
        with self._lock:
            known = self._files.get(snapshot.snapshot_id)
        if known is None:
            known = list_files(table, snapshot)
            with self._lock:
                self._files[snapshot.snapshot_id] = known
        return known

    def _refreshed(self) -> Table:
        with self._lock:
            try:
                self._table = self._catalog.load_table((NAMESPACE, self.name))
            except OperationalError as e:
                raise StoreError(f"the catalog of {self.path} is busy: {e.orig}; try again") from e
            if self._table.metadata.properties.get("thinrow.event_schema") != self._schemas_text:
                self._read_schemas(self._table)
            return self._table

    @contextmanager
    def _committing(self, table: Table) -> Iterator[tuple[Transaction, DataFileWriter]]:
        """A transaction and a writer of its data files, which are synced before it commits."""
        out = DataFileWriter(table.metadata)
        with self._mapped_errors():
            try:
                with FrugalTransaction(table) as tx:
                    try:
                        yield tx, out
                        out.sync()
                    except BaseException:
                        out.discard()
                        raise
            except (CommitFailedException, ValidationException):
                # Only these say that the commit did not land; after any other the files may be needed.
                out.discard()
                raise

    def _mapped_errors(self) -> AbstractContextManager[None]:
        return mapped_errors(self.name, self.path)

    def _committed(self, table: Table) -> int:
        current = table.current_snapshot()
        assert current is not None
        with self._lock:
            self._table = table
        return current.snapshot_id


def _sorted(rows: pa.Table) -> pa.Table:
    keys = [(c, "ascending") for c in SORT_COLUMNS]
    return rows.take(pc.sort_indices(rows.select(SORT_COLUMNS), sort_keys=keys))


def _complete(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Columns in the order of ``schema``; those that the file lacks (added later) as lists of nulls."""
    arrays = []
    for field in schema:
        if field.name in rows.column_names:
            arrays.append(rows[field.name].cast(field.type))
        else:
            shape = rows["recent_event_ts"].combine_chunks()
            values = pa.nulls(len(shape.flatten()), field.type.value_type)
            arrays.append(pa.LargeListArray.from_arrays(shape.offsets, values, type=field.type))
    return pa.table(arrays, schema=schema)
