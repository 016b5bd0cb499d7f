"""The order of a stream is that of one split of as many rows, whatever is known of its end when it is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.dpp import SessionSpec
from thinrow.dpp.order import SplitManifest, VirtualOrder
from thinrow.dpp.stream import StreamManifest, StreamOrder


class _Source:
    """A log of n rows that is sealed once somebody waits for a row that does not come."""

    def __init__(self, n: int, sealed: bool) -> None:
        self.n, self.end = n, n if sealed else None

    def wait(self, stop_row: int) -> int:
        if stop_row > self.n:
            self.end = self.n
        return min(stop_row, self.n)


@settings(max_examples=300)
@given(
    n=st.integers(0, 90),
    base_rows=st.integers(1, 9),
    block=st.integers(1, 4),
    batch_rows=st.none() | st.integers(1, 40),
    seed=st.integers(0, 3),
    ranks=st.integers(1, 4),
    sealed=st.booleans(),
)
def test_it_is_the_order_of_one_split(
    n: int, base_rows: int, block: int, batch_rows: int | None, seed: int, ranks: int, sealed: bool
) -> None:
    spec = SessionSpec("s", 0, 0, base_rows=base_rows, block=block, batch_rows=batch_rows, seed=seed, interleave=1)
    whole = VirtualOrder(SplitManifest("s", 0, (n,), base_rows), seed, 1, block, batch_rows, 1)
    source: Any = _Source(n, sealed)
    stream = StreamOrder(StreamManifest("s", base_rows), source, spec)
    t, rows = 0, []
    while stream.n_batches is None or t < stream.n_batches:
        bases = stream.bases_of(t)
        found = {v: stream.base(v) for v in bases}
        if stream.n_batches is not None and t >= stream.n_batches:
            break  # the log ended before this batch
        for v, base in found.items():
            if base.first_row < n:
                assert base[2:] == whole.base(v)[2:]
            else:
                assert base.first_row == base.stop_row
        parts = [stream.batch(t, r, ranks) for r in range(ranks)]
        wanted = whole.batch(t)
        assert np.concatenate([p.v for p in parts]).tolist() == wanted.v.tolist()
        assert np.concatenate([p.row for p in parts]).tolist() == wanted.row.tolist()
        assert set(wanted.v.tolist()) <= set(bases)
        rows += (wanted.v * base_rows + wanted.row).tolist()
        t += 1
    assert t == whole.n_batches == stream.n_batches
    assert sorted(rows) == list(range(n))
