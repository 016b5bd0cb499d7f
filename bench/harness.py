"""Timing that survives a noisy machine: rounds interleaved (ours, peer, ours, peer), medians, ratios."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Does its work once and returns how many units (events, bytes) it delivered.
Work = Callable[[], int]


@dataclass(slots=True)
class Result:
    """What a case prints. Ratio keys: ``vs_<peer>[.<variant>]``; larger is better, but for keys ending in ``_bytes``,
    ``_ms`` or ``_share``, which are costs."""

    case: str
    parameters: dict[str, Any]
    figures: dict[str, Any] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

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


def rates(works: Mapping[str, Work], rounds: int) -> dict[str, dict[str, float]]:
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
