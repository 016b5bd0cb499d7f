"""The main job: real events through the store, every request rebuilt and compared, and the price of it all.

The replay stops at the data's cut. A learner, where one is given, is made there, from what was known by then; it is
asked for every request after the cut and adds its figures to the report.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from rich.console import Console

from thinrow.cli.demo.compare import count_altered
from thinrow.cli.demo.data import DemoData
from thinrow.cli.demo.fat_rows import FatRowReader, FatRowSource, FatRowWriter, write_sorted
from thinrow.cli.demo.git import MIN_EVENTS, load_git
from thinrow.cli.demo.rebuild import LENGTHS, Rate, Rebuild, length_name, scan_rates
from thinrow.cli.demo.replay import Replay, ReplayCounts, empty_cross
from thinrow.cli.demo.retail import load_retail
from thinrow.cli.demo.stages import Stages
from thinrow.core.errors import CorruptionError, InputError
from thinrow.core.users import distinct
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.table import ExampleTable
from thinrow.history.snapshot import Snapshot
from thinrow.history.store import HistoryStore
from thinrow.jagged import Jagged

#: Everything that the job writes under its output folder; a run replaces what an earlier one left.
_FOLDERS = (
    "store",
    "impressions",
    "outcomes",
    "examples",
    "fat_rows",
    "models",
    "served",
    "served_impressions",
    "served_outcomes",
)
_MARK = ".thinrow-demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Attributes:
    out: folder for the store, the logs, the table, the fat rows and the report.
    weeks: only the first so many weeks of the shopping data; None for the year.
    households: only so many households; None for all.
    git: a git checkout whose history is the data instead; None for the shopping data.
    max_commits: only the newest so many commits of it; None for ``git.MAX_COMMITS``.
    seed: of the candidates and the reader's order.
    n_buckets: of the store and the table.
    """

    out: Path
    weeks: int | None = None
    households: int | None = None
    git: Path | None = None
    max_commits: int | None = None
    seed: int = 0
    n_buckets: int = 4


@dataclass(frozen=True, slots=True)
class FatRowFiles:
    """The rival's two files."""

    arrival_order: Path
    by_user: Path


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of the job works on.

    Attributes:
        is_warm_up: nothing of this run is reported; it is small, and there so that kernels are compiled.
        cross: cross features of every candidate of every request; zeros where the replay has not come yet.
        source: the history of every request, from the raw events: an oracle, not to be learned from.
        table: holds the requests before the cut when the learner is made.
    """

    config: DemoConfig
    data: DemoData
    stages: Stages
    is_warm_up: bool
    cross: dict[str, Jagged]
    source: FatRowSource
    store: HistoryStore
    logs: tuple[ImpressionLog, OutcomeLog]
    table: ExampleTable


class Learner(Protocol):
    """A model that was trained on what was known at the cut."""

    @property
    def version(self) -> str:
        """What the impressions after the cut name as their model."""

    def on_requests(self, rows: npt.NDArray[np.int64], taken: Snapshot) -> None:
        """Requests of distinct users after the cut: ``rows`` of ``Run.data.requests``, and what each of them sees."""

    def report(self) -> dict[str, Any]:
        """Figures for the report, JSON-ready, when the replay is over; the names are the learner's own."""


#: Trains, at the cut; booked to the stage ``learn``.
Learn = Callable[[Run], Learner]


def run_demo(config: DemoConfig, console: Console, learn: Learn | None = None) -> dict[str, Any]:
    """Run the job; returns the report as a JSON-ready dict.

    Args:
        learn: makes the learner; called once in a warm-up (``Run.is_warm_up``) and once in the run that counts.

    Raises:
        InputError: ``config.out`` is a folder that something else filled, the limits leave no request, or
            ``config.git`` is no history that can be replayed.
        MissingExtraError: the shopping data's package is not installed.
    """
    stages = Stages(console)
    began = time.perf_counter()
    _prepare(config.out)
    with stages.stage("load_data"), stages.bar("reading the data", 1) as advance:
        data = _load(config)
        advance()
    with stages.stage("compile_kernels"), stages.bar("compiling kernels (once)", 1) as advance:
        _warm_up(config, data, learn)
        advance()
    report = _run(config, data, stages, learn)
    report["seconds"]["total"] = time.perf_counter() - began
    return report


def _prepare(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()) and not (out / _MARK).exists():
        raise InputError(f"{out} holds something that is not a demo's output; pass another folder with --out")
    for folder in _FOLDERS:
        shutil.rmtree(out / folder, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).touch()


def _load(config: DemoConfig) -> DemoData:
    if config.git is not None:
        data = load_git(config.git, config.max_commits, config.seed)
        if not len(data.requests):
            raise InputError(
                f"no request in {len(data.arrival_ts)} commits of {config.git}; it takes an author with {MIN_EVENTS} "
                "changes who then touches a known file: pass a longer history"
            )
        return data
    data = load_retail(config.weeks, config.households, config.seed)
    if not len(data.requests):
        raise InputError(f"no request in weeks={config.weeks}, households={config.households}; raise the limits")
    return data


def _warm_up(config: DemoConfig, data: DemoData, learn: Learn | None) -> None:
    """The whole job on a few users, so that no timed figure holds the compilation of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, out=Path(folder), n_buckets=2)
        _prepare(config.out)
        part = data.small_part(n_users=6, n_bundles=40)
        _run(config, part, Stages(Console(quiet=True)), learn, is_warm_up=True)


def _run(
    config: DemoConfig, data: DemoData, stages: Stages, learn: Learn | None, *, is_warm_up: bool = False
) -> dict[str, Any]:
    out, cross = config.out, empty_cross(data)
    source = FatRowSource.of(data, cross)
    files = FatRowFiles(out / "fat_rows" / "arrival_order.parquet", out / "fat_rows" / "sorted_by_user.parquet")
    files.arrival_order.parent.mkdir()
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
        run = Run(config, data, stages, is_warm_up, cross, source, store, logs, table)
        counts, learned = _replay(run, files, learn)
        with stages.stage("fat_rows_sorted"), stages.bar("sorting the fat rows", 1) as advance:
            write_sorted(files.by_user, source, config.n_buckets)
            advance()
        appended = table.bytes()
        with stages.stage("cluster"), stages.bar("clustering the examples", 1) as advance:
            table.cluster()
            table.remove_unreferenced()
            advance()
        with stages.stage("gc"):
            # The replay is over: nobody reads the generations of the days before.
            store.collect_garbage(keep=1, grace_s=0)
        rebuild = Rebuild(store.pin(), table, stages, config.seed)
        rates = _measure(rebuild, source, files, stages)
        proof = _prove(rebuild, source, files, stages)
        sizes = _sizes(run, files, counts, appended)
        report = proof | _count(run, counts) | sizes | rates | learned
    return report | {"seconds": stages.seconds, "machine": _machine()}


def _replay(run: Run, files: FatRowFiles, learn: Learn | None) -> tuple[ReplayCounts, dict[str, Any]]:
    """Both parts of the replay, the learner between them; returns the counts and what the learner reports."""
    replay = Replay(run.data, run.source, run.cross, run.store, run.logs, run.table, run.stages)
    with FatRowWriter(files.arrival_order, run.source) as fat:
        replay.run_until(fat)
        if learn is None:
            return replay.finish(fat), {}
        with run.stages.stage("learn"):
            learner = learn(run)
        return replay.finish(fat, learner.on_requests, learner.version), learner.report()


def _count(run: Run, counts: ReplayCounts) -> dict[str, Any]:
    data, generation = run.data, run.store.pin()
    return {
        "data": asdict(data.words),
        "requests": counts.requests,
        "held_out_requests": int(data.held_out.sum()),
        "events": len(data),
        "users": len(distinct(data.users)[0]),
        "history_events": int(run.source.lengths.sum()),
        "longest_history": int(run.source.lengths.max()),
        "candidates": int(data.requests.candidate_offsets[-1]),
        "inline_events": counts.inline_events,
        "generations": generation.number,
        "segments": len(generation.segments),
        "outcomes": counts.join.to_dict(),
    }


def _sizes(run: Run, files: FatRowFiles, counts: ReplayCounts, appended: int) -> dict[str, Any]:
    out, table = run.config.out, run.table
    return {
        "bytes": {
            "thinrow_history": run.store.pin().bytes,
            "thinrow_examples": table.bytes(),
            "fat_rows_arrival_order": files.arrival_order.stat().st_size,
            "fat_rows_sorted": files.by_user.stat().st_size,
        },
        "bytes_on_disk": _bytes_on_disk(out),
        "bytes_written": _bytes_written(counts, out, appended + table.bytes(), files),
    }


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


def _bytes_written(counts: ReplayCounts, out: Path, examples: int, files: FatRowFiles) -> dict[str, int]:
    """Bytes that went to disk over the whole run, rewrites included. Sorted fat rows are a rewrite of the others."""
    first = files.arrival_order.stat().st_size
    logs = sum(p.stat().st_size for name in ("impressions", "outcomes") for p in (out / name).rglob("*.log"))
    return {
        "thinrow_history": counts.archive_bytes,
        "thinrow_logs": logs,
        "thinrow_examples": examples,
        "fat_rows_arrival_order": first,
        "fat_rows_sorted": first + files.by_user.stat().st_size,
    }


def _measure(rebuild: Rebuild, source: FatRowSource, files: FatRowFiles, stages: Stages) -> dict[str, Any]:
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
        for store, path in (("fat_rows_sorted", files.by_user), ("fat_rows_arrival_order", files.arrival_order)):
            with stages.stage("read_fat_rows"):
                passes[store] = scan_rates(path, source)
            advance()
    events = {store: {n: r.events for n, r in rates.items()} for store, rates in passes.items()}
    delivered = events["thinrow_shared"]
    if any(counted != delivered for counted in events.values()):
        raise CorruptionError(f"stores deliver different numbers of events: {events}", file=str(files.by_user))
    per_second = {store: {n: r.per_second for n, r in found.items()} for store, found in passes.items()}
    return {"events_per_second": per_second, "events_delivered": delivered, "verification": verification}


def _prove(rebuild: Rebuild, source: FatRowSource, files: FatRowFiles, stages: Stages) -> dict[str, Any]:
    """Every example at every length against its fat row, and the sorted fat rows against those of request time."""
    columns = list(source.columns)
    fat = FatRowReader(files.by_user, columns, threads=True)
    with stages.stage("rebuild"), stages.bar("comparing with the fat rows", len(source.request_id)) as advance:
        compared = rebuild.compare(fat, source, advance)
    with stages.stage("compare"), stages.bar("comparing both files of fat rows", 1) as advance:
        altered = count_altered(files.arrival_order, files.by_user, columns)
        advance()
    return {
        "versions_verified": compared.versions_verified,
        "mismatches": compared.mismatches + altered,
        "comparisons": compared.examples,
    }


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
