"""Offsets and ranges: how rows of different lengths lie one after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

#: Ranges this long on average are copied as slices.
_SLICE_VALUES = 64


def offsets_of(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """(n + 1,) int64 for (n,) lengths: row i is ``[offsets[i], offsets[i + 1])``; ``[2, 0, 3]`` -> ``[0, 2, 2, 5]``."""
    counts = np.asarray(lengths)
    offsets = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(dtype=np.int64, out=offsets[1:])
    return offsets


def inverse_of(order: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """The permutation that undoes ``order``: ``x[order][inverse_of(order)]`` is x. ``[2, 0, 1]`` -> ``[1, 2, 0]``."""
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.arange(len(order))
    return inverse


def copy_ranges(
    values: npt.NDArray[Any],
    start: npt.NDArray[np.int64],
    stop: npt.NDArray[np.int64],
    out: npt.NDArray[Any] | None = None,
) -> npt.NDArray[Any]:
    """The values of half-open ranges one after another, copied (into ``out``, of their number, where given).

    Long ranges are copied as slices, short ones gathered by position.
    """
    if len(start) == 1:
        only = values[start[0] : max(stop[0], start[0])]
        if out is None:
            return only.copy()
        out[:] = only
        return out
    lengths = np.maximum(stop - start, 0)
    if len(start) and int(lengths.sum()) >= _SLICE_VALUES * len(start):
        slices = [values[a:b] for a, b in zip(start.tolist(), stop.tolist(), strict=True)]
        return np.concatenate(slices, out=out)
    index, _ = ranges_index(start, stop)
    return values[index] if out is None else np.take(values, index, axis=0, out=out, mode="clip")


def ranges_index(
    start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of the half-open ranges one after another, and the offsets of each range in that list.

    ``ranges_index([5, 9], [7, 10])`` is ``([5, 6, 9], [0, 2, 3])``.
    """
    lengths = np.maximum(stop - start, 0)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], lengths)
    return index, offsets
