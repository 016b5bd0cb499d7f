"""What the quality figures say in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from thinrow.cli.demo.cells import Cell
from thinrow.cli.demo.quality import quality_findings, tabulate
from thinrow.cli.demo.quality_page import quality_section, serving_section
from thinrow.cli.demo.report import quality_table
from thinrow.testing.rankers import world_config


def report_of(ne: dict[tuple[str, str], list[float]], differences: int = 0) -> dict[str, Any]:
    """A report whose held-out NE is ``ne``, a figure a seed."""
    cells, scored = [], []
    for (model, history), values in ne.items():
        for seed, value in enumerate(values):
            cells.append(Cell(model, history, world_config(model, seed=seed), Path()))
            scored.append({"ne": value, "auc": 0.8, "gauc": 0.7, "ndcg_10": 0.5})
    held_out = {"held_out_requests": 10, "held_out_candidates": 200, "base_rate": 0.2}
    cost = {"steps": 5, "requests": 40, "candidates": 800, "seconds": 2.0, "waited_s": 0.5, "keys": 9}
    trained = [{"ne_progressive": s["ne"] + 0.1, **cost} for s in scored]
    served = {"requests": 10, "input_differences": differences, "score_differences": 0, "top": 10}
    served |= {"largest_score_difference": 1e-7, "ranked": 10, "outcomes": 4, "outcomes_in_top": 3, "random_share": 0.5}
    return {
        **tabulate(cells, trained, [s | held_out for s in scored]),
        "single_column": {"column": "m_count", "auc": 0.7},
        "online_offline_differences": differences,
        "serving": served | {"model_version": "hstu@5"},
    }


def of_models(short: list[float], long: list[float]) -> dict[tuple[str, str], list[float]]:
    return {(m, h): v for m in ("hstu", "dlrm") for h, v in (("16", short), ("all", long))}


def test_rows_are_means_over_seeds_with_intervals() -> None:
    report = report_of(of_models([0.6, 0.7, 0.8], [0.5, 0.5, 0.5]))
    row = report["quality"][0]
    assert (row["model"], row["history"], row["seeds"]) == ("hstu", "16", 3)
    assert row["ne"] == pytest.approx(0.7)
    # t(0.975, 2) * 0.1 / sqrt(3)
    assert row["ne_half"] == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-5)
    assert report["training"][0]["candidates_per_second"] == 400
    assert report["training"][0]["waited_share"] == 0.25


@pytest.mark.parametrize(
    ("short", "long", "verdict", "words"),
    [
        ([0.60, 0.61, 0.62], [0.50, 0.51, 0.52], "ahead", r"A longer history helps HSTU: held-out NE falls by 16\.\d%"),
        ([0.50, 0.51, 0.52], [0.60, 0.61, 0.62], "behind", "A longer history harms HSTU"),
        ([0.50, 0.60, 0.70], [0.52, 0.55, 0.72], "even", "does not help HSTU on this data.*within what seeds vary"),
    ],
)
def test_the_page_says_whether_a_longer_history_helps(
    short: list[float], long: list[float], verdict: str, words: str
) -> None:
    report = report_of(of_models(short, long))
    first, *_, models, single, parity = quality_findings(report)
    assert "No column tells as much" in single.text
    assert first.verdict == verdict
    assert re.search(words, first.text)
    assert models.verdict == "even"
    assert parity.verdict == "ahead"
    page = quality_section(report)
    assert first.text.split(":")[0] in page
    assert "<polyline" in page
    assert "m_count, has AUC 0.7000 alone" in page
    assert quality_table(report) is not None


def test_the_page_says_that_whole_histories_are_left_out() -> None:
    assert "Whole histories are left out" not in quality_section(report_of(of_models([0.6], [0.5])))
    without = report_of({(m, h): [0.6] for m in ("hstu", "dlrm") for h in ("16", "128")})
    assert "Whole histories are left out" in quality_section(without)


def test_differences_between_online_and_offline_are_said() -> None:
    report = report_of(of_models([0.6], [0.5]), differences=2)
    assert quality_findings(report)[-1].verdict == "behind"
    assert "2 of 10 served requests differ" in quality_findings(report)[-1].text
    assert '<b class="bad">2</b>' in serving_section(report)


def test_a_report_without_models_has_no_such_section() -> None:
    assert quality_section({}) == serving_section({}) == ""
    assert quality_table({}) is None
    assert quality_findings({}) == []
    nothing = {"quality": [], "without_quality": "the evaluation set is empty"}
    assert "the evaluation set is empty" in quality_section(nothing)
