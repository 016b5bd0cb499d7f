"""How many workers a reader can use, and what holds it up: storage, worker CPU, processors, transport, the trainer.

Worked trace, one line an interval::

    workers 1   stall 40%, CPU 95% of busy time     worker cpu    one more
    workers 2   stall 12%, 1.7 times the rate       worker cpu    one more
    workers 3   stall 11%, 1.02 times the rate      worker cpu    back to 2: it brought nothing
    workers 3   stall 0%, items ready, 1.2 busy     trainer       one less

Each decision carries its evidence. A worker that brought less than ``_GAIN`` is given back, and no further one is asked
for until what was measured has changed by more than that.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A trainer that waits for less than this share of its time is not held up.
STALL = 0.01
#: What one more worker must bring, as a share of the rate.
_GAIN = 0.05
#: Of the time of busy workers: CPU above it is what they need; with what they waited for a processor above it, they
#: would need it; below it they wait for storage.
_CPU = 0.6
#: Of all workers: those that wait to hand an item over.
_BLOCKED = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """An interval.

    Attributes:
        seconds: how long it was.
        items: that the reader took.
        stall_s: seconds that it waited for them.
        workers: at its end.
        busy_s, blocked_s: worker seconds spent on making items; on waiting for memory to hand them over.
        cpu_s: CPU seconds of the workers; None where they cannot be told.
        queued_s: seconds that workers were ready to run, and others had the processors.
        depth: share of the window that waited for the reader, on average.
    """

    seconds: float
    items: int
    stall_s: float
    workers: int
    busy_s: float
    blocked_s: float
    cpu_s: float | None
    queued_s: float
    depth: float

    @property
    def stall(self) -> float:
        """Share of the time that the reader waited."""
        return min(self.stall_s / self.seconds, 1.0)

    @property
    def waste(self) -> float:
        """Share of the workers' time in which they made nothing."""
        return max(0.0, 1 - self.busy_s / (self.workers * self.seconds))


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done, and why.

    Attributes:
        workers: that can be used from now on.
        bottleneck: "storage", "worker cpu", "processors", "workers" (CPU not known), "transport", "trainer" or
            "unknown".
        why: the evidence, in one line.
    """

    workers: int
    bottleneck: str
    why: str


def bottleneck_of(s: Sample) -> str:
    """What held the reader up in an interval."""
    if not s.items and not s.busy_s:
        return "unknown"
    if s.stall < STALL:
        return "trainer"
    if s.blocked_s > _BLOCKED * s.workers * s.seconds:
        return "transport"
    if s.cpu_s is None:
        return "workers"
    if s.cpu_s >= _CPU * s.busy_s:
        return "worker cpu"
    return "processors" if s.cpu_s + s.queued_s >= _CPU * s.busy_s else "storage"


def _alike(rate: float, other: float) -> bool:
    return abs(rate - other) <= 2 * _GAIN * other


class Scaler:
    """Decides interval by interval, between 1 worker and ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        #: Rate and workers before the last one was added, where that is to be judged.
        self._before: tuple[float, int] | None = None
        #: The rate at which more workers brought nothing.
        self._full: float | None = None
        #: Workers and rate when one was given back; and when that turned out to be one too few.
        self._less: tuple[int, float] | None = None
        self._least: tuple[int, float] | None = None

    def decide(self, s: Sample) -> Decision:
        """What to do after an interval."""
        what, rate = bottleneck_of(s), s.items / s.seconds
        seen = f"stall {s.stall:.1%}, waste {s.waste:.1%}, depth {s.depth:.0%}"
        seen += f", {rate:.3g} items/s with {s.workers} workers"
        if s.cpu_s is not None and s.busy_s:
            seen += f", CPU {s.cpu_s / s.busy_s:.0%} of busy time, {s.queued_s / s.busy_s:.0%} waiting for a processor"
        before, self._before = self._before, None
        if what == "trainer":
            needed = s.busy_s / s.seconds
            # One to spare: items differ.
            if s.workers > 1 and s.depth > 0.5 and needed < s.workers - 1.5:
                if self._least and s.workers <= self._least[0] and _alike(rate, self._least[1]):
                    return Decision(s.workers, what, f"{seen}: with one less the trainer waited before")
                self._less = s.workers, rate
                return Decision(s.workers - 1, what, f"{seen}: one less does")
            return Decision(s.workers, what, f"{seen}: more would wait for the trainer")
        if what in ("transport", "unknown"):
            return Decision(s.workers, what, f"{seen}: more would not help")
        if before is not None and s.workers > before[1] and rate < before[0] * (1 + _GAIN):
            self._full = rate
            return Decision(
                before[1], what, f"{seen}: {before[0]:.3g} items/s with {before[1]}, the last brought nothing"
            )
        if self._full is not None and _alike(rate, self._full):
            return Decision(s.workers, what, f"{seen}: one more brought nothing before, and nothing has changed")
        self._full = None
        if s.workers >= self._most:
            return Decision(s.workers, what, f"{seen}: all {self._most} that may be used are")
        self._before = rate, s.workers
        if self._less and s.workers == self._less[0] - 1:
            self._least = self._less
        return Decision(s.workers + 1, what, f"{seen}: one more")
