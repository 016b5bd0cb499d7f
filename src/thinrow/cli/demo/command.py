"""``thinrow demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from thinrow.cli.demo.job import Learn


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
    "--git",
    type=click.Path(path_type=Path),
    help="Run on the history of this git checkout instead: which files will the next commit touch?",
)
@click.option("--max-commits", type=click.IntRange(1), help="Only its newest so many commits.  [default: 20000]")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the sampled candidates and the reader's order."
)
@click.option("--no-training", is_flag=True, help="The data half alone: no models, no serving, no torch.")
def command(
    out: Path,
    weeks: int | None,
    households: int | None,
    git: Path | None,
    max_commits: int | None,
    seed: int,
    no_training: bool,
) -> None:
    """Run the whole loop on real data, and report what it proves and costs.

    A year of purchases (the Complete Journey) is ingested in time order and compacted daily; about 77,000 baskets are
    requests with promoted products as candidates. Every request's history is rebuilt from the last generation and
    compared, element for element, with the fat row written at request time.

    Before the last six weeks an HSTU ranker and a pooled DLRM are trained, on histories of 16, 128, 1,024 and all
    events; from there on a ranker answers every request, and what it read online is compared, bit for bit, with what
    training rebuilds. Ends with OUT/report.html and OUT/report.json; exit status 1 where a history or an input differs.
    Takes some minutes; needs thinrow[demo].

    With --git the data is the history of a git checkout: authors are users, changes of files are events, and a commit
    is a request with files as candidates. Events are late where a commit date lies after its author date.

    \b
    Examples:
      thinrow demo --weeks 12 --households 100
      thinrow demo --git ~/src/cpython --max-commits 5000
    """
    from rich.console import Console

    from thinrow.cli.demo.job import DemoConfig, run_demo
    from thinrow.cli.demo.report import print_summary, write_report

    for name, value, is_at_home in (
        ("--weeks", weeks, git is None),
        ("--households", households, git is None),
        ("--max-commits", max_commits, git is not None),
    ):
        if value is not None and not is_at_home:
            raise click.UsageError(f"{name} goes {'without' if git else 'with'} --git; leave one of them out")
    console = Console()
    config = DemoConfig(out=out, weeks=weeks, households=households, git=git, max_commits=max_commits, seed=seed)
    report = run_demo(config, console, None if no_training else _learner())
    write_report(report, out)
    print_summary(report, console)
    console.print(f"The report, with plots: {out / 'report.html'}", highlight=False, soft_wrap=True)
    if report["mismatches"] or report.get("online_offline_differences"):
        raise SystemExit(1)


def _learner() -> Learn:
    from thinrow.core.errors import MissingExtraError

    try:
        from thinrow.cli.demo.learn import DemoLearner
    except ModuleNotFoundError as e:
        raise MissingExtraError(e.name or "torch", "demo") from e
    except MissingExtraError as e:
        raise MissingExtraError("torch", "demo") from e
    return DemoLearner
