"""Two kinds of bar charts, and lines with error bars, as inline SVG. Colours are CSS classes, so that the page
settles light and dark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760
_LABEL_WIDTH = 190
_RIGHT = 96
_ROW, _BAR = 40, 22


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar: its ``value`` (0 or more), its CSS ``kind``, and its ``name`` for the tooltip."""

    value: float
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Row:
    """One bar: its ``label``, its parts from left to right, and a note under the label."""

    label: str
    parts: tuple[Part, ...]
    note: str = ""


def horizontal_bars(
    rows: Sequence[Row], show: Callable[[float], str], show_tick: Callable[[float], str], title: str, axis: str
) -> str:
    """Stacked horizontal bars from zero, each with its total at its end."""
    top = max((sum(p.value for p in r.parts) for r in rows), default=0) or 1.0
    ticks = nice_ticks(top)
    scale = (WIDTH - _LABEL_WIDTH - _RIGHT) / max(ticks[-1], top)
    bottom = len(rows) * _ROW + 8
    out = [_open(bottom + 44, title)]
    for tick in ticks:
        x = _LABEL_WIDTH + tick * scale
        out.append(f'<line class="grid" x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{bottom}"/>')
        out.append(_text(x, bottom + 16, show_tick(tick), "tick", "middle"))
    out.append(_text(_LABEL_WIDTH + ticks[-1] * scale / 2, bottom + 36, axis, "axis", "middle"))
    for i, row in enumerate(rows):
        y = i * _ROW + 12
        middle = y + _BAR / 2
        out.append(_text(_LABEL_WIDTH - 12, middle + (-3 if row.note else 4), row.label, "label", "end"))
        if row.note:
            out.append(_text(_LABEL_WIDTH - 12, middle + 11, row.note, "tick", "end"))
        x = float(_LABEL_WIDTH)
        for part in row.parts:
            width = part.value * scale
            # A gap of 2 between parts, taken off the part.
            shown = max(width - (2 if len(row.parts) > 1 else 0), 1.0 if part.value else 0.0)
            out.append(_bar(x, y, shown, _BAR, part, show))
            x += width
        out.append(_text(x + 8, middle + 4, show(sum(p.value for p in row.parts)), "value", "start"))
    out.append(f'<line class="base" x1="{_LABEL_WIDTH}" y1="4" x2="{_LABEL_WIDTH}" y2="{bottom}"/></svg>')
    return "".join(out)


def grouped_bars(
    groups: Sequence[str],
    series: Sequence[tuple[str, str, Sequence[float]]],
    show: Callable[[float], str],
    title: str,
    axis: str,
) -> str:
    """Vertical bars: for each group one bar a series (name, CSS kind, one value a group), values above the bars."""
    left, height, base = 64, 300, 268
    top = max((v for _, _, values in series for v in values), default=0) or 1.0
    ticks = nice_ticks(top)
    scale = (base - 28) / max(ticks[-1], top)
    out = [_open(height + 34, title)]
    for tick in ticks:
        y = base - tick * scale
        out.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{WIDTH}" y2="{y:.1f}"/>')
        out.append(_text(left - 8, y + 4, show(tick), "tick", "end"))
    step = (WIDTH - left) / max(len(groups), 1)
    width = min(34.0, (step - 28) / max(len(series), 1))
    for g, group in enumerate(groups):
        x = left + g * step + (step - width * len(series)) / 2
        out.append(_text(left + (g + 0.5) * step, base + 20, group, "label", "middle"))
        for name, kind, values in series:
            tall = values[g] * scale
            part = Part(values[g], kind, f"{name}, {group}")
            out.append(_bar(x + 1, base - tall, width - 2, tall, part, show))
            out.append(_text(x + width / 2, base - tall - 5, show(values[g]), "over", "middle"))
            x += width
    out.append(f'<line class="base" x1="{left}" y1="{base}" x2="{WIDTH}" y2="{base}"/>')
    out.append(_text((left + WIDTH) / 2, base + 48, axis, "axis", "middle") + "</svg>")
    return "".join(out)


def nice_ticks(top: float, n: int = 4) -> list[float]:
    """About ``n`` steps of 1, 2, 2.5 or 5 times a power of ten, from 0 to the first at or above ``top``."""
    rough = top / n
    power = 1.0
    while power * 10 <= rough:
        power *= 10
    while power > rough:
        power /= 10
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    ticks = [0.0]
    while ticks[-1] < top:
        ticks.append(ticks[-1] + step)
    return ticks


def _open(height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">'
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, height: float, part: Part, show: Callable[[float], str]) -> str:
    tip = f"<title>{escape(part.name)}: {escape(show(part.value))}</title>"
    return (
        f'<rect class="{part.kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" '
        f'rx="2">{tip}</rect>'
    )


def intervals(
    groups: Sequence[str],
    series: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    title: str,
    axis: str,
) -> str:
    """A line a series (name, CSS kind, mean and half width a group) with an error bar at each mean. The scale does not
    start at zero: it spans the figures."""
    left, base, top_y = 64, 268, 28
    low = min((m - h for _, _, points in series for m, h in points), default=0.0)
    high = max((m + h for _, _, points in series for m, h in points), default=1.0)
    room = (high - low) * 0.08 or 0.01
    low, high = low - room, high + room
    step = (WIDTH - left) / max(len(groups), 1)

    def at(value: float) -> float:
        return base - (value - low) / (high - low) * (base - top_y)

    out = [_open(334, title)]
    for i in range(5):
        value = low + (high - low) * i / 4
        out.append(f'<line class="grid" x1="{left}" y1="{at(value):.1f}" x2="{WIDTH}" y2="{at(value):.1f}"/>')
        out.append(_text(left - 8, at(value) + 4, f"{value:.3f}", "tick", "end"))
    for g, group in enumerate(groups):
        out.append(_text(left + (g + 0.5) * step, base + 20, group, "label", "middle"))
    for s, (name, kind, points) in enumerate(series):
        xs = [left + (g + 0.5) * step + (s - (len(series) - 1) / 2) * 14 for g in range(len(points))]
        path = " ".join(f"{x:.1f},{at(m):.1f}" for x, (m, _) in zip(xs, points, strict=True))
        out.append(f'<polyline class="{kind}" points="{path}"/>')
        for x, group, (mean, half) in zip(xs, groups, points, strict=True):
            y1, y2 = at(mean - half), at(mean + half)
            out.append(f'<line class="{kind}" x1="{x:.1f}" y1="{y1:.1f}" x2="{x:.1f}" y2="{y2:.1f}"/>')
            tip = f"<title>{escape(f'{name}, {group}: {mean:.4f} ± {half:.4f}')}</title>"
            out.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{at(mean):.1f}" r="4.5">{tip}</circle>')
    out.append(f'<line class="base" x1="{left}" y1="{base}" x2="{WIDTH}" y2="{base}"/>')
    out.append(_text((left + WIDTH) / 2, base + 48, axis, "axis", "middle") + "</svg>")
    return "".join(out)
