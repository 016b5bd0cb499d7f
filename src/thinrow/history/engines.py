"""Where the work of a bucket is done: in threads of this process, or on a Ray cluster.

A task is a module-level function and one picklable argument; it reads and writes the object store itself, so on a
cluster the store (and the work directory of a bulk load) must be reachable under the same name from every node. The
caller has ``slots`` threads, each of which prepares a task and waits for it: what is in flight is bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from thinrow.core.check import Check, shown
from thinrow.core.errors import InputError, MissingExtraError

T = TypeVar("T")
R = TypeVar("R")
EngineName: TypeAlias = Literal["local", "ray"]

#: Attempts of a task whose Ray worker died.
_RAY_RETRIES = 3


class BucketEngine(Protocol):
    """Runs tasks. ``slots``: how many at a time."""

    @property
    def slots(self) -> int:
        """Tasks that may run at one time."""
        ...

    def call(self, task: Callable[[T], R], argument: T) -> R:
        """The result of ``task(argument)``; raises what it raises. Called from ``slots`` threads at once."""
        ...


class LocalEngine:
    """Tasks run in the thread that asks: compiled loops, Arrow and disk waits let the others go on meanwhile."""

    def __init__(self, slots: int = 2) -> None:
        self.slots = slots

    def call(self, task: Callable[[T], R], argument: T) -> R:
        """See ``BucketEngine.call``."""
        return task(argument)


class RayEngine:
    """Tasks run on Ray, which is connected to (or started) on first use; one whose worker died is tried again."""

    def __init__(self, slots: int | None = None) -> None:
        """At most ``slots`` tasks at a time, by default one a CPU of the cluster. Raises MissingExtraError."""
        try:
            import ray
        except ImportError:
            raise MissingExtraError("ray", "ray") from None
        self._ray: Any = ray
        self._remote: dict[Any, Any] = {}
        self._lock = threading.Lock()
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False)
        self.slots = slots or max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def call(self, task: Callable[[T], R], argument: T) -> R:
        """See ``BucketEngine.call``."""
        with self._lock:
            if task not in self._remote:
                self._remote[task] = self._ray.remote(max_retries=_RAY_RETRIES)(task)
            remote = self._remote[task]
        try:
            result: R = self._ray.get(remote.remote(argument))
        except self._ray.exceptions.RayTaskError as e:
            raise e.cause from e
        return result


def _is_engine(value: Any, name: str) -> Any:
    if not isinstance(value, str) and not (hasattr(value, "slots") and callable(getattr(value, "call", None))):
        raise InputError(f"{name} is {shown(value)}; give 'local', 'ray' or a BucketEngine")
    return value


#: Check of an argument that is an engine or the name of one.
ENGINE: Check = _is_engine


def engine_of(engine: EngineName | BucketEngine) -> BucketEngine:
    """An engine by its name, or itself.

    Raises:
        InputError: there is no engine of that name.
        MissingExtraError: ``ray`` is not installed.
    """
    if not isinstance(engine, str):
        return engine
    if engine == "local":
        return LocalEngine()
    if engine == "ray":
        return RayEngine()
    raise InputError(f"no engine {engine!r}; there are local and ray")
