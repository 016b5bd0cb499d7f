"""Changes: which rows of a table are not what they were at a mark, and which keys are gone since.

With keys 7, 8 and 9 in rows 0 to 2 at the mark, an update of key 8 and the eviction of key 7, whose place key 9 takes:
``rows()`` is [0, 1], for row 0 holds another key now, and ``gone()`` is [7]. That each row is noted by its place makes
growth, moves, and a key that goes and comes back one and the same thing: a row was written.

It costs two bytes a row and a write for each row of a step, and nothing where nobody tracks a table.

A delta also says what it is taken from: ``places`` of the mark, a number of which keys are in which rows, and how many
marks came before, so that deltas that are replayed in another order are refused.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from thinrow.core.wrap import MASK64, mix64_words

Ints = npt.NDArray[np.int64]

_MIN_ROWS = 1024
#: Keys that are hashed at a time.
_PART = 65_536


class Base(Protocol):
    """A saved state, as ``thinrow.checkpoints.Version``."""

    @property
    def step(self) -> int: ...

    @property
    def crc32c(self) -> int: ...


class Changes:
    """Made by ``DynamicTable.track``, which also tells it what happens; a table may have several.

    Attributes:
        marked_rows: rows of the table at the mark.
        whole: names of row states in which rows changed that are not noted.
        base: the checkpoint or export that has the table as it was at the mark, where one was saved; deltas name it.
        marked_places: ``places`` of the keys at the mark.
        marks: how many there were before this one.
    """

    def __init__(self, keys: Ints) -> None:
        """``keys``: of the table's rows now, at the mark."""
        self._n = self.marked_rows = len(keys)
        self._places = self.marked_places = places(keys)
        self.marks = 0
        self._changed = np.zeros(max(len(keys), _MIN_ROWS), np.bool_)
        self._new = np.zeros_like(self._changed)
        self._gone: list[Ints] = []
        self.whole: set[str] = set()
        self.base: Base | None = None

    def mark(self, base: Base | None = None) -> None:
        """Changes count from now on. ``base``: what was saved of the table as it is now; or set ``base`` once it is."""
        self.base = base
        self._changed[: self._n] = False
        self._new[: self._n] = False
        self._gone.clear()
        self.whole.clear()
        self.marked_rows, self.marked_places = self._n, self._places
        self.marks += 1

    def rows(self) -> Ints:
        """(d,) rows that changed, ascending."""
        return np.flatnonzero(self._changed[: self._n])

    def gone(self) -> Ints:
        """Keys of the mark that lost their row since, ascending; some may have one again."""
        return np.sort(np.concatenate([np.empty(0, np.int64), *self._gone]))

    def grew(self, keys: Ints) -> None:
        """New rows were added at the end, of ``keys``."""
        n_rows = self._n + len(keys)
        self._places = (self._places + places(keys, self._n)) & MASK64
        while n_rows > len(self._changed):
            nothing = np.zeros_like(self._changed)
            self._changed = np.concatenate([self._changed, nothing])
            self._new = np.concatenate([self._new, nothing])
        self._changed[self._n : n_rows] = True
        self._new[self._n : n_rows] = True
        self._n = n_rows

    def touched(self, rows: Ints) -> None:
        """``rows``, none of them negative, were written."""
        self._changed[rows] = True

    def dropped(self, keys: Ints, gone: npt.NDArray[np.bool_], source: Ints, target: Ints, moved: Ints) -> None:
        """The rows ``gone``, which held ``keys``, went, and rows ``source``, of keys ``moved``, took the places
        ``target``."""
        left = places(keys, np.flatnonzero(gone)) + places(moved, source)
        self._places = (self._places - left + places(moved, target)) & MASK64
        # A key that came after the mark and went again is nobody's loss.
        self._gone.append(keys[~self._new[: self._n][gone]])
        self._new[target] = self._new[source]
        self._changed[target] = True
        # What is noted of rows beyond the end is written over when the table grows again.
        self._n -= int(gone.sum())


def places(keys: Ints, rows: Ints | int = 0) -> int:
    """The sum modulo 2^64 of a hash of each key and its row: of tables that differ in either it is another one.
    ``rows`` (n,), or the first of rows that follow each other."""
    total = 0
    for at in range(0, len(keys), _PART):
        part = keys[at : at + _PART]
        held = np.arange(rows + at, rows + at + len(part)) if isinstance(rows, int) else rows[at : at + _PART]
        total += int(mix64_words(mix64_words(held.astype(np.uint64)) ^ part.view(np.uint64)).sum(dtype=np.uint64))
    return total & MASK64
