"""RowBlocks: a matrix that grows at its end, block by block, and moves no row to do so.

With 4 rows a block, 6 rows are two arrays of (4, width), the second half used; growing to 9 rows adds a third.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.blocks import Blocks

#: Blocks from so many bytes on are memory of their own, in large pages where the system has them (NumPy asks for them).
_LARGE_BYTES = 1 << 22
#: The system's numbers for what memory is used for; Python names them where it has them.
_SMALL_PAGES, _LARGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None), getattr(mmap, "MADV_HUGEPAGE", None)


class RowBlocks:
    """(n, width) numbers of one dtype.

    Attributes:
        blocks: the arrays, each (block_rows, width) and C-contiguous; rows from n on hold nothing.
        fill: what new rows hold; None for whatever was there, since they are written next.
    """

    def __init__(self, width: int, dtype: npt.DTypeLike, block_rows: int, fill: float | None = 0.0) -> None:
        """``block_rows`` is a power of two."""
        self.blocks = Blocks()
        self.width, self.dtype, self.block_rows, self.fill = width, np.dtype(dtype), block_rows, fill
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def grow(self, n_rows: int) -> None:
        """Grow to ``n_rows`` rows, at least as many as now; new ones hold ``fill``.

        A block that fills by and by is in small pages until it is full: the first touch of a large page is a wait for
        all of it, 4 ms on a virtual machine whose host has not given the memory yet, for rows that come later.
        """
        by_and_by = 2 * (n_rows - self._n) < self.block_rows
        while len(self.blocks) * self.block_rows < n_rows:
            if self.blocks and by_and_by:
                _advise(self.blocks[-1], _LARGE_PAGES)
            self.blocks.append(np.empty((self.block_rows, self.width), self.dtype))
            if by_and_by:
                _advise(self.blocks[-1], _SMALL_PAGES)
        if self.fill is not None:
            for part, _ in self._parts(self._n, n_rows):
                part[:] = self.fill
        self._n = n_rows

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Grow by ``rows`` (m, width)."""
        first = self._n
        self.grow(first + len(rows))
        for part, at in self._parts(first, self._n):
            part[:] = rows[at - first : at - first + len(part)]

    def move(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], n_rows: int) -> None:
        """Put rows ``source`` in the places ``target``, both ascending, then end at ``n_rows`` rows, fewer than now."""
        held = self.take(source)
        for block, part in self._by_block(target):
            block[target[part] & (self.block_rows - 1)] = held[part]
        self._n = n_rows

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """(m, width) copy of ``rows``, ascending."""
        out = np.empty((len(rows), self.width), self.dtype)
        for block, part in self._by_block(rows):
            np.take(block, rows[part] & (self.block_rows - 1), axis=0, out=out[part], mode="clip")
        return out

    def _by_block(self, rows: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[Any], slice]]:
        """Each block with the slice of ascending ``rows`` that lie in it."""
        ends = np.searchsorted(rows, np.arange(len(self.blocks) + 1) * self.block_rows)
        for block, first, stop in zip(self.blocks, ends[:-1], ends[1:], strict=True):
            if first < stop:
                yield block, slice(first, stop)

    def to_array(self, first: int = 0) -> npt.NDArray[Any]:
        """(n - first, width) copy of the rows from ``first`` on."""
        out = np.empty((self._n - first, self.width), self.dtype)
        for part, at in self._parts(first, self._n):
            out[at - first : at - first + len(part)] = part
        return out

    def _parts(self, first: int, stop: int) -> Iterator[tuple[npt.NDArray[Any], int]]:
        """Views of the rows ``[first, stop)``, block by block, each with the number of its first row."""
        while first < stop:
            block, within = divmod(first, self.block_rows)
            part = self.blocks[block][within : within + stop - first]
            yield part, first
            first += len(part)


def _advise(block: npt.NDArray[Any], advice: int | None) -> None:
    """Tell the system about the pages of a block; a system that does not know what is meant does as it always does."""
    if advice is None or sys.platform != "linux" or block.nbytes < _LARGE_BYTES:
        return
    begin = -(-block.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (block.ctypes.data + block.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
