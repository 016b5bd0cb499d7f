"""Quality against history length: the figures of all runs as rows, and what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinrow.cli.demo.findings import Finding, count, lengths, percent

if TYPE_CHECKING:
    from thinrow.cli.demo.cells import Cell

#: Names of the models as the report shows them.
MODEL_NAMES = {"hstu": "HSTU", "dlrm": "pooled DLRM"}
_METRICS = ("ne", "auc", "gauc", "ndcg_10")


def tabulate(
    cells: Sequence[Cell], trained: Sequence[Mapping[str, Any]], scored: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """``quality`` and ``training`` of the report: a row a model and history, means over seeds.

    A quality row has ``model``, ``history``, ``seeds``, and of ``ne``, ``auc``, ``gauc``, ``ndcg_10`` (held out) and
    ``ne_progressive`` the mean; ``*_half`` is half the width of its 95% interval (null of one seed), ``*_by_seed`` the
    figures themselves.
    """
    from thinrow.training.metrics import interval

    quality, training = [], []
    order = list(MODEL_NAMES)
    keys = sorted(
        {(c.model, c.history) for c in cells}, key=lambda k: (order.index(k[0]), k[1] == "all", len(k[1]), k[1])
    )
    for model, history in keys:
        at = [i for i, c in enumerate(cells) if (c.model, c.history) == (model, history)]
        at.sort(key=lambda i: cells[i].config.seed)
        row: dict[str, Any] = {"model": model, "history": history, "seeds": len(at)}
        for name in (*_METRICS, "ne_progressive"):
            values = [float((trained if name == "ne_progressive" else scored)[i][name]) for i in at]
            mean, half = interval(values)
            row |= {name: mean, f"{name}_half": None if math.isnan(half) else half, f"{name}_by_seed": values}
        quality.append(row)
        totals = {n: sum(trained[i][n] for i in at) for n in ("seconds", "waited_s", "candidates", "requests", "steps")}
        training.append(
            {
                "model": model,
                "history": history,
                **totals,
                "keys": max(trained[i]["keys"] for i in at),
                "candidates_per_second": totals["candidates"] / max(totals["seconds"], 1e-9),
                "waited_share": totals["waited_s"] / max(totals["seconds"], 1e-9),
            }
        )
    held_out = {n: scored[0][n] for n in ("held_out_requests", "held_out_candidates", "base_rate")}
    return {"quality": quality, "training": training, "held_out": held_out}


def quality_findings(report: Mapping[str, Any]) -> list[Finding]:
    """For each model whether the longest history is better than the shortest, beyond what seeds vary; then which model
    is better at the longest; and whether online and offline agree."""
    found = []
    rows = report.get("quality", [])
    of_model = {m: [r for r in rows if r["model"] == m] for m in MODEL_NAMES}
    for model, own in of_model.items():
        if len(own) >= 2:
            found.append(_length_finding(model, own[0], own[-1]))
    if all(of_model.values()):
        found.append(_model_finding(of_model["hstu"][-1], of_model["dlrm"][-1]))
    if rows:
        found.append(_single_finding(rows, report["single_column"]))
    if "online_offline_differences" in report:
        found.append(_parity_finding(report))
    return found


def _length_finding(model: str, short: Mapping[str, Any], long: Mapping[str, Any]) -> Finding:
    verdict, gain, half = _compare(short, long)
    name, spans = MODEL_NAMES[model], f"from {lengths(short['history'])} to {lengths(long['history'])} events"
    figures = f"AUC {short['auc']:.4f} to {long['auc']:.4f}, GAUC {short['gauc']:.4f} to {long['gauc']:.4f}"
    match verdict:
        case "ahead":
            text = f"A longer history helps {name}: held-out NE falls by {percent(gain)}{half} {spans}; {figures}."
        case "behind":
            text = f"A longer history harms {name}: held-out NE rises by {percent(-gain)}{half} {spans}; {figures}."
        case _:
            text = (
                f"A longer history does not help {name} on this data: held-out NE changes by {percent(-gain)}{half} "
                f"{spans}, within what seeds vary; {figures}."
            )
    return Finding(verdict, text)


def _model_finding(hstu: Mapping[str, Any], dlrm: Mapping[str, Any]) -> Finding:
    verdict, gain, half = _compare(dlrm, hstu)
    at = "on whole histories" if hstu["history"] == "all" else f"at {lengths(hstu['history'])}"
    word = {"ahead": "is ahead of", "behind": "is behind", "even": "is about even with"}[verdict]
    return Finding(
        verdict,
        f"HSTU {word} the pooled DLRM {at}: held-out NE {hstu['ne']:.4f} against {dlrm['ne']:.4f}, "
        f"{percent(abs(gain))}{half} {'more' if gain < 0 else 'less'}.",
    )


def _single_finding(rows: Sequence[Mapping[str, Any]], single: Mapping[str, Any]) -> Finding:
    best = max(rows, key=lambda r: float(r["auc"]))
    what = f"the best model, {MODEL_NAMES[best['model']]} on {lengths(best['history'])}, has AUC {best['auc']:.4f}"
    text = f"{what}; the best single input column, {single['column']}, has {single['auc']:.4f} alone."
    if single["auc"] >= best["auc"]:
        return Finding("behind", f"The models learn less than one column tells: {text}")
    return Finding("ahead", f"No column tells as much as the models: {text}")


def _parity_finding(report: Mapping[str, Any]) -> Finding:
    served, wrong = report["serving"], report["online_offline_differences"]
    if wrong:
        return Finding("behind", f"{count(wrong)} of {count(served['requests'])} served requests differ when rebuilt.")
    return Finding(
        "ahead",
        f"All {count(served['requests'])} lists that the ranker served are rebuilt from the archive with equal "
        f"inputs, bit for bit; scores differ by {served['largest_score_difference']:.1g} at most.",
    )


def _compare(base: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, float, str]:
    """Verdict, relative gain of ``other`` in NE, and its interval in words: seeds are paired."""
    from thinrow.training.metrics import interval

    gains = [1 - b / a for a, b in zip(base["ne_by_seed"], other["ne_by_seed"], strict=True)]
    mean, half = interval(gains)
    if math.isnan(half):
        return ("ahead" if mean > 0 else "behind" if mean < 0 else "even"), mean, " (one seed)"
    verdict = "ahead" if mean - half > 0 else "behind" if mean + half < 0 else "even"
    return verdict, mean, f" (±{percent(half)})"
