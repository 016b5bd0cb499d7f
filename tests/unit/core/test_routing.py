from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinrow.core.errors import InputError
from thinrow.core.routing import Routing
from thinrow.core.wrap import MASK64, mix64

KEYS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=30)
STARTS = st.sets(st.integers(1, MASK64), max_size=5).map(lambda s: (0, *sorted(s)))


@given(KEYS, STARTS)
def test_a_shard_has_the_keys_whose_mixed_value_is_in_its_range(keys: list[int], starts: tuple[int, ...]) -> None:
    shards = Routing(starts).shards(np.array(keys, np.int64))
    for key, shard in zip(keys, shards, strict=True):
        mixed = mix64(key & MASK64)
        assert starts[shard] <= mixed < (*starts, 1 << 64)[shard + 1]


@given(st.integers(1, 100_000))
def test_even_ranges_differ_by_one_at_most(n_shards: int) -> None:
    starts = (*Routing.even(n_shards).starts, 1 << 64)
    sizes = {b - a for a, b in pairwise(starts)}
    assert len(starts) == n_shards + 1
    assert max(sizes) - min(sizes) <= 1


def test_the_example_of_the_docstring() -> None:
    assert Routing.even(4).shards(np.array([0, 1])).tolist() == [0, 1]


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 5, 3), (0, 1 << 64), (-1, 0)])
def test_ranges_that_do_not_cover_all_keys_once_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="ascend from 0"):
        Routing(starts)


def test_no_shards_are_refused() -> None:
    with pytest.raises(InputError, match="1 or more"):
        Routing.even(0)
