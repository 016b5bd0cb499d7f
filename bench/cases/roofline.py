"""Bandwidth of each call of an embedding table by batch size, under the memory's roof (RecIS, arXiv 2509.20883: sparse
work is bound by memory, so the roofline's height is bandwidth).

Bytes are those that the call must move (``thinrow.embeddings.Traffic``); ids are zipf-distributed over a million rows
of 64 under Adagrad. ``vs_stream.<call>.<ids>`` is over a plain copy of the same run (MBU). With ``--work DIR`` the
picture goes to ``DIR/roofline.svg``.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness import Options, Result
from thinrow.embeddings import DynamicTable, SparseAdagrad, stream_bandwidth

_CALLS = ("look_up", "read", "sum", "update")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 760, 420, 70, 30, 60, 110
_COLOURS = {"look_up": "#7b3fa0", "read": "#1f6fb4", "sum": "#c8641a", "update": "#2c8a3d"}


def run(options: Options) -> Result:
    """1,000 to 1,000,000 ids a call; with ``quick`` two small ones."""
    rows, dim, sizes = (
        (10_000, 64, (100, 1_000)) if options.quick else (1_000_000, 64, (1_000, 10_000, 100_000, 1_000_000))
    )
    rounds = 1 if options.quick else options.rounds or 9
    result = Result("roofline", {"rows": rows, "dim": dim, "zipf": 1.05, "rounds": rounds})
    stream = stream_bandwidth(1 << 20 if options.quick else 1 << 28)
    table = DynamicTable(dim)
    table.rows(np.arange(rows), insert=True)
    rng = np.random.default_rng(0)
    bounds = np.cumsum(1 / (np.arange(rows) + 1.0) ** 1.05)
    shuffled = rng.permutation(rows)
    points: dict[str, list[tuple[int, float]]] = {call: [] for call in _CALLS}
    for ids in sizes:
        keys = [shuffled[np.searchsorted(bounds, rng.random(ids) * bounds[-1])] for _ in range(4)]
        for call, rate in _rates(table, keys, rounds).items():
            points[call].append((ids, rate))
            result.ratios[f"vs_stream.{call}.{ids}"] = rate / stream
    result.figures |= {"stream": round(stream)} | {c: {str(n): round(r) for n, r in p} for c, p in points.items()}
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        path: Path = options.work / "roofline.svg"
        path.write_text(picture(points, stream), encoding="utf-8")
    return result


def _rates(table: DynamicTable, keys: list[np.ndarray], rounds: int) -> dict[str, float]:
    """Bytes a second of each call, the median of all."""
    optimizer = SparseAdagrad(table, lr=0.01)
    seen: dict[str, list[float]] = {call: [] for call in _CALLS}

    def timed(call: str, work: Callable[[], object]) -> None:
        before, since = getattr(table.traffic, call), time.perf_counter()
        work()
        seen[call].append((getattr(table.traffic, call) - before) / (time.perf_counter() - since))

    for number in range(rounds + 1):
        for batch in keys:
            rows = table.rows(batch, insert=False)
            gradient = np.full((len(rows), table.dim), 1e-3, np.float32)
            timed("look_up", partial(table.rows, batch, insert=True))
            timed("read", partial(table.read, rows))
            timed("sum", partial(table.add_gradient, rows, gradient))
            timed("update", optimizer.step)
        if not number:
            # The first round only warms up.
            seen = {call: [] for call in _CALLS}
    return {call: statistics.median(found) for call, found in seen.items()}


def picture(points: dict[str, list[tuple[int, float]]], stream: float) -> str:
    """An SVG: ids a call from left to right, bytes a second upwards, both by powers of ten; the roof is ``stream``."""
    sizes = sorted({n for p in points.values() for n, _ in p})
    rates = [stream, *(rate for p in points.values() for _, rate in p)]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    left, right = math.log10(sizes[0]), math.log10(sizes[-1])

    def x(n: float) -> float:
        return _LEFT + (math.log10(n) - left) / max(right - left, 1) * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _TOP + (high - math.log10(rate)) / max(high - low, 1) * (_HEIGHT - _TOP - _BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="Helvetica, sans-serif" '
        'font-size="13"><title>Bandwidth of the calls of an embedding table</title>'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        out.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>')
        out.append(_text(_LEFT - 8, at + 4, f"{10.0**power / 1e9:g} GB/s", "end"))
    for n in sizes:
        out.append(_text(x(n), _HEIGHT - _BOTTOM + 20, f"{n:,}", "middle"))
    out.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, "ids a call", "middle"))
    roof = y(stream)
    out.append(f'<path d="M{_LEFT} {roof:.1f}H{_WIDTH - _RIGHT}" stroke="#222222" stroke-width="2"/>')
    out.append(_text(_WIDTH - _RIGHT + 8, roof + 4, f"copy, {stream / 1e9:.1f}", "start"))
    for call, found in points.items():
        path = " ".join(f"{'M' if not i else 'L'}{x(n):.1f} {y(r):.1f}" for i, (n, r) in enumerate(found))
        out.append(f'<path d="{path}" fill="none" stroke="{_COLOURS[call]}" stroke-width="2"/>')
        out += [f'<circle cx="{x(n):.1f}" cy="{y(r):.1f}" r="4" fill="{_COLOURS[call]}"/>' for n, r in found]
        n, rate = found[-1]
        out.append(_text(x(n) + 10, y(rate) + 4, f"{call}, {rate / 1e9:.1f}", "start", _COLOURS[call]))
    return "\n".join([*out, "</svg>"])


def _text(x: float, y: float, words: str, anchor: str, colour: str = "#222222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'
