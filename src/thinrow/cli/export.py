"""``thinrow export``."""

from __future__ import annotations

from pathlib import Path

import click

from thinrow.cli.common import parse_time, progress_bar, store_option


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@store_option
@click.option("--table", "name", default="events", show_default=True, help="Name of the table.")
@click.option("--at", "at_text", help="Only events before this time (exclusive): ms or ISO 8601.")
@click.option("--newest", type=click.IntRange(min=1), help="Only the newest N events of each user.")
@click.option("--columns", help="Comma-separated columns; default: all.")
def command(
    out: Path, store_path: Path, name: str, at_text: str | None, newest: int | None, columns: str | None
) -> None:
    """Write the events of all users to a new Iceberg table in the directory OUT.

    One row an event that is visible now, partitioned by bucket[N](user_id) and sorted by user and time. The table
    appears whole, in one commit; an export that was killed is simply run again. Prints the URI of the metadata file,
    by which engines open the table without a catalog.

    \b
    Examples:
      thinrow export out --store S
      thinrow export out --store S --table recent --newest 1000 --columns product_id,price
    """
    from thinrow.examples.export import export_events
    from thinrow.history.store import HistoryStore
    from thinrow.schema import Projection

    names = None if columns is None else tuple(c.strip() for c in columns.split(","))
    at = None if at_text is None else parse_time(at_text)
    with HistoryStore.open(store_path) as store, progress_bar("export") as progress:
        done = export_events(store, out, name, Projection(columns=names, max_len=newest), at=at, progress=progress)
    files = "1 file" if done.files == 1 else f"{done.files} files"
    click.echo(f"{done.rows} events in {files}, {done.bytes} bytes", err=True)
    click.echo(done.metadata)
