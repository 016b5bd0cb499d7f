"""The bars of the speed table: the worst match counts, and what was not measured is not met."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness import Options
from bench.limits import BARS, Bar, as_text, judge
from bench.table import table


def test_worst_match_counts() -> None:
    ratios = {"vs_a.copies.x": 4.0, "vs_a.copies.y": 2.0, "vs_a.shared.x": 1.0, "vs_b_bytes": 0.5, "vs_b_bytes.z": 0.9}
    bar = judge(Bar("c", "vs_a.copies.*", 3), ratios)
    assert (bar["measured"], bar["worst"], bar["met"]) == (2.0, "vs_a.copies.y", False)
    assert judge(Bar("c", "vs_a.copies.x|vs_a.shared.x", 1), ratios)["met"] is True
    cost = judge(Bar("c", "vs_b_bytes*", 0.8, cost=True), ratios)
    assert (cost["measured"], cost["met"], cost["required"]) == (0.9, False, "at most 0.8")


def test_what_was_not_measured_is_not_met() -> None:
    bars = [judge(Bar("c", "vs_gone.*", 1), {}), judge(Bar("c", "vs_a", None), {"vs_a": 0.1})]
    assert [b["met"] for b in bars] == [False, None]
    lines = as_text(bars).splitlines()
    assert lines[0].endswith("not measured  NOT MET")
    assert lines[1].endswith("0.1  ")


def test_every_bar_names_a_case() -> None:
    cases = {p.stem for p in (Path(__file__).parents[2] / "bench" / "cases").glob("*.py")}
    assert {b.case for b in BARS} <= cases


def test_options_as_arguments() -> None:
    options = Options(quick=True, work=Path("w"), newest=("256", "all"))
    assert options.arguments() == ["--quick", "--data", "synthetic", "--work", "w", "--newest", "256,all"]


def test_several_data_sets_side_by_side() -> None:
    bars = (Bar("single", "vs_a.p50|vs_b.p50", 1.0), Bar("storage", "vs_c_bytes", 0.9, cost=True))
    measured = ({"vs_a.p50": 1.25, "vs_c_bytes": 0.95}, {"vs_a.p50": 0.5})
    results = [
        {
            "parameters": {"single": {"data": name, "events": 1_000}},
            "figures": {"bars": [judge(b, ratios) for b in bars]},
        }
        for name, ratios in zip(("retail", "git"), measured, strict=True)
    ]
    assert table(results).splitlines() == [
        "| bar | required | retail, 1,000 events | git, 1,000 events |",
        "|---|---|---|---|",
        "| `single` `vs_a.p50` or `vs_b.p50` | at least 1 | 1.25 | **0.5** |",
        "| `storage` `vs_c_bytes` | at most 0.9 | **0.95** | not measured |",
    ]
    results[1]["figures"] = {"bars": []}
    with pytest.raises(SystemExit, match="other bars"):
        table(results)
