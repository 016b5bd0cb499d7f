"""What a stretch of work asked of the object stores: requests, bytes, retries, cache hits.

Worked example: a batch wants three ranges of 100 bytes. Two lie 50 bytes apart and travel together, so an object store
answers 2 requests with 350 bytes, and

>>> meter = Meter()
>>> with metering(meter):
...     count(requests=2, bytes_fetched=350)
>>> (meter.requests, meter.bytes_fetched, meter.retries)
(2, 350, 0)
"""

from __future__ import annotations

import threading
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Meter:
    """Counts of what was asked of stores; safe for threads.

    Attributes:
        requests: sent to an object store, repeated ones included; reading local files takes none.
        bytes_fetched: bytes of bodies that arrived, gaps between joined ranges included.
        retries: requests sent again after a failure.
        hedges: requests sent again because the first was slow.
        cache_hits, cache_misses: blocks that a local cache had, and had not.
    """

    requests: int = 0
    bytes_fetched: int = 0
    retries: int = 0
    hedges: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        """Add to the counts by name."""
        with self._lock:
            for name, n in counts.items():
                setattr(self, name, getattr(self, name) + n)

    def counts(self) -> dict[str, int]:
        """The counts by name."""
        with self._lock:
            return {name: getattr(self, name) for name in _COUNTS}

    def __reduce__(self) -> tuple[Any, ...]:
        return Meter, tuple(self.counts().values())


_COUNTS = tuple(f.name for f in fields(Meter) if f.name != "_lock")
_meter: ContextVar[Meter | None] = ContextVar("thinrow_meter", default=None)


class metering:
    """Count in ``meter`` what is asked of stores meanwhile, by this thread and by ``each`` on its behalf.

    Where metered stretches nest, the inner one alone counts.
    """

    def __init__(self, meter: Meter) -> None:
        self._own = meter
        self._token: Token[Meter | None] | None = None

    def __enter__(self) -> Meter:
        self._token = _meter.set(self._own)
        return self._own

    def __exit__(self, *error: object) -> None:
        assert self._token is not None
        _meter.reset(self._token)


def current_meter() -> Meter:
    """The meter in force; one that nobody looks at where there is none. For work that goes on in other threads."""
    return _meter.get() or Meter()


def count(**counts: int) -> None:
    """Add to the meter in force, if there is one."""
    meter = _meter.get()
    if meter is not None:
        meter.add(**counts)
