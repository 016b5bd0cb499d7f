"""Search in index pages, key by key, as the format says; addresses are read byte by byte."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_HEAD = 8


class _OutsideHeap(Exception):
    """Of page ``args[0]``."""


def _at(address: int, n: int) -> bytes:
    return ctypes.string_at(int(address), int(n))


def _ranges(
    page_off: Array,
    first_keys: list[Any],
    first_record: Array,
    address: Array,
    table: Array,
    keys: list[Any],
    keys_of: Callable[[int], list[Any]],
    first: Array,
    last: Array,
    wanted: Array,
) -> tuple[int, int, int]:
    total, missing, wrong = 0, 0, -1
    for i, key in enumerate(keys):
        start, stop = int(page_off[table[i]]), int(page_off[table[i] + 1])
        low = bisect_left(first_keys, key, start, stop) - 1
        high = bisect_right(first_keys, key, start, stop) - 1
        pages = [p for p in sorted({low, high}) if p >= start]
        absent = [p for p in pages if address[p] == 0]
        wanted[missing : missing + len(absent)] = absent
        missing += len(absent)
        if absent:
            continue
        first[i] = first_record[low] + bisect_left(keys_of(low), key) if low >= start else 0
        last[i] = first_record[high] + bisect_right(keys_of(high), key) if high >= start else 0
        total += int(last[i] - first[i])
        if last[i] < first[i] and wrong < 0:
            wrong = i
    return total, missing, wrong


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
    """As ``thinrow.kernels.numba.pages.ranges_of_keys``."""

    def keys_of(page: int) -> list[int]:
        n = int(n_records[page])
        records = np.frombuffer(_at(address[page] + _HEAD, n * itemsize), np.uint8).reshape(n, itemsize)
        found: list[int] = np.ascontiguousarray(records[:, :8]).view("<i8").ravel().tolist()
        return found

    firsts, keys = first_key.tolist(), key.tolist()
    return _ranges(page_off, firsts, first_record, address, table, keys, keys_of, first, last, wanted)


def _texts(offsets: Array, data: Array) -> list[bytes]:
    return [data[a:b].tobytes() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


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
    """As ``thinrow.kernels.numba.pages.ranges_of_texts``."""

    def keys_of(page: int) -> list[bytes]:
        n = int(n_records[page])
        heap_bytes = int(np.frombuffer(_at(address[page], _HEAD), "<u4")[1])
        records = np.frombuffer(_at(address[page] + _HEAD, n * itemsize), np.uint8).reshape(n, itemsize)
        heap = _at(address[page] + _HEAD + n * itemsize, heap_bytes)
        slots = np.ascontiguousarray(records[:, :8]).view("<u4").astype(np.int64)
        if (slots.sum(axis=1) > heap_bytes).any():
            raise _OutsideHeap(page)
        return [heap[a : a + size] for a, size in slots.tolist()]

    firsts, keys = _texts(first_off, first_text), _texts(key_off, key_text)
    try:
        return *_ranges(page_off, firsts, first_record, address, table, keys, keys_of, first, last, wanted), -1
    except _OutsideHeap as e:
        return 0, 0, -1, int(e.args[0])


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
    """As ``thinrow.kernels.numba.pages.take_ranges``."""
    rows = [(t, k) for t, a, b in zip(table.tolist(), first.tolist(), last.tolist(), strict=True) for k in range(a, b)]
    tables, numbers = np.array(rows, np.int64).reshape(-1, 2).T
    total = np.full(len(page_off) - 1, np.iinfo(np.int64).max)
    every = np.empty(len(rows), np.int64)
    n, _ = take_records(page_off, first_record, total, address, tables, numbers, itemsize, out.view(np.uint8), every)
    absent = np.unique(every[:n])
    wanted[: len(absent)] = absent
    return len(absent)


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
    """As ``thinrow.kernels.numba.pages.take_records``."""
    missing = 0
    for i, (t, k) in enumerate(zip(table.tolist(), number.tolist(), strict=True)):
        if not 0 <= k < total[t]:
            return missing, i
        p = bisect_right(first_record.tolist(), k, int(page_off[t]), int(page_off[t + 1])) - 1
        if address[p] == 0:
            wanted[missing] = p
            missing += 1
            continue
        record = _at(address[p] + _HEAD + (k - int(first_record[p])) * itemsize, itemsize)
        out[i * itemsize : (i + 1) * itemsize] = np.frombuffer(record, np.uint8)
    return missing, -1
