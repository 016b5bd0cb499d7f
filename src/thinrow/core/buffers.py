"""Buffers: byte arrays that a compiled kernel reads by number, without a copy: mapped files, bytes that were fetched.

Worked example: two mapped files of 100 and 50 bytes are ``address [A, B]`` and ``size [100, 50]``; byte 7 of the second
is the byte at address ``B + 7``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class Buffers:
    """Attributes:
    arrays: the uint8 arrays; they live as long as this does.
    address: (n,) int64 address of each array's first byte, a multiple of 8.
    size: (n,) int64 bytes of each array.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Each array must be contiguous and begin at an address that is a multiple of 8."""
        self.arrays = tuple(arrays)
        self.address: npt.NDArray[np.int64] = np.array([_address(a) for a in self.arrays], np.int64)
        self.size: npt.NDArray[np.int64] = np.array([a.nbytes for a in self.arrays], np.int64)
        assert not (self.address & 7).any(), "an array that does not begin at a multiple of 8"


def _address(array: npt.NDArray[Any]) -> int:
    assert array.dtype == np.uint8
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0]) if array.nbytes else 0
