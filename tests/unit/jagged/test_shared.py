"""SharedHistories against a plain loop over examples and events: every operation gives what each example saw."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thinrow.core.units import NEVER
from thinrow.core.users import as_users
from thinrow.jagged import Column, Events, SharedHistories

COLUMNS = ("event_ts", "arrival", "item", "kind")
#: What an example saw: its user, and the named values of each event, oldest first.
Seen = tuple[int, list[tuple[Any, ...]]]


@st.composite
def shared_histories(draw: st.DrawFn) -> SharedHistories:
    """Users without events and without examples, late events (arrivals out of order) and hidden ones among them."""
    users = sorted(draw(st.sets(st.integers(0, 6), max_size=4)))
    sizes = [draw(st.integers(0, 6)) for _ in users]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    times: list[int] = []
    arrivals: list[int] = []
    for n in sizes:
        times += sorted(draw(st.lists(st.integers(0, 20), min_size=n, max_size=n)))
        arrivals += draw(st.permutations(range(1, n + 1)))
    n_events = int(offsets[-1])
    late = draw(st.booleans())
    hidden = [draw(st.integers(a + 1, 9)) if late and draw(st.integers(0, 3)) == 0 else NEVER for a in arrivals]
    texts = draw(st.permutations(["a", "b", "c"]))
    kinds = draw(st.lists(st.sampled_from([*texts, None]), min_size=n_events, max_size=n_events))
    columns = {
        "item": Column(np.array([100 * t + a for t, a in zip(times, arrivals, strict=True)], np.int64)),
        "kind": Column.from_arrow(pa.array(kinds, pa.string()), "string"),
    }
    arrays = [np.array(v, np.int64) for v in (times, arrivals, hidden)]
    events = Events(as_users(users), offsets, arrays[0], arrays[1], arrays[2], columns)
    user_of = draw(st.lists(st.integers(0, len(users) - 1), max_size=6)) if users else []
    windows = []
    for u in user_of:
        a, b = sorted(draw(st.tuples(*[st.integers(int(offsets[u]), int(offsets[u + 1]))] * 2)))
        bound = draw(st.integers(0, 9)) if late else 9
        exact = all(arrivals[i] <= bound < hidden[i] for i in range(a, b))
        windows.append((u, a, b, bound, exact))
    table = np.array(windows, np.int64).reshape(-1, 5)
    return SharedHistories(events, *(table[:, i].copy() for i in range(4)), exact=table[:, 4].astype(np.bool_))


def seen(histories: SharedHistories) -> list[Seen]:
    """The oracle: rule by rule, event by event."""
    events = histories.events
    kinds = events.columns["kind"].to_arrow().to_pylist()
    found: list[Seen] = []
    for x in range(len(histories)):
        rows = []
        for i in range(int(histories.start[x]), int(histories.stop[x])):
            if events.arrival[i] <= histories.bound[x] and histories.bound[x] < events.hidden_from[i]:
                ts, arrival = int(events.event_ts[i]), int(events.arrival[i])
                rows.append((ts, arrival, int(events.columns["item"].values[i]), kinds[i]))
        found.append((int(events.users[histories.user_of[x]]), rows))
    return found


def check(histories: SharedHistories, expected: list[Seen]) -> None:
    """Every reading of ``histories`` gives ``expected``."""
    assert len(histories) == len(expected)
    rows = [r for _, r in expected]
    index, offsets = histories.positions()
    assert offsets.tolist() == [0, *np.cumsum([len(r) for r in rows])]
    assert histories.events.event_ts[index].tolist() == [e[0] for r in rows for e in r]
    assert histories.events.arrival[index].tolist() == [e[1] for r in rows for e in r]
    assert histories.lengths().tolist() == [len(r) for r in rows]
    for c, name in enumerate(COLUMNS):
        assert histories.to_jagged(name).to_arrow().to_pylist() == [[e[c] for e in r] for r in rows]
    for width in (1, 3, 9):
        newest = [[e[2] for e in r[-width:]] for r in rows]
        padded = histories.to_padded("item", width, fill=-1)
        assert padded.shape == (len(rows), width)
        assert padded.tolist() == [r + [-1] * (width - len(r)) for r in newest]


def _none() -> SharedHistories:
    none = np.empty(0, np.int64)
    columns = {"item": Column(none), "kind": Column.from_arrow(pa.array([], pa.string()), "string")}
    return SharedHistories(Events.empty(as_users([7]), columns), none, none, none, none, np.empty(0, np.bool_))


@given(shared_histories())
@example(_none())
def test_each_example_reads_what_it_saw(histories: SharedHistories) -> None:
    check(histories, seen(histories))


@given(shared_histories(), st.data())
def test_select_gives_the_examples_asked_for_and_only_their_users(
    histories: SharedHistories, data: st.DataObject
) -> None:
    n = len(histories)
    wanted = data.draw(st.lists(st.integers(0, n - 1), max_size=6)) if n else []
    selected = histories.select(np.array(wanted, np.intp))
    expected = [seen(histories)[x] for x in wanted]
    assert seen(selected) == expected
    check(selected, expected)
    assert set(selected.events.users.tolist()) == {u for u, _ in expected}
    assert len(set(selected.events.users.tolist())) == len(selected.events.users)
    assert selected.user_of.dtype == np.int64


@given(st.lists(shared_histories(), min_size=1, max_size=4))
@settings(max_examples=60)
def test_concat_gives_the_examples_of_all_parts_in_order(parts: list[SharedHistories]) -> None:
    both = SharedHistories.concat(parts)
    expected = [s for p in parts for s in seen(p)]
    assert seen(both) == expected
    check(both, expected)
    assert both.events.users.tolist() == [u for p in parts for u in p.events.users.tolist()]
    assert both.events.offsets.tolist() == [0, *np.cumsum([n for p in parts for n in p.events.lengths])]


@given(st.lists(shared_histories(), min_size=2, max_size=3), st.data())
@settings(max_examples=40)
def test_select_after_concat(parts: list[SharedHistories], data: st.DataObject) -> None:
    both = SharedHistories.concat(parts)
    wanted = data.draw(st.lists(st.integers(0, len(both) - 1), max_size=6)) if len(both) else []
    selected = both.select(np.array(wanted, np.intp))
    check(selected, [seen(both)[x] for x in wanted])


def worked(hidden: int = NEVER, bounds: tuple[int, int] = (2, 4)) -> SharedHistories:
    """The example of the module's docstring; ``hidden`` is the arrival that hides the event at 30 ms."""
    events = Events(
        as_users([7]),
        np.array([0, 4]),
        np.array([10, 20, 30, 40]),
        np.array([1, 2, 3, 4]),
        np.array([NEVER, NEVER, hidden, NEVER]),
        {"item": Column(np.array([1, 2, 3, 4])), "kind": Column.from_arrow(pa.array(["a"] * 4), "string")},
    )
    exact = np.array([bounds[0] >= 2, bounds[1] >= 4 and hidden > bounds[1]])
    return SharedHistories(
        events, np.array([0, 0]), np.array([0, 2]), np.array([2, 4]), np.array(bounds, np.int64), exact
    )


def test_the_worked_example() -> None:
    histories = worked()
    assert histories.to_jagged("event_ts").to_arrow().to_pylist() == [[10, 20], [30, 40]]
    assert histories.lengths().tolist() == [2, 2]


def test_a_hidden_event_is_left_out_from_its_correction_on() -> None:
    assert worked(hidden=5).to_jagged("event_ts").to_arrow().to_pylist() == [[10, 20], [30, 40]]
    assert worked(hidden=4).to_jagged("event_ts").to_arrow().to_pylist() == [[10, 20], [40]]


def test_an_event_that_arrived_after_the_bound_is_left_out() -> None:
    assert worked(bounds=(1, 3)).to_jagged("event_ts").to_arrow().to_pylist() == [[10], [30]]
    assert worked(bounds=(1, 3)).lengths().tolist() == [1, 1]


def test_one_range_of_the_events_is_a_view_and_all_else_a_copy() -> None:
    def made(*slices: tuple[int, int]) -> tuple[SharedHistories, list[int]]:
        n = len(slices)
        keys = np.arange(10), np.arange(1, 11), np.full(10, NEVER)
        events = Events(np.array([7]), np.array([0, 10]), *keys, {"item": Column(10 * np.arange(10))})
        start, stop = np.array(slices, np.int64).reshape(n, 2).T.copy()
        bound, exact = np.full(n, 10), np.ones(n, np.bool_)
        histories = SharedHistories(events, np.zeros(n, np.int64), start, stop, bound, exact)
        return histories, [10 * i for a, b in slices for i in range(a, b)]

    for slices, view in (
        ([(0, 10)], True),
        ([(2, 7)], True),
        ([(2, 5), (5, 9)], True),
        ([(2, 5), (4, 9)], False),
        ([(5, 9), (2, 5)], False),
    ):
        histories, wanted = made(*slices)
        found = histories.to_jagged("item")
        assert found.values.tolist() == wanted
        assert found.lengths.tolist() == [b - a for a, b in slices]
        assert np.shares_memory(found.values, histories.events.columns["item"].values) == view


def test_padding_keeps_each_examples_newest_events() -> None:
    assert worked().to_padded("event_ts", 1).tolist() == [[20], [40]]
    assert worked(hidden=4).to_padded("event_ts", 2).tolist() == [[10, 20], [40, 0]]


def test_a_user_of_two_parts_stays_there_twice() -> None:
    both = SharedHistories.concat([worked(), worked(hidden=4)])
    assert both.events.users.tolist() == [7, 7]
    assert both.to_jagged("event_ts").to_arrow().to_pylist() == [[10, 20], [30, 40], [10, 20], [40]]


def test_users_of_one_kind_keep_it() -> None:
    part = worked()
    names = ("offsets", "event_ts", "arrival", "hidden_from", "columns")
    named = Events(as_users(["ada"]), *(getattr(part.events, n) for n in names))
    text = SharedHistories(named, part.user_of, part.start, part.stop, part.bound, part.exact)
    assert SharedHistories.concat([text, text]).events.users.tolist() == ["ada", "ada"]
    assert text.select(np.array([1])).events.users.tolist() == ["ada"]


def test_keys_are_made_when_somebody_asks() -> None:
    """Lazy events answer as eager ones do, after any selection, and are made once."""
    part = worked()
    eager, made = part.events, []

    def keys() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        made.append(1)
        return eager.arrival, eager.hidden_from

    lazy = Events.lazy(eager.users, eager.offsets, eager.event_ts, keys, eager.columns)
    users = np.arange(len(eager.users))
    rows = np.arange(len(eager))[::-1]
    pairs = [
        (lazy.take_users(users), eager.take_users(users)),
        (lazy.take_rows(rows, eager.offsets), eager.take_rows(rows, eager.offsets)),
        (Events.concat([lazy, eager]), Events.concat([eager, eager])),
        (lazy.with_columns({}), eager.with_columns({})),
    ]
    assert made == []
    for a, b in pairs:
        np.testing.assert_array_equal(a.arrival, b.arrival)
        np.testing.assert_array_equal(a.hidden_from, b.hidden_from)
    copied = pickle.loads(pickle.dumps(lazy))
    np.testing.assert_array_equal(copied.arrival, eager.arrival)
    assert made == [1]
