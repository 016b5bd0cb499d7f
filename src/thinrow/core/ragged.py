"""Offsets: how rows of different lengths lie one after another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def offsets_of(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """(n + 1,) int64 for (n,) lengths: row i is ``[offsets[i], offsets[i + 1])``; ``[2, 0, 3]`` -> ``[0, 2, 2, 5]``."""
    counts = np.asarray(lengths)
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=offsets[1:])
    return offsets
