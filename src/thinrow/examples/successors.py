"""Which rows of earlier snapshots of a training table an erasure took, so that their readers can go on in the new one.

Worked example. Snapshot 11 has 6 rows in bucket 0; an erasure takes rows 1 and 2 and makes snapshot 12, a second one
takes row 1 of snapshot 12, which is row 3 of snapshot 11, and makes 13. Snapshot 13 says::

    {"11": {"0": [[1, 3]]}, "12": {"0": [[1, 1]]}}        first row and number of rows of each run

A reader of 11 reads rows 0, 4 and 5 of it as rows 0, 1 and 2 of 13. Positions are not what was erased.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pyiceberg.table.snapshots import Snapshot

from thinrow.core.errors import CorruptionError

Ints = npt.NDArray[np.int64]

#: Key of a snapshot's summary.
SUCCEEDS = "thinrow.succeeds"
#: Key in the summary of every snapshot that an erasure made: no snapshot before it stands.
ERASED = "thinrow.erased"
_MOST = 8


class Successors:
    """What the newest snapshot says of the ones before it, and what an erasure adds to that.

    Attributes:
        changed: whether any file changed.
    """

    def __init__(self, before: dict[int, dict[int, Ints]]) -> None:
        self._before = before
        self._lost: dict[int, Ints] = {}
        self._in_order = True
        self.changed = False

    @classmethod
    def of(cls, snapshot: Snapshot | None) -> Successors:
        """What a snapshot says. Raises CorruptionError where that cannot be read."""
        summary: Any = None if snapshot is None else snapshot.summary
        text = None if summary is None else summary.additional_properties.get(SUCCEEDS)
        if text is None:
            return cls({})
        try:
            return cls(
                {int(s): {int(b): _rows(runs) for b, runs in gone.items()} for s, gone in json.loads(text).items()}
            )
        except (ValueError, TypeError, AttributeError) as e:
            raise CorruptionError(f"its entry {SUCCEEDS} is unreadable: {e}", file="the newest snapshot") from e

    def lose(self, bucket: int, n_rows: int, kept: Ints, *, in_order: bool) -> None:
        """Of a file of ``n_rows`` rows only those at ``kept`` (ascending) stay; ``in_order`` where it is all of its
        bucket and its rows keep their order, without which no reader of an earlier snapshot can go on."""
        self.changed = True
        self._in_order &= in_order
        self._lost[bucket] = np.delete(np.arange(n_rows), kept)

    def find(self, snapshot_id: int) -> dict[int, Ints] | None:
        """By bucket, the positions in ``snapshot_id`` of the rows that are gone; None where it is no predecessor."""
        return self._before.get(snapshot_id)

    def after(self, snapshot_id: int | None) -> dict[str, str]:
        """The entries of the snapshot that comes after ``snapshot_id``."""
        if snapshot_id is None or not self._in_order:
            return {ERASED: "true"}
        lifted = {
            old: {b: _lift(gone.get(b), self._lost.get(b)) for b in {*gone, *self._lost}}
            for old, gone in list(self._before.items())[1 - _MOST :]
        }
        lifted[snapshot_id] = self._lost
        told = json.dumps({s: {b: _runs(r) for b, r in g.items()} for s, g in lifted.items()})
        return {ERASED: "true", SUCCEEDS: told}


def stands(snapshots: Sequence[Snapshot], snapshot_id: int) -> bool:
    """Whether a snapshot is there and no erasure came after it; ``snapshots``: all of the table."""
    order = {s.snapshot_id: s.sequence_number or 0 for s in snapshots}
    erased = [s.sequence_number or 0 for s in snapshots if s.summary and ERASED in s.summary.additional_properties]
    return snapshot_id in order and order[snapshot_id] >= max(erased, default=0)


def _lift(gone: Ints | None, lost: Ints | None) -> Ints:
    """Positions in an old snapshot of what was ``gone`` before and of what is ``lost`` by its position now."""
    gone = np.empty(0, np.int64) if gone is None else gone
    if lost is None or not len(lost):
        return gone
    # Row r of what is left is the r-th row that is not gone: each gap before it moves it on by one.
    lost = lost + np.searchsorted(gone - np.arange(len(gone)), lost, side="right")
    return np.sort(np.concatenate([gone, lost]))


def _runs(rows: Ints) -> list[list[int]]:
    parts = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return [[int(part[0]), len(part)] for part in parts if len(part)]


def _rows(runs: list[list[int]]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *(np.arange(a, a + n) for a, n in runs)])
