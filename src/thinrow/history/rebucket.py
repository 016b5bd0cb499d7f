"""Rebucketing: a store's buckets are split, N to a multiple of N, as a new generation.

``bucket(u, N)`` is a hash modulo N, so users of bucket b go to the buckets b, b + N, b + 2N, ... of a multiple of N,
and nowhere else. Worked example, 4 to 8 buckets: the users of bucket 1 go to 1 or 5. So each old bucket is read once,
user after user, and written to its new ones; and a training table with ``bucket[4]`` stays co-partitioned: its bucket
1 is the archive's buckets 1 and 5.

Content digests prove that nothing was lost: those of the new segments must be the sum of those of the old ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from thinrow.core.errors import CommitConflict, InputError
from thinrow.core.users import as_users, bucket_of
from thinrow.history.archive.generation import MAX_BUCKETS, Archive, Generation
from thinrow.history.archive.hides import Hides
from thinrow.history.archive.layout import SegmentInfo, stored_columns
from thinrow.history.archive.scan import scan
from thinrow.history.archive.tombstones import TombstoneFile, read_tombstones, write_tombstones
from thinrow.history.archive.writer import SegmentWriter
from thinrow.history.buckets import PART_BYTES, Progress, new_name, rows_of, same_bucket
from thinrow.history.proof import digests_of, prove
from thinrow.jagged import HIDE_DTYPE, Events
from thinrow.schema.event_schema import KEYS_GROUP
from thinrow.storage.manifest import MAX_TRIES


@dataclass(frozen=True, slots=True)
class RebucketReport:
    """``generation`` has ``n_buckets`` buckets with ``events`` events, all of which were rewritten."""

    generation: int
    n_buckets: int
    events: int


@dataclass(frozen=True, slots=True)
class _Split:
    """What one old bucket became: new bucket -> segment, and new bucket -> tombstones."""

    segments: Mapping[int, SegmentInfo]
    tombstones: Mapping[int, TombstoneFile]


def rebucket(archive: Archive, n_buckets: int | None = None, progress: Progress | None = None) -> RebucketReport:
    """Rewrite the archive to ``n_buckets`` buckets, twice as many by default; one segment a bucket.

    Memory is that of some hundred thousand rows, or of one user's events. Appends and requests go on meanwhile; where a
    compaction commits first, the buckets that it changed are split again. A crash leaves files that no manifest names.

    Raises:
        InputError: ``n_buckets`` is not a multiple of the present number, or above 65,536.
        CommitConflict: others won twenty times in a row; nothing was changed.
        CorruptionError: an input is damaged, or the output would not hold what the inputs held.
    """
    with archive.writing("rebucketing") as base:
        wanted = 2 * base.n_buckets if n_buckets is None else n_buckets
        if wanted <= base.n_buckets or wanted % base.n_buckets or wanted > MAX_BUCKETS:
            raise InputError(
                f"n_buckets={wanted}; it must be a multiple of {base.n_buckets}, above it and at most {MAX_BUCKETS}"
            )
        splits: dict[int, _Split] = {}
        for _ in range(MAX_TRIES):
            _split_all(base, wanted, splits, progress)
            try:
                generation = _commit(archive, base, wanted, splits)
            except CommitConflict:
                newest = archive.pin()
                for bucket in [b for b in splits if not same_bucket(base, newest, b)]:
                    _delete(base, splits.pop(bucket))
                if newest.n_buckets != base.n_buckets:
                    raise
                base = newest
            else:
                return RebucketReport(generation.number, wanted, generation.n_rows)
        for split in splits.values():
            _delete(base, split)
        raise CommitConflict(f"other writers were first {MAX_TRIES} times in a row; run it again")


def _split_all(base: Generation, n_buckets: int, splits: dict[int, _Split], progress: Progress | None) -> None:
    """Split the buckets that are not in ``splits`` yet. After a failure nothing is left."""
    try:
        for bucket in [b for b in range(base.n_buckets) if b not in splits]:
            splits[bucket] = _split(base, bucket, n_buckets)
            if progress is not None:
                progress(len(splits), base.n_buckets)
    except BaseException:
        for split in splits.values():
            _delete(base, split)
        raise


def _split(base: Generation, bucket: int, n_buckets: int) -> _Split:
    targets = range(bucket, n_buckets, base.n_buckets)
    segments = _split_segments(base, bucket, targets, n_buckets)
    return _Split(segments, _split_tombstones(base, bucket, targets, n_buckets))


def _split_segments(base: Generation, bucket: int, targets: range, n_buckets: int) -> dict[int, SegmentInfo]:
    view, schema = base.only(base.segments_of(bucket)), base.schema
    columns = [c for c in stored_columns(schema) if c.group != KEYS_GROUP]
    none = Hides(as_users([], schema.user_kind), np.zeros(1, np.int64), np.empty(0, HIDE_DTYPE))
    written: dict[int, SegmentInfo] = {}
    with ExitStack() as stack:
        writers: dict[int, SegmentWriter] = {}
        for part in scan(view, columns, rows_at_once=rows_of(schema, PART_BYTES)):
            for target, events in _parts(part, n_buckets):
                if target not in writers:
                    name = new_name(target)
                    writers[target] = stack.enter_context(
                        SegmentWriter(base.objects, name, schema, bucket=target, n_buckets=n_buckets)
                    )
                writers[target].add(events)
        assert set(writers) <= set(targets)
        for target, writer in writers.items():
            written[target] = writer.finish(none)
    if view.segments:
        prove(base, digests_of(view), list(written.values()), "rebucketing", view.segments[0][1].name)
    return written


def _parts(events: Events, n_buckets: int) -> Iterator[tuple[int, Events]]:
    buckets = bucket_of(events.users, n_buckets)
    for target in np.unique(buckets).tolist():
        yield target, events.take_users(np.flatnonzero(buckets == target))


def _split_tombstones(base: Generation, bucket: int, targets: range, n_buckets: int) -> dict[int, TombstoneFile]:
    file = base.tombstone_index.files.get(bucket)
    if file is None:
        return {}
    records = read_tombstones(base.objects, bucket, file)
    of = records["hash"] % n_buckets
    return {t: write_tombstones(base.objects, t, records[of == t]) for t in targets if (of == t).any()}


def _commit(archive: Archive, base: Generation, n_buckets: int, splits: Mapping[int, _Split]) -> Generation:
    changed = {target: [info] for s in splits.values() for target, info in s.segments.items()}
    changed |= {target: [] for target in range(n_buckets) if target not in changed}
    carried = {}
    index = base.tombstone_index
    if index.files:
        files = {target: file for s in splits.values() for target, file in s.tombstones.items()}
        carried = {"tombstones": replace(index, files=files).to_dict()}
    return archive.commit(base, changed, "rebucket", carried=carried, n_buckets=n_buckets)


def _delete(base: Generation, split: _Split) -> None:
    for name in [f.name for f in split.segments.values()] + [f.name for f in split.tombstones.values()]:
        base.objects.delete(name)
