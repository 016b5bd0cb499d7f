"""The virtual order by hand-worked cases."""

import numpy as np
import pytest

from thinrow.core.errors import InputError
from thinrow.dpp.order import Base, SplitManifest, VirtualOrder, epoch_order, permutation

MANIFEST = SplitManifest("table", 1, (5, 3), 2)


def test_permutations_are_pinned():
    # A change of these numbers changes every batch of every run that is resumed with a newer version.
    assert permutation(8, seed=0, stream=1, number=0).tolist() == [5, 4, 7, 1, 0, 2, 6, 3]
    assert permutation(8, seed=7, stream=2, number=3).tolist() == [5, 4, 0, 3, 7, 2, 1, 6]
    assert permutation(3, seed=-5, stream=2, number=3).tolist() == [1, 2, 0]


def test_trace_of_the_module_docstring():
    order = VirtualOrder(MANIFEST, seed=0, interleave=2, block=2, batch_rows=3, epochs=1)
    assert [order.base(v) for v in range(5)] == [
        Base(0, 0, 1, 0, 2),
        Base(1, 0, 0, 0, 2),
        Base(2, 0, 1, 2, 3),
        Base(3, 0, 0, 2, 4),
        Base(4, 0, 0, 4, 5),
    ]
    assert [len(order.block_rows(k).v) for k in range(3)] == [4, 3, 1]
    assert [len(order.batch(t).v) for t in range(3)] == [3, 3, 2]
    assert [list(order.bases_of(t)) for t in range(3)] == [[0, 1], [0, 1, 2, 3], [2, 3, 4]]
    assert (order.n_rows, order.n_bases, order.n_batches) == (8, 5, 3)


def test_without_a_size_a_batch_is_a_block():
    order = VirtualOrder(MANIFEST, seed=0, interleave=2, block=2, batch_rows=None, epochs=1)
    assert [len(order.batch(t).v) for t in range(3)] == [4, 3, 1]
    assert [list(order.bases_of(t)) for t in range(3)] == [[0, 1], [2, 3], [4]]
    assert order.n_batches == 3


def test_one_lane_takes_splits_one_after_another():
    order = epoch_order(MANIFEST, 0, 1, 0)
    assert order.split.tolist() == [1, 1, 0, 0, 0]
    assert order.first_row.tolist() == [0, 2, 0, 2, 4]
    assert order.row_start.tolist() == [0, 2, 3, 5, 7, 8]


def test_epochs_differ_and_run_on():
    order = VirtualOrder(
        SplitManifest("table", 1, (64,) * 16, 8), seed=3, interleave=4, block=4, batch_rows=32, epochs=None
    )
    first, second = ([order.batch(t) for t in range(e * 32, (e + 1) * 32)] for e in (0, 1))
    assert not np.array_equal(np.concatenate([b.row for b in first]), np.concatenate([b.row for b in second]))
    assert order.base(128).epoch == 1
    assert order.n_batches is None


def test_an_empty_table_has_no_batches():
    for rows in ((), (0, 0)):
        order = VirtualOrder(SplitManifest("table", 1, rows, 4), 0, 2, 2, 4, None)
        assert (order.n_rows, order.n_bases, order.n_batches) == (0, 0, 0)


def test_fingerprint_sees_every_field():
    others = [("other", 1, (5, 3), 2), ("table", 2, (5, 3), 2), ("table", 1, (3, 5), 2), ("table", 1, (5, 3), 3)]
    assert len({SplitManifest(*m).fingerprint() for m in [*others, ("table", 1, (5, 3), 2)]}) == 5


def test_sizes_below_one_are_named():
    with pytest.raises(InputError, match="base_rows=0"):
        SplitManifest("table", 1, (1,), 0)
    for name in ("interleave", "block", "batch_rows", "epochs"):
        sizes = {"interleave": 1, "block": 1, "batch_rows": 1, "epochs": 1, name: 0}
        with pytest.raises(InputError, match=f"{name}=0; it must be 1 or more"):
            VirtualOrder(MANIFEST, 0, **sizes)


def test_a_batch_past_the_end_is_refused():
    order = VirtualOrder(MANIFEST, 0, 2, 2, 3, 1)
    for t in (-1, 3):
        with pytest.raises(InputError, match=f"batch {t} is not in the run; it has 3 batches"):
            order.batch(t)
