"""Power cuts, simulated: record every change of files in a folder, then rebuild what a disk may hold after a cut.

::

    with Recorder(folder) as disk:
        objects.put("a/1", b"data")
        disk.mark("put returned")
    for n in range(len(disk.operations) + 1):
        for after in disk.cuts(n, random.Random(n)):
            after.write(elsewhere)              # and open it: what was acknowledged must be there

The model is that of POSIX, which is weaker than that of the usual file systems: data is sure to be there after an
fsync of the file, a name after an fsync of its directory. Whatever came since may be there or not: the data whole, cut
off or not at all, and any of the names. Worked trace of ``put``: create ``.tmp-x``, write 4 bytes, fsync it, rename to
``1``, fsync the directory. A cut before the last step leaves ``1`` with its 4 bytes, or nothing; never an empty ``1``,
as it could without the first fsync.

What writes by itself, such as LMDB, is recorded as a whole by ``keep``: files as they are when a call has returned.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinrow.storage import swap

_PATCHED = ("open", "write", "fsync", "link", "rename", "replace", "unlink", "mkdir", "close")
#: Stands for both names while two folders change theirs.
_ASIDE = Path("/aside")


@dataclass(frozen=True, slots=True)
class Operation:
    """One system call that changed something, or a mark. ``target`` is a path or the number of a file."""

    kind: str
    target: Any
    data: Any = None


@dataclass(slots=True)
class _File:
    synced: bytes = b""
    pending: bytes = b""


@dataclass(slots=True)
class Disk:
    """What a disk holds: contents by path, and what was recorded whole."""

    files: dict[Path, bytes]
    kept: dict[Path, bytes]
    marks: list[Any] = field(default_factory=list)

    def write(self, root: Path, to: Path) -> None:
        """Make it a folder ``to``, in place of the recorded folder ``root``."""
        for path, data in (*self.files.items(), *self.kept.items()):
            target = to / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


class Recorder:
    """Records what this process changes below ``root`` through ``os`` and ``storage.swap``; one at a time, from any
    thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self._real: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._files = 0
        self._names: dict[Path, int] = {}
        self._open: dict[int, int | Path] = {}

    def mark(self, what: Any) -> None:
        """Note that something has been acknowledged."""
        with self._lock:
            self.operations.append(Operation("mark", what))

    def keep(self, path: Path) -> None:
        """Record a file as it is now."""
        with self._lock:
            self.operations.append(Operation("keep", path, path.read_bytes()))

    def __enter__(self) -> Recorder:
        for name in _PATCHED:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._patched(name, self._real[name]))
        self._swap = swap.folders
        swap.folders = self._patched("swap", self._swap)
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        swap.folders = self._swap

    def _patched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        note = getattr(self, f"_on_{name}")

        def call(*args: Any, **named: Any) -> Any:
            with self._lock:
                result = real(*args, **named)
                note(result, *args)
                return result

        return call

    def _inside(self, path: Any) -> Path | None:
        if not isinstance(path, str | os.PathLike):
            return None
        found = Path(os.fspath(path))
        return found if found.is_relative_to(self.root) else None

    def _note(self, kind: str, target: Any, data: Any = None) -> None:
        self.operations.append(Operation(kind, target, data))

    def _on_open(self, descriptor: int, path: Any, flags: int = 0, *_: Any) -> None:
        inside = self._inside(path)
        if inside is None:
            return
        if flags & os.O_DIRECTORY:
            self._open[descriptor] = inside
        elif flags & os.O_CREAT:
            self._files += 1
            self._names[inside] = self._open[descriptor] = self._files
            self._note("name", inside, self._files)

    def _on_write(self, written: int, descriptor: int, data: Any) -> None:
        if isinstance(number := self._open.get(descriptor), int):
            self._note("write", number, bytes(memoryview(data).cast("B")[:written]))

    def _on_fsync(self, _: None, descriptor: int) -> None:
        if descriptor in self._open:
            self._note("fsync", self._open[descriptor])

    def _on_close(self, _: None, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def _on_link(self, _: None, source: Any, target: Any, *__: Any) -> None:
        if (old := self._inside(source)) is not None and (new := self._inside(target)) is not None:
            self._names[new] = self._names[old]
            self._note("name", new, self._names[new])

    def _on_replace(self, _: None, source: Any, target: Any, *__: Any) -> None:
        if (old := self._inside(source)) is None or (new := self._inside(target)) is None:
            return
        if old in self._names:
            self._names[new] = self._names.pop(old)
            self._note("rename", new, (old, self._names[new]))
        else:
            _rename_folder(self._names, old, new)
            self._note("rename folder", new, old)

    _on_rename = _on_replace

    def _on_swap(self, done: bool, one: Any, other: Any) -> None:
        if not done or (one := self._inside(one)) is None or (other := self._inside(other)) is None:
            return
        _swap_folders(self._names, one, other)
        self._note("swap", other, one)

    def _on_unlink(self, _: None, path: Any, *__: Any) -> None:
        if (inside := self._inside(path)) is not None and self._names.pop(inside, None) is not None:
            self._note("unlink", inside)

    def _on_mkdir(self, _: None, path: Any, *__: Any) -> None:
        if (inside := self._inside(path)) is not None:
            self._note("mkdir", inside)

    def cuts(self, n: int, rng: random.Random, torn: int = 1) -> Iterator[Disk]:
        """What a disk may hold after a cut that lets only the first ``n`` operations happen.

        Nothing that was not synced; all of it; names without data; data without names; ``torn`` random mixtures.
        """
        for data, names in ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0), *[(0.5, 0.5)] * torn):
            yield self._after(n, data, names, rng)

    def _after(self, n: int, data: float, names: float, rng: random.Random) -> Disk:
        files: dict[int, _File] = {}
        sure: dict[Path, int] = {}
        folders = {self.root}
        pending: list[Operation] = []
        disk = Disk({}, {})
        for op in self.operations[:n]:
            if op.kind == "mark":
                disk.marks.append(op.target)
            elif op.kind == "keep":
                disk.kept[op.target] = op.data
            elif op.kind == "write":
                files.setdefault(op.target, _File()).pending += op.data
            elif op.kind == "fsync" and isinstance(op.target, int):
                file = files.setdefault(op.target, _File())
                file.synced, file.pending = file.synced + file.pending, b""
            elif op.kind == "fsync":
                for done in [p for p in pending if p.target.parent == op.target]:
                    _apply(done, sure, folders)
                pending = [p for p in pending if p.target.parent != op.target]
            else:
                pending.append(op)
        for op in pending:
            if rng.random() < names:
                _apply(op, sure, folders)
        for path, number in sure.items():
            if path.parent in folders:
                file = files.get(number, _File())
                kept = len(file.pending) if data == 1 else rng.randrange(len(file.pending) + 1) if data else 0
                disk.files[path] = file.synced + file.pending[:kept]
        return disk


def _rename_folder(files: dict[Path, int], old: Path, new: Path) -> None:
    for path in [p for p in files if p.is_relative_to(old)]:
        files[new / path.relative_to(old)] = files.pop(path)


def _swap_folders(files: dict[Path, int], one: Path, other: Path) -> None:
    for old, new in ((one, _ASIDE), (other, one), (_ASIDE, other)):
        _rename_folder(files, old, new)


def _apply(op: Operation, sure: dict[Path, int], folders: set[Path]) -> None:
    if op.kind == "mkdir":
        if op.target.parent in folders:
            folders.add(op.target)
    elif op.kind == "unlink":
        sure.pop(op.target, None)
    elif op.kind == "rename folder":
        if op.data in folders:
            folders.remove(op.data)
            folders.add(op.target)
            _rename_folder(sure, op.data, op.target)
    elif op.kind == "swap":
        if {op.data, op.target} <= folders:
            _swap_folders(sure, op.data, op.target)
    elif op.kind == "rename":
        sure.pop(op.data[0], None)
        sure[op.target] = op.data[1]
    else:
        sure[op.target] = op.data
