"""``thinrow train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinrow.cli.common import parse_time, progress_bar, store_option

if TYPE_CHECKING:
    from thinrow.dpp.engines import EngineName
    from thinrow.training import TrainConfig

table_option = click.option(
    "--table", "table_path", type=click.Path(path_type=Path), required=True, help="Directory of the training table."
)


@click.command()
@click.argument("recipe")
@store_option
@table_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for checkpoints.")
@click.option("--set", "values", multiple=True, metavar="NAME=VALUE", help="Change a value of the recipe; repeatable.")
@click.option("--since", "since_text", help="Train on requests from this time (inclusive): ms or ISO 8601.")
@click.option("--until", "until_text", help="Train on requests before this time (exclusive): ms or ISO 8601.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --out, as if never interrupted.")
@click.option("--threads", type=click.IntRange(1), help="Workers of the reader; any number gives the same losses.")
@click.option(
    "--engine",
    type=click.Choice(["threads", "processes", "ray"]),
    default="threads",
    help="What runs the workers; any gives the same losses.",
)
def command(
    recipe: str,
    store_path: Path,
    table_path: Path,
    out: Path,
    values: tuple[str, ...],
    since_text: str | None,
    until_text: str | None,
    resume: bool,
    threads: int | None,
    engine: EngineName,
) -> None:
    """Train a ranker by RECIPE: a built-in one, or FILE.py:FUNCTION of your own that returns a TrainConfig.

    Built in are hstu_retail_small, dlrm_retail_small, hstu_git_small and dlrm_git_small, for the data of thinrow demo.
    Checkpoints and a log of steps (log.jsonl) go to --out.

    \b
    Examples:
      thinrow train hstu_retail_small --store S --table T --out run
      thinrow train hstu_retail_small --store S --table T --out run --resume
      thinrow train mine.py:wide --store S --table T --out run --set ranker.model.layers=3 --set epochs=2
    """
    from thinrow.examples.table import ExampleTable
    from thinrow.history.store import HistoryStore
    from thinrow.training import train

    config = configured(recipe, values, since_text, until_text)
    with HistoryStore.open(store_path) as store, ExampleTable.open(table_path) as table, progress_bar("train") as show:

        def on_step(step: int, total: int, record: dict[str, Any]) -> None:
            show(step, total)

        _, result = train(config, store, table, out=out, resume=resume, threads=threads, engine=engine, on_step=on_step)
    speed = result.candidates / max(result.seconds, 1e-9)
    click.echo(
        f"step {result.steps}: progressive NE {result.ne:.4f}; {result.examples} requests with {result.candidates} "
        f"candidates in {result.seconds:.1f} s ({speed:,.0f} a second, {result.waited_s:.1f} s of it waiting for data)"
    )
    click.echo(f"checkpoints in {out}; next: thinrow evaluate {out} --store {store_path} --table {table_path}")


def configured(recipe: str, values: tuple[str, ...], since_text: str | None, until_text: str | None) -> TrainConfig:
    """The recipe's configuration with what the options change."""
    from thinrow.core.errors import InputError
    from thinrow.recipes.override import override
    from thinrow.recipes.registry import find_recipe

    config = find_recipe(recipe)()
    for text in values:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text!r} has no '='; write --set NAME=VALUE, as in --set epochs=2")
        config = override(config, name, value)
    for name, time_text in (("rows.since_ms", since_text), ("rows.until_ms", until_text)):
        if time_text is not None:
            config = override(config, name, str(parse_time(time_text)))
    return config
