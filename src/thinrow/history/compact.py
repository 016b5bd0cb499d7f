"""Compaction: a contiguous prefix of arrivals leaves the recent tier and becomes part of a new generation.

For each bucket the new events become one segment. Older segments of the bucket are merged into it, newest first, while
they are not larger than ``GROWTH`` times what is merged already: sizes grow geometrically, so a bucket holds few
segments and an event is rewritten a logarithmic number of times. *Full* compaction merges all: one segment a bucket.

Content digests prove that nothing was lost: those of the output must be the sum of those of the inputs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CommitConflict, CorruptionError
from thinrow.core.users import Users, as_users, bucket_of
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.hides import Hides, group_hides, hide
from thinrow.history.archive.layout import STRIPE_ROWS, SegmentInfo, StoredColumn, stored_columns
from thinrow.history.archive.reader import Ints, ReadStats, look_up
from thinrow.history.archive.window import merge, read_everything
from thinrow.history.archive.writer import content_digests, write_segment
from thinrow.history.recent.tier import RecentTier
from thinrow.jagged import Column, Events
from thinrow.jagged.column import concat_columns, null_column
from thinrow.schema import EventSchema
from thinrow.schema.event_schema import HIDDEN_FROM_ID, KEYS_GROUP

GROWTH = 4
_MAX_TRIES = 20

#: Called after each bucket with (buckets done, buckets in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CompactReport:
    """``events`` went from the recent tier to ``generation``; ``merged_events`` were rewritten from older segments."""

    generation: int
    events: int
    merged_events: int
    segments: int


@dataclass(frozen=True, slots=True)
class BucketWrite:
    """A bucket's new list of segments; ``events`` are new, ``merged_events`` were rewritten."""

    segments: list[SegmentInfo]
    events: int
    merged_events: int


@dataclass(frozen=True, slots=True)
class NewEvents:
    """Events of one bucket that no segment holds: users ascending, each in order of (event_ts, arrival); and the hides
    that they bring, by user."""

    events: Events
    hide_offsets: Ints
    hides: npt.NDArray[np.void]


def compact(
    archive: Archive, recent: RecentTier, *, full: bool = False, progress: Progress | None = None
) -> CompactReport:
    """Move everything in the recent tier to a new generation, then trim the tier.

    A crash before the commit leaves files that no manifest names; after it, events that the next compaction skips by
    their arrival numbers. Nothing is lost or doubled either way.

    Raises:
        CommitConflict: other writers won twenty times in a row.
        CorruptionError: an input is damaged, or the output would not hold what the inputs held.
    """
    for _ in range(_MAX_TRIES - 1):
        try:
            return _compact_once(archive, recent, full, progress)
        except CommitConflict:
            continue
    return _compact_once(archive, recent, full, progress)


def _compact_once(archive: Archive, recent: RecentTier, full: bool, progress: Progress | None) -> CompactReport:
    base = archive.pin()
    users = recent.users()
    buckets = bucket_of(users, base.n_buckets)
    drained: dict[int, tuple[Users, Ints]] = {}

    def move(bucket: int) -> BucketWrite | None:
        members = np.sort(users[buckets == bucket])
        new, through = _drain(base, recent, members)
        drained[bucket] = members, through
        return write_bucket(archive, base, bucket, new, full=full)

    wanted = range(base.n_buckets) if full else np.unique(buckets).tolist()
    generation, written = commit_buckets(archive, base, wanted, move, "compact", progress)
    bounds = [(u, t) for u, t in drained.values() if len(u)]
    if bounds:
        recent.trim(as_users(np.concatenate([u for u, _ in bounds])), np.concatenate([t for _, t in bounds]))
    return report_of(generation, written)


def commit_buckets(
    archive: Archive,
    base: Generation,
    buckets: Sequence[int],
    work: Callable[[int], BucketWrite | None],
    note: str,
    progress: Progress | None = None,
) -> tuple[Generation, list[BucketWrite]]:
    """Do ``work`` for every bucket, two at a time so that one's disk waits are the other's, and commit what they wrote.

    Where ``work`` fails or another writer was first, the segments written are deleted again. After any other error of
    the commit they stay: the manifest that names them may be there.

    Raises:
        CommitConflict: another writer committed the next generation first.
    """
    written: dict[int, BucketWrite] = {}
    try:
        with ThreadPoolExecutor(2) as pool:
            tasks = {pool.submit(work, bucket): bucket for bucket in buckets}
            for i, task in enumerate(as_completed(tasks)):
                if task.exception() is None and (done := task.result()) is not None:
                    written[tasks[task]] = done
                if progress is not None:
                    progress(i + 1, len(tasks))
            for task in tasks:
                task.result()
    except BaseException:
        _delete_new(archive, base, written)
        raise
    if not written:
        return base, []
    try:
        generation = archive.commit(base, {b: w.segments for b, w in written.items()}, note)
    except CommitConflict:
        _delete_new(archive, base, written)
        raise
    return generation, list(written.values())


def _delete_new(archive: Archive, base: Generation, written: Mapping[int, BucketWrite]) -> None:
    held = {info.name for _, info in base.segments}
    for info in (info for w in written.values() for info in w.segments if info.name not in held):
        archive.objects.delete(info.name)


def report_of(generation: Generation, written: Sequence[BucketWrite]) -> CompactReport:
    """What was done, in all buckets together."""
    events, merged = sum(w.events for w in written), sum(w.merged_events for w in written)
    return CompactReport(generation.number, events, merged, len(generation.segments))


def _drain(base: Generation, recent: RecentTier, users: Users) -> tuple[NewEvents, Ints]:
    """All events of ``users`` above the generation's watermark, and the arrival through which that is everything."""
    watermark = look_up(base, users).watermark
    read = recent.read_since(users, watermark)
    events = read.events
    if read.event_ids is not None:
        columns = {**events.columns, "event_id": read.event_ids}
        events = Events(events.users, events.offsets, events.event_ts, events.arrival, events.hidden_from, columns)
    through = watermark.copy()
    np.maximum.at(through, np.repeat(np.arange(len(users)), events.lengths), events.arrival)
    events = hide(events.in_time_order(), read.hides, read.hide_offsets)
    return NewEvents(events, read.hide_offsets, read.hides), through


def write_bucket(
    archive: Archive,
    base: Generation,
    bucket: int,
    new: NewEvents,
    *,
    full: bool,
    stripe_rows: int = STRIPE_ROWS,
) -> BucketWrite | None:
    """Write the bucket's new segment; None where nothing changes."""
    numbers = base.segments_of(bucket)
    keep = 0 if full else _kept(base, numbers, len(new.events))
    if not len(new.events) and (len(numbers) - keep <= 1) and not (full and _carries_hides(base, numbers)):
        return None
    merged = numbers[keep:]
    schema = base.schema
    expected = content_digests(new.events, schema)
    events, hides = _joined(base, numbers[:keep], merged, new, schema)
    for n in merged:
        _add(expected, base.segments[n][1].digests)
    name = f"segments/{bucket:05d}/{secrets.token_hex(8)}.seg"
    info = write_segment(
        archive.objects, name, events, hides, schema, bucket=bucket, n_buckets=base.n_buckets, stripe_rows=stripe_rows
    )
    _prove(expected, info, name)
    segments = [base.segments[n][1] for n in numbers[:keep]] + [info]
    return BucketWrite(segments, len(new.events), info.n_rows - len(new.events))


def _kept(base: Generation, numbers: Sequence[int], new_rows: int) -> int:
    """How many of the oldest segments stay as they are."""
    keep, rows = len(numbers), new_rows
    while keep and base.segments[numbers[keep - 1]][1].n_rows <= GROWTH * rows:
        keep -= 1
        rows += base.segments[numbers[keep]][1].n_rows
    return keep


def _carries_hides(base: Generation, numbers: Sequence[int]) -> bool:
    return any(len(base.segment(n).hides.records) for n in numbers)


def _add(total: dict[str, int], part: dict[str, int]) -> None:
    for key in list(total):
        if key in part:
            total[key] = (total[key] + part[key]) % (1 << 64)
        else:
            del total[key]


def _prove(expected: dict[str, int], info: SegmentInfo, name: str) -> None:
    for key, digest in expected.items():
        # Applying a hide-list changes hidden_from; what an event says of itself never changes.
        if key != str(HIDDEN_FROM_ID) and info.digests.get(key, digest) != digest:
            raise CorruptionError(
                f"compaction would change column {key}: {digest} in, {info.digests[key]} out", file=name
            )


def _joined(
    base: Generation, older: Sequence[int], merged: Sequence[int], new: NewEvents, schema: EventSchema
) -> tuple[Events, Hides]:
    """Events of the merged segments and the new ones, hides applied; and the hides of events of older segments."""
    columns = [c for c in stored_columns(schema) if c.group != KEYS_GROUP]
    view = base.only(merged)
    held = [view.segment(i).pieces.keys(np.arange(view.segment(i).pieces.n_records)) for i in range(len(merged))]
    users = np.unique(np.concatenate([new.events.users, *held])) if merged else new.events.users
    users = as_users(users, schema.user_kind)
    old = read_everything(view, users, columns, ReadStats())
    row_of = np.searchsorted(users, new.events.users)
    pieces = look_up(view, users)
    own = np.repeat(np.arange(len(users)), np.diff(pieces.hide_off))
    brought = np.repeat(row_of, np.diff(new.hide_offsets))
    hides, hide_off = group_hides(len(users), np.concatenate([own, brought]), np.concatenate([pieces.hides, new.hides]))
    events = hide(_append(old, new.events, row_of, columns), hides, hide_off)
    watermark = look_up(base.only(older), users).watermark
    owner = np.repeat(np.arange(len(users)), np.diff(hide_off))
    carried = hides["arrival"] <= watermark[owner]
    records, offsets = group_hides(len(users), owner[carried], hides[carried])
    has = np.flatnonzero(np.diff(offsets))
    return events, Hides(users[has], np.append(offsets[has], offsets[-1]), records)


def _append(old: Events, new: Events, row_of: Ints, columns: Sequence[StoredColumn]) -> Events:
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
    fresh = null_column(spec.dtype, len(new)) if found is None else found
    if not len(old):
        return fresh
    return concat_columns([old.columns[spec.name], fresh])
