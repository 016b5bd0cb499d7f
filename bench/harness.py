"""Timing that survives a noisy machine: rounds interleaved (ours, peer, ours, peer), medians, ratios."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Does its work once and returns how many units (events, bytes) it delivered.
Work = Callable[[], int]
#: Units per second by contestant: median, min and max over rounds.
Rates = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Options:
    """What a run was asked for; a case takes what it knows.

    Attributes:
        quick: small data, few rounds.
        data: name of the histories (``bench.datagen.datasets.DATA``).
        git_file: the file that ``data="git"`` reads.
        work: folder in which data and files of peers are kept; None for a temporary one.
        rounds: how many; None for the case's own number.
        peers, newest, patterns: only these; None for all.
    """

    quick: bool = False
    data: str = "synthetic"
    git_file: Path | None = None
    work: Path | None = None
    rounds: int | None = None
    peers: tuple[str, ...] | None = None
    newest: tuple[str, ...] | None = None
    patterns: tuple[str, ...] | None = None

    def arguments(self) -> list[str]:
        """The same options on a command line."""
        given = ["--quick"] if self.quick else []
        for name in ("data", "git_file", "work", "rounds"):
            value = getattr(self, name)
            given += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        for name in ("peers", "newest", "patterns"):
            value = getattr(self, name)
            given += [] if value is None else [f"--{name}", ",".join(value)]
        return given

    def choice(self, what: str, known: tuple[str, ...], *, partial: bool = False) -> tuple[str, ...]:
        """Those of ``known`` that the option ``what`` names, all where it names none. Unless ``partial``, a name that
        is not known ends the run."""
        asked = getattr(self, what)
        strange = [a for a in asked or () if a not in known]
        if strange and not partial:
            raise SystemExit(f"--{what} {strange[0]}: unknown; choose from {', '.join(known)}")
        return known if asked is None else tuple(k for k in known if k in asked)


@dataclass(slots=True)
class Result:
    """What a case prints. Ratio keys: ``vs_<peer>[.<variant>...]``; larger is better, but where the first part of a key
    ends in ``_bytes``, ``_ms`` or ``_share``, which are costs."""

    case: str
    parameters: dict[str, Any]
    figures: dict[str, Any] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

    def skip(self, contestant: str, why: str) -> None:
        """Say that a contestant is left out: in the result, and on standard error."""
        if contestant not in self.figures.setdefault("skipped", {}):
            sys.stderr.write(f"{self.case}: without {contestant}: {why}\n")
        self.figures["skipped"][contestant] = why

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "case": self.case,
            "parameters": self.parameters,
            "machine": machine(),
            "figures": self.figures,
            "ratios": {k: round(v, 4) for k, v in self.ratios.items()},
        }


def machine() -> dict[str, Any]:
    """Processor, cores, memory, versions."""
    import numba
    import numpy
    import pyarrow

    model = platform.processor()
    with open("/proc/cpuinfo") as f:
        model = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "numba": numba.__version__,
        "pyarrow": pyarrow.__version__,
    }


def rates(works: Mapping[str, Work], rounds: int) -> Rates:
    """Units per second of each work: median, least and most over interleaved rounds, after one round of warming up."""
    for work in works.values():
        work()
    seen: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            since = time.perf_counter()
            units = work()
            seen[name].append(units / (time.perf_counter() - since))
    return {n: {"median": statistics.median(v), "min": min(v), "max": max(v)} for n, v in seen.items()}


def peak_bytes(work: Work) -> int:
    """Bytes by which the process's resident set grows at most while ``work`` runs, after one run (Linux)."""
    work()
    ctypes.CDLL(None).malloc_trim(0)
    time.sleep(0.05)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))
