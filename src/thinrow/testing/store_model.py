"""The slow truth about a whole store: every event as a Python object, with all that may happen to one.

``StoreModel`` knows what a ``HistoryStore`` promises and nothing of how: no generations, segments, codecs or digests.
At each request it writes down the fat row: a copy of all that the request saw, which nothing later changes.

Worked example: an event is appended, corrected, archived, given another value of column 3, and erased::

    Fact(user=7, ts=10, arrival=1, values={3: "a"})      hidden_from  archived  values     gone
    append of a correction, arrival 2                    2            False     {3: "a"}   COMPLETE
    compact                                              2            True      {3: "a"}   COMPLETE
    backfill of column 3                                 2            True      {3: "b"}   COMPLETE
    erase                                                2            False     {3: "b"}   STATUS_ERASED
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thinrow.core.units import NEVER
from thinrow.history.erase import Retention
from thinrow.history.missing import COMPLETE, STATUS_ERASED, STATUS_EXPIRED
from thinrow.history.requests import RequestBatch
from thinrow.schema import ColumnSpec, EventSchema, Projection


@dataclass(slots=True, eq=False)
class Fact:
    """One event. ``values`` are by column id, those that it lacks are null; ``first`` are those that it came with.

    ``gone`` is COMPLETE, or the status that it gives a request that saw it. A compaction that lets an event expire does
    not forget its id (``id_kept``): the next erasure or retention does.
    """

    user: Any
    ts: int
    arrival: int
    event_id: Any
    values: dict[int, Any]
    first: dict[int, Any]
    hidden_from: int = NEVER
    gone: int = COMPLETE
    archived: bool = False
    id_kept: bool = False
    backfilled: set[int] = field(default_factory=set)


#: (event_ts, arrival, values by column id) of each event, oldest first, as they were at the request.
FatRow = list[tuple[int, int, dict[int, Any]]]


def fat_rows(seen: Sequence[Sequence[Fact]]) -> list[FatRow]:
    """What requests see, copied."""
    return [[(f.ts, f.arrival, dict(f.values)) for f in facts] for facts in seen]


@dataclass(slots=True, eq=False)
class Logged:
    """Requests, the facts that each saw, oldest first, the generation that they pinned, which log entry it is, and the
    fat rows that were stored beside it at that moment."""

    batch: RequestBatch
    seen: list[list[Fact]]
    pinned: int
    serial: int
    fat: list[FatRow]

    def check_fat(self) -> None:
        """What is expected today is the fat row, but for columns that were backfilled since. Raises AssertionError."""
        for facts, row in zip(self.seen, self.fat, strict=True):
            assert [(f.ts, f.arrival) for f in facts] == [(ts, arrival) for ts, arrival, _ in row]
            for fact, (_, _, values) in zip(facts, row, strict=True):
                for column in (fact.values.keys() | values.keys()) - fact.backfilled:
                    assert exact(fact.values.get(column)) == exact(values.get(column)), (fact, column)


@dataclass(slots=True)
class StoreModel:
    """Events of each user in order of arrival; users that were erased, up to which number; schema and policy."""

    schema: EventSchema
    facts: dict[Any, list[Fact]] = field(default_factory=dict)
    whole: dict[Any, int] = field(default_factory=dict)
    retention: Retention = field(default_factory=Retention)
    logged: list[Logged] = field(default_factory=list)

    def add(
        self, user: Any, ts: int, arrival: int, values: dict[int, Any], event_id: Any = None, supersedes: Any = None
    ) -> Fact:
        """A new event; ``supersedes`` is the id of a known one."""
        if supersedes is not None:
            target = self.named(user, supersedes)
            assert target is not None
            target.hidden_from = min(target.hidden_from, arrival)
        fact = Fact(user, ts, arrival, event_id, dict(values), dict(values))
        self.facts.setdefault(user, []).append(fact)
        return fact

    def named(self, user: Any, event_id: Any) -> Fact | None:
        """The event that the id names; one that is gone where its id is still known."""
        known = (f for f in self.facts.get(user, ()) if not f.gone or f.id_kept)
        return next((f for f in known if event_id is not None and f.event_id == event_id), None)

    def alive(self, user: Any) -> list[Fact]:
        """All events of a user that are not gone, hidden ones too, oldest first."""
        return sorted((f for f in self.facts.get(user, ()) if not f.gone), key=lambda f: (f.ts, f.arrival))

    def all_alive(self) -> list[Fact]:
        """Of all users."""
        return [f for user in self.facts for f in self.alive(user)]

    def visible(self, user: Any, ts: int) -> list[Fact]:
        """What a request now sees."""
        return [f for f in self.alive(user) if f.ts < ts and f.hidden_from == NEVER]

    def expired(self, user: Any, now: int) -> list[Fact]:
        """Archived events that the policy does not keep."""
        held, policy = [f for f in self.alive(user) if f.archived], self.retention
        gone = []
        for i, fact in enumerate(held):
            newer = sum(self.shown_in_archive(f) for f in held[i + 1 :])
            old = policy.max_age_ms is not None and fact.ts < now - policy.max_age_ms
            if old or (policy.max_events is not None and newer >= policy.max_events):
                gone.append(fact)
        return gone

    def shown_in_archive(self, fact: Fact) -> bool:
        """Whether no archived correction hides it."""
        return fact.hidden_from == NEVER or not self._archived_number(fact.user, fact.hidden_from)

    def _archived_number(self, user: Any, arrival: int) -> bool:
        return any(f.arrival == arrival and (f.archived or f.gone) for f in self.facts[user])

    def lose(self, facts: Iterable[Fact], status: int, *, id_kept: bool = False) -> None:
        """Events go; those that are gone already stay as they went."""
        for fact in facts:
            if not fact.gone:
                fact.gone, fact.archived, fact.id_kept = status, False, id_kept

    def forget_ids(self, users: Iterable[Any]) -> None:
        """Of events that are gone."""
        for fact in (f for user in users for f in self.facts.get(user, ())):
            fact.id_kept = False

    def statuses(self, seen: Sequence[Fact], gone_of: Callable[[Fact], int]) -> set[int]:
        """Which status a request may have: erased wins, and where both are possible they cannot always be told."""
        gone = {gone_of(f) for f in seen} - {COMPLETE}
        if not gone:
            return {COMPLETE}
        if STATUS_ERASED in gone:
            return {STATUS_ERASED}
        others = {f.gone for f in self.facts.get(seen[0].user, ())} | ({STATUS_ERASED} & set(self.whole))
        doubtful = STATUS_ERASED in others or seen[0].user in self.whole
        return {STATUS_EXPIRED, STATUS_ERASED} if doubtful else {STATUS_EXPIRED}

    def copy(self) -> StoreModel:
        """As it is now, whatever happens to this one."""
        twin = {
            f: replace(f, values=dict(f.values), backfilled=set(f.backfilled))
            for facts in self.facts.values()
            for f in facts
        }
        return StoreModel(
            self.schema,
            {user: [twin[f] for f in facts] for user, facts in self.facts.items()},
            dict(self.whole),
            self.retention,
            [replace(g, seen=[[twin[f] for f in facts] for facts in g.seen]) for g in self.logged],
        )


def cut(facts: Sequence[Fact], request_ts: int, projection: Projection) -> list[Fact]:
    """What a projection takes of the events that a request sees."""
    left = list(facts)
    if projection.max_len is not None and len(left) > projection.max_len:
        left = left[-(-(len(left) - projection.max_len) // projection.align) * projection.align :]
    if projection.horizon_ms is not None:
        left = [f for f in left if f.ts >= request_ts - projection.horizon_ms]
    return left


def shown(values: dict[int, Any], spec: ColumnSpec) -> Any:
    """The value of a column, floats by their bits."""
    return exact(values.get(spec.id))


def exact(value: Any) -> Any:
    """A value to compare: floats by their bits, but one NaN as another."""
    if isinstance(value, float):
        return ("nan",) if value != value else struct.pack(">d", value)
    return tuple(exact(v) for v in value) if isinstance(value, (list, tuple)) else value
