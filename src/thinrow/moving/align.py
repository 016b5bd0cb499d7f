"""Rows of many users become one history a user, and per row a version that shows exactly the row.

The rows of a user are taken in order of request. What a row has and the history lacks becomes an event with the next
arrival number; what the history has and the row lacks, though the row speaks of that time, is hidden from the next
number on. So late events, restatements and events that vanish need no cause to come back exactly.

Worked example, rows of newest 3 at most, all of one user (numbers are arrivals)::

    row at 35 ms   a@10 b@20 c@30      a b c are 1 2 3                        bound 3
    row at 45 ms   b@20 x@25 c@30      x is 4; of a the row says nothing      bound 4   shows a b x c
    row at 55 ms   b@20 c@30           x is gone, with number 5; a is too     bound 5   shows b c
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import StoreError
from thinrow.core.ragged import offsets_of
from thinrow.core.units import NEVER
from thinrow.core.users import as_users, distinct
from thinrow.history.requests import RequestBatch
from thinrow.jagged import HIDE_DTYPE, Events, SharedHistories
from thinrow.kernels import kernel
from thinrow.moving.fat_rows import FatRows, columns_differ
from thinrow.moving.layout import FatLayout
from thinrow.schema import VERSION_DTYPE, EventSchema

Ints = npt.NDArray[np.int64]

#: Why a row is left out, and what it is that cannot be aligned.
REASONS = {
    "ragged": "its lists of events have different lengths",
    "unordered": "its events are not in order of time",
    "future": "it holds an event at or after its request, which its boundary does not allow",
    "too_long": "it holds more events than the newest that rows are said to hold",
    "too_old": "it holds an event from before its horizon",
    "repeated": "its request id was there before",
}
_BEGINNING = np.iinfo(np.int64).min
_TRIES = 4


@dataclass(frozen=True, slots=True)
class AlignCounts:
    """What was found. An event of a row is one that the row holds a copy of.

    Attributes:
        rows: that became examples.
        row_events: events of these rows together.
        events: of the histories.
        late: events of them that came after a request of their user that was later than they.
        restated: replaced by another event of their time.
        reordered: moved among events of their time.
        vanished: gone without a replacement.
        truncated_rows: rows that show less than their user's history had by then.
        lifted_rows: rows that saw events at their request's own time; theirs is 1 ms later now.
        rejected: reason (see ``REASONS``) -> rows left out.
    """

    rows: int = 0
    row_events: int = 0
    events: int = 0
    late: int = 0
    restated: int = 0
    reordered: int = 0
    vanished: int = 0
    truncated_rows: int = 0
    lifted_rows: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: AlignCounts) -> AlignCounts:
        names = [f.name for f in fields(self) if f.name != "rejected"]
        both = {k: self.rejected.get(k, 0) + other.rejected.get(k, 0) for k in {**self.rejected, **other.rejected}}
        return AlignCounts(**{n: getattr(self, n) + getattr(other, n) for n in names}, rejected=both)


@dataclass(frozen=True, slots=True)
class Aligned:
    """Attributes:
    rows: those that became examples, by (user, request time, input order).
    requests: a request a row; nothing is inline, ``request_ts`` is strict.
    events: histories, users ascending.
    top: (U,) highest number of each user, also of what went.
    counts: what was found.
    left_out: (request id, reason) of rows that were left out.
    """

    rows: FatRows
    requests: RequestBatch
    events: Events
    top: Ints
    counts: AlignCounts
    left_out: list[tuple[int, str]]


def align(rows: FatRows, layout: FatLayout, schema: EventSchema, newest: int | None) -> Aligned:
    """Align the rows of some users (all rows of each).

    Args:
        newest: rows of this length may lack older events; None where no row lacks any.

    Raises:
        StoreError: words over different events were equal four times in a row.
    """
    kept, left_out = _sound(rows, layout, newest)
    lifted = np.zeros(len(kept), np.int64)
    if layout.inclusive is None:
        lifted[kept.lengths > 0] = _last(kept) == kept.request_ts[kept.lengths > 0]
    elif layout.inclusive:
        lifted[:] = 1
    kept = replace(kept, request_ts=kept.request_ts + lifted)
    users, user_of = distinct(kept.users)
    cut = np.zeros(len(kept), np.bool_) if newest is None else kept.lengths == newest
    floor = np.full(len(kept), _BEGINNING, np.int64)
    if layout.horizon_ms is not None:
        floor = kept.request_ts - lifted - layout.horizon_ms
    if cut.any():
        floor[cut] = kept.event_ts[kept.offsets[:-1][cut]]
    found = _aligned(kept, user_of, floor, cut)
    (source, born, died, arrival, bound, _, edges), key = found
    event_ts, owner = kept.event_ts[source], user_of[born]
    before = np.where(died > 0, bound[np.maximum(died - 1, 0)], 0)
    hidden = np.where(died >= 0, before + 1, NEVER)
    order = np.lexsort((arrival, event_ts, owner))
    events = Events(
        as_users(users, schema.user_kind) if len(users) else as_users([], schema.user_kind),
        offsets_of(np.bincount(owner, minlength=len(users))),
        event_ts[order],
        arrival[order],
        hidden[order],
        {n: c.take(source[order]) for n, c in kept.columns.items()},
    )
    versions = _versions(user_of, born, died, kernel("identity_mix")(event_ts, arrival), bound, edges)
    versions["schema_id"] = schema.schema_id
    n = len(kept)
    requests = RequestBatch(
        kept.users,
        kept.request_ts,
        versions,
        Events.empty(kept.users, kept.columns),
        np.empty(0, HIDE_DTYPE),
        np.zeros(n + 1, np.int64),
        schema,
    )
    last = np.flatnonzero(np.append(user_of[1:] != user_of[:-1], True)) if n else np.empty(0, np.int64)
    counts = _count(kept, user_of, versions, lifted, floor, (event_ts, born, died, key[source]))
    reasons = [reason for _, reason in left_out]
    counts = replace(counts, rejected={r: reasons.count(r) for r in REASONS if r in reasons})
    return Aligned(kept, requests, events, bound[last], counts, left_out)


def _last(rows: FatRows) -> Ints:
    """Time of the newest event of each row that has any."""
    return rows.event_ts[rows.offsets[1:][rows.lengths > 0] - 1]


def _sound(rows: FatRows, layout: FatLayout, newest: int | None) -> tuple[FatRows, list[tuple[int, str]]]:
    """The rows that can be aligned, in order; (request id, reason) of the others."""
    n, lengths = len(rows), rows.lengths
    row = np.repeat(np.arange(n), lengths)
    wrong: dict[str, npt.NDArray[np.bool_]] = {r: np.zeros(n, np.bool_) for r in REASONS}
    wrong["ragged"] = rows.ragged
    falls = np.flatnonzero((np.diff(rows.event_ts) < 0) & (row[1:] == row[:-1])) if len(row) else row
    wrong["unordered"][row[falls]] = True
    late = rows.event_ts >= rows.request_ts[row] + (layout.inclusive is not False)
    wrong["future"][row[late]] = True
    if newest is not None:
        wrong["too_long"] = lengths > newest
    if layout.horizon_ms is not None:
        wrong["too_old"][row[rows.event_ts < rows.request_ts[row] - layout.horizon_ms]] = True
    order = np.lexsort((rows.request_ts, distinct(rows.users)[1]))
    _, first = np.unique(rows.request_id[order], return_index=True)
    wrong["repeated"][np.delete(order, first)] = True
    bad = np.zeros(n, np.bool_)
    left_out: list[tuple[int, str]] = []
    for reason, mask in wrong.items():
        left_out += [(int(i), reason) for i in rows.request_id[mask & ~bad]]
        bad |= mask
    return rows.take(order[~bad[order]]), left_out


def _aligned(
    rows: FatRows, user_of: Ints, floor: Ints, cut: npt.NDArray[np.bool_]
) -> tuple[tuple[Any, ...], npt.NDArray[np.uint64]]:
    """``align_rows``, checked: every event of a row equals the one that it was taken for in every value; and the words
    by which it was."""
    for seed in range(_TRIES):
        key = rows.keys(seed)
        found: tuple[Any, ...] = kernel("align_rows")(user_of, rows.offsets, rows.event_ts, key, floor, cut)
        source, match = found[0], found[5]
        copies = np.flatnonzero(source[match] != np.arange(len(match)))
        if not columns_differ(rows.columns, copies, rows.columns, source[match[copies]]).any():
            return found, key
    raise StoreError(f"words over different events were equal {_TRIES} times in a row; report this with the rows")


def _versions(
    user_of: Ints, born: Ints, died: Ints, mix: npt.NDArray[np.uint64], bound: Ints, edges: Ints
) -> npt.NDArray[np.void]:
    n = len(user_of)
    versions = np.zeros(n, VERSION_DTYPE)
    if not n:
        return versions
    starts = np.flatnonzero(np.append(True, user_of[1:] != user_of[:-1]))
    first = np.repeat(starts, np.diff(np.append(starts, n)))
    gone = np.flatnonzero(died >= 0)
    gone = gone[np.argsort(died[gone], kind="stable")]
    fresh = np.bincount(born, minlength=n)
    came, went = offsets_of(fresh), offsets_of(np.bincount(died[gone], minlength=n))
    sums = [np.concatenate([[np.uint64(0)], np.cumsum(m, dtype=np.uint64)]) for m in (mix, mix[gone])]
    total = sums[0][came] - sums[1][went]
    versions["seq_len"] = (came - went)[1:] - (came - went)[first]
    versions["checksum"] = total[1:] - total[first]
    versions["start_ts"], versions["end_ts"] = edges[:, 0], edges[:, 1]
    newest = np.maximum.accumulate(np.where(fresh > 0, np.arange(n), -1))
    versions["last_arrival"] = np.where(newest >= first, bound[np.maximum(newest, 0)], 0)
    versions["snapshot_arrival"] = bound
    return versions


def _count(
    rows: FatRows,
    user_of: Ints,
    versions: npt.NDArray[np.void],
    lifted: Ints,
    floor: Ints,
    found: tuple[Ints, Ints, Ints, npt.NDArray[np.uint64]],
) -> AlignCounts:
    event_ts, born, died, key = found
    follows = np.append(False, user_of[1:] == user_of[:-1])[born] if len(rows) else np.empty(0, np.bool_)
    before = np.maximum(born - 1, 0)
    late = follows & (event_ts < rows.request_ts[before]) & (event_ts >= floor[before])
    gone = np.flatnonzero(died >= 0)
    came = _pairs(born[follows], event_ts[follows])
    went = _pairs(died[gone], event_ts[gone])
    replaced = np.isin(went, came)
    moved = np.isin(
        _pairs(went.view(np.int64), key[gone].view(np.int64)), _pairs(came.view(np.int64), key[follows].view(np.int64))
    )
    return AlignCounts(
        rows=len(rows),
        row_events=len(rows.event_ts),
        events=len(event_ts),
        late=int((late & ~np.isin(_pairs(born, event_ts), went)).sum()),
        restated=int((replaced & ~moved).sum()),
        reordered=int(moved.sum()),
        vanished=int((~replaced).sum()),
        truncated_rows=int((versions["seq_len"] > rows.lengths).sum()),
        lifted_rows=int(lifted.sum()),
    )


def _pairs(a: Ints, b: Ints) -> npt.NDArray[np.uint64]:
    """A word for each pair, for counting."""
    words: npt.NDArray[np.uint64] = kernel("identity_mix")(np.ascontiguousarray(a), np.ascontiguousarray(b))
    return words


def mismatches(rows: FatRows, histories: SharedHistories) -> npt.NDArray[np.bool_]:
    """(X,) whether the history of a row (an example a row) differs from it in an event, their order or a
    value."""
    wrong: npt.NDArray[np.bool_] = histories.lengths() != rows.lengths
    same = np.flatnonzero(~wrong)
    if len(same) < len(rows):
        histories = histories.select(same)
    part, index = rows.take(same), histories.positions()[0]
    events: Events = histories.events
    differ = events.event_ts[index] != part.event_ts
    differ |= columns_differ(part.columns, np.arange(len(index)), events.columns, index)
    wrong[same[np.repeat(np.arange(len(part)), part.lengths)[differ]]] = True
    return wrong


__all__ = ["REASONS", "AlignCounts", "Aligned", "align", "mismatches"]
