"""The report as one self-contained HTML page: a head, sections in order, a foot.

A section is a function from the report to HTML, listed in ``SECTIONS``; it gives "" where the report lacks its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from thinrow.cli.demo import html
from thinrow.cli.demo.findings import (
    RIVALS,
    STORES,
    byte_findings,
    count,
    exactness,
    lengths,
    longest,
    on_disk,
    percent,
    rate,
    seconds,
    speed_findings,
    stored,
    written,
)
from thinrow.cli.demo.quality_page import quality_section, serving_section
from thinrow.cli.demo.svg import Part, Row, grouped_bars, horizontal_bars
from thinrow.core.units import format_bytes

_KINDS = {
    "thinrow_shared": "shared",
    "thinrow_copies": "copies",
    "fat_rows_sorted": "sorted",
    "fat_rows_arrival_order": "arrival",
}


def render(report: Mapping[str, Any]) -> str:
    """The page of a report (the dict that ``report.json`` holds)."""
    body = _head(report) + "".join(part(report) for part in SECTIONS) + _method(report)
    return html.document("thinrow: histories stored once, rebuilt exactly", body)


def _head(report: Mapping[str, Any]) -> str:
    kept, data = stored(report), report["data"]
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
    lead = (
        f"{count(report['events'])} {data['events']} of {count(report['users'])} {data['users']} ({data['source']}), "
        f"replayed in order. {exactness(report).text} {longest(report)}"
    )
    return f'<h1>Histories stored once, rebuilt exactly</h1><p class="lead">{escape(lead)}</p>{html.tiles(tiles)}'


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
    legend = html.legend(
        (
            ("shared", "histories"),
            ("copies", "examples with candidates"),
            ("sorted", "fat rows, sorted"),
            ("arrival", "fat rows, arrival order"),
        )
    )
    table = html.table(
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
        "Both sides hold the same requests with the same candidates. Written in all counts every rewrite: the "
        "segments of all compactions, the logs and the clustered table of thinrow, and for sorted fat rows the "
        "unsorted ones that they were made of; not the pages of the recent tier's database and the table's metadata. "
        f"{on_disk(report)}"
    )
    return html.section("Bytes", words, chart + legend, table + html.findings_list(byte_findings(report)))


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
    legend = html.legend(tuple((_KINDS[store], label) for store, label in STORES.items()))
    delivered = report["events_delivered"]
    table = html.table(
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
    return html.section(
        "Events delivered per second", words, chart + legend, table + html.findings_list(speed_findings(report))
    )


def _verification(report: Mapping[str, Any]) -> str:
    table = html.table(
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
    return html.section("What verification costs", words, "", table)


def _time(report: Mapping[str, Any]) -> str:
    spent = sorted(((s, n) for n, s in report["seconds"].items() if n != "total"), reverse=True)
    rows = [Row(n.replace("_", " "), (Part(s, "stage", n.replace("_", " ")),)) for s, n in spent]
    chart = horizontal_bars(rows, seconds, _short_number, "Seconds by stage", "seconds")
    total = seconds(report["seconds"]["total"])
    words = f"{total} in all, the writing and reading of the rival's files and all comparisons included."
    return html.section("Where the time went", words, chart, "")


def _method(report: Mapping[str, Any]) -> str:
    m, o = report["machine"], report["outcomes"]
    words = (
        f"{escape(str(m['cpus']))} CPUs, Python {escape(m['python'])}, {escape(m['system'])}. "
        f"{count(report['generations'])} generations; {count(report['inline_events'])} recent events logged inline; "
        f"{count(report['candidates'])} candidates; {count(o['labelled'])} outcomes joined. "
        f"{escape(' '.join(report['data']['notes']))} "
        "Fat rows: Parquet, plain encoding, zstd level 3, strings as codes. "
        "Figures are of one run; run <code>thinrow demo</code> for your own."
    )
    return f"<footer>{words}</footer>"


#: What stands between head and foot, in this order.
SECTIONS: tuple[Callable[[Mapping[str, Any]], str], ...] = (
    _storage,
    _speed,
    _verification,
    quality_section,
    serving_section,
    _time,
)


def _short_bytes(n: float) -> str:
    return format_bytes(n).replace(".0 ", " ")


def _short_number(n: float) -> str:
    return f"{n:g}"


def _short_rate(per_second: float) -> str:
    text, _, unit = rate(per_second).partition(" ")
    value = float(text)
    return f"{value:.0f} {unit}".strip() if value >= 10 else f"{value:.2g} {unit}".strip()
