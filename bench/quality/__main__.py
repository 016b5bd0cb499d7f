"""Run a part of the study, or make its page.

::

    python -m bench.quality tastes --out tastes          # the synthetic data
    thinrow demo --no-training --out retail              # and --git CHECKOUT --out git
    python -m bench.quality run length tastes --at tastes --lines docs/quality.jsonl
    python -m bench.quality page --lines docs/quality.jsonl
"""

from __future__ import annotations

from pathlib import Path

import click

from bench.quality.page import read
from bench.quality.page import write as write_page
from bench.quality.study import REQUESTS, STUDIES, USERS, Place
from bench.quality.study import run as run_study
from bench.quality.tastes import make_tastes


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new folder.")
def tastes(out: Path) -> None:
    """Make the synthetic data."""
    make_tastes(out, USERS, REQUESTS)


@main.command()
@click.argument("study", type=click.Choice(STUDIES))
@click.argument("data", type=click.Choice(("retail", "git", "tastes")))
@click.option("--at", type=click.Path(path_type=Path, exists=True), required=True, help="Folder of the data.")
@click.option("--lines", type=click.Path(path_type=Path), default=Path("docs/quality.jsonl"), show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--models", default="", help="Only these, with commas between.")
@click.option("--train", default=3_000, show_default=True, help="Requests to train on, about.")
@click.option("--held-out", default=1_000, show_default=True, help="Requests to score, about.")
@click.option("--seconds", default=1e9, help="Begin no run after so many.")
def run(
    study: str, data: str, at: Path, lines: Path, seeds: int, models: str, train: int, held_out: int, seconds: float
) -> None:
    """Train what has no line yet."""
    place = Place(at / "store", at / "examples", train, held_out)
    wanted = tuple(m for m in models.split(",") if m)
    run_study(study, data, place, lines, seeds=seeds, models=wanted, seconds=seconds)


@main.command()
@click.option("--lines", type=click.Path(path_type=Path, exists=True), default=Path("docs/quality.jsonl"))
@click.option("--docs", type=click.Path(path_type=Path, exists=True), default=Path("docs"))
def page(lines: Path, docs: Path) -> None:
    """Bring tables and plots of docs/quality.md up to date."""
    write_page(docs / "quality.md", read(lines), docs / "images")


if __name__ == "__main__":
    main()
