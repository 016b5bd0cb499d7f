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

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from thinrow.core.errors import CorruptionError, InputError, StoreError, ThinrowError

_FORMAT = 1
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
        rows: how many rows cannot be read; 1 for an example.
        request_id, user: of the example; None where the row itself cannot be read.
        error: name of the error's type.
        message: what it said.
    """

    split: int
    row: int
    rows: int
    request_id: int | None
    user: int | str | None
    error: str
    message: str


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


def told(error: Exception) -> dict[str, str]:
    """What ``Poisoned`` says of an error."""
    return {"error": type(error).__name__, "message": str(error)[:_MAX_TEXT]}


class QuarantineFile:
    """The file of a ``Quarantine``: what it holds already is not written again, in another epoch or a resumed run."""

    def __init__(self, path: str | Path) -> None:
        """Raises InputError: the file is something else, or its folder is not there."""
        self._path = Path(path)
        self._held: set[tuple[int, int]] = set()
        if not self._path.parent.is_dir():
            raise InputError(f"no folder {self._path.parent} for the quarantine file {self._path.name}; make it first")
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            # What a killed run or a full disk left of a line is passed over, wherever the next run went on behind it.
            with suppress(ValueError, KeyError, TypeError):
                held: dict[str, Any] = json.loads(line)
                self._held.add((held["split"], held["row"]))
        if len(lines) > 1 and not self._held:
            raise InputError(f"no line of {self._path} is a quarantined example; name another file for them")

    def add(self, found: Iterable[Poisoned]) -> None:
        """Append those that are new. Raises OSError."""
        new = [p for p in found if (p.split, p.row) not in self._held]
        if not new:
            return
        text = "".join(json.dumps({"format": _FORMAT, **asdict(p)}) + "\n" for p in new)
        with self._path.open("ab") as file:
            # Behind a torn line a new one begins.
            torn = file.tell() and self._last_byte() != b"\n"
            file.write(b"\n" * bool(torn) + text.encode())
            file.flush()
            os.fsync(file.fileno())
        self._held |= {(p.split, p.row) for p in new}

    def _last_byte(self) -> bytes:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read()
