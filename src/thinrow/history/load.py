"""Bulk load: a history that never went through the recent tier becomes part of a generation."""

from __future__ import annotations

import numpy as np

from thinrow.core.users import bucket_of, distinct
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.reader import Ints, look_up
from thinrow.history.buckets import (
    BucketTask,
    BucketWrite,
    CompactReport,
    NewEvents,
    commit_buckets,
    new_name,
    report_of,
    write_bucket,
)
from thinrow.history.engines import LocalEngine
from thinrow.history.intake import CheckedEvents
from thinrow.history.recent.tier import RecentTier
from thinrow.jagged import Events
from thinrow.jagged.column import concat_columns
from thinrow.jagged.events import never_hidden


def bulk_load(archive: Archive, recent: RecentTier, events: CheckedEvents) -> CompactReport:
    """Give ``events`` (in arrival order) the next arrival numbers of their users and commit them as a new generation.

    Their numbers are taken first, so that none is given twice even if the commit fails. Recent events of these users
    with lower numbers go into the same generation (the prefix invariant: it holds exactly the arrivals up to some
    number); events that arrive meanwhile have higher ones and stay recent.

    Raises:
        CommitConflict: another writer committed meanwhile; nothing was loaded.
    """
    base = archive.pin()
    users, row_of = distinct(events.users)
    loaded = np.bincount(row_of, minlength=len(users)).astype(np.int64)
    watermark = look_up(base, users).watermark
    first = recent.reserve(users, watermark, loaded)
    everything = _joined(recent.read_since(users, watermark, base.schema).events, events, row_of, first)
    buckets = bucket_of(users, base.n_buckets)

    def write(bucket: int) -> BucketWrite | None:
        part = everything.take_users(np.flatnonzero(buckets == bucket))
        task = BucketTask(base, bucket, [NewEvents.without_hides(part)], len(part), False, False, new_name(bucket))
        return write_bucket(task)

    generation, written = commit_buckets(archive, base, np.unique(buckets).tolist(), write, "bulk load", LocalEngine())
    recent.trim(users, first + loaded)
    return report_of(generation, written)


def _joined(held: Events, loaded: CheckedEvents, row_of: Ints, first: Ints) -> Events:
    """The recent events up to ``first`` of each user and the loaded ones (of users ``row_of``) after them."""
    owner = np.repeat(np.arange(len(held.users)), held.lengths)
    before = np.flatnonzero(held.arrival <= first[owner])
    by_user = np.argsort(row_of, kind="stable")
    place = np.empty(len(row_of), np.int64)
    place[by_user] = np.arange(len(row_of)) - np.searchsorted(row_of[by_user], row_of[by_user])
    who = np.concatenate([owner[before], row_of])
    event_ts = np.concatenate([held.event_ts[before], loaded.event_ts])
    arrival = np.concatenate([held.arrival[before], first[row_of] + 1 + place])
    columns = {n: concat_columns([held.columns[n].take(before), c]) for n, c in loaded.columns.items()}
    order = np.lexsort((arrival, event_ts, who))
    offsets = np.searchsorted(who[order], np.arange(len(held.users) + 1)).astype(np.int64)
    return Events(
        held.users,
        offsets,
        event_ts[order],
        arrival[order],
        never_hidden(len(order)),
        {n: c.take(order) for n, c in columns.items()},
    )
