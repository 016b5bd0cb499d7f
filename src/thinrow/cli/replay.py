"""``thinrow replay``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from thinrow.cli.common import parse_time, store_option
from thinrow.cli.train import table_option


@click.command()
@click.argument("models", type=click.Path(path_type=Path), nargs=-1, required=True)
@store_option
@table_option
@click.option("--since", "since_text", help="Requests from this time (inclusive): ms or ISO 8601.")
@click.option("--until", "until_text", help="Requests before this time (exclusive): ms or ISO 8601.")
def command(
    models: tuple[Path, ...], store_path: Path, table_path: Path, since_text: str | None, until_text: str | None
) -> None:
    """Rebuild what was served from the archive, and compare it with what the rankers read (online = offline).

    MODELS are releases, checkpoints, or folders of them; each impression in --table, which joins those of rankers, is
    held against the model that it names. Inputs must agree bit for bit, scores to 1e-5. The exit status is 1 where
    they do not.

    \b
    Examples:
      thinrow replay releases --store S --table served
      thinrow replay releases --store S --table served --since 2017-11-20 --until 2017-11-21
    """
    from thinrow.dpp import RowFilter
    from thinrow.examples.table import ExampleTable
    from thinrow.history.store import HistoryStore
    from thinrow.serving import compare
    from thinrow.serving.release import models_at

    rows = RowFilter(
        since_ms=None if since_text is None else parse_time(since_text),
        until_ms=None if until_text is None else parse_time(until_text),
    )
    given = [model for path in models for model in models_at(path)]
    with HistoryStore.open(store_path) as store, ExampleTable.open(table_path) as table:
        found = compare(given, store, table, rows)
    click.echo(
        f"{found.requests} requests: {found.input_differences} with other inputs, {found.score_differences} with other "
        f"scores (largest difference {found.largest_score_difference:.1e}); {found.degraded} had been degraded, "
        f"{found.unknown} are of other models"
    )
    sys.exit(0 if found.same else 1)
