"""The new segment of one bucket: new events and older segments merged, part by part, and proved to be all there.

Worked example: segments of 900,000 and 100,000 rows, 50,000 new events. The newer segment is not larger than
``GROWTH`` times the new events, so it is merged; then the older one is (900,000 > 4 x 150,000) kept. The merge goes
through the users in order, some hundred thousand rows at a time: memory is that of a part (or of one user's events).

Content digests prove that nothing was lost: those of the output must be the sum of those of the inputs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CommitConflict
from thinrow.core.ragged import offsets_of
from thinrow.core.users import Users, as_users
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.hides import Hides, group_hides, hide
from thinrow.history.archive.layout import STRIPE_ROWS, SegmentInfo, stored_columns
from thinrow.history.archive.lookup import Ints, look_up
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.scan import users_by_rows
from thinrow.history.archive.window import read_everything
from thinrow.history.archive.writer import SegmentWriter, content_digests
from thinrow.history.engines import BucketEngine
from thinrow.history.proof import digests_of, plus, prove
from thinrow.history.slices import append_new, spans
from thinrow.jagged import HIDE_DTYPE, Events
from thinrow.schema import EventSchema
from thinrow.schema.event_schema import KEYS_GROUP
from thinrow.storage.manifest import MAX_TRIES

GROWTH = 4
#: Bytes of rows (as ``row_bytes`` counts them) that are merged at a time; the peak is about eight times as much.
PART_BYTES = 16 << 20
#: A user of so many parts' rows in the segments is merged in several.
LONG_PARTS = 2

#: Called after each bucket with (buckets done, buckets in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CompactReport:
    """``events`` came to the archive with ``generation``; ``merged_events`` were rewritten from older segments."""

    generation: int
    events: int
    merged_events: int
    segments: int


@dataclass(frozen=True, slots=True)
class NewEvents:
    """Events of one bucket that no segment holds: users ascending, each in order of (event_ts, arrival); and the hides
    that they bring, by user."""

    events: Events
    hide_offsets: Ints
    hides: npt.NDArray[np.void]

    @classmethod
    def without_hides(cls, events: Events) -> NewEvents:
        """Events that correct none."""
        return cls(events, np.zeros(len(events.users) + 1, np.int64), np.empty(0, HIDE_DTYPE))

    def users(self, first: int, last: int) -> NewEvents:
        """Those of the users ``[first, last)``, views."""
        events, hides = self.events, self.hide_offsets[first : last + 1]
        offsets = events.offsets[first : last + 1]
        rows = slice(int(offsets[0]), int(offsets[-1]))
        part = Events(
            events.users[first:last],
            offsets - offsets[0],
            events.event_ts[rows],
            events.arrival[rows],
            events.hidden_from[rows],
            {n: c.take(rows) for n, c in events.columns.items()},
        )
        return NewEvents(part, hides - hides[0], self.hides[int(hides[0]) : int(hides[-1])])


@dataclass(frozen=True, slots=True)
class BucketTask:
    """What ``write_bucket`` needs; picklable.

    Attributes:
        base: the generation that the new segment follows.
        bucket: which.
        parts: the new events, users ascending over all parts. Of a generator, read once.
        n_new: how many these are, at least roughly: it decides what is merged, and 0 says that there are none.
        full: merge every segment of the bucket.
        keep: merge none.
        name: of the new segment.
    """

    base: Generation
    bucket: int
    parts: Iterable[NewEvents]
    n_new: int
    full: bool
    keep: bool
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        parts = list(self.parts) if isinstance(self.parts, Iterator) else self.parts
        return BucketTask, (self.base, self.bucket, parts, self.n_new, self.full, self.keep, self.name)


@dataclass(frozen=True, slots=True)
class BucketWrite:
    """A bucket's new list of segments; ``events`` are new, ``merged_events`` were rewritten."""

    segments: list[SegmentInfo]
    events: int
    merged_events: int


def new_name(bucket: int) -> str:
    """A name that no other segment has."""
    return f"segments/{bucket:05d}/{secrets.token_hex(8)}.seg"


def row_bytes(schema: EventSchema) -> int:
    """Bytes that a row takes in memory, roughly: texts and lists are counted with 32."""
    return sum(
        32 if spec.is_bytes or spec.ragged else np.dtype(spec.dtype).itemsize * max(spec.size, 1)
        for spec in stored_columns(schema)
    )


def rows_of(schema: EventSchema, part_bytes: int) -> int:
    """Rows of a part of ``part_bytes``."""
    return max(part_bytes // row_bytes(schema), STRIPE_ROWS)


def commit_buckets(
    archive: Archive,
    base: Generation,
    buckets: Sequence[int],
    work: Callable[[Generation, int], BucketWrite | None],
    note: str,
    engine: BucketEngine,
    progress: Progress | None = None,
) -> tuple[Generation, list[BucketWrite]]:
    """Do ``work(base, bucket)`` for every bucket, as many at a time as the engine has slots; commit what they wrote.

    Where another writer was first, what it left alone is kept: segments of buckets that it did not touch are committed
    on its generation as they are, and ``work`` is done again, on that generation, for the other buckets only. To be
    called inside ``with archive.writing() as base``.

    Where ``work`` fails, the segments written are deleted again. After an error of the commit they stay: the manifest
    that names them may be there.

    Raises:
        CommitConflict: others won twenty times in a row, or changed the number of buckets; nothing was committed.
    """
    written: dict[int, BucketWrite] = {}
    todo = list(buckets)
    for _ in range(MAX_TRIES):
        try:
            for bucket, done in run_buckets(todo, partial(work, base), engine, progress):
                if done is not None:
                    written[bucket] = done
        except BaseException:
            _delete_new(archive, base, written)
            raise
        if not written:
            return base, []
        try:
            generation = archive.commit(base, {b: w.segments for b, w in written.items()}, note)
        except CommitConflict:
            newest = archive.pin()
            todo = [b for b in buckets if not same_bucket(base, newest, b)]
            _delete_new(archive, base, {b: written.pop(b) for b in todo if b in written})
            if newest.n_buckets != base.n_buckets:
                raise
            base = newest
        else:
            return generation, list(written.values())
    _delete_new(archive, base, written)
    raise CommitConflict(f"other writers were first {MAX_TRIES} times in a row; run it again")


def same_bucket(old: Generation, new: Generation, bucket: int) -> bool:
    """Whether what a writer of the bucket built on is still so."""
    return (
        old.n_buckets == new.n_buckets
        and old.schema == new.schema
        and old.tombstone_index.files.get(bucket) == new.tombstone_index.files.get(bucket)
        and [old.segments[i] for i in old.segments_of(bucket)] == [new.segments[i] for i in new.segments_of(bucket)]
    )


def run_buckets(
    buckets: Sequence[int],
    work: Callable[[int], BucketWrite | None],
    engine: BucketEngine,
    progress: Progress | None = None,
) -> Iterator[tuple[int, BucketWrite | None]]:
    """(bucket, what ``work`` gave) as they are done. The first failure is raised when the others are done."""
    with ThreadPoolExecutor(engine.slots) as pool:
        tasks = {pool.submit(work, bucket): bucket for bucket in buckets}
        failed: BaseException | None = None
        for i, task in enumerate(as_completed(tasks)):
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                yield tasks[task], task.result()
            elif failed is None:
                failed = error
                for other in tasks:
                    other.cancel()
            if progress is not None:
                progress(i + 1, len(tasks))
        if failed is not None:
            raise failed


def _delete_new(archive: Archive, base: Generation, written: Mapping[int, BucketWrite]) -> None:
    held = {info.name for _, info in base.segments}
    for info in (info for w in written.values() for info in w.segments if info.name not in held):
        archive.objects.delete(info.name)


def report_of(generation: Generation, written: Sequence[BucketWrite]) -> CompactReport:
    """What was done, in all buckets together."""
    events, merged = sum(w.events for w in written), sum(w.merged_events for w in written)
    return CompactReport(generation.number, events, merged, len(generation.segments))


def write_bucket(task: BucketTask) -> BucketWrite | None:
    """Write the bucket's new segment; None where nothing changes.

    Raises:
        CorruptionError: an input is damaged, or the output would not hold what the inputs held.
        StoreError: the disk refuses; nothing is left.
    """
    base, schema = task.base, task.base.schema
    numbers = base.segments_of(task.bucket)
    keep = 0 if task.full else len(numbers) if task.keep else _kept(base, numbers, task.n_new)
    if not task.n_new and len(numbers) - keep <= 1 and not (task.full and _unsettled(base, numbers)):
        return None
    older, view = base.only(numbers[:keep]), base.only(numbers[keep:])
    # Where nothing is merged there is nothing to prove: what is new is what the writer digests.
    expected = digests_of(view) if view.segments else None
    n_new = 0
    hides: list[Hides] = []
    rows = rows_of(schema, PART_BYTES)
    with SegmentWriter(
        base.objects, task.name, schema, bucket=task.bucket, n_buckets=base.n_buckets, stripe_rows=STRIPE_ROWS
    ) as writer:
        for users, new in _aligned(view, task.parts, rows):
            n_new += len(new.events)
            if expected is not None and len(new.events):
                expected = plus(expected, content_digests(new.events, schema))
            joined, carried = _joined(older, view, users, new, rows)
            for events in joined:
                writer.add(events)
            hides.append(carried)
        info = writer.finish(_all_hides([*hides, *_lasting(older, view)], base))
    if expected is not None:
        prove(base, expected, [info], "compaction", info.name)
    segments = [base.segments[n][1] for n in numbers[:keep]] + [info]
    return BucketWrite(segments, n_new, info.n_rows - n_new)


def _kept(base: Generation, numbers: Sequence[int], new_rows: int) -> int:
    """How many of the oldest segments stay as they are."""
    keep, rows = len(numbers), new_rows
    while keep and base.segments[numbers[keep - 1]][1].n_rows <= GROWTH * rows:
        keep -= 1
        rows += base.segments[numbers[keep]][1].n_rows
    return keep


def _unsettled(base: Generation, numbers: Sequence[int]) -> bool:
    """Whether a segment carries hides or overlays, or has other columns than today's schema (by another name is no
    other)."""
    today = {(c.id, c.dtype, c.nullable) for c in stored_columns(base.schema)}
    return any(
        base.segments[n][1].overlays
        or len(base.segment(n).hides.records)
        or {(c.id, c.dtype, c.nullable) for c in base.segment(n).columns} != today
        for n in numbers
    )


def _aligned(view: Generation, parts: Iterable[NewEvents], rows_at_once: int) -> Iterator[tuple[Users, NewEvents]]:
    """Users of the view's segments and new events, side by side: users ascend over all pairs, none is in two."""
    olds = users_by_rows(view, rows_at_once)
    news: Iterator[NewEvents] = (part for part in parts if len(part.events.users))
    nobody = as_users([], view.schema.user_kind)
    old, new = next(olds, None), next(news, None)
    older, newer = list(islice(olds, 1)), list(islice(news, 1))
    if old is not None and new is not None and not older and not newer:
        # All there is: one part, not one of the users of both and one of the rest.
        yield old, new
        return
    olds, news = chain(older, olds), chain(newer, news)
    while old is not None or new is not None:
        if old is None or new is None:
            yield (nobody if old is None else old), (_nothing(view) if new is None else new)
            old, new = (None if old is None else next(olds, None)), (None if new is None else next(news, None))
            continue
        users = new.events.users
        last: Any = min(old[-1], users[-1])
        a, b = int(np.searchsorted(old, last, "right")), int(np.searchsorted(users, last, "right"))
        yield old[:a], new.users(0, b)
        old = old[a:] if a < len(old) else next(olds, None)
        new = new.users(b, len(users)) if b < len(users) else next(news, None)


def _nothing(view: Generation) -> NewEvents:
    return NewEvents.without_hides(Events.empty(as_users([], view.schema.user_kind), {}))


def _joined(
    older: Generation, view: Generation, held: Users, new: NewEvents, rows_at_once: int
) -> tuple[Iterator[Events], Hides]:
    """Events of the users ``held`` in the merged segments and the new ones, hides applied, in one part (of a long user
    several); and the hides of events of older segments."""
    schema = view.schema
    columns = [c for c in stored_columns(schema) if c.group != KEYS_GROUP]
    if len(held):
        joined: npt.NDArray[Any] = np.concatenate([new.events.users, held])
        users = as_users(np.unique(joined), schema.user_kind)
        pieces = look_up(view, users)
        row_of = np.searchsorted(users, new.events.users)
        own = np.repeat(np.arange(len(users)), np.diff(pieces.hide_off))
        brought = np.repeat(row_of, np.diff(new.hide_offsets))
        records = np.concatenate([pieces.hides, new.hides])
        hides, hide_off = group_hides(len(users), np.concatenate([own, brought]), records)
        long = len(users) == 1 and int(pieces.field("n_rows").sum()) > LONG_PARTS * rows_at_once
        if long:
            parts = spans(view, pieces, new.events, columns, rows_at_once, STRIPE_ROWS)
        else:
            old = read_everything(view, users, columns, ReadStats())
            parts = iter([append_new(old, new.events, row_of, columns) if len(new.events) else old])
    else:
        users, hides, hide_off, parts = new.events.users, new.hides, new.hide_offsets, iter([new.events])
    hidden = (hide(part, hides, hide_off) for part in parts)
    if not len(hides):
        return hidden, Hides(users[:0], np.zeros(1, np.int64), hides)
    owner = np.repeat(np.arange(len(users)), np.diff(hide_off))
    watermark = look_up(older, users).watermark
    carried = hides["arrival"] <= watermark[owner]
    records, offsets = group_hides(len(users), owner[carried], hides[carried])
    has = np.flatnonzero(np.diff(offsets))
    return hidden, Hides(users[has], np.append(offsets[has], offsets[-1]), records)


def _lasting(older: Generation, view: Generation) -> Iterator[Hides]:
    """Hides of events of older segments in the merged ones, which may have no row of their users: of corrections that
    went."""
    for number in range(len(view.segments)):
        held = view.segment(number).hides
        watermark = look_up(older, held.users).watermark
        kept = held.records["arrival"] <= np.repeat(watermark, np.diff(held.offsets))
        yield Hides(held.users, offsets_of(kept)[held.offsets], held.records[kept])


def _all_hides(parts: Sequence[Hides], base: Generation) -> Hides:
    """Hides of all parts by user, each once."""
    some = [p for p in parts if len(p.records)]
    if not some:
        return Hides(as_users([], base.schema.user_kind), np.zeros(1, np.int64), np.empty(0, HIDE_DTYPE))
    named: npt.NDArray[Any] = np.concatenate([np.repeat(p.users, np.diff(p.offsets)) for p in some])
    users, owner = np.unique(named, return_inverse=True)
    records, offsets = group_hides(len(users), owner.astype(np.int64), np.concatenate([p.records for p in some]))
    return Hides(as_users(users, base.schema.user_kind), offsets, records)
