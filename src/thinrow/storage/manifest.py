"""The log of generations: one small JSON file each, committed by put-if-absent, never changed (format section 10).

Worked example: ``commit(2, {"generation": 2, ...})`` writes ``manifests/00000000000000000002.json``, or raises
``CommitConflict`` where another writer was first; whoever lost reads ``latest()`` and commits 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from thinrow.core.check import integer
from thinrow.core.errors import CommitConflict, CorruptionError, InputError
from thinrow.storage.objects import ObjectStore
from thinrow.storage.sealed import seal, unseal

T = TypeVar("T")

FORMAT = 2
_MAX_NUMBER = 10**20 - 1


#: How often a writer begins again where others are first.
MAX_TRIES = 20


def retried(attempt: Callable[[], T]) -> T:
    """What ``attempt`` returns, which is called again where another writer was first: ``MAX_TRIES`` times at most.

    Raises:
        CommitConflict: of the last try.
    """
    for _ in range(MAX_TRIES - 1):
        with suppress(CommitConflict):
            return attempt()
    return attempt()


class ManifestLog:
    """Manifests by number under ``prefix``, written in format ``version``."""

    def __init__(self, objects: ObjectStore, prefix: str = "manifests", version: int = FORMAT) -> None:
        self._objects, self._prefix, self._version = objects, prefix, version
        self._pattern = re.compile(re.escape(prefix) + r"/(\d{20})\.json")
        #: Number that was asked for last, its name, and the next one's: every snapshot asks for one.
        self._asked = (-1, "", "")

    def list(self) -> list[int]:
        """Numbers of all generations, ascending."""
        found = (self._pattern.fullmatch(name) for name in self._objects.list(f"{self._prefix}/"))
        return [int(m[1]) for m in found if m]

    def has(self, n: int) -> bool:
        """Whether there is a generation ``n``."""
        return self._objects.has(self.name_of(n))

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """Number and body of the newest generation; None where there is none yet. Raises as ``load``."""
        numbers = self.list()
        return (numbers[-1], self.load(numbers[-1])) if numbers else None

    def load(self, n: int) -> dict[str, Any]:
        """The body of generation ``n``.

        Raises:
            ObjectNotFound: there is no such generation.
            NewerFormatError: a newer thinrow wrote it.
            CorruptionError: it is damaged, or stands under another number than its own.
            InputError: ``n`` is no number of a generation.
        """
        integer(1)(n, "number")
        name = self.name_of(n)
        data = self._objects.get(name)
        body = unseal(data, self._version, "manifest", name)
        if body.get("generation") != n:
            raise CorruptionError(f"it describes generation {body.get('generation')}", file=name)
        return body

    def is_newest(self, n: int) -> bool:
        """Whether no generation after ``n`` has been committed.

        Generations are collected from the lowest on, so that those in the log have no gap: where ``n`` is there and
        the next one is not, ``n`` is the newest.
        """
        if self._objects.concurrency > 1:
            # Where each look is a request, one answers both.
            return self._objects.list(f"{self._prefix}/", self.name_of(n - 1)) == [self.name_of(n)]
        asked = self._asked
        if asked[0] != n:
            asked = self._asked = n, self.name_of(n), self.name_of(n + 1)
        return not self._objects.has(asked[2]) and self._objects.has(asked[1])

    def commit(self, n: int, body: dict[str, Any]) -> None:
        """Make ``body`` generation ``n``, durably.

        Raises:
            CommitConflict: there is a generation ``n`` already, or there was one.
            InputError: ``body["generation"]`` is not ``n``, or the body is not JSON (NaN is not).
        """
        if body.get("generation") != n:
            raise InputError(f"body of generation {body.get('generation')} committed as {n}; set body['generation']")
        self._objects.put_if_absent(self.name_of(n), seal(body, self._version, "manifest"))
        # A writer that stood still while its base was collected finds the number free again.
        if self.floor() > n:
            self.drop(n)
            raise CommitConflict(f"generation {n} was committed and collected meanwhile; read the newest state again")

    def floor(self) -> int:
        """Generations below this number (exclusive) have been collected or are about to be; 0 where none was."""
        found = self._objects.list(f"{self._prefix}-floor/")
        return int(found[-1].rpartition("/")[2]) if found else 0

    def raise_floor(self, floor: int) -> None:
        """Announce that generations below ``floor`` (exclusive) will be collected. It never falls."""
        old = self._objects.list(f"{self._prefix}-floor/")
        name = f"{self._prefix}-floor/{floor:020d}"
        if not old or old[-1] < name:
            self._objects.put(name, b"")
        for lower in (o for o in old if o < name):
            self._objects.delete(lower)

    def drop(self, n: int) -> None:
        """Remove generation ``n``; nothing happens where there is none."""
        self._objects.delete(self.name_of(n))

    def name_of(self, n: int) -> str:
        """Name of the object of generation ``n``."""
        if not 0 <= n <= _MAX_NUMBER:
            raise InputError(f"generation {n}; it must be 0 to {_MAX_NUMBER}")
        return f"{self._prefix}/{n:020d}.json"
