"""The sections of the page about models: quality by length, training, serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinrow.cli.demo import html
from thinrow.cli.demo.findings import count, lengths, percent, rate
from thinrow.cli.demo.quality import MODEL_NAMES, quality_findings
from thinrow.cli.demo.svg import intervals

_KINDS = {"hstu": "shared", "dlrm": "sorted"}


def quality_section(report: Mapping[str, Any]) -> str:
    """NE against history length with intervals, the table of all metrics, what they say."""
    if "quality" not in report:
        return ""
    rows, title = report["quality"], "Quality against history length"
    if not rows:
        return html.section(title, f"No figures: {report['without_quality']}", "", "")
    names = list(dict.fromkeys(r["history"] for r in rows))
    series = [
        (label, _KINDS[m], [(r["ne"], r["ne_half"] or 0.0) for r in rows if r["model"] == m])
        for m, label in MODEL_NAMES.items()
    ]
    chart = intervals(
        [lengths(n) for n in names],
        series,
        "Held-out normalized entropy by model and history length",
        "held-out NE (lower is better) by the events of each history that the model reads",
    )
    held, single = report["held_out"], report["single_column"]
    table = html.table(
        ("", "NE", "AUC", "GAUC", "NDCG@10", "training NE"),
        [
            (
                f"{r['model'].upper()}, {lengths(r['history'])}",
                *(with_interval(r, n) for n in ("ne", "auc", "gauc")),
                *(f"{r[n]:.4f}" for n in ("ndcg_10", "ne_progressive")),
            )
            for r in rows
        ],
    )
    words = (
        f"Trained once through on requests before the cut, scored on {count(held['held_out_requests'])} after it "
        f"({count(held['held_out_candidates'])} candidates, {percent(held['base_rate'])} positive). Mean and 95% "
        f"interval over {rows[0]['seeds']} seeds of weights, order and, where there are many, of the users trained on. "
        "Windows start on a grid of half their length, so that requests share passes: newest 1,024 is 513 to 1,024 "
        "events. The interval is that of the seeds, not of the requests. The best single input column, "
        f"{single['column']}, has AUC {single['auc']:.4f} alone: candidates that did not follow are seeded draws, so "
        "what is popular stands out."
    )
    if names[-1] != "all":
        words += " Whole histories are left out: passes over them, many of one request each, would take hours."
    parts = (
        html.legend(tuple((_KINDS[m], label) for m, label in MODEL_NAMES.items())),
        table,
        html.findings_list(quality_findings(report)),
        _training_table(report),
    )
    return html.section(title, words, chart, "".join(parts))


def serving_section(report: Mapping[str, Any]) -> str:
    """The ranker in the loop."""
    if "serving" not in report:
        return ""
    s = report["serving"]
    wrong = report["online_offline_differences"]
    tiles = html.tiles(
        (
            ("", count(s["ranked"]), f"requests ranked by {s['model_version']} as they came"),
            (
                "",
                percent(s["outcomes_in_top"] / max(s["outcomes"], 1)),
                f"of what followed was in its top {s['top']}; at random {percent(s['random_share'])}",
            ),
            ("bad" if wrong else "good", count(wrong), "online and offline differences"),
            ("", f"{s['largest_score_difference']:.1g}", "largest difference of a score"),
        )
    )
    words = (
        "At the cut the ranker is loaded from its checkpoint; from then on every request goes snapshot, feature plan, "
        "model, top list, impression log, before what follows it is known. In the end the lists are joined with their "
        "outcomes, histories are rebuilt from the last generation, and each input that the model read online is "
        "compared, bit for bit, with what training would read."
    )
    return html.section("Serving: the loop closes", words, "", tiles)


def _training_table(report: Mapping[str, Any]) -> str:
    return html.table(
        ("training, one thread", "requests", "steps", "candidates/s", "waiting for data", "keys"),
        [
            (
                f"{r['model'].upper()}, {lengths(r['history'])}",
                count(r["requests"]),
                count(r["steps"]),
                rate(r["candidates_per_second"]),
                percent(r["waited_share"]),
                count(r["keys"]),
            )
            for r in report["training"]
        ],
    )


def with_interval(row: Mapping[str, Any], name: str) -> str:
    """A metric of a quality row, with half the width of its interval."""
    half = row[f"{name}_half"]
    return f"{row[name]:.4f}" if half is None else f"{row[name]:.4f} ± {half:.3f}"
