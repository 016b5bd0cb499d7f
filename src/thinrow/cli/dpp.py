"""``thinrow dpp``: the master of readers, and a look at it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from thinrow.cli.common import store_option


@click.group()
def command() -> None:
    """Share workers among readers of training batches, and watch them."""


@command.command()
@click.option("--workers", type=click.IntRange(1), help="How many there are to share.  [one a core]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8790, show_default=True, help="0 takes a free one.")
@click.option("--ledger", type=click.Path(path_type=Path, dir_okay=False), help="File that keeps readers' positions.")
@click.option("--lease-s", type=click.FloatRange(0.1), default=10.0, show_default=True, help="A silent reader's share.")
def master(workers: int | None, host: str, port: int, ledger: Path | None, lease_s: float) -> None:
    """Count out one pool of workers to readers that name this address; runs until SIGTERM or Ctrl-C.

    \b
    Examples:
      thinrow dpp master --workers 16 --ledger positions.json
      curl http://127.0.0.1:8790/metrics
    """
    import os

    from thinrow.cli.stream import stopped
    from thinrow.dpp.master import Master, MasterServer

    one = Master(workers or os.cpu_count() or 1, ledger=ledger, lease_s=lease_s)
    with MasterServer(one, host, port) as server, stopped() as stop:
        click.echo(f"{one.workers} workers at {server.url}; readers: engine=Shared({server.url!r}, name)")
        stop.wait()


@command.command()
@click.argument("url", default="http://127.0.0.1:8790")
@click.option("--every-s", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Print one table and end.")
def top(url: str, every_s: float, once: bool) -> None:
    """Show the readers of the master at URL: rate, stall, waste, workers, bottleneck and why.

    \b
    Examples:
      thinrow dpp top
      thinrow dpp top http://trainer-0:8790 --once
    """
    from rich.console import Console
    from rich.live import Live

    from thinrow.core.errors import InputError

    console = Console()
    if once:
        console.print(_table(_status(url), console.width))
        return
    with Live(_table(_status(url), console.width), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            try:
                shown = _table(_status(url), console.width)
            except InputError as e:
                # One that is begun again is there in a moment.
                shown = str(e)
            live.update(shown, refresh=True)


def _status(url: str) -> dict[str, Any]:
    import urllib.request

    from thinrow.core.errors import InputError

    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/status", timeout=5) as answer:
            status: dict[str, Any] = json.load(answer)
    except (OSError, ValueError) as e:
        raise InputError(f"no master at {url}: {e}; begin one with `thinrow dpp master`") from None
    return status


#: Characters that all columns of a master's page need; below, the fewest that say how a reader is.
_WIDE = 160
_NARROW: tuple[tuple[str, str], ...] = (
    ("reader", "{name}"),
    ("position", "{head:,}"),
    ("of", "{items}"),
    ("items/s", "{rate:.2f}"),
    ("stall", "{stall:.0%}"),
    ("waste", "{waste:.0%}"),
    ("buffer", "{depth:.0%}"),
    ("workers", "{workers}/{share}"),
    ("bottleneck", "{bottleneck}"),
)


def _table(status: dict[str, Any], width: int) -> Any:
    """The readers as a table of a terminal of so many characters; in a narrow one the reasons follow it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from thinrow.dpp.master import COLUMNS

    members = status["members"]
    title = f"{len(members)} readers, {sum(m['workers'] for m in members)} of {status['workers']} workers"
    if width >= _WIDE:
        table = Table(*(name for name, _, _ in COLUMNS), title=title)
        for member in members:
            table.add_row(*(Text(shown.format(member[key])) for _, key, shown in COLUMNS))
        return table
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
    for i, (name, _) in enumerate(_NARROW):
        # A name gives way before a number does.
        table.add_column(name, overflow="fold", no_wrap=bool(i), justify="left" if i in (0, 8) else "right")
    for member in members:
        table.add_row(*(Text(shown.format(**member)) for _, shown in _NARROW))
    return Group(table, *(Text(f"{m['name']}: {m['why']}") for m in members if m["why"]))


@command.command()
@store_option
@click.option("--table", "table_path", type=click.Path(path_type=Path), required=True, help="Directory of the table.")
@click.option("--recipe", help="Read what this recipe reads, with its feature plan.  [every column, no plan]")
@click.option("--columns", help="Columns of histories, separated by commas.")
@click.option("--max-len", type=click.IntRange(1), help="Newest events of a history.")
@click.option("--batches", type=click.IntRange(1), default=32, show_default=True, help="To read, after one to warm up.")
def profile(
    store_path: Path, table_path: Path, recipe: str | None, columns: str | None, max_len: int | None, batches: int
) -> None:
    """Say where bytes, CPU seconds and time go when training batches are made, by column and stage.

    \b
    Examples:
      thinrow dpp profile --store S --table T --max-len 1000
      thinrow dpp profile --store S --table T --recipe mine.py:wide
    """
    from thinrow.core.errors import InputError
    from thinrow.dpp.profile import profile as measure
    from thinrow.examples.table import ExampleTable
    from thinrow.history.store import HistoryStore
    from thinrow.schema import Projection

    options: dict[str, Any] = {}
    if recipe is not None:
        from thinrow.recipes.registry import find_recipe

        if columns is not None or max_len is not None:
            raise InputError("--recipe says which columns and how many events; leave --columns and --max-len out")
        config = find_recipe(recipe)()
        options = {"plan": config.ranker.plan, "base_rows": config.base_rows, "block": config.block}
        options |= {"projection": config.ranker.projection, "budget": config.budget, "rows": config.rows}
    elif columns is not None:
        options["projection"] = Projection(columns=tuple(columns.split(",")), max_len=max_len)
    else:
        options["max_len"] = max_len
    with HistoryStore.open(store_path) as store, ExampleTable.open(table_path) as table:
        found = measure(store, table, batches=batches, **options)
    click.echo(
        f"{found.batches} batches of {found.examples} examples with {found.events} events in {found.wall_s:.2f} s, "
        f"{found.cpu_s:.2f} CPU s: {found.cpu_s_per_million:.3g} CPU s per million events"
    )
    whole, size = max(found.wall_s, 1e-9), max(sum(found.column_bytes.values()), 1)
    for stage, seconds in found.stage_s.items():
        click.echo(f"stage   {stage:<16}{seconds:>12.3f} s     {seconds / whole:>6.1%}")
    for name, n in found.column_bytes.items():
        click.echo(f"column  {name:<16}{n:>12} bytes {n / size:>6.1%}")
