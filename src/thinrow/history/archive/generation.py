"""Generations: immutable views of the archive, and the log of manifests that makes them.

A generation is a manifest: for each bucket an ordered list of segments. Commit is put-if-absent of the next number, so
of two writers one wins, and a pinned reader never sees a change.

Worked example: a reader works on generation 4 inside ``with archive.hold(generation)``. Generations 5 and 6 are
committed and garbage is collected: 4 stays, 5 goes. After the ``with``, or when the reader dies, a collection takes 4.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import (
    CommitConflict,
    CorruptionError,
    Erased,
    InputError,
    ObjectNotFound,
    StoreError,
    StoreExists,
    StoreNotFound,
)
from thinrow.core.users import Users, as_users, bucket_of
from thinrow.history.archive.dictionaries import ColumnDictionary, unite
from thinrow.history.archive.layout import OverlayInfo, SegmentInfo, StoredColumn, overlay_region
from thinrow.history.archive.overlay import Overlay
from thinrow.history.archive.projected import ProjectedColumns, ReadCounter
from thinrow.history.archive.segment import Segment
from thinrow.history.archive.segments import SegmentSet
from thinrow.history.archive.tables import KnownTables
from thinrow.history.archive.tombstones import (
    TombstoneFile,
    TombstoneIndex,
    Tombstones,
    find,
    keys_of,
    no_tombstones,
    read_tombstones,
)
from thinrow.schema import EventSchema, Projection, SchemaChange
from thinrow.schema.evolution import schema_at
from thinrow.storage.garbage import Garbage, collect, files_of, require_files
from thinrow.storage.manifest import ManifestLog
from thinrow.storage.objects import ObjectStore, each
from thinrow.storage.pages import PageCache
from thinrow.storage.pins import Pin, Pins, Revocations

MAX_BUCKETS = 65_536
#: United dictionaries that a generation keeps.
_MAX_DICTIONARIES = 4_096
#: Sets of segments that a generation keeps opened as one.
_MAX_SETS = 256
#: Optional keys of a manifest that every commit passes on.
_CARRIED = ("tombstones", "retention", "schema_log")


class Generation:
    """A pinned, immutable view. Safe to share between threads.

    Attributes:
        number: the manifest's number, from 1.
        schema: the event schema that reads deliver.
        schema_log: the changes that led to it, oldest first.
        n_buckets: only rebucketing changes it.
        segments: (bucket, SegmentInfo) of every segment; a segment's *number* is its place in this list.
        tombstone_index: files of tombstones by bucket.
        carried: optional entries of the manifest, which every commit passes on.
    """

    def __init__(self, archive: Archive, number: int, body: Mapping[str, Any]) -> None:
        self._archive = archive
        self.number = number
        try:
            self.schema = EventSchema.from_dict(body["schema"])
            self.schema_log = tuple(SchemaChange.from_dict(c) for c in body.get("schema_log", ()))
            self.n_buckets, lists = int(body["n_buckets"]), body["segments"]
            self.carried: dict[str, Any] = {k: body[k] for k in _CARRIED if k in body}
            self.tombstone_index = TombstoneIndex.from_dict(body.get("tombstones"))
            if not 1 <= self.n_buckets <= MAX_BUCKETS or len(lists) != self.n_buckets:
                raise ValueError(f"{len(lists)} lists of segments for {self.n_buckets} buckets")
            self.segments: list[tuple[int, SegmentInfo]] = [
                (bucket, SegmentInfo.from_dict(s)) for bucket in range(self.n_buckets) for s in lists[bucket]
            ]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as e:
            raise CorruptionError(f"not a generation's manifest: {e}", file=f"manifests/{number:020d}.json") from e
        self._lock = threading.Lock()
        self._dictionaries: dict[tuple[int, tuple[int, ...]], ColumnDictionary] = {}
        self.columns_of = ProjectedColumns(self.schema).of
        self._sets: dict[bytes, SegmentSet] = {}
        self.tables = KnownTables()
        ends = np.cumsum([len(infos) for infos in lists], dtype=np.int64)
        #: (n_buckets,) first segment number of each bucket (inclusive) and last (exclusive).
        self.segment_bounds = np.append(0, ends[:-1]), ends
        self.most_segments = max(map(len, lists), default=0)
        archive.remember(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Opened again from the object store, so that a task on another machine can have it."""
        return reopen, (self._archive.objects, self.number)

    @property
    def objects(self) -> ObjectStore:
        """Where the segments are."""
        return self._archive.objects

    @property
    def usage(self) -> ReadCounter | None:
        """What counts the reads of columns, if anything does."""
        return self._archive.usage

    @property
    def n_rows(self) -> int:
        """Events held."""
        return sum(info.n_rows for _, info in self.segments)

    @property
    def bytes(self) -> int:
        """Bytes of all segment files, index included, and of their overlays."""
        return sum(info.bytes + sum(o.bytes for o in info.overlays) for _, info in self.segments)

    def segments_of(self, bucket: int) -> list[int]:
        """Numbers of the bucket's segments, oldest first."""
        bounds = self.segment_bounds
        return list(range(int(bounds[0][bucket]), int(bounds[1][bucket]))) if 0 <= bucket < self.n_buckets else []

    def newest(self) -> Generation:
        """The newest generation of the same archive; all that requests saw in this one is there, less what was erased.

        Raises as ``Archive.pin``.
        """
        return self._archive.pin()

    def require_live(self) -> None:
        """Raises Erased where this generation was revoked, by whatever process, because something in it was erased."""
        self._archive.look_for_revocations()
        self._archive.require_live(self.number)

    def require_readable(self) -> None:
        """Raises Erased where this process knows that the generation was revoked."""
        self._archive.require_live(self.number)

    def segment(self, number: int) -> Segment:
        """The opened segment.

        Raises:
            CorruptionError: it is damaged, or the file is another segment.
            ObjectNotFound: it is missing: lost, or collected while nobody held this generation.
            Erased: this generation was revoked, because something in it was erased.
        """
        self._archive.require_live(self.number)
        try:
            return self._archive.open_segment(*self.segments[number])
        except ObjectNotFound:
            self.require_live()
            raise

    def opened(self, numbers: npt.NDArray[np.int64]) -> SegmentSet:
        """The segments that ``numbers`` (any order, repeats allowed) name, opened as one. Raises as ``segment``."""
        used = np.zeros(len(self.segments), np.bool_)
        used[numbers] = True
        return self.opened_where(used)

    def opened_where(self, used: npt.NDArray[np.bool_]) -> SegmentSet:
        """The segments whose number is marked in ``used``, opened as one. Raises as ``segment``."""
        key = used.tobytes()
        found = self._sets.get(key)
        if found is None:
            numbers = np.flatnonzero(used)
            opened = each(self.objects, self._whole, numbers.tolist())
            found = SegmentSet(self.objects, opened, numbers, len(self.segments), self.overlay)
            with self._lock:
                if len(self._sets) >= _MAX_SETS:
                    self._sets.clear()
                self._sets[key] = found
        else:
            self.require_readable()
        return found

    def _whole(self, number: int) -> Segment:
        """The opened segment with its hide-list, which every set needs."""
        segment = self.segment(number)
        _ = segment.hides
        return segment

    def users(self) -> Users:
        """All users with an event, ascending. Raises CorruptionError or ObjectNotFound."""

        def keys(number: int) -> Users | None:
            table = self.segment(number).pieces
            return table.keys() if table.n_records else None

        found = [k for k in each(self.objects, keys, range(len(self.segments))) if k is not None]
        return as_users(np.unique(np.concatenate(found)) if found else [], self.schema.user_kind)

    def tombstones(self, users: Users) -> Tombstones:
        """Tombstones of distinct ``users``, in their order. Raises CorruptionError or ObjectNotFound."""
        index = self.tombstone_index
        if not index.files or not len(users):
            return no_tombstones(len(users))
        buckets = bucket_of(users, self.n_buckets)
        parts, owners = [no_tombstones(0).records], [np.empty(0, np.int64)]
        for bucket in np.unique(buckets).tolist():
            if bucket in index.files:
                members = np.flatnonzero(buckets == bucket)
                held = self._archive.open_tombstones(bucket, index.files[bucket])
                found = find(*held, keys_of(users[members], index.salt))
                parts.append(found.records)
                owners.append(members[found.owner])
        owner = np.concatenate(owners)
        order = np.argsort(owner, kind="stable")
        offsets = np.searchsorted(owner[order], np.arange(len(users) + 1)).astype(np.int64)
        return Tombstones(offsets, np.concatenate(parts)[order])

    def overlay(self, number: int, column_id: int) -> Overlay | None:
        """The overlay of a segment's column, opened; None where it has none. Raises as ``segment``."""
        info = next((o for o in self.segments[number][1].overlays if o.column == column_id), None)
        return None if info is None else self._archive.open_overlay(info, self.segment(number))

    def stream_of(self, number: int, column_id: int) -> tuple[str, int, StoredColumn] | None:
        """Region, index of the value stream within its chunks, and how it is stored, of a column of segment ``number``;
        None where it is not there. The region is a feature group of the segment, or that of an overlay."""
        overlay = self.overlay(number, column_id)
        if overlay is None:
            return self.segment(number).stream_of(column_id)
        return overlay_region(column_id), overlay.column.n_streams - 1, overlay.column

    def held_dictionary(self, number: int, column_id: int) -> npt.NDArray[np.uint64] | pa.Array | None:
        """The dictionary of a column in one segment. Raises CorruptionError."""
        overlay = self.overlay(number, column_id)
        if overlay is not None:
            return overlay.dictionary()
        segment = self.segment(number)
        part = segment.stream_of(column_id)
        return None if part is None else segment.dictionary(part[2])

    def dictionary(self, spec: StoredColumn, numbers: tuple[int, ...]) -> ColumnDictionary:
        """The column's dictionaries over the segments ``numbers`` (ascending), united once for each such set."""
        key = spec.id, numbers
        with self._lock:
            found = self._dictionaries.get(key)
            if found is None:
                held = each(self.objects, lambda i: self.held_dictionary(i, spec.id), numbers)
                found = unite(dict(zip(numbers, held, strict=True)), len(self.segments), spec)
                if len(self._dictionaries) >= _MAX_DICTIONARIES:
                    self._dictionaries.clear()
                self._dictionaries[key] = found
            return found

    def to_arrow(
        self,
        users: object = None,
        projection: Projection | None = None,
        *,
        at: int | None = None,
        batch_rows: int | None = None,
    ) -> pa.RecordBatchReader:
        """A stream of the archived events of ``users`` (all where None) that are visible now, in bounded memory.

        Columns are ``user_id``, ``event_ts`` (timestamp of ms, UTC), ``arrival`` and the projection's. *Visible* are
        the events before ``at`` (exclusive; all where None) that no archived correction hides. All users come bucket
        by bucket, ascending within one; a user's events oldest first. Such a reader is read once::

            reader = store.pin().to_arrow(projection=Projection(columns=("price",)))
            duckdb.sql("select user_id, sum(price) from reader group by all")

        Args:
            users: distinct ids, in the order wanted.
            projection: columns, the newest n, a horizon back from ``at``.
            at: time in ms.
            batch_rows: most rows of a batch; also about how many are held in memory, or one user's.

        Raises:
            InputError, SchemaError, UserKindError: as ``reconstruct``. While the stream is read: CorruptionError.
        """
        from thinrow.history.archive import arrow

        projection, rows = arrow.asked(projection, batch_rows)
        read = arrow.read_archived(self, projection, arrow.time_of(at, projection))
        return arrow.stream(self, projection, arrow.groups_of_users(self, users, projection, rows), read, rows)

    def only(self, numbers: Sequence[int], *, overlays: bool = True) -> Generation:
        """A view of some of the segments (for merging them); without ``overlays`` as their own files have them."""
        lists: list[list[dict[str, Any]]] = [[] for _ in range(self.n_buckets)]
        for n in numbers:
            info = self.segments[n][1]
            lists[self.segments[n][0]].append((info if overlays else replace(info, overlays=())).to_dict())
        body = {"schema": self.schema.to_dict(), "n_buckets": self.n_buckets, "segments": lists}
        body["schema_log"] = [c.to_dict() for c in self.schema_log]
        return Generation(self._archive, self.number, body)

    def hold(self, holder: str = "") -> AbstractContextManager[Generation]:
        """See ``Archive.hold``."""
        return self._archive.hold(self, holder)

    def schema_at(self, schema_id: int) -> EventSchema:
        """An earlier schema of the store. Raises SchemaError where there was none of that id."""
        return schema_at(self.schema, self.schema_log, schema_id)

    def at(self, number: int) -> Generation:
        """Another generation of the same archive. Raises ObjectNotFound where there is none."""
        return self if type(number) is int and number == self.number else self._archive.generation(number)


class Archive:
    """The immutable tier of one store: manifests and segments in an object store."""

    def __init__(self, objects: ObjectStore, clock: Clock = system_clock, *, pins: Pins | None = None) -> None:
        self.objects = objects
        self._log = ManifestLog(objects)
        self._retired = ManifestLog(objects, "retired")
        self.clock = clock
        self._pins = pins or Pins(objects)
        self._pins.on_renewal(self.look_for_revocations)
        self._revocations = Revocations(objects, self._pins.clock)
        self._void_below = 0
        self._holds: dict[int, tuple[Pin, int]] = {}
        self._holding = threading.Lock()
        self._writers: set[Pin] = set()
        self._alive: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._counting = threading.Lock()
        self._lock = threading.Lock()
        self._open: dict[str, Segment] = {}
        self._overlays: dict[str, Overlay] = {}
        self.usage: ReadCounter | None = None
        self._tombstones: dict[str, tuple[npt.NDArray[np.void], npt.NDArray[np.bytes_]]] = {}
        self._pages = PageCache()
        self._pinned: Generation | None = None

    @classmethod
    def create(cls, objects: ObjectStore, schema: EventSchema, n_buckets: int, clock: Clock = system_clock) -> Archive:
        """Commit generation 1, empty.

        Raises:
            InputError: ``n_buckets`` is not between 1 and 65,536.
            StoreExists: the object store has a manifest already.
        """
        if not 1 <= n_buckets <= MAX_BUCKETS:
            raise InputError(f"n_buckets={n_buckets}; it must be between 1 and {MAX_BUCKETS}")
        archive = cls(objects, clock)
        try:
            if archive.numbers():
                raise CommitConflict("generation 1 was committed and collected")
            archive._put(1, schema, n_buckets, [[] for _ in range(n_buckets)], "create")
        except CommitConflict:
            raise StoreExists("an archive is there already; open it, or choose another path") from None
        return archive

    def destroy(self) -> None:
        """Undo ``create``, while nothing else has been committed."""
        self._log.drop(1)

    def pin(self) -> Generation:
        """The newest generation. Raises StoreNotFound where there is none."""
        pinned = self._pinned
        if pinned is not None and self._log.is_newest(pinned.number):
            return pinned
        latest = self._log.latest()
        if latest is None:
            raise StoreNotFound("the archive has no manifest; create the store first: thinrow ingest --create ...")
        number, body = latest
        with self._lock:
            if self._pinned is None or self._pinned.number != number:
                self._pinned = Generation(self, number, body)
                live = {name for _, info in self._pinned.segments for name in info.files}
                self._open = {n: s for n, s in self._open.items() if n in live}
                self._overlays = {n: o for n, o in self._overlays.items() if n in live}
                graves = {f.name for f in self._pinned.tombstone_index.files.values()}
                self._tombstones = {n: t for n, t in self._tombstones.items() if n in graves}
            return self._pinned

    def generation(self, number: int) -> Generation:
        """Generation ``number``. Raises ObjectNotFound where there is none, or none any more."""
        try:
            body = self._log.load(number)
        except ObjectNotFound:
            # Between the two it may have been collected, or stayed for somebody who holds it.
            body = self._retired.load(number)
        return Generation(self, number, body)

    def numbers(self) -> list[int]:
        """Numbers of all generations, oldest first."""
        return self._log.list()

    @contextmanager
    def hold(self, generation: Generation, holder: str = "") -> Iterator[Generation]:
        """Keep the files of ``generation`` from being collected, by any process, until the context ends.

        What reads for longer than the grace time of a collection (an hour by default) must hold what it reads. The pin
        is a lease: it is renewed while this process lives, and ends a minute or two after its death.

        Args:
            holder: who, for those who ask why a generation is still there; this process by default.

        Raises:
            ObjectNotFound: it has been collected, or is about to be; take a newer one.
            Erased: it was revoked.
            StoreError: the store takes no writes.
        """
        number = generation.number
        self.require_live(number)
        with self._holding:
            pin, count = self._holds.get(number) or (self._pins.take(number, holder), 0)
            if count == 0 and (self._log.floor() > number or not self._log.has(number)):
                pin.release()
                raise ObjectNotFound(f"generation {number} has been collected; take a newer one: store.pin()")
            self._holds[number] = pin, count + 1
        try:
            yield generation
        finally:
            with self._holding:
                pin, count = self._holds.pop(number)
                if count > 1:
                    self._holds[number] = pin, count - 1
                else:
                    pin.release()

    @contextmanager
    def writing(self, holder: str = "", *, since_ms: int | None = None) -> Iterator[Generation]:
        """The newest generation, to build on: while the context lasts, what is written (since ``since_ms``) is kept.

        Raises:
            StoreNotFound: the archive has no generation.
        """
        while True:
            base = self.pin()
            pin = self._pins.take(base.number, holder, writes=True, since_ms=since_ms)
            if self._log.floor() <= base.number:
                break
            pin.release()
        self._writers.add(pin)
        try:
            yield base
        finally:
            self._writers.discard(pin)
            pin.release()

    def holders(self) -> list[tuple[int, str, bool]]:
        """(generation, who, whether it writes) of every pin of any process."""
        return [(p.number, p.holder, p.writes) for p in self._pins.live()]

    def collect_garbage(self, *, keep: int = 2, grace_s: float = 3_600.0, dry_run: bool = False) -> Garbage:
        """Remove generations that are neither kept, young nor held, and every file that only they needed.

        A generation that this process still has an object of counts as held. See ``thinrow.storage.garbage``.

        Args:
            keep: the newest so many generations stay, 1 or more.
            grace_s: seconds that a generation stays after it was replaced, and that an unfinished write stays.
            dry_run: only say what would go.

        Raises:
            InputError: an argument is out of bounds.
            CorruptionError: a manifest is damaged: what it names is not known, so nothing more is removed.
        """
        self.pin()
        self.look_for_revocations()
        with self._counting:
            in_use = {g.number for g in self._alive}
        return collect(
            self.objects,
            self._pins,
            keep=keep,
            grace_ms=int(grace_s * 1000),
            in_use=in_use,
            void_below=self._void_below,
            dry_run=dry_run,
        )

    def revoke(self, generations_below: int, grace_s: float = 0.0) -> None:
        """Make generations below ``generations_below`` (exclusive) unreadable: something in them was erased.

        Returns when nobody holds one any more, at the latest after ``grace_s`` seconds; from then on whoever reads one
        gets ``Erased``, and ``collect_garbage`` removes it although it may be pinned. A holder in another process
        learns of it when it renews its pin, three times a minute.
        """
        self._revocations.add(generations_below, int(grace_s * 1000))
        while self._revocations.below() < generations_below:
            if not any(p.number < generations_below and not p.writes for p in self._pins.live()):
                break
            time.sleep(0.05)
        self._void_below = max(self._void_below, generations_below)

    def look_for_revocations(self) -> None:
        """Learn which generations other processes have revoked."""
        self._void_below = max(self._void_below, self._revocations.below())

    def require_live(self, number: int) -> None:
        """Raises Erased where generation ``number`` was revoked."""
        if number < self._void_below:
            raise Erased(
                f"generation {number} was revoked: something in it was erased; "
                f"read generation {self._void_below} or a later one: store.pin()"
            )

    def remember(self, generation: Generation) -> None:
        """Count a generation as held while this process has the object."""
        with self._counting:
            self._alive.add(generation)

    def open_segment(self, bucket: int, info: SegmentInfo) -> Segment:
        """The opened segment, kept open while the newest generation holds it."""
        found = self._open.get(info.name)
        if found is None:
            found = Segment(self.objects, info.name, self._pages)
            found.require(bucket, info)
            with self._lock:
                found = self._open.setdefault(info.name, found)
        return found

    def open_overlay(self, info: OverlayInfo, segment: Segment) -> Overlay:
        """The opened overlay, kept open while the newest generation holds it."""
        with self._lock:
            found = self._overlays.get(info.name)
        if found is None:
            found = Overlay(self.objects, info, segment, self._pages)
            with self._lock:
                found = self._overlays.setdefault(info.name, found)
        return found

    def open_tombstones(self, bucket: int, file: TombstoneFile) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bytes_]]:
        """Records of a file of tombstones and their keys, kept while the newest generation names it."""
        with self._lock:
            found = self._tombstones.get(file.name)
        if found is None:
            records = read_tombstones(self.objects, bucket, file)
            found = records, np.ascontiguousarray(records["key"])
            with self._lock:
                self._tombstones[file.name] = found
        return found

    def commit(
        self,
        base: Generation,
        changed: Mapping[int, Sequence[SegmentInfo]],
        note: str,
        schema: EventSchema | None = None,
        carried: Mapping[str, Any] | None = None,
        n_buckets: int | None = None,
    ) -> Generation:
        """Commit base + 1 with the segment lists of the ``changed`` buckets replaced (of all, where ``n_buckets`` is
        not that of ``base``), and the entries ``carried``.

        Raises:
            CommitConflict: another writer committed that number first.
            StoreError: this process stood still for longer than its pin, and what it wrote was collected.
        """
        n_buckets = n_buckets or base.n_buckets
        lists = [[base.segments[i][1] for i in base.segments_of(b)] for b in range(n_buckets)]
        for bucket, infos in changed.items():
            lists[bucket] = list(infos)
        entries = {**base.carried, **(carried or {})}
        new = {name for infos in lists for info in infos for name in info.files} | files_of(entries)
        new -= {name for _, info in base.segments for name in info.files} | files_of(base.carried)
        require_files(self.objects, new)
        self._put(base.number + 1, schema or base.schema, n_buckets, lists, note, entries)
        if not all(pin.valid for pin in list(self._writers)):
            try:
                require_files(self.objects, new)
            except StoreError:
                if self._log.is_newest(base.number + 1):
                    self._log.drop(base.number + 1)
                raise
        return self.pin()

    def _put(
        self,
        number: int,
        schema: EventSchema,
        n_buckets: int,
        lists: Sequence[Sequence[SegmentInfo]],
        note: str,
        carried: Mapping[str, Any] | None = None,
    ) -> None:
        body = {
            **(carried or {}),
            "generation": number,
            "n_buckets": n_buckets,
            "schema": schema.to_dict(),
            "created_ms": self.clock(),
            "segments": [[s.to_dict() for s in infos] for infos in lists],
            "note": note,
        }
        self._log.commit(number, body)


def reopen(objects: ObjectStore, number: int) -> Generation:
    """Generation ``number`` of the archive in ``objects``. Raises ObjectNotFound."""
    return Archive(objects).generation(number)
