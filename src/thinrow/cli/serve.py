"""``thinrow serve``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from thinrow.cli.common import store_option
from thinrow.cli.serve_ranker import local, ranker


@click.group()
def command() -> None:
    """Serve histories over HTTP, embeddings to rankers, and rankings."""


command.add_command(ranker)
command.add_command(local)


@command.command()
@store_option
@click.option("--log", "log_path", type=click.Path(path_type=Path), help="Take impressions and outcomes into this log.")
@click.option("--table", "table_path", type=click.Path(path_type=Path), help="Join closed requests into this table.")
@click.option("--splits", type=click.Path(path_type=Path), help="Join them into this log of splits too, or alone.")
@click.option(
    "--lateness-s",
    type=click.FloatRange(min=0),
    help="Windows close by the times in the log; records may come so late.  [by the clock]",
)
@click.option(
    "--example-schema", type=click.Path(path_type=Path), help="Fields of impressions, in JSON.  [the table's]"
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65_535), default=8000, show_default=True, help="0: any free one.")
@click.option("--commit-s", type=click.FloatRange(min=0.05), default=60.0, show_default=True, help="Between commits.")
@click.option(
    "--drain-s", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Between SIGTERM and end."
)
@click.option("--threads", type=click.IntRange(min=1), default=4, show_default=True, help="Snapshots at once.")
@click.option("--waiting", type=click.IntRange(min=0), default=64, show_default=True, help="Snapshots that may wait.")
@click.option("--max-users", type=click.IntRange(min=1), default=1024, show_default=True, help="Of one call.")
@click.option("--max-events", type=click.IntRange(min=1), default=1 << 18, show_default=True, help="Of one answer.")
@click.option("--max-body", type=click.IntRange(min=1), default=8, show_default=True, help="MB of one call.")
def snapshots(
    store_path: Path,
    log_path: Path | None,
    table_path: Path | None,
    splits: Path | None,
    lateness_s: float | None,
    example_schema: Path | None,
    host: str,
    port: int,
    commit_s: float,
    drain_s: float,
    threads: int,
    waiting: int,
    max_users: int,
    max_events: int,
    max_body: int,
) -> None:
    """Serve snapshots to rankers in any language, and log what they showed (docs/serving.md).

    An answer to impressions and outcomes means that they are on disk. SIGTERM ends it when all is answered.

    \b
    Examples:
      thinrow serve snapshots --store S --port 8000
      thinrow serve snapshots --store S --log L --table T --drain-s 10
      thinrow serve snapshots --store S --log L --table T --splits P --lateness-s 60
    """
    from thinrow.online.app import Limits
    from thinrow.online.server import ServeOptions, serve

    limits = Limits(body_bytes=max_body << 20, users=max_users, events=max_events, threads=threads, waiting=waiting)
    where = store_path, log_path, table_path, example_schema
    serve(ServeOptions(*where, host, port, commit_s, drain_s, limits, lateness_s, splits))


@command.command()
@click.option(
    "--export",
    "exports",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="Folder of exports; give more for tables of several.",
)
@click.option("--shard", default="0/1", show_default=True, metavar="I/N", help="Range I of N equal ranges of the keys.")
@click.option(
    "--listen",
    multiple=True,
    default=("tcp:127.0.0.1:7000",),
    show_default=True,
    metavar="ADDRESS",
    help="tcp:HOST:PORT (0: any free one) or unix:PATH; give more for several.",
)
@click.option("--table", "tables", multiple=True, help="Serve only this table; give more for several.  [all]")
@click.option("--http", metavar="HOST:PORT", help="/healthz, /readyz and /metrics.  [none]")
@click.option(
    "--refresh-s",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Between looks for a newer export; 0: never.",
)
@click.option(
    "--drain-s", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Between SIGTERM and end."
)
@click.option("--no-check", is_flag=True, help="Open at once, without reading every byte against its CRC.")
@click.option("--lookups", type=click.IntRange(min=1), help="Look-ups at once.  [one a processor]")
@click.option("--waiting", type=click.IntRange(min=0), default=64, show_default=True, help="Look-ups that may wait.")
@click.option("--credits", type=click.IntRange(min=1), default=8, show_default=True, help="Requests of a connection.")
@click.option("--connections", type=click.IntRange(min=1), default=256, show_default=True, help="At once.")
@click.option("--max-request", type=click.IntRange(1, 1024), default=4, show_default=True, help="MB of one request.")
@click.option("--memory", type=click.IntRange(1, 4095), default=1024, show_default=True, help="MB of all under way.")
def embeddings(
    exports: tuple[Path, ...],
    shard: str,
    listen: tuple[str, ...],
    tables: tuple[str, ...],
    http: str | None,
    refresh_s: float,
    drain_s: float,
    no_check: bool,
    lookups: int | None,
    waiting: int,
    credits: int,
    connections: int,
    max_request: int,
    memory: int,
) -> None:
    """Serve rows and pooled sums of exported tables (docs/embedding-servers.md).

    Newer exports in the folders are taken up while it serves. What is more than it may hold is refused at once.
    SIGTERM ends it when all is answered.

    \b
    Examples:
      thinrow serve embeddings --export E --listen tcp:0.0.0.0:7000 --http 0.0.0.0:7001
      thinrow serve embeddings --export E --shard 0/4 --listen unix:/run/e0 --drain-s 5
    """
    # Connections are the threads here: a look-up that were spread over more would wait for theirs.
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    from thinrow.serving.lookups.process import EmbeddingsOptions, serve
    from thinrow.serving.lookups.server import ServerLimits

    index, _, count = shard.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise click.BadParameter(f"{shard!r}; it must be I/N with I from 0 to N-1", param_hint="--shard")
    limits = ServerLimits(
        connections=connections,
        credits=credits,
        request_bytes=max_request << 20,
        memory_bytes=memory << 20,
        lookups=lookups,
        waiting=waiting,
    )
    serve(
        EmbeddingsOptions(
            exports, int(index), int(count), listen, tables or None, http, refresh_s, drain_s, not no_check, limits
        )
    )
