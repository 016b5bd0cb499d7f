"""``thinrow plan``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Draw it to this file, too.")
@click.option("--dot", is_flag=True, help="Print it in the language of Graphviz.")
def command(checkpoint: Path, svg: Path | None, dot: bool) -> None:
    """Show the feature plan of CHECKPOINT (one, or a folder of them: the newest), step by step.

    \b
    Example:
      thinrow plan run --svg plan.svg
    """
    from thinrow.checkpoints import load
    from thinrow.features import explain, to_dot, to_svg
    from thinrow.models import SavedRanker

    found = load(checkpoint)
    plan = SavedRanker.of(found.meta, found.tensors, found.path).spec.plan
    if svg is not None:
        svg.write_text(to_svg(plan))
    click.echo(to_dot(plan) if dot else explain(plan))
