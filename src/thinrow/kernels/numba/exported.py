"""Looking keys up in an exported table, in compiled loops; ``kernels.reference.exported`` defines what they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.intrinsics import prefetch
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.scalar import lower_bound, mix
from thinrow.kernels.numba.threads import even_bounds, spread

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

#: Keys ahead of which a bucket, and half as far its words, are fetched.
_AHEAD = 16
#: Bytes that a look-up moves: a line of the index, two of words.
_BYTES = 192


@njit
def _bucket(key: Any, low: Any, shift: Any) -> Any:
    return (mix(np.uint64(key)) - low) >> shift


@njit
def _find(words: Words, index: Ints, low: Any, shift: Any, keys: Ints, out: Ints, first: int, last: int) -> None:
    n_buckets = np.uint64(len(index) - 1)
    index_at, words_at = index.ctypes.data, words.ctypes.data
    for i in range(first, last):
        if i + _AHEAD < last:
            later = _bucket(keys[i + _AHEAD], low, shift)
            if later < n_buckets:
                prefetch(index_at + np.int64(later) * 8)
        if i + _AHEAD // 2 < last:
            later = _bucket(keys[i + _AHEAD // 2], low, shift)
            if later < n_buckets:
                prefetch(words_at + index[np.int64(later)] * 8)
        out[i] = -1
        bucket = _bucket(keys[i], low, shift)
        if bucket >= n_buckets:
            continue
        word = mix(np.uint64(keys[i]))
        end = index[np.int64(bucket) + 1]
        at = lower_bound(words, index[np.int64(bucket)], end, word)
        if at < end and words[at] == word:
            out[i] = at


def find_words(words: Words, index: Ints, low: int, shift: int, keys: Ints) -> Ints:
    out = np.empty(len(keys), np.int64)
    words, index, keys = (_read_only(a) for a in (words, index, keys))
    lowest, by = np.uint64(low), np.uint64(shift)
    spread(lambda a, b: _find(words, index, lowest, by, keys, out, a, b), even_bounds(len(keys), _BYTES))
    return out


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """As a mapped file is, so that the loop is compiled for one type."""
    view = array.view()
    view.flags.writeable = False
    return view
