"""Feature kernels in compiled loops; definitions and argument lists are those of ``kernels.reference.features``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.units import DAY_MS
from thinrow.kernels.chain import BYTES, INT, TUPLE
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.scalar import mix

U64Array = npt.NDArray[np.uint64]
I64Array = npt.NDArray[np.int64]

_INT, _BYTES, _TUPLE = np.uint64(INT), np.uint64(BYTES), np.uint64(TUPLE)
_S8 = np.uint64(8)
_DAY = np.int64(DAY_MS)


@njit
def _mix64(z: U64Array) -> U64Array:
    out = np.empty_like(z)
    for i in range(len(z)):
        out[i] = mix(z[i])
    return out


@njit
def _hash_parts(values: U64Array, bounds: I64Array, seeds: U64Array) -> U64Array:
    out = np.empty_like(values)
    for k in range(len(seeds)):
        start = mix(seeds[k] + _INT)
        for i in range(bounds[k], bounds[k + 1]):
            out[i] = mix(start ^ values[i])
    return out


@njit
def _hash_bytes(offsets: I64Array, data: npt.NDArray[np.uint8], seed: Any) -> U64Array:
    n = len(offsets) - 1
    start = mix(seed + _BYTES)
    out = np.empty(n, np.uint64)
    for i in range(n):
        h = start
        at, stop = offsets[i], offsets[i + 1]
        size = np.uint64(stop - at)
        while at < stop:
            word = np.uint64(0)
            shift = np.uint64(0)
            for j in range(at, min(at + 8, stop)):
                word |= np.uint64(data[j]) << shift
                shift += _S8
            h = mix(h ^ word)
            at += 8
        out[i] = mix(h ^ size)
    return out


@njit
def _word_byte(c: Any) -> Any:
    """The byte in lower case, or 0 of one that divides words."""
    if 65 <= c <= 90:
        return c + 32
    return c if c >= 128 or 97 <= c <= 122 or 48 <= c <= 57 else 0


@njit
def _hash_words(offsets: I64Array, data: npt.NDArray[np.uint8], seed: Any) -> tuple[I64Array, U64Array]:
    n = len(offsets) - 1
    start = mix(seed + _BYTES)
    lists = np.zeros(n + 1, np.int64)
    for i in range(n):
        count = 0
        inside = False
        for at in range(offsets[i], offsets[i + 1]):
            here = _word_byte(data[at]) != 0
            if here and not inside:
                count += 1
            inside = here
        lists[i + 1] = lists[i] + count
    out = np.empty(lists[n], np.uint64)
    made = 0
    for i in range(n):
        h, word, size = start, np.uint64(0), np.uint64(0)
        for at in range(offsets[i], offsets[i + 1] + 1):
            c = np.uint64(_word_byte(data[at]) if at < offsets[i + 1] else 0)
            if c != 0:
                word |= c << ((size & np.uint64(7)) * _S8)
                size += np.uint64(1)
                if size & np.uint64(7) == 0:
                    h, word = mix(h ^ word), np.uint64(0)
            elif size != 0:
                if size & np.uint64(7) != 0:
                    h = mix(h ^ word)
                out[made] = mix(h ^ size)
                made += 1
                h, word, size = start, np.uint64(0), np.uint64(0)
    return lists, out


@njit
def _hash_tuples(elements: U64Array, seed: Any) -> U64Array:
    k, n = elements.shape
    out = np.full(n, mix(seed + _TUPLE), np.uint64)
    for j in range(k):
        for i in range(n):
            out[i] = mix(out[i] ^ elements[j, i])
    return out


@njit
def _mod_unsigned(values: U64Array, divisor: Any) -> I64Array:
    out = np.empty(len(values), np.int64)
    for i in range(len(values)):
        out[i] = np.int64(values[i] % divisor)
    return out


@njit
def _cross(
    start: I64Array,
    stop: I64Array,
    bound: I64Array,
    exact: npt.NDArray[np.bool_],
    arrival: I64Array,
    hidden_from: I64Array,
    event_ts: I64Array,
    keys: I64Array,
    keys_valid: npt.NDArray[np.bool_],
    request_ts: I64Array,
    offsets: I64Array,
    wanted: I64Array,
    wanted_valid: npt.NDArray[np.bool_],
    count: npt.NDArray[np.int32],
    days: npt.NDArray[np.int32],
) -> None:
    most = 0
    for x in range(len(start)):
        most = max(most, offsets[x + 1] - offsets[x])
    capacity = 4
    while capacity < 2 * most:
        capacity *= 2
    # Open addressing: a slot holds the first candidate of the example with a key, or -1.
    table = np.empty(capacity, np.int64)
    newest = np.empty(most, np.int64)
    all_keys, all_wanted = len(keys_valid) == 0, len(wanted_valid) == 0
    for x in range(len(start)):
        first, last = offsets[x], offsets[x + 1]
        size = 4
        while size < 2 * (last - first):
            size *= 2
        mask = np.uint64(size - 1)
        table[:size] = -1
        for c in range(first, last):
            count[c] = 0
            newest[c - first] = -1
            if not (all_wanted or wanted_valid[c]):
                continue
            slot = mix(np.uint64(wanted[c])) & mask
            while table[slot] >= 0 and wanted[table[slot]] != wanted[c]:
                slot = (slot + np.uint64(1)) & mask
            if table[slot] < 0:
                table[slot] = c
        whole, limit = exact[x], bound[x]
        for i in range(start[x], stop[x]):
            if not (all_keys or keys_valid[i]):
                continue
            if not whole and (arrival[i] > limit or hidden_from[i] <= limit):
                continue
            slot = mix(np.uint64(keys[i])) & mask
            while table[slot] >= 0 and wanted[table[slot]] != keys[i]:
                slot = (slot + np.uint64(1)) & mask
            c = table[slot]
            if c >= 0:
                count[c] += 1
                newest[c - first] = max(newest[c - first], event_ts[i])
        for c in range(first, last):
            if all_wanted or wanted_valid[c]:
                slot = mix(np.uint64(wanted[c])) & mask
                while wanted[table[slot]] != wanted[c]:
                    slot = (slot + np.uint64(1)) & mask
                count[c] = count[table[slot]]
                newest[c - first] = newest[table[slot] - first]
            if len(days) > 0:
                days[c] = (request_ts[x] - newest[c - first]) // _DAY if count[c] > 0 else -1


def mix64(z: U64Array) -> U64Array:
    out: U64Array = _mix64(z)
    return out


def hash_ints(values: I64Array, seed: int) -> I64Array:
    return hash_parts(values, np.array([0, len(values)]), [seed])


def hash_parts(values: I64Array, bounds: I64Array, seeds: list[int]) -> I64Array:
    out: I64Array = _hash_parts(values.view(np.uint64), bounds, np.array(seeds, np.uint64)).view(np.int64)
    return out


def hash_bytes(offsets: I64Array, data: npt.NDArray[np.uint8], seed: int) -> I64Array:
    out: I64Array = _hash_bytes(offsets, data, np.uint64(seed)).view(np.int64)
    return out


def hash_words(offsets: I64Array, data: npt.NDArray[np.uint8], seed: int) -> tuple[I64Array, I64Array]:
    lists, out = _hash_words(offsets, data, np.uint64(seed))
    return lists, out.view(np.int64)


def hash_tuples(elements: I64Array, seed: int) -> I64Array:
    out: I64Array = _hash_tuples(elements.view(np.uint64), np.uint64(seed)).view(np.int64)
    return out


def mod_unsigned(values: I64Array, divisor: int) -> I64Array:
    out: I64Array = _mod_unsigned(values.view(np.uint64), np.uint64(divisor))
    return out


def history_candidate_cross(*arguments: Any) -> None:
    _cross(*arguments)
