"""``thinrow serve``."""

from __future__ import annotations

from pathlib import Path

import click

from thinrow.cli.common import store_option


@click.group()
def command() -> None:
    """Serve histories over HTTP."""


@command.command()
@store_option
@click.option("--log", "log_path", type=click.Path(path_type=Path), help="Take impressions and outcomes into this log.")
@click.option("--table", "table_path", type=click.Path(path_type=Path), help="Join closed requests into this table.")
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
    """
    from thinrow.online.app import Limits
    from thinrow.online.server import ServeOptions, serve

    limits = Limits(body_bytes=max_body << 20, users=max_users, events=max_events, threads=threads, waiting=waiting)
    serve(ServeOptions(store_path, log_path, table_path, example_schema, host, port, commit_s, drain_s, limits))
