"""Poison: examples that cannot be made, however often it is tried; found by halving, left out, counted, written down.

Worked trace, a base batch of rows 0 to 7, the history of row 5 is damaged::

    0-7 raises CorruptionError    0-3 is made    4-7 raises    4-5 raises    4 is made    5 raises alone: poisoned
                                                               6-7 is made
    rows 0-4, 6, 7 are delivered, in this order; 5 is reported

So what is left out depends on the rows alone, not on how they were read together, and no boundary of a batch moves. Not
poison is what may be over soon, or is not the example's: a store that cannot be reached, a file that is missing,
memory, arguments.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CorruptionError, InputError, StoreError, ThinrowError
from thinrow.dpp.row_filter import RowFilter

Ints = npt.NDArray[np.int64]

_FORMAT = 2
_MAX_TEXT = 2_000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Leave poisoned examples out, and write each down once, as a line of JSON.

    Attributes:
        path: of the file; appended to. Ranks may share it.
    """

    path: str | Path


#: What becomes of examples that cannot be made: raise; leave out and count; and write down.
OnPoison: TypeAlias = Literal["fail", "skip"] | Quarantine


def check_poison(on_poison: object) -> None:
    """Raises InputError where it is no policy."""
    if not isinstance(on_poison, Quarantine) and on_poison not in ("fail", "skip"):
        raise InputError(f"on_poison={on_poison!r}; it must be 'fail', 'skip' or thinrow.dpp.Quarantine(path)")


@dataclass(frozen=True, slots=True)
class Poisoned:
    """An example that was left out, or rows of a table that cannot be read.

    Attributes:
        split, row: where the example is: its bucket, and its place among the rows that are read of it.
        rows: how many rows from there cannot be read, those of a base batch; 1 for an example.
        request_id, user: of the example; None where the row itself cannot be read.
        error: name of the error's type.
        message: what it said.
        left_out: how many examples of a reader's batches that is. Base batches are cut into batches and over ranks.
    """

    split: int
    row: int
    rows: int
    request_id: int | None
    user: int | str | None
    error: str
    message: str
    left_out: int = 1

    def among(self, rows: Ints) -> int:
        """How many of these rows of its split it is, or covers."""
        return int(np.count_nonzero((rows >= self.row) & (rows < self.row + self.rows)))


def poisoned_by(error: Exception) -> bool:
    """Whether an error of making examples is the examples' own."""
    if isinstance(error, ThinrowError):
        return isinstance(error, CorruptionError)
    return not isinstance(error, (OSError, MemoryError, StoreError))


def halve(make: Callable[[int, int], T], first: int, stop: int, poisoned: Callable[[int, Exception], None]) -> list[T]:
    """``make`` of ranges that are made, in order; ``poisoned`` gets each row that is not, with its error.

    Raises whatever ``make`` raises that is no poison, and also what it raises for no rows.
    """
    try:
        return [make(first, stop)]
    except Exception as e:
        if not poisoned_by(e) or stop <= first:
            raise
        if stop - first == 1:
            poisoned(first, e)
            return []
    middle = (first + stop) // 2
    return halve(make, first, middle, poisoned) + halve(make, middle, stop, poisoned)


def told(error: Exception) -> tuple[str, str]:
    """What ``Poisoned`` says of an error."""
    return type(error).__name__, str(error)[:_MAX_TEXT]


class QuarantineFile:
    """The file of a ``Quarantine``: what it holds already is not written again, in another epoch, a resumed run or at
    another rank. An example is known by request and user; rows that cannot be read by snapshot, filter and place.

    Args:
        path: of the file.
        snapshot_id, rows: of the run; they go into each line, since rows are counted in what they leave.
    """

    def __init__(self, path: str | Path, snapshot_id: int = 0, rows: RowFilter | None = None) -> None:
        """Raises InputError: the file is something else, or its folder is not there."""
        self._path = Path(path)
        self._run = {"snapshot_id": snapshot_id, "filter": asdict(rows or RowFilter())}
        self._held: set[str] = set()
        self._seen = 0
        if not self._path.parent.is_dir():
            raise InputError(f"no folder {self._path.parent} for the quarantine file {self._path.name}; make it first")
        lines = 0
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            lines = self._take_in(file)
        if lines > 1 and not self._held:
            raise InputError(f"no line of {self._path} is a quarantined example; name another file for them")

    def add(self, found: Iterable[Poisoned]) -> None:
        """Append those that are new. Raises OSError."""
        lines = {_key(line): line for line in (self._line(p) for p in found)}
        if lines.keys() <= self._held:
            return
        with self._path.open("a+b") as file:
            # Where the file system knows no locks, ranks may write the same twice.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            self._take_in(file)
            new = {k: line for k, line in lines.items() if k not in self._held}
            if not new:
                return
            torn = file.tell() and self._last_byte(file) != b"\n"
            # Behind a torn line a new one begins.
            file.write(b"\n" * bool(torn) + "".join(json.dumps(line) + "\n" for line in new.values()).encode())
            file.flush()
            os.fsync(file.fileno())
            self._seen = file.tell()
        self._held |= new.keys()

    def _line(self, one: Poisoned) -> dict[str, Any]:
        told = asdict(one)
        del told["left_out"]
        return {"format": _FORMAT, **told, **self._run}

    def _take_in(self, file: IO[bytes]) -> int:
        """What others, and earlier runs, have written since; how many lines."""
        file.seek(self._seen)
        data = file.read()
        self._seen += len(data)
        lines = data.splitlines()
        for line in lines:
            # What a killed run or a full disk left of a line is passed over, wherever the next run went on behind it.
            with suppress(ValueError, KeyError, TypeError):
                self._held.add(_key(json.loads(line)))
        return len(lines)

    @staticmethod
    def _last_byte(file: IO[bytes]) -> bytes:
        file.seek(-1, os.SEEK_END)
        return file.read()


def _key(line: dict[str, Any]) -> str:
    """What a line is known by. Those of format 1 say nothing of snapshot and filter. Raises KeyError."""
    if line["request_id"] is not None:
        return json.dumps([line["request_id"], line["user"]])
    place = [line["split"], line["row"], line["rows"]]
    return json.dumps([line.get("snapshot_id"), line.get("filter"), place], sort_keys=True)
