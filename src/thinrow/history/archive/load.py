"""Bulk load: a history that never went through the recent tier becomes part of a generation."""

from __future__ import annotations

import numpy as np

from thinrow.core.users import bucket_of, distinct
from thinrow.history.archive.compact import (
    BucketWrite,
    CompactReport,
    NewEvents,
    commit_buckets,
    report_of,
    write_bucket,
)
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.layout import STRIPE_ROWS
from thinrow.history.archive.reader import look_up
from thinrow.history.intake import CheckedEvents
from thinrow.history.recent.tier import RecentTier
from thinrow.jagged import HIDE_DTYPE, Events
from thinrow.jagged.events import never_hidden


def bulk_load(
    archive: Archive, recent: RecentTier, events: CheckedEvents, *, stripe_rows: int = STRIPE_ROWS
) -> CompactReport:
    """Give ``events`` (in arrival order) the next arrival numbers of their users and commit them as a new generation.

    The recent tier must be drained (the prefix invariant: a generation holds exactly the arrivals up to some number);
    its counters are raised first, so that a number is never given twice even if the commit fails.

    Raises:
        CommitConflict: another writer committed meanwhile; nothing was loaded.
    """
    base = archive.pin()
    users, row_of = distinct(events.users)
    by_arrival = np.argsort(row_of, kind="stable")
    offsets = np.searchsorted(row_of[by_arrival], np.arange(len(users) + 1)).astype(np.int64)
    first = np.maximum(recent.read_since(users, np.zeros(len(users), np.int64)).top, look_up(base, users).watermark)
    arrival = np.empty(len(events), np.int64)
    arrival[by_arrival] = np.arange(len(events)) - np.repeat(offsets[:-1] - first - 1, np.diff(offsets))
    recent.raise_counters(users, first + np.diff(offsets))
    order = np.lexsort((arrival, events.event_ts, row_of))
    everything = Events(
        users,
        offsets,
        events.event_ts[order],
        arrival[order],
        never_hidden(len(events)),
        {n: c.take(order) for n, c in events.columns.items()},
    )
    buckets = bucket_of(users, base.n_buckets)

    def write(bucket: int) -> BucketWrite | None:
        part = everything.take_users(np.flatnonzero(buckets == bucket))
        new = NewEvents(part, np.zeros(len(part.users) + 1, np.int64), np.empty(0, HIDE_DTYPE))
        return write_bucket(archive, base, bucket, new, full=False, stripe_rows=stripe_rows)

    return report_of(*commit_buckets(archive, base, np.unique(buckets).tolist(), write, "bulk load"))
