"""The main job: a year of shopping through the store, every request rebuilt and compared, and the price of it all."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from thinrow.cli.demo.compare import count_altered
from thinrow.cli.demo.fat_rows import FatRowReader, FatRowSource, FatRowWriter, write_sorted
from thinrow.cli.demo.rebuild import LENGTHS, Compared, Rate, Rebuild, length_name, scan_rates
from thinrow.cli.demo.replay import Replay, ReplayCounts, empty_cross
from thinrow.cli.demo.retail import RetailData, load_retail
from thinrow.cli.demo.stages import Stages
from thinrow.core.errors import CorruptionError, InputError
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.table import ExampleTable
from thinrow.history.store import HistoryStore

#: Everything that the job writes under its output folder; a run replaces what an earlier one left.
_FOLDERS = ("store", "impressions", "outcomes", "examples", "fat_rows")
_MARK = ".thinrow-demo"


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Attributes:
    out: folder for the store, the logs, the table, the fat rows and the report.
    weeks: only the first so many weeks; None for the year.
    households: only so many households; None for all.
    seed: of the candidates and the reader's order.
    n_buckets: of the store and the table.
    """

    out: Path
    weeks: int | None = None
    households: int | None = None
    seed: int = 0
    n_buckets: int = 4


def run_demo(config: DemoConfig, console: Console) -> dict[str, Any]:
    """Run the job; returns the report as a JSON-ready dict.

    Raises:
        InputError: ``config.out`` is a folder that something else filled, or the limits leave no request.
        MissingExtraError: the data's package is not installed.
    """
    stages = Stages(console)
    began = time.perf_counter()
    _prepare(config.out)
    with stages.stage("compile_kernels"), stages.bar("compiling kernels (once)", 1) as advance:
        _warm_up()
        advance()
    with stages.stage("load_data"), stages.bar("reading the data", 1) as advance:
        data = load_retail(config.weeks, config.households, config.seed)
        advance()
    if not len(data.requests):
        raise InputError(f"no request in weeks={config.weeks}, households={config.households}; raise the limits")
    report = _run(config, data, stages)
    report["seconds"]["total"] = time.perf_counter() - began
    return report


def _prepare(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()) and not (out / _MARK).exists():
        raise InputError(f"{out} holds something that is not a demo's output; pass another folder with --out")
    for folder in _FOLDERS:
        shutil.rmtree(out / folder, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).touch()


def _warm_up() -> None:
    """The whole job on a few households, so that no timed figure holds the compilation of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        config = DemoConfig(Path(folder), weeks=9, households=6, n_buckets=2)
        _prepare(config.out)
        _run(config, load_retail(config.weeks, config.households), Stages(Console(quiet=True)))


def _run(config: DemoConfig, data: RetailData, stages: Stages) -> dict[str, Any]:
    out = config.out
    cross = empty_cross(data)
    source = FatRowSource.of(data, cross)
    arrival, by_user = out / "fat_rows" / "arrival_order.parquet", out / "fat_rows" / "sorted_by_user.parquet"
    arrival.parent.mkdir()
    logs = ImpressionLog(out / "impressions", data.event_schema, data.example_schema), OutcomeLog(out / "outcomes")
    with (
        HistoryStore.create(out / "store", data.event_schema, config.n_buckets) as store,
        ExampleTable.create(
            out / "examples",
            event_schema=data.event_schema,
            example_schema=data.example_schema,
            n_buckets=config.n_buckets,
        ) as table,
    ):
        with FatRowWriter(arrival, source) as fat:
            counts = Replay(data, source, cross, store, logs, table, stages).run(fat)
        with stages.stage("fat_rows_sorted"), stages.bar("sorting the fat rows", 1) as advance:
            write_sorted(by_user, source, config.n_buckets)
            advance()
        appended = table.bytes()
        with stages.stage("cluster"), stages.bar("clustering the examples", 1) as advance:
            table.cluster()
            table.remove_unreferenced()
            advance()
        rebuild = Rebuild(store.pin(), table, stages, config.seed)
        rates, verification = _measure(rebuild, source, arrival, by_user, stages)
        compared = _compare(rebuild, source, by_user, stages)
        with (
            stages.stage("compare"),
            stages.bar("comparing both files of fat rows", 1) as advance,
        ):
            altered = count_altered(arrival, by_user, list(source.columns))
            advance()
        generation = store.pin()
        report = {
            "requests": counts.requests,
            "versions_verified": compared.versions_verified,
            "mismatches": compared.mismatches + altered,
            "comparisons": compared.examples,
            "events": len(data),
            "users": len(np.unique(data.users)),
            "history_events": int(source.lengths.sum()),
            "candidates": int(data.requests.candidates["product_id"].offsets[-1]),
            "inline_events": counts.inline_events,
            "generations": generation.number,
            "segments": len(generation.segments),
            "outcomes": counts.join.to_dict(),
            "bytes": {
                "thinrow_history": generation.bytes,
                "thinrow_examples": table.bytes(),
                "fat_rows_arrival_order": arrival.stat().st_size,
                "fat_rows_sorted": by_user.stat().st_size,
            },
            "bytes_on_disk": _bytes_on_disk(out),
            "bytes_written": _bytes_written(counts, out, appended + table.bytes(), arrival, by_user),
        }
    return report | {**rates, "verification": verification, "seconds": stages.seconds, "machine": _machine()}


def _bytes_on_disk(out: Path) -> dict[str, int]:
    """Every file that thinrow left, by what it is for: superseded segments, manifests and metadata included."""
    places = {
        "archive": out / "store" / "archive",
        "recent_tier": out / "store" / "recent",
        "impression_log": out / "impressions",
        "outcome_log": out / "outcomes",
        "examples": out / "examples",
    }
    return {name: sum(p.stat().st_size for p in at.rglob("*") if p.is_file()) for name, at in places.items()}


def _bytes_written(counts: ReplayCounts, out: Path, examples: int, arrival: Path, by_user: Path) -> dict[str, int]:
    """Bytes that went to disk over the whole run, rewrites included. Sorted fat rows are a rewrite of the others."""
    first = arrival.stat().st_size
    logs = sum(p.stat().st_size for name in ("impressions", "outcomes") for p in (out / name).rglob("*.log"))
    return {
        "thinrow_history": counts.archive_bytes,
        "thinrow_logs": logs,
        "thinrow_examples": examples,
        "fat_rows_arrival_order": first,
        "fat_rows_sorted": first + by_user.stat().st_size,
    }


def _measure(
    rebuild: Rebuild, source: FatRowSource, arrival: Path, by_user: Path, stages: Stages
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Events per second by store and length, and what verification costs."""
    passes: dict[str, dict[str, Rate]] = {"thinrow_shared": {}, "thinrow_copies": {}}
    verification: dict[str, Any] = {}
    with stages.stage("rebuild"), stages.bar("rebuilding and reading (passes)", 5 * len(LENGTHS) + 2) as advance:
        for newest in LENGTHS:
            name = length_name(newest)
            # With and without in turn, twice each, for the machine's mood to fall on both.
            timed: dict[bool, list[Rate]] = {True: [], False: []}
            for verify in (True, False, True, False):
                rate, reader = rebuild.shared(newest, verify=verify)
                timed[verify].append(rate)
                advance()
                if verify:
                    stats = reader.stats
            passes["thinrow_shared"][name] = timed[True][0]
            passes["thinrow_copies"][name] = rebuild.copies(newest)
            advance()
            checked, unchecked = (min(r.seconds for r in timed[v]) for v in (True, False))
            verification[name] = {
                "seconds_with": checked,
                "seconds_without": unchecked,
                "share": checked / unchecked - 1,
                "step_share": stats.seconds.get("verify", 0.0) / max(sum(stats.seconds.values()), 1e-9),
                "mixed_stripes_share": stats.mixed_pieces / max(stats.pieces, 1),
                "thread_seconds_by_step": dict(stats.seconds),
                "events_decoded": stats.events_decoded,
                "bytes_read": stats.bytes_read,
            }
        for store, path in (("fat_rows_sorted", by_user), ("fat_rows_arrival_order", arrival)):
            with stages.stage("read_fat_rows"):
                passes[store] = scan_rates(path, source)
            advance()
    events = {store: {n: r.events for n, r in rates.items()} for store, rates in passes.items()}
    delivered = events["thinrow_shared"]
    if any(counted != delivered for counted in events.values()):
        raise CorruptionError(f"stores deliver different numbers of events: {events}", file=str(by_user))
    per_second = {store: {n: r.per_second for n, r in found.items()} for store, found in passes.items()}
    return {"events_per_second": per_second, "events_delivered": delivered}, verification


def _compare(rebuild: Rebuild, source: FatRowSource, by_user: Path, stages: Stages) -> Compared:
    """Every example at every length against its fat row."""
    fat = FatRowReader(by_user, list(source.columns), threads=True)
    with stages.stage("rebuild"), stages.bar("comparing with the fat rows", len(source.request_id)) as advance:
        return rebuild.compare(fat, source, advance)


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
