"""The report of the main job: ``report.json``, ``report.html`` and a summary for the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from thinrow.cli.demo.findings import (
    FINDINGS,
    RIVALS,
    STORES,
    exactness,
    lengths,
    longest,
    percent,
    rate,
    seconds,
    stored,
    written,
)
from thinrow.cli.demo.page import render
from thinrow.cli.demo.quality import quality_findings
from thinrow.cli.demo.quality_page import with_interval
from thinrow.core.units import format_bytes

_MARKS = {"ahead": "[green]+[/green]", "even": "[yellow]=[/yellow]", "behind": "[red]-[/red]"}


def write_report(report: Mapping[str, Any], out: Path) -> None:
    """Write ``report.json`` and ``report.html`` into the folder ``out``."""
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (out / "report.html").write_text(render(report), encoding="utf-8")


def print_summary(report: Mapping[str, Any], console: Console) -> None:
    """The report's figures and findings, at most a screen and a half."""
    proof = exactness(report)
    colour = "green" if proof.verdict == "ahead" else "red"
    console.print(f"\n[bold {colour}]{proof.text}[/bold {colour}]\n", highlight=False)
    console.print(longest(report) + "\n", highlight=False)
    for table in TABLES:
        if (shown := table(report)) is not None:
            console.print(shown)
    for finding in (f for say in (*FINDINGS, quality_findings) for f in say(report)):
        console.print(f" {_MARKS[finding.verdict]} {finding.text}", highlight=False)
    top = sorted(((s, n) for n, s in report["seconds"].items() if n != "total"), reverse=True)[:6]
    slowest = ", ".join(f"{n.replace('_', ' ')} {seconds(s)}" for s, n in top)
    console.print(f"\n{seconds(report['seconds']['total'])} in all: {slowest}.", highlight=False)
    console.print(" ".join(report["data"]["notes"]), highlight=False)


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _bytes_table(report: Mapping[str, Any]) -> Table:
    table = _table("Bytes", "", "stored", "written in all", "stored, against thinrow")
    kept, wrote = stored(report), written(report)
    for name in ("thinrow", *RIVALS):
        ratio = f"{kept[name] / max(kept['thinrow'], 1):.1f}x"
        table.add_row(STORES.get(name, name), format_bytes(kept[name]), format_bytes(wrote[name]), ratio)
    return table


def _speed_table(report: Mapping[str, Any]) -> Table:
    rates = report["events_per_second"]
    names = list(rates["thinrow_shared"])
    table = _table("Events delivered per second", "", *(lengths(n) for n in names))
    for store, label in STORES.items():
        table.add_row(label, *(rate(rates[store][n]) for n in names))
    return table


def _verification_table(report: Mapping[str, Any]) -> Table:
    found = report["verification"]
    table = _table(
        "Cost of verification", "", "with", "without", "difference", "share of work", "stripes across a bound"
    )
    for name, v in found.items():
        table.add_row(
            lengths(name),
            seconds(v["seconds_with"]),
            seconds(v["seconds_without"]),
            percent(v["share"]),
            percent(v["step_share"]),
            percent(v["mixed_stripes_share"]),
        )
    return table


def quality_table(report: Mapping[str, Any]) -> Table | None:
    """Quality and cost of each model by history length; None without figures."""
    if not report.get("quality"):
        return None
    columns = ("NE", "AUC", "GAUC", "NE in training", "cand./s", "waiting")
    table = _table("Quality by history length (held out)", "", *columns)
    table.columns[0].no_wrap = True
    for row, cost in zip(report["quality"], report["training"], strict=True):
        figures = with_interval(row, "ne"), *(f"{row[n]:.4f}" for n in ("auc", "gauc", "ne_progressive"))
        speed = rate(cost["candidates_per_second"]), percent(cost["waited_share"])
        table.add_row(f"{row['model'].upper()}, {lengths(row['history'])}", *figures, *speed)
    return table


#: The tables of the summary, in this order; one gives None where the report has no figures for it.
TABLES: tuple[Callable[[Mapping[str, Any]], Table | None], ...] = (
    _bytes_table,
    _speed_table,
    _verification_table,
    quality_table,
)
