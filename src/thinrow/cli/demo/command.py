"""``thinrow demo``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-out"),
    show_default=True,
    help="Folder for store, table, rival files and report; what an earlier run left there is replaced.",
)
@click.option("--weeks", type=click.IntRange(1, 53), help="Only the first so many weeks of the year (10 or more).")
@click.option("--households", type=click.IntRange(1), help="Only so many of the 2,469 households.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the sampled candidates and the reader's order."
)
def command(out: Path, weeks: int | None, households: int | None, seed: int) -> None:
    """Run the whole loop on a year of real shopping data, and report what it proves and costs.

    A year of purchases (the Complete Journey) is ingested in time order and compacted daily; about 77,000 baskets are
    requests with promoted products as candidates. Every request's history is rebuilt from the last generation and
    compared, element for element, with the fat row written at request time. Ends with OUT/report.html and
    OUT/report.json; exit status 1 where a history differs. Takes some minutes; needs thinrow[demo].
    """
    from rich.console import Console

    from thinrow.cli.demo.job import DemoConfig, run_demo
    from thinrow.cli.demo.report import print_summary, write_report

    console = Console()
    report = run_demo(DemoConfig(out, weeks, households, seed), console)
    write_report(report, out)
    print_summary(report, console)
    console.print(f"The report, with plots: {out / 'report.html'}", highlight=False, soft_wrap=True)
    if report["mismatches"]:
        raise SystemExit(1)
