"""Rewrite the segments of a bucket without some arrivals of some users, and say which tombstones that leaves.

Worked example. Segments A (users 7 and 9), B (user 9) and C (user 11); events 3 and 4 of user 9 go, of which A holds 3
and B holds 4 alone::

    A -> A'   the rows of 7 and 9 but one; its digests are those of A less those of event 3
    B -> -    no row is left
    C         untouched: nobody is in it of whom anything goes
    tombstone of user 9: [3, 4], n 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.ragged import offsets_of
from thinrow.core.users import Users
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.hides import Hides
from thinrow.history.archive.layout import SegmentInfo, stored_columns
from thinrow.history.archive.lookup import Ints, look_up
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.scan import ROWS_AT_ONCE, scan
from thinrow.history.archive.tombstones import Tombstones
from thinrow.history.archive.window import read_everything
from thinrow.history.archive.writer import SegmentWriter, content_digests
from thinrow.history.buckets import new_name
from thinrow.history.proof import digests_of, minus, prove
from thinrow.jagged import Events
from thinrow.schema.event_schema import KEYS_GROUP

_USERS_AT_ONCE = 8_192


@dataclass(frozen=True, slots=True)
class Doomed:
    """What is to go: the arrivals that ``graves`` cover, of ``users`` (U,), distinct, ascending, of one bucket."""

    users: Users
    graves: Tombstones

    def rows(self, events: Events) -> Ints:
        """(E,) the grave that each event goes to, -1 for those that stay."""
        at, known = self._place(events.users)
        return self._find(np.repeat(at, events.lengths), np.repeat(known, events.lengths), events.arrival)

    def hides(self, hides: Hides) -> npt.NDArray[np.bool_]:
        """(H,) whether the event that each hide names goes."""
        at, known = self._place(hides.users)
        per = np.diff(hides.offsets)
        names = np.ascontiguousarray(hides.records["arrival"], np.int64)
        return self._find(np.repeat(at, per), np.repeat(known, per), names) >= 0

    def _find(self, at: Ints, known: npt.NDArray[np.bool_], arrival: Ints) -> Ints:
        found = np.full(len(arrival), -1, np.int64)
        some = np.flatnonzero(known)
        found[some] = self.graves.record_of(at[some], arrival[some])
        return found

    def _place(self, users: Users) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Row among ``self.users`` of each of ``users``, and whether it is there."""
        if not len(self.users):
            return np.zeros(len(users), np.int64), np.zeros(len(users), np.bool_)
        at = np.minimum(np.searchsorted(self.users, users), len(self.users) - 1).astype(np.int64)
        return at, np.asarray(self.users[at] == users, np.bool_)


@dataclass(frozen=True, slots=True)
class Burial:
    """What became of a bucket: its new list of ``segments``, the names of those that were ``written``, how many events
    went to each grave (``counts``), and how many rows were written anew."""

    segments: list[SegmentInfo]
    written: list[str]
    counts: Ints
    rewritten: int


def count_doomed(base: Generation, bucket: int, doomed: Doomed) -> Burial:
    """What ``bury_bucket`` would do, without doing it: nothing is written."""
    return _bury(base, bucket, doomed, dry_run=True)


def bury_bucket(base: Generation, bucket: int, doomed: Doomed) -> Burial:
    """Write anew the segments of a bucket that hold, or name in a hide, an event that goes.

    Raises:
        CorruptionError: a segment is damaged, or what was written is not what should be left; restore it first, for
            its survivors cannot be told from what goes.
    """
    return _bury(base, bucket, doomed, dry_run=False)


def _bury(base: Generation, bucket: int, doomed: Doomed, *, dry_run: bool) -> Burial:
    counts = np.zeros(len(doomed.graves), np.int64)
    segments: list[SegmentInfo] = []
    written: list[str] = []
    rewritten = 0
    try:
        for number in base.segments_of(bucket):
            info, view = base.segments[number][1], base.only([number])
            found = _count(view, doomed)
            counts += found
            if not found.sum() and not doomed.hides(view.segment(0).hides).any():
                segments.append(info)
                continue
            rewritten += info.n_rows - int(found.sum())
            if not dry_run and (left := _rewrite(base, view, bucket, doomed)) is not None:
                segments.append(left)
                written.append(left.name)
    except BaseException:
        for name in written:
            base.objects.delete(name)
        raise
    return Burial(segments, written, counts, rewritten)


def _count(view: Generation, doomed: Doomed) -> Ints:
    """How many events of a segment go to each grave: the keys of the users concerned are read, no more."""
    counts = np.zeros(len(doomed.graves), np.int64)
    for a in range(0, len(doomed.users), _USERS_AT_ONCE):
        users = doomed.users[a : a + _USERS_AT_ONCE]
        users = users[np.flatnonzero(np.diff(look_up(view, users).piece_off))]
        if len(users):
            grave = doomed.rows(read_everything(view, users, [], ReadStats()))
            counts += np.bincount(grave[grave >= 0], minlength=len(counts))
    return counts


def _rewrite(base: Generation, view: Generation, bucket: int, doomed: Doomed) -> SegmentInfo | None:
    """The segment without what goes; None where nothing is left of it."""
    columns = [c for c in stored_columns(base.schema) if c.group != KEYS_GROUP]
    expected, name = digests_of(view), new_name(bucket)
    hides = view.segment(0).hides
    lasting = _without(hides, doomed.hides(hides))
    rows = 0
    with SegmentWriter(base.objects, name, base.schema, bucket=bucket, n_buckets=base.n_buckets) as writer:
        for events in scan(view, columns, rows_at_once=ROWS_AT_ONCE):
            goes = doomed.rows(events) >= 0
            expected = minus(expected, content_digests(_take(events, goes), base.schema))
            left = _take(events, ~goes)
            rows += len(left)
            writer.add(left)
        if not rows and not len(lasting.records):
            return None
        new = writer.finish(lasting)
    prove(base, expected, [new], "erasing", name)
    return new


def _take(events: Events, keep: npt.NDArray[np.bool_]) -> Events:
    """The events to keep, and the users that have any."""
    kept = offsets_of(keep)[events.offsets]
    lengths = np.diff(kept)
    some = np.flatnonzero(lengths)
    taken = events.take_rows(np.flatnonzero(keep), kept)
    users: Any = events.users[some]
    return Events(users, offsets_of(lengths[some]), taken.event_ts, taken.arrival, taken.hidden_from, taken.columns)


def _without(hides: Hides, goes: npt.NDArray[np.bool_]) -> Hides:
    kept = offsets_of(~goes)[hides.offsets]
    some = np.flatnonzero(np.diff(kept))
    return Hides(hides.users[some], np.append(kept[some], kept[-1]), hides.records[~goes])
