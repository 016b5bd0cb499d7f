"""``thinrow backfill``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from thinrow.cli.common import progress_bar, store_option


@click.command()
@click.argument("column")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@store_option
def command(column: str, files: Sequence[Path], store_path: Path) -> None:
    """Give events that are archived already values of COLUMN, from Parquet or Arrow IPC FILES.

    A row names its event by the user, event_ts and arrival, as `thinrow read --out` writes them, or by the user and the
    event id. Events that no row names keep what they have. No version of a history changes, and no event is rewritten.

    \b
    Example:
      thinrow read --all-users --store S --columns price --out events.parquet
      ... compute a column `city` beside user_id, event_ts and arrival ...
      thinrow backfill city cities.parquet --store S
    """
    from thinrow.cli.tables import read_tables
    from thinrow.history.store import HistoryStore

    table = read_tables(files)
    with HistoryStore.open(store_path) as store, progress_bar("backfill") as progress:
        done = store.backfill(column, table, progress=progress)
    click.echo(f"generation {done.generation}: {done.placed} values of {column}, in {done.segments} overlays")
    if done.unplaced:
        click.echo(
            f"{done.unplaced} rows name no archived event: if it is recent, compact and backfill again "
            "(thinrow compact)",
            err=True,
        )
