"""A folder of backups of one store: its records, and what they name by content (docs/format/backup-v2.md).

::

    copy/
      backups/00000000000000000001.json   one a backup, put last: of which store, when, and what it needs
      manifests/<generation>-<sha256>.json   manifests by content, shared by all backups
      archive/                            what manifests name, shared by all backups
      content/<sha256>                    files outside the archive by content, shared by all backups
      lock                                held while somebody adds or removes

No name is ever given to other content, so that what a record needs stays as it was, whichever branch of the store's
life was backed up since: of a store that was restored and went on, generation 7 is another one than the original's.
Records of format 1 (they say ``format`` 2, as manifests do) name ``archive/manifests/<generation>.json`` instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinrow.core.errors import (
    CommitConflict,
    CorruptionError,
    InputError,
    NewerFormatError,
    ObjectNotFound,
    StoreError,
    StoreNotFound,
)
from thinrow.history.archive.generation import Archive, Generation
from thinrow.storage.manifest import FORMAT as MANIFEST_FORMAT
from thinrow.storage.manifest import ManifestLog
from thinrow.storage.objects import LocalObjects, ObjectStore, check_name, make_directory, sync_directory
from thinrow.storage.sealed import seal, unseal

#: Of records; above that of manifests, which format 1 had.
FORMAT = 3
_PIECE = 8 << 20
_IDENTITY, _IDENTITY_FORMAT = "identity.json", 1
_MANIFEST = re.compile(r"manifests/\d{20}-([0-9a-f]{64})\.json")
_SHA256 = re.compile("[0-9a-f]{64}")
#: What to do where a backup is damaged.
OLDER = "restore an older backup"


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file outside the archive: its name in the store, its content, and when it was changed."""

    name: str
    sha256: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Record:
    """One backup.

    Attributes:
        number: of the backup, from 1.
        generation: of the archive.
        manifest: name of its manifest in the folder.
        store, path: which store it is of, and where that was; None in format 1.
        recent: "lmdb" or "redis", where the recent tier was.
        files: outside the archive.
        created_ms: when it was made.
    """

    number: int
    generation: int
    manifest: str
    store: str | None
    path: str | None
    recent: str
    files: tuple[CopiedFile, ...]
    created_ms: int


class Copies:
    """A folder of backups; counts what is copied."""

    def __init__(self, folder: Path) -> None:
        self.objects = LocalObjects(folder)
        self.archive = LocalObjects(folder / "archive")
        self._log = ManifestLog(self.objects, "backups", FORMAT)
        self.files, self.bytes, self.shared_bytes = 0, 0, 0

    def count(self, n_bytes: int, copied: bool) -> None:
        """Count a file that was copied, or was there."""
        self.files += copied
        self.bytes += n_bytes * copied
        self.shared_bytes += n_bytes * (not copied)

    def numbers(self) -> list[int]:
        """Numbers of all backups, oldest first."""
        return self._log.list()

    def drop(self, number: int) -> None:
        """Remove a record."""
        self._log.drop(number)

    def load(self, number: int | None = None) -> Record:
        """The record of a backup, by default of the newest.

        Raises:
            StoreNotFound: there is no such backup.
            CorruptionError, NewerFormatError: its record is damaged, or of a newer thinrow.
        """
        numbers = self.numbers()
        if not numbers or (number is not None and number not in numbers):
            shown = f"its backups are {', '.join(map(str, numbers))}" if numbers else "it holds none"
            folder, which = self.objects.root, "" if number is None else number
            raise StoreNotFound(f"no backup {which} in {folder}: {shown}; check the path")
        number = numbers[-1] if number is None else number
        body, name = self._log.load(number), self._log.name_of(number)
        try:
            return _record(body)
        except (KeyError, TypeError, ValueError) as e:
            raise CorruptionError(f"it is no record of a backup: {e}", file=name, remedy=OLDER) from e

    def commit(self, record: Record) -> None:
        """Put a record, with which the backup is there."""
        body = {k: v for k, v in asdict(record).items() if k not in ("number", "generation", "files")}
        files = [asdict(f) for f in record.files]
        body |= {"generation": record.number, "archive_generation": record.generation, "files": files}
        self._log.commit(record.number, body)

    def store(self) -> tuple[str, str | None] | None:
        """Which store the folder's backups are of, and where that was; None where no record says so."""
        for number in reversed(self.numbers()):
            try:
                record = self.load(number)
            except (CorruptionError, NewerFormatError):
                # Another one knows it as well.
                continue
            if record.store is not None:
                return record.store, record.path
        return None

    def require(self, store: str, path: Path) -> None:
        """Raises InputError where the folder holds backups of another store than the one at ``path``."""
        held = self.store()
        if held is not None and held[0] != store:
            raise InputError(
                f"{self.objects.root} holds backups of another store, {held[0]}, which was at {held[1]}; the one at "
                f"{path} is {store}: give it a folder of its own"
            )

    def keep(self, name: str, path: Path) -> CopiedFile:
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
        return CopiedFile(name, digest.hexdigest(), size, status.st_mtime_ns)

    def read(self, file: CopiedFile) -> Iterator[bytes]:
        """The content of a file, piece by piece. Raises CorruptionError, at the end where it is not what was copied."""
        name, digest = f"content/{file.sha256}", hashlib.sha256()
        try:
            with (self.objects.root / name).open("rb") as source:
                while piece := source.read(_PIECE):
                    digest.update(piece)
                    yield piece
        except OSError as e:
            what = f"it is {file.name} of the store, and cannot be read: {e.strerror}"
            raise CorruptionError(what, file=name, remedy=OLDER) from e
        if digest.hexdigest() != file.sha256:
            what = f"its content, {file.name} of the store, is not what was copied"
            raise CorruptionError(what, file=name, remedy=OLDER)

    def keep_manifest(self, generation: int, data: bytes) -> str:
        """Put a manifest by its content; returns its name."""
        name = f"manifests/{generation:020d}-{hashlib.sha256(data).hexdigest()}.json"
        self.objects.put(name, data)
        return name

    def manifest(self, record: Record) -> tuple[bytes, dict[str, Any]]:
        """Bytes and body of the manifest of a backup. Raises CorruptionError."""
        try:
            data = self.objects.get(record.manifest)
        except ObjectNotFound:
            raise CorruptionError("it is missing", file=record.manifest, remedy=OLDER) from None
        named = _MANIFEST.fullmatch(record.manifest)
        if named is not None and hashlib.sha256(data).hexdigest() != named[1]:
            raise CorruptionError("its content is not what was copied", file=record.manifest, remedy=OLDER)
        body = unseal(data, MANIFEST_FORMAT, "manifest", record.manifest)
        if body.get("generation") != record.generation:
            what = f"it describes generation {body.get('generation')}, the backup is of {record.generation}"
            raise CorruptionError(what, file=record.manifest, remedy=OLDER)
        return data, body

    def generation(self, record: Record) -> Generation:
        """The archive of a backup. Raises CorruptionError."""
        return Generation(Archive(self.archive), record.generation, self.manifest(record)[1])


def _record(body: dict[str, Any]) -> Record:
    number, generation = int(body["generation"]), int(body["archive_generation"])
    files = tuple(CopiedFile(**f) for f in body["files"])
    for file in files:
        # A name that climbs would be written outside the restored store.
        check_name(file.name)
        if type(file.bytes) is not int or type(file.mtime_ns) is not int:
            raise ValueError(f"{file.name} has {file.bytes!r} bytes and time {file.mtime_ns!r}; both are integers")
        if _SHA256.fullmatch(file.sha256) is None:
            raise ValueError(f"{file.name} has content {file.sha256!r}, which is no SHA-256")
    manifest = body.get("manifest", f"archive/manifests/{generation:020d}.json")
    if "manifest" in body and _MANIFEST.fullmatch(manifest) is None:
        raise ValueError(f"{manifest!r} is no name of a manifest")
    return Record(
        number,
        generation,
        manifest,
        body.get("store"),
        body.get("path"),
        body.get("recent", "lmdb"),
        files,
        body["created_ms"],
    )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder of backups alone; the lock ends with its process, however that ends.

    Raises:
        StoreError: another backup into the folder is under way.
    """
    make_directory(folder)
    with (folder / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"another backup into {folder} is under way; run again when it has ended") from None
        try:
            yield
        finally:
            # Said, not left to closing: a child that was forked meanwhile has the file open, too.
            fcntl.flock(lock, fcntl.LOCK_UN)


def identity(objects: ObjectStore) -> str:
    """Which store an archive belongs to; stores restored from its backups have the same. Noted at the first backup.

    Raises:
        CorruptionError: the note is damaged.
    """
    with suppress(CommitConflict):
        if not objects.has(_IDENTITY):
            body = {"store": secrets.token_hex(16)}
            objects.put_if_absent(_IDENTITY, seal(body, _IDENTITY_FORMAT, "identity of a store"))
    found = unseal(objects.get(_IDENTITY), _IDENTITY_FORMAT, "identity of a store", _IDENTITY).get("store")
    if not isinstance(found, str):
        raise CorruptionError(f"it names the store {found!r}", file=_IDENTITY)
    return found


def identify(objects: ObjectStore, store: str) -> None:
    """Let an archive that is being restored belong to ``store``."""
    objects.put(_IDENTITY, seal({"store": store}, _IDENTITY_FORMAT, "identity of a store"))
