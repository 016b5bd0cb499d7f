"""Snapshot: what a user's history is at a request, as an O(1) version of the archive part and the recent events.

Protocol (docs/protocol.md): pin the newest generation g, read its watermark W per user, read from the recent tier all
arrivals above W. If the tier has trimmed beyond W meanwhile, pin again. So each event is seen once while
compaction runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CommitConflict, InputError, StoreError
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.core.users import Users
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.hides import hide
from thinrow.history.archive.layout import EVENT_ID
from thinrow.history.archive.lookup import Pieces, look_up
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import Window
from thinrow.history.missing import without_gone
from thinrow.history.recent.tier import RecentRead, RecentTier
from thinrow.history.requests import RequestBatch
from thinrow.jagged import Events
from thinrow.kernels import kernel
from thinrow.schema import VERSION_DTYPE

#: A user with more recent events than this is compacted before it is logged: inline they would be a fat row again.
MAX_INLINE_EVENTS = 2_048
_MAX_PINS = 100
_NO_USER = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Attributes:
    requests: in the caller's order: what is logged.
    generation: the pinned generation; with it ``reconstruct`` gives the history now.
    """

    requests: RequestBatch
    generation: Generation


def take_snapshot(
    pin: Callable[[], Generation],
    recent: RecentTier,
    users: Users,
    request_ts: npt.NDArray[np.int64],
    *,
    compact: Callable[[], object] | None = None,
    max_inline: int = MAX_INLINE_EVENTS,
) -> Snapshot:
    """Snapshot of X requests by ``users`` (X,), repeats included, at ``request_ts`` (X,), ms: events with
    event_ts < request_ts (exclusive) that have arrived by now. A user is read once, however many requests there are.

    ``compact`` is called, and the snapshot taken again, where a user has more than ``max_inline`` recent events.

    Raises:
        InputError: the lengths differ.
        StoreError: compactions or schema changes outran a hundred attempts to pin.
    """
    if len(users) != len(request_ts):
        raise InputError(f"{len(users)} users but {len(request_ts)} request times; give one time per user")
    distinct, user_of = _distinct(users)
    generation, pieces, read = _pin_and_read(pin, recent, distinct)
    if compact is not None and len(users) and int(read.events.lengths.max()) > max_inline:
        compact()
        generation, pieces, read = _pin_and_read(pin, recent, distinct)
    # Not the counter: a bulk load that is under way has taken numbers whose events are not there yet.
    bound = _highest(pieces.watermark, read.events)
    hide_user = _NO_USER if not len(read.hides) else np.repeat(np.arange(len(distinct)), np.diff(read.hide_offsets))
    bounds = bound[user_of]
    window = Window(generation, distinct, user_of, request_ts, bounds, ReadStats(), pieces, hide_user, read.hides)
    count, digest, start, end = window.summarize()
    versions = np.zeros(len(users), VERSION_DTYPE)
    versions["start_ts"], versions["end_ts"], versions["seq_len"], versions["checksum"] = start, end, count, digest
    versions["last_arrival"], versions["snapshot_arrival"] = pieces.watermark[user_of], bounds
    versions["schema_id"] = generation.schema.schema_id
    inline, hides, hide_offsets = _inline(read, len(distinct), user_of, request_ts, bounds, pieces.watermark)
    requests = RequestBatch(users, request_ts, versions, inline, hides, hide_offsets, generation.schema)
    return Snapshot(requests, generation)


def _highest(watermark: npt.NDArray[np.int64], events: Events) -> npt.NDArray[np.int64]:
    """(U,) the highest number that each user has in the archive, by ``watermark``, or among recent ``events``."""
    bound = watermark.copy()
    if len(bound) == 1:
        if len(events):
            bound[0] = max(bound[0], events.arrival.max())
    else:
        np.maximum.at(bound, np.repeat(np.arange(len(bound)), events.lengths), events.arrival)
    return bound


def _distinct(users: Users) -> tuple[Users, npt.NDArray[np.int64]]:
    """The users, each once, and the row of each request's; as they are where none is repeated."""
    if len(users) == 1:
        return users, np.zeros(1, np.int64)
    found: npt.NDArray[Any] = np.unique(users)
    if len(found) == len(users):
        return users, np.arange(len(users))
    return found, np.searchsorted(found, users).astype(np.int64)


def _pin_and_read(
    pin: Callable[[], Generation], recent: RecentTier, users: Users
) -> tuple[Generation, Pieces, RecentRead]:
    for _ in range(_MAX_PINS):
        generation = pin()
        pieces = look_up(generation, users)
        try:
            read = recent.read_since(users, pieces.watermark, generation.schema)
        except CommitConflict:
            continue  # appended under a schema of a newer generation
        if (read.trimmed_through <= pieces.watermark).all():
            return generation, pieces, without_gone(generation, users, read)
    raise StoreError(
        f"the recent tier was ahead of the newest generation {_MAX_PINS} times in a row; "
        "run `thinrow verify`: a manifest may be missing"
    )


def _inline(
    read: RecentRead,
    n_users: int,
    user_of: npt.NDArray[np.int64],
    request_ts: npt.NDArray[np.int64],
    bounds: npt.NDArray[np.int64],
    watermark: npt.NDArray[np.int64],
) -> tuple[Events, npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """What each request sees of its user's recent events, in order of time, and their hides by request."""
    events, hides, hide_offsets, n = read.events, read.hides, read.hide_offsets, len(request_ts)
    if n == n_users and not len(hides) and EVENT_ID not in events.columns:
        # Mostly events came in order, and all of them before the request.
        keys = events.event_ts, events.arrival, events.offsets
        if kernel("follows")(*keys, request_ts.copy(), bounds, watermark):
            return events, hides, hide_offsets
    inline = hide(events.in_time_order(), hides, hide_offsets)
    if n_users < n:
        rows, hide_offsets = ranges_index(hide_offsets[:-1][user_of], hide_offsets[1:][user_of])
        inline, hides = inline.take_users(user_of), hides[rows]
    return _visible(inline, request_ts, bounds), hides, hide_offsets


def _visible(events: Events, request_ts: npt.NDArray[np.int64], bound: npt.NDArray[np.int64]) -> Events:
    keep = events.visible(request_ts, bound)
    kept = offsets_of(keep)
    shown = events.take_rows(np.flatnonzero(keep), kept[events.offsets])
    columns = {n: c for n, c in shown.columns.items() if n != EVENT_ID}
    return Events(shown.users, shown.offsets, shown.event_ts, shown.arrival, shown.hidden_from, columns)
