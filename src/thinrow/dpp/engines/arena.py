"""The memory that batches are handed over in: segments of shared memory, bounded, used again when nobody reads them.

A segment is an unnamed file in memory (memfd): the kernel frees it with the last process that maps it, whatever ends
these processes, and there is no name that could be left behind, nor a mount whose size counts. It is made by the reader
for one worker, which writes one packed item into it; the reader's arrays are views of it; when the last of them dies
the same worker gets it again, with its pages in place.

Bounds, with ``limit`` bytes: what waits for the reader, is being written or is free to be written again takes
``limit`` and twice one item at most (the item that the reader waits for is never refused, nor its backup). What the
reader keeps takes ``limit`` and one item more, in ``MAX_KEPT`` segments at most; of batches kept beyond that, the next
ones are copied into ordinary memory when they are delivered.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Hashable

import numpy as np

from thinrow.dpp.engines.packing import U8

#: Segments that the reader may keep; each takes a file descriptor.
MAX_KEPT = 128
_LEAST = 1 << 16


class Segment:
    """Attributes:
    number: names it between reader and worker.
    size: bytes.
    owner: the worker that writes it.
    fd: to be sent to the worker; -1 when it has been.
    """

    __slots__ = ("fd", "number", "owner", "pages", "size")

    def __init__(self, number: int, size: int, owner: Hashable) -> None:
        self.number, self.size, self.owner = number, size, owner
        self.fd = os.memfd_create(f"thinrow-{number}")
        try:
            os.ftruncate(self.fd, size)
            self.pages = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise

    def sent(self) -> None:
        """The worker has it: the descriptor is needed no more."""
        os.close(self.fd)
        self.fd = -1


class _Lent(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes that dying says so (a plain array takes no weak reference to a view's base)."""


class Arena:
    """Args:
    limit: bytes, see above.
    retired: called with a segment that its worker should map no longer.
    released: called, from whatever thread, when a segment may be used again.
    """

    def __init__(self, limit: int, retired: Callable[[Segment], None], released: Callable[[], None]) -> None:
        self._limit, self._retired, self._wake = limit, retired, released
        self._free: list[Segment] = []
        self._dead: set[Hashable] = set()
        self._returned: deque[Segment] = deque()
        self._numbers = 0
        self._kept_segments = 0
        self.used = self.kept = self.peak = self.copied = 0

    def grant(self, owner: Hashable, n: int, urgent: bool) -> Segment | None:
        """A segment of at least n bytes for ``owner`` to write; None where there is no room and it is not urgent."""
        self.collect()
        fit = [s for s in self._free if s.owner == owner and n <= s.size <= 4 * max(n, _LEAST)]
        if fit:
            found = min(fit, key=lambda s: s.size)
            self._free.remove(found)
            return found
        size = _rounded(n)
        while self._free and self.used + size > self._limit:
            self._retire(self._free.pop(0))
        if self.used + size > self._limit and not urgent:
            return None
        self._numbers += 1
        segment = Segment(self._numbers, size, owner)
        self.used += size
        self.peak = max(self.peak, self.used + self.kept)
        return segment

    @property
    def lends(self) -> bool:
        """Whether the reader keeps so little that what it takes next is not copied."""
        return self.kept <= self._limit and self._kept_segments < MAX_KEPT

    def lend(self, segment: Segment, n: int) -> memoryview:
        """The first n bytes of a segment that was written; it is free again when the last view of them is gone."""
        if not self.lends:
            self.collect()
        if not self.lends:
            own = np.frombuffer(segment.pages, np.uint8, n).copy()
            self.copied += n
            self.back(segment)
            return own.data
        self.used -= segment.size
        self.kept += segment.size
        self._kept_segments += 1
        lent: U8 = np.frombuffer(segment.pages, np.uint8, n).view(_Lent)
        weakref.finalize(lent, self._return, segment).atexit = False
        return lent.data

    def back(self, segment: Segment) -> None:
        """A granted segment that nobody reads is free; of a worker that ended, it is gone."""
        if segment.owner in self._dead:
            self._retire(segment)
        else:
            self._free.append(segment)

    def ended(self, owner: Hashable) -> None:
        """The worker is no more: it can write nothing, and gets nothing again."""
        self._dead.add(owner)
        for segment in [s for s in self._free if s.owner == owner]:
            self._free.remove(segment)
            self._retire(segment)

    def close(self) -> None:
        """Let go of all memory that the reader does not keep."""
        self.collect()
        self._free.clear()
        self._retired = lambda _: None

    def collect(self) -> None:
        """Take back what the reader has let go."""
        while self._returned:
            segment = self._returned.popleft()
            self.kept -= segment.size
            self._kept_segments -= 1
            self.used += segment.size
            if self.used > self._limit:
                self._retire(segment)
            else:
                self.back(segment)

    def _return(self, segment: Segment) -> None:
        # In whatever thread the last view died, maybe in the middle of one of the methods above: nothing but this.
        self._returned.append(segment)
        self._wake()

    def _retire(self, segment: Segment) -> None:
        self.used -= segment.size
        if segment.fd >= 0:
            segment.sent()
        if segment.owner not in self._dead:
            self._retired(segment)


def _rounded(n: int) -> int:
    """n, rounded up so that items of about one size fit each other's segments: to an eighth of a power of two."""
    step = max(_LEAST, 1 << max(n - 1, 0).bit_length() - 3) if n > _LEAST else _LEAST
    return -(-n // step) * step
