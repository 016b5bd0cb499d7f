"""Looking keys up in an exported table, in NumPy: the oracle that other backends must equal.

Rows are in the order of their mixed keys, ``words`` (n,) uint64, strictly ascending, from ``low`` on. ``index``
(m + 1,) int64 cuts them into m buckets: the words w with ``(w - low) >> shift == b`` are in the places ``[index[b],
index[b + 1])``. Worked example: words 1, 5 and 6 with low 0, shift 2 and index [0, 1, 3]: 5 is in bucket 1, places 1
and 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.wrap import mix64_words

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


def find_words(words: Words, index: Ints, low: int, shift: int, keys: Ints) -> Ints:
    """(k,) int64 place of each of ``keys`` (k,) int64 in ``words``, -1 where it is absent; ``shift`` is below 64."""
    mixed = mix64_words(keys.view(np.uint64))
    bucket = (mixed - np.uint64(low)) >> np.uint64(shift)
    inside = bucket < len(index) - 1
    at: npt.NDArray[Any] = np.minimum(np.searchsorted(words, mixed), max(len(words) - 1, 0))
    return np.where(inside & (words[at] == mixed), at, -1) if len(words) else np.full(len(keys), -1)
