"""Events of an Iceberg table as a stream for ``HistoryStore.bulk_load``: a data file at a time in memory.

::

    reader, load_id = read_events("warehouse/db/events/metadata/00003-....metadata.json")
    store.bulk_load(reader, load_id=load_id)

The load is named by table and snapshot: the same snapshot is not loaded twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
from pyiceberg.table import StaticTable, Table

from thinrow.core.errors import InputError


def read_events(table: Table | str | Path) -> tuple[pa.RecordBatchReader, str]:
    """All rows of the table's newest snapshot, deletes applied, and the name of such a load.

    Args:
        table: a pyiceberg table, or the path of a metadata file.

    Raises:
        InputError: it is no Iceberg table, or has no snapshot.
    """
    if not isinstance(table, Table):
        path = str(table)
        try:
            table = StaticTable.from_metadata(path)
        except (OSError, ValueError, NoSuchTableError) as e:
            raise InputError(f"{path} is not the metadata of an Iceberg table: {e}; check the path") from e
    snapshot = table.current_snapshot()
    if snapshot is None:
        raise InputError(f"the Iceberg table {table.metadata.location} has no snapshot; write events to it first")
    scan = table.scan(snapshot_id=snapshot.snapshot_id)
    schema = schema_to_pyarrow(scan.projection(), include_field_ids=False)

    def batches() -> Iterator[pa.RecordBatch]:
        arrow = ArrowScan(table.metadata, table.io, scan.projection(), scan.row_filter)
        # A file at a time: given all at once, they would all be read ahead.
        for task in scan.plan_files():
            for batch in arrow.to_record_batches([task]):
                yield batch.cast(schema)

    name = f"iceberg-{table.metadata.table_uuid}-{snapshot.snapshot_id}"
    return pa.RecordBatchReader.from_batches(schema, batches()), name
