"""``thinrow restore``."""

from __future__ import annotations

from pathlib import Path

import click

from thinrow.cli.common import store_option


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@store_option
@click.option("--backup", "number", type=int, help="Which backup of the folder; the newest by default.")
@click.option("--recent", help="Redis server for the recent events, redis://HOST:PORT/DB; default: the folder.")
def command(folder: Path, store_path: Path, number: int | None, recent: str | None) -> None:
    """Make a store from a backup in FOLDER; --store is a new path.

    Ingest again what came after the backup: events with ids are never doubled. Killed? Run it again.

    \b
    Example:
      thinrow restore /mnt/other/copies --store restored
      thinrow restore /mnt/other/copies --store restored --recent redis://cache:6379/0
    """
    from thinrow.core.units import format_bytes
    from thinrow.history.store import HistoryStore

    report = HistoryStore.restore(folder, store_path, number, recent=recent)
    click.echo(
        f"backup {report.number} restored: generation {report.generation} with {report.events} events, "
        f"{format_bytes(report.bytes)}; next: thinrow verify --store {store_path}"
    )
