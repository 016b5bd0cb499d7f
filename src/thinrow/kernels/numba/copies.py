"""Ranges of bytes copied from one array to another, many in one call."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]


@njit
def copy_ranges(src: Array, src_off: Array, length: Array, dst: Array, dst_off: Array) -> int:
    """``dst[dst_off[i]:][:length[i]] = src[src_off[i]:][:length[i]]`` for every i, in order (uint8, int64).

    Returns -1, or the index of the first range that does not lie in its array; the ranges before it are copied.
    """
    for i in range(len(src_off)):
        a, b, n = src_off[i], dst_off[i], length[i]
        if n < 0 or a < 0 or b < 0 or a > len(src) or b > len(dst) or n > len(src) - a or n > len(dst) - b:
            return i
        # A loop, because slice assignment in numba first copies what might overlap.
        for k in range(n):
            dst[b + k] = src[a + k]
    return -1
