"""``thinrow compact``."""

from __future__ import annotations

from pathlib import Path

import click

from thinrow.cli.common import progress_bar, store_option


@click.command()
@store_option
@click.option("--full", is_flag=True, help="Leave a single level: rewrite every bucket to one segment.")
def command(store_path: Path, full: bool) -> None:
    """Move recent events into a new generation of the archive.

    Small segments are merged with what is new, large ones stay, so that a bucket has a few; --full alone leaves one.
    Readers of the old generation are not disturbed. Safe to kill at any moment, and to repeat.

    \b
    Example, as a daily job:
      thinrow compact --store S && thinrow gc --store S
    """
    from thinrow.history.store import HistoryStore

    with HistoryStore.open(store_path) as store, progress_bar("compact") as progress:
        report = store.compact(full=full, progress=progress)
    click.echo(
        f"generation {report.generation}: {report.events} events moved, {report.merged_events} rewritten, "
        f"{report.segments} segments"
    )
