"""Arrays between pages that may not be touched: a read or write outside their buffer ends the process.

Worked example: ``guarded(100)`` is 100 bytes whose last one is the last of a page; the next page is forbidden. With
``guard_pool()`` the buffers that a reader fetches into and decodes into are such arrays.
"""

from __future__ import annotations

import ctypes
import mmap
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
    page = mmap.PAGESIZE
    size = -(-n_bytes // page) * page
    try:
        area = mmap.mmap(-1, size + 2 * page)
    except (OSError, OverflowError, ValueError) as e:
        raise MemoryError(f"no {n_bytes} bytes") from e
    # The whole area is the base of the array, so it stays mapped as long as the array.
    whole = np.frombuffer(area, np.uint8)
    for edge in (0, size + page):
        if _protect()(ctypes.c_void_p(whole.ctypes.data + edge), page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    end = page + size
    return whole[end - (-(-n_bytes // 8) * 8) : end][:n_bytes]


def _guarded_empty(n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    kind = np.dtype(dtype)
    if n < 0:
        raise ValueError("negative dimensions are not allowed")
    found = guarded(int(n) * kind.itemsize)
    # What was there before is not zeros.
    found[: 1 << 16] = 0xA7
    return found.view(kind)


@contextmanager
def guard_pool() -> Iterator[None]:
    """While this runs, ``core.pool.empty`` gives guarded arrays."""
    with mock.patch.object(pool, "empty", _guarded_empty):
        yield
