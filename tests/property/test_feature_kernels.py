"""Compiled feature kernels equal the NumPy reference bit for bit, and the history cross equals a plain count."""

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from thinrow.core.units import DAY_MS, NEVER
from thinrow.features import history_candidate_cross
from thinrow.jagged import Column, Events, Jagged, SharedHistories
from thinrow.kernels import kernel, use

int64s = hnp.arrays(np.int64, st.integers(0, 40), elements=st.integers(-(2**63), 2**63 - 1))
seeds = st.integers(0, 2**63 - 1)
divisors = st.integers(1, 2**63 - 1)


def both(name, *arguments):
    results = []
    for backend in ("numba", "reference"):
        with use(backend):
            results.append(kernel(name)(*arguments))
    first, second = results
    assert first.dtype == second.dtype
    assert np.array_equal(first, second)
    return first


@given(int64s, seeds, divisors)
@settings(max_examples=60)
def test_integer_kernels(values, seed, divisor):
    both("mix64", values.view(np.uint64))
    hashed = both("hash_ints", values, seed)
    cut = len(values) // 3
    parts = both("hash_parts", values, np.array([0, cut, cut, len(values)]), [seed, 5, 7])
    apart = [both("hash_ints", part, s) for part, s in ((values[:cut], seed), (values[cut:], 7))]
    assert parts.tolist() == np.concatenate(apart).tolist()
    assert len(np.unique(hashed)) == len(np.unique(values))
    remainder = both("mod_unsigned", values, divisor)
    assert remainder.tolist() == [v % 2**64 % divisor for v in values.tolist()]


@given(st.lists(st.binary(max_size=30), max_size=12), seeds)
@settings(max_examples=60)
def test_byte_hash(values, seed):
    offsets = np.cumsum([0, *(len(v) for v in values)])
    hashed = both("hash_bytes", offsets, np.frombuffer(b"".join(values), np.uint8), seed)
    assert len(np.unique(hashed)) == len(set(values))


@given(st.lists(st.text(max_size=30), max_size=8), seeds)
@settings(max_examples=60)
def test_hash_of_words(texts, seed):
    raw = [t.encode() for t in texts]
    arguments = np.cumsum([0, *(len(v) for v in raw)]), np.frombuffer(b"".join(raw), np.uint8), seed
    results = []
    for backend in ("numba", "reference"):
        with use(backend):
            results.append(kernel("hash_words")(*arguments))
    for one, other in zip(*results, strict=True):
        assert one.tolist() == other.tolist()
    lists, hashed = results[0]
    words = [re.findall(rb"[0-9a-z\x80-\xff]+", v.lower()) for v in raw]
    assert np.diff(lists).tolist() == [len(w) for w in words]
    flat = [w for found in words for w in found]
    bounds = np.cumsum([0, *(len(w) for w in flat)])
    assert hashed.tolist() == kernel("hash_bytes")(bounds, np.frombuffer(b"".join(flat), np.uint8), seed).tolist()


@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(0, 20))), seeds)
@settings(max_examples=40)
def test_tuple_hash(elements, seed):
    both("hash_tuples", elements, seed)


@st.composite
def crossings(draw):
    """Histories of some users with late and superseded events, examples on them, candidates with repeats and nulls."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    offsets = np.cumsum([0, *lengths])
    n = int(offsets[-1])
    small = st.integers(-3, 3)

    def column(size):
        values = draw(hnp.arrays(np.int64, size, elements=small))
        return Column(values, draw(st.none() | hnp.arrays(np.bool_, size)))

    arrival = draw(hnp.arrays(np.int64, n, elements=st.integers(1, 12)))
    events = Events(
        np.arange(len(lengths)),
        offsets,
        draw(hnp.arrays(np.int64, n, elements=st.integers(0, 5 * DAY_MS))),
        arrival,
        draw(hnp.arrays(np.int64, n, elements=st.sampled_from([4, 9, NEVER]))),
        {"item": column(n)},
    )
    x = draw(st.integers(0, 5))
    user = draw(hnp.arrays(np.int64, x, elements=st.integers(0, len(lengths) - 1)))
    cuts = [sorted(draw(st.tuples(*[st.integers(offsets[u], offsets[u + 1])] * 2))) for u in user.tolist()]
    bound = draw(hnp.arrays(np.int64, x, elements=st.integers(0, 12)))
    start, stop = (np.array([c[i] for c in cuts], np.int64) for i in (0, 1))
    shown = [
        all(arrival[i] <= b < events.hidden_from[i] for i in range(s, e))
        for s, e, b in zip(start.tolist(), stop.tolist(), bound.tolist(), strict=True)
    ]
    histories = SharedHistories(events, user, start, stop, bound, np.array(shown, np.bool_))
    n_candidates = draw(st.lists(st.integers(0, 7), min_size=x, max_size=x))
    candidates = Jagged(column(sum(n_candidates)), np.cumsum([0, *n_candidates]))
    return histories, candidates, draw(hnp.arrays(np.int64, x, elements=st.integers(6 * DAY_MS, 9 * DAY_MS)))


@given(crossings())
@settings(max_examples=120)
def test_history_cross_counts_the_visible_events(crossing):
    histories, candidates, request_ts = crossing
    outputs = []
    for backend in ("numba", "reference"):
        with use(backend):
            outputs.append(
                history_candidate_cross(histories, "item", candidates, request_ts, group=("item", candidates))
            )
    positions, offsets = histories.positions()
    item = histories.events.columns["item"]
    held = item.to_arrow().take(positions).to_pylist()
    wanted = candidates.column.to_arrow().to_pylist()
    for x in range(len(histories)):
        rows = range(offsets[x], offsets[x + 1])
        for c in range(candidates.offsets[x], candidates.offsets[x + 1]):
            hits = [
                int(histories.events.event_ts[positions[r]])
                for r in rows
                if held[r] is not None and held[r] == wanted[c]
            ]
            days = (int(request_ts[x]) - max(hits)) // DAY_MS if hits else -1
            for out in outputs:
                found = (
                    out.seen_before.values[c],
                    out.count.values[c],
                    out.days_since.values[c],
                    out.group_count.values[c],
                )
                assert found == (bool(hits), len(hits), days, len(hits))
