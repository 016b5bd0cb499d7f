"""Search in index pages where they lie, in mapped files or in memory (docs/format/archive-v2.md, section 6).

Pages of several tables stand one after another: those of table t are ``[page_off[t], page_off[t + 1])``. A page begins
with its number of records and the bytes of its heap (4 bytes each). Record i is at byte ``8 + i * itemsize``, its key
in its first 8 bytes: an int64, or offset and length (4 bytes each) of a text in the heap behind the records.

Worked example: pages of table 0 begin with the keys 10 and 50. Key 50 may begin on page 0 (only pages before it hold
smaller keys alone) and ends on page 1: ``pages_of_keys`` gives (0, 1), ``rows_of_keys`` looks there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from thinrow.kernels.numba.intrinsics import pointer
from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

_HEAD = 8


@njit
def pages_of_keys(page_off: Array, first_key: Array, table: Array, key: Array) -> tuple[Array, Array]:
    """The page on which each key may begin, and the one on which it ends: (n,) int64 each; -1 for before the table.

    Args:
        page_off: (T + 1,) int64 pages of each table.
        first_key: (P,) int64 first key of each page.
        table: (n,) int64 table to search.
        key: (n,) int64.
    """
    low = np.empty(len(key), np.int64)
    high = np.empty(len(key), np.int64)
    for i in range(len(key)):
        a, b = page_off[table[i]], page_off[table[i] + 1]
        start = a
        while a < b:
            middle = (a + b) >> 1
            if first_key[middle] < key[i]:
                a = middle + 1
            else:
                b = middle
        low[i] = a - 1 if a > start else -1
        b = page_off[table[i] + 1]
        while a < b:
            middle = (a + b) >> 1
            if first_key[middle] <= key[i]:
                a = middle + 1
            else:
                b = middle
        high[i] = a - 1 if a > start else -1
    return low, high


@njit
def rows_of_keys(
    address: Array, first_record: Array, n_records: Array, low: Array, high: Array, key: Array, itemsize: int
) -> tuple[Array, Array]:
    """Record numbers of each key, first (inclusive) and last (exclusive): (n,) int64 each.

    Args:
        address: (P,) int64 of each page that ``low`` and ``high`` name.
        first_record: (P,) int64 number of the page's first record in its table.
        n_records: (P,) int64 records of the page.
        low, high, key: as ``pages_of_keys`` has them.
    """
    first = np.zeros(len(key), np.int64)
    last = np.zeros(len(key), np.int64)
    step = itemsize // 8
    for i in range(len(key)):
        if low[i] >= 0:
            n = n_records[low[i]]
            keys = carray(pointer(address[low[i]] + _HEAD), (n * step,), np.int64)
            a, b = np.int64(0), n
            while a < b:
                middle = (a + b) >> 1
                if keys[middle * step] < key[i]:
                    a = middle + 1
                else:
                    b = middle
            first[i] = first_record[low[i]] + a
        if high[i] >= 0:
            n = n_records[high[i]]
            keys = carray(pointer(address[high[i]] + _HEAD), (n * step,), np.int64)
            a, b = np.int64(0), n
            while a < b:
                middle = (a + b) >> 1
                if keys[middle * step] <= key[i]:
                    a = middle + 1
                else:
                    b = middle
            last[i] = first_record[high[i]] + a
    return first, last


@njit
def _compare(a: Array, b: Array) -> Any:
    """Below 0, 0 or above 0 as text a sorts before, with or behind b: bytewise, which is the order of code points."""
    for i in range(min(len(a), len(b))):
        if a[i] != b[i]:
            return np.int64(a[i]) - np.int64(b[i])
    return np.int64(len(a) - len(b))


@njit
def pages_of_texts(
    page_off: Array, first_off: Array, first_text: Array, table: Array, key_off: Array, key_text: Array
) -> tuple[Array, Array]:
    """As ``pages_of_keys`` for texts: that of page p is ``first_text[first_off[p]:first_off[p + 1]]`` (uint8, int64),
    query i ``key_text[key_off[i]:key_off[i + 1]]``."""
    n = len(key_off) - 1
    low = np.empty(n, np.int64)
    high = np.empty(n, np.int64)
    for i in range(n):
        key = key_text[key_off[i] : key_off[i + 1]]
        a, b = page_off[table[i]], page_off[table[i] + 1]
        start = a
        while a < b:
            middle = (a + b) >> 1
            if _compare(first_text[first_off[middle] : first_off[middle + 1]], key) < 0:
                a = middle + 1
            else:
                b = middle
        low[i] = a - 1 if a > start else -1
        b = page_off[table[i] + 1]
        while a < b:
            middle = (a + b) >> 1
            if _compare(first_text[first_off[middle] : first_off[middle + 1]], key) <= 0:
                a = middle + 1
            else:
                b = middle
        high[i] = a - 1 if a > start else -1
    return low, high


@njit
def _bound(address: int, n: int, itemsize: int, key: Array, after: bool) -> int:
    """Records of a page that sort before ``key`` (with ``after``: or with it); -1 where a key is not in its heap."""
    head = carray(pointer(address), (2,), np.uint32)
    heap = carray(pointer(address + _HEAD + n * itemsize), (int(head[1]),), np.uint8)
    a, b = 0, n
    while a < b:
        middle = (a + b) >> 1
        slot = carray(pointer(address + _HEAD + middle * itemsize), (2,), np.uint32)
        at, size = np.int64(slot[0]), np.int64(slot[1])
        if at + size > len(heap):
            return -1
        order = _compare(heap[at : at + size], key)
        if order < 0 or (after and order == 0):
            a = middle + 1
        else:
            b = middle
    return a


@njit
def rows_of_texts(
    address: Array,
    first_record: Array,
    n_records: Array,
    low: Array,
    high: Array,
    key_off: Array,
    key_text: Array,
    itemsize: int,
) -> tuple[Array, Array, int]:
    """As ``rows_of_keys`` for texts; and the first page whose keys do not lie in its heap, or -1."""
    n = len(key_off) - 1
    first = np.zeros(n, np.int64)
    last = np.zeros(n, np.int64)
    for i in range(n):
        key = key_text[key_off[i] : key_off[i + 1]]
        if low[i] >= 0:
            a = _bound(address[low[i]], n_records[low[i]], itemsize, key, False)
            if a < 0:
                return first, last, low[i]
            first[i] = first_record[low[i]] + a
        if high[i] >= 0:
            b = _bound(address[high[i]], n_records[high[i]], itemsize, key, True)
            if b < 0:
                return first, last, high[i]
            last[i] = first_record[high[i]] + b
    return first, last, -1


@njit
def pages_of_records(page_off: Array, first_record: Array, total: Array, table: Array, number: Array) -> Array:
    """The page of record ``number[i]`` of table ``table[i]``, (n,) int64; -1 where the table has no such record.

    ``total`` (T,) int64 are the records of each table; the others as in ``rows_of_keys``.
    """
    page = np.empty(len(number), np.int64)
    for i in range(len(number)):
        t, k = table[i], number[i]
        if k < 0 or k >= total[t]:
            page[i] = -1
            continue
        # Neighbours mostly ask for the same page.
        if i > 0 and page[i - 1] >= page_off[t] and page[i - 1] < page_off[t + 1]:
            p = page[i - 1]
            if first_record[p] <= k and (p + 1 == page_off[t + 1] or k < first_record[p + 1]):
                page[i] = p
                continue
        a, b = page_off[t], page_off[t + 1]
        while b - a > 1:
            middle = (a + b) >> 1
            if first_record[middle] <= k:
                a = middle
            else:
                b = middle
        page[i] = a
    return page


@njit
def take_records(address: Array, first_record: Array, page: Array, number: Array, itemsize: int, out: Array) -> None:
    """Record ``number[i]``, of page ``page[i]``, to ``out[i * itemsize:]`` (uint8), for every i; itemsize a multiple of
    4."""
    words = itemsize // 4
    target = out.view(np.uint32)
    for i in range(len(number)):
        at = address[page[i]] + _HEAD + (number[i] - first_record[page[i]]) * itemsize
        record = carray(pointer(at), (words,), np.uint32)
        place = i * words
        for w in range(words):
            target[place + w] = record[w]
