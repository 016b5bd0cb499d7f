"""The snapshot service as a process: ``thinrow serve snapshots``.

Worked example of its end: SIGTERM, and ``/readyz`` answers 503 while requests are still taken for ``drain_s``, so that
a balancer looks elsewhere; then no new connections, those under way are answered, the journal goes to the logs, the
table gets what has closed, and the process ends with status 0. A second SIGTERM ends the waiting.
"""

from __future__ import annotations

import json
import resource
import signal
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from thinrow.core.errors import InputError, MissingExtraError
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.splits import SplitLog
from thinrow.examples.table import ExampleTable
from thinrow.history.store import HistoryStore
from thinrow.online.app import Limits, create_app
from thinrow.online.journal import Journal
from thinrow.online.tables import COMMIT_S, TableWriter
from thinrow.schema import ExampleSchema

try:
    import uvicorn
except ImportError as e:  # pragma: no cover
    raise MissingExtraError("uvicorn", "serve") from e


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Attributes:
    store: directory of the store.
    log: directory that gets ``impressions/``, ``outcomes/`` and ``journal/``; None to serve snapshots alone.
    table: directory of the training table into which closed requests are joined; None to leave that to others.
    example_schema: JSON file with the fields of impressions; None for those of the table.
    host, port: 0 for any free port.
    commit_s: a commit of the table so often.
    drain_s: requests are taken so long after SIGTERM.
    lateness_s: windows close by the times in the logs, of which a record may come so much late; None: by the clock.
    splits: directory of the log of splits that closed requests are joined into, beside the table or alone; made if new.
    """

    store: Path
    log: Path | None = None
    table: Path | None = None
    example_schema: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    commit_s: float = COMMIT_S
    drain_s: float = 0.0
    limits: Limits = field(default_factory=Limits)
    lateness_s: float | None = None
    splits: Path | None = None


class DrainingServer(uvicorn.Server):
    """Drains before it stops, so that ``service.draining`` is seen first; says where it listens, and what it serves."""

    def __init__(self, config: uvicorn.Config, service: Any, drain_s: float, what: str = "snapshots") -> None:
        super().__init__(config)
        self._service, self._drain_s, self._what = service, drain_s, what

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining or not self._drain_s:
            super().handle_exit(sig, frame)
            return
        self._service.draining = True
        timer = threading.Timer(self._drain_s, super().handle_exit, (sig, frame))
        timer.daemon = True
        timer.start()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            host, port = server.sockets[0].getsockname()[:2]
            print(f"serving {self._what} at http://{host}:{port}", flush=True)


def allow_open_files() -> None:
    """As many connections as the system lets the process have: callers keep idle ones, and each is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where the kernel allows fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        InputError: a log without the schema of its impressions, or options that need others.
        StoreNotFound, StoreError: there is no store, or another service has the log.
    """
    if options.splits is not None and (options.log is None or options.lateness_s is None):
        raise InputError("--splits needs --log, and --lateness-s, for its windows close by the times in the log")
    if options.lateness_s is not None and options.table is None and options.splits is None:
        raise InputError("--lateness-s says when the join closes windows; add --table, or --splits")
    allow_open_files()
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            # Uvicorn raises a signal again when it has served it, to the handler from before: that must not end what
            # follows, the way of the journal to the logs.
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        store = stack.enter_context(HistoryStore.open(options.store))
        table = None
        if options.table is not None:
            table = stack.enter_context(ExampleTable.open(options.table, n_buckets=store.pin().n_buckets))
        examples = _schema(options, table)
        journal = writer = None
        if options.log is not None:
            assert examples is not None
            logs = (
                ImpressionLog(options.log / "impressions", store.schema, examples),
                OutcomeLog(options.log / "outcomes"),
            )
            journal = Journal(options.log / "journal", *logs)
            if table is not None or options.splits is not None:
                writer = TableWriter(
                    *logs,
                    table,
                    splits=None if options.splits is None else SplitLog(options.splits, store.schema, examples),
                    journal=journal,
                    commit_s=options.commit_s,
                    lateness_ms=None if options.lateness_s is None else round(1_000 * options.lateness_s),
                )
                stack.callback(writer.close)
            # Called first: the journal brings its records to the logs before the table's last join.
            stack.callback(journal.close)
        app = create_app(store, journal=journal, examples=examples, limits=options.limits, table=writer)
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=30,
        )
        DrainingServer(config, app.state.service, options.drain_s).run()


def _schema(options: ServeOptions, table: ExampleTable | None) -> ExampleSchema | None:
    if options.example_schema is not None:
        try:
            return ExampleSchema.from_dict(json.loads(options.example_schema.read_bytes()))
        except (OSError, ValueError) as e:
            raise InputError(f"{options.example_schema} holds no example schema in JSON: {e}") from e
    if table is not None:
        return table.example_schema
    if options.log is not None:
        raise InputError("--log needs the fields of impressions; add --table, or --example-schema FILE")
    return None
