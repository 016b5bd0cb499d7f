"""Event files as one Arrow table: Parquet, Arrow IPC files and Arrow IPC streams, told apart by their first bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from thinrow.core.errors import InputError

#: The length that begins an Arrow IPC stream.
_STREAM = b"\xff\xff\xff\xff"


def read_tables(paths: Sequence[Path]) -> pa.Table:
    """All rows of all files, in the order given.

    Raises:
        InputError: a file is missing, empty, without rows, of another kind or damaged, or the files' columns differ.
    """
    tables = [_read(path) for path in paths]
    for path, table in zip(paths[1:], tables[1:], strict=True):
        _require_columns(path, table.schema, paths[0], tables[0].schema)
    first = tables[0].schema
    # A column may be null in one file and declared without nulls in another.
    fields = [f.with_nullable(any(t.schema.field(f.name).nullable for t in tables)) for f in first]
    return pa.concat_tables([t.select(first.names).cast(pa.schema(fields)) for t in tables])


def _read(path: Path) -> pa.Table:
    if not path.is_file():
        folder = f"{path} is a folder; name the files in it"
        raise InputError(folder if path.is_dir() else f"no file at {path}; check the path")
    with path.open("rb") as source:
        begin = source.read(6)
    if not begin:
        raise InputError(f"{path} is empty (0 bytes); it must be a Parquet or Arrow IPC file")
    try:
        if begin.startswith(b"PAR1"):
            with pq.ParquetFile(path) as file:
                table = file.read()
        elif begin == b"ARROW1":
            with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
                table = file.read_all()
        elif begin.startswith(_STREAM):
            with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as stream:
                table = stream.read_all()
        else:
            raise InputError(f"{path} is neither Parquet nor Arrow IPC (it begins with {begin!r}); convert it first")
    except (pa.ArrowException, OSError) as e:
        reason = str(e).partition("\n")[0][:200]
        raise InputError(f"{path} cannot be read as Parquet or Arrow: {reason}; write the file again") from e
    if not table.num_rows:
        raise InputError(f"{path} holds no rows; leave it out")
    twice = {n for n in table.column_names if table.column_names.count(n) > 1}
    if twice:
        raise InputError(f"{path} has two columns {min(twice)!r}; rename one")
    return table.unify_dictionaries()


def _require_columns(path: Path, schema: pa.Schema, first_path: Path, first: pa.Schema) -> None:
    for name in [*first.names, *schema.names]:
        kinds = [s.field(name).type if name in s.names else "missing" for s in (schema, first)]
        if kinds[0] != kinds[1]:
            raise InputError(
                f"column {name!r} is {kinds[0]} in {path}, but {kinds[1]} in {first_path}; ingest the files one by one"
            )
