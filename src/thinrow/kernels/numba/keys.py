"""Kernels of the index of keys in compiled loops; ``kernels.reference.keys`` defines what they do.

Segments reach the loops as an array of addresses. What a loop will need ``_AHEAD`` keys later is prefetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from thinrow.core.blocks import addresses_of
from thinrow.core.pool import empty
from thinrow.kernels.numba.intrinsics import LINE, pointer_like, prefetch, word_at
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.scalar import mix
from thinrow.kernels.numba.threads import even_bounds, spread

Ints = npt.NDArray[np.int64]

_S32 = np.uint64(32)
_AHEAD = 16


@njit
def _largest_power(n: int) -> int:
    """The largest power of two up to ``n``."""
    power = 1
    while 2 * power <= n:
        power *= 2
    return power


@njit
def _segment(word: Any, n_segments: int, whole: int) -> Any:
    """The segment of a mixed key; ``whole`` is ``_largest_power(n_segments)``."""
    segment = np.int64(word & np.uint64(2 * whole - 1))
    return segment - whole if segment >= n_segments else segment


@njit
def _home(word: Any, size: int) -> Any:
    return np.int64((word >> _S32) & np.uint64(size - 1))


@njit
def _probe(slots: Ints, at: int, key: Any) -> int:
    """From slot ``at`` on, the slot that holds ``key`` or the empty one where it belongs."""
    while slots[at, 1] >= 0 and slots[at, 0] != key:
        at = (at + 1) & (len(slots) - 1)
    return at


@njit
def _ask(segments: Ints, size: int, key: Any) -> None:
    """Prefetch where ``key`` is looked for."""
    word = mix(np.uint64(key))
    prefetch(segments[_segment(word, len(segments), _largest_power(len(segments)))] + _home(word, size) * 16)


@njit
def _find(segments: Ints, size: int, wanted: Ints, rows: Ints, first: int, last: int) -> None:
    whole, n_bytes = _largest_power(len(segments)), size * 16
    # Of the next keys, the address of the segment and the place in it, in a ring: to mix a key twice is as long as to
    # find it.
    held = np.empty((2 * _AHEAD, 2), np.int64)
    for i in range(first - _AHEAD, last):
        if i + _AHEAD < last:
            word = mix(np.uint64(wanted[i + _AHEAD]))
            k = (i + _AHEAD) & (2 * _AHEAD - 1)
            held[k, 0] = segments[_segment(word, len(segments), whole)]
            held[k, 1] = _home(word, size) * 16
            prefetch(held[k, 0] + held[k, 1])
        if i >= first:
            begin, at = held[i & (2 * _AHEAD - 1), 0], held[i & (2 * _AHEAD - 1), 1]
            row = np.int64(word_at(begin + at + 8))
            while row >= 0 and np.int64(word_at(begin + at)) != wanted[i]:
                at = (at + 16) & (n_bytes - 1)
                row = np.int64(word_at(begin + at + 8))
            rows[i] = row


@njit
def _insert(
    segments: Ints, size: int, counts: Ints, n_rows: int, most: int, wanted: Ints, rows: Ints, fresh: Ints, start: int
) -> tuple[int, int]:
    whole, room, before = _largest_power(len(segments)), size - max(1, size >> 3), n_rows
    for i in range(start, len(wanted)):
        if i + _AHEAD < len(wanted) and rows[i + _AHEAD] < 0:
            _ask(segments, size, wanted[i + _AHEAD])
        if rows[i] >= 0:
            continue
        word = mix(np.uint64(wanted[i]))
        own = _segment(word, len(segments), whole)
        slots = carray(pointer_like(segments[own], wanted), (size, 2))
        at = _probe(slots, _home(word, size), wanted[i])
        if slots[at, 1] < 0:
            if n_rows == most or counts[own] >= room:
                return i, n_rows
            slots[at, 0] = wanted[i]
            slots[at, 1] = n_rows
            counts[own] += 1
            fresh[n_rows - before] = wanted[i]
            n_rows += 1
        rows[i] = slots[at, 1]
    return len(wanted), n_rows


@njit
def split_keys(slots: Ints, other: Ints, bit: int) -> int:
    size, moved, first = len(slots), 0, 0
    while slots[first, 1] >= 0:
        first += 1
    # Behind an empty slot each key is placed where it is or before: the slots between hold what was placed already.
    for i in range(first + 1, first + size):
        at = i & (size - 1)
        key, row = slots[at, 0], slots[at, 1]
        if row < 0:
            continue
        slots[at, 0] = -1
        slots[at, 1] = -1
        word = mix(np.uint64(key))
        into = slots
        if (word >> np.uint64(bit)) & np.uint64(1):
            into = other
            moved += 1
        at = _probe(into, _home(word, size), key)
        into[at, 0] = key
        into[at, 1] = row
    return moved


@njit
def _renumber(segments: Ints, size: int, keys: Ints, rows: Ints) -> None:
    whole = _largest_power(len(segments))
    for i in range(len(keys)):
        if i + _AHEAD < len(keys):
            _ask(segments, size, keys[i + _AHEAD])
        word = mix(np.uint64(keys[i]))
        slots = carray(pointer_like(segments[_segment(word, len(segments), whole)], keys), (size, 2))
        slots[_probe(slots, _home(word, size), keys[i]), 1] = rows[i]


@njit
def _drop(segments: Ints, size: int, counts: Ints, keys: Ints) -> None:
    whole, mask = _largest_power(len(segments)), size - 1
    for i in range(len(keys)):
        if i + _AHEAD < len(keys):
            _ask(segments, size, keys[i + _AHEAD])
        word = mix(np.uint64(keys[i]))
        own = _segment(word, len(segments), whole)
        slots = carray(pointer_like(segments[own], keys), (size, 2))
        hole = _probe(slots, _home(word, size), keys[i])
        at = (hole + 1) & mask
        while slots[at, 1] >= 0:
            if (at - _home(mix(np.uint64(slots[at, 0])), size)) & mask >= (at - hole) & mask:
                slots[hole, 0] = slots[at, 0]
                slots[hole, 1] = slots[at, 1]
                hole = at
            at = (at + 1) & mask
        slots[hole, 0] = -1
        slots[hole, 1] = -1
        counts[own] -= 1


@njit
def count_keys(cells: npt.NDArray[np.uint8], keys: Ints) -> npt.NDArray[np.uint8]:
    out = np.empty(len(keys), np.uint8)
    mask = np.uint64(cells.shape[1] - 1)
    for i in range(len(keys)):
        word = mix(np.uint64(keys[i]))
        a, b = word & mask, (word >> _S32) & mask
        count = min(cells[0, a], cells[1, b])
        if count < 255:
            count += 1
        cells[0, a] = max(cells[0, a], count)
        cells[1, b] = max(cells[1, b], count)
        out[i] = count
    return out


def find_keys(slots: Sequence[Ints], wanted: Ints) -> Ints:
    rows = empty(len(wanted), np.int64)
    segments, size = addresses_of(slots), len(slots[0])
    spread(lambda a, b: _find(segments, size, wanted, rows, a, b), even_bounds(len(wanted), LINE))
    return rows


def insert_keys(
    slots: Sequence[Ints], counts: Ints, n_rows: int, most: int, wanted: Ints, rows: Ints, fresh: Ints, start: int
) -> tuple[int, int]:
    found: tuple[int, int] = _insert(
        addresses_of(slots), len(slots[0]), counts, n_rows, most, wanted, rows, fresh, start
    )
    return found


def renumber_keys(slots: Sequence[Ints], keys: Ints, rows: Ints) -> None:
    _renumber(addresses_of(slots), len(slots[0]), keys, rows)


def drop_keys(slots: Sequence[Ints], counts: Ints, keys: Ints) -> None:
    _drop(addresses_of(slots), len(slots[0]), counts, keys)
