"""Usage by column: how often each column is read, so that dead ones are found and dropped.

A process counts in memory, a few additions a batch, and once a minute (and when a store is closed) writes what it has
counted since as a small new file under ``usage/``; a thread of its own does it, so no read waits. Files are only
added, so any number of processes may count at once; when there are many, one writer sums them up in ``usage-sums/``, a
log like that of the manifests, and removes what it summed. A sum names its files: one that survives its
removal counts once.

Worked example: two processes, the first writes ``{"5": {"2026-11": {"requests": 40, ...}}}`` and later ``{"5":
{"2026-11": {"requests": 2, ...}}}``, the second counts nothing. Column 5 has 42 requests in November.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import numpy as np

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import CommitConflict, CorruptionError, ObjectNotFound, StoreError
from thinrow.history.archive.generation import Generation
from thinrow.storage.codecs import ENTRY_DTYPE
from thinrow.storage.manifest import ManifestLog
from thinrow.storage.objects import ObjectStore
from thinrow.storage.sealed import seal, unseal

_log = logging.getLogger(__name__)

FORMAT = 1
FLUSH_MS = 60_000
_FOLDER, _SUMS = "usage/", "usage-sums"
_MAX_FILES = 64
#: No month begins within an hour of UTC.
_HOUR_MS = 3_600_000
_FIGURES = ("batches", "requests", "events", "bytes", "last_ms")
#: column id -> month ("2026-11", UTC) -> figure -> value.
Usage = dict[str, dict[str, dict[str, int]]]


class UsageRecorder:
    """Counts the reads of one process; safe for threads. What a store does not take is kept for the next flush."""

    def __init__(self, objects: ObjectStore, clock: Clock = system_clock) -> None:
        self._objects, self._clock = objects, clock
        self._lock = threading.Lock()
        self._counts: Usage = {}
        #: By column, ``_FIGURES`` of the reads within ``_hour``, from (inclusive) to (exclusive), ms.
        self._sums: dict[int, list[int]] = {}
        self._hour = 0, 0
        self._since = clock()
        #: One flush at a time, so that the last one, when a store is closed, has what one before could not write.
        self._flushing = threading.Lock()
        #: Of a file whose writing failed: it may be there all the same, and the next try is to take its place.
        self._refused: str | None = None

    def add(self, column_bytes: Mapping[int, int], requests: int, events: int) -> None:
        """Count one batch: ``requests`` that were given ``events`` events with these columns (id -> bytes)."""
        now = self._clock()
        with self._lock:
            if not self._hour[0] <= now < self._hour[1]:
                self._end_hour(now)
            for column, size in column_bytes.items():
                found = self._sums.get(column)
                if found is None:
                    found = self._sums[column] = [0, 0, 0, 0, 0]
                found[0] += 1
                found[1] += requests
                found[2] += events
                found[3] += size
                if now > found[4]:
                    found[4] = now
            due = now - self._since >= FLUSH_MS
            if due:
                self._since = now
        if due:
            threading.Thread(target=self.flush, daemon=True).start()

    def _end_hour(self, now: int) -> None:
        """Put the sums away under the month that they are of; those to come are of the hour of ``now``."""
        month = datetime.fromtimestamp(self._hour[0] / 1000, UTC).strftime("%Y-%m")
        for column, values in self._sums.items():
            _add(self._counts, {str(column): {month: dict(zip(_FIGURES, values, strict=True))}})
        self._sums = {}
        hour = now // _HOUR_MS * _HOUR_MS
        self._hour = hour, hour + _HOUR_MS

    def flush(self) -> None:
        """Write what was counted since the last time; nothing where that is nothing.

        What the store does not take now is kept for the next time.
        """
        with self._flushing:
            with self._lock:
                self._end_hour(self._hour[0])
                counts, self._counts = self._counts, {}
            if not counts:
                return
            name = self._refused or f"{_FOLDER}{secrets.token_hex(8)}.json"
            try:
                self._objects.put(name, seal({"columns": counts}, FORMAT, "usage"))
            except (StoreError, OSError) as e:
                with self._lock:
                    _add(self._counts, counts)
                if self._refused is None:
                    _log.warning("what was read could not be noted, and is kept for the next try: %s", e)
                self._refused = name
                return
            self._refused = None
            # Whoever adds a file the next time sums up as well.
            with suppress(StoreError, OSError):
                if len(self._objects.list(_FOLDER)) > _MAX_FILES:
                    _sum_up(self._objects)


def read_usage(objects: ObjectStore) -> Usage:
    """All that was counted. Raises CorruptionError where a file is damaged."""
    return _read(objects)[0]


def _read(objects: ObjectStore) -> tuple[Usage, list[str], int]:
    """The sum of all files, the names of those that are there, and the number of the newest sum."""
    names = objects.list(_FOLDER)
    number, body = ManifestLog(objects, _SUMS).latest() or (0, {"columns": {}, "files": []})
    total: Usage = {}
    _add(total, body["columns"])
    for name in names:
        if name in body["files"]:
            continue
        with suppress(ObjectNotFound):  # summed up by another process just now: counted the next time
            found = unseal(objects.get(name), FORMAT, "usage", name)
            if not isinstance(found.get("columns"), dict):
                raise CorruptionError("it has no columns", file=name)
            _add(total, found["columns"])
    return total, names, number


def _sum_up(objects: ObjectStore) -> None:
    total, names, number = _read(objects)
    log = ManifestLog(objects, _SUMS)
    try:
        log.commit(number + 1, {"generation": number + 1, "columns": total, "files": names})
    except CommitConflict:
        return  # another process has summed up
    for name in names:
        objects.delete(name)
    if number:
        log.drop(number)


def _add(total: Usage, part: Usage) -> None:
    for column, months in part.items():
        for month, figures in months.items():
            into = total.setdefault(column, {}).setdefault(month, {})
            for name, value in figures.items():
                into[name] = max(into.get(name, 0), value) if name == "last_ms" else into.get(name, 0) + value


def stored_bytes(generation: Generation) -> dict[int, int]:
    """Bytes of each column's blocks and overlays, by id: what headers of all chunks say. Raises as reading does."""
    total: dict[int, int] = {}
    for number, (_, info) in enumerate(generation.segments):
        segment = generation.segment(number)
        for _, records, _ in segment.stripes.scan():
            for g, group in enumerate(segment.groups):
                owners = [c.id for c in segment.columns if c.group == group for _ in range(c.n_streams)]
                head = len(owners) * ENTRY_DTYPE.itemsize
                n = len(records)
                out = np.empty(n * head, np.uint8)
                offsets = np.ascontiguousarray(records["chunks"]["offset"][:, g], np.int64)
                place = np.arange(n, dtype=np.int64) * head
                generation.objects.read_into(segment.name, offsets, np.full(n, head, np.int64), out, place)
                lengths = out.view(ENTRY_DTYPE).reshape(n, len(owners))["length"].sum(axis=0, dtype=np.int64)
                for column, size in zip(owners, lengths.tolist(), strict=True):
                    total[column] = total.get(column, 0) + size
        for overlay in info.overlays:
            total[overlay.column] = total.get(overlay.column, 0) + overlay.bytes
    return total


def usage_rows(generation: Generation) -> list[dict[str, Any]]:
    """One dict a column of today's schema, those that nobody reads first: ``column``, ``id``, ``last_ms`` (0: never),
    ``requests``, ``events`` and ``bytes`` (ever), ``bytes_by_month``, ``stored_bytes``."""
    usage, stored = read_usage(generation.objects), stored_bytes(generation)
    rows = []
    for c in generation.schema.columns:
        months = usage.get(str(c.id), {})
        figures = {n: sum(m.get(n, 0) for m in months.values()) for n in ("requests", "events", "bytes")}
        last = max((m.get("last_ms", 0) for m in months.values()), default=0)
        by_month = {month: m.get("bytes", 0) for month, m in sorted(months.items())}
        row = {"column": c.name, "id": c.id, "last_ms": last, **figures, "bytes_by_month": by_month}
        rows.append({**row, "stored_bytes": stored.get(c.id, 0)})
    return sorted(rows, key=lambda r: (r["last_ms"], -r["stored_bytes"]))
