"""``thinrow verify``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from thinrow.cli.common import progress_bar, store_option


@click.command()
@store_option
@click.option("--all-generations", is_flag=True, help="Every generation that is still there, not only the newest.")
def command(store_path: Path, all_generations: bool) -> None:
    """Check every byte of a store: manifests, indexes, blocks, digests, recent events.

    Exit code 0 where all is well, 1 where something is damaged: each damage is a line with file, user and column.
    """
    from thinrow.core.errors import ThinrowError
    from thinrow.history.archive.verify import Damage, as_damage, verify_generation
    from thinrow.history.store import HistoryStore

    found: list[Damage] = []
    rows = generations = 0
    with HistoryStore.open(store_path) as store:
        numbers = store.archive.numbers()
        for number in numbers if all_generations else numbers[-1:]:
            try:
                generation = store.archive.generation(number)
            except ThinrowError as e:
                found.append(as_damage(e, f"manifests/{number:020d}.json"))
                continue
            generations += 1
            rows += generation.n_rows
            with progress_bar(f"generation {number}") as progress:
                found += verify_generation(generation, progress)
        found += store.verify_recent()
    for damage in dict.fromkeys(found):
        where = "".join(
            f", {what} {value!r}"
            for what, value in (("user", damage.user), ("column", damage.column))
            if value is not None
        )
        click.echo(f"damaged: file {damage.file}{where}: {damage.what}", err=True)
    if found:
        click.echo("restore the files named above from a copy, or rebuild the store from its events", err=True)
        sys.exit(1)
    click.echo(f"{rows} events in {generations} generation(s) verified: no damage")
