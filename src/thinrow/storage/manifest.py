"""The log of generations: one small JSON file each, committed by put-if-absent, never changed (format section 10).

Worked example: ``commit(2, {"generation": 2, ...})`` writes ``manifests/00000000000000000002.json``, or raises
``CommitConflict`` where another writer was first; whoever lost reads ``latest()`` and commits 3.
"""

from __future__ import annotations

import re
from typing import Any

from thinrow.core.errors import CorruptionError, InputError, ObjectNotFound
from thinrow.storage.objects import ObjectStore
from thinrow.storage.sealed import seal, unseal

FORMAT = 2
_MAX_NUMBER = 10**20 - 1


class ManifestLog:
    """Manifests by number under ``prefix``."""

    def __init__(self, objects: ObjectStore, prefix: str = "manifests") -> None:
        self._objects, self._prefix = objects, prefix
        self._pattern = re.compile(re.escape(prefix) + r"/(\d{20})\.json")

    def list(self) -> list[int]:
        """Numbers of all generations, ascending."""
        found = (self._pattern.fullmatch(name) for name in self._objects.list(f"{self._prefix}/"))
        return [int(m[1]) for m in found if m]

    def has(self, n: int) -> bool:
        """Whether there is a generation ``n``."""
        try:
            self._objects.size(self._name(n))
        except ObjectNotFound:
            return False
        return True

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
        """
        name = self._name(n)
        data = self._objects.get(name)
        body = unseal(data, FORMAT, "manifest", name)
        if body.get("generation") != n:
            raise CorruptionError(f"it describes generation {body.get('generation')}", file=name)
        return body

    def commit(self, n: int, body: dict[str, Any]) -> None:
        """Make ``body`` generation ``n``, durably.

        Raises:
            CommitConflict: there is a generation ``n`` already.
            InputError: ``body["generation"]`` is not ``n``, or the body is not JSON (NaN is not).
        """
        if body.get("generation") != n:
            raise InputError(f"body of generation {body.get('generation')} committed as {n}; set body['generation']")
        self._objects.put_if_absent(self._name(n), seal(body, FORMAT, "manifest"))

    def drop(self, n: int) -> None:
        """Remove generation ``n``; nothing happens where there is none."""
        self._objects.delete(self._name(n))

    def _name(self, n: int) -> str:
        if not 0 <= n <= _MAX_NUMBER:
            raise InputError(f"generation {n}; it must be 0 to {_MAX_NUMBER}")
        return f"{self._prefix}/{n:020d}.json"
