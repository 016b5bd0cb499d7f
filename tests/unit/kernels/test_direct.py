"""Blocks with forged heads: what is decoded from address to address refuses what the plain kernels refuse."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from thinrow.core.buffers import Buffers
from thinrow.kernels import kernel, use

DELTA, LANES, PATCHED, ROWS, MARKED = 3, 0x80, 127, 128, 64


def _marked_steps(width: int) -> npt.NDArray[np.uint8]:
    """A delta block of 128 rows from 100 on: the first 64 steps are packed with ``width``, the others are 5."""
    size = ((MARKED + 7) // 8 * (width & (LANES - 1)) + 63) // 64 * 8
    values = np.random.default_rng(0).integers(0, 1 << 63, size).tolist()
    words = [5, 1, 1, 0, 100, 1 << 48 | MARKED | width << 32, (1 << 64) - 1, 0, *values]
    return np.array(words, np.uint64).view(np.uint8)


@pytest.mark.parametrize("width", [1, 7, 64, 65, 100, 126])
def test_steps_are_at_most_64_bits_wide_whatever_their_own_head_says(width: int) -> None:
    block, found = _marked_steps(LANES | width), []
    for backend in ("numba", "reference"):
        out = np.full(ROWS, 77, np.int64)
        place = [np.array([v], np.int64) for v in (0, 0, len(block))]
        kinds = np.array([DELTA], np.uint8), np.array([LANES | PATCHED], np.uint8)
        rows = [np.array([v], np.int64) for v in (0, 0, 0, ROWS, 0, ROWS, 0)]
        with use(backend):
            bad = kernel("decode_fixed")(Buffers([block]), *place, *kinds, np.empty(0, np.uint64), *rows, out)
        found.append((int(bad), out.tolist() if bad < 0 else None))
    assert found[0] == found[1]
    assert (found[0][0] < 0) == (width <= 64)
