"""Backup of a store while it is written to, and restore; ``copies`` says how a folder of backups is laid out.

Worked example: the first backup copies all; the next one, a day of events later, copies the segments that are new, the
recent tier (as one LMDB environment, wherever it is) and what else changed in the folder.

- A tier in LMDB: a backup is the state of one moment. The tier is copied from a read transaction that began while the
  generation was the newest, so that tier and generation fit.
- A tier on Redis has no moment for all users. Each user is copied as of a moment of its own, between begin and end; the
  generation is the newest one *after* that, so that it holds whatever left the tier before a user's moment. What came
  before the backup began is in it; what came meanwhile may be, of each user without a gap. Positions of sources are
  read first: what they say is read is there.

What is logged is copied before the tier: no logged request saw what the backup does not hold.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from thinrow.core.clock import system_clock
from thinrow.core.errors import (
    CorruptionError,
    InputError,
    ObjectNotFound,
    StoreError,
    StoreExists,
)
from thinrow.history import place
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.verify import Damage, as_damage, verify_segments, verify_tombstones
from thinrow.history.copies import OLDER, CopiedFile, Copies, Record, alone, identify, identity
from thinrow.history.recent.lmdb import LmdbRecent
from thinrow.history.recent.redis import RedisRecent
from thinrow.history.recent.redis_link import RedisLocation
from thinrow.history.recent.tier import RecentTier
from thinrow.history.tiers import FILE as TIER_FILE
from thinrow.history.tiers import FOLDER as TIER_FOLDER
from thinrow.history.tiers import next_epoch, restored_tier
from thinrow.storage.garbage import files_of
from thinrow.storage.manifest import ManifestLog
from thinrow.storage.objects import LocalObjects, ObjectStore, make_directory

_PIECE = 8 << 20
_TRIES = 20
#: Marks a folder that a restore has begun to fill: a killed one may be run again.
_RESTORING = ".tmp-restoring"
#: A server may have begun epochs since it was copied, one each time that it failed over or was restarted.
_AHEAD_OF_SERVER = 1_024
#: Rows that readers of a training table share (``thinrow.examples.decoded``): decoded again when they are read.
_SHARED_ROWS = {"decoded", "decoded.lock"}
_SQLITE = b"SQLite format 3\0"
#: Files that SQLite keeps beside an open database; their content is in the copy of the database.
_SQLITE_SIDE = ("-wal", "-shm", "-journal")


@dataclass(frozen=True, slots=True)
class BackupReport:
    """What a backup or restore did; ``bytes`` were copied, ``shared_bytes`` were there already."""

    number: int
    generation: int
    events: int
    files: int
    bytes: int
    shared_bytes: int


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """What the operating system refuses, as a StoreError that names the folder."""
    try:
        yield
    except OSError as e:
        raise StoreError(f"cannot write {folder}: {e.strerror or e}; free space or check permissions, and retry") from e


#: Removes from a tier what a generation has let go of.
Forget = Callable[[Generation, RecentTier], None]


def backup(
    store_path: Path,
    archive: Archive,
    recent: RecentTier,
    folder: Path,
    forget: Forget,
    progress: Callable[[int, int], None] | None,
    keep: int | None = None,
) -> BackupReport:
    """Copy the store to ``folder``; see ``HistoryStore.backup``."""
    if not isinstance(recent, LmdbRecent | RedisRecent):
        raise StoreError(
            f"the recent tier is a {type(recent).__name__}; only a tier in LMDB or on a Redis server can be "
            "copied: compact, and copy the folder"
        )
    if folder.resolve().is_relative_to(store_path.resolve()):
        raise InputError(
            f"folder {folder} lies in the store at {store_path}: a backup would copy itself; name one outside it"
        )
    with alone(folder):
        report = _backup(store_path, archive, recent, Copies(folder), forget, progress)
        if keep is not None:
            _prune(Copies(folder), keep)
        return report


def _backup(
    store_path: Path,
    archive: Archive,
    recent: LmdbRecent | RedisRecent,
    copy: Copies,
    forget: Forget,
    progress: Callable[[int, int], None] | None,
) -> BackupReport:
    folder, store = copy.objects.root, identity(archive.objects)
    copy.require(store, store_path)
    _clear(folder)
    _clear(store_path)
    numbers = copy.numbers()
    before = {f.name: f for f in copy.load(numbers[-1]).files} if numbers else {}
    files = _copy_others(store_path, copy, before)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-")))
        if isinstance(recent, LmdbRecent):
            generation = _hold_and_copy(archive, recent, scratch / "recent", stack)
        else:
            # Written at random places: not on the backup's disk, which may be far away.
            near = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=store_path, prefix=".tmp-")))
            with LmdbRecent(near / "recent", archive.pin().schema, sync=False) as filled:
                filled.fill(recent)
                generation = _hold_newest(archive, stack)
                forget(generation, filled)
                filled.copy(scratch / "recent", lambda: True)
        files.append(copy.keep("recent/data.mdb", scratch / "recent" / "data.mdb"))
        manifest = _copy_archive(archive.objects, copy, generation.number, progress)
    number = numbers[-1] + 1 if numbers else 1
    kind = "lmdb" if isinstance(recent, LmdbRecent) else "redis"
    at = str(store_path.resolve())
    copy.commit(Record(number, generation.number, manifest, store, at, kind, tuple(files), system_clock()))
    return BackupReport(number, generation.number, generation.n_rows, copy.files, copy.bytes, copy.shared_bytes)


def _hold_newest(archive: Archive, stack: ExitStack) -> Generation:
    while True:
        generation = archive.pin()
        try:
            stack.enter_context(archive.hold(generation, "a backup"))
            return generation
        except ObjectNotFound:
            continue


def _hold_and_copy(archive: Archive, recent: LmdbRecent, path: Path, stack: ExitStack) -> Generation:
    """Copy the recent tier at a moment at which a generation that is held was the newest: what was trimmed until then
    is in it, and nothing that came later."""
    while True:
        with ExitStack() as attempt:
            generation = archive.pin()
            try:
                attempt.enter_context(archive.hold(generation, "a backup"))
            except ObjectNotFound:
                continue
            number = generation.number
            if recent.copy(path, lambda: archive.pin().number == number):  # noqa: B023
                stack.push(attempt.pop_all())
                return generation


def _clear(folder: Path) -> None:
    """Remove what backups left that were killed more than a day ago."""
    for path in (*folder.glob(".tmp-*"), *folder.glob("content/.tmp-*")):
        if path.stat().st_mtime < time.time() - 86_400:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _copy_archive(objects: ObjectStore, copy: Copies, number: int, progress: Callable[[int, int], None] | None) -> str:
    """Copy what a generation names, then its manifest; returns the name of that in the folder."""
    manifest, body = _manifest(objects, number)
    names = sorted(files_of(body))
    for i, name in enumerate(names):
        copy.count(*_copy_object(objects, copy.archive, name))
        if progress is not None:
            progress(i + 1, len(names))
    return copy.keep_manifest(number, manifest)


def _manifest(objects: ObjectStore, number: int) -> tuple[bytes, dict[str, Any]]:
    """Bytes and body of a manifest that is held: in the log, or moved to the retired ones."""
    try:
        log = ManifestLog(objects)
        return objects.get(log.name_of(number)), log.load(number)
    except ObjectNotFound:
        log = ManifestLog(objects, "retired")
        return objects.get(log.name_of(number)), log.load(number)


def _copy_object(source: ObjectStore, target: ObjectStore, name: str) -> tuple[int, bool]:
    """Copy an immutable object unless it is there; returns its bytes and whether they were copied."""
    size = source.size(name)
    if _size(target, name) == size:
        return size, False
    piece = np.empty(min(size, _PIECE), np.uint8)
    with target.create(name) as writer:
        for start in range(0, size, _PIECE):
            n = min(_PIECE, size - start)
            source.read_into(name, np.array([start]), np.array([n]), piece, np.zeros(1, np.int64))
            writer.write(piece[:n])
    return size, True


def _size(objects: ObjectStore, name: str) -> int | None:
    try:
        return objects.size(name)
    except ObjectNotFound:
        return None


def _copy_others(store_path: Path, copy: Copies, before: dict[str, CopiedFile]) -> list[CopiedFile]:
    """Logs, tables and whatever else is in the folder: databases first and last, and again where one has changed."""
    for _ in range(_TRIES):
        try:
            databases = _copy_databases(store_path, copy)
            files = []
            for path in _others(store_path):
                name = path.relative_to(store_path).as_posix()
                if name in {d.name for d in databases} or name.endswith(_SQLITE_SIDE):
                    continue
                status, known = path.stat(), before.get(name)
                if known and (known.bytes, known.mtime_ns) == (status.st_size, status.st_mtime_ns):
                    copy.count(known.bytes, False)
                    files.append(known)
                else:
                    files.append(copy.keep(name, path))
            if [d.sha256 for d in _copy_databases(store_path, copy)] == [d.sha256 for d in databases]:
                return databases + files
        except FileNotFoundError:
            # A log was pruned, or a table's file replaced: what was listed is not one state.
            continue
        time.sleep(0.1)
    raise StoreError(
        f"tables and logs in {store_path} changed in each of {_TRIES} tries to copy; stop the outcome join meanwhile"
    )


def _others(store_path: Path) -> Iterator[Path]:
    for path in sorted(store_path.rglob("*")):
        inside = path.relative_to(store_path)
        apart = inside.parts[0] in ("archive", TIER_FOLDER, "loads", place.CACHE, place.FILE, TIER_FILE)
        apart |= not _SHARED_ROWS.isdisjoint(inside.parts)
        if path.is_file() and not apart and not any(part.startswith(".tmp-") for part in inside.parts):
            yield path


def _copy_databases(store_path: Path, copy: Copies) -> list[CopiedFile]:
    found = []
    for path in _others(store_path):
        with path.open("rb") as file:
            if file.read(len(_SQLITE)) != _SQLITE:
                continue
        with tempfile.TemporaryDirectory(dir=copy.objects.root, prefix=".tmp-") as scratch:
            target = Path(scratch) / "copy.db"
            with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(target)) as new:
                source.backup(new)
            found.append(copy.keep(path.relative_to(store_path).as_posix(), target))
    return found


def prune(folder: Path, keep: int) -> int:
    """Remove all but the newest ``keep`` backups of a folder, and what only they needed; returns bytes freed.

    Whatever was erased from a store since is in its older backups still, and goes with them.

    Raises:
        InputError: ``keep`` is below 1.
        StoreError: a backup into the folder is under way, and what it has copied is named by no record yet.
        CorruptionError: a backup's record or manifest is damaged; nothing was removed that it may need.
    """
    if keep < 1:
        raise InputError(f"keep={keep}; at least 1 backup must stay")
    with alone(folder):
        return _prune(Copies(folder), keep)


def _prune(copy: Copies, keep: int) -> int:
    for number in copy.numbers()[:-keep]:
        copy.drop(number)
    records = [copy.load(n) for n in copy.numbers()]
    needed = {f"content/{f.sha256}" for r in records for f in r.files} | {r.manifest for r in records}
    needed |= {f"archive/{n}" for r in records for n in files_of(copy.manifest(r)[1])}
    freed = 0
    for part in ("content/", "manifests/", "archive/"):
        for entry in copy.objects.entries(part):
            if entry.name not in needed:
                copy.objects.delete(entry.name)
                freed += entry.bytes
    return freed


def restore(folder: Path, store_path: Path, number: int | None, recent: str | None) -> BackupReport:
    """Make a store from a backup; see ``HistoryStore.restore``."""
    location = None if recent is None else RedisLocation.parse(recent)
    copy = Copies(folder)
    record = copy.load(number)
    manifest, described = copy.manifest(record)
    target = LocalObjects(store_path / "archive")
    begun = store_path / _RESTORING
    if ManifestLog(target).list() or (not begun.exists() and store_path.exists() and any(store_path.iterdir())):
        # What is there may be the recent events of a store whose archive is in a bucket, or lost.
        raise StoreExists(f"a store, or something of one, is at {store_path} already; restore to another path")
    make_directory(store_path)
    name, location = _begin(begun, location)
    _clear_begun(store_path)
    for file in record.files:
        _restore_file(copy, file, store_path / file.name)
    held = copy.generation(record)
    for object_name in sorted(files_of(described)):
        try:
            copy.count(*_copy_object(copy.archive, target, object_name))
        except ObjectNotFound:
            raise CorruptionError("it is missing", file=f"archive/{object_name}", remedy=OLDER) from None
    with LmdbRecent(store_path / TIER_FOLDER, held.schema) as tier:
        ahead = _AHEAD_OF_SERVER if record.recent == "redis" else 1
        epoch = tier.begin_epoch(next_epoch(held) - 1, ahead)
        if location is not None:
            restored_tier(store_path, Archive(target), location, tier, epoch, name)
    if location is not None:
        shutil.rmtree(store_path / TIER_FOLDER)
    # Of the records of a folder only those before format 2 do not say it.
    store = record.store or (copy.store() or (None,))[0]
    if store is not None:
        identify(target, store)
    log = ManifestLog(target)
    log.raise_floor(record.generation)
    target.put_if_absent(log.name_of(record.generation), manifest)
    begun.unlink()
    return BackupReport(
        record.number,
        record.generation,
        held.n_rows,
        copy.files + len(record.files),
        copy.bytes,
        copy.shared_bytes,
    )


def _clear_begun(store_path: Path) -> None:
    """Remove what a restore that was killed, or failed, had restored: it may have been of another backup. Files of the
    archive stay: no two that differ have one name."""
    for path in store_path.iterdir():
        if path.name not in (_RESTORING, "archive"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # A later backup's floor would refuse every commit on this one.
    shutil.rmtree(store_path / "archive" / "manifests-floor", ignore_errors=True)


def _begin(begun: Path, location: RedisLocation | None) -> tuple[str, RedisLocation | None]:
    """Note that a restore has begun, and where to: its name, and the place of its recent tier. One that goes on where a
    killed one ended has the same."""
    if location is not None and not location.name:
        location = replace(location, name=secrets.token_hex(8))
    if begun.exists() and (held := begun.read_text()):
        name, _, url = held.partition(" ")
        there = RedisLocation.parse(url)
        if location is None or (location.server, location.db) != (there.server, there.db):
            raise StoreExists(
                f"a restore into {begun.parent} with its recent events at {there} was begun; go on with that, or "
                "restore to another path"
            )
        return name, replace(location, name=there.name)
    name = secrets.token_hex(16)
    text = "" if location is None else f"{name} {location}"
    with begun.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return name, location


def _restore_file(copy: Copies, file: CopiedFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as target:
        for piece in copy.read(file):
            target.write(piece)
        target.flush()
        os.fsync(target.fileno())
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    copy.count(file.bytes, True)


def verify_backup(folder: Path, number: int | None = None) -> tuple[int, int, list[Damage]]:
    """Read every byte of a backup, by default of the newest: its number, events of its archive, and all damage.

    Raises:
        StoreNotFound: ``folder`` holds no such backup.
    """
    copy = Copies(folder)
    record = copy.load(number)
    found = []
    for file in record.files:
        try:
            for _ in copy.read(file):
                pass
        except CorruptionError as e:
            found.append(as_damage(e, file.name))
    try:
        generation = copy.generation(record)
    except CorruptionError as e:
        return record.number, 0, [*found, as_damage(e, record.manifest)]
    return record.number, generation.n_rows, [*found, *verify_segments(generation), *verify_tombstones(generation)]


def is_backup(folder: Path) -> bool:
    """Whether ``folder`` holds backups."""
    return bool(Copies(folder).numbers())
