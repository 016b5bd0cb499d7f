"""``thinrow sources``: look at sources, and at what of them could not be taken in."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinrow.cli.common import format_time, store_option

if TYPE_CHECKING:
    from thinrow.history.dead_letters import Letter

_SHOWN = 300


@click.group()
def command() -> None:
    """Look at event sources, and at what of them could not be taken in.

    \b
    Examples:
      thinrow sources sample "kafka://broker:9092/clicks" > clicks.toml
      thinrow sources positions --store S
      thinrow sources letters --store S
      thinrow sources retry --store S
    """


@command.command()
@click.argument("places", nargs=-1, required=True, metavar="SOURCE")
@click.option("--events", default=1_000, show_default=True, help="How many to look at.")
@click.option("--show", is_flag=True, help="Print some of the events in place of a schema.")
@click.option("--user", help="The user column.")
@click.option("--time", help="The event time column.")
@click.option("--event-id", help="The column of event ids.")
@click.option("--supersedes", help="The column with the id of the event that this one corrects.")
@click.option("--arrival-time", help="The column that says when an event became known.")
def sample(places: tuple[str, ...], events: int, show: bool, **columns: str | None) -> None:
    """Print a schema file for the events of SOURCE, for you to edit. No position moves.

    \b
    Examples:
      thinrow sources sample events.jsonl > events.toml
      thinrow sources sample "kafka://broker:9092/clicks?format=json" --show
    """
    from thinrow.core.errors import InputError
    from thinrow.sources.places import open_source
    from thinrow.sources.sample import schema_file

    source: Any = open_source(places)
    table = source.sample(events)
    if not table.num_rows:
        raise InputError(f"{places[0]} has no events yet; look again when it has some")
    if show:
        for row in table.slice(0, 10).to_pylist():
            click.echo(json.dumps(row, default=str)[:_SHOWN])
        return
    click.echo(schema_file(table, columns), nl=False)


@command.command()
@store_option
@click.argument("names", nargs=-1, metavar="NAME")
def positions(store_path: Path, names: tuple[str, ...]) -> None:
    """Print how far sources NAME are read into a store: partition and position, by a tab.

    \b
    Example:
      thinrow sources positions clicks --store S
    """
    from thinrow.history.store import HistoryStore

    with HistoryStore.open(store_path) as store:
        for name in names:
            for partition, position in sorted(store.recent.positions(name).items()):
                click.echo(f"{name}\t{partition}\t{position}")


@command.command()
@click.option("--store", "store_path", type=click.Path(path_type=Path), help="Directory of the store.")
@click.option("--folder", type=click.Path(path_type=Path), help="Or a folder of letters: of `thinrow outcomes`.")
@click.option("--log", "log_path", type=click.Path(path_type=Path), help="The outcome log of --folder LOG.dead.  [LOG]")
@click.option("--all", "whole", is_flag=True, help="Every letter as a JSON line, payload and all.")
def letters(store_path: Path | None, folder: Path | None, log_path: Path | None, whole: bool) -> None:
    """Print what could not be taken in: how many by source and reason, with the newest of each.

    \b
    Example:
      thinrow sources letters --store S --all > letters.jsonl
    """
    from thinrow.core.errors import InputError
    from thinrow.history.store import HistoryStore

    if (store_path is None) == (folder is None):
        raise InputError("name one: --store S, or --folder F with the letters of `thinrow outcomes`")
    if folder is not None:
        found = _outcome_letters(folder, log_path)
    else:
        assert store_path is not None
        with HistoryStore.open(store_path) as store:
            found = store.dead_letters.read()
    if whole:
        for letter in found:
            click.echo(letter.to_line().decode(), nl=False)
        return
    counts = Counter((x.source, _kind(x.reason)) for x in found)
    newest = {(x.source, _kind(x.reason)): x for x in found}
    click.echo(f"{len(found)} letters")
    for key, n in counts.most_common():
        x = newest[key]
        payload = "" if x.payload is None else f" {x.payload[:80]!r}"
        click.echo(f"{n} x {x.source}: {x.reason[:_SHOWN]}")
        click.echo(f"    newest {format_time(x.at_ms)}, partition {x.partition or '-'} at {x.where}:{payload}")


def _outcome_letters(folder: Path, log_path: Path | None) -> list[Letter]:
    from thinrow.core.errors import InputError
    from thinrow.examples.log import OutcomeLog
    from thinrow.online.outcome_retry import outcome_letters

    path = log_path or folder.with_suffix("")
    if not (path / "log.json").is_file():
        raise InputError(f"no outcome log at {path}; name the log of these letters: --log LOG")
    return outcome_letters(OutcomeLog(path), folder).read()


def _kind(reason: str) -> str:
    """A reason without the values in it."""
    return "".join(c for c in reason.partition(" is ")[0] if not c.isdigit())[:60]


@command.command()
@store_option
@click.option("--pseudonyms", metavar="FILE|env:NAME", help="Key of the pseudonyms, where the store has some.")
@click.option("--registry", help="Another schema registry than the one the letters name.")
@click.option("--max-future", type=int, metavar="SECONDS", help="Events later than the clock by more stay; as ingest.")
def retry(store_path: Path, pseudonyms: str | None, registry: str | None, max_future: int | None) -> None:
    """Take in the dead letters that can be taken in now; the others stay.

    \b
    Example:
      thinrow sources retry --store S
    """
    from thinrow.history.store import HistoryStore
    from thinrow.sources.places import make_decoder
    from thinrow.sources.pseudonyms import Pseudonyms
    from thinrow.sources.retry import retry_letters

    key = None if pseudonyms is None else Pseudonyms.load(pseudonyms)
    with HistoryStore.open(store_path) as store:
        report = retry_letters(
            store,
            key,
            lambda how: make_decoder({**how, **({"registry": registry} if registry else {})}),
            None if max_future is None else 1000 * max_future,
        )
    click.echo(f"{report.events} events appended, {report.duplicates} known already, {report.left} letters left")


@command.command()
@store_option
@click.option("--yes", is_flag=True, help="Do it; without, nothing changes.")
def drop(store_path: Path, yes: bool) -> None:
    """Throw all dead letters away.

    \b
    Example:
      thinrow sources drop --store S --yes
    """
    from thinrow.history.store import HistoryStore

    with HistoryStore.open(store_path) as store:
        n = store.dead_letters.erase(lambda _: True) if yes else store.dead_letters.count()
    click.echo(f"{n} letters {'dropped' if yes else 'would go; add --yes'}")
