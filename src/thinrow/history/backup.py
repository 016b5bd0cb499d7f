"""Backup of a store while it is written to, and restore.

::

    copy/
      backups/00000000000000000001.json   one a backup, put last: generation, time, and every file outside the archive
      archive/                            manifests and what they name, shared by all backups
      content/<sha256>                    files outside the archive, by content, shared by all backups

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

import hashlib
import os
import secrets
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from thinrow.core.clock import system_clock
from thinrow.core.errors import (
    CommitConflict,
    CorruptionError,
    InputError,
    ObjectNotFound,
    StoreError,
    StoreExists,
    StoreNotFound,
)
from thinrow.history import place
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.verify import Damage, as_damage, verify_generation
from thinrow.history.recent.lmdb import LmdbRecent
from thinrow.history.recent.redis import RedisRecent
from thinrow.history.recent.redis_link import RedisLocation
from thinrow.history.recent.tier import RecentTier
from thinrow.history.tiers import FILE as TIER_FILE
from thinrow.history.tiers import FOLDER as TIER_FOLDER
from thinrow.history.tiers import next_epoch, restored_tier
from thinrow.storage.garbage import FOLDERS, strings_of
from thinrow.storage.manifest import ManifestLog
from thinrow.storage.objects import LocalObjects, ObjectStore, make_directory, sync_directory

_PIECE = 8 << 20
_TRIES = 20
#: Marks a folder that a restore has begun to fill: a killed one may be run again.
_RESTORING = ".tmp-restoring"
#: A server may have begun epochs since it was copied, one each time that it failed over or was restarted.
_AHEAD_OF_SERVER = 1_024
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


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    sha256: str
    bytes: int
    mtime_ns: int


class _Copy:
    """A folder of backups; counts what is copied."""

    def __init__(self, folder: Path) -> None:
        self.objects = LocalObjects(folder)
        self.archive = LocalObjects(folder / "archive")
        self.log = ManifestLog(self.objects, "backups")
        self.files, self.bytes, self.shared_bytes = 0, 0, 0

    def count(self, n_bytes: int, copied: bool) -> None:
        self.files += copied
        self.bytes += n_bytes * copied
        self.shared_bytes += n_bytes * (not copied)

    def keep(self, name: str, path: Path) -> _File:
        """Content of the file at ``path``, as file ``name`` of the store."""
        status, digest = path.stat(), hashlib.sha256()
        folder = self.objects.root / "content"
        make_directory(folder)
        part = folder / f".tmp-{uuid.uuid4().hex}"
        try:
            with path.open("rb") as source, part.open("wb") as target:
                while piece := source.read(_PIECE):
                    digest.update(piece)
                    target.write(piece)
                target.flush()
                os.fsync(target.fileno())
            size, known = part.stat().st_size, (folder / digest.hexdigest()).exists()
            if not known:
                part.rename(folder / digest.hexdigest())
                sync_directory(folder)
        finally:
            part.unlink(missing_ok=True)
        self.count(size, not known)
        return _File(name, digest.hexdigest(), size, status.st_mtime_ns)


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
    make_directory(folder)
    _clear(folder)
    _clear(store_path)
    copy = _Copy(folder)
    numbers = copy.log.list()
    before = {f.name: f for f in _files_of(copy.log.load(numbers[-1]))} if numbers else {}
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
        _copy_archive(archive.objects, copy, generation.number, progress)
    body = {
        "created_ms": system_clock(),
        "archive_generation": generation.number,
        "recent": "lmdb" if isinstance(recent, LmdbRecent) else "redis",
        "files": [asdict(f) for f in files],
    }
    for n in range(numbers[-1] + 1 if numbers else 1, 10**9):
        try:
            copy.log.commit(n, {**body, "generation": n})
            break
        except CommitConflict:
            continue
    return BackupReport(n, generation.number, generation.n_rows, copy.files, copy.bytes, copy.shared_bytes)


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


def _copy_archive(objects: ObjectStore, copy: _Copy, number: int, progress: Callable[[int, int], None] | None) -> None:
    manifest, body = _manifest(objects, number)
    names = sorted({n for n in strings_of(body) if n.startswith(FOLDERS)})
    for i, name in enumerate(names):
        copy.count(*_copy_object(objects, copy.archive, name))
        if progress is not None:
            progress(i + 1, len(names))
    copy.archive.put(ManifestLog(copy.archive).name_of(number), manifest)


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


def _copy_others(store_path: Path, copy: _Copy, before: dict[str, _File]) -> list[_File]:
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
        if path.is_file() and not apart and not any(part.startswith(".tmp-") for part in inside.parts):
            yield path


def _copy_databases(store_path: Path, copy: _Copy) -> list[_File]:
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


def _files_of(body: dict[str, Any]) -> list[_File]:
    return [_File(**f) for f in body["files"]]


def prune(folder: Path, keep: int) -> int:
    """Remove all but the newest ``keep`` backups of a folder, and what only they needed; returns bytes freed.

    Whatever was erased from a store since is in its older backups still, and goes with them.

    Raises:
        InputError: ``keep`` is below 1.
        CorruptionError: a backup's record or manifest is damaged; nothing was removed that it may need.
    """
    if keep < 1:
        raise InputError(f"keep={keep}; at least 1 backup must stay")
    copy, freed = _Copy(folder), 0
    for number in copy.log.list()[:-keep]:
        copy.log.drop(number)
    bodies = [copy.log.load(n) for n in copy.log.list()]
    manifests = {int(b["archive_generation"]) for b in bodies}
    needed = {f"content/{f.sha256}" for b in bodies for f in _files_of(b)}
    log = ManifestLog(copy.archive)
    needed |= {f"archive/{n}" for g in manifests for n in strings_of(log.load(g))}
    needed |= {f"archive/{log.name_of(g)}" for g in manifests}
    for entry in (*copy.objects.entries("content/"), *copy.objects.entries("archive/")):
        if entry.name not in needed:
            copy.objects.delete(entry.name)
            freed += entry.bytes
    return freed


def restore(folder: Path, store_path: Path, number: int | None, recent: str | None) -> BackupReport:
    """Make a store from a backup; see ``HistoryStore.restore``."""
    location = None if recent is None else RedisLocation.parse(recent)
    copy = _Copy(folder)
    body = _load(copy, folder, number)
    target = LocalObjects(store_path / "archive")
    begun = store_path / _RESTORING
    if ManifestLog(target).list() or (not begun.exists() and store_path.exists() and any(store_path.iterdir())):
        # What is there may be the recent events of a store whose archive is in a bucket, or lost.
        raise StoreExists(f"a store, or something of one, is at {store_path} already; restore to another path")
    make_directory(store_path)
    name, location = _begin(begun, location)
    shutil.rmtree(store_path / TIER_FOLDER, ignore_errors=True)
    for file in _files_of(body):
        _restore_file(copy, file, store_path / file.name)
    generation = int(body["archive_generation"])
    held = Archive(copy.archive).generation(generation)
    manifest, described = _manifest(copy.archive, generation)
    for object_name in sorted({n for n in strings_of(described) if n.startswith(FOLDERS)}):
        copy.count(*_copy_object(copy.archive, target, object_name))
    with LmdbRecent(store_path / TIER_FOLDER, held.schema) as tier:
        ahead = _AHEAD_OF_SERVER if body.get("recent") == "redis" else 1
        epoch = tier.begin_epoch(next_epoch(held) - 1, ahead)
        if location is not None:
            restored_tier(store_path, Archive(target), location, tier, epoch, name)
    if location is not None:
        shutil.rmtree(store_path / TIER_FOLDER)
    log = ManifestLog(target)
    log.raise_floor(generation)
    target.put_if_absent(log.name_of(generation), manifest)
    begun.unlink()
    return BackupReport(
        body["generation"], generation, held.n_rows, copy.files + len(body["files"]), copy.bytes, copy.shared_bytes
    )


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


def _load(copy: _Copy, folder: Path, number: int | None) -> dict[str, Any]:
    numbers = copy.log.list()
    if not numbers or (number is not None and number not in numbers):
        shown = f"its backups are {', '.join(map(str, numbers))}" if numbers else "it holds none"
        raise StoreNotFound(f"no backup {'' if number is None else number} in {folder}: {shown}; check the path")
    return copy.log.load(numbers[-1] if number is None else number)


def _restore_file(copy: _Copy, file: _File, path: Path) -> None:
    name, digest = f"content/{file.sha256}", hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    with (copy.objects.root / name).open("rb") as source, path.open("wb") as target:
        while piece := source.read(_PIECE):
            digest.update(piece)
            target.write(piece)
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != file.sha256:
        path.unlink()
        raise CorruptionError("its content is not what was backed up", file=name, remedy="restore an older backup")
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    copy.count(file.bytes, True)


def verify_backup(folder: Path, number: int | None = None) -> tuple[int, int, list[Damage]]:
    """Read every byte of a backup, by default of the newest: its number, events of its archive, and all damage.

    Raises:
        StoreNotFound: ``folder`` holds no such backup.
    """
    copy = _Copy(folder)
    body = _load(copy, folder, number)
    found = []
    for file in _files_of(body):
        name, digest = f"content/{file.sha256}", hashlib.sha256()
        try:
            with (folder / name).open("rb") as source:
                while piece := source.read(_PIECE):
                    digest.update(piece)
            if digest.hexdigest() != file.sha256:
                found.append(Damage(name, None, None, f"its content, {file.name} of the store, is not what was copied"))
        except OSError as e:
            found.append(Damage(name, None, None, f"it is {file.name} of the store, and cannot be read: {e.strerror}"))
    try:
        generation = Archive(copy.archive).generation(int(body["archive_generation"]))
        return body["generation"], generation.n_rows, found + verify_generation(generation)
    except (CorruptionError, ObjectNotFound) as e:
        return body["generation"], 0, [*found, as_damage(e, "archive")]


def is_backup(folder: Path) -> bool:
    """Whether ``folder`` holds backups."""
    return bool(ManifestLog(LocalObjects(folder), "backups").list())
