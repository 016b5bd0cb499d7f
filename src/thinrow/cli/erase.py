"""``thinrow erase``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thinrow.cli.common import (
    as_stored_option,
    parse_named,
    parse_time,
    parse_users,
    progress_bar,
    pseudonyms_option,
    store_option,
)

if TYPE_CHECKING:
    from thinrow.history.erase import EventsOf
    from thinrow.history.erasure import Also, EraseReport
    from thinrow.history.store import HistoryStore

_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)

impressions_option = click.option(
    "--impressions", multiple=True, type=_FOLDER, help="Log of impressions to clean; needs --table for its schema."
)
outcomes_option = click.option("--outcomes", multiple=True, type=_FOLDER, help="Log of outcomes to clean.")
splits_option = click.option(
    "--splits", multiple=True, type=_FOLDER, help="Log of splits to clean; needs --table for its schema."
)
table_option = click.option("--table", "tables", multiple=True, type=_FOLDER, help="Training table to clean.")
grace_option = click.option(
    "--grace",
    "grace_s",
    default=60.0,
    show_default=True,
    help="Seconds that readers of older generations get to let go of them.",
)


@click.command()
@click.argument("users", nargs=-1)
@store_option
@click.option("--event-id", "event_ids", multiple=True, help="Only this event of the one user. May be repeated.")
@click.option("--arrival", "arrivals", multiple=True, type=int, help="Only the event with this arrival number.")
@click.option("--since", help="Only events of the one user from this time on (inclusive): ms or ISO 8601.")
@click.option("--until", help="Only events of the one user up to this time (inclusive): ms or ISO 8601.")
@impressions_option
@outcomes_option
@splits_option
@table_option
@pseudonyms_option
@as_stored_option
@click.option("--resume", is_flag=True, help="Only finish erasures that were cut short.")
@click.option(
    "--dry-run", is_flag=True, help="Say how many events would go, of single ones those archived; change nothing."
)
@grace_option
def command(
    users: tuple[str, ...],
    store_path: Path,
    event_ids: tuple[str, ...],
    arrivals: tuple[int, ...],
    since: str | None,
    until: str | None,
    impressions: tuple[Path, ...],
    outcomes: tuple[Path, ...],
    splits: tuple[Path, ...],
    tables: tuple[Path, ...],
    pseudonyms: str | None,
    as_stored: bool,
    resume: bool,
    dry_run: bool,
    grace_s: float,
) -> None:
    """Erase USERS, or some events of one user, from a store and from the logs and tables that are named.

    Afterwards no file of theirs holds anything of what was erased. Requests that saw it resolve to `Erased`. Safe
    beside everything else, and to kill at any moment: the same command, or --resume, goes on. Backups, exports and
    other copies are yours to clean.

    \b
    Examples:
      thinrow erase 42 43 --store S --impressions shown --outcomes clicks --table examples
      thinrow erase 42 --store S --since 2024-05-01 --until 2024-05-31
    """
    from thinrow.history.store import HistoryStore

    paths = paths_of(impressions, outcomes, splits, tables)
    with HistoryStore.open(store_path) as store, ExitStack() as opened:
        ids = parse_named(store, users, pseudonyms, as_stored)
        some = _events_of(store, ids.tolist(), event_ids, arrivals, since, until)
        if not dry_run:
            for report in store.finish_erasures(lambda p: also_of(store, p.paths, opened), grace_s=grace_s):
                show("finished: ", report)
        if resume:
            return
        with progress_bar("erase") as progress:
            report = store.erase(
                () if some else ids,
                some,
                also=also_of(store, paths, opened),
                paths=paths,
                grace_s=grace_s,
                dry_run=dry_run,
                progress=progress,
            )
        show("would erase: " if dry_run else "", report)


def _events_of(
    store: HistoryStore,
    users: Sequence[int | str],
    event_ids: Sequence[str],
    arrivals: Sequence[int],
    since: str | None,
    until: str | None,
) -> list[EventsOf]:
    from thinrow.core.errors import InputError
    from thinrow.history.erase import EventsOf

    if not event_ids and not arrivals and since is None and until is None:
        return []
    if len(users) != 1:
        raise InputError(f"{len(users)} users are named with single events; name one")
    ids: list[int | str] = [*event_ids]
    if store.schema.event_id_dtype not in (None, "string"):
        ids = [int(i) for i in parse_users(event_ids, "int64").tolist()]
    first, last = (None if t is None else parse_time(t) for t in (since, until))
    return [EventsOf(users[0], ids, arrivals, first, last)]


def paths_of(
    impressions: Sequence[Path], outcomes: Sequence[Path], splits: Sequence[Path], tables: Sequence[Path]
) -> dict[str, list[str]]:
    """Logs and tables by kind, as absolute paths; kinds without any are left out."""
    named = {"impressions": impressions, "outcomes": outcomes, "splits": splits, "tables": tables}
    return {kind: [str(p.absolute()) for p in found] for kind, found in named.items() if found}


def also_of(store: HistoryStore, paths: Mapping[str, Sequence[str]], opened: ExitStack) -> Also | None:
    """What cleans these logs and tables; tables stay open until ``opened`` closes.

    Raises:
        InputError: a log of impressions or splits is named and no table.
        StoreNotFound: a table is not there.
    """
    from thinrow.core.errors import InputError
    from thinrow.examples.erase import erase_everywhere
    from thinrow.examples.log import ImpressionLog, OutcomeLog
    from thinrow.examples.splits import SplitLog
    from thinrow.examples.table import ExampleTable

    if not any(paths.values()):
        return None
    tables = [opened.enter_context(ExampleTable.open(p)) for p in paths.get("tables", ())]
    for kind in ("impressions", "splits"):
        if paths.get(kind) and not tables:
            raise InputError(f"a log of {kind} needs a table of the same examples, for its schema; add --table")
    shape = tables[0].example_schema if tables else None
    shown = [ImpressionLog(p, store.schema, shape) for p in paths.get("impressions", ())]  # type: ignore[arg-type]
    sealed = [SplitLog(p, store.schema, shape) for p in paths.get("splits", ())]  # type: ignore[arg-type]
    bought = [OutcomeLog(p) for p in paths.get("outcomes", ())]

    def also(generation: object, whole: object) -> None:
        done = erase_everywhere(
            generation,  # type: ignore[arg-type]
            whole,  # type: ignore[arg-type]
            impressions=shown,
            outcomes=bought,
            tables=tables,
            splits=sealed,
        )
        click.echo(f"logs and tables: {done.removed} rows removed, {done.changed} redacted in {done.files} files")

    return also


def show(prefix: str, report: EraseReport) -> None:
    """One line on what was done."""
    from thinrow.core.units import format_bytes

    click.echo(
        f"{prefix}{report.events} events of {report.users} users; {report.rewritten} others copied, "
        f"{report.files} old files removed, {format_bytes(report.bytes)}"
    )
