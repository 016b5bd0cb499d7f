from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.storage.ranges import plan_requests

OBJECTS = np.random.default_rng(3).integers(0, 256, (4, 2300)).astype(np.uint8)
RANGE = st.tuples(st.integers(0, 3), st.integers(0, 2000), st.integers(0, 300))


@settings(max_examples=200)
@given(st.lists(RANGE, max_size=40), st.integers(0, 300), st.integers(1, 400))
def test_requests_bring_every_byte_and_are_as_few_and_short_as_promised(ranges, gap, most) -> None:
    which, offsets, lengths = np.array(ranges, np.int64).reshape(-1, 3).T
    places = np.cumsum(lengths) - lengths
    plan = plan_requests(which, offsets, lengths, places, gap, most)
    out = np.zeros(int(lengths.sum()), np.uint8)
    for r in range(len(plan.start)):
        start, stop = plan.start[r], plan.stop[r]
        assert 0 < stop - start < 2 * most
        plan.take(r, OBJECTS[plan.which[r]][start:stop], out)
    expected = [OBJECTS[k][o : o + n] for k, o, n in ranges]
    np.testing.assert_array_equal(out, np.concatenate([np.empty(0, np.uint8), *expected]))
    # With no bound on their length, requests are exactly the clusters of ranges at most ``gap`` apart.
    plan = plan_requests(which, offsets, lengths, places, gap, 10_000)
    clusters = 0
    for k in range(4):
        reach = None
        for o, n in sorted((o, n) for w, o, n in ranges if w == k and n):
            clusters += reach is None or o - reach > gap
            reach = max(o + n, reach or 0)
    assert len(plan.start) == clusters


def test_the_worked_example() -> None:
    plan = plan_requests(
        np.zeros(3, np.int64), np.array([1000, 0, 30]), np.full(3, 10), np.array([0, 10, 20]), 100, 1 << 20
    )
    assert plan.start.tolist() == [0, 1000]
    assert plan.stop.tolist() == [40, 1010]
    assert int((plan.stop - plan.start).sum()) == 50
