"""AsyncSnapshots: snapshots of one store for any number of coroutines and threads.

Calls run on a few threads, for a snapshot is a few hundred microseconds of work without the interpreter's lock. Worked
example, two threads and room for three: of six calls at once two run, three wait, and the sixth gets ``Overloaded`` at
once. What cannot be answered soon is refused early: a queue without end only makes every answer late.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError, Overloaded, StoreError
from thinrow.core.users import Users, as_users, plain
from thinrow.history.reconstruct import Reconstruction, reconstruct
from thinrow.history.snapshot import Snapshot
from thinrow.history.store import HistoryStore
from thinrow.schema import Projection

T = TypeVar("T")


class TooLarge(InputError):
    """More is asked for, or sent, than a limit of the service."""


class AsyncSnapshots:
    """Snapshots on a pool of threads, with a bound on what waits and on what one call may ask for.

    A snapshot of a user with many recent events asks for a compaction in the background and does not wait for it.
    """

    def __init__(
        self, store: HistoryStore, *, threads: int = 4, waiting: int = 64, max_events: int | None = None
    ) -> None:
        """``threads`` calls run and ``waiting`` wait at most; one call reads ``max_events`` events of histories at
        most, and logs so many recent ones. None for no bound."""
        self._store, self._most, self._max_events = store, threads + waiting, max_events
        self._pool = ThreadPoolExecutor(threads, "snapshots")
        self._compactor = ThreadPoolExecutor(1, "compaction")
        self._lock = threading.Lock()
        self._inside = 0
        self._compacting = False
        self._closed = False

    @property
    def inside(self) -> int:
        """Calls that run or wait."""
        return self._inside

    async def snapshot(self, users: object, request_ts: npt.ArrayLike) -> Snapshot:
        """What ``users`` did before ``request_ts`` (ms, exclusive), to be logged. Raises as ``submit``."""
        return await asyncio.wrap_future(self.submit(users, request_ts))

    async def read(
        self, users: object, request_ts: npt.ArrayLike, projection: Projection | None = None
    ) -> tuple[Snapshot, Reconstruction]:
        """A snapshot and the histories that it stands for. Raises as ``submit_read``."""
        return await asyncio.wrap_future(self.submit_read(users, request_ts, projection))

    def submit(self, users: object, request_ts: npt.ArrayLike) -> Future[Snapshot]:
        """``snapshot`` for threads.

        Raises:
            Overloaded: as many calls as there may be run and wait already; or more recent events are to be logged than
                there may be, and a compaction is on its way.
            StoreError: it is closed.
        """
        return self._run(lambda: self._take(users, request_ts))

    def submit_read(
        self, users: object, request_ts: npt.ArrayLike, projection: Projection | None = None
    ) -> Future[tuple[Snapshot, Reconstruction]]:
        """``read`` for threads.

        Raises:
            InputError: the histories, cut to ``max_len`` of the projection, have more events than there may be. They
                are counted before any is read.
            Overloaded, StoreError: as ``submit``.
        """

        def work() -> tuple[Snapshot, Reconstruction]:
            taken = self._take(users, request_ts)
            self._refuse_long(taken, None if projection is None else projection.max_len)
            return taken, reconstruct(taken.generation, taken.requests, projection)

        return self._run(work)

    def close(self) -> None:
        """Wait for what is inside; later calls raise StoreError."""
        with self._lock:
            self._closed = True
        self._pool.shutdown()
        self._compactor.shutdown()

    def __enter__(self) -> AsyncSnapshots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Callable[[], T]) -> Future[T]:
        with self._lock:
            if self._closed:
                raise StoreError("the snapshots are closed; open the store again")
            if self._inside >= self._most:
                raise Overloaded(f"{self._inside} snapshots run or wait, which is all there may be; try again later")
            self._inside += 1
            future = self._pool.submit(work)
        future.add_done_callback(self._left)
        return future

    def _left(self, _: object) -> None:
        with self._lock:
            self._inside -= 1

    def _take(self, users: object, request_ts: npt.ArrayLike) -> Snapshot:
        taken = self._store.peek(users, request_ts)
        lengths = taken.requests.inline.lengths
        if len(lengths) and int(lengths.max()) > self._store.max_inline:
            self._ask_compaction()
        most = self._max_events
        if most is not None and int(lengths.sum()) > most:
            self._ask_compaction()
            raise Overloaded(
                f"{int(lengths.sum())} recent events would be logged, {_longest(taken, lengths)}; at most {most} a "
                "call: a compaction was asked for, try again when it has ended, or ask for fewer users a call"
            )
        return taken

    def _refuse_long(self, taken: Snapshot, max_len: int | None) -> None:
        lengths = taken.requests.versions["seq_len"].astype(np.int64) + taken.requests.inline.lengths
        if max_len is not None:
            lengths = np.minimum(lengths, max_len)
        if self._max_events is not None and int(lengths.sum()) > self._max_events:
            raise TooLarge(
                f"the histories have {int(lengths.sum())} events, {_longest(taken, lengths)}; at most "
                f"{self._max_events} a call: ask for the newest ones (max_len of the projection), or for fewer users"
            )

    def _ask_compaction(self) -> None:
        with self._lock:
            if self._compacting or self._closed:
                return
            self._compacting = True
            self._compactor.submit(self._compact)

    def _compact(self) -> None:
        try:
            self._store.compact()
        except StoreError:
            # Another process compacts, or the disk is full: the next long history asks again.
            pass
        finally:
            self._compacting = False


def some_users(store: HistoryStore) -> Users:
    """One user of the archive and one of the recent tier, where there are any; else one whom nobody knows."""
    pinned = store.pin()
    full = next((n for n, (_, info) in enumerate(pinned.segments) if info.n_rows), None)
    found = [] if full is None else [plain(pinned.segment(full).pieces.keys()[0])]
    found += [plain(u) for u in store.recent.users()[:1]]
    nobody: list[int | str] = [0 if store.schema.user_kind == "int64" else "0"]
    return as_users(found or nobody, store.schema.user_kind)


def _longest(taken: Snapshot, lengths: npt.NDArray[np.int64]) -> str:
    longest = int(np.argmax(lengths))
    return f"{int(lengths[longest])} of them of user {plain(taken.requests.users[longest])!r}"
