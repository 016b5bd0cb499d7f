"""The compiled sorting by few keys against its plain twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinrow.kernels import kernel
from thinrow.kernels.dispatch import use

KEYS = st.lists(st.one_of(st.integers(-3, 3), st.integers(-(1 << 63), (1 << 63) - 1)), max_size=200)


def twin(name: str, *arguments: Any) -> Any:
    with use("reference"):
        return kernel(name)(*arguments)


@given(KEYS, st.integers(0, 200))
def test_groups_and_places(keys: list[int], cut: int) -> None:
    parts = [np.array(keys[:cut], np.int64), np.array(keys[cut:], np.int64)]
    distinct, codes, counts = kernel("group_keys")(parts)
    assert distinct[codes].tolist() == keys
    assert counts.tolist() == [keys.count(k) for k in distinct.tolist()]
    for a, b in zip((distinct, codes, counts), twin("group_keys", parts), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    starts = np.cumsum(counts) - counts
    places = kernel("places_by_code")(codes, starts)
    assert places.dtype == twin("places_by_code", codes, starts).dtype
    assert np.array_equal(places, twin("places_by_code", codes, starts))
    out = np.empty(len(keys), np.int64)
    kernel("scatter_rows")(np.array(keys, np.int64), places, out)
    assert np.array_equal(out, np.array(keys, np.int64)[np.argsort(codes, kind="stable")])


@pytest.mark.parametrize("apart", [1, 1 << 40])
def test_more_keys_than_the_first_table_holds(apart: int) -> None:
    keys = np.tile(np.arange(5_000, dtype=np.int64) * apart - 7, 2)
    distinct, codes, counts = kernel("group_keys")([keys[:3], keys[:0], keys[3:]])
    assert np.array_equal(distinct, keys[:5_000])
    assert np.array_equal(codes, np.tile(np.arange(5_000), 2))
    assert np.array_equal(counts, np.full(5_000, 2))


@given(st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=5), st.booleans())
def test_rows_are_numbered(values: list[list[int]], ordered: bool) -> None:
    lists = [sorted(v) if ordered else v for v in values]
    offsets = np.cumsum([0, *(len(v) for v in lists)])
    before, flat = np.arange(len(lists)) * 10, np.array([x for v in lists for x in v], np.int64)
    numbers, other = np.empty((2, len(flat)), np.int64)
    assert kernel("number_in_order")(offsets, before, flat, numbers) == all(v == sorted(v) for v in lists)
    assert twin("number_in_order", offsets, before, flat, other) == all(v == sorted(v) for v in lists)
    assert numbers.tolist() == other.tolist() == [10 * u + 1 + i for u, v in enumerate(lists) for i in range(len(v))]


@pytest.mark.parametrize("dtype", ["int8", "float32", "float64", "bool", "int16"])
def test_scatter_keeps_bits(dtype: str) -> None:
    values, out = np.array([1, 0, 1, 1]).astype(dtype), np.zeros(4, dtype)
    kernel("scatter_rows")(values, np.array([3, 0, 1, 2], np.uint32), out)
    assert out.tolist() == values[[1, 2, 3, 0]].tolist()


@given(KEYS, st.lists(st.integers(0, 3), max_size=200))
def test_order_and_places_of_known_keys(keys: list[int], codes: list[int]) -> None:
    known = np.unique(np.array([0, *keys], np.int64))
    asked = np.array([*keys, 5, *sorted(keys)], np.int64)
    assert np.array_equal(kernel("find_sorted")(known, asked), twin("find_sorted", known, asked))
    n = min(len(keys), len(codes))
    for order in (np.arange(n), np.lexsort((keys[:n], codes[:n]))):
        pair = np.array(codes[:n], np.int64)[order], np.array(keys[:n], np.int64)[order]
        assert kernel("in_order")(*pair) == twin("in_order", *pair)
