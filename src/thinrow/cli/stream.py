"""``thinrow ingest`` of a source: a topic, a table, folders, text files; once, or until it is stopped."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinrow.cli.common import progress_bar

if TYPE_CHECKING:
    import pyarrow as pa

    from thinrow.history.store import HistoryStore
    from thinrow.schema import EventSchema
    from thinrow.sources.ingest import IngestReport

_TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_SAMPLE = 1_000
#: Between two lines about the progress where standard error is no terminal.
_TELL_S = 60.0
#: After a compaction that failed.
_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What the command line says of a source."""

    follow: bool
    name: str | None
    pseudonyms: str | None
    max_future_s: int | None
    compact_every_s: int | None
    compact_events: int | None

    @property
    def named(self) -> bool:
        """Whether anything is said."""
        return self.follow or any(
            v is not None
            for v in (self.name, self.pseudonyms, self.max_future_s, self.compact_every_s, self.compact_events)
        )


def is_stream(places: Sequence[str]) -> bool:
    """Whether these are no Parquet and Arrow files alone."""
    from thinrow.sources.places import is_url

    return any(is_url(p) or Path(p).is_dir() or Path(p).suffix in _TEXTS for p in places)


def stream_ingest(
    places: Sequence[str],
    store_path: Path,
    options: StreamOptions,
    *,
    create: bool,
    where: tuple[str | None, str | None],
    buckets: int | None,
    then_compact: bool,
    schema_of: Callable[[pa.Schema], EventSchema | None],
    require_same: Callable[[HistoryStore, EventSchema | None], None],
) -> None:
    """Read the source at ``places`` into the store, which is made if there is none: archive and recent tier ``where``.

    Raises as ``Ingest``.
    """
    from thinrow.core.errors import InputError
    from thinrow.history.store import DEFAULT_BUCKETS, HistoryStore
    from thinrow.sources.ingest import Ingest, IngestOptions
    from thinrow.sources.places import open_source
    from thinrow.sources.pseudonyms import Pseudonyms

    bounds = options.compact_every_s, options.compact_events
    if any(b is not None for b in bounds) and not options.follow:
        raise InputError("--compact-every and --compact-events go with --follow; add it, or use --compact")
    pseudonyms = None if options.pseudonyms is None else Pseudonyms.load(options.pseudonyms)
    exists = HistoryStore.exists(store_path)
    if not exists and not create:
        raise InputError(f"no store at {store_path}; add --create with --schema FILE, or with --user and --time")
    source: Any = open_source(places, options.name, follow=options.follow)
    schema = _schema(source, schema_of)
    if exists:
        store = HistoryStore.open(store_path, archive=where[0], recent=where[1])
    elif schema is None:
        raise InputError(
            "--create needs --schema FILE, or --user COLUMN and --time COLUMN; see `thinrow sources sample`"
        )
    else:
        n_buckets = DEFAULT_BUCKETS if buckets is None else buckets
        store = HistoryStore.create(store_path, schema, n_buckets, archive=where[0], recent=where[1])
    with store:
        if exists:
            require_same(store, schema)
        future = None if options.max_future_s is None else options.max_future_s * 1_000
        with stopped() as stop, _told() as tell, Compacting(store, *bounds, stop) as compacting:

            def progress(report: IngestReport) -> None:
                tell(report)
                compacting.progress(report)

            how = IngestOptions(max_future_ms=future, pseudonyms=pseudonyms)
            ingest = Ingest(store, source, how, progress, relieve=compacting.relieve)
            try:
                report = ingest.run(follow=options.follow, stop=stop)
            except BaseException:
                click.echo(f"so far: {describe(ingest.report)}", err=True)
                raise
            finally:
                source.close()
        click.echo(describe(report))
        if report.refused:
            click.echo(f"why they were refused: thinrow sources letters --store {store_path}", err=True)
        if then_compact:
            with progress_bar("compact") as bar:
                done = store.compact(progress=bar)
            click.echo(f"generation {done.generation}: {done.events} events moved to the archive")


def _schema(source: Any, schema_of: Callable[[pa.Schema], EventSchema | None]) -> EventSchema | None:
    """What the command line says of the schema, with the kinds of ids that a sample shows."""
    import pyarrow as pa

    from thinrow.core.errors import InputError
    from thinrow.sources.sample import arrow_of

    if schema_of_nothing(schema_of):
        return None
    table = source.sample(_SAMPLE)
    if not table.num_rows:
        raise InputError("the source has no event yet, of which to learn the kinds of ids; begin when it has one")
    assert isinstance(table, pa.Table)
    return schema_of(arrow_of(table))


def schema_of_nothing(schema_of: Callable[[pa.Schema], EventSchema | None]) -> bool:
    """Whether the command line says nothing of a schema."""
    import pyarrow as pa

    from thinrow.core.errors import SchemaError

    try:
        return schema_of(pa.schema([])) is None
    except SchemaError:
        return False


def describe(report: IngestReport) -> str:
    """One line."""
    text = f"{report.events} events appended, {report.duplicates} known already, {report.refused} refused"
    if report.skipped:
        text += f", {report.skipped} messages without an event"
    if report.lag:
        text += f"; {report.lag} behind"
    return text


@contextmanager
def stopped() -> Iterator[threading.Event]:
    """Set by SIGTERM or Ctrl-C: what was read becomes durable, then the command ends. A second Ctrl-C ends at once."""
    stop = threading.Event()

    def ask(number: int, frame: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _told() -> Iterator[Callable[[IngestReport], None]]:
    """Progress on standard error: a line that changes on a terminal, else one a minute."""
    from rich.console import Console

    console = Console(stderr=True)
    last = time.monotonic()
    if not console.is_terminal:

        def tell(report: IngestReport) -> None:
            nonlocal last
            if time.monotonic() - last >= _TELL_S:
                last = time.monotonic()
                click.echo(describe(report), err=True)

        yield tell
        return
    with console.status("ingest") as status:
        yield lambda report: status.update(describe(report))


class Compacting:
    """Compacts beside an ingest: every so often, and whenever so many events were appended since.

    A context. ``progress`` is told what the ingest has done; ``relieve`` makes room in a full tier, in its caller.
    """

    def __init__(self, store: HistoryStore, every_s: int | None, events: int | None, stop: threading.Event) -> None:
        """``every_s`` and ``events``: None for no such bound. ``stop``: whether the ingest was asked to end."""
        self._store, self._every_s, self._most, self._stop = store, every_s, events, stop
        self._appended = self._taken = 0
        self._due, self._ended = threading.Event(), threading.Event()
        wanted = every_s is not None or events is not None
        self._thread = threading.Thread(target=self._work, daemon=True) if wanted else None
        self.relieve = self._relieve if wanted else None

    def progress(self, report: IngestReport) -> None:
        """See the class."""
        self._appended = report.events
        if self._most is not None and self._appended - self._taken >= self._most:
            self._due.set()

    def _work(self) -> None:
        from thinrow.core.errors import ThinrowError

        while True:
            self._due.wait(self._every_s)
            if self._ended.is_set():
                return
            self._due.clear()
            # Before it is done: what is appended meanwhile is counted from here on.
            before, self._taken = self._taken, self._appended
            try:
                self._store.compact()
            except ThinrowError as e:
                self._taken = before
                click.echo(f"thinrow: the compaction failed, and is tried again: {e}", err=True)
                self._ended.wait(_PAUSE_S)

    def _relieve(self) -> None:
        from thinrow.core.errors import ThinrowError

        with suppress(ThinrowError):
            self._store.compact()

    def __enter__(self) -> Compacting:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self._ended.set()
        self._due.set()
        if self._thread is not None and (kind is None or not self._stop.is_set()):
            self._thread.join()
