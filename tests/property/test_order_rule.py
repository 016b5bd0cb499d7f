"""The order rule for any sizes: every row once an epoch, any rank count, the same from any step."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.dpp.order import SplitManifest, VirtualOrder, epoch_order, permutation

manifests = st.builds(
    SplitManifest,
    table=st.just("table"),
    snapshot_id=st.integers(0, 3),
    split_rows=st.lists(st.integers(0, 23), max_size=6).map(tuple),
    base_rows=st.integers(1, 7),
)
orders = st.builds(
    VirtualOrder,
    manifest=manifests,
    seed=st.integers(-(2**63), 2**63),
    interleave=st.integers(1, 7),
    block=st.integers(1, 5),
    batch_rows=st.none() | st.integers(1, 17),
    epochs=st.integers(1, 3),
)


def rows_of(order, refs):
    bases = {int(v): order.base(int(v)) for v in np.unique(refs.v)}
    return [
        (bases[v].epoch, bases[v].split, bases[v].first_row + r)
        for v, r in zip(refs.v.tolist(), refs.row.tolist(), strict=True)
    ]


@given(orders)
@settings(max_examples=60)
def test_every_row_exactly_once_per_epoch(order):
    seen = Counter()
    for t in range(order.n_batches):
        refs = order.batch(t)
        if order.batch_rows is None:
            assert (
                set(refs.v.tolist())
                == set(order.bases_of(t))
                == set(range(t * order.block, (t + 1) * order.block)) & set(range(order.n_bases))
            )
        else:
            assert len(refs.v) == min(order.batch_rows, order.n_rows - t * order.batch_rows)
            assert set(refs.v.tolist()) <= set(order.bases_of(t))
        seen.update(rows_of(order, refs))
    split_rows = order.manifest.split_rows
    expected = {(e, s, r) for e in range(order.epochs) for s, n in enumerate(split_rows) for r in range(n)}
    assert set(seen) == expected
    assert set(seen.values()) <= {1}


@given(orders, st.integers(1, 9))
@settings(max_examples=40)
def test_ranks_partition_each_batch(order, n_ranks):
    for t in range(order.n_batches):
        whole = order.batch(t)
        parts = [order.batch(t, rank, n_ranks) for rank in range(n_ranks)]
        assert np.array_equal(whole.v, np.concatenate([p.v for p in parts]))
        assert np.array_equal(whole.row, np.concatenate([p.row for p in parts]))
        sizes = [len(p.v) for p in parts]
        assert max(sizes) - min(sizes) <= 1


@given(orders, st.integers(0, 2**32))
@settings(max_examples=40)
def test_any_step_is_addressed_without_the_steps_before_it(order, start):
    """A fresh order, asked first for some later batch, gives the batch that the walk from the start gives."""
    walk = [order.batch(t) for t in range(order.n_batches)]
    epoch_order.cache_clear()
    for t in list(range(order.n_batches))[start % max(order.n_batches, 1) :]:
        assert np.array_equal(order.batch(t).v, walk[t].v)
        assert np.array_equal(order.batch(t).row, walk[t].row)


@given(orders)
@settings(max_examples=40)
def test_blocks_are_runs_of_base_batches(order):
    """Rows leave a block only whole: the stream is block 0 permuted, block 1 permuted, and so on."""
    stream = np.concatenate([order.batch(t).v for t in range(order.n_batches)] or [np.empty(0, np.int64)])
    assert (np.diff(stream // order.block) >= 0).all()


@given(st.integers(0, 200), st.integers(-5, 2**64), st.integers(1, 2), st.integers(0, 2**40))
def test_permutation_is_one(n, seed, stream, number):
    assert sorted(permutation(n, seed, stream, number).tolist()) == list(range(n))


def test_permutations_are_spread():
    """Each of the 24 orders of 4 things comes up about equally often over block numbers."""
    counts = Counter(tuple(permutation(4, 11, 2, k).tolist()) for k in range(4800))
    assert len(counts) == 24
    assert all(130 < c < 275 for c in counts.values())
