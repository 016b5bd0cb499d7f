"""``thinrow train``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinrow.cli.common import parse_time, store_option
from thinrow.cli.watch import watched

if TYPE_CHECKING:
    from thinrow.dpp.engines import EngineName
    from thinrow.history.store import HistoryStore
    from thinrow.schema import ExampleSchema
    from thinrow.training import TrainConfig, TrainResult

table_option = click.option(
    "--table", "table_path", type=click.Path(path_type=Path), required=True, help="Directory of the training table."
)


@click.command()
@click.argument("recipe")
@store_option
@click.option("--table", "table_path", type=click.Path(path_type=Path), help="Directory of the training table.")
@click.option("--follow", type=click.Path(path_type=Path), help="Train on this log of splits as it grows.")
@click.option(
    "--example-schema", type=click.Path(path_type=Path), help="With --follow: fields, in JSON.  [the table's]"
)
@click.option("--wait-s", type=click.FloatRange(min=0.1), help="With --follow: fail after so long without a split.")
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
@click.option(
    "--rank-timeout-s",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Under torchrun: a rank that is silent for so long ends the run on all.",
)
@click.option("--shard-dense", is_flag=True, help="Under torchrun: ranks share the dense weights and Adam's numbers.")
@click.option("--tensorboard", is_flag=True, help="Write figures for TensorBoard to OUT/tensorboard.")
@click.option("--profile", metavar="FIRST:LAST", help="Trace these steps (from 1, both inclusive) into OUT/trace.json.")
def command(
    recipe: str,
    store_path: Path,
    table_path: Path | None,
    follow: Path | None,
    example_schema: Path | None,
    wait_s: float | None,
    out: Path,
    values: tuple[str, ...],
    since_text: str | None,
    until_text: str | None,
    resume: bool,
    threads: int | None,
    engine: EngineName,
    rank_timeout_s: float,
    shard_dense: bool,
    tensorboard: bool,
    profile: str | None,
) -> None:
    """Train a ranker by RECIPE: a built-in one, or FILE.py:FUNCTION of your own that returns a TrainConfig.

    Built in, for the data of thinrow demo, are MODEL_retail_small and MODEL_git_small with MODEL one of hstu,
    hstu_plain (without cross features), hstu_semi_local, hstu_sampled, mtgr, argus, argus_kinds, hstu_retrieval,
    recis_click, recis_next, dlrm, moe, multi_embedding, wukong, sim; argus_retail_pretrain and argus_git_pretrain,
    argus_feedback_retail_pretrain and argus_feedback_git_pretrain; and argus_retail_1b, a plan of a thousand million
    weights.
    Checkpoints and a log of steps (log.jsonl) go to --out. A run ends with a checkpoint
    on SIGTERM or Ctrl-C, with --follow also when the log is sealed.
    Under torchrun all processes train one model, each on its part of every batch, with the losses of one process.

    \b
    Examples:
      thinrow train hstu_retail_small --store S --table T --out run
      thinrow train hstu_retail_small --store S --table T --out run --resume
      thinrow train mine.py:wide --store S --table T --out run --set ranker.model.layers=3 --set epochs=2
      thinrow train argus_retail_small --store S --table T --out tuned --set start=pretrained
      thinrow train mine.py:wide --store S --follow splits --example-schema shown.json --out run --resume
      torchrun --no-python --nproc-per-node 2 thinrow train mine.py:wide --store S --table T --out run
    """
    from thinrow.core.errors import InputError
    from thinrow.history.store import HistoryStore
    from thinrow.training import launched

    config = configured(recipe, values, since_text, until_text)
    if follow is None and (example_schema is not None or wait_s is not None):
        raise InputError("--example-schema and --wait-s go with --follow; add it, or leave them out")
    if follow is not None and shard_dense:
        raise InputError("--shard-dense with --follow; a log that grows is read by one process: leave it out")
    if follow is not None and engine != "threads":
        raise InputError(f"--engine {engine} with --follow; a log that grows is read by threads: leave --engine out")
    with (
        launched(rank_timeout_s) as ranks,
        HistoryStore.open(store_path) as store,
        watched(out if ranks is None or ranks.rank == 0 else None, tensorboard, profile) as on_step,
    ):
        options: dict[str, Any] = {"out": out, "resume": resume, "threads": threads, "on_step": on_step}
        if follow is None:
            more = {"engine": engine, "ranks": ranks, "shard_dense": shard_dense}
            result = _train(config, store, table_path, {**options, **more})
        elif ranks is not None:
            raise InputError("--follow under torchrun; a log that grows is read by one process: start it without")
        else:
            result = _train_stream(config, store, follow, table_path, example_schema, wait_s, options)
    if ranks is None or ranks.rank == 0:
        _report(config, result, out, store_path, table_path)


def _report(config: TrainConfig, result: TrainResult, out: Path, store_path: Path, table_path: Path | None) -> None:
    from thinrow.embeddings import stream_bandwidth

    labels = config.objective == "rank"
    if labels:
        quality = f"progressive NE {result.ne:.4f}"
    else:
        quality = f"next-item loss {result.losses[-1]:.4f}" if result.losses else "nothing was left to learn"
    what = "candidates" if labels else "next items"
    speed = result.candidates / max(result.seconds, 1e-9)
    click.echo(
        f"step {result.steps}: {quality}; {result.examples} requests with {result.candidates} "
        f"{what} in {result.seconds:.1f} s ({speed:,.0f} a second, {result.waited_s:.1f} s of it waiting for data)"
    )
    busy = max(result.seconds - result.waited_s, 1e-9)
    # Of several machines, that of each.
    share = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / int(os.environ.get("WORLD_SIZE", "1"))
    click.echo(
        f"the embedding table moved {result.table_bytes / 1e9:.2f} GB, "
        f"{share * result.table_bytes / busy / stream_bandwidth():.1%} of what memory moves in that time (MBU)"
    )
    table = table_path or "TABLE"
    click.echo(f"checkpoints in {out}; next: thinrow evaluate {out} --store {store_path} --table {table}")


def _train(config: TrainConfig, store: HistoryStore, table_path: Path | None, options: dict[str, Any]) -> TrainResult:
    from thinrow.cli.stream import stopped
    from thinrow.core.errors import InputError
    from thinrow.examples.table import ExampleTable
    from thinrow.training import train

    if table_path is None:
        raise InputError("no examples are named; add --table T, or --follow SPLITS")
    with ExampleTable.open(table_path) as table, stopped() as stop:
        return train(config, store, table, stop=stop, **options)[1]


def _train_stream(
    config: TrainConfig,
    store: HistoryStore,
    splits: Path,
    table_path: Path | None,
    example_schema: Path | None,
    wait_s: float | None,
    options: dict[str, Any],
) -> TrainResult:
    from thinrow.cli.stream import stopped
    from thinrow.core.errors import StoreNotFound
    from thinrow.examples.splits import SplitLog
    from thinrow.training import train_stream

    if not (splits / "log.json").is_file():
        raise StoreNotFound(f"no log of splits at {splits}; check the path, or begin the join that writes it")
    log = SplitLog(splits, store.schema, _example_schema(table_path, example_schema))
    with stopped() as stop:
        return train_stream(config, store, log, wait_s=wait_s, stop=stop, **options)[1]


def _example_schema(table_path: Path | None, file: Path | None) -> ExampleSchema:
    import json

    from thinrow.core.errors import InputError
    from thinrow.examples.table import ExampleTable
    from thinrow.schema import ExampleSchema

    if file is not None:
        try:
            return ExampleSchema.from_dict(json.loads(file.read_bytes()))
        except (OSError, ValueError) as e:
            raise InputError(f"{file} holds no example schema in JSON: {e}") from e
    if table_path is None:
        raise InputError("--follow needs the fields of examples; add --example-schema FILE, or a --table that has them")
    with ExampleTable.open(table_path) as table:
        return table.example_schema


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
