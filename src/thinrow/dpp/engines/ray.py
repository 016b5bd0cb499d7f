"""Ray actors that produce items ahead of one reader, handed over in Ray's object store, delivered in order.

What to run is put into the object store once, and each actor opens the store and the table from it, on its node: both
must be reachable there under the same name. An actor has one item at a time; an item comes to the reader's node by Ray,
and arrays of the reader are views of that node's object store, read-only. One that ends, whatever ended it or its node,
is replaced, and its item made by another one. At most a window of items is in the object store.
"""

from __future__ import annotations

import pickle
import queue
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from thinrow.core.errors import MissingExtraError
from thinrow.dpp.engines.failures import check_settings, decode_error, encode_error
from thinrow.dpp.engines.leased import LeasedEngine
from thinrow.dpp.engines.packing import Packed, pack_job, unpack

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ray:
    """Actors on a Ray cluster, which is connected to (or started) on first use.

    Attributes:
        lease_s: seconds that an actor may have an item before it is killed and the item made by another one.
        options: of each actor (``num_cpus``, ``resources``, ``runtime_env``, ...); by default one CPU, spread over the
            nodes.
    """

    in_process: ClassVar[bool] = False
    lease_s: float = 300.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(lease_s=self.lease_s)

    def start(
        self, produce: Callable[[int], T], *, first: int, stop: int | None, workers: int, window: int
    ) -> RayEngine[T]:
        """See ``EngineChoice.start``. Raises MissingExtraError where Ray is not installed."""
        return RayEngine(produce, self, first=first, stop=stop, workers=workers, window=window)


class _Produce:
    """What an actor runs. Errors are results: Ray would wrap them."""

    def __init__(self) -> None:
        self._produce: Any = None

    def open(self, job: Any) -> bytes | None:
        """Open what the job reads; its error, if it has one."""
        try:
            self._produce = unpack(np.asarray(job).data)
        except BaseException as e:
            return encode_error(e)
        return None

    def make(self, item: int) -> bytes | list[Any]:
        """The item as the parts of ``Packed``, or its error."""
        try:
            return Packed(self._produce(item)).parts
        except BaseException as e:
            return encode_error(e)


class _Actor:
    """An actor as the reader knows it: when its lease, or its start, began, and whether it is open."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.since = time.monotonic()
        self.ready = False


class RayEngine(LeasedEngine[_Actor, list[Any]], Generic[T]):
    """An ``Engine`` of Ray actors; see ``Ray`` and ``EngineChoice.start``.

    Attributes:
        copied_bytes: always 0: what Ray moves between nodes is not counted.
    """

    copied_bytes = 0

    def __init__(
        self, produce: Callable[[int], T], settings: Ray, *, first: int, stop: int | None, workers: int, window: int
    ) -> None:
        super().__init__(
            "thinrow-dpp-ray",
            first=first,
            stop=stop,
            workers=workers,
            window=window,
            lease_s=settings.lease_s,
        )
        try:
            import ray
        except ImportError:
            raise MissingExtraError("ray", "ray") from None
        job = pack_job(produce).data()
        self._ray: Any = ray
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False)
        self._job = self._ray.put(job)
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **settings.options}
        self._class = self._ray.remote(_Produce).options(**options)
        self._opened = False
        self._heard: queue.SimpleQueue[tuple[_Actor, int, Any] | None] = queue.SimpleQueue()
        self._thread.start()

    def _wake(self) -> None:
        self._heard.put(None)

    @property
    def actors(self) -> list[Any]:
        """Handles of the actors that are open."""
        with self._changed:
            return [a.handle for a in self._workers if a.ready]

    def next(self) -> T:
        """See ``Engine.next``. Larger arrays of the item are read-only views of the object store, where they stay as
        long as they are kept."""
        with self._changed:
            parts = self._take()
        self._wake()
        item: T = pickle.loads(parts[0], buffers=parts[1:])
        return item

    def _manage(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._closed:
                        break
                    self._serve()
                    timeout = self._expire(self._at_work())
                try:
                    heard = self._heard.get(timeout=timeout)
                except queue.Empty:
                    continue
                if heard is not None:
                    with self._changed:
                        self._hear(*heard)
                        self._changed.notify_all()
        except BaseException as e:
            with self._changed:
                self._broken = e
                self._changed.notify_all()
        finally:
            with self._changed:
                for actor in self._workers:
                    self._end(actor)
                self._workers.clear()
                self._done.clear()

    def _serve(self) -> None:
        """Start actors that are missing, lease to who is idle."""
        self._shrink()
        while len(self._workers) < self._n_workers and self._broken is None:
            actor = _Actor(self._class.remote())
            self._workers.append(actor)
            self._call(actor, -1, actor.handle.open, self._job)
        for actor in self._workers:
            if actor.ready:
                item = self._leases.take(actor)
                if item is not None:
                    actor.since = time.monotonic()
                    self._call(actor, item, actor.handle.make, item)

    def _call(self, actor: _Actor, item: int, method: Any, argument: Any) -> None:
        method.remote(argument).future().add_done_callback(lambda done: self._heard.put((actor, item, done)))

    def _hear(self, actor: _Actor, item: int, done: Any) -> None:
        """An actor has opened (item -1) or made an item, or is no more."""
        if actor not in self._workers or self._closed:
            return
        error = done.exception()
        if error is not None:
            self._lost(actor, f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return
        result = done.result()
        if item < 0:
            if result is not None:
                self._broken = decode_error(result)
            actor.ready = self._opened = True
            self._failed_starts = 0
        elif self._leases.settle(item, actor):
            if isinstance(result, bytes):
                self._fail(item, decode_error(result))
            else:
                self._done[item] = result

    def _drop(self, worker: _Actor) -> None:
        self._workers.remove(worker)
        self._end(worker)

    def _at_work(self) -> list[_Actor]:
        # Where some are open, others may wait for a free CPU as long as it takes.
        return [a for a in self._workers if self._leases.held(a) is not None or not (a.ready or self._opened)]

    def _end(self, actor: _Actor) -> None:
        with suppress(Exception):
            self._ray.kill(actor.handle)
