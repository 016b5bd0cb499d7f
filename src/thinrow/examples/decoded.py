"""Decoded rows of a table in files that all its readers on a machine share: workers, sessions, epochs, other jobs.

A file holds one row group as it is after Parquet: an Arrow file behind a head with a CRC over all of it. It is found by
a hash of all that decides what is in it: table, schemas, snapshot, bucket, which rows. Nothing there is ever the only
copy: what is damaged or missing is decoded again, and a disk that refuses costs the caching alone.

No file outlives an erasure. Files lie in a folder of a random name, ``decoded/<name>``, and a reader writes only into
the folder that it found, or made, when it began on its snapshot (``claim``). An erasure removes whatever is in
``decoded`` and commits while nobody can claim (``nothing_kept``, under ``decoded.lock``); afterwards a claim on the
snapshot before it is refused, and a reader that had one finds its folder gone for good. A process killed at any moment
changes none of that: a lock ends with its holder, and the folder goes before the commit.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from sqlalchemy.exc import SQLAlchemyError

from thinrow.core.errors import StoreError, ThinrowError
from thinrow.kernels import kernel

FOLDER, LOCK = "decoded", "decoded.lock"
#: Changes with what is in a file.
_FORMAT = 2
#: Magic, CRC of what follows, zeros to a multiple of 64 bytes.
_HEAD = struct.Struct("<8sI52x")
_MAGIC = b"TRROWS\0\2"
#: How often a folder may gain a file while it is removed.
_ATTEMPTS = 100


class DecodedRows:
    """Args:
    folder: as claimed.
    max_bytes: of its files; those that were not read for longest go first.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def get(self, key: str) -> pa.Table | None:
        """The rows; None where they are not there, or not whole."""
        path = self.folder / key
        try:
            data = path.read_bytes()
            os.utime(path)
            if len(data) > _HEAD.size:
                magic, crc = _HEAD.unpack_from(data)
                body = pa.py_buffer(data).slice(_HEAD.size)
                if magic == _MAGIC and int(kernel("crc32c")(np.frombuffer(body, np.uint8), 0)) == crc:
                    return pa.ipc.open_file(body).read_all()
            path.unlink(missing_ok=True)
        except (OSError, pa.ArrowException):
            return None
        return None

    def put(self, key: str, rows: pa.Table) -> bool:
        """Keep the rows; whether they are."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows)
        body = sink.getvalue()
        size = len(body) + _HEAD.size
        if size > self.max_bytes:
            return False
        part = self.folder / f".tmp-{uuid.uuid4().hex}"
        try:
            self._make_room(size)
            with open(part, "xb") as file:
                file.write(_HEAD.pack(_MAGIC, int(kernel("crc32c")(np.frombuffer(body, np.uint8), 0))))
                file.write(body)
            os.replace(part, self.folder / key)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            return False
        return True

    def _make_room(self, size: int) -> None:
        found = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                found.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        total = sum(n for _, n, _ in found)
        for _, n, path in sorted(found):
            if total + size <= self.max_bytes:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= n


def key_of(what: tuple[object, ...], rows: object) -> str:
    """Names a row group: all that says what is in it, and which of its rows (None: all)."""
    kept = b"" if rows is None else np.asarray(rows, np.int64).tobytes()
    return hashlib.sha256(repr((_FORMAT, *what, rows is None)).encode() + kept).hexdigest()[:32]


def claim(root: Path, max_bytes: int, stands: Callable[[], bool]) -> DecodedRows | None:
    """The decoded rows that readers of a table share, for a reader that begins on a snapshot.

    Args:
        root: the table's folder.
        max_bytes: 1 or more.
        stands: whether no erasure has taken the snapshot's place; asked while none can.

    Returns:
        None where the snapshot does not stand, or the folder cannot be written.
    """
    folder = root / FOLDER
    try:
        with _locked(root):
            if not stands():
                return None
            folder.mkdir(exist_ok=True)
            held = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
            if not held:
                held.append(folder / uuid.uuid4().hex)
                held[0].mkdir()
            return DecodedRows(held[0], max_bytes)
    except (OSError, ThinrowError, SQLAlchemyError):
        # Whatever is wrong, a reader without shared rows finds out by itself, or does without.
        return None


@contextmanager
def nothing_kept(root: Path) -> Iterator[None]:
    """Remove all decoded rows of the table at ``root``, and let no reader claim anew while this runs.

    Raises:
        StoreError: they cannot be removed.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(root))
            _remove(root / FOLDER)
        except OSError as e:
            raise StoreError(f"{root / FOLDER} cannot be removed ({e}); remove it and run again") from e
        yield


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    # Opened for reading: a lock needs no more, and the file may be another user's.
    descriptor = os.open(root / LOCK, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Said, not left to closing: a child that was forked meanwhile has the file open, too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Raises OSError where it cannot be done."""
    for attempt in range(_ATTEMPTS):
        entries = list(folder.iterdir()) if folder.exists() else []
        if not entries:
            with suppress(OSError):
                # Where it is a link, or somebody put a file there again, the empty folder does no harm.
                folder.rmdir()
            return
        for entry in entries:
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink(missing_ok=True)
                continue
            # By the new name no reader finds it: what one is about to write has no place to go.
            gone = folder / f".{uuid.uuid4().hex}"
            entry.rename(gone)
            shutil.rmtree(gone, ignore_errors=attempt < _ATTEMPTS - 1)
    raise OSError(f"files came as fast as they went, {_ATTEMPTS} times")
