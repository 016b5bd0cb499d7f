"""Rows sorted by a key that has far fewer values than rows, by counting.

Worked example: keys ``[9, 4, 9, 9]`` are the codes ``[0, 1, 0, 0]`` of the distinct ``[9, 4]``. In ascending order the
rows of 4 begin at 0, those of 9 at 1: with starts ``[1, 0]`` row i goes to ``[1, 0, 2, 3][i]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

#: Keys that are no further apart than this are looked up by themselves.
_NEAR = 1 << 18


@njit
def _slot(slots: Array, held: Array, key: Any) -> Any:
    """Where ``key`` is, or the free slot where it goes."""
    mask = len(slots) - 1
    at = np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(24)) & mask
    while slots[at] >= 0 and held[slots[at]] != key:
        at = (at + 1) & mask
    return at


@njit
def _group(keys: Array, codes: Array, slots: Array, held: Array, counts: Array, n: int) -> Any:
    """Codes of more keys, where ``n`` keys are held; the grown tables and how many are."""
    last = np.int64(0)
    for i in range(len(keys)):
        if i == 0 or keys[i] != keys[i - 1]:
            at = _slot(slots, held, keys[i])
            if slots[at] < 0:
                if n == len(held):
                    more, grown = np.empty(2 * n, np.int64), np.zeros(2 * n, np.int64)
                    more[:n], grown[:n] = held, counts
                    held, counts, slots = more, grown, np.full(16 * n, -1, np.int32)
                    for k in range(n):
                        slots[_slot(slots, held, held[k])] = k
                    at = _slot(slots, held, keys[i])
                slots[at], held[n] = n, keys[i]
                n += 1
            last = np.int64(slots[at])
        codes[i] = last
        counts[last] += 1
    return slots, held, counts, n


@njit
def _group_near(keys: Array, least: int, codes: Array, slots: Array, held: Array, counts: Array, n: int) -> int:
    """As ``_group`` of keys that are ``least`` or up to the number of ``slots`` more; tables of so many."""
    for i in range(len(keys)):
        at = keys[i] - least
        if slots[at] < 0:
            slots[at], held[n] = n, keys[i]
            n += 1
        codes[i] = slots[at]
        counts[slots[at]] += 1
    return n


def group_keys(parts: Sequence[Array]) -> tuple[Array, Array, Array]:
    """The distinct keys of ``parts`` (each (R,) int64, fewer than 2^31 in all) in order of first appearance; the code
    of each row of all parts, uint32; and in how many rows each is, int64."""
    # NumPy asks for huge pages, what is compiled does not.
    codes = np.empty(sum(len(p) for p in parts), np.uint32)
    some = [p for p in parts if len(p)]
    least = min((int(p.min()) for p in some), default=0)
    reach = max((int(p.max()) for p in some), default=0) - least + 1
    n, at = 0, 0
    if reach <= _NEAR:
        slots, held, counts = np.full(reach, -1, np.int32), np.empty(reach, np.int64), np.zeros(reach, np.int64)
        for part in some:
            n = _group_near(part, least, codes[at : at + len(part)], slots, held, counts, n)
            at += len(part)
        return held[:n].copy(), codes, counts[:n].copy()
    # One slot of eight at most is taken: a second look at another slot is dear, it is not foreseen.
    slots, held, counts = np.full(4096, -1, np.int32), np.empty(512, np.int64), np.zeros(512, np.int64)
    for part in some:
        slots, held, counts, n = _group(part, codes[at : at + len(part)], slots, held, counts, n)
        at += len(part)
    return held[:n].copy(), codes, counts[:n].copy()


@njit
def _place(codes: Array, free: Array, places: Array) -> None:
    for i in range(len(codes)):
        places[i] = free[codes[i]]
        free[codes[i]] += 1


def places_by_code(codes: Array, starts: Array) -> Array:
    """(R,) uint32 where each row goes (uint64 of 2^32 rows or more): those of code c, in order, from ``starts[c]``
    on. ``codes`` are uint32."""
    places = np.empty(len(codes), np.uint32 if len(codes) < 1 << 32 else np.uint64)
    _place(codes, starts.copy(), places)
    return places


@njit
def number_in_order(offsets: Array, before: Array, values: Array, numbers: Array) -> bool:
    """Number the rows ``[offsets[u], offsets[u + 1])`` of every u on from ``before[u] + 1``, into ``numbers``; whether
    ``values`` ascend in each, ties allowed."""
    descents = 0
    for u in range(len(before)):
        mine, out, first = values[offsets[u] : offsets[u + 1]], numbers[offsets[u] : offsets[u + 1]], before[u] + 1
        for r in range(len(out)):
            out[r] = first + r
        for r in range(1, len(mine)):
            descents += mine[r] < mine[r - 1]
    return descents == 0


@njit
def _scatter(values: Array, places: Array, out: Array) -> None:
    for i in range(len(values)):
        out[places[i]] = values[i]


def scatter_rows(values: Array, places: Array, out: Array) -> None:
    """``out[places[i]] = values[i]``; all of one dtype of 1, 2, 4 or 8 bytes, ``places`` within ``out``."""
    word = f"u{values.itemsize}"
    _scatter(values.view(word), places, out.view(word))


@njit
def find_sorted(known: Array, keys: Array) -> Array:
    """(R,) int64 the place of each key among ``known`` (ascending int64, not empty), the nearest of one that is not
    there; fast where keys mostly ascend."""
    places, at = np.empty(len(keys), np.int64), 0
    for i in range(len(keys)):
        if known[at] != keys[i]:
            if at + 1 < len(known) and known[at + 1] == keys[i]:
                at += 1
            else:
                at = min(np.searchsorted(known, keys[i]), len(known) - 1)
        places[i] = at
    return places


@njit
def in_order(codes: Array, values: Array) -> bool:
    """Whether rows ascend by (code, value), ties allowed."""
    for i in range(1, len(codes)):
        if codes[i] < codes[i - 1] or (codes[i] == codes[i - 1] and values[i] < values[i - 1]):
            return False
    return True
