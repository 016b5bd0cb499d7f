"""An engine whose number of workers is the share that a master gives it.

The readers of a machine or cluster (ranks, an evaluation beside them, other people's jobs) have one pool of workers:
the master counts them out, each reader runs those that it was given. A worker holds nothing and is there in
milliseconds, so that it is the number that moves, not the worker; no batch passes the master, and which batch is which
no master can change. A reader reports once a second where it stands and what it could use. Without an answer it goes on
with what it has, and comes back when there is a master again; a reader that is not heard of loses its share.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from thinrow.core.errors import InputError
from thinrow.dpp.engines.choose import engine_of
from thinrow.dpp.engines.clocks import Times
from thinrow.dpp.engines.engine import Engine, EngineChoice, EngineName, Gauges
from thinrow.dpp.engines.failures import check_settings
from thinrow.dpp.scaling import Decision, Sample, Scaler

T = TypeVar("T")
_log = logging.getLogger(__name__)
#: Looks at the engine a report.
_LOOKS = 10
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Shared:
    """Attributes:
    master: its address, ``http://HOST:PORT``.
    name: of this reader, one a rank; no two that run may have the same.
    session: what shares a weight: the ranks of one training are one session; by default the name.
    weight: of the session, against others.
    engine: what runs the workers.
    report_s: seconds between reports.

    ``workers`` of the loader is how many it may use at most.
    """

    master: str
    name: str
    session: str = ""
    weight: float = 1.0
    engine: EngineName | EngineChoice = "processes"
    report_s: float = 1.0

    def __post_init__(self) -> None:
        check_settings(weight=self.weight, report_s=self.report_s)
        if not self.master.startswith(("http://", "https://")) or not self.name:
            raise InputError(f"master={self.master!r}, name={self.name!r}; give http://HOST:PORT and a name")
        engine_of(self.engine)

    @property
    def in_process(self) -> bool:
        """That of the engine."""
        return engine_of(self.engine).in_process

    def start(
        self, produce: Callable[[int], T], *, first: int, stop: int | None, workers: int, window: int
    ) -> SharedEngine[T]:
        """See ``EngineChoice.start``. Raises InputError also where another reader has the name."""
        return SharedEngine(self, produce, first=first, stop=stop, workers=workers, window=window)


class SharedEngine(Generic[T]):
    """See ``Shared`` and ``Engine``.

    Attributes:
        decisions: what was decided so far, newest last, a hundred at most.
    """

    def __init__(
        self, settings: Shared, produce: Callable[[int], T], *, first: int, stop: int | None, workers: int, window: int
    ) -> None:
        check_settings(workers=workers)
        self._settings, self._id = settings, uuid.uuid4().hex
        self._scaler, self._most = Scaler(workers), workers
        self.decisions: list[Decision] = []
        self._wanted, self._reached = 1, True
        self._stop, self._verified = stop, 0
        given = self._ask({"want": 1, "head": first, "workers": 0})
        try:
            self._engine: Engine[T] = engine_of(settings.engine).start(
                produce, first=first, stop=stop, workers=min(given or 1, workers), window=window
            )
        except BaseException:
            self._ask({"leave": True})
            raise
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._report, name="thinrow-dpp-member", daemon=True)
        self._thread.start()

    def next(self) -> T:
        """See ``Engine.next``."""
        item = self._engine.next()
        self._verified += getattr(getattr(item, "stats", None), "versions_verified", 0)
        return item

    def close(self) -> None:
        """See ``Engine.close``; the share goes back."""
        try:
            self._engine.close()
        finally:
            if not self._closed.is_set():
                self._closed.set()
                if self._thread is not threading.current_thread():
                    self._thread.join()
                self._ask({"leave": True})

    def resize(self, workers: int) -> None:
        """See ``Engine.resize``; until the next report."""
        self._engine.resize(workers)

    def gauges(self) -> Gauges:
        """See ``Engine.gauges``."""
        return self._engine.gauges()

    @property
    def waited_s(self) -> float:
        """See ``Engine.waited_s``."""
        return self._engine.waited_s

    @property
    def restarts(self) -> int:
        """See ``Engine.restarts``."""
        return self._engine.restarts

    @property
    def copied_bytes(self) -> int:
        """See ``Engine.copied_bytes``."""
        return self._engine.copied_bytes

    def _report(self) -> None:
        while not self._closed.is_set():
            sample, gauges = self._watch()
            if self._closed.is_set():
                return
            decision = self._scaler.decide(sample)
            if not self.decisions or decision.why != self.decisions[-1].why:
                _log.info("%s: %s: %s", self._settings.name, decision.bottleneck, decision.why)
            self.decisions = [*self.decisions[-99:], decision]
            told = asdict(decision) | asdict(sample) | {"stall": sample.stall, "waste": sample.waste}
            told |= {"head": gauges.head, "restarts": self.restarts, "stop": self._stop, "verified": self._verified}
            given = self._ask({"want": decision.workers, **told})
            # Without a master: what there is.
            if given is not None and not self._closed.is_set():
                self._engine.resize(min(given, self._most))

    def _watch(self) -> tuple[Sample, Gauges]:
        """An interval, looked at several times."""
        since, waited = time.monotonic(), self.waited_s
        first = last = self._engine.gauges()
        busy = blocked = depth = 0.0
        looks, at = 0, since
        while looks < _LOOKS and not self._closed.wait(self._settings.report_s / _LOOKS):
            now, last = time.monotonic(), self._engine.gauges()
            busy, blocked = busy + last.busy * (now - at), blocked + last.blocked * (now - at)
            depth, at, looks = depth + last.ready / last.window, now, looks + 1
        spent = [(t, first.times.get(worker, Times(0.0, 0.0))) for worker, t in last.times.items()]
        cpu = sum(t.cpu_s - before.cpu_s for t, before in spent) if spent else None
        # Threads that ended meanwhile take what they waited with them.
        queued = sum(max(t.queued_s - before.queued_s, 0.0) for t, before in spent)
        seconds = max(time.monotonic() - since, 1e-9)
        counts = last.head - first.head, self.waited_s - waited, max(last.workers, 1), busy, blocked
        return Sample(seconds, *counts, cpu, queued, depth / max(looks, 1)), last

    def _ask(self, report: dict[str, Any]) -> int | None:
        """Tell the master; the share that it gives, or None where it is not there."""
        s = self._settings
        head = {"id": self._id, "name": s.name, "session": s.session or s.name, "weight": s.weight}
        request = urllib.request.Request(
            f"{s.master.rstrip('/')}/v1/report",
            json.dumps(head | report).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                given: int = json.load(answer)["workers"]
        except urllib.error.HTTPError as e:
            said = e.read().decode(errors="replace")[:500]
            if e.code == 409 and "workers" in report and not report["workers"]:
                raise InputError(said) from None
            self._missed(f"it said {e.code}: {said}")
            return None
        except (OSError, ValueError, KeyError) as e:
            self._missed(str(e))
            return None
        self._reached = True
        return given

    def _missed(self, why: str) -> None:
        if self._reached:
            _log.warning("%s goes on with what it has, no answer of the master: %s", self._settings.name, why)
        self._reached = False
