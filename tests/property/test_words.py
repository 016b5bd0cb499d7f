"""The compiled statistics of words against their plain twins."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from thinrow.kernels import kernel
from thinrow.kernels.dispatch import use

WORDS = st.lists(st.one_of(st.integers(0, 5), st.integers(0, (1 << 64) - 1)), max_size=300)


def both(name: str, *arguments: object) -> None:
    found = kernel(name)(*arguments)
    with use("reference"):
        wanted = kernel(name)(*arguments)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


@given(WORDS, st.integers(1, 255))
def test_frequent_words(words: list[int], least: int) -> None:
    both("count_words", np.array(words * 3, np.uint64), least)


@given(WORDS, st.lists(st.integers(0, 300), max_size=5))
def test_words_of_stripes(words: list[int], cuts: list[int]) -> None:
    offsets = np.array(sorted({0, len(words), *(min(c, len(words)) for c in cuts)}), np.int64)
    both("stripe_words", np.array(words, np.uint64), offsets)


def test_more_of_a_word_than_a_byte_counts() -> None:
    words = np.repeat(np.array([3, 4], np.uint64), [70_000, 254])
    assert [a.tolist() for a in kernel("count_words")(words, 255)] == [[3], [70_000]]
