"""Statistics of words that an encoder asks for before it chooses: frequent ones, runs, majorities.

Worked example: of ``[7, 9, 7, 7, 8]`` the words that are there 3 times or more are ``[7]``, ``[3]`` times. As one
stripe they have 4 runs, and 7 is the word of more than half of the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core import pool
from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]


@njit
def _count(words: Array, least: int, seen: Array, held: Array, counts: Array) -> tuple[Array, Array]:
    """With tables of a power of two slots, more than there are words; ``seen`` and ``counts`` are zeros."""
    size = len(seen)
    mask, mix = np.uint64(size - 1), np.uint64(0x9E3779B97F4A7C15)
    # A byte a slot stays in the cache and rules most rare words out: a slot counts all words that fall into it.
    for i in range(len(words)):
        slot = ((words[i] * mix) >> np.uint64(24)) & mask
        seen[slot] += seen[slot] < least
    n = 0
    for i in range(len(words)):
        word = words[i]
        slot = ((word * mix) >> np.uint64(24)) & mask
        if seen[slot] < least:
            continue
        while counts[slot] > 0 and held[slot] != word:
            slot = (slot + np.uint64(1)) & mask
        held[slot] = word
        counts[slot] += 1
        n += counts[slot] == least
    found, often = np.empty(n, np.uint64), np.empty(n, np.int64)
    n = 0
    for at in range(size):
        if counts[at] >= least:
            found[n], often[n] = held[at], counts[at]
            n += 1
    return found, often


def count_words(words: Array, least: int) -> tuple[Array, Array]:
    """The words (uint64, ascending) that ``words`` (R,) holds ``least`` times (1 to 255) or more, and how often."""
    size = 1 << max(6, (2 * len(words)).bit_length())
    seen, held, counts = (pool.empty(size, kind) for kind in (np.uint8, np.uint64, np.int64))
    seen[:], counts[:] = 0, 0
    found, often = _count(words, least, seen, held, counts)
    order = np.argsort(found)
    return found[order], often[order]


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
