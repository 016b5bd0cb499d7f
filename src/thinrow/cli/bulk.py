"""``thinrow ingest --bulk``: files that need not fit in memory go straight into the archive."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from thinrow.cli.common import progress_bar

if TYPE_CHECKING:
    import pyarrow as pa

    from thinrow.history.engines import EngineName
    from thinrow.history.load import LoadProgress
    from thinrow.history.store import HistoryStore
    from thinrow.schema import EventSchema

_ICEBERG = ".metadata.json"


@dataclass(frozen=True, slots=True)
class BulkOptions:
    """What the command line says; None where it says nothing."""

    create: bool
    buckets: int | None
    archive: str | None
    then_compact: bool
    work_dir: Path | None
    memory_mb: int | None
    engine: str | None
    recent: str | None = None


def bulk_ingest(
    files: Sequence[Path],
    store_path: Path,
    options: BulkOptions,
    schema_of: Callable[[pa.Schema], EventSchema | None],
    require_same: Callable[[HistoryStore, EventSchema | None], None],
) -> None:
    """Load ``files`` (Parquet, Arrow IPC, folders of these, or the metadata file of one Iceberg table).

    A store that is made for input which turns out bad is removed again.
    """
    from thinrow.core.errors import InputError
    from thinrow.history.bulk.source import arrow_schema
    from thinrow.history.store import DEFAULT_BUCKETS, HistoryStore

    iceberg = [path for path in files if path.name.endswith(_ICEBERG)]
    if iceberg and len(files) > 1:
        raise InputError(f"{iceberg[0]} is an Iceberg table; load it alone")
    source: Any = list(files)
    load_id = None
    if iceberg:
        from thinrow.examples.events import read_events

        source, load_id = read_events(iceberg[0])
    exists = HistoryStore.exists(store_path)
    if not exists and not options.create:
        raise InputError(f"no store at {store_path}; add --create with --schema FILE, or with --user and --time")
    schema = schema_of(source.schema if iceberg else arrow_schema(files))
    if not exists and schema is None:
        raise InputError("--create needs --schema FILE, or --user COLUMN and --time COLUMN")
    if exists:
        with HistoryStore.open(store_path, archive=options.archive, recent=options.recent) as store:
            require_same(store, schema)
            _load(store, source, load_id, options)
        return
    assert schema is not None
    buckets = DEFAULT_BUCKETS if options.buckets is None else options.buckets
    from thinrow.history.tiers import destroy_tier

    before = {path.name for path in store_path.iterdir()} if store_path.is_dir() else None
    with HistoryStore.create(store_path, schema, buckets, archive=options.archive, recent=options.recent) as store:
        try:
            _load(store, source, load_id, options)
            return
        except InputError as e:
            refused = e
            destroy_tier(store_path, store.recent)
            store.archive.destroy()
    _remove(store_path, before)
    raise refused


def _remove(store_path: Path, before: set[str] | None) -> None:
    """Take a store that was just made away again, and nothing else: the folder may hold more (None: it is new)."""
    from thinrow.history.place import CACHE, forget

    forget(store_path)
    for name in ("archive", "recent", "loads", CACHE):
        if name not in (before or ()):
            shutil.rmtree(store_path / name, ignore_errors=True)
    if before is None:
        with suppress(OSError):
            store_path.rmdir()


def _load(store: HistoryStore, source: Any, load_id: str | None, options: BulkOptions) -> None:
    from thinrow.history.load import MEMORY_BYTES

    before = store.pin().number
    with _bars() as progress:
        report = store.bulk_load(
            source,
            load_id=load_id,
            work_dir=options.work_dir,
            memory_bytes=MEMORY_BYTES if options.memory_mb is None else options.memory_mb << 20,
            engine=cast("EngineName", options.engine or "local"),
            progress=progress,
        )
    when = "loaded" if report.generation > before else "were loaded before,"
    click.echo(f"generation {report.generation}: {report.events} events {when} into {report.segments} segments")
    if options.then_compact:
        with progress_bar("compact") as bar:
            done = store.compact(progress=bar)
        click.echo(f"generation {done.generation}: {done.events} events moved to the archive")


@contextmanager
def _bars() -> Iterator[Callable[[LoadProgress], None]]:
    """Rows and bytes read, then buckets written, on standard error; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        rows, buckets = bars.add_task("rows", total=None), bars.add_task("buckets", total=None)

        def show(seen: LoadProgress) -> None:
            bars.update(rows, description=f"rows ({seen.bytes >> 20} MB)", completed=seen.rows, total=seen.of_rows)
            bars.update(buckets, completed=seen.buckets, total=seen.of_buckets or None)

        yield show
