"""Large arrays whose memory is used again: a batch's columns without a page fault for each of their pages.

The system gives fresh memory as zeroed pages, one fault each, which costs as much as decoding into them. So memory of
arrays that nobody refers to any longer waits here for the next ones. Worked example: a batch takes an array of 9 MB and
goes; the next batch's array of 8 MB lies in the same memory, and holds whatever was there.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Any, cast

import numpy as np
import numpy.typing as npt

#: Smaller arrays come from the allocator, which keeps them itself.
SMALLEST_BYTES = 1 << 16
#: Bytes of a cache line.
_LINE = 64
#: Memory that waits at most.
KEPT_BYTES = 512 << 20


class _Block(np.ndarray[Any, Any]):
    """Memory, or a part of it on loan: a type of its own, so that NumPy keeps the loan, not what it lies in, as base of
    its views. A loan gives the memory back when the last of them goes."""

    lent: tuple[Pool, _Block]

    def __del__(self) -> None:
        lent = self.__dict__.get("lent")
        if lent is not None:
            lent[0]._give_back(lent[1])


class Pool:
    """Memory blocks by size; safe for threads."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes, self._waiting = kept_bytes, 0
        #: By size, the one that came back last at the end.
        self._free: OrderedDict[int, list[_Block]] = OrderedDict()
        self._lock = threading.RLock()

    def empty(self, n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """(n,) array with arbitrary contents; its memory comes back when no array or view refers to it. What is not
        small begins at a cache line."""
        kind = np.dtype(dtype)
        n_bytes = n * kind.itemsize
        if n_bytes < SMALLEST_BYTES:
            return np.empty(n, kind)
        size = _size_of(n_bytes)
        with self._lock:
            waiting = self._free.get(size)
            block = waiting.pop() if waiting else None
            if block is not None:
                self._waiting -= size
        if block is None:
            block = _aligned(size)
        loan = cast(_Block, block[:n_bytes])
        loan.lent = self, block
        return loan.view(np.ndarray).view(kind)

    def after_fork(self) -> None:
        """In a child process: whichever thread held the lock is not here to let it go."""
        self._lock = threading.RLock()

    def _give_back(self, block: _Block) -> None:
        # Reentrant lock: the collector may run this in a thread that is in ``empty``.
        with self._lock:
            self._free.setdefault(block.nbytes, []).append(block)
            self._free.move_to_end(block.nbytes)
            self._waiting += block.nbytes
            if self._waiting > self._kept_bytes:
                self._let_go()

    def _let_go(self) -> None:
        """Keep no more than the bound; sizes that nobody has used for longest go first."""
        for size in list(self._free):
            waiting = self._free[size]
            while waiting and self._waiting > self._kept_bytes:
                waiting.pop()
                self._waiting -= size


def _aligned(size: int) -> _Block:
    """Fresh memory from a cache line on."""
    memory = np.empty(size + _LINE, np.uint8).view(_Block)
    first = -memory.ctypes.data % _LINE
    return cast(_Block, memory[first : first + size])


def _size_of(n_bytes: int) -> int:
    """The next of four sizes an octave."""
    step = 1 << max(n_bytes.bit_length() - 3, 0)
    return -(-n_bytes // step) * step


_pool = Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.after_fork)


def empty(n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """``Pool.empty`` of the pool of this process."""
    return _pool.empty(n, dtype)
