"""Ranges of bytes copied from one array to another."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


def copy_ranges(src: Array, src_off: Array, length: Array, dst: Array, dst_off: Array) -> int:
    """As ``thinrow.kernels.numba.copies.copy_ranges``."""
    for i in range(len(src_off)):
        a, b, n = int(src_off[i]), int(dst_off[i]), int(length[i])
        if n < 0 or not 0 <= a <= len(src) - n or not 0 <= b <= len(dst) - n:
            return i
        dst[b : b + n] = src[a : a + n]
    return -1
