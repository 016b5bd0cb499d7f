"""``thinrow ingest``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinrow.cli.common import progress_bar, store_option

if TYPE_CHECKING:
    import pyarrow as pa

    from thinrow.history.intake import CheckedEvents
    from thinrow.history.store import HistoryStore
    from thinrow.schema import EventSchema

_CHUNK_EVENTS = 65_536
_STREAMED = ("follow", "name", "pseudonyms", "max_future", "compact_every", "compact_events")
_ROLES = ("user", "time", "event_id", "supersedes", "arrival_time")


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="FILES|SOURCE")
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
@click.option("--supersedes", help="Without --schema: the column with the id of the event that this one corrects.")
@click.option("--arrival-time", help="Without --schema: the column that says when an event became known.")
@click.option("--buckets", type=int, help="With --create: number of buckets; rebucket multiplies it.  [default: 16]")
@click.option("--archive", help="Keep the archive in a bucket: s3://BUCKET/PREFIX?endpoint=URL&region=NAME.")
@click.option("--recent", help="Keep recent events on Redis: redis://HOST:PORT/DB?name=NAME&durability=always.")
@click.option("--compact/--no-compact", "then_compact", default=False, help="Compact afterwards.")
@click.option("--bulk", is_flag=True, help="Straight into the archive; FILES may be larger than memory, or folders.")
@click.option(
    "--work-dir", type=click.Path(path_type=Path), help="With --bulk: room for runs.  [default: in the store]"
)
@click.option("--memory", type=int, help="With --bulk: MB to work in, on top of some 300.  [default: 1024]")
@click.option("--follow", is_flag=True, help="Of a SOURCE: go on until stopped; SIGTERM ends it once all is durable.")
@click.option("--name", help="Of a SOURCE: under which its position is kept.  [default: topic, table or folder]")
@click.option("--pseudonyms", metavar="FILE|env:NAME", help="Of a SOURCE: key of the pseudonyms that users get.")
@click.option(
    "--max-future", type=int, metavar="SECONDS", help="Of a SOURCE: refuse events later than the clock by more."
)
@click.option(
    "--compact-every", type=click.IntRange(min=1), metavar="SECONDS", help="With --follow: compact while it runs."
)
@click.option(
    "--compact-events", type=click.IntRange(min=1), metavar="N", help="With --follow: compact after so many events."
)
@click.option("--engine", type=click.Choice(["local", "ray"]), help="With --bulk: who writes.  [default: local]")
def command(
    places: Sequence[str],
    store_path: Path,
    create: bool,
    schema_path: Path | None,
    buckets: int | None,
    then_compact: bool,
    bulk: bool,
    **rest: Any,
) -> None:
    """Append events from Parquet or Arrow IPC FILES, or from a SOURCE, to a store.

    A SOURCE is a topic (kafka://HOST:PORT/TOPIC?format=json), an Iceberg table (iceberg:FOLDER), a folder, or files of
    JSON lines or CSV; Parquet and Arrow files are one with --follow or --name. The store keeps how far it was read:
    what was taken in is not taken in again. Events that cannot be are kept aside: `thinrow sources letters`.

    All FILES are read and checked before the first event is appended: bad input changes nothing. Events whose id the
    user has already are skipped, so that an interrupted ingest is repeated as it was; without ids it would append them
    again.

    \b
    A schema file names the columns and their feature groups:
      user = "household_id"            int64 or string
      time = "transaction_timestamp"   timestamp, or int64 ms since 1970
      event_id = "line_id"             optional, as are supersedes and arrival_time
      [groups.item]
      product_id = { trait = "id", dtype = "int64" }
      [groups.price]
      price = { trait = "numeric", dtype = "float64", nullable = true }

    \b
    Examples:
      thinrow ingest events.parquet --store S --create --schema events.toml
      thinrow ingest events.parquet --store S --create --user user_id --time ts
      thinrow ingest more.arrow --store S --compact
      thinrow ingest events.parquet --store S --create --schema events.toml --archive s3://histories/shop
      thinrow ingest history/ --store S --bulk
      thinrow ingest "kafka://broker:9092/clicks?format=avro&registry=http://registry:8081" --store S --follow
    """
    from thinrow.cli.bulk import BulkOptions, bulk_ingest
    from thinrow.cli.stream import StreamOptions, is_stream, stream_ingest
    from thinrow.core.errors import InputError

    columns, where = {role: rest[role] for role in _ROLES}, (rest["archive"], rest["recent"])
    streamed = StreamOptions(*(rest[k] for k in _STREAMED))
    of_bulk = [rest[k] for k in ("work_dir", "memory", "engine")]

    def require_same(store: HistoryStore, schema: EventSchema | None) -> None:
        _require_same(store, store_path, schema, buckets)

    if bulk:
        if streamed.named:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in _STREAMED)
            raise InputError(f"{options} do not go with --bulk")
        described = schema_path is not None or any(columns.values())
        bulk_ingest(
            [Path(p) for p in places],
            store_path,
            BulkOptions(create, buckets, where[0], then_compact, of_bulk[0], of_bulk[1], of_bulk[2], where[1]),
            lambda arrow: _schema(arrow, schema_path, columns) if described else None,
            require_same,
        )
        return
    if any(v is not None for v in of_bulk):
        raise InputError("--work-dir, --memory and --engine go with --bulk; add it, or leave them out")
    if streamed.named or is_stream(places):
        stream_ingest(
            places,
            store_path,
            streamed,
            create=create,
            where=where,
            buckets=buckets,
            then_compact=then_compact,
            schema_of=lambda arrow: _schema_of_source(arrow, schema_path, columns),
            require_same=require_same,
        )
        return
    _ingest_files([Path(p) for p in places], store_path, create, schema_path, columns, buckets, where, then_compact)


def _ingest_files(
    files: Sequence[Path],
    store_path: Path,
    create: bool,
    schema_path: Path | None,
    columns: dict[str, str | None],
    buckets: int | None,
    where: tuple[str | None, str | None],
    then_compact: bool,
) -> None:
    """Parquet and Arrow files, all of them checked before the first event is appended."""
    from thinrow.cli.tables import read_tables
    from thinrow.core.errors import InputError
    from thinrow.history.intake import check_table
    from thinrow.history.store import DEFAULT_BUCKETS, HistoryStore

    archive, recent = where
    table = read_tables(files)
    exists = HistoryStore.exists(store_path)
    if not exists and not create:
        raise InputError(f"no store at {store_path}; add --create with --schema FILE, or with --user and --time")
    schema = None
    if schema_path is not None or any(columns.values()):
        schema = _schema(table.schema, schema_path, columns)
    if exists:
        with HistoryStore.open(store_path, archive=archive, recent=recent) as store:
            _require_same(store, store_path, schema, buckets)
            _append(store, store.check(table), then_compact)
        return
    if schema is None:
        raise InputError("--create needs --schema FILE, or --user COLUMN and --time COLUMN")
    events = check_table(table, schema)
    _check_corrections(events, schema)
    n_buckets = DEFAULT_BUCKETS if buckets is None else buckets
    with HistoryStore.create(store_path, schema, n_buckets, archive=archive, recent=recent) as store:
        _append(store, events, then_compact)


def _schema(arrow: pa.Schema, schema_path: Path | None, columns: dict[str, str | None]) -> EventSchema:
    from thinrow.core.errors import InputError
    from thinrow.schema import EventSchema

    if schema_path is not None:
        if any(columns.values()):
            raise InputError("--schema names the columns already; leave out --user, --time and the like")
        return EventSchema.load(schema_path, arrow)
    user, time = columns["user"], columns["time"]
    if not (user and time):
        raise InputError("without --schema both --user COLUMN and --time COLUMN are needed")
    return EventSchema.infer(
        arrow,
        user=user,
        time=time,
        event_id=columns["event_id"],
        supersedes=columns["supersedes"],
        arrival_time=columns["arrival_time"],
    )


def _schema_of_source(arrow: pa.Schema, schema_path: Path | None, columns: dict[str, str | None]) -> EventSchema | None:
    """What the command line says; of the columns that a source adds only those that it names."""
    import pyarrow as pa

    from thinrow.sources.source import SOURCE_ID, SOURCE_KEY, SOURCE_TS

    if schema_path is None:
        if not any(columns.values()):
            return None
        added = {SOURCE_ID, SOURCE_KEY, SOURCE_TS} - set(columns.values())
        arrow = pa.schema([f for f in arrow if f.name not in added])
    return _schema(arrow, schema_path, columns)


def _require_same(store: HistoryStore, path: Path, schema: EventSchema | None, buckets: int | None) -> None:
    """Options that describe a store must describe the one that is there."""
    from thinrow.core.errors import InputError, SchemaError

    held = store.pin()
    if buckets is not None and buckets != held.n_buckets:
        raise InputError(
            f"--buckets {buckets}, but the store at {path} has {held.n_buckets}; leave it out (rebucket changes it)"
        )
    if schema is None:
        return
    own = f"in the store at {path}; leave the schema out to use its own"
    here, there = schema.to_dict(), held.schema.to_dict()
    for key in here:
        if key not in ("columns", "schema_id") and here[key] != there[key]:
            raise SchemaError(f"{key} is {here[key]!r}, but {there[key]!r} {own}")
    mine, its = ({c["name"]: c for c in s["columns"]} for s in (here, there))
    for name in [*mine, *its]:
        if _described(mine.get(name)) != _described(its.get(name)):
            raise SchemaError(
                f"column {name!r} is {_described(mine.get(name))}, but {_described(its.get(name))} {own}, or change "
                "the store's: thinrow schema"
            )


def _described(column: dict[str, object] | None) -> str:
    if column is None:
        return "missing"
    return ", ".join(f"{k} {v!r}" for k, v in column.items() if k not in ("name", "id"))


def _check_corrections(events: CheckedEvents, schema: EventSchema) -> None:
    """Try corrections in memory, so that one of nothing does not leave a new, empty store behind."""
    from thinrow.history.recent.memory import MemoryRecent

    if events.supersedes is not None:
        trial = MemoryRecent(schema)
        trial.append(events.users, events.event_ts, events.columns, events.event_ids, events.supersedes)


def _append(store: HistoryStore, events: CheckedEvents, then_compact: bool) -> None:
    from thinrow.core.errors import ThinrowError

    # A correction may turn out to name nothing; then all of the input must stay out, so it goes in as one append.
    chunk = _CHUNK_EVENTS if events.supersedes is None else max(len(events), 1)
    appended = done = 0
    try:
        with progress_bar("ingest") as progress:
            for start in range(0, len(events), chunk):
                result = store.append_checked(events.slice(start, min(start + chunk, len(events))))
                appended += int((~result.duplicate).sum())
                done += len(result.duplicate)
                progress(done, len(events))
    except (ThinrowError, KeyboardInterrupt):
        if done:
            click.echo(f"the first {done} of {len(events)} events are in the store", err=True)
        raise
    if store.schema.event_id_column is None:
        click.echo(f"{appended} events appended; without ids, the same files again would append them again")
    else:
        click.echo(f"{appended} events appended, {len(events) - appended} known already")
    if then_compact:
        with progress_bar("compact") as progress:
            report = store.compact(progress=progress)
        click.echo(f"generation {report.generation}: {report.events} events moved to the archive")
