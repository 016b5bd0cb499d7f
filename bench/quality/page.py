"""Put tables and plots made of the lines into docs/quality.md, whose words are written by hand.

A block of the page between ``<!-- NAME ... -->`` and ``<!-- end -->`` is replaced: ``length DATA`` by tables of NE and
GAUC against history length, ``against STUDY DATA`` by what a changed value does to both, paired by seed.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.quality.study import LENGTHS, Cell, cells
from thinrow.training.metrics import interval

Line = dict[str, Any]
_BLOCK = re.compile(r"<!-- (length|against) ([a-z ]+) -->\n.*?<!-- end -->", re.S)
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#7f7f7f", "#17becf")
_NAMES = {"best": "best possible", "hstu_plain": "hstu without cross features"}


def read(path: Path) -> list[Line]:
    """The lines of the runs."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(page: Path, lines: Sequence[Line], images: Path) -> None:
    """Bring the page's blocks up to date, and its plots in the folder ``images``."""
    text = page.read_text()
    page.write_text(_BLOCK.sub(lambda m: _block(m[1], m[2].split(), lines), text))
    for data in (m[2] for m in _BLOCK.finditer(text) if m[1] == "length"):
        (images / f"quality-length-{data}.svg").write_text(plot(data, lines))


def _block(kind: str, words: Sequence[str], lines: Sequence[Line]) -> str:
    body = length_table(words[0], lines) if kind == "length" else against_table(words[0], words[1], lines)
    return f"<!-- {kind} {' '.join(words)} -->\n\n{body}\n\n<!-- end -->"


def _by_model(data: str, lines: Sequence[Line]) -> dict[str, dict[int, list[Line]]]:
    """Model -> history -> lines of the recipe as it is, by seed; models with two lengths and more."""
    found: dict[str, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for f in lines:
        if f["data"] == data and not f["change"] and not f["pretrain"] and f["share"]:
            found[f["model"]][f["history"]].append(f)
    for of_model in found.values():
        for at in of_model.values():
            at.sort(key=lambda f: int(f["seed"]))
    return {m: v for m, v in found.items() if len(v) > 1}


def length_table(data: str, lines: Sequence[Line]) -> str:
    """NE (held out, then progressive) and GAUC by model and length, and the gain from the shortest to the longest."""
    rows = [
        "| model | | " + " | ".join(f"{n:,}" for n in LENGTHS) + " | from the shortest to the longest |",
        "|---|---|" + "---|" * (len(LENGTHS) + 1),
    ]
    for model, of_model in _by_model(data, lines).items():
        there = [n for n in LENGTHS if n in of_model]
        for name, what in (("ne", "NE"), ("progressive_ne", "NE, progressive"), ("gauc", "GAUC")):
            if name not in of_model[there[0]][0]:
                continue
            values = [_shown(of_model[n], name) if n in of_model else "" for n in LENGTHS]
            gain = _change(of_model[there[0]], of_model[there[-1]], name)
            rows.append(f"| {_NAMES.get(model, model)} | {what} | {' | '.join(values)} | {gain} |")
    return "\n".join(rows)


def _shown(at: Sequence[Line], name: str) -> str:
    mean, half = interval([f[name] for f in at])
    return f"{mean:.4f}" if math.isnan(half) else f"{mean:.4f} ± {half:.4f}"


def _change(before: Sequence[Line], after: Sequence[Line], name: str) -> str:
    """Relative change, paired by seed, with its interval; in bold where that does not hold 0."""
    first = {f["seed"]: f[name] for f in before}
    changes = [100 * (f[name] / first[f["seed"]] - 1) for f in after if f["seed"] in first]
    if not changes:
        return ""
    mean, half = interval(changes)
    if math.isnan(half):
        return f"{mean:+.1f}%" if before[0]["model"] == "best" else f"{mean:+.1f}% (one seed)"
    text = f"{mean:+.1f}% ± {half:.1f} ({len(changes)} seeds)"
    return f"**{text}**" if abs(mean) > half else text


def against_table(study: str, data: str, lines: Sequence[Line]) -> str:
    """Each variant of a study against its first one."""
    variants: dict[str, list[Line]] = {}
    by_key = {_key(f): f for f in lines}
    for cell in cells(study, data, 16):
        if cell.key in by_key:
            variants.setdefault(_variant(cell), []).append(by_key[cell.key])
    base, *others = variants.items()
    rows = [
        "| | forward GFLOP a request | NE | NE against the first | GAUC | GAUC against the first |",
        "|---|---|---|---|---|---|",
    ]
    for name, at in (base, *others):
        against = ("", "") if at is base[1] else (_change(base[1], at, "ne"), _change(base[1], at, "gauc"))
        flops = f"{at[0]['flops'] / 1e9:.3f}"
        rows.append(f"| {name} | {flops} | {_shown(at, 'ne')} | {against[0]} | {_shown(at, 'gauc')} | {against[1]} |")
    return "\n".join(rows)


def _key(f: Line) -> str:
    names = ("data", "model", "history", "seed", "change", "pretrain", "share")
    return Cell("", **{n: f[n] for n in names} | {"change": tuple(f["change"])}).key


def _variant(cell: Cell) -> str:
    parts = [cell.model, f"{cell.history:,} events", *(c.removeprefix("ranker.model.") for c in cell.change)]
    if cell.pretrain:
        parts.append(f"pretrained, {cell.pretrain} pass" + "es" * (cell.pretrain > 1))
    return ", ".join(parts if cell.share else [*parts, "a pass a request"])


def plot(data: str, lines: Sequence[Line]) -> str:
    """NE and GAUC against history length, a line a model with its interval, as SVG."""
    models = _by_model(data, lines)
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 330" font-family="sans-serif" font-size="12">',
        '<rect width="860" height="330" fill="#ffffff"/>',
    ]
    for left, name, title in ((60, "ne", "held-out NE"), (440, "gauc", "GAUC")):
        points = {m: [(n, *interval([f[name] for f in at])) for n, at in sorted(v.items())] for m, v in models.items()}
        every = [y for p in points.values() for _, y, _ in p]
        low, high = min(every), max(every)
        low, high = low - 0.08 * (high - low), high + 0.08 * (high - low)
        out += _axes(left, title, low, high)
        for i, (model, of_model) in enumerate(points.items()):
            out += _line(left, of_model, low, high, _COLOURS[i % len(_COLOURS)], model == "best")
    for i, model in enumerate(models):
        y, colour = 30 + 18 * i, _COLOURS[i % len(_COLOURS)]
        out.append(f'<rect x="722" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="738" y="{y}" fill="#333333">{_NAMES.get(model, model).replace("without", "w/o")}</text>')
    return "\n".join([*out, "</svg>\n"])


_WIDE, _TOP, _BOTTOM = 250, 40, 280


def _x(left: int, n: int) -> float:
    return left + _WIDE * math.log2(n / LENGTHS[0]) / math.log2(LENGTHS[-1] / LENGTHS[0])


def _y(value: float, low: float, high: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low)


def _axes(left: int, title: str, low: float, high: float) -> list[str]:
    out = [f'<text x="{left}" y="24" fill="#333333" font-weight="bold">{title}</text>']
    for k in range(5):
        value = low + (high - low) * k / 4
        y = _y(value, low, high)
        out.append(f'<line x1="{left}" x2="{left + _WIDE}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{value:.3f}</text>')
    for n in LENGTHS:
        out.append(f'<text x="{_x(left, n):.1f}" y="{_BOTTOM + 18}" text-anchor="middle" fill="#555555">{n:,}</text>')
    middle = left + _WIDE / 2
    out.append(f'<text x="{middle}" y="{_BOTTOM + 38}" text-anchor="middle" fill="#555555">events</text>')
    return out


def _line(
    left: int, points: Sequence[tuple[int, float, float]], low: float, high: float, colour: str, dashed: bool
) -> list[str]:
    at = [(_x(left, n), _y(v, low, high)) for n, v, _ in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    out = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    for (x, y), (_, value, half) in zip(at, points, strict=True):
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        if not math.isnan(half):
            top, bottom = (min(max(_y(value + s * half, low, high), _TOP - 10), _BOTTOM) for s in (1, -1))
            out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke="{colour}"/>')
    return out
