"""Arrays between pages that may not be touched: a read or write outside their buffer ends the process.

Worked example: ``guarded(100)`` is 100 bytes whose last one is the last of a page; the next page is forbidden. With
``guard_pool()`` the buffers that a reader fetches into and decodes into are such arrays.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from thinrow.core import pool


@cache
def _protect() -> Any:
    return ctypes.CDLL(None, use_errno=True).mprotect


def guarded(n_bytes: int) -> npt.NDArray[np.uint8]:
    """(n_bytes,) uint8 that end within 8 bytes of a forbidden page and begin at a multiple of 8.

    Raises:
        MemoryError: there is not so much memory.
    """
    size = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    # The whole area is the base of the array, so it stays mapped as long as the array.
    whole = np.frombuffer(_fenced(size), np.uint8)
    end = mmap.PAGESIZE + size
    return whole[end - (-(-n_bytes // 8) * 8) : end][:n_bytes]


def _fenced(size: int) -> mmap.mmap:
    """``size`` bytes, whole pages, between two forbidden ones."""
    page = mmap.PAGESIZE
    try:
        area = mmap.mmap(-1, size + 2 * page)
    except (OSError, OverflowError, ValueError) as e:
        raise MemoryError(f"no {size} bytes") from e
    start = np.frombuffer(area, np.uint8).ctypes.data
    for edge in (0, size + page):
        if _protect()(ctypes.c_void_p(start + edge), page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return area


_waiting: dict[int, list[mmap.mmap]] = {}
_KEPT_PAGES = 64


def _borrowed(n_bytes: int) -> npt.NDArray[np.uint8]:
    """As ``guarded``; to make a small area takes longer than to fill it, so that one is used again when its array and
    all views of it are gone."""
    pages = -(-n_bytes // mmap.PAGESIZE)
    if pages > _KEPT_PAGES:
        return guarded(n_bytes)
    free = _waiting.setdefault(pages, [])
    area = free.pop() if free else _fenced(pages * mmap.PAGESIZE)
    loan = np.frombuffer(area, np.uint8).view(_Loan)
    weakref.finalize(loan, free.append, area).atexit = False
    end = (pages + 1) * mmap.PAGESIZE
    return loan[end - (-(-n_bytes // 8) * 8) : end][:n_bytes].view(np.ndarray)


class _Loan(np.ndarray[Any, Any]):
    """A type of its own, so that NumPy keeps the loan, not the area, as base of its views."""


def _guarded_empty(n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    kind = np.dtype(dtype)
    if n < 0:
        raise ValueError("negative dimensions are not allowed")
    found = _borrowed(int(n) * kind.itemsize)
    # What was there before is not zeros.
    found[: 1 << 16] = 0xA7
    return found.view(kind)


@contextmanager
def guard_pool() -> Iterator[None]:
    """While this runs, ``core.pool.empty`` gives guarded arrays."""
    with mock.patch.object(pool, "empty", _guarded_empty):
        yield
