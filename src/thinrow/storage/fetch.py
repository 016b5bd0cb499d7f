"""Many byte ranges over a network: bounded concurrency, retries with backoff, hedged stragglers, a deadline.

Worked trace of one request under the default policy: sent at 0 s; no whole answer at 1 s, so it is sent once more (a
*hedge*); the first whole answer counts, the other request is cancelled. Had both failed, it would be sent again after a
random wait of up to 0.1 s, then 0.2 s, 0.4 s and so on, at most ``tries`` times and never beyond ``deadline_s``.

A *get* says what it knows of a failure by what it raises: ``Transient`` is tried again, anything else is final.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from thinrow.core.errors import CorruptionError, InputError, StoreError
from thinrow.storage.meter import Meter
from thinrow.storage.ranges import U8, Requests

#: (object, first byte, one past the last byte) -> (the bytes, size of the whole object).
Get: TypeAlias = Callable[[str, int, int], Awaitable[tuple[Any, int]]]

#: A share of all requests may be hedged, and so many more: where everything is slow, asking twice makes it slower.
_HEDGED_SHARE = 0.1
_HEDGED_FREE = 8


class Transient(Exception):
    """A failure that may pass: a time-out, a refused or lost connection, a 5xx answer, a body cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    """How an object store is asked (docs/decisions/015-object-stores.md has the measurements).

    Attributes:
        concurrency: requests in flight of one store object, hedges not counted.
        gap_bytes: ranges of one object this close are read by one request.
        request_bytes: longer ranges are cut; no request is longer than twice this.
        timeout_s: of one request.
        hedge_after_s: a request without a whole answer by then is sent a second time.
        tries: of one request in all.
        backoff_s: longest wait before the second try; doubles with every further one, up to 5 s.
        deadline_s: of one call.
    """

    concurrency: int = 16
    gap_bytes: int = 1 << 20
    request_bytes: int = 4 << 20
    timeout_s: float = 15.0
    hedge_after_s: float = 1.0
    tries: int = 6
    backoff_s: float = 0.1
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("concurrency", "request_bytes", "tries"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}; it must be 1 or more")
        for name in ("gap_bytes", "backoff_s", "hedge_after_s"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)}; it must be 0 or more")
        for name in ("timeout_s", "deadline_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}={getattr(self, name)}; it must be above 0")

    def wait_s(self, tried: int) -> float:
        """Seconds to wait after ``tried`` failures: random, so that many clients do not come back at once."""
        return random.uniform(0.0, min(self.backoff_s * 2 ** (tried - 1), 5.0))


class Fetcher:
    """Fetches planned requests through a ``Get``. Safe for threads, which share its concurrency."""

    def __init__(self, get: Get, policy: FetchPolicy, where: str) -> None:
        """``where`` names the store in messages."""
        self._get, self._policy, self._where = get, policy, where
        self._slots = asyncio.Semaphore(policy.concurrency)
        self._sent = self._hedged = 0

    def fetch(self, names: Sequence[str], plan: Requests, out: U8, meter: Meter) -> dict[str, int]:
        """Fill ``out`` by all requests of ``plan``; returns the size of each object that was asked for.

        Raises:
            CorruptionError: an object ends before a range does.
            StoreError: a request failed ``tries`` times, or the deadline passed.
        """
        work = asyncio.run_coroutine_threadsafe(self._within_deadline(names, plan, out, meter), _loop())
        try:
            return work.result()
        except BaseException:
            work.cancel()
            raise

    async def _within_deadline(self, names: Sequence[str], plan: Requests, out: U8, meter: Meter) -> dict[str, int]:
        sizes: dict[str, int] = {}
        deadline_s = self._policy.deadline_s

        async def one(r: int) -> None:
            name, start, stop = names[plan.which[r]], int(plan.start[r]), int(plan.stop[r])
            async with self._slots:
                body, sizes[name] = await self._persist(name, start, stop, meter)
            plan.take(r, np.frombuffer(body, np.uint8), out)

        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as tasks:
                for r in range(len(plan.start)):
                    tasks.create_task(one(r))
        except TimeoutError:
            raise StoreError(
                f"{self._where} did not answer {len(plan.start)} requests in {deadline_s:g} s; check the network, "
                "or raise deadline_s"
            ) from None
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return sizes

    async def _persist(self, name: str, start: int, stop: int, meter: Meter) -> tuple[Any, int]:
        for tried in range(1, self._policy.tries + 1):
            try:
                body, size = await self._hedge(name, start, stop, meter)
                meter.add(bytes_fetched=len(body))
                if stop > size:
                    raise CorruptionError(f"no {stop - start} bytes at {start}: the file has {size} bytes", file=name)
                if len(body) != stop - start:
                    raise Transient(f"{len(body)} bytes came of {stop - start}")
                return body, size
            except Transient as e:
                last = e
            if tried < self._policy.tries:
                meter.add(retries=1)
                await asyncio.sleep(self._policy.wait_s(tried))
        raise given_up(self._where, name, self._policy.tries, last)

    async def _hedge(self, name: str, start: int, stop: int, meter: Meter) -> tuple[Any, int]:
        """The first whole answer of up to two equal requests."""
        running = {self._send(name, start, stop, meter)}
        try:
            done, running = await asyncio.wait(running, timeout=self._policy.hedge_after_s)
            if not done and self._hedged < _HEDGED_FREE + _HEDGED_SHARE * self._sent:
                self._hedged += 1
                meter.add(hedges=1)
                running.add(self._send(name, start, stop, meter))
            while True:
                for task in done:
                    if task.exception() is None or not running:
                        return task.result()
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in running:
                task.cancel()

    def _send(self, name: str, start: int, stop: int, meter: Meter) -> asyncio.Task[tuple[Any, int]]:
        self._sent += 1
        meter.add(requests=1)
        return asyncio.create_task(self._timed(name, start, stop))

    async def _timed(self, name: str, start: int, stop: int) -> tuple[Any, int]:
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                return await self._get(name, start, stop)
        except TimeoutError:
            raise Transient(f"no answer in {self._policy.timeout_s:g} s") from None


def given_up(where: str, name: str, tries: int, last: Exception) -> StoreError:
    """The error after the last try."""
    return StoreError(
        f"{where} failed {tries} times in a row for {name}: {last}; check the server and the network, then run it again"
    )


_started = threading.Lock()
_running: asyncio.AbstractEventLoop | None = None


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's fetches, in a thread of its own."""
    global _running
    with _started:
        if _running is None:
            _running = asyncio.new_event_loop()
            threading.Thread(target=_running.run_forever, name="thinrow-fetch", daemon=True).start()
        return _running


def _forget_loop() -> None:
    """The thread does not follow into a forked process."""
    global _running, _started
    _running, _started = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)
