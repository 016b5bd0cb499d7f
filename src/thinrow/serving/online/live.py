"""Live: the ranker of one experiment arm, which follows the releases of a folder; and which arm a user is in.

A newer release is made ready beside the one that ranks: its weights are read, and each server is asked whether it has
its rows. Only then the ranker takes it, whole, between two calls. Until then, and where a server lacks it, or it cannot
be read, the one before goes on.

Worked example of arms: shares 0.9 and 0.1, and a user whose hash with the experiment's salt is 0.93 of its range: the
second arm, on every replica and every day, whatever other experiments do with the user.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinrow.checkpoints import steps
from thinrow.checkpoints.manifest import MANIFEST, name_of
from thinrow.core.errors import CorruptionError, InputError, ObjectNotFound, ThinrowError, Unavailable
from thinrow.core.routing import Routing
from thinrow.core.users import as_users, bucket_of
from thinrow.core.wrap import mix64
from thinrow.history.store import HistoryStore
from thinrow.serving.cache import Caches, MemoryBudget
from thinrow.serving.lookups import EmbeddingClient
from thinrow.serving.ranker import Ranker
from thinrow.serving.release import Release
from thinrow.serving.rows import RowSource, ServerRows
from thinrow.serving.scoring import Model

#: Values of a user's hash.
_HASHES = 1 << 31


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """Attributes:
    model: a folder of releases, whose newest is followed, or one release, which stays.
    servers: of each shard the addresses of its replicas; none to map the rows in this process.
    name: of the arm, in each impression.
    share: of the users, relative to the other arms'.
    """

    model: Path
    servers: Sequence[Sequence[str]] = ()
    name: str = ""
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share < float("inf"):
            raise InputError(f"share={self.share} of arm {self.name!r}; it must be above 0")


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """How rows are read.

    Attributes:
        deadline_s, hedge_s, dtype: as of ``EmbeddingClient``.
        fail: an answer that a server's rows are missing of is refused; else zeros stand in, and are counted.
        prefix_bytes: of states of histories that are kept between requests, of each arm; 0 for none.
        cache_bytes: what a cache of rows and the batches of the model share, of each arm; 0 for no cache.
    """

    deadline_s: float = 0.05
    hedge_s: float | None = None
    dtype: str = "float32"
    fail: bool = False
    prefix_bytes: int = 0
    cache_bytes: int = 0


class Live:
    """Attributes:
    spec: of the arm.
    ranker: ranks with the release that is live.
    release: that.
    behind: the name of a newer one that is not taken up yet, and why; None where there is none.
    caches: of its rows; None where there is none.
    """

    def __init__(
        self,
        store: HistoryStore,
        spec: ArmSpec,
        options: LookupOptions | None = None,
        *,
        say: Callable[..., None] | None = None,
    ) -> None:
        """Open the newest release that the servers have; where none answers, the newest.

        Raises:
            As ``Release.open`` and ``Ranker``.
        """
        self.spec, self._options = spec, options or LookupOptions()
        self._say = say or _silent
        self._fixed = (spec.model / MANIFEST).exists()
        o = self._options
        self.client = (
            EmbeddingClient(spec.servers, deadline_s=o.deadline_s, hedge_s=o.hedge_s, dtype=o.dtype)
            if spec.servers
            else None
        )
        self.caches: Caches | None = None
        if self.client is not None and o.cache_bytes:
            self.caches = Caches(MemoryBudget(o.cache_bytes), say=self._say)
        self._refreshing = threading.Lock()
        self.behind: tuple[str, str] | None = None
        try:
            self.release = self._first()
            self.ranker = Ranker(store, self._model(self.release), arm=spec.name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections."""
        if self.caches is not None:
            self.caches.close()
        if self.client is not None:
            self.client.close()

    def has(self, release: Release) -> str | None:
        """Why not all servers can be asked for the rows of ``release``; None where they can."""
        if self.client is None:
            return None
        keys = _one_a_shard(len(self.spec.servers))
        try:
            ServerRows(self.client, release.table, release.version, release.dim, fail=True).fetch(keys)
        except (Unavailable, InputError) as error:
            return str(error)
        return None

    def refresh(self) -> bool:
        """Take up a newer release, where there is one that all servers have. Returns whether there was."""
        with self._refreshing:
            if self._fixed:
                return False
            try:
                newest = self.release.newest()
                if newest is self.release:
                    self.behind = None
                    return False
                why = self.has(newest)
                if why is None:
                    self.ranker.swap(self._model(newest))
            except ThinrowError as error:
                self._tell("a newer release", str(error))
                return False
            if why is not None:
                self._tell(newest.name, why)
                return False
            self._say("swapped", arm=self.spec.name, before=self.release.name, release=newest.name)
            self.release, self.behind = newest, None
            return True

    def _tell(self, name: str, why: str) -> None:
        if self.behind != (name, why):
            self._say("not_taken_up", arm=self.spec.name, release=name, why=why)
        self.behind = name, why

    def _first(self) -> Release:
        newest = Release.open(self.spec.model)
        if self._fixed or self.has(newest) is None:
            return newest
        for step in reversed(steps(self.spec.model)):
            try:
                found = Release.open(self.spec.model / name_of(step))
            except (CorruptionError, ObjectNotFound):
                continue
            if self.has(found) is None:
                return found
        return newest

    def _model(self, release: Release) -> Model:
        return release.model(self._rows(release), prefix_bytes=self._options.prefix_bytes)

    def _rows(self, release: Release) -> RowSource | None:
        if self.client is None:
            return None
        rows: RowSource = ServerRows(self.client, release.table, release.version, release.dim, fail=self._options.fail)
        return rows if self.caches is None else self.caches(rows, release.dim)


class Arms:
    """Which arm a user's requests go to: by a hash of the user and the experiment's salt."""

    def __init__(self, lives: Sequence[Live], salt: str = "") -> None:
        """Raises InputError where two arms have one name, or read different fields of a request."""
        names = [live.spec.name for live in lives]
        if not lives or len(set(names)) < len(names):
            raise InputError(f"arms {names}; give one or more, each of a name of its own")
        first = lives[0].ranker
        for live in lives[1:]:
            if live.ranker.schema != first.schema:
                raise InputError(
                    f"arm {live.spec.name!r} reads other fields of requests than {names[0]!r}; arms of one experiment "
                    "log the same"
                )
        self.lives = tuple(lives)
        shares = np.array([live.spec.share for live in lives])
        self._ends = np.cumsum(shares) / shares.sum()
        self._salt = zlib.crc32(salt.encode())

    def arm_of(self, user: int | str) -> Live:
        """Raises UserKindError or InputError where it is no user id."""
        if len(self.lives) == 1:
            return self.lives[0]
        hashed = int(bucket_of(as_users([user]), _HASHES)[0])
        at = mix64((hashed << 32) ^ self._salt ^ (1 << 63)) / 2**64
        return self.lives[int(np.searchsorted(self._ends[:-1], at, side="right"))]

    def choose(self, user: int | str) -> Ranker:
        """The ranker of a user's arm."""
        return self.arm_of(user).ranker


def _one_a_shard(n_shards: int) -> Any:
    """A key of each shard, ascending."""
    keys = np.arange(64 * n_shards)
    _, first = np.unique(Routing.even(n_shards).shards(keys), return_index=True)
    return np.sort(keys[first])


def _silent(_: str, **__: object) -> None:
    """What is said where nobody listens."""


__all__ = ["ArmSpec", "Arms", "Live", "LookupOptions"]
