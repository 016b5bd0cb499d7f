"""Pieces of a self-contained HTML page: no script, no font, no image from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from thinrow.cli.demo.findings import Finding

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #16202c; --soft: #566373; --line: #dfe4ea;
  --shared: #1d5fc4; --copies: #7db0ef; --sorted: #d2581d; --arrival: #f2b083; --good: #12784a; --bad: #b3261e;
  --mid: #8a5a00; --stage: #52718f; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0f141a; --card: #182029; --ink: #e8edf3; --soft: #9aa8b8; --line: #2c3742;
    --shared: #6aa5ff; --copies: #2f62a8; --sorted: #ff8a4c; --arrival: #9c5128; --good: #54c98c; --bad: #ff8a80;
    --mid: #e3b341; --stage: #7f9db9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 40px 20px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 0 0 4px; }
p { margin: 0 0 12px; } p.lead, p.sub { color: var(--soft); } p.sub { font-size: 14px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 22px 24px;
  margin-top: 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin-top: 24px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; }
.tile b { display: block; font-size: 26px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.good { color: var(--good); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; } svg { display: block; width: 100%; min-width: 620px; height: auto; margin: 10px 0 4px; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--ink); }
svg text.tick, svg text.axis { fill: var(--soft); } svg text.label { font-size: 13px; }
svg text.value { font-weight: 600; } svg text.over { font-size: 10.5px; }
.grid { stroke: var(--line); } .base { stroke: var(--soft); }
rect.shared { fill: var(--shared); } rect.copies { fill: var(--copies); } rect.sorted { fill: var(--sorted); }
rect.arrival { fill: var(--arrival); } circle.shared { fill: var(--shared); } circle.sorted { fill: var(--sorted); }
polyline { fill: none; stroke-width: 2; } polyline.shared, line.shared { stroke: var(--shared); }
polyline.sorted, line.sorted { stroke: var(--sorted); } line.shared, line.sorted { stroke-width: 1.5; }
rect.stage { fill: var(--stage); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; font-size: 13px; color: var(--soft); margin: 8px 0 0; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.legend i.shared { background: var(--shared); } .legend i.copies { background: var(--copies); }
.legend i.sorted { background: var(--sorted); } .legend i.arrival { background: var(--arrival); }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin: 12px 0 4px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
ul.findings { list-style: none; padding: 0; margin: 12px 0 0; font-size: 15px; }
ul.findings li { padding: 5px 0 5px 92px; position: relative; }
ul.findings li::before { position: absolute; left: 0; width: 78px; font-size: 12px; font-weight: 600;
  text-align: center;  border: 1px solid currentColor; border-radius: 99px; line-height: 20px; top: 7px; }
li.ahead::before { content: "ahead"; color: var(--good); }
li.behind::before { content: "rival wins"; color: var(--bad); }
li.even::before { content: "even"; color: var(--mid); }
footer { color: var(--soft); font-size: 13px; margin-top: 24px; }
"""


def document(title: str, body: str) -> str:
    """The whole page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def tiles(entries: Iterable[tuple[str, str, str]]) -> str:
    """Large figures: triples of a CSS class ("good", "bad" or ""), the figure and what it is."""
    cells = "".join(
        f'<div class="tile"><b class="{k}">{escape(v)}</b><span>{escape(t)}</span></div>' for k, v, t in entries
    )
    return f'<div class="tiles">{cells}</div>'


def section(title: str, words: str, chart: str, rest: str) -> str:
    """A card: its title and words (plain text), a chart (SVG, or nothing) and what follows it (HTML)."""
    drawn = f'<div class="scroll">{chart}</div>' if chart else ""
    return f'<section><h2>{escape(title)}</h2><p class="sub">{escape(words)}</p>{drawn}{rest}</section>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names of colours: pairs of a CSS class and a text."""
    return '<p class="legend">' + "".join(f'<span><i class="{k}"></i>{escape(t)}</span>' for k, t in entries) + "</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain texts."""
    cells = "".join(f"<th>{escape(h)}</th>" for h in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def findings_list(findings: Iterable[Finding]) -> str:
    """Findings with their verdicts."""
    items = "".join(f'<li class="{f.verdict}">{escape(f.text)}</li>' for f in findings)
    return f'<ul class="findings">{items}</ul>'
