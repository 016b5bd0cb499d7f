"""``thinrow ab``."""

from __future__ import annotations

import math
from pathlib import Path

import click

from thinrow.cli.common import parse_time


@click.command()
@click.option("--table", "table_path", type=click.Path(path_type=Path), required=True, help="Of joined impressions.")
@click.option("--outcome", required=True, help="What is counted.")
@click.option("--base", help="The arm that others are held against.  [the first by name]")
@click.option("--since", "since_text", help="Requests from this time (inclusive): ms or ISO 8601.")
@click.option("--until", "until_text", help="Requests before this time (exclusive): ms or ISO 8601.")
@click.option("--confidence", type=click.FloatRange(0, 1, True, True), default=0.95, show_default=True)
def command(
    table_path: Path,
    outcome: str,
    base: str | None,
    since_text: str | None,
    until_text: str | None,
    confidence: float,
) -> None:
    """Compare the arms of an experiment: outcomes a request, with an interval for each difference (docs/ranker.md).

    Errors are those of rates over users, who were drawn into arms; requests of one user are not independent.

    \b
    Examples:
      thinrow ab --table served --outcome buy
      thinrow ab --table served --outcome buy --base control --since 2017-11-20
    """
    from rich.console import Console
    from rich.table import Table

    from thinrow.examples.table import ExampleTable
    from thinrow.serving.ab import compare_arms

    times = (None if text is None else parse_time(text) for text in (since_text, until_text))
    since_ms, until_ms = times
    with ExampleTable.open(table_path) as table:
        arms, others = compare_arms(
            table, outcome, base=base, since_ms=since_ms, until_ms=until_ms, confidence=confidence
        )
    out = Console(width=140, highlight=False)
    shown = Table("arm", "users", "requests", f"{outcome} a request", "model", "degraded")
    for arm in arms:
        rate = f"{arm.rate:.4f} ± {arm.error:.4f}"
        shown.add_row(arm.arm, str(arm.users), str(arm.requests), rate, ", ".join(arm.versions), str(arm.degraded))
    out.print(shown)
    for other in others:
        if math.isnan(other.lift):
            out.print(f"{other.arm} over {arms[0].arm}: no {outcome} in {arms[0].arm}, so there is no lift")
            continue
        told = "they cannot be told apart" if other.low <= 0 <= other.high else "they differ"
        out.print(
            f"{other.arm} over {arms[0].arm}: {other.lift:+.1%} [{other.low:+.1%}, {other.high:+.1%}] at "
            f"{confidence:.0%}, p = {other.p_value:.3g}: {told}"
        )
