"""Hidden entries of a folder that are gone when their owner is: how a folder is written, and removed, in one rename.

Worked example::

    with scratch(folder) as path:      # .tmp-3f… does not exist yet; .tmp-3f….lock is held
        path.mkdir()                   # write into it, sync it
        path.rename(folder / "ready")  # visible at once and whole
                                       # what is still at path is removed, then the lock

A killed owner leaves both entries, but no lock: the operating system has let go of it. ``sweep`` removes those and only
those, since it takes the lock first. It holds among the processes of one machine and, where the file system shares
locks, of all; where there are no locks at all, nothing is swept.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX, _SUFFIX = ".tmp-", ".lock"


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A path in ``folder`` that nothing else uses and no ``sweep`` touches; whatever is at it in the end is removed."""
    path, lock, descriptor = _claim(folder)
    try:
        yield path
    finally:
        try:
            _remove(path, lock)
        finally:
            os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove what killed owners left in ``folder``, and nothing of a live one."""
    for lock in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            # A live owner holds it; or there are no locks here, and nobody can tell.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock.with_suffix(""), lock)
        except OSError:
            continue
        finally:
            os.close(descriptor)


def _claim(folder: Path) -> tuple[Path, Path, int]:
    while True:
        path = folder / f"{_PREFIX}{uuid.uuid4().hex}"
        lock = path.with_suffix(_SUFFIX)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        # Some file systems have no locks; there sweep removes nothing, so none is needed.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # A sweep may have come between the creation and the lock: then the name is gone.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return path, lock, descriptor
        os.close(descriptor)


def _remove(path: Path, lock: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
    with suppress(FileNotFoundError):
        lock.unlink()
