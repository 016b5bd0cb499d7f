"""The page stands alone, and says who wins whichever way the figures fall."""

from __future__ import annotations

import json
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from thinrow.cli.demo.findings import byte_findings, exactness, speed_findings
from thinrow.cli.demo.page import render
from thinrow.cli.demo.report import print_summary, write_report
from thinrow.cli.demo.svg import nice_ticks

LENGTHS = ("16", "128", "1024", "all")


@pytest.fixture
def report() -> dict[str, Any]:
    cost = {
        "seconds_with": 1.05,
        "seconds_without": 1.0,
        "share": 0.05,
        "step_share": 0.03,
        "mixed_stripes_share": 0.1,
        "events_decoded": 9,
    }
    rates = {"thinrow_shared": 4e7, "thinrow_copies": 2e7, "fat_rows_sorted": 1e7, "fat_rows_arrival_order": 1e6}
    return {
        "data": {
            "source": "the <data>",
            "events": "visits",
            "users": "guests",
            "steps": "days",
            "notes": ["So it is."],
        },
        "requests": 100,
        "versions_verified": 100,
        "mismatches": 0,
        "comparisons": 400,
        "events": 2_000,
        "users": 10,
        "history_events": 50_000,
        "longest_history": 1_234,
        "candidates": 2_000,
        "inline_events": 30,
        "generations": 4,
        "outcomes": {"labelled": 150},
        "bytes": {
            "thinrow_history": 20_000,
            "thinrow_examples": 10_000,
            "fat_rows_arrival_order": 300_000,
            "fat_rows_sorted": 60_000,
        },
        "bytes_on_disk": {"archive": 25_000, "recent_tier": 40_000, "examples": 11_000},
        "bytes_written": {
            "thinrow_history": 50_000,
            "thinrow_logs": 10_000,
            "thinrow_examples": 20_000,
            "fat_rows_arrival_order": 300_000,
            "fat_rows_sorted": 360_000,
        },
        "events_per_second": {store: dict.fromkeys(LENGTHS, rate) for store, rate in rates.items()},
        "events_delivered": dict.fromkeys(LENGTHS, 1_000),
        "verification": {n: dict(cost) for n in LENGTHS},
        "seconds": {"append": 1.0, "rebuild": 2.0, "total": 3.0},
        "machine": {"cpus": 2, "python": "3.11.7", "system": "Linux x86_64"},
    }


class _Tags(HTMLParser):
    """Checks nesting and collects what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loads += [v for k, v in attrs if k in ("src", "href") and v]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_loads_nothing(report: dict[str, Any]) -> None:
    page = _Tags()
    page.feed(render(report))
    assert page.open == []
    assert page.loads == []
    assert page.counts["svg"] == 3
    # 4 stores at 4 lengths, 4 parts of 3 byte bars, 2 stages.
    assert page.counts["rect"] == 16 + 4 + 2
    assert "script" not in page.counts


def test_findings_follow_the_figures(report: dict[str, Any]) -> None:
    assert {f.verdict for f in byte_findings(report) + speed_findings(report)} == {"ahead"}
    worse = deepcopy(report)
    worse["bytes"]["fat_rows_sorted"] = 15_000
    worse["events_per_second"]["fat_rows_sorted"]["all"] = 8e7
    worse["events_per_second"]["fat_rows_arrival_order"]["16"] = 2e7
    texts = {f.text for f in byte_findings(worse) if f.verdict == "behind"}
    assert texts == {"Bytes stored: fat rows, sorted by user win with 15.0 KB against our 30.0 KB, 2.0 times less."}
    behind = [f.text for f in speed_findings(worse) if f.verdict == "behind"]
    assert behind == [
        "The rival wins: thinrow, shared views: slower than fat rows, sorted by user (all 2.0x).",
        "The rival wins: thinrow, copies: slower than fat rows, sorted by user (all 4.0x).",
    ]
    assert [f.text for f in speed_findings(worse) if f.verdict == "even"] == [
        "thinrow, copies: about as fast as fat rows, arrival order (newest 16 1.0x)."
    ]
    for text in (*texts, *behind):
        assert text in render(worse)


def test_a_mismatch_leads_the_report(report: dict[str, Any]) -> None:
    report["mismatches"] = 3
    assert exactness(report).verdict == "behind"
    assert "3 of 400 comparisons with a fat row differ." in render(report)


def test_files_and_summary(report: dict[str, Any], tmp_path: Path) -> None:
    write_report(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    console = Console(width=120, record=True, quiet=False, file=(tmp_path / "summary.txt").open("w"))
    print_summary(report, console)
    text = console.export_text()
    assert "All 100 histories, 50,000 events, equal the fat rows" in text
    assert "300.0 KB" in text
    assert "newest 1,024" in text


@pytest.mark.parametrize(
    ("top", "ticks"), [(10, [0, 2.5, 5, 7.5, 10]), (0.3, [0, 0.1, 0.2, 0.30000000000000004]), (461, [0, 200, 400, 600])]
)
def test_ticks(top: float, ticks: list[float]) -> None:
    assert nice_ticks(top) == ticks
