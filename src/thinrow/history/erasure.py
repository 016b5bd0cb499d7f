"""Erasure and retention of a whole store, step by step: archive, recent tier, what else holds events, old files.

Worked example, ``erase(users=[7])``, each step done again from the journal where a crash cuts it short::

    journal     "user 7, up to number 10"
    archive     generation 5: the bucket of user 7 without user 7, and a tombstone [1, 10]
    recent      events, ids and counter of user 7 go; the environment is written anew
    also        logs and training tables, by the caller (thinrow.examples.erase)
    old files   generations below 5 are revoked, and removed with all that only they name
    journal     the entry goes
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinrow.core.clock import system_clock
from thinrow.core.errors import InputError, ObjectNotFound, StoreError
from thinrow.core.users import Users, as_users, bucket_of, distinct, plain
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.lookup import look_up
from thinrow.history.buckets import Progress
from thinrow.history.compact import compact
from thinrow.history.erase import (
    Buried,
    EventsOf,
    Retention,
    bury,
    expiring,
    some_arrivals,
    take_numbers,
    whole_users,
)
from thinrow.history.journal import Journal, Pending
from thinrow.history.recent.tier import RecentTier
from thinrow.schema.event_schema import EventSchema
from thinrow.storage.garbage import FOLDERS, strings_of
from thinrow.storage.manifest import ManifestLog

#: Readers that hold an old generation have so long to let go of it.
GRACE_S = 60.0
#: A writer that was killed is waited for until its pin ends.
_WRITERS_S = 180.0
#: An unfinished file that nobody has written to for so long, while nobody writes, is of a killed writer.
_UNFINISHED_MS = 5_000

#: Called with the generation that the tombstones came with and the whole users that were named; must be repeatable.
Also = Callable[[Generation, Users], None]


@dataclass(frozen=True, slots=True)
class EraseReport:
    """Attributes:
    generation: the newest generation, which no longer has what was to go.
    users: users of whom events went, or who were erased whole.
    events: events that went. A dry run counts recent ones of whole users, but not of single events or a policy.
    rewritten: events of others that were copied for it.
    files: files that were removed.
    bytes: of these.
    """

    generation: int
    users: int
    events: int
    rewritten: int
    files: int = 0
    bytes: int = 0


def erase(
    archive: Archive,
    recent: RecentTier,
    users: Users,
    events: Sequence[EventsOf],
    *,
    also: Also | None = None,
    paths: Mapping[str, Sequence[str]] | None = None,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> EraseReport:
    """Erase whole ``users`` (distinct) and single ``events``; see ``HistoryStore.erase``."""
    schema = archive.pin().schema
    if not len(users) and not events:
        raise InputError("nothing is named that is to be erased; give users, or events of users")
    both = sorted({plain(u) for u in users} & {s.user for s in events}, key=str)
    if both:
        raise InputError(f"user {both[0]!r} is named whole and with single events; one is enough")
    named = as_users(list(dict.fromkeys(s.user for s in events)), schema.user_kind)
    if (
        len(named)
        and not dry_run
        and recent.read_since(named, look_up(archive.pin(), named).watermark).events.offsets[-1]
    ):
        # Tombstones are of what is archived: so a prefix of arrivals stays one.
        compact(archive, recent)
    generation = archive.pin()
    arrivals = [(s.user, s.arrivals_in(generation).tolist()) for s in events]
    if dry_run:
        pending = Pending([(plain(u), _ALL) for u in users], arrivals)
        loose = _recent_events(generation, recent, users)
        return _report(_bury(archive, pending, schema, dry_run, progress), loose)
    last = take_numbers(archive, recent, users)
    named_users = list(zip([plain(u) for u in users], last.tolist(), strict=True))
    pending = Pending(named_users, arrivals, paths or {}, also is not None)
    return finish(
        archive, recent, Journal(archive.objects).begin(pending), also=also, grace_s=grace_s, progress=progress
    )


#: More than any arrival number that is given.
_ALL = (1 << 62) - 1


def finish(
    archive: Archive,
    recent: RecentTier,
    pending: Pending,
    *,
    also: Also | None = None,
    grace_s: float = GRACE_S,
    progress: Progress | None = None,
) -> EraseReport:
    """Do what is left of an erasure that was begun. Raises as ``erase``.

    Raises:
        StoreError: it is to clean something else too, and no ``also`` does.
    """
    if pending.also and also is None:
        kept = ", ".join(p for found in pending.paths.values() for p in found) or "what its caller named"
        raise StoreError(
            f"an erasure that was cut short is to clean {kept} too; finish it first: store.finish_erasures(also), or "
            "thinrow erase --resume"
        )
    generation = archive.pin()
    schema = generation.schema
    whole = as_users([u for u, _ in pending.users], schema.user_kind)
    loose = _recent_events(generation, recent, whole)
    buried = _bury(archive, pending, schema, False, progress)
    some = as_users(list(dict.fromkeys(u for u, _ in pending.events)), schema.user_kind)
    generation = archive.pin()
    if len(some):
        # A compaction that was killed after its commit leaves what it moved.
        recent.trim(some, look_up(generation, some).watermark)
    _erase_recent(generation, recent, as_users([*whole.tolist(), *some.tolist()], schema.user_kind))
    if also is not None:
        also(generation, whole)
    files, size = purge(archive, grace_s)
    Journal(archive.objects).end(pending)
    return _report(buried, loose, files, size)


def refuse_unfinished_loads(folder: Path) -> None:
    """Raises StoreError where the folder of a bulk load holds events that are not in the archive yet."""
    for load in sorted(folder.glob("*")) if folder.is_dir() else []:
        if load.is_dir() and {f.name for f in load.iterdir()} - {"done.json", "lock"}:
            raise StoreError(
                f"the bulk load in {load} is unfinished, and may hold what is to be erased; finish it, or delete the "
                "folder, and run again"
            )


def _bury(
    archive: Archive, pending: Pending, schema: EventSchema, dry_run: bool, progress: Progress | None
) -> list[Buried]:
    done = []
    whole = as_users([u for u, _ in pending.users], schema.user_kind)
    if len(whole):
        plan = whole_users(whole, np.array([last for _, last in pending.users], np.int64))
        done.append(bury(archive, _buckets_of(whole), plan, "erase", dry_run=dry_run, progress=progress))
    if pending.events:
        users, row = distinct(as_users([u for u, _ in pending.events], schema.user_kind))
        owner = np.repeat(row, [len(a) for _, a in pending.events])
        arrival = np.array([a for _, arrivals in pending.events for a in arrivals], np.int64)
        keys = np.unique(np.stack([owner, arrival], axis=1), axis=0) if len(owner) else np.empty((0, 2), np.int64)
        plan = some_arrivals(users, keys[:, 0], keys[:, 1])
        done.append(bury(archive, _buckets_of(users), plan, "erase", dry_run=dry_run, progress=progress))
    return done


def _recent_events(generation: Generation, recent: RecentTier, users: Users) -> int:
    """How many events of ``users`` are not in the archive."""
    return int(recent.read_since(users, look_up(generation, users).watermark).events.offsets[-1])


def _report(buried: Sequence[Buried], loose: int = 0, files: int = 0, size: int = 0) -> EraseReport:
    return EraseReport(
        max(b.generation for b in buried),
        sum(b.users for b in buried),
        sum(b.events for b in buried) + loose,
        sum(b.rewritten for b in buried),
        files,
        size,
    )


def _buckets_of(users: Users) -> Callable[[Generation], Sequence[int]]:
    return lambda generation: np.unique(bucket_of(users, generation.n_buckets)).tolist()


def _erase_recent(generation: Generation, recent: RecentTier, users: Users) -> None:
    graves = generation.tombstones(users)
    records, top = graves.records, graves.watermark()
    whole = (top > 0) & (graves.whole() == top)
    first, last = np.ascontiguousarray(records["first"]), np.ascontiguousarray(records["last"])
    recent.erase(users, graves.offsets, first, last, whole)


def retain(
    archive: Archive,
    recent: RecentTier,
    retention: Retention | None,
    now_ms: int,
    *,
    also: Also | None = None,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> EraseReport:
    """Set the policy (None: the one that is set) and let go of what has expired; see ``HistoryStore.retain``."""
    if not dry_run:
        compact(archive, recent)
    base = archive.pin()
    policy = retention_of(base) if retention is None else retention
    carried = {"retention": policy.to_dict()} if retention not in (None, retention_of(base)) else {}
    plan = expiring(policy, now_ms)
    buried = bury(archive, _all_buckets, plan, "retain", carried=carried, dry_run=dry_run, progress=progress)
    if dry_run:
        return _report([buried])
    generation = archive.pin()
    forget_gone(generation, recent)
    if also is not None:
        also(generation, as_users([], generation.schema.user_kind))
    files, size = purge(archive, grace_s)
    return _report([buried], 0, files, size)


def forget_gone(generation: Generation, recent: RecentTier) -> None:
    """Drop from the tier what it keeps of events that ``generation`` has let go of."""
    known = recent.known_users()
    gone = np.flatnonzero(np.diff(generation.tombstones(known).offsets))
    if len(gone):
        _erase_recent(generation, recent, known[gone])


def expire_rewritten(archive: Archive, before: Generation, now_ms: int, slack: float) -> None:
    """After a compaction from ``before``: apply the policy to the buckets that it wrote, where it is worth it."""
    after = archive.pin()
    policy = retention_of(after)
    if policy == Retention():
        return

    def written(generation: Generation) -> Sequence[int]:
        def lists(of: Generation, bucket: int) -> list[str]:
            return [of.segments[i][1].name for i in of.segments_of(bucket)]

        return [b for b in range(generation.n_buckets) if lists(before, b) != lists(after, b)]

    bury(archive, written, expiring(policy, now_ms, slack), "retain")


def retention_of(generation: Generation) -> Retention:
    """The policy that the store keeps to."""
    return Retention.from_dict(generation.carried.get("retention"))


def _all_buckets(generation: Generation) -> Sequence[int]:
    return range(generation.n_buckets)


def purge(archive: Archive, grace_s: float = GRACE_S) -> tuple[int, int]:
    """Revoke and remove all generations that hold what was erased, with what only they name, and what killed writers
    left. Returns the files removed and their bytes.

    Raises:
        StoreError: a writer that began before the erasure is still at work; everything else is done, run again.
    """
    since = archive.pin().tombstone_index.since
    if not since:
        return 0, 0
    archive.revoke(since, grace_s)
    suspects = {name for folder in FOLDERS for name in archive.objects.list(folder)}
    until = time.monotonic() + _WRITERS_S
    files = size = 0
    while True:
        garbage = archive.collect_garbage(keep=1, grace_s=0)
        files += len(garbage.objects) + len(garbage.generations)
        size += garbage.bytes
        left = _left(archive, since, suspects)
        if not left:
            return files, size + archive.objects.sweep(system_clock() - _UNFINISHED_MS)
        if time.monotonic() > until:
            raise StoreError(
                f"erased, but {left[0]} is still there, for a writer that began before is at work; "
                "wait for it, then run the command again"
            )
        time.sleep(0.1)


def _left(archive: Archive, since: int, suspects: set[str]) -> list[str]:
    """What holds, or may come to hold, what was erased in generation ``since``."""
    # A generation that stays for somebody who holds it is in the second.
    logs = ManifestLog(archive.objects), ManifestLog(archive.objects, "retired")
    old = [n for log in logs for n in log.list()]
    left = [f"generation {n}" for n in old if n < since]
    left += [f"a file of {who}" for number, who, writes in archive.holders() if writes and number < since]
    if left:
        return left
    try:
        named = {name for log in logs for number in log.list() for name in strings_of(log.load(number))}
    except ObjectNotFound as e:
        # Another process collects, too: look again.
        return [str(e)]
    there = {name for folder in FOLDERS for name in archive.objects.list(folder)}
    return sorted(there & (suspects - named))
