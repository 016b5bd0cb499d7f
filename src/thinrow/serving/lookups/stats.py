"""What servers and clients count, for people and for Prometheus.

Worked example::

    stats = Stats()
    stats.add("requests", "OK"); stats.took(0.0004)
    stats.read()                     # {"requests": {"OK": 1}}
    prometheus_text(stats, "thinrow_embeddings")
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable

#: Upper ends, inclusive, of the buckets of times in seconds.
BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Stats:
    """Counters by name and label, a histogram of times, and numbers that are asked for when they are read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter[tuple[str, str]]()
        self._times, self._seconds = [0] * (len(BUCKETS) + 1), 0.0
        self.gauges: dict[str, Callable[[], float]] = {}
        #: What others count: numbers by name and label; times a bucket, and their sum in seconds.
        self.sources: list[Callable[[], tuple[dict[tuple[str, str], int], list[int], float]]] = []

    def after_fork(self) -> None:
        """In a child process: whichever thread held the lock is not here to let it go."""
        self._lock = threading.Lock()

    def add(self, name: str, label: str = "", n: int = 1) -> None:
        """Count ``n`` more."""
        with self._lock:
            self._counts[name, label] += n

    def took(self, seconds: float) -> None:
        """One more time: a server's from reading a request to its answer, a client's of a whole read."""
        with self._lock:
            self._times[bisect_left(BUCKETS, seconds)] += 1
            self._seconds += seconds

    def read(self) -> dict[str, dict[str, int]]:
        """Name -> label -> count."""
        out: dict[str, dict[str, int]] = {}
        with self._lock:
            counts = Counter(self._counts)
        for source in self.sources:
            counts.update(source()[0])
        for (name, label), n in counts.items():
            out.setdefault(name, {})[label] = n
        return out

    def total(self, name: str) -> int:
        """Of all labels."""
        return sum(self.read().get(name, {}).values())

    def times(self) -> tuple[list[int], float]:
        """How many times fell into each bucket, the last without end; and their sum."""
        with self._lock:
            times, seconds = list(self._times), self._seconds
        for source in self.sources:
            _, more, longer = source()
            times, seconds = [a + b for a, b in zip(times, more, strict=True)], seconds + longer
        return times, seconds


def prometheus_text(stats: Stats, prefix: str) -> str:
    """The text format of Prometheus, version 0.0.4."""
    lines = []
    for name, labels in sorted(stats.read().items()):
        lines.append(f"# TYPE {prefix}_{name}_total counter")
        for label, n in sorted(labels.items()):
            lines.append(f"{prefix}_{name}_total" + (f'{{kind="{label}"}} {n}' if label else f" {n}"))
    for name, read in sorted(stats.gauges.items()):
        lines += [f"# TYPE {prefix}_{name} gauge", f"{prefix}_{name} {read():.15g}"]
    times, seconds = stats.times()
    name, below = f"{prefix}_request_seconds", 0
    lines.append(f"# TYPE {name} histogram")
    for end, n in zip((*map(str, BUCKETS), "+Inf"), times, strict=True):
        below += n
        lines.append(f'{name}_bucket{{le="{end}"}} {below}')
    return "\n".join([*lines, f"{name}_sum {seconds:.9g}", f"{name}_count {below}"]) + "\n"
