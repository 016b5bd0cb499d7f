"""Shadow mode: the fat rows of an existing pipeline beside thinrow's histories of the same requests, every difference
with its cause.

Worked example. A request at 50 ms; theirs ``a@10 c@30 d@50``, ours ``a@10 b@20 c@30``, and ``b@20`` is in the next row
that they logged for the user::

    d@50   theirs only   boundary   its time is the request's: their rows see it, ``event_ts < T`` does not
    b@20   ours only     late       they learned of it later than thinrow did

A cause is named where there is evidence for it: a time, a number of arrival, a correction, a later row. Else it is
``unknown``. Whole batches at a time: per-event work is in the kernels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.users import Users, distinct, plain
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.layout import StoredColumn
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import read_everything
from thinrow.history.reconstruct import Reconstruction
from thinrow.jagged import Column, Events
from thinrow.kernels import kernel
from thinrow.moving.fat_rows import FatRows, columns_differ, event_keys

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

#: Causes of differences, and what each says.
CAUSES = {
    "late": "one side knew the event at the request, the other learned of it later",
    "restated": "one side shows an event, the other its correction",
    "truncated": "one side holds fewer of the oldest events",
    "boundary": "an event at the request's own time: one side counts it",
    "order": "the same events of one time in another order",
    "future": "theirs holds an event from after the request: it leaks what came next",
    "unknown": "no evidence of any of these",
}
_CODE = {name: code for code, name in enumerate(CAUSES)}
_VISIBLE, _LATE, _SUPERSEDED, _CORRECTS, _FIXED = 1, 2, 4, 8, 16


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """Differences of X requests.

    Attributes:
        request_id, users, request_ts: (X,) of the rows compared.
        theirs: (X, len(CAUSES)) int64, events that only the fat row has (of ``order``: that stand elsewhere), by cause.
        ours: (X, len(CAUSES)) int64, events that only thinrow has, by cause.
        events: events of the fat rows together.
    """

    request_id: Ints
    users: Users
    request_ts: Ints
    theirs: Ints
    ours: Ints
    events: int

    @property
    def equal(self) -> npt.NDArray[np.bool_]:
        """(X,) whether row and history are the same, event by event."""
        same: npt.NDArray[np.bool_] = (self.theirs.sum(axis=1) + self.ours.sum(axis=1)) == 0
        return same

    def causes(self, row: int) -> dict[str, tuple[int, int]]:
        """Cause -> (events only theirs, events only ours) of a row, of those that there are."""
        pairs = {name: (int(self.theirs[row, c]), int(self.ours[row, c])) for name, c in _CODE.items()}
        return {name: pair for name, pair in pairs.items() if pair != (0, 0)}

    def summary(self) -> dict[str, dict[str, int]]:
        """Cause -> rows that have it, events only theirs, events only ours."""
        both = self.theirs + self.ours
        return {
            name: {
                "rows": int((both[:, c] > 0).sum()),
                "theirs": int(self.theirs[:, c].sum()),
                "ours": int(self.ours[:, c].sum()),
            }
            for name, c in _CODE.items()
        }

    def to_dict(self, rows: int | None = None) -> dict[str, Any]:
        """A JSON-ready dict: totals, the summary, and the first ``rows`` rows that differ (all by default)."""
        different = np.flatnonzero(~self.equal)
        return {
            "requests": len(self.request_id),
            "equal": int(self.equal.sum()),
            "events": self.events,
            "causes": self.summary(),
            "differences": [
                {
                    "request_id": int(self.request_id[i]),
                    "user": plain(self.users[i]),
                    "request_ts": int(self.request_ts[i]),
                    "causes": {n: {"theirs": a, "ours": b} for n, (a, b) in self.causes(i).items()},
                }
                for i in different[:rows].tolist()
            ],
        }

    def to_json(self, rows: int | None = None) -> str:
        """``to_dict`` as text."""
        return json.dumps(self.to_dict(rows))

    @staticmethod
    def concat(parts: Sequence[ShadowReport]) -> ShadowReport:
        """The rows of ``parts`` (one or more) one after another."""
        return ShadowReport(
            np.concatenate([p.request_id for p in parts]),
            np.concatenate([p.users for p in parts]),
            np.concatenate([p.request_ts for p in parts]),
            np.concatenate([p.theirs for p in parts]),
            np.concatenate([p.ours for p in parts]),
            sum(p.events for p in parts),
        )


@dataclass(frozen=True, slots=True)
class _Side:
    """Events of X rows, oldest first: where rows begin, times, words over the values, and the values."""

    offsets: Ints
    ts: Ints
    key: Words
    columns: dict[str, Column]

    @property
    def row(self) -> Ints:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def evidence(generation: Generation, users: Users, columns: Sequence[str]) -> Events:
    """All archived events of distinct ``users``, those that came late or were corrected too: what ``compare`` finds
    causes by. What is still recent is not among them; compact first."""
    stored = [StoredColumn.of(generation.schema.column(n)) for n in columns]
    return read_everything(generation, users, stored, ReadStats())


def compare(
    fat_rows: FatRows,
    reconstruction: Reconstruction,
    *,
    known: Events | None = None,
    newest: int | None = None,
) -> ShadowReport:
    """Hold fat rows against the histories that thinrow rebuilt for the same requests.

    Args:
        fat_rows: (X,) rows; their columns decide what is compared.
        reconstruction: of the same X requests, in the same order, with all of these columns.
        known: all events of the users (see ``evidence``); what the reconstruction holds by default, which knows no
            event from after the last request.
        newest: rows hold at most so many events; by default the longest one's.

    Raises:
        InputError: the requests are not the same.
    """
    histories = reconstruction.histories
    if len(histories) != len(fat_rows):
        raise InputError(f"{len(fat_rows)} fat rows but {len(histories)} histories; pass the same requests")
    index, offsets = histories.positions()
    events = histories.events
    missing = [n for n in fat_rows.columns if n not in events.columns]
    if missing:
        raise InputError(f"the histories have no column {missing[0]!r}; read it, or leave it out of the rows")
    if not np.array_equal(events.users[histories.user_of], fat_rows.users):
        raise InputError("fat rows and histories are of other users; pass the same requests in the same order")
    names = fat_rows.columns.keys()
    ours_of = {n: events.columns[n].decoded() for n in names}
    words = event_keys(ours_of, len(events))
    theirs = _Side(fat_rows.offsets, fat_rows.event_ts, fat_rows.keys(), fat_rows.columns)
    ours = _Side(offsets, events.event_ts[index], words[index], {n: c.take(index) for n, c in ours_of.items()})
    if known is None:
        known = events
    return _Compared(fat_rows, theirs, ours, histories.bound, known, newest).report()


class _Compared:
    def __init__(
        self, rows: FatRows, theirs: _Side, ours: _Side, bound: Ints, known: Events, newest: int | None
    ) -> None:
        self._rows, self._theirs, self._ours, self._bound = rows, theirs, ours, bound
        self._newest = newest or int(rows.lengths.max(initial=0))
        self._a, self._b, moved = kernel("pair_rows")(
            theirs.offsets, theirs.ts, theirs.key, ours.offsets, ours.ts, ours.key
        )
        paired = np.flatnonzero(self._a >= 0)
        differ = paired[columns_differ(theirs.columns, paired, ours.columns, self._a[paired])]
        # Equal words over different values: never taken for equal.
        self._b[self._a[differ]] = -1
        self._a[differ] = -1
        self._moved = moved & (self._a >= 0)
        self._known = known
        names = theirs.columns.keys() & known.columns.keys()
        comparable = len(names) == len(theirs.columns)
        columns = {n: known.columns[n] for n in names}
        self._words = event_keys(columns, len(known)) if comparable else np.zeros(len(known), np.uint64)

    def report(self) -> ShadowReport:
        rows, n = self._rows, len(self._rows)
        left_a, left_b = np.flatnonzero(self._a < 0), np.flatnonzero(self._b < 0)
        theirs = _counted(self._theirs.row[left_a], self._causes_of_theirs(left_a), n)
        theirs += _counted(self._theirs.row[self._moved], np.full(int(self._moved.sum()), _CODE["order"]), n)
        ours = _counted(self._ours.row[left_b], self._causes_of_ours(left_b), n)
        return ShadowReport(rows.request_id, rows.users, rows.request_ts, theirs, ours, len(rows.event_ts))

    def _states(self, side: _Side, left: Ints) -> npt.NDArray[np.int8]:
        """What thinrow knows of events, as of their requests."""
        known = self._known
        everyone = known.users
        row = side.row[left]
        asked, who = distinct(self._rows.users)
        place: Ints = np.searchsorted(everyone, asked).astype(np.int64) if len(everyone) else np.zeros(0, np.int64)
        there = np.zeros(len(asked), np.bool_)
        inside = place < len(everyone)
        there[inside] = everyone[place[inside]] == asked[inside]
        out = np.zeros(len(left), np.int8)
        some = np.flatnonzero(there[who[row]])
        pairs = kernel("identity_mix")
        owner = np.repeat(np.arange(len(everyone)), known.lengths)
        corrects = np.isin(pairs(owner, known.arrival), pairs(owner, known.hidden_from))
        out[some] = kernel("event_states")(
            known.offsets,
            known.event_ts,
            self._words,
            known.arrival,
            known.hidden_from,
            corrects,
            place[who[row[some]]],
            side.ts[left[some]],
            side.key[left[some]],
            self._bound[row[some]],
        )
        return out

    def _causes_of_theirs(self, left: Ints) -> Ints:
        side, row = self._theirs, self._theirs.row[left]
        state, ts = self._states(side, left), side.ts[left]
        request_ts = self._rows.request_ts[row]
        first = self._first_of(self._ours)[row]
        older = ts < np.where(first >= 0, self._ours.ts[np.maximum(first, 0)] if len(self._ours.ts) else 0, ts)
        corrected = (state & _CORRECTS > 0) & (state & _LATE > 0)
        return _chosen(
            len(left),
            (ts > request_ts, "future"),
            (ts == request_ts, "boundary"),
            (corrected | (state & _SUPERSEDED > 0), "restated"),
            (state & _LATE > 0, "late"),
            ((state & _VISIBLE > 0) & older, "truncated"),
        )

    def _causes_of_ours(self, left: Ints) -> Ints:
        side, row = self._ours, self._ours.row[left]
        state, ts = self._states(side, left), side.ts[left]
        lengths = self._rows.lengths[row]
        # Before the first event that both have: theirs is an end of ours there.
        matched = np.flatnonzero(self._b >= 0)
        first = np.full(len(self._rows), np.iinfo(np.int64).max)
        np.minimum.at(first, side.row[matched], matched)
        before = (left < first[row]) & (lengths > 0)
        begin = self._first_of(self._theirs)[row]
        if len(self._theirs.ts):
            before &= ts <= self._theirs.ts[np.maximum(begin, 0)]
        later = self._later(row, ts, side.key[left])
        return _chosen(
            len(left),
            (before & (lengths >= self._newest), "truncated"),
            (state & (_CORRECTS | _FIXED) > 0, "restated"),
            (later, "late"),
            (before, "truncated"),
        )

    def _first_of(self, side: _Side) -> Ints:
        """(X,) the first event of each row, -1 where it has none."""
        return np.where(np.diff(side.offsets) > 0, side.offsets[:-1], -1)

    def _later(self, row: Ints, ts: Ints, key: Words) -> npt.NDArray[np.bool_]:
        """Whether the next fat row of the user, or the last one, holds the event."""
        rows = self._rows
        user = distinct(rows.users)[1]
        order = np.lexsort((rows.request_ts, user))
        n = len(order)
        follows = np.full(n, -1, np.int64)
        same = user[order[1:]] == user[order[:-1]] if n else np.empty(0, np.bool_)
        follows[order[:-1][same]] = order[1:][same]
        ends = np.flatnonzero(np.append(~same, True)) if n else np.empty(0, np.int64)
        last = np.empty(n, np.int64)
        last[order] = order[ends[np.searchsorted(ends, np.arange(n))]]
        last = np.where(last == np.arange(n), -1, last)
        side = self._theirs
        found: npt.NDArray[np.bool_] = kernel("find_in_rows")(side.offsets, side.ts, side.key, follows[row], ts, key)
        found |= kernel("find_in_rows")(side.offsets, side.ts, side.key, last[row], ts, key)
        return found


def _chosen(n: int, *rules: tuple[npt.NDArray[np.bool_], str]) -> Ints:
    """(n,) code of the first cause whose evidence holds."""
    out = np.full(n, _CODE["unknown"], np.int64)
    for holds, cause in reversed(rules):
        out[holds] = _CODE[cause]
    return out


def _counted(row: Ints, cause: Ints, n: int) -> Ints:
    counts = np.bincount(row * len(CAUSES) + cause, minlength=n * len(CAUSES)).astype(np.int64)
    return counts.reshape(n, len(CAUSES))


__all__ = ["CAUSES", "ShadowReport", "compare", "evidence"]
