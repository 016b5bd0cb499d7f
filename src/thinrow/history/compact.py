"""Compaction: a contiguous prefix of arrivals leaves the recent tier and becomes part of a new generation.

For each bucket the new events become one segment. Older segments of the bucket are merged into it, newest first, while
they are not larger than ``GROWTH`` times what is merged already: sizes grow geometrically, so a bucket holds few
segments and an event is rewritten a logarithmic number of times; a bucket without new events is not touched. *Full*
compaction merges all: one segment a bucket. Memory is that of some hundred thousand rows a bucket in work, or of one
user's events.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from thinrow.core.errors import CommitConflict
from thinrow.core.users import Users, as_users, bucket_of
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.hides import hide
from thinrow.history.archive.lookup import Ints, look_up
from thinrow.history.buckets import (
    PART_BYTES,
    BucketTask,
    BucketWrite,
    CompactReport,
    NewEvents,
    Progress,
    commit_buckets,
    new_name,
    report_of,
    rows_of,
    write_bucket,
)
from thinrow.history.engines import BucketEngine, EngineName, engine_of
from thinrow.history.missing import without_gone
from thinrow.history.recent.tier import RecentTier
from thinrow.jagged import Events

#: Users that are read first; then as many as the rows they had allow.
_FIRST_USERS = 256


def compact(
    archive: Archive,
    recent: RecentTier,
    *,
    full: bool = False,
    progress: Progress | None = None,
    engine: EngineName | BucketEngine = "local",
) -> CompactReport:
    """Move everything in the recent tier to a new generation, then trim the tier.

    A crash before the commit leaves files that no manifest names; after it, events that the next compaction skips by
    their arrival numbers. Nothing is lost or doubled either way.

    Raises:
        CommitConflict: other writers won twenty times in a row.
        CorruptionError: an input is damaged, or the output would not hold what the inputs held.
    """
    chosen = engine_of(engine)
    n_buckets = archive.pin().n_buckets
    try:
        return _compact(archive, recent, full, progress, chosen)
    except CommitConflict:
        if archive.pin().n_buckets == n_buckets:
            raise
        # Rebucketed meanwhile: users are in other buckets now.
        return _compact(archive, recent, full, progress, chosen)


def _compact(
    archive: Archive, recent: RecentTier, full: bool, progress: Progress | None, engine: BucketEngine
) -> CompactReport:
    users = recent.users()
    drained: dict[int, Drain] = {}

    def move(base: Generation, bucket: int) -> BucketWrite | None:
        drain = drained[bucket] = Drain(base, recent, np.sort(users[buckets == bucket]))
        parts = drain.parts()
        first = [part for part in [next(parts, None)] if part is not None]
        task = BucketTask(base, bucket, chain(first, parts), drain.estimate(first), full, False, new_name(bucket))
        return engine.call(write_bucket, task)

    with archive.writing("a compaction") as base:
        buckets = bucket_of(users, base.n_buckets)
        wanted = range(base.n_buckets) if full else np.unique(buckets).tolist()
        generation, written = commit_buckets(archive, base, wanted, move, "compact", engine, progress)
    done = [d for d in drained.values() if len(d.users)]
    if done:
        recent.trim(as_users(np.concatenate([d.users for d in done])), np.concatenate([d.through for d in done]))
    return report_of(generation, written)


class Drain:
    """Reads the events of some users that are above a generation's watermark, part by part.

    Attributes:
        users: (U,) ascending.
        through: (U,) the arrival through which everything has been read.
    """

    def __init__(self, base: Generation, recent: RecentTier, users: Users) -> None:
        self._base, self._recent, self.users = base, recent, users
        self.through: Ints = np.zeros(len(users), np.int64)
        self._done = 0

    def estimate(self, first: list[NewEvents]) -> int:
        """Events of all users, by those that were in the ``first`` parts; exact where these are all."""
        held = sum(len(part.events) for part in first)
        return held if self._done == len(self.users) else held * len(self.users) // self._done

    def parts(self) -> Iterator[NewEvents]:
        """The events, in parts that are not empty; of as many users as are likely to fill a part."""
        rows_at_once = rows_of(self._base.schema, PART_BYTES)
        step = _FIRST_USERS
        while self._done < len(self.users):
            first, last = self._done, min(self._done + step, len(self.users))
            part = self._read(first, last)
            self._done = last
            step = max(1, rows_at_once * (last - first) // max(len(part.events), last - first))
            if len(part.events):
                yield part

    def _read(self, first: int, last: int) -> NewEvents:
        users = self.users[first:last]
        watermark = look_up(self._base, users).watermark
        read = without_gone(self._base, users, self._recent.read_since(users, watermark, self._base.schema))
        events = read.events
        if read.event_ids is not None:
            columns = {**events.columns, "event_id": read.event_ids}
            events = Events(events.users, events.offsets, events.event_ts, events.arrival, events.hidden_from, columns)
        through = watermark.copy()
        np.maximum.at(through, np.repeat(np.arange(len(users)), events.lengths), events.arrival)
        self.through[first:last] = through
        return NewEvents(hide(events.in_time_order(), read.hides, read.hide_offsets), read.hide_offsets, read.hides)
