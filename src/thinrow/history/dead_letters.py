"""Events of a source that could not be taken in, with the reason, until somebody retries or erases them.

Worked example. ``store/dead/`` holds ``letters-00000.jsonl``, one letter a line, its CRC last::

    {"at_ms":...,"how":{"format":"json"},"key":null,"partition":"0","payload":"eyJ1c2...","reason":"user 'u' is null",
     "source":"clicks","user":null,"where":"{\"offset\": 5}","crc32c":2733035711}

A retry writes what is left of the letters to ``letters-00001.jsonl``; the append that takes the others in advances the
position of ``.dead`` from 0 to 1 with them. So whichever of the two a crash leaves, the position says which file holds,
and no letter is taken in twice. A letter that was written again after a crash is one letter when it is read.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from thinrow.core.errors import CorruptionError, StoreError
from thinrow.storage.container import crc_of
from thinrow.storage.objects import make_directory, sync_directory

FOLDER = "dead"
#: The source under whose name the tier keeps the number of the file that holds.
SOURCE = ".dead"
MAX_BYTES = 256 << 20
#: A larger payload is left out: the letter says where its event is.
MAX_PAYLOAD_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Letter:
    """One event that was refused.

    Attributes:
        source, partition, where: which source, which of its partitions, and the position of the event in it.
        reason: why it was refused.
        payload: what the source gave; None where it is no single event (a file that cannot be read), or too large.
        key: of the message, where it has one.
        how: how ``payload`` is decoded: ``{"format": "json"}`` and the like.
        user: as the store would know it; None where the event does not tell.
        at_ms: when it was refused.
        since: the position (text; empty for none) at which the batch began that it was refused in: while the partition
            stands there the batch has not happened, nor the letter. None of letters that somebody added otherwise.
    """

    source: str
    partition: str
    where: str
    reason: str
    payload: bytes | None = None
    key: bytes | None = None
    how: dict[str, str] = field(default_factory=dict)
    user: int | str | None = None
    at_ms: int = 0
    since: str | None = None

    @property
    def name(self) -> tuple[str, str, str]:
        """What makes it this letter."""
        return self.source, self.partition, self.where

    def to_line(self) -> bytes:
        """Its line in the file, the end of the line included."""
        body = asdict(self)
        for part in ("payload", "key"):
            data = body[part]
            body[part] = None if data is None else base64.b64encode(data).decode()
        if self.since is None:
            # As letters were before there was such a thing.
            del body["since"]
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return f'{text[:-1]},"crc32c":{crc_of(text.encode())}}}\n'.encode()

    @classmethod
    def from_line(cls, line: bytes, file: str) -> Letter:
        """Reverse of ``to_line``. Raises CorruptionError on anything else."""
        try:
            body = json.loads(line)
            body.pop("crc32c")
            for part in ("payload", "key"):
                body[part] = None if body[part] is None else base64.b64decode(body[part], validate=True)
            letter = cls(**body)
            if letter.to_line() != line:
                raise ValueError("its CRC or its layout is wrong")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CorruptionError(f"a line is no dead letter: {e}", file=file) from e
        return letter


class DeadLetters:
    """The dead letters of one store. Safe for several processes: each call has the folder to itself."""

    def __init__(self, folder: Path, number: Callable[[], int], max_bytes: int = MAX_BYTES) -> None:
        """``number()`` gives the number of the file that holds, as the tier's position of ``SOURCE`` says."""
        self._folder, self._number, self._max_bytes = folder, number, max_bytes

    def add(self, letters: Sequence[Letter]) -> None:
        """Write letters, durably.

        Raises:
            StoreError: they would be more than ``max_bytes``, or the disk refuses; nothing was written.
        """
        with self.beside() as batch:
            batch.add(letters)

    @contextmanager
    def beside(self) -> Iterator[Beside]:
        """Letters of a batch that is appended meanwhile; others wait from the first letter until the batch is through.

        Raises as ``add``.
        """
        with ExitStack() as stack:
            yield Beside(self._write, lambda: stack.enter_context(self._alone()))

    def withdraw(self, source: str, positions: Callable[[], Mapping[str, str]]) -> int:
        """Remove what batches of ``source`` left that were cut short before they happened, which its partitions'
        positions tell; returns how many. Such a batch is read again, perhaps to be taken in now."""
        if not self._folder.is_dir():
            return 0
        with self._alone() as path:
            stand = positions()
            data = path.read_bytes() if path.exists() else b""
            texts = {"", *stand.values()}
            if not any(f'"since":{json.dumps(text)}'.encode() in data for text in texts):
                return 0
            lines = data.splitlines(keepends=True)
            stays = [line for line in lines if not _has_not_happened(line, path.name, source, stand)]
            if len(stays) < len(lines):
                _replace(path, b"".join(stays))
            return len(lines) - len(stays)

    def _write(self, path: Path, letters: Sequence[Letter]) -> int:
        """Append to the file, durably; returns how long it was before."""
        data = _lines([_without_bulk(letter) for letter in letters])
        with _told(self._folder):
            held = path.stat().st_size if path.exists() else 0
            if held + len(data) > self._max_bytes:
                raise StoreError(
                    f"dead letters in {self._folder} have {held} bytes and {len(data)} more are due; at most "
                    f"{self._max_bytes} are kept: mend what is refused, then `thinrow sources retry`, or `drop`"
                )
            # Unbuffered, so that what was refused is not written again when the file is closed.
            with path.open("ab", buffering=0) as file:
                # What a killed writer began is no letter.
                if held and not _ends_whole(path):
                    held = file.truncate(_whole(path))
                try:
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) :]
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(held)
                    raise
            sync_directory(self._folder)
            return held

    def read(self) -> list[Letter]:
        """All letters, oldest first, each once. Raises CorruptionError."""
        if not self._folder.is_dir():
            return []
        with self._alone() as path:
            return _read(path)

    def count(self) -> int:
        """How many there are."""
        return len(self.read())

    def erase(self, goes: Callable[[Letter], bool]) -> int:
        """Remove letters for which ``goes``, damaged ones too, with every older file; returns how many went."""
        if not self._folder.is_dir():
            return 0
        with self._alone() as path:
            stays, gone = [], 0
            for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
                try:
                    if not goes(Letter.from_line(line, path.name)):
                        stays.append(line)
                        continue
                except CorruptionError:
                    pass
                gone += 1
            if gone:
                _replace(path, b"".join(stays))
            self._sweep(path)
            return gone

    @contextmanager
    def retrying(self) -> Iterator[Retry]:
        """Take letters out, with nobody else at them; see ``Retry``."""
        with self._alone() as path:
            number = self._number()
            yield Retry(_read(path), number, lambda rest: _replace(self._path(number + 1), _lines(rest)))
            self._sweep(self._path(self._number()))

    def _path(self, number: int) -> Path:
        return self._folder / f"letters-{number:05d}.jsonl"

    @contextmanager
    def _alone(self) -> Iterator[Path]:
        """The file that holds; other calls, of other processes too, wait."""
        make_directory(self._folder)
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self._path(self._number())

    def _sweep(self, holds: Path) -> None:
        """Remove all files but the one that holds."""
        for path in self._folder.glob("letters-*"):
            if path != holds:
                path.unlink()
        sync_directory(self._folder)


class Beside:
    """Letters of one batch; see ``DeadLetters.beside``."""

    def __init__(self, write: Callable[[Path, Sequence[Letter]], int], enter: Callable[[], Path]) -> None:
        """``enter`` shuts out others and gives the file."""
        self._write, self._enter = write, enter
        self._path: Path | None = None
        self._began = 0

    def add(self, letters: Sequence[Letter]) -> None:
        """As ``DeadLetters.add``."""
        if not letters:
            return
        if self._path is None:
            path = self._enter()
            self._began = self._write(path, letters)
            self._path = path
        else:
            self._write(self._path, letters)

    def drop(self) -> None:
        """The batch has not happened, for certain: nor have its letters."""
        if self._path is not None:
            with _told(self._path.parent), self._path.open("ab") as file:
                file.truncate(self._began)


@dataclass(frozen=True, slots=True)
class Retry:
    """Letters that are tried again.

    Attributes:
        letters: all that there are.
        number: of the file that they are in.
        leave: writes the letters that stay, as file ``number + 1``. It holds once an append has advanced ``SOURCE``
            from ``number`` to that; until then it may be called again.
    """

    letters: list[Letter]
    number: int
    leave: Callable[[Sequence[Letter]], None]


def of_users(users: Collection[Any]) -> Callable[[Letter], bool]:
    """Whether a letter is of one of ``users``, or may be, for all that can be told."""
    return lambda letter: letter.user is None or letter.user in users


def older_than(at_ms: int) -> Callable[[Letter], bool]:
    """Whether a letter was written before ``at_ms``."""
    return lambda letter: letter.at_ms < at_ms


def _without_bulk(letter: Letter) -> Letter:
    if letter.payload is None or len(letter.payload) <= MAX_PAYLOAD_BYTES:
        return letter
    return replace(letter, payload=None)


def _lines(letters: Sequence[Letter]) -> bytes:
    return b"".join(letter.to_line() for letter in letters)


def _read(path: Path) -> list[Letter]:
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    found: dict[tuple[str, str, str], Letter] = {}
    for line in whole:
        letter = Letter.from_line(line, path.name)
        found.setdefault(letter.name, letter)
    return list(found.values())


def _has_not_happened(line: bytes, file: str, source: str, stand: Mapping[str, str]) -> bool:
    try:
        letter = Letter.from_line(line, file)
    except CorruptionError:
        return False
    return letter.source == source and letter.since is not None and letter.since == stand.get(letter.partition, "")


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _whole(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    with _told(path.parent):
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        sync_directory(path.parent)


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """What the operating system refuses, as a StoreError."""
    try:
        yield
    except OSError as e:
        raise StoreError(
            f"dead letters in {folder} cannot be written: {e.strerror or e}; free space or check permissions, and go on"
        ) from e
