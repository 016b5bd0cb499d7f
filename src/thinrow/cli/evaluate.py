"""``thinrow evaluate``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from thinrow.cli.common import parse_time, progress_bar, store_option
from thinrow.cli.train import table_option


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@store_option
@table_option
@click.option("--since", "since_text", help="Requests from this time (inclusive): ms or ISO 8601.")
@click.option("--until", "until_text", help="Requests before this time (exclusive): ms or ISO 8601.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    checkpoint: Path, store_path: Path, table_path: Path, since_text: str | None, until_text: str | None, as_json: bool
) -> None:
    """Score the examples of a table with CHECKPOINT (one, or a folder of them: the newest): NE, AUC and GAUC.

    \b
    Example:
      thinrow evaluate run --store S --table T --since 2017-11-20
    """
    from thinrow.checkpoints import load
    from thinrow.dpp import RowFilter
    from thinrow.examples.table import ExampleTable
    from thinrow.history.store import HistoryStore
    from thinrow.models import SavedRanker
    from thinrow.training import evaluate, score

    found = load(checkpoint)
    ranker = SavedRanker.of(found.meta, found.tensors, found.path)
    since, until = (None if t is None else parse_time(t) for t in (since_text, until_text))
    with HistoryStore.open(store_path) as store, ExampleTable.open(table_path) as table, progress_bar("score") as show:
        ranker.spec.check(store.schema, ranker.event_schema)
        rows = RowFilter(since_ms=since, until_ms=until)
        result = evaluate(score(ranker.spec, ranker.module, store, table, rows, on_batch=show))
    if as_json:
        click.echo(json.dumps({"checkpoint": str(found.path), "step": found.step, **dataclasses.asdict(result)}))
        return
    click.echo(
        f"{ranker.spec.name} at step {found.step}: NE {result.ne:.4f}, AUC {result.auc:.4f}, GAUC {result.gauc:.4f}, "
        f"hit rate@10 {result.hit_rate:.4f}, NDCG@10 {result.ndcg:.4f}\n"
        f"{result.requests} requests of {result.users} users, {result.candidates} candidates, "
        f"{100 * result.base_rate:.2f}% {ranker.spec.label}"
    )
