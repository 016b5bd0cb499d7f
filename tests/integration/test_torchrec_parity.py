"""A table over two gloo ranks does what TorchRec's row-wise sharded table does, where that is installed.

With torch 2.13: ``pip install --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.9.2``, and what they import.
"""

from __future__ import annotations

import numpy as np
import pytest

from thinrow.testing.ranks import GlooProcesses
from thinrow.testing.torchrec_rows import ours, start, torchrecs


@pytest.mark.bench
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_two_ranks_train_as_torchrecs(optimizer):
    pytest.importorskip("torchrec")
    n_rows, dim, random = 50, 8, np.random.default_rng(3)
    steps = [[random.integers(0, n_rows, n) for n in (40, 25)] for _ in range(5)]
    with GlooProcesses(2) as processes:
        mine = processes.run(2, ours, optimizer, n_rows, dim, steps)
        theirs = processes.run(2, torchrecs, optimizer, n_rows, dim, steps)
    for (a, _), (b, _) in zip(mine, theirs, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    at_the_end = [np.concatenate([rows for _, rows in side]) for side in (mine, theirs)]
    mine_rows, their_rows = (rows[np.argsort(rows[:, 0])] for rows in at_the_end)
    assert mine_rows[:, 0].tolist() == list(range(n_rows))
    np.testing.assert_allclose(mine_rows, their_rows, rtol=1e-5, atol=1e-5)
    assert np.abs(mine_rows[:, 1:] - start(np.arange(n_rows), dim)).max() > 0.1
