"""``thinrow ingest``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thinrow.cli.common import progress_bar, store_option

if TYPE_CHECKING:
    import pyarrow as pa

_CHUNK_EVENTS = 65_536


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@store_option
@click.option("--create", is_flag=True, help="Make the store if there is none; needs --schema, or --user and --time.")
@click.option(
    "--schema",
    "schema_path",
    type=click.Path(path_type=Path),
    help="Schema file: TOML, or Python defining `schema` (which is run).",
)
@click.option("--user", help="Without --schema: the user column; other columns are inferred.")
@click.option("--time", help="Without --schema: the event time column (timestamp or ms).")
@click.option("--event-id", help="Without --schema: the column of event ids (appends become idempotent).")
@click.option("--arrival-time", help="Without --schema: the column that says when an event became known.")
@click.option("--buckets", default=16, show_default=True, help="With --create: number of buckets, for good.")
@click.option("--compact/--no-compact", "then_compact", default=False, help="Compact afterwards.")
def command(
    files: Sequence[Path],
    store_path: Path,
    create: bool,
    schema_path: Path | None,
    user: str | None,
    time: str | None,
    event_id: str | None,
    arrival_time: str | None,
    buckets: int,
    then_compact: bool,
) -> None:
    """Append events from Parquet (.parquet) or Arrow IPC (.arrow, .feather) FILES to a store.

    All files are read and checked before the first event is appended: bad input changes nothing. Events whose id the
    user has already are skipped, so that an interrupted ingest is repeated as it was.

    \b
    A schema file names the columns and their feature groups:
      user = "household_id"
      time = "transaction_timestamp"
      [groups.item]
      product_id = { trait = "id", dtype = "int64" }

    \b
    Examples:
      thinrow ingest events.parquet --store S --create --schema events.toml
      thinrow ingest events.parquet --store S --create --user user_id --time ts
    """
    from thinrow.core.errors import InputError
    from thinrow.history.intake import check_table
    from thinrow.history.store import HistoryStore
    from thinrow.schema import EventSchema

    table = read_tables(files)
    exists = (store_path / "archive" / "manifests").is_dir()
    if exists:
        store = HistoryStore.open(store_path)
    else:
        if not create:
            raise InputError(f"no store at {store_path}; add --create with --schema FILE, or with --user and --time")
        if schema_path is not None:
            schema = EventSchema.load(schema_path, table.schema)
        elif user and time:
            schema = EventSchema.infer(table.schema, user=user, time=time, event_id=event_id, arrival_time=arrival_time)
        else:
            raise InputError("--create needs --schema FILE, or --user COLUMN and --time COLUMN")
        check_table(table, schema)
        store = HistoryStore.create(store_path, schema, buckets)
    with store:
        events = check_table(table, store.schema)
        # A correction may turn out to name nothing; then all of the input must stay out, so it goes in as one append.
        chunk = _CHUNK_EVENTS if events.supersedes is None else max(len(events), 1)
        appended = 0
        with progress_bar("ingest") as progress:
            for a in range(0, len(events), chunk):
                b = min(a + chunk, len(events))
                appended += int((~store.append_checked(events.slice(a, b)).duplicate).sum())
                progress(b, len(events))
        click.echo(f"{appended} events appended, {len(events) - appended} known already")
        if then_compact:
            with progress_bar("compact") as progress:
                report = store.compact(progress=progress)
            click.echo(f"generation {report.generation}: {report.events} events moved to the archive")


def read_tables(files: Sequence[Path]) -> pa.Table:
    """The files as one pyarrow Table. Raises InputError where a file is missing, empty, or of another kind."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from thinrow.core.errors import InputError

    tables = []
    for path in files:
        if not path.is_file():
            raise InputError(f"no file at {path}")
        if path.stat().st_size == 0:
            raise InputError(f"{path} is empty (0 bytes); it must be a Parquet or Arrow file")
        try:
            if path.suffix in (".arrow", ".feather", ".ipc"):
                with pa.memory_map(str(path)) as source:
                    tables.append(pa.ipc.open_file(source).read_all())
            else:
                tables.append(pq.read_table(path))
        except (pa.ArrowInvalid, OSError) as e:
            raise InputError(f"{path} is not a readable Parquet or Arrow file: {e}") from e
        if tables[-1].num_rows == 0:
            raise InputError(f"{path} holds no rows; leave it out")
    try:
        return pa.concat_tables(tables, promote_options="none")
    except pa.ArrowInvalid as e:
        raise InputError(f"the files have different columns: {e}; ingest them one by one") from e
