"""No example sees the future: what it must not see may be anything, and it gets the same bytes.

A world of random events (ties, late ones, corrections, compactions between) takes one request. Then the world is built
again with a single event changed: one at or after the request's time, one that arrived after its snapshot, one that was
superseded before it, or one of another user; nothing of the example may change. Changing one that it sees must.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from thinrow.history import buckets as buckets_module
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.compact import compact
from thinrow.history.intake import check_table
from thinrow.history.recent.memory import MemoryRecent
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.snapshot import take_snapshot
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait
from thinrow.storage.objects import MemoryObjects

SCHEMA = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "item"),
        ColumnSpec(2, "kind", Trait.CATEGORICAL, "string", "kind", nullable=True),
    ),
    event_id_column="event_id",
    event_id_dtype="int64",
    supersedes_column="supersedes",
)
USER, OTHER = 1, 2
PROJECTIONS = (
    Projection(),
    Projection(max_len=2),
    Projection(max_len=3, horizon_ms=4),
    Projection(max_len=3, align=2),
)
TESTED = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@dataclass(frozen=True)
class Event:
    """``corrects``: position in the script of the event that it supersedes."""

    user: int
    event_ts: int
    item: int
    kind: str | None
    corrects: int | None = None


@dataclass(frozen=True)
class Script:
    """Events in order of arrival; the archive takes what has come at each of ``compactions``; the request comes after
    ``request_at`` events and asks for ``request_ts``, and the rest arrives afterwards."""

    events: tuple[Event, ...]
    compactions: frozenset[int]
    request_at: int
    request_ts: int

    def hidden_at(self, i: int) -> int | None:
        """Position of the first event that corrects event i."""
        return next((j for j, e in enumerate(self.events) if e.corrects == i), None)

    def sees(self, i: int) -> bool:
        """Whether the request sees event i: the rule, spelled out."""
        event, corrected = self.events[i], self.hidden_at(i)
        return (
            event.user == USER
            and event.event_ts < self.request_ts
            and i < self.request_at
            and (corrected is None or corrected >= self.request_at)
        )


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    events: list[Event] = []
    for _ in range(draw(st.integers(2, 14))):
        user = draw(st.sampled_from([USER, USER, USER, OTHER]))
        mine = [i for i, e in enumerate(events) if e.user == user]
        corrects = draw(st.sampled_from(mine)) if mine and draw(st.integers(0, 2)) == 0 else None
        kind = draw(st.sampled_from(["a", "b", None]))
        events.append(Event(user, draw(st.integers(0, 8)), draw(st.integers(0, 5)), kind, corrects))
    n = len(events)
    compactions = draw(st.frozensets(st.integers(0, n), max_size=4))
    return Script(tuple(events), compactions, draw(st.integers(0, n)), draw(st.integers(0, 9)))


def play(script: Script) -> tuple[RequestBatch, list[Any]]:
    """What the request logged, and what it gets from the generation it pinned, from each later one and from a full one:
    by each of ``PROJECTIONS``."""
    archive, recent = Archive.create(MemoryObjects(), SCHEMA, 1, lambda: 0), MemoryRecent(SCHEMA)
    logged: RequestBatch | None = None
    generations: dict[int, Generation] = {}
    for i in range(len(script.events) + 1):
        if i in script.compactions:
            compact(archive, recent)
        if i == script.request_at:
            taken = take_snapshot(archive.pin, recent, np.array([USER]), np.array([script.request_ts]))
            logged = taken.requests
        if logged is not None:
            generations[archive.pin().number] = archive.pin()
        if i < len(script.events):
            append(recent, i, script.events[i])
    for full in (False, True):
        compact(archive, recent, full=full)
        generations[archive.pin().number] = archive.pin()
    assert logged is not None
    got = []
    for generation in generations.values():
        for projection in PROJECTIONS:
            histories = reconstruct(generation, logged, projection).histories
            got.append([histories.to_jagged(n).to_arrow().to_pylist() for n in ("event_ts", "arrival", "item", "kind")])
    return logged, got


def append(recent: MemoryRecent, i: int, event: Event) -> None:
    table = pa.table(
        {
            "user_id": [event.user],
            "event_ts": [event.event_ts],
            "event_id": [i],
            "supersedes": pa.array([event.corrects], pa.int64()),
            "item": [event.item],
            "kind": pa.array([event.kind], pa.string()),
        }
    )
    checked = check_table(table, SCHEMA)
    recent.append(checked.users, checked.event_ts, checked.columns, checked.event_ids, checked.supersedes)


def logged_values(batch: RequestBatch, *, hides: bool = True) -> list[Any]:
    """All that is logged of a request, as plain values."""
    inline = [batch.inline.event_ts.tolist(), batch.inline.arrival.tolist(), batch.inline.hidden_from.tolist()]
    inline += [c.to_arrow().to_pylist() for c in batch.inline.columns.values()]
    return [batch.versions.tolist(), inline, batch.hides.tolist() if hides else None]


def with_event(script: Script, i: int, event: Event) -> Script:
    return replace(script, events=(*script.events[:i], event, *script.events[i + 1 :]))


def other_values(event: Event, draw: st.DataObject) -> Event:
    """The event with another item and kind."""
    item = draw.draw(st.integers(6, 9), "item")
    return replace(event, item=item, kind={"a": "z", "b": None, None: "y"}[event.kind])


@pytest.fixture
def short_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two events a stripe, so that a stripe is often cut by what a request may see."""
    monkeypatch.setattr(buckets_module, "STRIPE_ROWS", 2)


@pytest.mark.usefixtures("short_stripes")
@TESTED
@given(script=scripts(), data=st.data())
def test_what_it_must_not_see_changes_nothing(script: Script, data: st.DataObject) -> None:
    unseen = [i for i in range(len(script.events)) if not script.sees(i)]
    assume(unseen)
    i = data.draw(st.sampled_from(unseen), "changed")
    event = other_values(script.events[i], data)
    future = [t for t in range(script.request_ts, 12)]
    if i >= script.request_at or event.user == OTHER:
        # It has not arrived yet, or is somebody else's: its time may be any.
        event = replace(event, event_ts=data.draw(st.integers(0, 11), "event_ts"))
    elif event.event_ts >= script.request_ts:
        event = replace(event, event_ts=data.draw(st.sampled_from(future), "event_ts"))
    before, after = play(script), play(with_event(script, i, event))
    assert before[1] == after[1]
    # The list of hides names a hidden event by its time, which may have moved within the future.
    assert logged_values(before[0], hides=False) == logged_values(after[0], hides=False)


@pytest.mark.usefixtures("short_stripes")
@TESTED
@given(script=scripts(), data=st.data())
def test_events_that_come_later_change_nothing(script: Script, data: st.DataObject) -> None:
    """Late events and corrections of what was seen: any number of them, at any time after the request."""
    later = list(script.events[script.request_at :])
    for _ in range(data.draw(st.integers(1, 5), "more")):
        earlier = [i for i, e in enumerate(script.events[: script.request_at]) if e.user == USER]
        corrects = data.draw(st.sampled_from([None, *earlier]), "corrects")
        later.append(Event(USER, data.draw(st.integers(0, 11)), 9, "new", corrects))
    longer = replace(script, events=(*script.events[: script.request_at], *later))
    before, after = play(script), play(longer)
    assert logged_values(before[0]) == logged_values(after[0])
    # Each generation, however many there are, gives the same answers.
    n = len(PROJECTIONS)
    answers = before[1][:n]
    for got in (before[1], after[1]):
        assert all(got[k : k + n] == answers for k in range(0, len(got), n))


@pytest.mark.usefixtures("short_stripes")
@TESTED
@given(script=scripts(), data=st.data())
def test_what_it_sees_is_what_it_gets(script: Script, data: st.DataObject) -> None:
    seen = [i for i in range(len(script.events)) if script.sees(i)]
    assume(seen)
    i = data.draw(st.sampled_from(seen), "changed")
    event = other_values(script.events[i], data)
    before, after = play(script), play(with_event(script, i, event))
    everything, changed = before[1][0], after[1][0]
    mine = [j for j, e in enumerate(script.events) if e.user == USER]
    arrival = mine.index(i) + 1
    (arrivals,) = everything[1]
    assert sorted(arrivals) == sorted(mine.index(j) + 1 for j in seen)
    at = arrivals.index(arrival)
    assert changed[2][0][at] == event.item
    assert changed[3][0][at] == event.kind
    unchanged = [k for k in range(len(arrivals)) if k != at]
    for column in range(4):
        assert [everything[column][0][k] for k in unchanged] == [changed[column][0][k] for k in unchanged]
    # One moved to the request's own time is the future, and gone from every answer.
    moved = play(with_event(script, i, replace(script.events[i], event_ts=script.request_ts)))
    assert all(arrival not in got[1][0] for got in moved[1])


@pytest.mark.usefixtures("short_stripes")
@TESTED
@given(script=scripts(), data=st.data())
def test_a_correction_before_the_request_takes_the_event_away(script: Script, data: st.DataObject) -> None:
    seen = [i for i in range(len(script.events)) if script.sees(i)]
    assume(seen)
    i = data.draw(st.sampled_from(seen), "corrected")
    correction = Event(USER, 11, 9, "new", i)
    at = script.request_at
    compactions = frozenset(c if c <= at else c + 1 for c in script.compactions)
    moved = [replace(e, corrects=e.corrects + 1) if (e.corrects or 0) >= at else e for e in script.events[at:]]
    changed = Script((*script.events[:at], correction, *moved), compactions, at + 1, script.request_ts)
    mine = [j for j, e in enumerate(script.events) if e.user == USER]
    arrival = mine.index(i) + 1
    before, after = play(script), play(changed)
    assert arrival in before[1][0][1][0]
    assert all(arrival not in got[1][0] for got in after[1])
    assert after[1][0][1][0] == [a for a in before[1][0][1][0] if a != arrival]
