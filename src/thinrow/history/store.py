"""HistoryStore: one directory with a recent tier, an archive and what belongs to them.

::

    store/
      archive/    manifests and segments (docs/format/archive-v2.md); or in a bucket (see ``place``)
      recent/     the LMDB environment (docs/format/recent-v2.md); or on a Redis server (see ``tiers``)
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core import check as must
from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import InputError, StoreExists, StoreNotFound
from thinrow.core.users import Users, as_users, distinct
from thinrow.history.archive import arrow
from thinrow.history.archive.find import find_event
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.verify import Damage
from thinrow.history.backfill import BackfillReport, backfill
from thinrow.history.backup import BackupReport, backup, restore, told
from thinrow.history.buckets import CompactReport, Progress
from thinrow.history.bulk.source import BulkInput
from thinrow.history.compact import compact
from thinrow.history.dead_letters import FOLDER as DEAD_FOLDER
from thinrow.history.dead_letters import SOURCE as DEAD_SOURCE
from thinrow.history.dead_letters import DeadLetters, of_users, older_than
from thinrow.history.engines import ENGINE, BucketEngine, EngineName, engine_of
from thinrow.history.erase import EVENTS, RETENTION, EventsOf, Retention
from thinrow.history.erasure import (
    GRACE_S,
    Also,
    EraseReport,
    erase,
    expire_rewritten,
    finish,
    forget_gone,
    refuse_unfinished_loads,
    retain,
    retention_of,
)
from thinrow.history.evolve import evolve
from thinrow.history.intake import CheckedEvents, check_table, request_times
from thinrow.history.journal import Journal, Pending
from thinrow.history.live import read_live
from thinrow.history.load import MEMORY_BYTES, LoadOptions, LoadProgress, bulk_load
from thinrow.history.place import archive_objects, forget, remember, remembered
from thinrow.history.rebucket import RebucketReport, rebucket
from thinrow.history.recent.blocks import BlockTier
from thinrow.history.recent.tier import Advance, AppendResult, RecentTier
from thinrow.history.reconstruct import Reconstruction, reconstruct
from thinrow.history.snapshot import MAX_INLINE_EVENTS, Snapshot, take_snapshot
from thinrow.history.tiers import forget_tier, new_tier, open_tier
from thinrow.history.usage import UsageRecorder
from thinrow.history.verify import verify_recent
from thinrow.schema import EventSchema, Projection
from thinrow.schema.event_schema import check_new
from thinrow.schema.evolution import Evolution, fitting
from thinrow.storage.cache import DEFAULT_CACHE_BYTES
from thinrow.storage.garbage import Garbage
from thinrow.storage.manifest import ManifestLog
from thinrow.storage.objects import LocalObjects
from thinrow.storage.s3 import S3Location, S3Objects

DEFAULT_BUCKETS = 16
_POSITIVE, _COUNT = must.integer(1), must.integer(0)
_TEXT = must.instance(str, "give a str, or leave it out")
_SCHEMA = must.instance(EventSchema, "give an EventSchema: EventSchema.infer(table.schema, user=..., time=...)")
#: A compaction lets go of what has expired where that is at least this share of a bucket.
_SLACK = 0.2


class HistoryStore:
    """Histories of one kind of user, stored once. Use as a context manager, or call ``close``.

    Worked example::

        with thinrow.create("store", thinrow.EventSchema.infer(table.schema, user="user", time="ts")) as store:
            store.append(table)                                   # durable when it returns
            store.compact()                                       # into the archive
            built = store.read([7, 9], request_ts=3000)           # strictly before 3000 ms
            built.histories.to_jagged("item")
    """

    def __init__(
        self,
        path: Path,
        archive: Archive,
        recent: RecentTier,
        max_inline: int = MAX_INLINE_EVENTS,
        clock: Clock = system_clock,
    ) -> None:
        """Join parts that are open already; ``create`` and ``open`` make them."""
        self.path, self.archive, self.recent, self.max_inline = path, archive, recent, max_inline
        self._clock = clock
        archive.usage = UsageRecorder(archive.objects, clock)
        # A request must not see a number above ones that a bulk load has taken and not yet committed.
        self._numbering = threading.RLock()

    @staticmethod
    @must.checked(path=must.path)
    def exists(path: str | Path) -> bool:
        """Whether a store is at ``path``: its first manifest is what makes it one."""
        return bool(ManifestLog(archive_objects(path, cache_bytes=0)).list())

    @classmethod
    @must.checked(
        path=must.path, schema=_SCHEMA, n_buckets=must.whole, archive=_TEXT, cache_bytes=_COUNT, sync=must.flag
    )
    def create(
        cls,
        path: str | Path,
        schema: EventSchema,
        n_buckets: int = DEFAULT_BUCKETS,
        *,
        archive: str | None = None,
        recent: str | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        sync: bool = True,
        clock: Clock = system_clock,
    ) -> HistoryStore:
        """Make an empty store.

        Args:
            path: directory; made if absent.
            n_buckets: training tables take the same number; only ``rebucket`` changes it.
            archive: ``s3://bucket/prefix?endpoint=URL&region=NAME`` to keep the archive there; the folder remembers it.
            recent: ``redis://host:port/db?name=NAME&durability=always`` to keep recent events there, for many machines
                that append (docs/recent-tier.md); the folder remembers it.
            cache_bytes: of a distant archive to keep in the folder; 0 for no cache.
            sync: whether an append is on disk before it returns (False: it survives a killed process, not a power cut).

        Raises:
            StoreExists: a store is there.
            InputError: ``n_buckets`` is out of bounds, or ``archive`` or ``recent`` is no such URL.
            SchemaError: the name of a column or group holds NUL.
            StoreError: the server of recent events does not answer, or is not set to what its URL says.
        """
        path = Path(path)
        check_new(schema.columns)
        location = None if archive is None else S3Location.parse(archive)
        if cls.exists(path):
            raise StoreExists(f"a store is at {path} already; open it, or choose another path")
        # A creation that was killed may have left these.
        forget(path)
        forget_tier(path)
        if location is not None:
            if ManifestLog(S3Objects(location)).list():
                raise StoreExists(f"an archive is at {location} already; open it from here, or choose another prefix")
            remember(path, location)
        try:
            made = Archive.create(archive_objects(path, cache_bytes=cache_bytes), schema, n_buckets, clock)
        except BaseException:
            forget(path)
            raise
        try:
            return cls(path, made, new_tier(path, made, schema, recent, sync), clock=clock)
        except BaseException:
            made.destroy()
            forget(path)
            forget_tier(path)
            raise

    @classmethod
    @must.checked(path=must.path, archive=_TEXT, cache_bytes=_COUNT)
    def open(
        cls,
        path: str | Path,
        *,
        archive: str | None = None,
        recent: str | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        sync: bool = True,
        clock: Clock = system_clock,
    ) -> HistoryStore:
        """Open a store.

        Args:
            archive: not needed where the folder remembers it. A new folder takes over the archive of a lost one: what
                the lost one had not compacted is gone, and no two folders may append for one archive.
            recent: not needed where the folder remembers it. New folders, with ``archive``, make more machines serve
                and append for one store.

        Raises:
            StoreNotFound, NewerFormatError, CorruptionError.
            InputError: ``archive`` or ``recent`` is not where this store has them.
            StoreError: the server of recent events does not answer, or is not set to what its URL says.
        """
        path = Path(path)
        if archive is not None:
            _settle(path, S3Location.parse(archive))
        if not cls.exists(path):
            raise StoreNotFound(
                f"no store at {path}; create one: thinrow ingest FILE --store {path} --create --schema ..."
            )
        opened = Archive(archive_objects(path, cache_bytes=cache_bytes), clock)
        return cls(path, opened, open_tier(path, opened, recent, sync), clock=clock)

    @property
    def schema(self) -> EventSchema:
        """The event schema of the newest generation."""
        return self.archive.pin().schema

    def pin(self) -> Generation:
        """The newest generation: an immutable view."""
        return self.archive.pin()

    def append(self, table: pa.Table) -> AppendResult:
        """Append a table of events to the recent tier: all of it, durably, or nothing.

        Events whose id the user has already are skipped (``AppendResult.duplicate``).

        Raises:
            InputError and its kinds: see ``check_table``; and UnknownEventError for a correction of nothing.
        """
        return self.append_checked(self.check(table))

    def check(self, table: pa.Table) -> CheckedEvents:
        """Check a table of events as ``append`` does. One that lacks columns of the schema but has all of an earlier
        one is taken under that: who does not know a new column, or the new name of one, may go on.

        Raises:
            InputError and its kinds: see ``check_table``.
        """
        generation = self.pin()
        names = table.column_names if isinstance(table, pa.Table) else ()
        return check_table(table, fitting(generation.schema, generation.schema_log, names))

    @must.checked(add=must.mapping, drop=must.names, rename=must.mapping, widen=must.mapping, nullable=must.names)
    def evolve(
        self,
        *,
        add: Mapping[str, Mapping[str, Any]] | None = None,
        drop: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        widen: Mapping[str, str] | None = None,
        nullable: Sequence[str] = (),
    ) -> EventSchema:
        """Change the columns, all at once; no event is rewritten. Names are those of today.

        Args:
            add: name -> ``{"trait": ..., "dtype": ..., "group": ...}``; null for the events that there are.
            drop: columns that are read no more; their bytes go with the next compaction of each segment.
            rename: name -> new name.
            widen: name -> a dtype that holds all values: int8, int16, int32, int64 upwards, or float32 to float64.
            nullable: columns that may be null from now on.

        Returns:
            The new schema.

        Raises:
            SchemaError: the changes do not fit the schema; nothing was changed.
            CommitConflict: other writers won twenty times in a row.
        """
        evolution = Evolution(add or {}, tuple(drop), rename or {}, widen or {}, tuple(nullable))
        return evolve(self.archive, evolution).schema

    def append_checked(self, events: CheckedEvents, advances: Sequence[Advance] = ()) -> AppendResult:
        """Append events that ``check_table`` has passed, and how far their source is read; as ``RecentTier.append``."""
        with self._numbering:
            return self.recent.append(
                events.users,
                events.event_ts,
                events.columns,
                events.event_ids,
                events.supersedes,
                self._resolve,
                events.schema or self.schema,
                advances,
            )

    def _resolve(self, user: object, event_id: object) -> tuple[int, int] | None:
        return find_event(self.pin(), user, event_id)

    @must.checked(column=_TEXT, progress=must.function)
    def backfill(self, column: str, table: pa.Table, *, progress: Progress | None = None) -> BackfillReport:
        """Give archived events values of a column, without changing any version; see ``history.backfill``.

        Raises:
            InputError and its kinds: the table does not fit; nothing was changed.
            CommitConflict: other writers won twenty times in a row.
        """
        return backfill(self.archive, column, table, progress)

    @must.checked(load_id=_TEXT, work_dir=must.path, memory_bytes=_POSITIVE, engine=ENGINE, progress=must.function)
    def bulk_load(
        self,
        source: BulkInput,
        *,
        load_id: str | None = None,
        work_dir: str | Path | None = None,
        memory_bytes: int = MEMORY_BYTES,
        engine: EngineName | BucketEngine = "local",
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> CompactReport:
        """Import a history straight into the archive, numbered by (arrival time, input order), after what came before.

        The input may be larger than memory and in any order. Appends through this object wait from the first number
        until the commit. Other processes must not append to its users meanwhile: a request that sees such an event
        before the load is committed fails its verification later. Input that lacks columns of the schema but has all of
        an earlier one is taken as ``check`` does: null in columns that were added later.

        Args:
            source: a table, a ``pa.RecordBatchReader`` or other iterable of record batches, or Parquet and Arrow
                files: a path, a folder, a pattern, a list of paths.
            load_id: names the input, so that a killed load goes on and one that is done is not done again (the report
                of the first comes back). It is of one input: to go on with another one is refused. Files have a name
                without it: their paths, sizes and times of change.
            work_dir: for sorted runs, about as large as the input in memory; default: ``loads`` in the store.
            memory_bytes: aimed at, on top of some 300 MB for interpreter, libraries and index.
            engine: "local", or "ray" on a cluster whose nodes all reach store and ``work_dir`` under their paths.

        Raises:
            InputError: as ``append``, with the file; nothing has been changed. Or ``load_id`` was begun with another
                input, or the schema has event ids, whose uniqueness only the recent tier can hold.
            StoreError: the disk refused, or another process is at this load; what is done is kept for the next try.
            CommitConflict: other writers won twenty times in a row.
        """
        if self.schema.event_id_dtype is not None:
            raise InputError("bulk_load cannot check event ids against the store; use append, then compact")
        if load_id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", load_id):
            raise InputError(f"load_id {load_id!r}; use 1 to 100 letters, digits, '.', '_' and '-'")
        work = self.path / "loads" if work_dir is None else Path(work_dir)
        options = LoadOptions(work, engine_of(engine), load_id, memory_bytes, progress, self._numbering)
        return bulk_load(self.archive, self.recent, source, options)

    @must.checked(full=must.flag, engine=ENGINE, progress=must.function)
    def compact(
        self, *, full: bool = False, progress: Progress | None = None, engine: EngineName | BucketEngine = "local"
    ) -> CompactReport:
        """Move the recent tier into a new generation. A bucket keeps a few segments; ``full`` alone leaves one.

        ``engine`` "ray" writes the buckets on a Ray cluster whose nodes all reach the store under its path.
        """
        before = self.pin()
        report = compact(self.archive, self.recent, full=full, progress=progress, engine=engine)
        expire_rewritten(self.archive, before, self._clock(), _SLACK)
        return report

    @must.checked(n_buckets=must.whole, progress=must.function)
    def rebucket(self, n_buckets: int | None = None, *, progress: Progress | None = None) -> RebucketReport:
        """Rewrite the archive to ``n_buckets`` buckets, a multiple of the present number; twice as many by default.

        Training tables whose N divides the new number can be read as before. Raises as ``rebucket.rebucket``.
        """
        return rebucket(self.archive, n_buckets, progress)

    @must.checked(folder=must.path, keep=_POSITIVE, progress=must.function)
    def backup(self, folder: str | Path, *, keep: int | None = None, progress: Progress | None = None) -> BackupReport:
        """Copy the store, as it is at one moment, into ``folder``, while it is written to by whatever process.

        Files that never change are copied once: backups into one folder share them. Logs and tables below the store's
        directory are copied too. ``thinrow.history.backup`` says how.

        Where the recent tier is on a Redis server there is no one moment for all users: all that had come when the call
        began is in the copy, and of what comes meanwhile each user's first events.

        Args:
            keep: remove older backups of the folder afterwards, all but the newest so many; None leaves them.

        Raises:
            InputError: the folder is the store's own or lies in it, so that a backup would copy itself; or it holds
                backups of another store.
            StoreError: another backup into the folder is under way, the disk refuses, the recent tier is neither in
                LMDB nor on Redis, its server does not answer or was emptied, or logs and tables never stood still.
        """
        with told(Path(folder)):
            return backup(self.path, self.archive, self.recent, Path(folder), forget_gone, progress, keep)

    @staticmethod
    @must.checked(folder=must.path, path=must.path, number=_POSITIVE, recent=_TEXT)
    def restore(
        folder: str | Path, path: str | Path, number: int | None = None, *, recent: str | None = None
    ) -> BackupReport:
        """Make a store at ``path`` from backup ``number`` of ``folder``, or from its newest.

        The restored store counts from a new epoch on: numbers that the original gave out after the backup are not
        given again, so that requests logged there cannot be taken for requests of this store. What the original took
        in after the backup is to be appended again from its source; events whose ids are there already are skipped.

        Args:
            recent: the Redis server that is to hold the recent tier, as for ``create``; without it the tier is in the
                folder. Either is right for a backup of either.

        Raises:
            InputError: ``recent`` is no such URL.
            StoreNotFound: ``folder`` holds no such backup.
            StoreExists: ``path`` is not empty, and not what a killed restore left; or the server has that name already.
            StoreError: the server does not answer, or is not set to what its URL says.
            CorruptionError: the copy is damaged; nothing was restored that would open.
        """
        with told(Path(path)):
            return restore(Path(folder), Path(path), number, recent)

    @must.checked(keep=_POSITIVE, grace_s=must.seconds, dry_run=must.flag)
    def collect_garbage(self, *, keep: int = 2, grace_s: float = 3_600.0, dry_run: bool = False) -> Garbage:
        """Remove old generations that nobody holds, and what killed writers left; see ``Archive.collect_garbage``."""
        # A generation that only a cycle still refers to, as an exception with its traceback, is held by nobody.
        gc.collect()
        return self.archive.collect_garbage(keep=keep, grace_s=grace_s, dry_run=dry_run)

    @must.checked(events=EVENTS, paths=must.mapping, grace_s=must.seconds, dry_run=must.flag, progress=must.function)
    def erase(
        self,
        users: object = (),
        events: Sequence[EventsOf] = (),
        *,
        also: Also | None = None,
        paths: Mapping[str, Sequence[str]] | None = None,
        grace_s: float = GRACE_S,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> EraseReport:
        """Erase whole users, and single events of others: afterwards no file of the store holds anything of them.

        What stays is a tombstone: the numbers of the arrivals that went, under a keyed hash of the user. Requests that
        saw such events resolve by the policy of whoever rebuilds them (``reconstruct``). Safe beside appends,
        compactions and readers; killed at any moment, the same call, or ``finish_erasures``, goes on. An erasure that
        was begun is finished first. See docs/erasure.md for what is promised.

        Args:
            users: ids; all that arrived before this call, and all that is known of them, goes.
            events: events of users that are not in ``users``.
            also: cleans what else holds events before the erasure counts as done (``thinrow.examples.erase``).
            paths: of that, for the journal: a later ``thinrow erase --resume`` cleans them.
            grace_s: readers that hold an older generation get so many seconds; then they get ``Erased``.
            dry_run: only count, in the archive.

        Raises:
            InputError: nothing is named, or a user twice over.
            CommitConflict: other writers won twenty times in a row; run it again.
            CorruptionError: a segment with something that is to go is damaged; restore it first.
            StoreError: a bulk load is unfinished, or a writer that began before is still at work; run it again. Or an
                erasure that was cut short is to clean other logs and tables; finish that one first.
        """
        ids, _ = distinct(as_users(users, self.schema.user_kind))
        if not dry_run:
            refuse_unfinished_loads(self.path / "loads")
            # Before the journal begins: so a crash after it need not know of them.
            self.dead_letters.erase(of_users({*ids.tolist(), *(e.user for e in events)}))
            # Who names other logs and tables than the one that was cut short does not clean those.
            self.finish_erasures(lambda p: also if p.paths == (paths or {}) else None, grace_s=grace_s)
        return erase(
            self.archive,
            self.recent,
            ids,
            events,
            also=also,
            paths=paths,
            grace_s=grace_s,
            dry_run=dry_run,
            progress=progress,
        )

    @property
    def dead_letters(self) -> DeadLetters:
        """Events of sources that could not be taken in, until they are retried."""
        return DeadLetters(self.path / DEAD_FOLDER, lambda: int(self.recent.positions(DEAD_SOURCE).get("", "0")))

    def pending_erasures(self) -> list[Pending]:
        """Erasures that were begun and cut short."""
        return Journal(self.archive.objects).pending()

    @must.checked(also=must.function, grace_s=must.seconds)
    def finish_erasures(
        self, also: Callable[[Pending], Also | None] = lambda _: None, *, grace_s: float = GRACE_S
    ) -> list[EraseReport]:
        """Finish erasures that were cut short; ``also`` gives what else to clean for each. Raises as ``erase``."""
        pending = self.pending_erasures()
        return [finish(self.archive, self.recent, p, also=also(p), grace_s=grace_s) for p in pending]

    @must.checked(retention=RETENTION, grace_s=must.seconds, dry_run=must.flag, progress=must.function)
    def retain(
        self,
        retention: Retention | None = None,
        *,
        also: Also | None = None,
        grace_s: float = GRACE_S,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> EraseReport:
        """Let go of events that are older, or more, than a policy keeps, as ``erase`` does of erased ones.

        The policy is kept in the manifest. Compactions apply it too, to buckets that they write anew and of which at
        least a fifth has expired.

        Args:
            retention: the new policy; None for the one that the store has. ``Retention()`` has no limits.

        Further arguments and errors as ``erase``.
        """
        policy, now_ms = retention or retention_of(self.pin()), self._clock()
        if policy.max_age_ms is not None and not dry_run:
            self.dead_letters.erase(older_than(now_ms - policy.max_age_ms))
        return retain(
            self.archive,
            self.recent,
            retention,
            now_ms,
            also=also,
            grace_s=grace_s,
            dry_run=dry_run,
            progress=progress,
        )

    def snapshot(self, users: object, request_ts: npt.ArrayLike) -> Snapshot:
        """What ``users`` (X,) did before ``request_ts``: ms or ``datetime64``, exclusive, (X,) or one. A user may come
        several times, as in a log of requests."""
        ids = as_users(users, self.recent.schema.user_kind)
        times = request_times(request_ts, len(ids))
        return take_snapshot(self.pin, self.recent, ids, times, compact=self.compact, max_inline=self.max_inline)

    def peek(self, users: object, request_ts: npt.ArrayLike) -> Snapshot:
        """A snapshot to look at, not to log: it never compacts, however many recent events there are."""
        ids = as_users(users, self.recent.schema.user_kind)
        return take_snapshot(self.pin, self.recent, ids, request_times(request_ts, len(ids)))

    def read(self, users: object, request_ts: npt.ArrayLike, projection: Projection | None = None) -> Reconstruction:
        """Snapshot and rebuild at once: the histories as a model served now would see them. Changes nothing."""
        # Whatever is no projection goes the long way, which names it.
        if isinstance(self.recent, BlockTier) and isinstance(projection, Projection) and projection.max_len is not None:
            ids = as_users(users, self.recent.schema.user_kind)
            found = read_live(self.pin, self.recent, ids.copy(), request_times(request_ts, len(ids)), projection)
            if found is not None:
                return found
        taken = self.peek(users, request_ts)
        return reconstruct(taken.generation, taken.requests, projection)

    def to_arrow(
        self,
        users: object = None,
        projection: Projection | None = None,
        *,
        at: int | None = None,
        batch_rows: int | None = None,
    ) -> pa.RecordBatchReader:
        """``Generation.to_arrow`` over archive and recent tier together: the events that ``read`` would give.

        Each group of users is read as it is when its turn comes; whoever needs one moment for all compacts first and
        reads ``pin().to_arrow()``. Raises as that, and SchemaError where a column that is read is changed meanwhile.
        """
        projection, rows = arrow.asked(projection, batch_rows)
        request_ts = arrow.time_of(at, projection)
        recent, pinned = self.recent.users(), self.pin()  # in this order: a compaction may move users meanwhile
        groups = arrow.groups_of_users(pinned, users, projection, rows, recent)
        return arrow.stream(
            pinned, projection, groups, lambda some: self.read(some, request_ts, projection).histories, rows, self.pin
        )

    def users(self) -> Users:
        """All users with an event in the archive or the recent tier, sorted."""
        found = [f for f in (self.recent.users(), self.pin().users()) if len(f)]
        return as_users(np.unique(np.concatenate(found)) if found else [], self.schema.user_kind)

    def verify_recent(self, progress: Progress | None = None) -> list[Damage]:
        """Damage of the recent tier: every event and id is read back, every counter held against the archive."""
        return verify_recent(self.pin, self.recent, self.recent.name, progress)

    def close(self) -> None:
        """Release the recent tier, and write what was counted of the use of columns."""
        self.recent.close()
        if self.archive.usage is not None:
            self.archive.usage.flush()

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _settle(path: Path, location: S3Location) -> None:
    """Hold the place that a caller gives to the one that the folder remembers; a new folder takes it."""
    held = remembered(path)
    if held is None:
        if ManifestLog(LocalObjects(path / "archive")).list():
            raise InputError(f"the store at {path} has its archive in its own folder, not at {location}; leave it out")
        if not ManifestLog(S3Objects(location)).list():
            raise StoreNotFound(f"no archive at {location}; create one: thinrow ingest --create --archive {location}")
    elif (held.bucket, held.prefix) != (location.bucket, location.prefix):
        raise InputError(f"the store at {path} has its archive at {held}, not at {location}; leave it out")
    # A bucket may be reached by another endpoint today.
    if held != location:
        remember(path, location)
