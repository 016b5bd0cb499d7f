"""Plain twin of ``thinrow.kernels.numba.words``."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def count_words(words: Array, least: int) -> tuple[Array, Array]:
    """As ``thinrow.kernels.numba.words.count_words``."""
    found, counts = np.unique(words, return_counts=True)
    return found[counts >= least], counts[counts >= least]


def stripe_words(words: Array, stripe_offsets: Array) -> tuple[Array, Array, Array]:
    """As ``thinrow.kernels.numba.words.stripe_words``."""
    runs, found, counts = [], [], []
    for start, stop in itertools.pairwise(stripe_offsets.tolist()):
        values = words[start:stop].tolist()
        runs.append(len(list(itertools.groupby(values))))
        (word, count), *_ = [*Counter(values).most_common(1), (0, 0)]
        often = 2 * count > len(values)
        found.append(word if often else 0)
        counts.append(count if often else 0)
    return np.array(runs, np.int64), np.array(found, np.uint64), np.array(counts, np.int64)
