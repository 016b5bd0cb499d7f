"""SequenceLayout against its words, pair by pair; times against counts; refused input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import InputError
from thinrow.kernels.distance import Distances
from thinrow.kernels.layout import AttentionLayout
from thinrow.kernels.sequence import SequenceLayout


def seen_by(layout, query):
    row = np.searchsorted(layout.q_offsets, query, "right") - 1
    ranges = zip(layout.starts[query], layout.stops[query], strict=True)
    return [int(layout.k_offsets[row] + j) for start, stop in ranges for j in range(start, stop)]


def in_words(context, history, targets, seen, window, first):
    """What each token of one row sees, as the module says it."""
    saw = []
    for i in range(context + history + targets):
        if i < context:
            saw.append(list(range(context)))
            continue
        target = i >= context + history
        place = seen[i - context - history] if target else i - context
        before = [j for j in range(place) if window is None or j >= place - window or j < first]
        saw.append([*range(context), *(context + j for j in before), i])
    return saw


counts = st.integers(0, 6)


@given(st.lists(st.tuples(counts, counts, counts), max_size=4), st.none() | counts, counts, st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_the_words_of_the_rule(rows, window, first, seed):
    rng = np.random.default_rng(seed)
    seen = [rng.integers(0, h + 1, m).tolist() for _, h, m in rows]
    offsets = np.cumsum([0, *(sum(r) for r in rows)])
    context, targets = [r[0] for r in rows], [r[2] for r in rows]
    all_seen = np.concatenate([np.empty(0, np.int64), *map(np.array, seen)]).astype(np.int64)
    layout = SequenceLayout(offsets, context=context, targets=targets, seen=all_seen, window=window, first=first)
    wanted = []
    for at, (c, h, m), s in zip(offsets, rows, seen, strict=False):
        wanted += [[int(at + j) for j in saw] for saw in in_words(c, h, m, s, window, first)]
    assert [seen_by(layout, i) for i in range(layout.n_queries)] == wanted
    assert layout.n_seen.tolist() == [len(w) for w in wanted]
    places = [[*range(-c, 0), *range(h), *s] for (c, h, _), s in zip(rows, seen, strict=True)]
    assert layout.positions.tolist() == [p for row in places for p in row]


def test_the_example():
    layout = SequenceLayout([0, 6], context=1, targets=2, seen=[1, 3], window=1)
    assert [seen_by(layout, i) for i in range(6)] == [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 1, 4], [0, 3, 5]]
    assert layout.positions.tolist() == [-1, 0, 1, 2, 1, 3]
    ranges = AttentionLayout([0, 2], [0, 5], [[0, 2, 4], [0, 3, 4]], [[1, 4, 4], [1, 4, 5]])
    assert [seen_by(ranges, i) for i in range(2)] == [[0, 2, 3], [0, 3, 4]]


def test_where_a_target_stands_among_the_targets_changes_nothing():
    layout = SequenceLayout([0, 40], targets=20, window=5)
    assert all(seen_by(layout, i) == [15, 16, 17, 18, 19, i] for i in range(20, 40))


def test_without_context_window_and_targets_it_is_causal():
    layout = SequenceLayout([0, 3, 5])
    assert (layout.starts.tolist(), layout.stops.tolist()) == ([[0]] * 5, [[1], [2], [3], [1], [2]])


@given(st.lists(st.tuples(counts, st.lists(counts, max_size=6), st.lists(counts, max_size=6)), max_size=4))
@settings(max_examples=30)
def test_by_time_a_target_has_seen_what_was_before_its_request(rows):
    """Rows of context tokens, times of events, times of requests."""
    events, requests = [sorted(r[1]) for r in rows], [r[2] for r in rows]
    times = [[99] * r[0] + e + q for r, e, q in zip(rows, events, requests, strict=True)]
    offsets, context = np.cumsum([0, *map(len, times)]), [r[0] for r in rows]
    flat = np.array([t for row in times for t in row], np.int64)
    found = SequenceLayout.by_time(offsets, flat, context=context, targets=list(map(len, requests)), window=2, first=1)
    seen = [sum(e < t for e in row) for row, q in zip(events, requests, strict=True) for t in q]
    wanted = SequenceLayout(
        offsets, context=context, targets=list(map(len, requests)), seen=np.array(seen, np.int64), window=2, first=1
    )
    assert found.starts.tolist() == wanted.starts.tolist()
    assert found.stops.tolist() == wanted.stops.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 2, "targets": 2}, "row 0 has 3 tokens but context=2 and targets=2"),
        ({"targets": [1]}, "targets has 1 entries and there are 2 rows"),
        ({"context": [-1, 0]}, "context has -1; no count may be negative"),
        ({"context": 1.5}, "context is 1-dimensional of float64"),
        ({"targets": 1, "seen": [0]}, "seen has 1 entries and there are 2 targets"),
        ({"targets": 1, "seen": [0, 2]}, r"target 1 has seen 2 tokens of a history of 1; pass 0 to 1"),
        ({"window": -1}, "window=-1 and first=0; neither may be negative"),
    ],
)
def test_a_bad_sequence_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        SequenceLayout([0, 3, 5], **arguments)


def test_bad_times_are_refused():
    with pytest.raises(InputError, match="times has 2 entries for 3 tokens"):
        SequenceLayout.by_time([0, 3], [1, 2])
    with pytest.raises(InputError, match="history of row 1 goes from time 7 back to 6; sort it by time"):
        SequenceLayout.by_time([0, 2, 5], [3, 9, 5, 7, 6])


@pytest.mark.parametrize(
    ("starts", "stops", "message"),
    [
        (
            [[0, 2], [0, 1]],
            [[3, 4], [1, 4]],
            r"query 0 sees the ranges \[\(0, 3\), \(2, 4\)\] of a row that has 4 keys",
        ),
        ([[0], [0]], [[4], [5]], r"query 1 sees the ranges \[\(0, 5\)\]"),
        ([[0], [2]], [[4], [1]], r"query 1 sees the ranges \[\(2, 1\)\]"),
        ([[-1], [2]], [[4], [2]], r"query 0 sees the ranges \[\(-1, 4\)\]"),
        ([[0]], [[4]], r"q_offsets end at 2 but starts has shape \(1, 1\)"),
        ([[], []], [[], []], "starts has no range a query"),
        ([0, 0], [[4], [4]], "starts is 1-dimensional of int64; pass a two-dimensional int64 array"),
    ],
)
def test_bad_ranges_are_refused(starts, stops, message):
    with pytest.raises(InputError, match=message):
        AttentionLayout([0, 2], [0, 4], starts, stops)


def test_places_of_times_are_whole_seconds_of_each():
    places = Distances.of_times([5_999, 6_000], [1_000, -1], bits=2)
    assert (places.q.tolist(), places.k.tolist()) == ([6, 7], [2, 0])


@pytest.mark.parametrize(
    ("q", "k", "bits", "message"),
    [
        ([0], [1 << 30], 2, "places from 0 to 1073741824 span 1073741824; at most 1073741823"),
        ([0], [0.5], 2, "k is 1-dimensional of float64"),
        ([0], [0], 16, "bits=16; it must be from 0 to 15"),
    ],
)
def test_bad_places_are_refused(q, k, bits, message):
    with pytest.raises(InputError, match=message):
        Distances.of(q, k, bits)
