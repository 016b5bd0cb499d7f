"""``thinrow gc``."""

from __future__ import annotations

from pathlib import Path

import click

from thinrow.cli.common import store_option


@click.command()
@store_option
@click.option("--keep", default=2, show_default=True, help="Generations that stay, the newest.")
@click.option(
    "--grace",
    "grace_s",
    default=3_600.0,
    show_default=True,
    help="Seconds that a generation stays after it was replaced, and that an unfinished write stays.",
)
@click.option("--dry-run", is_flag=True, help="Say what would go; change nothing.")
def command(store_path: Path, keep: int, grace_s: float, dry_run: bool) -> None:
    """Remove generations that are neither among the newest, young nor held by a reader, and every file that only they
    needed; and what killed writers left.

    Safe beside readers and writers, and to kill at any moment.

    \b
    Examples:
      thinrow gc --store S                      what was replaced an hour ago or more, but for the last
      thinrow gc --store S --keep 1 --grace 0   all that nobody reads
    """
    from thinrow.core.errors import StoreNotFound
    from thinrow.core.units import format_bytes
    from thinrow.history.archive.generation import Archive
    from thinrow.history.place import archive_objects
    from thinrow.history.store import HistoryStore

    if not HistoryStore.exists(store_path):
        raise StoreNotFound(f"no store at {store_path}; check the path, `thinrow ingest --create` makes one")
    archive = Archive(archive_objects(store_path))
    report = archive.collect_garbage(keep=keep, grace_s=grace_s, dry_run=dry_run)
    click.echo(
        f"{'would remove' if dry_run else 'removed'} {len(report.generations)} generations and "
        f"{len(report.objects)} files, {format_bytes(report.bytes)}"
    )
    if not report.generations and len(left := archive.numbers()) > keep:
        click.echo(f"{len(left)} generations stay: replaced within --grace {grace_s:g} seconds, or held")
    for number, holder, writes in archive.holders():
        click.echo(f"generation {number} is held by {holder}" + (", which writes" if writes else ""))
