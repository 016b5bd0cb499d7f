"""Blocks around a block (codecs 8 to 10 of docs/format/archive-v2.md): runs, and rows that have values of their own;
and codec 13, which is of two parts.

Worked example: rows ``[7, 7, 7, 9]`` are the runs ``[7, 9]``, whose last rows are 2 and 3. Decoded, the runs stand at
the beginning of the output, ``[7, 9, ., .]``; ``spread`` fills it from its end: ``[7, 7, 7, 9]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.intrinsics import merge8, popcount
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.lanes import LANES, PATCHED, packed_bytes
from thinrow.kernels.numba.unpack import bits_from, bits_sound, one, ones

Array = npt.NDArray[Any]

RAW, RUNS, ABSENT, DECIMAL, MIXED, MARKED = 6, 8, 10, 11, 12, 13
#: Highest codec that is known.
LAST_CODEC = MARKED


@njit
def open_nested(words: Array, is_runs: bool, n_rows: int, row: int, stop: int) -> Any:
    """(whether the block is sound, word of the block within, its values, and which of them rows [row, stop) need:
    first, end)."""
    at = 0 if is_runs else 1
    if len(words) <= at:
        return False, 0, 0, 0, 0
    head = words[at]
    n, kind = np.int64(head & np.uint64(0xFFFFFFFF)), np.int64((head >> np.uint64(32)) & np.uint64(0xFF))
    width = np.int64((head >> np.uint64(40)) & np.uint64(0xFF))
    if n > n_rows or (kind > RAW and (kind < DECIMAL or kind > MARKED)):
        return False, 0, 0, 0, 0
    if (width & (LANES - 1)) > 64 and width != (PATCHED | LANES):
        return False, 0, 0, 0, 0
    if is_runs:
        sound, inner, first, last = _open_runs(words, n, n_rows, row, stop)
        return sound, inner, n, first, last
    inner = 2 + ((n_rows + 63) >> 6)
    if (head >> np.uint64(48)) != 0 or inner > len(words):
        return False, 0, 0, 0, 0
    bitmap = words[2:inner]
    return bits_sound(bitmap, n_rows, n), inner, n, ones(bitmap, row), ones(bitmap, stop)


@njit
def _open_runs(words: Array, n: Any, n_rows: int, row: int, stop: int) -> Any:
    width, lanes = _ends(words)
    inner = 1 + packed_bytes(n, width, lanes) // 8
    if (words[0] >> np.uint64(56)) != 0 or width > 64 or inner > len(words):
        return False, 0, 0, 0
    previous: Any = -1
    first, last = 0, 0
    for k in range(n):
        end = one(words, 1, width, lanes, k)
        if end >= np.uint64(n_rows) or np.int64(end) <= previous:
            return False, 0, 0, 0
        previous = np.int64(end)
        if previous < row:
            first = k + 1
        if previous < stop - 1:
            last = k + 1
    if row == stop:
        first, last = 0, -1
    return previous == n_rows - 1, inner, first, last + 1


@njit
def _ends(words: Array) -> Any:
    """Width of the packed last rows of a block of runs, and whether they lie in lanes."""
    width = np.int64((words[0] >> np.uint64(48)) & np.uint64(0xFF))
    return width & (LANES - 1), width >= LANES


@njit
def spread(target: Array, words: Array, codec: int, row: int, first: int, last: int) -> None:
    """The values [first, last) of the block within, which stand at the beginning of ``target``, to all of its rows, of
    which the first is row ``row``. The last goes first, so that none is overwritten before it is read."""
    if codec == RUNS:
        width, lanes = _ends(words)
        top: Any = len(target)
        for k in range(last - 1, first - 1, -1):
            begin: Any = 0 if k == first else np.int64(one(words, 1, width, lanes, k - 1)) + 1 - row
            value = target[k - first]
            for i in range(begin, top):
                target[i] = value
            top = begin
        return
    fill = words[0] if codec != ABSENT else np.uint64(1)
    j: Any = last - first
    for i in range(len(target) - 1, -1, -1):
        bit = np.int64((words[2 + ((row + i) >> 6)] >> np.uint64((row + i) & 63)) & np.uint64(1))
        j -= bit
        target[i] = np.uint64(target[max(j, 0)]) if bit else fill


@njit
def open_marked(words: Array, n_rows: Any) -> Any:
    """Of a block of codec 13: words of its own (-1 where the head, the bits or their place are not sound), their width,
    whether they lie in lanes, the word at which they begin, and that at which the codes do."""
    bad = np.int64(-1), np.int64(0), False, np.int64(0), np.int64(0)
    begin = 2 + ((n_rows + 63) >> 6)
    if len(words) < begin or (words[0] >> np.uint64(40)) != 0:
        return bad
    own, own_width = np.int64(words[0] & np.uint64(0xFFFFFFFF)), np.int64((words[0] >> np.uint64(32)) & np.uint64(0xFF))
    lanes = own_width >= LANES
    own_width &= LANES - 1
    if own > n_rows or own_width > 64 or not bits_sound(words[2:begin], n_rows, own):
        return bad
    packed = begin + packed_bytes(own, own_width, lanes) // 8
    return (own, own_width, lanes, begin, packed) if packed <= len(words) else bad


@njit
def merge(bitmap: Array, row: int, zeros: Array, marked: Array, out: Array) -> None:
    """The next of ``zeros`` or of ``marked``, as the bits from ``row`` on say."""
    n, at, place = len(out), 0, 0
    for i in range(0, n, 64):
        word = bits_from(bitmap, row + i)
        for j in range(i, min(i + 64, n) - 7, 8):
            merge8(word, zeros, at, marked, place, out, j)
            held = popcount(word & np.uint64(0xFF))
            at, place = at + 8 - held, place + held
            word >>= np.uint64(8)
    for j in range(n & ~7, n):
        bit: Any = np.int64(bits_from(bitmap, row + j) & np.uint64(1))
        if bit:
            out[j] = marked[place]
        else:
            out[j] = zeros[at]
        at, place = at + 1 - bit, place + bit
