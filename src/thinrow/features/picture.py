"""A plan as people look at it: as text, and as a picture (SVG, Graphviz)."""

from __future__ import annotations

import json
from html import escape

from thinrow.features.node import Elementwise, Source
from thinrow.features.plan import FeaturePlan

_BOX, _GAP, _ROW, _LETTER, _EDGE = 30, 60, 46, 6.7, 8
_COLOURS = {"history": "#dbe9f6", "cand": "#fde8cf", "ctx": "#e3f1df"}


def explain(plan: FeaturePlan) -> str:
    """Each distinct step on a line: its number, what it stands beside, the op with its parameters and the numbers of
    the steps that it reads, the pass that it is computed in, and the outputs that it is::

        0  cand  source cand.price
        1  cand  log1p(0)                      pass 0
        2  cand  bucketize(1, boundaries=[1])  pass 0   -> price_bucket

    Steps of one pass are computed together, and the column of the pass's number is read once for them.
    """
    graph = plan.graph
    names = _names(plan)
    said = [_call(plan, place) for place in range(len(graph.nodes))]
    widths = len(str(len(said) - 1)), max((len(s) for s in said), default=0)
    lines = []
    for place, (node, text) in enumerate(zip(graph.nodes, said, strict=True)):
        together = f"pass {graph.base[place]}" if isinstance(node, Elementwise) else ""
        ends = f"-> {', '.join(names[place])}" if place in names else ""
        lines.append(f"{place:>{widths[0]}}  {node.domain:7}  {text:{widths[1]}}  {together:8}  {ends}".rstrip())
    return "\n".join(lines)


def to_dot(plan: FeaturePlan) -> str:
    """The graph in the language of Graphviz."""
    names, graph = _names(plan), plan.graph
    lines = ["digraph plan {", "  rankdir=LR; node [shape=box, style=filled, fontname=Helvetica];"]
    for place, node in enumerate(graph.nodes):
        label = "\\n".join([_short(plan, place), *names.get(place, [])]).replace('"', "'")
        lines.append(f'  n{place} [label="{label}", fillcolor="{_COLOURS[node.domain]}"];')
        lines += [f"  n{below} -> n{place};" for below in graph.operands[place]]
    return "\n".join([*lines, "}"])


def to_svg(plan: FeaturePlan) -> str:
    """The graph as a picture: sources on the left, each step right of all that it reads, outputs named below their
    step; blue beside events, orange beside candidates, green beside requests."""
    names, graph = _names(plan), plan.graph
    labels = [[_short(plan, place), ", ".join(names.get(place, []))] for place in range(len(graph.nodes))]
    depth: list[int] = []
    for below in graph.operands:
        depth.append(1 + max((depth[b] for b in below), default=-1))
    columns = [[p for p, d in enumerate(depth) if d == column] for column in range(max(depth, default=-1) + 1)]
    lefts, x = [], _EDGE
    for column in columns:
        lefts.append(x)
        x += int(max(len(line) for p in column for line in labels[p]) * _LETTER) + 2 * _EDGE + _GAP
    boxes = {
        p: (lefts[d], _EDGE + row * _ROW, lefts[d + 1] - _GAP if d + 1 < len(lefts) else x - _GAP)
        for d, column in enumerate(columns)
        for row, p in enumerate(column)
    }
    height = max((len(c) for c in columns), default=0) * _ROW + _EDGE
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(x - _GAP + _EDGE, 1)} {height}" role="img" '
        'aria-label="feature plan" font-family="Helvetica, Arial, sans-serif" font-size="12">'
    ]
    for place, below in enumerate(graph.operands):
        left, top, _ = boxes[place]
        for b in below:
            _, from_top, from_right = boxes[b]
            y0, y1 = from_top + _BOX / 2 + 2, top + _BOX / 2 + 2
            bend = f"M{from_right} {y0} C{from_right + _GAP / 2} {y0} {left - _GAP / 2} {y1} {left} {y1}"
            out.append(f'<path d="{bend}" fill="none" stroke="#888"/>')
    for place, (left, top, right) in boxes.items():
        colour, (step, ends) = _COLOURS[graph.nodes[place].domain], labels[place]
        out.append(
            f'<g><title>{escape(_call(plan, place))}</title><rect x="{left}" y="{top}" width="{right - left}" '
            f'height="{_BOX + 8 if ends else _BOX}" rx="4" fill="{colour}" stroke="#666"/>'
            f'<text x="{left + _EDGE}" y="{top + (15 if ends else 19)}">{escape(step)}</text>'
        )
        if ends:
            out.append(f'<text x="{left + _EDGE}" y="{top + 31}" font-weight="bold">{escape(ends)}</text>')
        out.append("</g>")
    return "\n".join([*out, "</svg>"])


def _names(plan: FeaturePlan) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, place in zip(plan.outputs, plan.graph.outputs, strict=True):
        names.setdefault(place, []).append(name)
    return names


def _call(plan: FeaturePlan, place: int) -> str:
    node = plan.graph.nodes[place]
    if isinstance(node, Source):
        return f"source {node.name}"
    parameters = [f"{name}={json.dumps(v)}" for name, v in node.parameters().items() if v is not None]
    return f"{node.op}({', '.join([*map(str, plan.graph.operands[place]), *parameters])})"


def _short(plan: FeaturePlan, place: int) -> str:
    """The step in 40 letters at most, without the numbers of what it reads."""
    node = plan.graph.nodes[place]
    if isinstance(node, Source):
        return node.name
    said = ", ".join(f"{name}={json.dumps(v)}" for name, v in node.parameters().items() if v is not None)
    text = f"{node.op} {said}".rstrip()
    return text if len(text) <= 40 else text[:39] + "…"
