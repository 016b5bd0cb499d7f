"""Garbage collection: generations that nobody needs, what only they named, and what killed writers left.

Worked example, keep 2, generations 1 to 5, a reader pinned on 2: the floor becomes 4; the pins are read; manifest 2 is
copied to ``retired/``; manifests 1 to 3 are dropped; then every object goes that neither manifest 4 or 5 nor
``retired/2`` names.

Why it is safe beside readers and writers of other processes:

- A reader or writer writes its pin, *then* looks at the floor. The collector raises the floor, *then* reads the pins.
  So at least one sees the other: a generation is held, or the one who wants to hold it takes a newer one.
- Manifests leave the log from the lowest on and never leave a gap, so that "n + 1 is not there, n is" means newest.
- The generation that a writer builds on stays, and all later ones: a number that was taken never comes free. A writer
  whose pin ended, because its process stood still, finds the floor above its number.
- What is written after a writer's pin was taken is no orphan. Objects are listed before manifests: what was committed
  in between is named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from thinrow.core.errors import InputError, ObjectNotFound, StoreError
from thinrow.storage.manifest import ManifestLog
from thinrow.storage.objects import Entry, ObjectStore, each
from thinrow.storage.pins import Pins

#: Folders of objects that manifests name.
FOLDERS = ("segments/", "overlays/", "tombstones/")
#: Unfinished files younger than this are never swept: a small put may be under way.
_UNFINISHED_MS = 600_000


@dataclass(frozen=True, slots=True)
class Garbage:
    """What was collected, or would be.

    Attributes:
        generations: numbers of the generations that went.
        pinned: generations that stay only because somebody holds them.
        objects: names of the objects that went.
        bytes: of these, and of unfinished files.
    """

    generations: tuple[int, ...]
    pinned: tuple[int, ...]
    objects: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class _Held:
    """What the pins forbid: readers' generations, the lowest base of a writer, and since when one writes."""

    readers: set[int]
    base: int | None
    since_ms: int | None

    @classmethod
    def read(cls, pins: Pins, in_use: Collection[int], void_below: int) -> _Held:
        live = pins.live()
        readers = {p.number for p in live if not p.writes} | set(in_use)
        writers = [p for p in live if p.writes]
        return cls(
            {n for n in readers if n >= void_below},
            min((p.number for p in writers), default=None),
            min((p.taken_ms for p in writers), default=None),
        )


def collect(
    objects: ObjectStore,
    pins: Pins,
    *,
    keep: int,
    grace_ms: int,
    in_use: Collection[int] = (),
    void_below: int = 0,
    dry_run: bool = False,
) -> Garbage:
    """Collect what is neither kept, nor young, nor held.

    Args:
        keep: the newest so many generations stay, 1 or more.
        grace_ms: a generation stays for so long after the next one was committed; objects that no manifest names stay
            so long after they were written.
        in_use: further generations that are read now.
        void_below: generations below this number (exclusive) go although they are held.
        dry_run: change nothing, only say what would go.

    Raises:
        InputError: ``keep`` or ``grace_ms`` is out of bounds.
        CorruptionError: a manifest or pin is damaged; nothing that it may name was removed.
    """
    if keep < 1 or grace_ms < 0:
        raise InputError(f"keep={keep}, grace {grace_ms} ms; keep must be 1 or more and the grace time 0 or more")
    log, retired = ManifestLog(objects), ManifestLog(objects, "retired")
    entries = [e for folder in FOLDERS for e in objects.entries(folder)]
    old = _old(objects, log, keep, grace_ms, pins.clock())
    if old and not dry_run:
        log.raise_floor(old[-1] + 1)
        pins.drop_ended()
    held = _Held.read(pins, in_use, void_below)
    old = [n for n in old if held.base is None or n < held.base]
    pinned = sorted(n for n in {*old, *retired.list()} if n in held.readers)
    gone = sorted(n for n in {*old, *retired.list()} if n not in held.readers)
    kept = []
    for n in pinned:
        try:
            kept.append(_body(log, retired, n))
        except ObjectNotFound:
            # Another collector removed it, unless it is lost: then its readers still hold it.
            if n in _Held.read(pins, in_use, void_below).readers:
                raise
    if not dry_run:
        for n in old:
            if n in held.readers:
                with suppress(ObjectNotFound):  # another collector was here before
                    objects.put(retired.name_of(n), objects.get(log.name_of(n)))
            log.drop(n)
        for n in gone:
            retired.drop(n)
    named = {s for body in kept for s in strings_of(body)}
    for n in log.list():
        if n not in old:
            named |= set(strings_of(log.load(n)))
    orphans = list(_orphans(entries, named, grace_ms, held.since_ms, pins.clock()))
    freed = sum(e.bytes for e in orphans)
    if not dry_run:
        for entry in orphans:
            objects.delete(entry.name)
        freed += objects.sweep(_before(max(grace_ms, _UNFINISHED_MS), held.since_ms, pins.clock()))
    return Garbage(tuple(gone), tuple(pinned), tuple(e.name for e in orphans), freed)


def _old(objects: ObjectStore, log: ManifestLog, keep: int, grace_ms: int, now_ms: int) -> list[int]:
    """Generations of the log that are neither among the newest nor young, ascending."""
    times = {e.name: e.modified_ms for e in objects.entries("manifests/")}
    numbers = [n for n in log.list() if log.name_of(n) in times]
    stop = max(len(numbers) - keep, 0)
    # The next one's time is when a generation was no longer the newest.
    while stop > 0 and times[log.name_of(numbers[stop])] > now_ms - grace_ms:
        stop -= 1
    return numbers[:stop]


def _body(log: ManifestLog, retired: ManifestLog, n: int) -> dict[str, Any]:
    try:
        return log.load(n)
    except ObjectNotFound:
        return retired.load(n)


def _before(grace_ms: int, since_ms: int | None, now_ms: int) -> int:
    """What was written before this moment (exclusive) and is not named belongs to nobody."""
    return min(now_ms - grace_ms, now_ms if since_ms is None else since_ms - 2 * 60_000)


def _orphans(
    entries: list[Entry], named: set[str], grace_ms: int, since_ms: int | None, now_ms: int
) -> Iterator[Entry]:
    # With no grace at all, what was written in this very millisecond goes too.
    before = _before(grace_ms, since_ms, now_ms) + (not grace_ms and since_ms is None)
    return (e for e in entries if e.name not in named and e.modified_ms < before)


def files_of(body: Any) -> set[str]:
    """The files that a manifest, or a part of one, names."""
    return {s for s in strings_of(body) if s.startswith(FOLDERS)}


def require_files(objects: ObjectStore, names: Collection[str]) -> None:
    """Raises StoreError where one of the files that are about to be committed is gone: their writer stood still for
    longer than its pin, and they were collected."""
    try:
        each(objects, objects.size, sorted(names))
    except ObjectNotFound as e:
        raise StoreError(f"nothing was committed, for what was written was collected meanwhile ({e}); run again") from e


def strings_of(value: Any) -> Iterator[str]:
    """Every string in a manifest: what it names, under whatever key, is live."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_of(inner)
