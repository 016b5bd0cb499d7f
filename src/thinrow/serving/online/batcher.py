"""Batcher: requests of many callers, ranked a few at a time, with a bound on what waits.

Worked example, two may wait and batches of four: a request comes and the thread is idle, so it is ranked at once, alone
where ``wait_s`` is 0. While it is, two more come and wait, and a third is refused at once: a queue without end makes
every answer late. Then the two are ranked together; a request whose time is up by then is refused, and not ranked.

Each user is in a batch once: the later request of one waits for the next. Answers are given when their impressions are
on disk, where there is a journal; the thread goes on meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from thinrow.core.errors import InputError, Overloaded, StoreError, ThinrowError
from thinrow.examples.records import Impressions
from thinrow.serving.lookups.stats import Stats
from thinrow.serving.ranker import Ranked, Ranker

#: What is written of an impression; its future is done when that is on disk.
Log = Callable[[Impressions], "Future[int]"]


@dataclass(frozen=True, slots=True)
class RankRequest:
    """Attributes:
    request_id: unique.
    user: of the store's kind.
    request_ts: ms; events before it (exclusive) are read.
    candidates: name -> a value for each candidate.
    context: name -> value.
    k: how many of the best to return.
    """

    request_id: int
    user: int | str
    request_ts: int
    candidates: Mapping[str, Sequence[Any]]
    context: Mapping[str, Any]
    k: int = 10


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """Attributes:
    request: that it answers.
    model_version, arm: as in its impression.
    candidates: name -> values of the best, the best first.
    scores: of these.
    position: where each stood among the request's candidates.
    degraded: rows for which a default stood in.
    took_ms: of each step, and of the wait before the first; of ``server 0`` and so on.
    ranked_with: requests of the batch.
    """

    request: RankRequest
    model_version: str
    arm: str
    candidates: dict[str, list[Any]]
    scores: list[float]
    position: list[int]
    degraded: int
    took_ms: dict[str, float]
    ranked_with: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Attributes:
    requests, candidates: of a batch at most; one request may have as many candidates alone.
    wait_s: a batch waits so long for more requests, from when its first came.
    waiting: requests that may wait.
    deadline_s: a request that cannot be answered within it is refused.
    threads: that rank.
    """

    requests: int = 8
    candidates: int = 4096
    wait_s: float = 0.0
    waiting: int = 64
    deadline_s: float = 1.0
    threads: int = 1

    def __post_init__(self) -> None:
        for name, low in (("requests", 1), ("candidates", 1), ("wait_s", 0), ("waiting", 0), ("threads", 1)):
            if getattr(self, name) < low:
                raise InputError(f"{name}={getattr(self, name)}; it must be {low} or more")
        if not self.deadline_s > 0:
            raise InputError(f"deadline_s={self.deadline_s}; it must be above 0")


@dataclass(slots=True, eq=False)
class _Waiting:
    request: RankRequest
    ranker: Ranker
    came: float
    answer: Future[RankAnswer] = field(default_factory=Future)

    @property
    def size(self) -> int:
        return len(next(iter(self.request.candidates.values()), ()))


class Batcher:
    """Any number of threads may submit.

    Attributes:
        stats: ``requests`` by what became of them (``answered``, ``degraded``, ``refused``, ``late``, ``failed``),
            ``batches``, ``impressions``.
    """

    def __init__(
        self,
        choose: Callable[[int | str], Ranker],
        *,
        log: Log | None = None,
        limits: BatchLimits | None = None,
        stats: Stats | None = None,
    ) -> None:
        """Begin.

        Args:
            choose: which ranker a user's requests go to.
            log: where impressions go; None to log nothing here.
        """
        self._choose, self._log, self.limits = choose, log, limits or BatchLimits()
        self.stats = stats or Stats()
        self._waiting = deque[_Waiting]()
        self._changed = threading.Condition()
        self._closed, self._ranking = False, 0
        #: Seconds that a request takes, of late; 0 until it is known.
        self._each_s = 0.0
        self.stats.gauges |= {"waiting": lambda: len(self._waiting), "ranking": lambda: self._ranking}
        self._threads = [
            threading.Thread(target=self._work, name=f"rank-{i}", daemon=True) for i in range(self.limits.threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def inside(self) -> int:
        """Requests that wait or are ranked."""
        return len(self._waiting) + self._ranking

    def submit(self, request: RankRequest) -> Future[RankAnswer]:
        """The answer, later: an InputError of the request's own, or what else ``Ranker.rank`` raises.

        Raises:
            Overloaded: as many wait as may, or it would be late; nothing of it is there.
            StoreError: it is closed.
        """
        waiting = _Waiting(request, self._choose(request.user), time.monotonic())
        with self._changed:
            if self._closed:
                raise StoreError("the ranker ends; ask another one")
            self._refuse_excess()
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.answer

    def rank(self, request: RankRequest) -> RankAnswer:
        """``submit``, and wait."""
        return self.submit(request).result()

    def close(self) -> None:
        """Answer what is inside, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_excess(self) -> None:
        waits = len(self._waiting)
        late_s = self._each_s * (waits + self._ranking) / self.limits.threads
        idle = not waits and self._ranking < self.limits.threads
        if waits >= self.limits.waiting and not idle:
            self.stats.add("requests", "refused")
            raise Overloaded(f"{waits} requests wait, which is all there may be; try again later")
        if late_s > self.limits.deadline_s and not idle:
            self.stats.add("requests", "refused")
            raise Overloaded(
                f"{waits} requests wait, and would take {late_s:.3f} s, more than the {self.limits.deadline_s} s that "
                "an answer may take; try again later"
            )

    def _work(self) -> None:
        while batch := self._take():
            since = time.monotonic()
            try:
                self._rank(batch, since)
            finally:
                spent = (time.monotonic() - since) / len(batch)
                with self._changed:
                    self._ranking -= len(batch)
                    self._each_s = spent if not self._each_s else 0.8 * self._each_s + 0.2 * spent
                    self._changed.notify_all()

    def _take(self) -> list[_Waiting]:
        """The next batch; empty at the end."""
        limits = self.limits
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return []
                self._changed.wait()
            until = self._waiting[0].came + limits.wait_s
            while len(self._waiting) < limits.requests and not self._closed:
                left = until - time.monotonic()
                if left <= 0 or not self._waiting:
                    break
                self._changed.wait(left)
            batch, late = self._chosen(time.monotonic())
            self._ranking += len(batch)
        for one in late:
            self.stats.add("requests", "late")
            waited = time.monotonic() - one.came
            one.answer.set_exception(
                Overloaded(f"it waited {waited:.3f} s, longer than the {limits.deadline_s} s that an answer may take")
            )
        return batch or self._take()

    def _chosen(self, now: float) -> tuple[list[_Waiting], list[_Waiting]]:
        """Requests to be ranked together, taken from the queue: of one ranker, each user once; and those that are
        late."""
        batch, late, left = list[_Waiting](), list[_Waiting](), deque[_Waiting]()
        users, size = set[int | str](), 0
        for one in self._waiting:
            if now - one.came > self.limits.deadline_s:
                late.append(one)
                continue
            fits = not batch or (
                len(batch) < self.limits.requests
                and size + one.size <= self.limits.candidates
                and one.ranker is batch[0].ranker
                and one.request.user not in users
            )
            if not fits:
                left.append(one)
                continue
            batch.append(one)
            users.add(one.request.user)
            size += one.size
        self._waiting = left
        return batch, late

    def _rank(self, batch: list[_Waiting], since: float) -> None:
        try:
            ranked, took = _rank([one.request for one in batch], batch[0].ranker)
        except Exception as error:
            if len(batch) > 1:
                # One of them is at fault, or all: each is told its own.
                for one in batch:
                    self._rank([one], since)
                return
            self.stats.add("requests", "failed" if isinstance(error, ThinrowError) else "broken")
            batch[0].answer.set_exception(error)
            return
        self.stats.add("batches")
        answers = _answers(batch, ranked, took, since)
        if self._log is None:
            self._give(batch, answers)
            return
        try:
            logged = self._log(ranked.impressions)
        except ThinrowError as error:
            self._give(batch, [error] * len(batch))
            return
        logged.add_done_callback(lambda done: self._logged(done, batch, answers))

    def _logged(self, done: Future[int], batch: list[_Waiting], answers: list[RankAnswer]) -> None:
        error = done.exception()
        if error is not None:
            self._give(batch, [error] * len(batch))
            return
        self.stats.add("impressions", n=done.result())
        self._give(batch, answers)

    def _give(self, batch: list[_Waiting], answers: Sequence[RankAnswer | BaseException]) -> None:
        for one, answer in zip(batch, answers, strict=True):
            self.stats.took(time.monotonic() - one.came)
            if isinstance(answer, BaseException):
                self.stats.add("requests", "failed")
                one.answer.set_exception(answer)
            else:
                self.stats.add("requests", "degraded" if answer.degraded else "answered")
                one.answer.set_result(answer)


def _rank(requests: list[RankRequest], ranker: Ranker) -> tuple[Ranked, dict[str, float]]:
    took: dict[str, float] = {}
    at = time.monotonic()

    def mark(step: str) -> None:
        nonlocal at
        now = time.monotonic()
        took[step] = 1e3 * (now - at)
        at = now

    schema = ranker.request_schema
    ranked = ranker.rank(
        [r.request_id for r in requests],
        [r.user for r in requests],
        [r.request_ts for r in requests],
        candidates={f.name: [_field(r.candidates, f.name, "candidates") for r in requests] for f in schema.candidates},
        context={f.name: [_field(r.context, f.name, "context") for r in requests] for f in schema.context},
        k=[r.k for r in requests],
        took=mark,
    )
    return ranked, took


def _field(of: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in of:
        raise InputError(f"the {what} of the request lack {name!r}; there are {', '.join(of) or 'none'}")
    return of[name]


def _answers(batch: list[_Waiting], ranked: Ranked, took: dict[str, float], since: float) -> list[RankAnswer]:
    columns = {n: j.column.to_arrow().to_pylist() for n, j in ranked.candidates.items()}
    scores, position = ranked.scores.values.tolist(), ranked.position.values.tolist()
    servers = {f"server {shard}": 1e3 * seconds for shard, seconds in sorted(ranked.seconds.items())}
    version = ranked.impressions.model_version.to_arrow().to_pylist()[0]
    answers = []
    for x, one in enumerate(batch):
        rows = slice(int(ranked.scores.offsets[x]), int(ranked.scores.offsets[x + 1]))
        answers.append(
            RankAnswer(
                one.request,
                version,
                one.ranker.arm,
                {n: c[rows] for n, c in columns.items()},
                scores[rows],
                position[rows],
                int(ranked.degraded[x]),
                {"waited": 1e3 * (since - one.came), **took, **servers},
                len(batch),
            )
        )
    return answers


__all__ = ["BatchLimits", "Batcher", "RankAnswer", "RankRequest"]
