"""Plain twin of ``thinrow.kernels.numba.sort``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def group_keys(keys: Array) -> tuple[Array, Array]:
    """As ``thinrow.kernels.numba.sort.group_keys``."""
    found, first, place = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    code = np.empty(len(order), np.int64)
    code[order] = np.arange(len(order))
    return found[order], code[place]


def places_by_code(codes: Array, starts: Array) -> Array:
    """As ``thinrow.kernels.numba.sort.places_by_code``."""
    places = np.empty(len(codes), np.int64)
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code)
        places[rows] = starts[code] + np.arange(len(rows))
    return places


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
