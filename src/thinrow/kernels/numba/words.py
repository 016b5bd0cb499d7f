"""Statistics of words that an encoder asks for before it chooses: frequent ones, runs, majorities.

Worked example: of ``[7, 9, 7, 7, 8]`` the words that are there 3 times or more are ``[7]``, ``[3]`` times. As one
stripe they have 4 runs, and 7 is the word of more than half of the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

#: Words that are no further apart than this are counted by themselves.
_NEAR = 1 << 18


@njit
def _often(ordered: Array, least: int) -> tuple[Array, Array]:
    """The words that ascending ones hold ``least`` times or more, and how often."""
    found, counts = np.empty(len(ordered) // least, np.uint64), np.empty(len(ordered) // least, np.int64)
    n, first = 0, 0
    for i in range(1, len(ordered) + 1):
        if i == len(ordered) or ordered[i] != ordered[first]:
            if i - first >= least:
                found[n], counts[n] = ordered[first], i - first
                n += 1
            first = i
    return found[:n], counts[:n]


@njit
def _count_near(words: Array, low: Any, counts: Array) -> None:
    for i in range(len(words)):
        counts[words[i] - low] += np.uint32(1)


def count_words(words: Array, least: int) -> tuple[Array, Array]:
    """The words (uint64, ascending) that ``words`` (R,) holds ``least`` times (1 to 255) or more, and how often."""
    low, high = (int(words.min()), int(words.max())) if len(words) else (0, 0)
    if high - low < _NEAR:
        counts = np.zeros(high - low + 1, np.uint32)
        _count_near(words, np.uint64(low), counts)
        near = np.flatnonzero(counts >= least)
        return near.astype(np.uint64) + np.uint64(low), counts[near].astype(np.int64)
    # NumPy sorts in vector registers, which takes a third of the time of a hash table that lies in no near cache.
    found: tuple[Array, Array] = _often(np.sort(words), least)
    return found


@njit
def _count_of(words: Array, word: Any) -> Any:
    n = 0
    for r in range(len(words)):
        n += words[r] == word
    return n


@njit
def _majority(words: Array, held: Array) -> Any:
    """The word of more than half of ``words``, if there is one, and in how many it is; else some word and fewer.

    Of a majority more than half of all pairs of neighbours that are equal are its own too, when pairs that differ go:
    each takes one of the others with it. Every round leaves half or less.
    """
    rows, n = words, len(words)
    while n > 0:
        if n & 1:
            last = rows[n - 1]
            if 2 * _count_of(rows[:n], last) > n:
                return last, _count_of(words, last)
        kept = 0
        for i in range(n >> 1):
            held[kept] = rows[2 * i]
            kept += rows[2 * i] == rows[2 * i + 1]
        rows, n = held, kept
    return np.uint64(0), 0


@njit
def stripe_words(words: Array, stripe_offsets: Array) -> tuple[Array, Array, Array]:
    """Of each stripe: its runs of equal words; the word of more than half of its rows, and how many these are; 0 and 0
    where no word is in so many.

    Returns:
        (S,) int64, uint64 and int64.
    """
    n, most = len(stripe_offsets) - 1, 0
    runs, word, count = np.zeros(n, np.int64), np.zeros(n, np.uint64), np.zeros(n, np.int64)
    for s in range(n):
        most = max(most, stripe_offsets[s + 1] - stripe_offsets[s])
    held = np.empty(most // 2 + 1, np.uint64)
    for s in range(n):
        rows = words[stripe_offsets[s] : stripe_offsets[s + 1]]
        changes = 0
        for r in range(1, len(rows)):
            changes += rows[r] != rows[r - 1]
        runs[s] = changes + (len(rows) > 0)
        leader, often = _majority(rows, held)
        if 2 * often > len(rows):
            word[s], count[s] = leader, often
    return runs, word, count
