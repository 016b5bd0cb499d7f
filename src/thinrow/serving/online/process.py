"""The ranker as a process: ``thinrow serve ranker``.

Worked example of its end: SIGTERM, and ``/readyz`` answers 503 while requests are still taken for ``drain_s``; then no
new connections, what is inside is ranked and answered, the journal goes to the logs, the table gets what has closed,
and the process ends with status 0. A second SIGTERM ends the waiting.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from thinrow.core.errors import MissingExtraError, StoreNotFound, ThinrowError
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.table import ExampleTable
from thinrow.history.store import HistoryStore
from thinrow.online.journal import Journal
from thinrow.online.server import DrainingServer, allow_open_files
from thinrow.online.tables import COMMIT_S, TableWriter
from thinrow.serving.lookups.stats import Stats
from thinrow.serving.online.app import RankService, WebLimits, create_app
from thinrow.serving.online.batcher import Batcher, BatchLimits
from thinrow.serving.online.live import Arms, ArmSpec, Live, LookupOptions

try:
    import uvicorn
except ImportError as e:  # pragma: no cover
    raise MissingExtraError("uvicorn", "serve") from e


@dataclass(frozen=True, slots=True)
class RankerOptions:
    """Attributes:
    store: directory of the store.
    arms: one or more.
    salt: of the experiment: with another one users are in other arms.
    log: directory that gets ``impressions/``, ``outcomes/`` and ``journal/``; None to log nothing.
    table: directory of the training table into which closed requests are joined; made where it is not there. None to
        leave that to others.
    host, port: 0 for any free port.
    refresh_s: newer releases are looked for so often; 0 for never.
    commit_s: a commit of the table so often.
    drain_s: requests are taken so long after SIGTERM.
    say_requests: a line of JSON on standard error for each request.
    torch_threads: of one operation. Those of a request are small: more threads wait for each other longer than they
        work, twice as long in all on two processors.
    """

    store: Path
    arms: Sequence[ArmSpec]
    salt: str = ""
    log: Path | None = None
    table: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8100
    refresh_s: float = 1.0
    commit_s: float = COMMIT_S
    drain_s: float = 0.0
    say_requests: bool = False
    torch_threads: int = 1
    lookups: LookupOptions = field(default_factory=LookupOptions)
    batch: BatchLimits = field(default_factory=BatchLimits)
    web: WebLimits = field(default_factory=WebLimits)


def say(event: str, **fields: Any) -> None:
    """A line of JSON on standard error."""
    print(
        json.dumps({"time": round(time.time(), 3), "event": event, **fields}, default=str), file=sys.stderr, flush=True
    )


def serve(options: RankerOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        StoreNotFound, StoreError: there is no store, or another service has the log.
        CheckpointNotFound, CheckpointMismatch: there is no release.
    """
    allow_open_files()
    torch.set_num_threads(options.torch_threads)
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            # As in thinrow.online.server: a signal that uvicorn raises again must not end what follows.
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        store = stack.enter_context(HistoryStore.open(options.store))
        lives, stats = list[Live](), Stats()
        for spec in options.arms:
            lives.append(Live(store, spec, options.lookups, say=say))
            stack.callback(lives[-1].close)
            _show(lives[-1], stats)
        arms = Arms(lives, options.salt)
        journal = _journal(options, store, arms, stack)
        batcher = stack.enter_context(
            Batcher(
                arms.choose, log=None if journal is None else journal.impressions, limits=options.batch, stats=stats
            )
        )
        refresher = _Refresher(lives, options.refresh_s)
        stack.callback(refresher.close)
        service = RankService(
            store, arms, batcher, journal=journal, limits=options.web, say=say if options.say_requests else None
        )
        config = uvicorn.Config(
            create_app(service),
            host=options.host,
            port=options.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=30,
        )
        say("started", store=str(options.store), releases={live.spec.name: live.release.name for live in lives})
        DrainingServer(config, service, options.drain_s, "rankings").run()
    say("ended", requests=batcher.stats.read().get("requests", {}))


def _journal(options: RankerOptions, store: HistoryStore, arms: Arms, stack: ExitStack) -> Journal | None:
    if options.log is None:
        return None
    schema = arms.lives[0].ranker.schema
    logs = ImpressionLog(options.log / "impressions", store.schema, schema), OutcomeLog(options.log / "outcomes")
    journal = Journal(options.log / "journal", *logs)
    if options.table is not None:
        n_buckets = store.pin().n_buckets
        try:
            table = ExampleTable.open(options.table, n_buckets=n_buckets)
        except StoreNotFound:
            table = ExampleTable.create(
                options.table, event_schema=store.schema, example_schema=schema, n_buckets=n_buckets
            )
        stack.enter_context(table)
        stack.callback(TableWriter(*logs, table, journal=journal, commit_s=options.commit_s).close)
    # Called first: the journal brings its records to the logs before the table's last join.
    stack.callback(journal.close)
    return journal


def _show(live: Live, stats: Stats) -> None:
    """Have metrics of cache and kept states among ``stats``, of the release that is live when they are read."""
    of_arm = "".join(c if c.isalnum() else "_" for c in live.spec.name and f"_{live.spec.name}")

    def of_cache(name: str) -> Callable[[], float]:
        return lambda: 0.0 if live.caches is None or live.caches.live is None else live.caches.live.read()[name]

    def of_prefixes(name: str) -> Callable[[], float]:
        return lambda: 0.0 if live.ranker.model.prefixes is None else live.ranker.model.prefixes.read()[name]

    if live.caches is not None:
        stats.gauges |= {f"cache_{n}{of_arm}": of_cache(n) for n in ("rows", "bytes", "may_have_bytes", "hit_rate")}
    if live.ranker.model.prefixes is not None:
        stats.gauges |= {f"prefixes_{n}{of_arm}": of_prefixes(n) for n in ("hits", "misses", "entries", "bytes")}


class _Refresher:
    """Looks for newer releases, on a thread of its own."""

    def __init__(self, lives: Sequence[Live], every_s: float) -> None:
        self._lives, self._every_s = lives, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="releases", daemon=True)
        if every_s:
            self._thread.start()

    def _work(self) -> None:
        while not self._stop.wait(self._every_s):
            for live in self._lives:
                try:
                    live.refresh()
                except (ThinrowError, OSError) as error:
                    say("refresh_failed", arm=live.spec.name, why=str(error))

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


__all__ = ["RankerOptions", "serve"]
