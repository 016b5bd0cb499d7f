"""What the figures of a report say, in words: where thinrow is ahead, and where a rival is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thinrow.core.units import format_bytes

#: Names of the stores as the report shows them.
STORES = {
    "thinrow_shared": "thinrow, shared views",
    "thinrow_copies": "thinrow, copies",
    "fat_rows_sorted": "fat rows, sorted by user",
    "fat_rows_arrival_order": "fat rows, arrival order",
}
RIVALS = ("fat_rows_sorted", "fat_rows_arrival_order")
#: Ratios this close to 1 are within what these machines vary: neither is ahead.
_EVEN = 1.1


@dataclass(frozen=True, slots=True)
class Finding:
    """``verdict`` is "ahead", "even" or "behind" (from thinrow's side); ``text`` is one sentence."""

    verdict: str
    text: str


def count(n: float) -> str:
    """``77054`` -> ``'77,054'``."""
    return f"{n:,.0f}"


def rate(per_second: float) -> str:
    """``21300000`` -> ``'21.3 M'``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if per_second >= size:
            return f"{per_second / size:.3g} {unit}"
    return f"{per_second:.0f}"


def seconds(s: float) -> str:
    """``0.043`` -> ``'0.04 s'``, ``61.2`` -> ``'61 s'``."""
    return f"{s:.0f} s" if s >= 10 else f"{s:.1f} s" if s >= 1 else f"{s:.2f} s"


def percent(share: float) -> str:
    """``0.043`` -> ``'4.3%'``."""
    return f"{100 * share:.1f}%"


def stored(report: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that each store keeps, thinrow's two parts together."""
    b = report["bytes"]
    return {"thinrow": b["thinrow_history"] + b["thinrow_examples"], **{r: b[r] for r in RIVALS}}


def written(report: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that each store wrote over the whole run, thinrow's parts together."""
    w = report["bytes_written"]
    return {"thinrow": sum(v for k, v in w.items() if k.startswith("thinrow_")), **{r: w[r] for r in RIVALS}}


def on_disk(report: Mapping[str, Any]) -> str:
    """What is on the disk beside what is stored, in one sentence."""
    d = report["bytes_on_disk"]
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in d.items())
    return (
        "Stored is what the newest generation and table snapshot name; on the disk lie "
        f"{format_bytes(sum(d.values()))} ({parts}): "
        "the logs are kept, older generations were collected (`thinrow gc`)."
    )


def verdict(ratio: float) -> str:
    """``ratio`` above 1 is in thinrow's favour."""
    return "ahead" if ratio > _EVEN else "behind" if ratio < 1 / _EVEN else "even"


def exactness(report: Mapping[str, Any]) -> Finding:
    """Whether every rebuilt history equals its fat row."""
    n, wrong = report["requests"], report["mismatches"]
    if wrong:
        return Finding("behind", f"{count(wrong)} of {count(report['comparisons'])} comparisons with a fat row differ.")
    return Finding(
        "ahead",
        f"All {count(n)} histories, {count(report['history_events'])} events, equal the fat rows written at request "
        f"time, element for element, at every length; {count(report['versions_verified'])} versions verified.",
    )


def byte_findings(report: Mapping[str, Any]) -> list[Finding]:
    """One sentence for each rival and for bytes stored and bytes written."""
    found = []
    for what, sizes in (("stored", stored(report)), ("written", written(report))):
        for rival in RIVALS:
            ratio = sizes[rival] / max(sizes["thinrow"], 1)
            ours, theirs, name = format_bytes(sizes["thinrow"]), format_bytes(sizes[rival]), STORES[rival]
            match verdict(ratio):
                case "ahead":
                    text = f"Bytes {what}: {ours} against {theirs} of {name}, {ratio:.1f} times less."
                case "behind":
                    text = f"Bytes {what}: {name} win with {theirs} against our {ours}, {1 / ratio:.1f} times less."
                case _:
                    text = f"Bytes {what}: {ours} and {theirs} of {name} are about even."
            found.append(Finding(verdict(ratio), text))
    return found


def speed_findings(report: Mapping[str, Any]) -> list[Finding]:
    """For each way of delivery and each rival: at which lengths thinrow is ahead, even or behind."""
    found = []
    rates = report["events_per_second"]
    for ours in ("thinrow_shared", "thinrow_copies"):
        for rival in RIVALS:
            ratios = {length: rates[ours][length] / max(rates[rival][length], 1e-9) for length in rates[ours]}
            for side, words in (("ahead", "faster than"), ("even", "about as fast as"), ("behind", "slower than")):
                at = {n: r for n, r in ratios.items() if verdict(r) == side}
                if not at:
                    continue
                factors = [f"{lengths(n)} {r if side != 'behind' else 1 / r:.1f}x" for n, r in at.items()]
                lead = "The rival wins: " if side == "behind" else ""
                found.append(Finding(side, f"{lead}{STORES[ours]}: {words} {STORES[rival]} ({', '.join(factors)})."))
    return found


def longest(report: Mapping[str, Any]) -> str:
    """How long histories get, in one sentence."""
    return f"The longest history that a request saw has {count(report['longest_history'])} events."


def lengths(name: str) -> str:
    """``"16"`` -> ``"newest 16"``; ``"1024"`` -> ``"newest 1,024"``; ``"all"`` -> ``"all"``."""
    return name if name == "all" else f"newest {int(name):,}"


#: What is said after the tables, in this order; each gives nothing where the report has no figures for it.
FINDINGS: tuple[Callable[[Mapping[str, Any]], list[Finding]], ...] = (byte_findings, speed_findings)
