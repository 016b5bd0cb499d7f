"""Erasure and retention in the archive: who and what is to go becomes tombstones, and a generation without it.

Worked example. ``erase`` of user 7, who has arrivals 1 to 9, of which the archive holds 1 to 6: number 10 is taken from
the user's counter, so that everything before the erasure has a lower number and everything after it a higher one. The
bucket is written anew without user 7, with a tombstone [1, 10] n 6, as one commit. The recent tier then drops what it
has up to 10, and older generations are revoked and removed.

A crash leaves either the old state or one from which the same call goes on: every step looks at what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core import check
from thinrow.core.errors import CommitConflict, InputError
from thinrow.core.units import NEVER
from thinrow.core.users import Users, as_users, bucket_of
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.layout import EVENT_ID, SegmentInfo, stored_columns
from thinrow.history.archive.lookup import Ints, look_up
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.scan import ROWS_AT_ONCE, users_by_rows
from thinrow.history.archive.tombstones import (
    ERASED,
    EXPIRED,
    TOMBSTONE_DTYPE,
    WHOLE,
    TombstoneFile,
    Tombstones,
    intervals,
    keys_of,
    new_salt,
    unite,
    write_tombstones,
)
from thinrow.history.archive.window import read_everything
from thinrow.history.buckets import Progress
from thinrow.history.bury import Burial, Doomed, bury_bucket, count_doomed
from thinrow.history.recent.tier import RecentTier
from thinrow.jagged import Events
from thinrow.storage.manifest import retried

_USER = check.instance((int, str, np.integer), "give one id, of the store's kind")
_IDS = check.sequence((int, str), "give ids of events")
#: ``plan(generation, bucket)``: what goes from a bucket; None where nothing does.
Plan = Callable[[Generation, int], Doomed | None]


@dataclass(frozen=True, slots=True)
class EventsOf:
    """Some events of one user: those with one of ``event_ids``, one of ``arrivals``, or a time in the range.

    Attributes:
        user: an id of the store's kind.
        start_ts, end_ts: event times, ms, both inclusive; both None for no range.
    """

    user: int | str
    event_ids: Sequence[int | str] = ()
    arrivals: Sequence[int] = ()
    start_ts: int | None = None
    end_ts: int | None = None

    def __post_init__(self) -> None:
        _USER(self.user, "user")
        _IDS(self.event_ids, "event_ids")
        if isinstance(self.arrivals, (str, bytes)) or not isinstance(self.arrivals, Sequence):
            raise InputError(f"arrivals is {check.shown(self.arrivals)}; give a list of arrival numbers")
        times = (("start_ts", self.start_ts), ("end_ts", self.end_ts))
        for name, value in (*(("arrivals", a) for a in self.arrivals), *times):
            if value is not None or name == "arrivals":
                check.integer(0)(value, name)
        if not self.event_ids and not self.arrivals and self.start_ts is None and self.end_ts is None:
            raise InputError(
                f"no events of user {self.user!r} are named; give ids, arrivals or times, or erase the whole user"
            )

    def arrivals_in(self, generation: Generation) -> Ints:
        """(n,) arrivals of these events that the generation holds."""
        specs = [c for c in stored_columns(generation.schema) if c.name == EVENT_ID]
        if self.event_ids and not specs:
            raise InputError("events of this store have no ids; name them by arrival or by time")
        users = as_users([self.user], generation.schema.user_kind)
        events = read_everything(generation, users, specs if self.event_ids else [], ReadStats())
        wanted = np.isin(events.arrival, np.array(self.arrivals, np.int64))
        if self.event_ids:
            ids, asked = events.columns[EVENT_ID].to_arrow().to_pylist(), set(self.event_ids)
            wanted |= np.array([i is not None and i in asked for i in ids], np.bool_)
        if self.start_ts is not None or self.end_ts is not None:
            low, high = self.start_ts or 0, NEVER if self.end_ts is None else self.end_ts
            wanted |= (events.event_ts >= low) & (events.event_ts <= high)
        return events.arrival[wanted]


@dataclass(frozen=True, slots=True)
class Retention:
    """What a store keeps of each user.

    Attributes:
        max_age_ms: events with ``event_ts < now - max_age_ms`` expire; None for no limit.
        max_events: the newest so many events, by (event_ts, arrival), that no correction hides stay, and corrected
            ones among them; None for no limit.
    """

    max_age_ms: int | None = None
    max_events: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_age_ms", "max_events"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and 1 <= value < NEVER):
                raise InputError(f"{name}={value!r}; it must be an integer, 1 or more, or None for no limit")

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``from_dict`` reverses it."""
        return {"max_age_ms": self.max_age_ms, "max_events": self.max_events}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Retention:
        """Of a manifest's entry; no limits where it has none."""
        return cls() if data is None else cls(data["max_age_ms"], data["max_events"])

    def expired(self, events: Events, now_ms: int) -> npt.NDArray[np.bool_]:
        """(E,) which events of whole users, in order of (event_ts, arrival), have expired at ``now_ms``."""
        gone = np.zeros(len(events), np.bool_)
        if self.max_age_ms is not None:
            gone |= events.event_ts < now_ms - self.max_age_ms
        if self.max_events is not None:
            shown = np.concatenate([[0], np.cumsum(events.hidden_from == NEVER)])
            of_user = shown[events.offsets[1:]]
            gone |= np.repeat(of_user, events.lengths) - shown[1:] >= self.max_events
        return gone


@dataclass(frozen=True, slots=True)
class Buried:
    """``events`` of ``users`` are gone from the archive since ``generation``; ``rewritten`` others were copied."""

    generation: int
    users: int
    events: int
    rewritten: int


def whole_users(users: Users, last: Ints) -> Plan:
    """Everything of distinct ``users`` (U,) up to the numbers ``last`` (U,), inclusive."""
    order = np.argsort(users, kind="stable")
    ids, tops = users[order], last[order]

    def plan(generation: Generation, bucket: int) -> Doomed | None:
        rows = np.flatnonzero(bucket_of(ids, generation.n_buckets) == bucket)
        # Done already, by an earlier try that was cut short after its commit.
        rows = rows[generation.tombstones(ids[rows]).whole() < tops[rows]]
        graves = _graves(np.arange(len(rows)), np.ones(len(rows), np.int64), tops[rows], WHOLE)
        return Doomed(ids[rows], _by_owner(len(rows), np.arange(len(rows)), graves)) if len(rows) else None

    return plan


def some_arrivals(users: Users, owner: Ints, arrival: Ints) -> Plan:
    """The events with numbers ``arrival`` (n,) of users ``owner`` (n,), rows of ``users`` (distinct, ascending)."""

    def plan(generation: Generation, bucket: int) -> Doomed | None:
        mine = np.flatnonzero(bucket_of(users, generation.n_buckets) == bucket)
        some = np.flatnonzero(np.isin(owner, mine))
        # What a tombstone covers is gone already, by an earlier try that was cut short after its commit.
        some = some[generation.tombstones(users).record_of(owner[some], arrival[some]) < 0]
        return _doomed(users[mine], np.searchsorted(mine, owner[some]).astype(np.int64), arrival[some], ERASED)

    return plan


def expiring(retention: Retention, now_ms: int, slack: float = 0.0) -> Plan:
    """What has expired at ``now_ms``; of a bucket where that is less than the share ``slack``, nothing."""

    def plan(generation: Generation, bucket: int) -> Doomed | None:
        view = generation.only(generation.segments_of(bucket))
        users, owner, arrival = [as_users([], generation.schema.user_kind)], [], [np.empty(0, np.int64)]
        before = 0
        for some in users_by_rows(view, ROWS_AT_ONCE):
            events = read_everything(view, some, [], ReadStats())
            gone = retention.expired(events, now_ms)
            owner.append(before + np.repeat(np.arange(len(some)), events.lengths)[gone])
            arrival.append(events.arrival[gone])
            users.append(some)
            before += len(some)
        who, what = np.concatenate([np.empty(0, np.int64), *owner]), np.concatenate(arrival)
        if len(what) < slack * view.n_rows:
            return None
        ids = as_users(np.concatenate(users), generation.schema.user_kind)
        used, place = np.unique(who, return_inverse=True)
        return _doomed(ids[used], place.astype(np.int64), what, EXPIRED)

    return plan


def bury(
    archive: Archive,
    buckets: Callable[[Generation], Sequence[int]],
    plan: Plan,
    note: str,
    *,
    carried: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Buried:
    """Commit a generation without what ``plan`` says, with its tombstones; none where nothing changes.

    Args:
        buckets: which buckets to look at.
        carried: further entries of the manifest to set.
        dry_run: only count.

    Raises:
        CommitConflict: other writers won twenty times in a row.
        CorruptionError: a segment is damaged; restore it first.
    """

    def attempt() -> Buried:
        with archive.writing(note) as base:
            return _bury_once(archive, base, buckets(base), plan, note, carried or {}, dry_run, progress)

    return retried(attempt)


def _bury_once(
    archive: Archive,
    base: Generation,
    buckets: Sequence[int],
    plan: Plan,
    note: str,
    carried: Mapping[str, Any],
    dry_run: bool,
    progress: Progress | None,
) -> Buried:
    index = base.tombstone_index
    salt, top = index.salt or new_salt(), 0
    changed: dict[int, list[SegmentInfo]] = {}
    files: dict[int, TombstoneFile] = {}
    written: list[str] = []
    users = events = rewritten = 0
    committing = False
    try:
        for i, bucket in enumerate(buckets):
            doomed = plan(base, bucket)
            if doomed is not None and len(doomed.users):
                done = (count_doomed if dry_run else bury_bucket)(base, bucket, doomed)
                written += done.written
                new = _filled(doomed, done, salt)
                users += len(np.unique(new["key"]))
                events += int(done.counts.sum())
                rewritten += done.rewritten
                if len(new) and not dry_run:
                    changed[bucket] = done.segments
                    held = _held(archive, base, bucket)
                    files[bucket] = write_tombstones(archive.objects, bucket, unite(held, new))
                    written.append(files[bucket].name)
                    top = max(top, int(new["last"].max()))
            if progress is not None:
                progress(i + 1, len(buckets))
        if dry_run or not (changed or carried):
            return Buried(base.number, users, events, rewritten)
        entries = dict(carried)
        if changed:
            entries["tombstones"] = index.with_files(salt, files, top, base.number + 1).to_dict()
        committing = True
        generation = archive.commit(base, changed, note, carried=entries)
    except BaseException as e:
        # After any other error of the commit the manifest that names the files may be there.
        if not committing or isinstance(e, CommitConflict):
            for name in written:
                archive.objects.delete(name)
        raise
    return Buried(generation.number, users, events, rewritten)


def _held(archive: Archive, base: Generation, bucket: int) -> npt.NDArray[np.void]:
    file = base.tombstone_index.files.get(bucket)
    return np.empty(0, TOMBSTONE_DTYPE) if file is None else archive.open_tombstones(bucket, file)[0]


def _filled(doomed: Doomed, done: Burial, salt: str) -> npt.NDArray[Any]:
    """The graves with their users and counts; those that nothing went to are none, but for whole users."""
    records = doomed.graves.records.copy()
    owner = doomed.graves.owner
    records["key"] = keys_of(doomed.users, salt)[owner]
    records["hash"] = bucket_of(doomed.users, 1 << 31)[owner]
    records["n"] = done.counts
    filled: npt.NDArray[Any] = records[(records["n"] > 0) | (records["kind"] == WHOLE)]
    return filled


def _graves(owner: Ints, first: Ints, last: Ints, kind: int) -> npt.NDArray[np.void]:
    records = np.zeros(len(owner), TOMBSTONE_DTYPE)
    records["kind"], records["first"], records["last"] = kind, first, last
    return records


def _by_owner(n: int, owner: Ints, records: npt.NDArray[np.void]) -> Tombstones:
    return Tombstones(np.searchsorted(owner, np.arange(n + 1)).astype(np.int64), records)


def _doomed(users: Users, owner: Ints, arrival: Ints, kind: int) -> Doomed | None:
    if not len(arrival):
        return None
    who, first, last = intervals(owner, arrival)
    return Doomed(users, _by_owner(len(users), who, _graves(who, first, last, kind)))


def take_numbers(archive: Archive, recent: RecentTier, users: Users) -> Ints:
    """(U,) the number up to which each of distinct ``users`` is to be erased: one that no event has or will have.

    A user who was erased before and has nothing since keeps the number of that time.
    """
    base = archive.pin()
    pieces, whole = look_up(base, users), base.tombstones(users).whole()
    read = recent.read_since(users, pieces.watermark)
    done = (whole > 0) & (whole == pieces.watermark) & (np.diff(pieces.piece_off) == 0) & (read.events.lengths == 0)
    last = whole.copy()
    todo = np.flatnonzero(~done)
    if len(todo):
        last[todo] = recent.reserve(users[todo], pieces.watermark[todo], np.ones(len(todo), np.int64)) + 1
    return last


#: Checks of arguments that are events, or a policy.
EVENTS = check.sequence(EventsOf, "give EventsOf of some users")
RETENTION = check.instance(Retention, "give a Retention, such as Retention(max_events=1000)")
