"""Named immutable objects: a directory of files, or a dict in memory; one contract, ``thinrow.testing.object_store``.

A name is a relative path with ``/``: ``segments/0007/1f3a.seg``. Whatever ``put``, ``put_if_absent`` and ``create``
have returned from survives a power cut: the bytes are synced before the name appears, the directory after it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CommitConflict, InputError, ObjectNotFound, StoreError
from thinrow.storage.meter import count
from thinrow.storage.ranges import GAP_BYTES, RangeReader, check_ranges

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
T = TypeVar("T")
R = TypeVar("R")
BytesLike: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]

_TEMPORARY = ".tmp-"
_LOCK = f"{_TEMPORARY}lock"
_PART = rf"(?!\.{{1,2}}(?:/|\Z)|{re.escape(_TEMPORARY)})[^/\0]+"
_NAME = re.compile(f"{_PART}(?:/{_PART})*")
#: What ``link`` says on file systems without hard links, or with as many as they take.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Entry(NamedTuple):
    """One object of a listing; ``modified_ms`` (since 1970, UTC) is when it appeared, by the clock of the store."""

    name: str
    bytes: int
    modified_ms: int


Entries: TypeAlias = list[Entry]


class Writer(Protocol):
    """Where the bytes of an object under creation go."""

    def write(self, data: BytesLike) -> None:
        """Append ``data``."""


class ObjectStore(Protocol):
    """Objects by name. Raises InputError on a name that is no relative path."""

    @property
    def concurrency(self) -> int:
        """Calls that are quicker at once than one after another (see ``each``); 1 where there is no latency to hide."""

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Store ``data`` whole and durably, unless the name is taken. Raises CommitConflict where it is."""

    def put(self, name: str, data: bytes) -> None:
        """Store ``data`` whole and durably, in place of what was there."""

    def get(self, name: str) -> bytes:
        """The whole object. Raises ObjectNotFound."""

    def size(self, name: str) -> int:
        """Bytes of the object. Raises ObjectNotFound."""

    def has(self, name: str) -> bool:
        """Whether there is an object of that name; of a folder of objects nothing is said."""

    def list(self, prefix: str, after: str = "") -> list[str]:
        """Sorted names that begin with ``prefix`` and follow ``after``; none of objects under creation."""

    def entries(self, prefix: str) -> Entries:
        """The same objects with sizes and times, sorted by name; of objects deleted meanwhile, some may be missing."""

    def sweep(self, before_ms: int) -> int:
        """Remove what killed writers left of objects whose creation began before ``before_ms``; bytes freed."""

    def delete(self, name: str) -> None:
        """Remove the object; nothing happens where there is none."""

    def create(self, name: str) -> AbstractContextManager[Writer]:
        """Write an object piece by piece: it appears, whole and durable, when the context ends without an exception.

        After an exception nothing is left of it. Raises StoreError where the medium refuses (full, read-only).
        """

    def mapped(self, names: Sequence[str]) -> tuple[U8, ...] | None:
        """The whole objects as read-only arrays, where that costs no copy; None where ranges must be read instead.

        Raises:
            ObjectNotFound: no such object.
        """

    def read_into(
        self, name: str, offsets: I64, lengths: I64, out: U8, out_offsets: I64, gap: int | None = None
    ) -> None:
        """``read_many`` of one object, which must be there even if nothing is read of it."""

    def read_many(
        self,
        names: Sequence[str],
        which: I64,
        offsets: I64,
        lengths: I64,
        out: U8,
        out_offsets: I64,
        gap: int | None = None,
    ) -> None:
        """Read n ranges of many objects into one buffer: ``out[out_offsets[i]:][:lengths[i]]``.

        One call for all that a batch needs lets the store plan its requests over the whole of it.

        Args:
            names: distinct objects.
            which: (n,) int64; range i is of ``names[which[i]]``.
            offsets: (n,) int64 positions in the object, in any order; ranges may overlap.
            lengths: (n,) int64 bytes.
            out: uint8, writable.
            out_offsets: (n,) int64; destinations must not overlap.
            gap: ranges this close (bytes) are read together; None for what suits the store.

        Raises:
            ObjectNotFound: no such object.
            CorruptionError: a range that does not lie in its object.
            InputError: a destination that does not lie in ``out``.
            StoreError: the store does not answer (after retries).
        """


@lru_cache(256)
def check_name(name: str) -> str:
    """``name`` itself. Raises InputError where it is absolute, climbs, or could be taken for a temporary file."""
    if _NAME.fullmatch(name) is None:
        raise InputError(f"object name {name!r} must be a relative path without '.', '..' or '{_TEMPORARY}' parts")
    return name


def as_bytes(data: BytesLike) -> memoryview:
    """Any contiguous buffer as a view of bytes."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


class _Memory:
    def __init__(self) -> None:
        self.parts = bytearray()

    def write(self, data: BytesLike) -> None:
        self.parts += as_bytes(data)


def read_each(
    objects: ObjectStore,
    names: Sequence[str],
    which: I64,
    offsets: I64,
    lengths: I64,
    out: U8,
    out_offsets: I64,
    gap: int | None = None,
) -> None:
    """``read_many`` of a store that has no latency to hide: object after object."""
    for name, mine in by_object(names, which):
        objects.read_into(name, offsets[mine], lengths[mine], out, out_offsets[mine], gap)


def read_one(
    objects: ObjectStore,
    name: str,
    offsets: I64,
    lengths: I64,
    out: U8,
    out_offsets: I64,
    gap: int | None = None,
) -> None:
    """``read_into`` of a store that plans its requests over all objects."""
    if not len(offsets):
        objects.size(name)
    objects.read_many([name], np.zeros(len(offsets), np.int64), offsets, lengths, out, out_offsets, gap)


class MemoryObjects:
    """Objects in a dict, for tests and small experiments; safe for threads."""

    concurrency = 1
    read_many = read_each

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._modified_ms: dict[str, int] = {}
        self._lock = threading.Lock()

    def put_if_absent(self, name: str, data: bytes) -> None:
        with self._lock:
            if check_name(name) in self._objects:
                raise taken(name)
            self._store(name, data)

    def put(self, name: str, data: bytes) -> None:
        with self._lock:
            self._store(check_name(name), data)

    def _store(self, name: str, data: bytes) -> None:
        self._objects[name], self._modified_ms[name] = bytes(data), time.time_ns() // 1_000_000

    def get(self, name: str) -> bytes:
        try:
            return self._objects[check_name(name)]
        except KeyError:
            raise missing(name) from None

    def size(self, name: str) -> int:
        return len(self.get(name))

    def has(self, name: str) -> bool:
        return is_there(self, name)

    def list(self, prefix: str, after: str = "") -> list[str]:
        with self._lock:
            return sorted(n for n in self._objects if n.startswith(prefix) and n > after)

    def entries(self, prefix: str) -> Entries:
        with self._lock:
            found = sorted(n for n in self._objects if n.startswith(prefix))
            return [Entry(n, len(self._objects[n]), self._modified_ms[n]) for n in found]

    def sweep(self, before_ms: int) -> int:
        return 0

    def delete(self, name: str) -> None:
        with self._lock:
            self._objects.pop(check_name(name), None)

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        check_name(name)
        writer = _Memory()
        yield writer
        self.put(name, bytes(writer.parts))

    def mapped(self, names: Sequence[str]) -> tuple[U8, ...] | None:
        return tuple(np.frombuffer(self.get(name), np.uint8) for name in names)

    def read_into(
        self, name: str, offsets: I64, lengths: I64, out: U8, out_offsets: I64, gap: int | None = None
    ) -> None:
        data = np.frombuffer(self.get(name), np.uint8)
        check_ranges(name, len(data), offsets, lengths, out, out_offsets)
        for offset, length, place in zip(offsets.tolist(), lengths.tolist(), out_offsets.tolist(), strict=True):
            out[place : place + length] = data[offset : offset + length]
        count(bytes_fetched=int(lengths.sum()))


class _File:
    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor, self.name = descriptor, name

    def write(self, data: BytesLike) -> None:
        view = as_bytes(data)
        with _told(self.name):
            while view:
                view = view[os.write(self.descriptor, view) :]


class LocalObjects:
    """Files under a directory of a POSIX file system; safe for threads and processes.

    ``put_if_absent`` links a synced temporary file to the name, which is atomic. On file systems without hard links
    the test and the rename are done under a lock (``flock``) on a file beside it: atomic among the writers of one
    machine, and, where the file system shares locks, of all. A killed writer may leave a ``.tmp-*`` file, which no
    method here ever shows. Ranges are read through memory maps (see ``ranges``).
    """

    concurrency = 1
    read_many = read_each

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._files = RangeReader()

    def __reduce__(self) -> tuple[type[LocalObjects], tuple[Path]]:
        """The same folder, opened anew."""
        return LocalObjects, (self.root,)

    def put_if_absent(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with self._temporary(name, path) as (temporary, writer):
            writer.write(data)
            with _told(name):
                os.fsync(writer.descriptor)
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    raise taken(name) from None
                except OSError as e:
                    if e.errno not in _NO_LINKS:
                        raise
                    _rename_if_absent(name, temporary, path)
        sync_directory(path.parent)

    def put(self, name: str, data: bytes) -> None:
        with self.create(name) as writer:
            writer.write(data)

    def get(self, name: str) -> bytes:
        try:
            return self._path(name).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise missing(name) from None

    def size(self, name: str) -> int:
        try:
            status = os.stat(f"{self.root}/{check_name(name)}")
            if stat.S_ISDIR(status.st_mode):
                raise missing(name)
            return status.st_size
        except (FileNotFoundError, NotADirectoryError):
            raise missing(name) from None

    def has(self, name: str) -> bool:
        # Every snapshot asks twice: a ``Path``, or an exception where there is none, takes longer than the system.
        return os.access(f"{self.root}/{check_name(name)}", os.F_OK)

    def list(self, prefix: str, after: str = "") -> list[str]:
        found = (self._name(path) for path in self._walk(prefix) if not path.name.startswith(_TEMPORARY))
        return sorted(n for n in found if n.startswith(prefix) and n > after)

    def entries(self, prefix: str) -> Entries:
        found = []
        for name in self.list(prefix):
            with suppress(FileNotFoundError):
                status = (self.root / name).stat()
                found.append(Entry(name, status.st_size, status.st_mtime_ns // 1_000_000))
        return found

    def sweep(self, before_ms: int) -> int:
        freed = 0
        for path in self._walk(""):
            if path.name.startswith(_TEMPORARY) and path.name != _LOCK:
                with suppress(FileNotFoundError), _told(self._name(path)):
                    status = path.stat()
                    if status.st_mtime_ns // 1_000_000 < before_ms:
                        path.unlink()
                        freed += status.st_size if status.st_nlink == 1 else 0
        return freed

    def _walk(self, prefix: str) -> Iterator[Path]:
        """All files below the folder that ``prefix`` names, temporary ones included."""
        for directory, folders, files in os.walk(self.root / prefix.rpartition("/")[0]):
            folders[:] = [f for f in folders if not f.startswith(_TEMPORARY)]
            yield from (Path(directory, f) for f in files)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._files.forget(path)
        with suppress(FileNotFoundError, NotADirectoryError), _told(name):
            path.unlink()
            sync_directory(path.parent)

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        path = self._path(name)
        with self._temporary(name, path) as (temporary, writer):
            yield writer
            with _told(name):
                os.fsync(writer.descriptor)
                os.replace(temporary, path)
        sync_directory(path.parent)

    def mapped(self, names: Sequence[str]) -> tuple[U8, ...] | None:
        found = []
        for name in names:
            try:
                data = self._files.mapped(self._path(name))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise missing(name) from None
            if data is None:
                return None
            found.append(data)
        return tuple(found)

    def read_into(
        self, name: str, offsets: I64, lengths: I64, out: U8, out_offsets: I64, gap: int | None = None
    ) -> None:
        near = GAP_BYTES if gap is None else gap
        try:
            self._files.read_into(self._path(name), name, offsets, lengths, out, out_offsets, near)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise missing(name) from None
        count(bytes_fetched=int(lengths.sum()))

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    @contextmanager
    def _temporary(self, name: str, path: Path) -> Iterator[tuple[Path, _File]]:
        """A new file beside ``path``; gone when the context ends, unless it was renamed."""
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        with _told(name):
            make_directory(path.parent)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            yield temporary, _File(descriptor, name)
        finally:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(temporary)


def _rename_if_absent(name: str, temporary: Path, path: Path) -> None:
    with open(path.parent / _LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            raise taken(name)
        os.rename(temporary, path)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """What the operating system refuses, as a StoreError that names the object."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as e:
        raise StoreError(
            f"cannot write {name}: {e.strerror or e}; nothing of it was kept, free space or check permissions and retry"
        ) from e


def by_object(names: Sequence[str], which: I64) -> Iterator[tuple[str, I64]]:
    """Each object that ranges are asked of, with the numbers of its ranges. Raises InputError on a number of none."""
    if len(which) and not 0 <= int(which.min()) <= int(which.max()) < len(names):
        raise InputError(f"ranges of objects {which.min()} to {which.max()}, but {len(names)} are named; name them all")
    order = np.argsort(which, kind="stable")
    used, starts = np.unique(which[order], return_index=True)
    for k, mine in zip(used.tolist(), np.split(order, starts[1:]), strict=False):
        yield names[k], mine


def each(objects: ObjectStore, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``work`` of every item, in order: in threads where the store has latency to hide. The first failure is raised.

    What the threads ask of stores is counted where the caller's is (see ``meter``).
    """
    if objects.concurrency == 1 or len(items) < 2:
        return [work(item) for item in items]
    contexts = [copy_context() for _ in items]
    with ThreadPoolExecutor(min(objects.concurrency, len(items))) as pool:
        return list(pool.map(lambda c, item: c.run(work, item), contexts, items))


def is_there(objects: ObjectStore, name: str) -> bool:
    """Whether the object has a size."""
    try:
        objects.size(name)
    except ObjectNotFound:
        return False
    return True


def missing(name: str) -> ObjectNotFound:
    """The error that ``name`` is not there."""
    return ObjectNotFound(f"no object {name!r}; it was deleted or never written, run `thinrow verify` on the store")


def taken(name: str) -> CommitConflict:
    """The error that ``name`` is there already."""
    return CommitConflict(f"{name} exists already; read the newest state and try again")


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises StoreError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        raise StoreError(
            f"cannot sync {path}: {e.strerror}; a power cut may undo the last change, check the disk"
        ) from e
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents; each new entry is synced, so that no crash takes the directory away again."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    with suppress(FileExistsError):
        path.mkdir()
    sync_directory(path.parent)
