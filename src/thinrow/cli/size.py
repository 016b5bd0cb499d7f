"""``thinrow size``."""

from __future__ import annotations

import click


@click.command()
@click.argument("recipe")
@click.option("--set", "values", multiple=True, metavar="NAME=VALUE", help="Change a value of the recipe; repeatable.")
@click.option("--events", type=click.IntRange(0), default=2_048, show_default=True, help="Events of a history.")
@click.option("--candidates", type=click.IntRange(0), default=32, show_default=True, help="Candidates of a request.")
@click.option("--keys", type=click.IntRange(0), default=0, help="Distinct keys that the table will hold.")
def command(recipe: str, values: tuple[str, ...], events: int, candidates: int, keys: int) -> None:
    """Print how many weights the model of RECIPE has, and what a request costs; nothing is built.

    \b
    Example:
      thinrow size argus_retail_1b --events 8192 --candidates 100
    """
    from thinrow.cli.train import configured
    from thinrow.models.sizes import sizes_of

    spec = configured(recipe, values, None, None).ranker
    sizes = sizes_of(spec)
    lines = [
        f"{spec.name}: {sizes.parameters:,} weights, {sizes.layer_parameters:,} of them in layers; "
        f"{4 * sizes.parameters / 1e9:.2f} GB in float32, {16 * sizes.parameters / 1e9:.2f} GB with gradients and Adam"
    ]
    if sizes.layer_parameters:
        forward, step = sizes.forward_flops(events, candidates), sizes.step_flops(events, candidates)
        lines.append(
            f"a request of {events:,} events and {candidates:,} candidates: {forward / 1e12:.4g} TFLOP forward, "
            f"{step / 1e12:.4g} in a training step"
        )
    rows = 2 * keys * sizes.row_bytes
    lines.append(
        f"the table: {sizes.row_bytes} bytes a key and as many for Adagrad; {rows / 1e9:.2f} GB for {keys:,} keys"
    )
    click.echo("\n".join(lines))
