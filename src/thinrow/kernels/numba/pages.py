"""Search in index pages where they lie, in mapped files or in memory (docs/format/archive-v2.md, section 6).

Pages of several tables stand one after another: those of table t are ``[page_off[t], page_off[t + 1])``. A page begins
with its number of records and the bytes of its heap (4 bytes each). Record i is at byte ``8 + i * itemsize``, its key
in its first 8 bytes: an int64, or offset and length (4 bytes each) of a text in the heap behind the records.

A page whose address is 0 is not there yet: what needs it names it in ``wanted`` and goes on, the caller loads these
and asks again. Worked example: pages of table 0 begin with the keys 10 and 50. Key 50 may begin on page 0 (only pages
before it hold smaller keys alone) and ends on page 1; where page 1 is not there, ``ranges_of_keys`` answers (.., 1) and
``wanted[0] == 1``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from thinrow.kernels.numba.intrinsics import pointer, prefetch
from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

_HEAD = 8
#: Keys that are searched together: each step of one asks for memory while the others take theirs.
_ABREAST = 16


@njit
def _key(address: int, itemsize: int, record: int) -> Any:
    return carray(pointer(address + _HEAD + record * itemsize), (1,), np.int64)[0]


@njit
def _pages_of_key(page_off: Array, first_key: Array, table: int, key: int) -> Any:
    """The page on which a key may begin, and the one on which it ends; -1 for before the table."""
    start, b = page_off[table], page_off[table + 1]
    a = start
    while a < b:
        middle = (a + b) >> 1
        if first_key[middle] < key:
            a = middle + 1
        else:
            b = middle
    low = a - 1 if a > start else -1
    b = page_off[table + 1]
    while a < b:
        middle = (a + b) >> 1
        if first_key[middle] <= key:
            a = middle + 1
        else:
            b = middle
    return low, a - 1 if a > start else -1


@njit
def _after_key(address: Any, itemsize: Any, n: Any, a: Any, key: Any) -> Any:
    """The first of records ``[a, n)`` whose key is greater; mostly it is near a."""
    step = 1
    while a + step <= n and _key(address, itemsize, a + step - 1) <= key:
        a += step
        step *= 2
    b = min(n, a + step - 1)
    while a < b:
        middle = (a + b) >> 1
        if _key(address, itemsize, middle) <= key:
            a = middle + 1
        else:
            b = middle
    return a


@njit
def ranges_of_keys(
    page_off: Array,
    first_key: Array,
    first_record: Array,
    n_records: Array,
    address: Array,
    table: Array,
    key: Array,
    itemsize: int,
    first: Array,
    last: Array,
    wanted: Array,
) -> tuple[int, int, int]:
    """Record numbers of each key, first (inclusive) and last (exclusive), to ``first`` and ``last``.

    Args:
        page_off: (T + 1,) int64 pages of each table.
        first_key, first_record, n_records: (P,) int64 of each page: its first key, the number of its first record in
            its table, its records.
        address: (P,) int64; 0 for a page that is not there.
        table, key: (n,) int64, what to search, and for what.
        itemsize: bytes of a record.
        first, last: (n,) int64.
        wanted: (2n,) int64.

    Returns:
        how many records all keys have; how many pages are wanted: with 1 or more the rest says nothing; and the first
        key that ends before it begins, which only pages out of order say, or -1.
    """
    total: Any = np.int64(0)
    missing, wrong = 0, -1
    low, high = np.empty(_ABREAST, np.int64), np.empty(_ABREAST, np.int64)
    a, b, place = np.empty(_ABREAST, np.int64), np.empty(_ABREAST, np.int64), np.empty(_ABREAST, np.int64)
    for begin in range(0, len(key), _ABREAST):
        n = min(_ABREAST, len(key) - begin)
        for j in range(n):
            low[j], high[j] = _pages_of_key(page_off, first_key, table[begin + j], key[begin + j])
            a[j], b[j] = 0, 0
            if low[j] >= 0:
                place[j] = address[low[j]]
                if place[j] == 0:
                    wanted[missing] = low[j]
                    missing += 1
                else:
                    b[j] = n_records[low[j]]
                    prefetch(place[j] + _HEAD + (b[j] >> 1) * itemsize)
            if high[j] > low[j] and address[high[j]] == 0:
                wanted[missing] = high[j]
                missing += 1
        if missing:
            continue
        searching = True
        while searching:
            searching = False
            for j in range(n):
                if a[j] < b[j]:
                    middle = (a[j] + b[j]) >> 1
                    if _key(place[j], itemsize, middle) < key[begin + j]:
                        a[j] = middle + 1
                    else:
                        b[j] = middle
                    prefetch(place[j] + _HEAD + ((a[j] + b[j]) >> 1) * itemsize)
                    searching = True
        for j in range(n):
            p = high[j]
            x, y = np.int64(0), np.int64(0)
            if low[j] >= 0:
                x = first_record[low[j]] + a[j]
            if p >= 0:
                from_record = a[j] if p == low[j] else np.int64(0)
                y = first_record[p] + _after_key(address[p], itemsize, n_records[p], from_record, key[begin + j])
            first[begin + j], last[begin + j] = x, y
            total += y - x
            if y < x and wrong < 0:
                wrong = begin + j
    return total, missing, wrong


@njit
def _compare(a: Array, b: Array) -> Any:
    """Below 0, 0 or above 0 as text a sorts before, with or behind b: bytewise, which is the order of code points."""
    for i in range(min(len(a), len(b))):
        if a[i] != b[i]:
            return np.int64(a[i]) - np.int64(b[i])
    return np.int64(len(a) - len(b))


@njit
def _pages_of_text(page_off: Array, first_off: Array, first_text: Array, table: int, key: Array) -> Any:
    """As ``_pages_of_key``."""
    start, b = page_off[table], page_off[table + 1]
    a = start
    while a < b:
        middle = (a + b) >> 1
        if _compare(first_text[first_off[middle] : first_off[middle + 1]], key) < 0:
            a = middle + 1
        else:
            b = middle
    low = a - 1 if a > start else -1
    b = page_off[table + 1]
    while a < b:
        middle = (a + b) >> 1
        if _compare(first_text[first_off[middle] : first_off[middle + 1]], key) <= 0:
            a = middle + 1
        else:
            b = middle
    return low, a - 1 if a > start else -1


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
def ranges_of_texts(
    page_off: Array,
    first_off: Array,
    first_text: Array,
    first_record: Array,
    n_records: Array,
    address: Array,
    table: Array,
    key_off: Array,
    key_text: Array,
    itemsize: int,
    first: Array,
    last: Array,
    wanted: Array,
) -> tuple[int, int, int, int]:
    """As ``ranges_of_keys`` for texts: that of page p is ``first_text[first_off[p]:first_off[p + 1]]`` (uint8, int64),
    query i ``key_text[key_off[i]:key_off[i + 1]]``. Last comes the first page whose keys do not lie in its heap, or
    -1."""
    total: Any = np.int64(0)
    missing, wrong = 0, -1
    for i in range(len(key_off) - 1):
        key = key_text[key_off[i] : key_off[i + 1]]
        low, high = _pages_of_text(page_off, first_off, first_text, table[i], key)
        known = missing
        if low >= 0 and address[low] == 0:
            wanted[missing] = low
            missing += 1
        if high > low and address[high] == 0:
            wanted[missing] = high
            missing += 1
        if missing > known:
            continue
        x, y = np.int64(0), np.int64(0)
        if low >= 0:
            a = _bound(address[low], n_records[low], itemsize, key, False)
            if a < 0:
                return total, missing, wrong, low
            x = first_record[low] + a
        if high >= 0:
            b = _bound(address[high], n_records[high], itemsize, key, True)
            if b < 0:
                return total, missing, wrong, high
            y = first_record[high] + b
        first[i], last[i] = x, y
        total += y - x
        if y < x and wrong < 0:
            wrong = i
    return total, missing, wrong, -1


@njit
def _page_of_record(page_off: Array, first_record: Array, table: Any, number: Any) -> Any:
    a, b = page_off[table], page_off[table + 1]
    while b - a > 1:
        middle = (a + b) >> 1
        if first_record[middle] <= number:
            a = middle
        else:
            b = middle
    return a


@njit
def take_ranges(
    page_off: Array,
    first_record: Array,
    n_records: Array,
    address: Array,
    table: Array,
    first: Array,
    last: Array,
    itemsize: int,
    out: Array,
    wanted: Array,
) -> int:
    """Records ``[first[i], last[i])`` of table ``table[i]``, which it must have, one range after another to ``out``
    (uint32). Pages as in ``ranges_of_keys``; ``wanted``: as long as there are records. Returns how many pages are
    wanted."""
    at, missing, words = 0, 0, itemsize // 4
    for i in range(len(first)):
        row = first[i]
        if row >= last[i]:
            continue
        p = _page_of_record(page_off, first_record, table[i], row)
        while row < last[i] and p < page_off[table[i] + 1]:
            n = min(last[i], first_record[p] + n_records[p]) - row
            if address[p] != 0:
                begin = address[p] + _HEAD + (row - first_record[p]) * itemsize
                source, target = carray(pointer(begin), (n * words,), np.uint32), out[at : at + n * words]
                for k in range(n * words):
                    target[k] = source[k]
            elif missing == 0 or wanted[missing - 1] != p:
                wanted[missing] = p
                missing += 1
            at += n * words
            row += n
            p += 1
    return missing


@njit
def take_records(
    page_off: Array,
    first_record: Array,
    total: Array,
    address: Array,
    table: Array,
    number: Array,
    itemsize: int,
    out: Array,
    wanted: Array,
) -> tuple[int, int]:
    """Record ``number[i]`` of table ``table[i]`` to ``out[i * itemsize:]`` (uint8), for every i; ``total`` (T,) int64
    are the records of each table, the others as in ``ranges_of_keys``; ``wanted`` (n,).

    Returns how many pages are wanted, and the first i whose table has no such record, or -1.
    """
    missing = 0
    p: Any = np.int64(-1)
    for i in range(len(number)):
        t, k = table[i], number[i]
        if k < 0 or k >= total[t]:
            return missing, i
        # Neighbours mostly ask for the same page.
        near = page_off[t] <= p < page_off[t + 1] and first_record[p] <= k
        if not near or (p + 1 < page_off[t + 1] and k >= first_record[p + 1]):
            p = _page_of_record(page_off, first_record, t, k)
        if address[p] == 0:
            wanted[missing] = p
            missing += 1
            continue
        begin = address[p] + _HEAD + (k - first_record[p]) * itemsize
        out[i * itemsize : (i + 1) * itemsize] = carray(pointer(begin), (itemsize,), np.uint8)
    return missing, -1
