"""Every bar of the archive's speed table: required, measured, met or not. ``python -m bench limits`` runs the cases.

A bar names ratios of one case by a pattern; where several match, the worst of them counts. A bar without a match was
not measured, and is not met::

    reconstruct  vs_vortex.copies.random.newest_256   at least 10   12.5  met
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from bench.harness import Options, Result


@dataclass(frozen=True, slots=True)
class Bar:
    """``ratios`` (a glob pattern, ``|`` between alternatives) of ``case`` are at least ``bound``, or at most where
    ``cost``; a ``bound`` of None is printed only."""

    case: str
    ratios: str
    bound: float | None
    cost: bool = False


# Stores are compared on random users. Of 20 requests a user every store decodes an event once and copies it 20 times,
# so that the copy is most of what is timed; those ratios are printed by the case.
_LONG = ("newest_4096", "newest_16384")


def _over(peer: str, bound: float, newest: tuple[str, ...], ours: str = "copies", pattern: str = "*") -> Bar:
    return Bar("reconstruct", "|".join(f"vs_{peer}.{ours}.{pattern}.{n}" for n in newest), bound)


BARS = (
    _over("raw_copy", 0.5, _LONG),
    _over("raw_copy", 1.0, _LONG, "codes"),
    _over("vortex", 3, _LONG, pattern="random"),
    _over("rocksdb", 3, _LONG, pattern="random"),
    _over("lance", 5, _LONG, pattern="random"),
    _over("duckdb", 10, _LONG, pattern="random"),
    _over("sorted_fat_rows", 2, _LONG, "copies", "k20"),
    _over("sorted_fat_rows", 20, _LONG, "shared", "k20"),
    _over("vortex", 10, ("newest_256",), pattern="random"),
    _over("rocksdb", 3, ("newest_256",), pattern="random"),
    _over("lance", 10, ("newest_256",), pattern="random"),
    _over("duckdb", 10, ("newest_256",), pattern="random"),
    _over("sorted_fat_rows", 30, ("newest_256",), "copies", "k20"),
    _over("sorted_fat_rows", 150, ("newest_256",), "shared", "k20"),
    Bar("reconstruct", "|".join(f"threads_2_over_1.*.{n}" for n in _LONG), 1.8),
    Bar("storage", "vs_sorted_fat_rows_bytes", 0.75, cost=True),
    Bar("storage", "vs_vortex_bytes", 0.9, cost=True),
    Bar("storage", "vs_parquet_bytes", 1.1, cost=True),
    Bar("write", "vs_sorted_fat_rows", 5),
    Bar("write", "vs_sorted_fat_rows_bytes", 0.9, cost=True),
    Bar("write", "vs_unsorted_fat_rows_bytes", 0.15, cost=True),
    Bar("projection", "vs_longest_tenant_bytes.*", 0.08, cost=True),
    Bar("single", "vs_*.p50", 1.0),
    Bar("single", "vs_*.p99", 1.0),
    Bar("verify", "vs_unverified.late_0.0", 0.95),
    Bar("levels", "vs_16_segments.*", None),
)


def run(options: Options) -> Result:
    """Run each case in a process of its own, with the same options, and hold its ratios to the bars."""
    result = Result("limits", {}, {"bars": [], "cases": {}})
    for case in dict.fromkeys(b.case for b in BARS):
        found = _run_case(case, options)
        bars = [judge(b, found["ratios"]) for b in BARS if b.case == case]
        # Cases take minutes: what is known is said at once.
        sys.stderr.write(as_text(bars))
        result.parameters[case], result.figures["cases"][case] = found["parameters"], found["figures"]
        result.figures["bars"] += bars
        result.ratios |= {f"{case}:{k}": v for k, v in found["ratios"].items()}
    asked = [b for b in result.figures["bars"] if b["met"] is not None]
    sys.stderr.write(f"{sum(b['met'] for b in asked)} of {len(asked)} bars met\n")
    return result


def judge(bar: Bar, ratios: Mapping[str, float]) -> dict[str, Any]:
    """What is required, what was measured (the worst match), and whether that meets it."""
    matches = {k: v for k, v in ratios.items() if any(fnmatchcase(k, p) for p in bar.ratios.split("|"))}
    worst = (max if bar.cost else min)(matches, key=matches.__getitem__) if matches else None
    measured = None if worst is None else matches[worst]
    met: bool | None = None
    if bar.bound is not None:
        met = measured is not None and (measured <= bar.bound if bar.cost else measured >= bar.bound)
    required = "printed" if bar.bound is None else f"at {'most' if bar.cost else 'least'} {bar.bound:g}"
    return {
        "case": bar.case, "ratios": bar.ratios, "required": required, "measured": measured, "worst": worst, "met": met,
    }  # fmt: skip


def as_text(bars: list[dict[str, Any]]) -> str:
    """One line a bar."""
    lines = []
    for b in bars:
        met = {True: "met", False: "NOT MET", None: ""}[b["met"]]
        measured = "not measured" if b["measured"] is None else f"{b['measured']:.3g}"
        lines.append(f"{b['case']:12} {b['worst'] or b['ratios']:52} {b['required']:14} {measured:>12}  {met}\n")
    return "".join(lines)


def _run_case(case: str, options: Options) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench", case, "--json", "-", *options.arguments()]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        sys.stderr.write(f"{case}: exit status {ran.returncode}\n")
        return {"parameters": {}, "figures": {}, "ratios": {}}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found
