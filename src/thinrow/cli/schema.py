"""``thinrow schema``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinrow.cli.common import format_time, store_option

if TYPE_CHECKING:
    from thinrow.history.archive.generation import Generation


@click.command()
@store_option
@click.option("--add", multiple=True, metavar="TOML", help="A column, as a schema file says it, with its group.")
@click.option("--drop", multiple=True, metavar="COLUMN", help="Read it no more; compaction frees its bytes.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Another name; the id and all values stay.")
@click.option("--widen", multiple=True, metavar="COLUMN=DTYPE", help="int8 to int64 upwards, float32 to float64.")
@click.option("--nullable", multiple=True, metavar="COLUMN", help="The column may be null from now on.")
def command(
    store_path: Path,
    add: tuple[str, ...],
    drop: tuple[str, ...],
    rename: tuple[str, ...],
    widen: tuple[str, ...],
    nullable: tuple[str, ...],
) -> None:
    """Show the columns of a store and how they came about, or change them.

    All changes of one call are one commit; no event is rewritten, and no version of a history changes. Columns go by
    the names that they have before the call.

    \b
    Examples:
      thinrow schema --store S
      thinrow schema --store S --add 'city = { trait = "categorical", dtype = "string", group = "place" }'
      thinrow schema --store S --rename price=cost --widen price=float64 --drop shop
    """
    from thinrow.history.store import HistoryStore

    with HistoryStore.open(store_path) as store:
        if any((add, drop, rename, widen, nullable)):
            store.evolve(
                add=_columns(add),
                drop=drop,
                rename=_pairs("--rename", rename, "OLD=NEW"),
                widen=_pairs("--widen", widen, "COLUMN=DTYPE"),
                nullable=nullable,
            )
            change = store.pin().schema_log[-1]
            click.echo(f"schema {change.schema_id}: {'; '.join(change.describe())}")
        else:
            _show(store.pin())


def _columns(texts: tuple[str, ...]) -> dict[str, Any]:
    from thinrow.core.errors import InputError

    found: dict[str, Any] = {}
    for text in texts:
        try:
            found |= tomllib.loads(text)
        except tomllib.TOMLDecodeError as e:
            raise InputError(
                f"--add {text!r} is not TOML ({e}); "
                'write \'NAME = { trait = "id", dtype = "int64", group = "GROUP" }\''
            ) from e
    return found


def _pairs(option: str, texts: tuple[str, ...], form: str) -> dict[str, str]:
    from thinrow.core.errors import InputError

    for text in texts:
        if "=" not in text:
            raise InputError(f"{option} {text!r} has no '='; write {form}")
    return {old: new for old, _, new in (t.partition("=") for t in texts)}


def _show(generation: Generation) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Console(width=None if Console().is_terminal else 160, markup=False, emoji=False, highlight=False)
    schema = generation.schema
    out.print(f"schema {schema.schema_id}, generation {generation.number}")
    table = Table("id", "column", "group", "trait", "dtype", "nullable")
    for c in schema.columns:
        table.add_row(str(c.id), c.name, c.group, c.trait.value, c.dtype, "yes" if c.nullable else "no")
    out.print(table)
    for change in generation.schema_log:
        out.print(f"schema {change.schema_id} ({format_time(change.created_ms)}): {'; '.join(change.describe())}")
