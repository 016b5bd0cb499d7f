"""The report as one self-contained HTML page: no script, no font, no image from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from thinrow.cli.demo.findings import (
    RIVALS,
    STORES,
    Finding,
    byte_findings,
    count,
    exactness,
    lengths,
    on_disk,
    percent,
    rate,
    seconds,
    speed_findings,
    stored,
    written,
)
from thinrow.cli.demo.svg import Part, Row, grouped_bars, horizontal_bars
from thinrow.core.units import format_bytes

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
rect.arrival { fill: var(--arrival); } rect.stage { fill: var(--stage); }
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

_KINDS = {
    "thinrow_shared": "shared",
    "thinrow_copies": "copies",
    "fat_rows_sorted": "sorted",
    "fat_rows_arrival_order": "arrival",
}


def render(report: Mapping[str, Any]) -> str:
    """The page of a report (the dict that ``report.json`` holds)."""
    body = "".join(
        (_head(report), _storage(report), _speed(report), _verification(report), _time(report), _method(report))
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>thinrow: histories stored once, rebuilt exactly</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _head(report: Mapping[str, Any]) -> str:
    kept = stored(report)
    proof = exactness(report)
    wrong = report["mismatches"]
    ratio = kept["fat_rows_arrival_order"] / max(kept["thinrow"], 1)
    less = ratio >= 1
    tiles = (
        ("", count(report["requests"]), "requests, each with its own history"),
        ("", rate(report["history_events"]), "events in those histories"),
        ("bad" if wrong else "good", count(wrong), f"mismatches in {count(report['comparisons'])} comparisons"),
        (
            "",
            f"{ratio if less else 1 / ratio:.1f}x",
            f"{'less' if less else 'more'} stored than fat rows as they arrive",
        ),
    )
    cells = "".join(
        f'<div class="tile"><b class="{k}">{escape(v)}</b><span>{escape(t)}</span></div>' for k, v, t in tiles
    )
    return (
        "<h1>Histories stored once, rebuilt exactly</h1>"
        f'<p class="lead">{count(report["events"])} purchases of {count(report["users"])} households (the Complete '
        f"Journey), replayed in order. {escape(proof.text)}</p>"
        f'<div class="tiles">{cells}</div>'
    )


def _storage(report: Mapping[str, Any]) -> str:
    b = report["bytes"]
    rows = [
        Row(
            "thinrow",
            (
                Part(b["thinrow_history"], "shared", "thinrow, histories"),
                Part(b["thinrow_examples"], "copies", "thinrow, examples"),
            ),
        ),
        Row("fat rows", (Part(b["fat_rows_sorted"], "sorted", STORES["fat_rows_sorted"]),), "sorted by user"),
        Row(
            "fat rows",
            (Part(b["fat_rows_arrival_order"], "arrival", STORES["fat_rows_arrival_order"]),),
            "arrival order",
        ),
    ]
    kept, wrote = stored(report), written(report)
    chart = horizontal_bars(rows, format_bytes, _short_bytes, "Bytes stored by thinrow and by fat rows", "bytes stored")
    legend = _legend(
        (
            ("shared", "histories"),
            ("copies", "examples with candidates"),
            ("sorted", "fat rows, sorted"),
            ("arrival", "fat rows, arrival order"),
        )
    )
    table = _table(
        ("", "stored", "written in all", "stored, against thinrow"),
        [
            (
                STORES.get(n, n),
                format_bytes(kept[n]),
                format_bytes(wrote[n]),
                f"{kept[n] / max(kept['thinrow'], 1):.1f}x",
            )
            for n in ("thinrow", *RIVALS)
        ],
    )
    words = (
        "Both sides hold the same requests with the same candidates. Written in all counts every rewrite: the daily "
        "segments of all compactions, the logs and the clustered table of thinrow, and for sorted fat rows the "
        "unsorted ones that they were made of; not the pages of the recent tier's database and the table's metadata. "
        f"{on_disk(report)}"
    )
    return _section("Bytes", words, chart + legend, table + _findings(byte_findings(report)))


def _speed(report: Mapping[str, Any]) -> str:
    rates = report["events_per_second"]
    names = list(rates["thinrow_shared"])
    series = [(label, _KINDS[store], [rates[store][n] for n in names]) for store, label in STORES.items()]
    chart = grouped_bars(
        [lengths(n) for n in names],
        series,
        _short_rate,
        "Events delivered per second by store and length",
        "events of each history that a batch asks for",
    )
    legend = _legend(tuple((_KINDS[store], label) for store, label in STORES.items()))
    delivered = report["events_delivered"]
    table = _table(
        ("events per second", *(lengths(n) for n in names)),
        [
            *((label, *(rate(rates[store][n]) for n in names)) for store, label in STORES.items()),
            ("events delivered", *(count(delivered[n]) for n in names)),
        ],
    )
    words = (
        "All requests once, all columns, two threads, with candidates and labels. thinrow delivers shuffled, verified "
        "batches; fat rows are read in file order. Shared views give each user's events once and a slice per request; "
        "copies give every request its own arrays, as fat rows do."
    )
    return _section("Events delivered per second", words, chart + legend, table + _findings(speed_findings(report)))


def _verification(report: Mapping[str, Any]) -> str:
    table = _table(
        ("", "with", "without", "difference", "share of the work", "stripes across a bound"),
        [
            (
                lengths(n),
                seconds(v["seconds_with"]),
                seconds(v["seconds_without"]),
                percent(v["share"]),
                percent(v["step_share"]),
                percent(v["mixed_stripes_share"]),
            )
            for n, v in report["verification"].items()
        ],
    )
    words = (
        f"{count(report['versions_verified'])} versions were held against what the archive gives: length, bounds and a "
        "digest of every event's identity. The same pass was timed with the check and without, twice each in turn, the "
        "better one shown; a few percent are within what runs vary. The share of the work is what the step itself "
        "took of all thread time."
    )
    return _section("What verification costs", words, "", table)


def _time(report: Mapping[str, Any]) -> str:
    spent = sorted(((s, n) for n, s in report["seconds"].items() if n != "total"), reverse=True)
    rows = [Row(n.replace("_", " "), (Part(s, "stage", n.replace("_", " ")),)) for s, n in spent]
    chart = horizontal_bars(rows, seconds, _short_number, "Seconds by stage", "seconds")
    total = seconds(report["seconds"]["total"])
    words = f"{total} in all, the writing and reading of the rival's files and all comparisons included."
    return _section("Where the time went", words, chart, "")


def _method(report: Mapping[str, Any]) -> str:
    m, o = report["machine"], report["outcomes"]
    words = (
        f"{escape(str(m['cpus']))} CPUs, Python {escape(m['python'])}, {escape(m['system'])}. "
        f"{count(report['generations'])} generations; {count(report['inline_events'])} recent events logged inline; "
        f"{count(report['candidates'])} candidates; {count(o['labelled'])} outcomes joined. "
        "Times of the data are naive, taken as UTC. Fat rows: Parquet, plain encoding, zstd level 3, strings as codes. "
        "Figures are of one run; run <code>make demo</code> for your own."
    )
    return f"<footer>{words}</footer>"


def _section(title: str, words: str, chart: str, rest: str) -> str:
    drawn = f'<div class="scroll">{chart}</div>' if chart else ""
    return f'<section><h2>{escape(title)}</h2><p class="sub">{escape(words)}</p>{drawn}{rest}</section>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    return '<p class="legend">' + "".join(f'<span><i class="{k}"></i>{escape(t)}</span>' for k, t in entries) + "</p>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(h)}</th>" for h in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def _findings(findings: Iterable[Finding]) -> str:
    items = "".join(f'<li class="{f.verdict}">{escape(f.text)}</li>' for f in findings)
    return f'<ul class="findings">{items}</ul>'


def _short_bytes(n: float) -> str:
    return format_bytes(n).replace(".0 ", " ")


def _short_number(n: float) -> str:
    return f"{n:g}"


def _short_rate(per_second: float) -> str:
    text, _, unit = rate(per_second).partition(" ")
    value = float(text)
    return f"{value:.0f} {unit}".strip() if value >= 10 else f"{value:.2g} {unit}".strip()
