"""Cross features of candidates with the visible history."""

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import InputError
from thinrow.core.units import DAY_MS, NEVER
from thinrow.features import history_candidate_cross
from thinrow.jagged import Column, Events, Jagged, SharedHistories


def histories(event_ts, columns, start, stop, *, arrival=None, hidden_from=None, bound=None, exact=True):
    n, x = len(event_ts), len(start)
    events = Events(
        np.array([1]),
        np.array([0, n]),
        np.array(event_ts, np.int64),
        np.arange(1, n + 1) if arrival is None else np.array(arrival),
        np.full(n, NEVER) if hidden_from is None else np.array(hidden_from),
        columns,
    )
    return SharedHistories(
        events,
        np.zeros(x, np.int64),
        np.array(start),
        np.array(stop),
        np.full(x, n) if bound is None else np.array(bound),
        np.full(x, exact),
    )


def jagged(rows, dtype=None):
    offsets = np.cumsum([0, *(len(r) for r in rows)])
    flat = [v for r in rows for v in r]
    return Jagged(Column.from_arrow(pa.array(flat), dtype or "int64"), offsets)


def test_the_worked_example():
    h = histories([0, DAY_MS, 3 * DAY_MS], {"item": Column(np.array([7, 9, 7]))}, [0], [3])
    out = history_candidate_cross(h, "item", jagged([[7, 8]]), np.array([5 * DAY_MS]))
    assert out.seen_before.values.tolist() == [1, 0]
    assert out.count.values.tolist() == [2, 0]
    assert out.days_since.values.tolist() == [2, -1]
    assert out.group_count is None
    codes = Column(np.array([0, 1, 2], np.int32), None, pa.array([7, 9, 7]))
    h = histories([0, DAY_MS, 3 * DAY_MS], {"item": codes}, [0], [3])
    assert history_candidate_cross(h, "item", jagged([[7, 8]]), np.array([5 * DAY_MS])).count.values.tolist() == [2, 0]
    assert (out.seen_before.values.dtype, out.count.values.dtype, out.days_since.values.dtype) == (
        np.int8,
        np.int32,
        np.int32,
    )


def test_days_are_whole_and_counted_from_the_request():
    h = histories([1000], {"item": Column(np.array([7]))}, [0, 0], [1, 1])
    out = history_candidate_cross(h, "item", jagged([[7], [7]]), np.array([1000 + DAY_MS - 1, 1000 + DAY_MS]))
    assert out.days_since.values.tolist() == [0, 1]


def test_windows_of_one_user_are_kept_apart():
    h = histories([0, 1, 2], {"item": Column(np.array([7, 7, 7]))}, [0, 1, 0], [1, 3, 0])
    out = history_candidate_cross(h, "item", jagged([[7], [7], [7]]), np.array([9, 9, 9]))
    assert out.count.values.tolist() == [1, 2, 0]


def test_late_and_superseded_events_do_not_count():
    h = histories(
        [0, 1, 2],
        {"item": Column(np.array([7, 7, 7]))},
        [0],
        [3],
        arrival=[1, 6, 2],
        hidden_from=[4, NEVER, NEVER],
        bound=[5],
        exact=False,
    )
    assert history_candidate_cross(h, "item", jagged([[7]]), np.array([9])).count.values.tolist() == [1]


def test_a_candidate_twice_gets_the_same_twice():
    h = histories([0, 1], {"item": Column(np.array([7, 7]))}, [0], [2])
    out = history_candidate_cross(h, "item", jagged([[7, 3, 7]]), np.array([DAY_MS]))
    assert out.count.values.tolist() == [2, 0, 2]
    assert out.days_since.values.tolist() == [0, -1, 0]


def test_strings_meet_across_dictionaries_and_nulls_meet_nothing():
    held = Column.from_arrow(pa.array(["b", None, "a", "b"]), "string")
    h = histories([0, 1, 2, 3], {"item": Column(np.array([1, 2, 3, 4])), "category": held}, [0], [4])
    wanted = jagged([["a", "b", None, "c"]], "string")
    out = history_candidate_cross(h, "item", jagged([[1, 1, 1, 9]]), np.array([9]), group=("category", wanted))
    assert out.group_count.values.tolist() == [1, 2, 0, 0]
    assert out.count.values.tolist() == [1, 1, 1, 0]


def test_bad_input_is_named():
    h = histories([0], {"item": Column(np.array([7])), "price": Column(np.array([0.5]))}, [0], [1])
    one = jagged([[7]])
    with pytest.raises(InputError, match="no column 'product' in the histories; they have item, price"):
        history_candidate_cross(h, "product", one, np.array([9]))
    with pytest.raises(InputError, match="column 'price' of the history is of float64"):
        history_candidate_cross(h, "price", one, np.array([9]))
    with pytest.raises(InputError, match="column 'item' of the candidates is of string"):
        history_candidate_cross(h, "item", jagged([["7"]], "string"), np.array([9]))
    with pytest.raises(InputError, match="1 histories, 1 rows of candidates, 2 request times"):
        history_candidate_cross(h, "item", one, np.array([9, 9]))
    with pytest.raises(InputError, match="rows of different lengths"):
        history_candidate_cross(h, "item", one, np.array([9]), group=("item", jagged([[7, 7]])))
