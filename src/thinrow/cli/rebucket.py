"""``thinrow rebucket``."""

from __future__ import annotations

from pathlib import Path

import click

from thinrow.cli.common import progress_bar, store_option


@click.command()
@store_option
@click.option("--buckets", "n_buckets", type=int, help="A multiple of the present number; by default twice as many.")
def command(store_path: Path, n_buckets: int | None) -> None:
    """Rewrite the archive of a store to more buckets, as a new generation.

    Readers, appends and compactions go on; nothing that was logged changes. Training tables whose number of buckets
    divides the new one can be read as before. Safe to kill. The disk must have room for the archive twice, until
    `thinrow gc`.

    \b
    Example:
      thinrow rebucket --store S --buckets 64
    """
    from thinrow.history.store import HistoryStore

    with HistoryStore.open(store_path) as store, progress_bar("rebucket") as progress:
        report = store.rebucket(n_buckets, progress=progress)
    click.echo(f"generation {report.generation}: {report.events} events in {report.n_buckets} buckets")
