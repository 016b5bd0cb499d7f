"""Search in index pages, key by key, as the format says; addresses are read byte by byte."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_HEAD = 8


def _at(address: int, n: int) -> bytes:
    return ctypes.string_at(int(address), int(n))


def _pages(page_off: Array, first: list[Any], table: Array, keys: list[Any]) -> tuple[Array, Array]:
    low, high = np.full(len(keys), -1, np.int64), np.full(len(keys), -1, np.int64)
    for i, key in enumerate(keys):
        a, b = int(page_off[table[i]]), int(page_off[table[i] + 1])
        left, right = bisect_left(first, key, a, b), bisect_right(first, key, a, b)
        low[i], high[i] = left - 1 if left > a else -1, right - 1 if right > a else -1
    return low, high


def pages_of_keys(page_off: Array, first_key: Array, table: Array, key: Array) -> tuple[Array, Array]:
    """As ``thinrow.kernels.numba.pages.pages_of_keys``."""
    return _pages(page_off, first_key.tolist(), table, key.tolist())


def rows_of_keys(
    address: Array, first_record: Array, n_records: Array, low: Array, high: Array, key: Array, itemsize: int
) -> tuple[Array, Array]:
    """As ``thinrow.kernels.numba.pages.rows_of_keys``."""

    def keys_of(page: int) -> list[int]:
        n = int(n_records[page])
        records = np.frombuffer(_at(address[page] + _HEAD, n * itemsize), np.uint8).reshape(n, itemsize)
        found: list[int] = np.ascontiguousarray(records[:, :8]).view("<i8").ravel().tolist()
        return found

    first, last = np.zeros(len(key), np.int64), np.zeros(len(key), np.int64)
    for i, k in enumerate(key.tolist()):
        if low[i] >= 0:
            first[i] = first_record[low[i]] + bisect_left(keys_of(low[i]), k)
        if high[i] >= 0:
            last[i] = first_record[high[i]] + bisect_right(keys_of(high[i]), k)
    return first, last


def _texts(offsets: Array, data: Array) -> list[bytes]:
    raw = data.tobytes()
    return [raw[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def pages_of_texts(
    page_off: Array, first_off: Array, first_text: Array, table: Array, key_off: Array, key_text: Array
) -> tuple[Array, Array]:
    """As ``thinrow.kernels.numba.pages.pages_of_texts``."""
    return _pages(page_off, _texts(first_off, first_text), table, _texts(key_off, key_text))


class _Damaged(Exception):
    """A key that does not lie in its heap."""


class _TextKeys:
    """The keys of a page, read as a search asks for them."""

    def __init__(self, address: int, n: int, itemsize: int) -> None:
        self.address, self.n, self.itemsize = int(address), int(n), itemsize
        heap_bytes = int.from_bytes(_at(address + 4, 4), "little")
        self.heap = _at(address + _HEAD + n * itemsize, heap_bytes)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> bytes:
        slot = _at(self.address + _HEAD + i * self.itemsize, 8)
        at, size = int.from_bytes(slot[:4], "little"), int.from_bytes(slot[4:], "little")
        if at + size > len(self.heap):
            raise _Damaged
        return self.heap[at : at + size]


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
    """As ``thinrow.kernels.numba.pages.rows_of_texts``."""
    keys = _texts(key_off, key_text)
    first, last = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
    page = -1
    try:
        for i, key in enumerate(keys):
            if low[i] >= 0:
                page = int(low[i])
                first[i] = first_record[page] + bisect_left(_TextKeys(address[page], n_records[page], itemsize), key)
            if high[i] >= 0:
                page = int(high[i])
                last[i] = first_record[page] + bisect_right(_TextKeys(address[page], n_records[page], itemsize), key)
    except _Damaged:
        return first, last, page
    return first, last, -1


def pages_of_records(page_off: Array, first_record: Array, total: Array, table: Array, number: Array) -> Array:
    """As ``thinrow.kernels.numba.pages.pages_of_records``."""
    page = np.full(len(number), -1, np.int64)
    for i, (t, k) in enumerate(zip(table.tolist(), number.tolist(), strict=True)):
        if 0 <= k < total[t]:
            page[i] = bisect_right(first_record.tolist(), k, int(page_off[t]), int(page_off[t + 1])) - 1
    return page


def take_records(address: Array, first_record: Array, page: Array, number: Array, itemsize: int, out: Array) -> None:
    """As ``thinrow.kernels.numba.pages.take_records``."""
    for i, (p, k) in enumerate(zip(page.tolist(), number.tolist(), strict=True)):
        record = _at(address[p] + _HEAD + (k - int(first_record[p])) * itemsize, itemsize)
        out[i * itemsize : (i + 1) * itemsize] = np.frombuffer(record, np.uint8)
