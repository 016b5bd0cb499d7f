"""Old and new events of users merged; a user too long for that is merged one span of time after another.

Worked example: a user has pieces that end at times 40, 80 and 90 in one segment and at 85 in another, 512 rows each,
and 700 rows are wanted at a time. The sum of rows passes 700 after 40 and 1,400 after 80, so the spans are [.., 41),
[41, 81) and [81, ..). Each is read from both segments, merged with the new events of that span, and leaves in whole
stripes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from thinrow.core.ragged import offsets_of
from thinrow.core.units import NEVER
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.layout import StoredColumn
from thinrow.history.archive.lookup import Ints, Pieces
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import Window, merge
from thinrow.jagged import Column, Events
from thinrow.jagged.column import concat_columns


def append_new(old: Events, new: Events, row_of: Ints, columns: Sequence[StoredColumn]) -> Events:
    """``new`` (users at rows ``row_of`` of ``old.users``) merged into ``old``."""
    n = len(old.users)
    new_off = np.zeros(n + 1, np.int64)
    np.add.at(new_off, row_of + 1, new.lengths)
    new_off = len(old) + np.cumsum(new_off)
    joined = Events(
        old.users,
        old.offsets,
        np.concatenate([old.event_ts, new.event_ts]),
        np.concatenate([old.arrival, new.arrival]),
        np.concatenate([old.hidden_from, new.hidden_from]),
        {c.name: _joined_column(old, new, c) for c in columns},
    )
    starts = np.stack([old.offsets[:-1], new_off[:-1]], axis=1).ravel()
    stops = np.stack([old.offsets[1:], new_off[1:]], axis=1).ravel()
    return merge(joined, np.arange(0, 2 * n + 1, 2), starts, stops)


def _joined_column(old: Events, new: Events, spec: StoredColumn) -> Column:
    found = new.columns.get(spec.name)
    fresh = spec.nulls(len(new)) if found is None else found
    if not len(old):
        return fresh
    return concat_columns([old.columns[spec.name], fresh])


def spans(
    view: Generation, pieces: Pieces, new: Events, columns: Sequence[StoredColumn], rows_at_once: int, stripe_rows: int
) -> Iterator[Events]:
    """All events of one user in ``view`` (``pieces``: the index entries) and ``new`` (of the same user, or of nobody),
    in order, in parts of about ``rows_at_once`` rows: multiples of ``stripe_rows``, but for the last.

    Raises:
        CorruptionError: a block is damaged.
    """
    nobody, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    rest: Events | None = None
    bounds = _bounds(pieces, rows_at_once)
    for low, high in pairwise(bounds):
        window = Window(view, pieces.users, nobody, one * high, one * (NEVER - 1), ReadStats(), pieces)
        part = _between(window.read(one * NEVER, one * low, columns), low, high)
        if len(new):
            fresh = _between(new, low, high)
            part = append_new(part, fresh, nobody, columns) if len(fresh) else part
        if rest is not None and len(rest):
            part = _concatenated(rest, part)
        whole = len(part) if high == bounds[-1] else len(part) // stripe_rows * stripe_rows
        yield _rows(part, 0, whole)
        rest = _rows(part, whole, len(part))


def _bounds(pieces: Pieces, rows_at_once: int) -> list[int]:
    """Times between which lie about so many rows, the first and last beyond all events."""
    last_ts = pieces.field("last_ts")
    order = np.argsort(last_ts, kind="stable")
    reached = np.cumsum(pieces.field("n_rows").astype(np.int64)[order]) // rows_at_once
    ends = last_ts[order][np.flatnonzero(np.diff(reached))]
    return [-1, *(np.unique(ends) + 1).tolist(), NEVER]


def _between(events: Events, low: int, high: int) -> Events:
    """The events of one user with ``low <= event_ts < high``."""
    first, last = (int(np.searchsorted(events.event_ts, t)) for t in (low, high))
    return _rows(events, first, last)


def _rows(events: Events, first: int, last: int) -> Events:
    rows = slice(first, last)
    return Events(
        events.users,
        offsets_of([last - first]),
        events.event_ts[rows],
        events.arrival[rows],
        events.hidden_from[rows],
        {name: column.take(rows) for name, column in events.columns.items()},
    )


def _concatenated(a: Events, b: Events) -> Events:
    """Events of one user, ``b`` after ``a``."""
    return Events(
        a.users,
        offsets_of([len(a) + len(b)]),
        np.concatenate([a.event_ts, b.event_ts]),
        np.concatenate([a.arrival, b.arrival]),
        np.concatenate([a.hidden_from, b.hidden_from]),
        {name: concat_columns([column, b.columns[name]]) for name, column in a.columns.items()},
    )
