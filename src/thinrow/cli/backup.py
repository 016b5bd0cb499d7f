"""``thinrow backup``."""

from __future__ import annotations

from pathlib import Path

import click

from thinrow.cli.common import progress_bar, store_option


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@store_option
@click.option("--keep", type=int, help="Remove older backups of the folder, all but the newest so many.")
def command(folder: Path, store_path: Path, keep: int | None) -> None:
    """Copy a store into FOLDER as it is at one moment, while it is written to.

    Files that never change are copied once for all backups in a folder; it takes backups of one store, one at a time.
    Logs and tables that are in the store's directory are copied too. Safe to kill: a backup is there whole or not at
    all. Check it with `thinrow verify --store FOLDER`, use it with `thinrow restore`.

    \b
    Example:
      thinrow backup /mnt/other/copies --store S --keep 7
    """
    from thinrow.core.units import format_bytes
    from thinrow.history.store import HistoryStore

    with HistoryStore.open(store_path) as store, progress_bar("backup") as progress:
        report = store.backup(folder, keep=keep, progress=progress)
    click.echo(
        f"backup {report.number} of generation {report.generation}: {report.files} files copied, "
        f"{format_bytes(report.bytes)}; {format_bytes(report.shared_bytes)} were there already"
    )
