"""Rows sorted by a key that has far fewer values than rows, by counting.

Worked example: keys ``[9, 4, 9, 9]`` are the codes ``[0, 1, 0, 0]`` of the distinct ``[9, 4]``. In ascending order the
rows of 4 begin at 0, those of 9 at 1: with starts ``[1, 0]`` row i goes to ``[1, 0, 2, 3][i]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]


@njit
def _slot(slots: Array, held: Array, key: Any) -> Any:
    """Where ``key`` is, or the free slot where it goes."""
    mask = len(slots) - 1
    at = np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(24)) & mask
    while slots[at] >= 0 and held[slots[at]] != key:
        at = (at + 1) & mask
    return at


@njit
def _group(keys: Array, codes: Array) -> Array:
    # One slot of eight at most is taken: a second look at another slot is dear, it is not foreseen.
    slots, held, n = np.full(4096, -1, np.int32), np.empty(512, np.int64), 0
    last = np.int64(0)
    for i in range(len(keys)):
        if i > 0 and keys[i] == keys[i - 1]:
            codes[i] = last
            continue
        at = _slot(slots, held, keys[i])
        if slots[at] < 0:
            if n == len(held):
                more = np.empty(2 * n, np.int64)
                more[:n] = held
                held, slots = more, np.full(16 * n, -1, np.int32)
                for k in range(n):
                    slots[_slot(slots, held, held[k])] = k
                at = _slot(slots, held, keys[i])
            slots[at], held[n] = n, keys[i]
            n += 1
        last = np.int64(slots[at])
        codes[i] = last
    return held[:n].copy()


def group_keys(keys: Array) -> tuple[Array, Array]:
    """The distinct ``keys`` (R,) int64 (fewer than 2^31) in order of first appearance, and each row's code: int64."""
    # NumPy asks for huge pages, what is compiled does not.
    codes = np.empty(len(keys), np.int64)
    return _group(keys, codes), codes


@njit
def _place(codes: Array, free: Array, places: Array) -> None:
    for i in range(len(codes)):
        places[i] = free[codes[i]]
        free[codes[i]] += 1


def places_by_code(codes: Array, starts: Array) -> Array:
    """(R,) int64 where each row goes: those of code c, in order, from ``starts[c]`` on."""
    places = np.empty(len(codes), np.int64)
    _place(codes, starts.copy(), places)
    return places


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
