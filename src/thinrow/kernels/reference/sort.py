"""Plain twin of ``thinrow.kernels.numba.sort``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def group_keys(parts: Sequence[Array]) -> tuple[Array, Array, Array]:
    """As ``thinrow.kernels.numba.sort.group_keys``."""
    keys = np.concatenate([np.empty(0, np.int64), *parts])
    found, first, place, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    code = np.empty(len(order), np.uint32)
    code[order] = np.arange(len(order))
    return found[order], code[place], counts[order].astype(np.int64)


def places_by_code(codes: Array, starts: Array) -> Array:
    """As ``thinrow.kernels.numba.sort.places_by_code``."""
    places = np.empty(len(codes), np.uint32)
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code)
        places[rows] = starts[code] + np.arange(len(rows))
    return places


def number_in_order(offsets: Array, before: Array, values: Array, numbers: Array) -> bool:
    """As ``thinrow.kernels.numba.sort.number_in_order``."""
    ascend = True
    for first, (a, b) in zip(before.tolist(), pairwise(offsets.tolist()), strict=True):
        numbers[a:b] = first + 1 + np.arange(b - a)
        ascend &= bool((values[a + 1 : b] >= values[a : b - 1]).all()) if b > a else True
    return ascend


def scatter_rows(values: Array, places: Array, out: Array) -> None:
    """As ``thinrow.kernels.numba.sort.scatter_rows``."""
    out[places] = values


def find_sorted(known: Array, keys: Array) -> Array:
    """As ``thinrow.kernels.numba.sort.find_sorted``."""
    found: Array = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return found


def in_order(codes: Array, values: Array) -> bool:
    """As ``thinrow.kernels.numba.sort.in_order``."""
    pairs = list(zip(codes.tolist(), values.tolist(), strict=True))
    return pairs == sorted(pairs)
