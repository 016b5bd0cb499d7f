"""Fat rows set aside by user: files of the input's rows in parts, so that all rows of a user are read together.

Worked example: 1 GB of rows with 64 MB to work in are read in pieces of 8 MB or so; each becomes one file with a record
batch for each of 256 parts. Part 7 is then batch 7 of every file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.users import bucket_of
from thinrow.history.bulk.source import Source
from thinrow.history.bulk.state import LoadFolder
from thinrow.history.intake import user_ids
from thinrow.moving.layout import FatLayout
from thinrow.schema import EventSchema

#: Column with the number of the row in the input.
ROW = "thinrow.row"
CHUNK_ROWS = 512


def read_runs(
    source: Source,
    layout: FatLayout,
    events: EventSchema,
    folder: LoadFolder,
    n_parts: int,
    run_bytes: int,
    progress: Callable[[int], None],
) -> tuple[int, int]:
    """Write the runs of an input, going on after those that are there; number of runs, and the longest row's events.

    Raises:
        InputError, SchemaError: the input cannot be read, or a user is null.
    """
    n_runs = rows = longest = 0
    while (done := folder.get(f"rows-{n_runs:05d}")) is not None:
        rows, longest, n_runs = done["read"], max(longest, done["longest"]), n_runs + 1
    progress(rows)
    held: list[pa.Table] = []
    size = 0
    for chunk in source.chunks(rows, layout.columns, CHUNK_ROWS):
        table = _plain(chunk.table.select(layout.columns))
        table = table.append_column(ROW, pa.array(np.arange(rows, rows + len(table))))
        rows += len(table)
        held.append(table)
        size += table.nbytes
        if size >= run_bytes:
            longest = max(longest, _write(folder, n_runs, held, layout, events, n_parts, rows))
            n_runs, held, size = n_runs + 1, [], 0
        progress(len(table))
    if held and (size or not n_runs):
        longest = max(longest, _write(folder, n_runs, held, layout, events, n_parts, rows))
        n_runs += 1
    return n_runs, longest


def read_part(folder: Path, n_runs: int, part: int) -> pa.Table:
    """The rows of a part, in the order of the input."""
    batches = []
    for run in range(n_runs):
        with pa.OSFile(str(folder / f"rows-{run:05d}.arrow")) as source, pa.ipc.open_file(source) as file:
            batches.append(file.get_batch(part))
    return pa.Table.from_batches(batches).sort_by(ROW)


def _write(
    folder: LoadFolder,
    number: int,
    tables: list[pa.Table],
    layout: FatLayout,
    events: EventSchema,
    n_parts: int,
    rows: int,
) -> int:
    table = pa.concat_tables(tables).combine_chunks()
    longest = int(pc.max(pc.list_value_length(table[layout.event_ts])).as_py() or 0)
    part = bucket_of(user_ids(table[layout.user], _of_users(layout, events)), n_parts)
    order = np.argsort(part, kind="stable")
    cuts = np.searchsorted(part[order], np.arange(n_parts + 1))
    path = folder.path / f"rows-{number:05d}.arrow"
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        with pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            for a, b in itertools.pairwise(cuts):
                writer.write_batch(_one_batch(table.take(pa.array(order[a:b]))))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    folder.put(f"rows-{number:05d}", {"read": rows, "longest": longest})
    return longest


def _of_users(layout: FatLayout, events: EventSchema) -> EventSchema:
    assert events.user_column == layout.user
    return events


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def _plain(table: pa.Table) -> pa.Table:
    """The same rows without dictionaries, which differ from batch to batch; text and lists with room for any number."""
    kinds = [pa.field(f.name, _wide(f.type), f.nullable) for f in table.schema]
    return table.cast(pa.schema(kinds))


def _wide(kind: pa.DataType) -> pa.DataType:
    t: Any = pa.types
    if t.is_dictionary(kind):
        return _wide(kind.value_type)
    if t.is_list(kind) or t.is_large_list(kind):
        inner = kind.value_field
        return pa.large_list(pa.field(inner.name, _wide(inner.type), inner.nullable))
    if t.is_string(kind):
        return pa.large_string()
    return pa.large_binary() if t.is_binary(kind) else kind


def chunks_of(lengths: Any, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that hold ``most`` events together, or are one row: of ``[3, 3, 9]`` and 6, (0, 2) and (2, 3)."""
    total = np.cumsum(np.append(0, lengths))
    at = 0
    while at < len(lengths):
        stop = max(int(np.searchsorted(total, total[at] + most, "right")) - 1, at + 1)
        yield at, stop
        at = stop
