"""Offsets and orders."""

from __future__ import annotations

import numpy as np
import pytest

from thinrow.core.ragged import inverse_of


@pytest.mark.parametrize("n", [0, 1, 7])
def test_an_inverse_undoes_an_order(n: int) -> None:
    order = np.random.default_rng(n).permutation(n)
    x = np.arange(n) * 10
    assert x[order][inverse_of(order)].tolist() == x.tolist()


def test_the_worked_example() -> None:
    assert inverse_of(np.array([2, 0, 1])).tolist() == [1, 2, 0]
