"""Events of many users: which a request sees, and users and rows by number."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.units import NEVER
from thinrow.core.users import as_users
from thinrow.jagged import Column, Events
from thinrow.jagged.events import never_hidden


def events() -> Events:
    """User 7: three events; user 8: none; user 9: one that arrival 12 hides."""
    return Events(
        as_users([7, 8, 9]),
        np.array([0, 3, 3, 4]),
        np.array([10, 20, 30, 10]),
        np.array([1, 2, 3, 11]),
        np.array([NEVER, NEVER, NEVER, 12]),
        {"kind": Column.from_arrow(pa.array(["a", None, "b", "a"]), "string")},
    )


@pytest.mark.parametrize(
    ("request_ts", "bound", "hidden_from", "visible"),
    [
        (20, 9, NEVER, False),  # an event at the very time of the request is not seen
        (21, 9, NEVER, True),
        (21, 4, NEVER, False),
        (21, 5, NEVER, True),  # the event that arrived last is seen
        (21, 7, 8, True),
        (21, 8, 8, False),  # its correction has arrived
        (21, 9, 8, False),
    ],
)
def test_each_bound_of_visibility(request_ts: int, bound: int, hidden_from: int, visible: bool) -> None:
    """Of an event at 20 ms with arrival 5."""
    one = Events(as_users([1]), np.array([0, 1]), np.array([20]), np.array([5]), np.array([hidden_from]), {})
    assert one.visible(np.array([request_ts]), np.array([bound])).tolist() == [visible]


def test_an_unhidden_event_is_seen_at_the_highest_bound() -> None:
    one = Events(as_users([1]), np.array([0, 1]), np.array([0]), np.array([NEVER - 1]), never_hidden(1), {})
    assert one.visible(np.array([1]), np.array([NEVER - 1])).tolist() == [True]


def test_visible_takes_each_users_own_request() -> None:
    found = events().visible(np.array([21, 99, 11]), np.array([1, 99, 11]))
    assert found.tolist() == [True, False, False, True]


def test_lengths_and_number_of_events() -> None:
    assert len(events()) == 4
    assert events().lengths.tolist() == [3, 0, 1]


def test_take_users_brings_their_events_in_the_order_asked() -> None:
    taken = events().take_users(np.array([2, 1, 0]))
    assert taken.users.tolist() == [9, 8, 7]
    assert taken.offsets.tolist() == [0, 1, 1, 4]
    assert taken.event_ts.tolist() == [10, 10, 20, 30]
    assert taken.arrival.tolist() == [11, 1, 2, 3]
    assert taken.hidden_from.tolist() == [12, NEVER, NEVER, NEVER]
    assert taken.columns["kind"].to_arrow().to_pylist() == ["a", "a", None, "b"]


def test_take_rows_keeps_the_users() -> None:
    taken = events().take_rows(np.array([1, 3]), np.array([0, 1, 1, 2]))
    assert taken.users.tolist() == [7, 8, 9]
    assert taken.lengths.tolist() == [1, 0, 1]
    assert taken.arrival.tolist() == [2, 11]
    assert taken.columns["kind"].to_arrow().to_pylist() == [None, "a"]


def test_empty_keeps_users_and_types() -> None:
    empty = Events.empty(as_users(["x", "y"]), events().columns)
    assert len(empty) == 0
    assert empty.lengths.tolist() == [0, 0]
    assert empty.columns["kind"].to_arrow().type == pa.string()
    assert empty.visible(np.array([1, 1]), np.array([1, 1])).tolist() == []
