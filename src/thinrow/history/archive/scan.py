"""All events of a bucket, user after user, in bounded memory: what compaction and export read.

Worked example: segments with rows of users ``{1: 400, 2: 300}`` and ``{2: 100, 3: 900}``, ``rows_at_once=1,000``. The
piece index alone says that users 1 and 2 have 800 rows together and that user 3 does not fit beside them: two parts,
of users 1 and 2 (those of 2 merged from both segments), and of user 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.users import Users, as_users
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.layout import StoredColumn
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.segment import Segment
from thinrow.history.archive.window import read_everything
from thinrow.jagged import Events

Ints = npt.NDArray[np.int64]

ROWS_AT_ONCE = 1 << 20
_PAGES_AT_ONCE = 64


def scan(
    view: Generation,
    columns: Sequence[StoredColumn],
    *,
    rows_at_once: int = ROWS_AT_ONCE,
    stats: ReadStats | None = None,
) -> Iterator[Events]:
    """All events of the segments of ``view``, which are of one bucket, in parts of whole users.

    Users ascend over all parts; each user's events are merged, in order of (event_ts, arrival), hidden ones included
    and hide-lists applied. A part has at most ``rows_at_once`` rows, or one user. ``stats`` counts what was read.

    Raises:
        InputError: the segments are of more than one bucket.
        CorruptionError, ObjectNotFound: a segment is damaged or gone.
    """
    stats = ReadStats() if stats is None else stats
    for users in users_by_rows(view, rows_at_once):
        yield read_everything(view, users, columns, stats)


def users_by_rows(view: Generation, rows_at_once: int) -> Iterator[Users]:
    """The users of a bucket, ascending, in groups of at most ``rows_at_once`` rows (or one user).

    Raises as ``scan``.
    """
    buckets = {bucket for bucket, _ in view.segments}
    if len(buckets) > 1:
        raise InputError(f"segments of buckets {sorted(buckets)}; scan one bucket after another")
    waiting, held = _none(view), np.empty(0, np.int64)
    for users, rows in _user_rows(view):
        waiting = as_users(np.concatenate([waiting, users]), view.schema.user_kind)
        held = np.concatenate([held, rows])
        ends = np.cumsum(held)
        first = 0
        # The last group is kept back while more may come that fits beside it.
        while first < len(held):
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + rows_at_once, side="right")), first + 1)
            if last == len(held):
                break
            yield waiting[first:last]
            first = last
        waiting, held = waiting[first:], held[first:]
    if len(held):
        yield waiting


def _none(view: Generation) -> Users:
    return as_users([], view.schema.user_kind)


def _user_rows(view: Generation) -> Iterator[tuple[Users, Ints]]:
    """Users, ascending over all parts, and their rows in all segments together."""
    cursors = [_Cursor(view.segment(number)) for number in range(len(view.segments))]
    while True:
        for cursor in cursors:
            cursor.fill()
        ahead = [cursor for cursor in cursors if len(cursor.rows)]
        if not ahead:
            return
        # Of users below the least last key, no segment has more pieces to come.
        open_ends = [cursor.keys[-1] for cursor in ahead if not cursor.done]
        parts = [cursor.take(min(open_ends) if open_ends else None) for cursor in ahead]
        keys = np.concatenate([k for k, _ in parts])
        if not len(keys):
            # One user fills what is held of a segment; its pages are read on.
            least = min(open_ends)
            for cursor in ahead:
                cursor.extend(least)
            continue
        users, place = np.unique(keys, return_inverse=True)
        rows = np.bincount(place, np.concatenate([r for _, r in parts]), len(users)).astype(np.int64)
        yield as_users(users, view.schema.user_kind), rows


class _Cursor:
    """The pieces of one segment from some user on: ``keys`` ascending, with the ``rows`` of each distinct one."""

    def __init__(self, segment: Segment) -> None:
        self._pages = segment.pieces.scan()
        self.done = False
        self.keys: Users = as_users([], segment.user_kind)
        self.rows: Ints = np.empty(0, np.int64)

    def fill(self) -> None:
        """Read on where nothing is held."""
        while not self.done and not len(self.rows):
            self._read()

    def extend(self, key: object) -> None:
        """Read on until something after ``key`` is held, where that is all there is."""
        while not self.done and len(self.rows) and self.keys[-1] == key:
            self._read()

    def take(self, before: Any) -> tuple[Users, Ints]:
        """Let go of the users below ``before`` (of all where None)."""
        n = len(self.rows) if before is None else int(np.searchsorted(self.keys, before))
        taken = self.keys[:n], self.rows[:n]
        self.keys, self.rows = self.keys[n:], self.rows[n:]
        return taken

    def _read(self) -> None:
        pages = list(islice(self._pages, _PAGES_AT_ONCE))
        if not pages:
            self.done = True
            return
        joined: npt.NDArray[Any] = np.concatenate([self.keys, *(keys for _, _, keys in pages if keys is not None)])
        rows = np.concatenate([self.rows, *(records["n_rows"].astype(np.int64) for _, records, _ in pages)])
        fresh = np.flatnonzero(np.append(True, joined[1:] != joined[:-1]))
        self.keys, self.rows = joined[fresh], np.add.reduceat(rows, fresh)
