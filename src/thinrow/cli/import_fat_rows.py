"""``thinrow import-fat-rows``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinrow.cli.common import store_option

if TYPE_CHECKING:
    from thinrow.moving import FatLayout, ImportReport


def layout_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which column of the rows is what; see ``layout_of``."""
    for option in reversed(
        (
            click.option("--user", help="Column with the user.  [default: user_id, user, ...]"),
            click.option("--time", "request_ts", help="Column with the request's time.  [default: request_ts, ...]"),
            click.option(
                "--event-time", "event_ts", help="List column with the events' times.  [default: event_ts, ...]"
            ),
            click.option("--request-id", help="Integer column, unique a row.  [default: request_id, else row numbers]"),
            click.option(
                "--events", help="List columns of the events, comma-separated.  [default: as long as the times]"
            ),
            click.option("--context", help="Columns of the request.  [default: single values]"),
            click.option("--candidates", help="Columns of the candidates.  [default: cand_*, and other lists]"),
            click.option("--labels", help="Columns of the outcomes.  [default: label_*]"),
            click.option("--item", help="The candidate column that identifies one.  [default: item, or ...id]"),
            click.option(
                "--newest", type=click.IntRange(min=1), help="Rows hold the newest N events.  [default: found]"
            ),
            click.option("--horizon-ms", type=click.IntRange(min=1), help="Rows hold no events older than this."),
            click.option(
                "--boundary", type=click.Choice(["<", "<="]), help="Events at the request's time: in?  [found]"
            ),
            click.option("--order", type=click.Choice(["oldest-first", "newest-first"]), help="Of events.  [found]"),
        )
    ):
        function = option(function)
    return function


def layout_of(files: Sequence[Path], told: dict[str, Any]) -> FatLayout:
    """The layout of the rows in ``files`` by their first rows and what the options say."""
    from thinrow.core.errors import InputError
    from thinrow.history.bulk.source import arrow_schema, open_source
    from thinrow.moving import FatLayout
    from thinrow.moving.runs import CHUNK_ROWS

    names = arrow_schema(files).names
    first = next(iter(open_source(list(files)).chunks(0, names, CHUNK_ROWS)), None)
    if first is None:
        raise InputError("no rows in the files; check the paths")
    for name in ("events", "context", "candidates", "labels"):
        if told[name] is not None:
            told[name] = tuple(c.strip() for c in told[name].split(",") if c.strip())
    boundary, order = told.pop("boundary"), told.pop("order")
    return FatLayout.infer(
        first.table,
        **told,
        inclusive=None if boundary is None else boundary == "<=",
        newest_first=None if order is None else order == "newest-first",
    )


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@store_option
@click.option(
    "--table", "table_path", type=click.Path(path_type=Path), required=True, help="Directory of the examples."
)
@layout_options
@click.option("--window", "windows", multiple=True, help="NAME=MS: attribution window of an outcome.  [default: 1 h]")
@click.option("--buckets", type=int, default=16, show_default=True, help="Of store and table.")
@click.option("--memory", type=int, default=1024, show_default=True, help="MB to work in, on top of some 300.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="Room for the rows.  [default: in the store]")
@click.option("--verify/--no-verify", default=True, help="Rebuild every example and compare.  [default: verify]")
@click.option("--dry-run", is_flag=True, help="Say which column is taken for what, and stop.")
def command(
    files: Sequence[Path],
    store_path: Path,
    table_path: Path,
    windows: Sequence[str],
    buckets: int,
    memory: int,
    work_dir: Path | None,
    verify: bool,
    dry_run: bool,
    **told: Any,
) -> None:
    """Turn fat rows (FILES: a row a request, a list column a feature) into a new store and a new table of examples.

    The events of a user's overlapping rows become one history; each row becomes an example that shows exactly the
    row: late, restated and vanished events too. Rows that cannot be aligned are left out and counted. Run it again to
    go on after an interruption.

    \b
    Examples:
      thinrow import-fat-rows rows/ --store S --table T --dry-run
      thinrow import-fat-rows rows/ --store S --table T --newest 512 --window click=3600000
    """
    from thinrow.moving import ImportOptions, import_fat_rows

    layout = layout_of(files, told)
    _show(layout)
    if dry_run:
        return
    with _bars() as progress:
        options = ImportOptions(work_dir, buckets, memory << 20, _windows(windows), verify, progress)
        report = import_fat_rows(list(files), layout, store_path, table_path, options)
    _tell(report, store_path)


def _windows(texts: Sequence[str]) -> dict[str, int]:
    from thinrow.core.errors import InputError

    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value.isdigit() or int(value) < 1:
            raise InputError(f"--window {text!r}; write NAME=MS, such as click=3600000")
        found[name] = int(value)
    return found


def _show(layout: FatLayout) -> None:
    said = {
        "events": layout.events,
        "context": layout.context,
        "candidates": layout.candidates,
        "outcomes": layout.labels,
    }
    order = "newest first" if layout.newest_first else "oldest first"
    click.echo(f"user {layout.user}, request {layout.request_ts}, events {layout.event_ts} ({order})", err=True)
    for what, columns in said.items():
        click.echo(f"{what}: {', '.join(columns) or 'none'}", err=True)


def _tell(report: ImportReport, store_path: Path) -> None:
    from thinrow.history.store import HistoryStore
    from thinrow.moving.align import REASONS

    counts = report.counts
    with HistoryStore.open(store_path) as store:
        n_users, n_bytes = len(store.users()), store.pin().bytes
    click.echo(
        f"{counts.events} events of {n_users} users ({n_bytes} bytes) in place of {counts.row_events} in fat rows"
    )
    click.echo(
        f"late {counts.late}, restated {counts.restated}, reordered {counts.reordered}, vanished {counts.vanished}; "
        f"rows that saw their own time {counts.lifted_rows}, truncated {counts.truncated_rows}"
    )
    for reason, n in counts.rejected.items():
        ids = [str(i) for i, r in report.left_out if r == reason]
        click.echo(f"{n} rows left out: {REASONS[reason]} (requests {', '.join(ids[:5])}...)")
    how = f", read with max_len={report.newest}" if report.newest is not None else ""
    if report.verified == counts.rows:
        click.echo(f"{counts.rows} examples, each equal to its fat row{how}")
    else:
        click.echo(f"{counts.rows} examples, not verified{how}")


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each stage on standard error; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show
