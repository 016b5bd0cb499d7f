"""Byte ranges of local files, thousands in one call.

A file that never changes is mapped once and its ranges are copied in one compiled loop: ten times as fast here as a
system call for each of thousands of ranges below 1 KB. Where a file cannot be mapped, neighbours are joined and read by
vectored reads. A disk that fails under a mapped page ends the process (SIGBUS), as in every mapped store.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CorruptionError, InputError
from thinrow.kernels import kernel

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
_Identity: TypeAlias = tuple[int, int, int, int]

#: Ranges closer than this many bytes are read in one go.
GAP_BYTES = 4096
#: Maps kept open by one reader; each costs a file descriptor and address space, not memory.
_MAX_MAPS = 128
#: Destinations of one vectored read; Linux takes no more.
_MAX_PARTS = 1024
#: A vectored read returns at most 2^31 - 4096 bytes; longer ranges are read in a loop.
_MAX_READ = 1 << 30


class RangeReader:
    """Reads ranges of files; keeps the maps of those read last. Safe for threads."""

    def __init__(self) -> None:
        self._maps: OrderedDict[Path, tuple[_Identity, U8]] = OrderedDict()
        self._lock = threading.Lock()

    def read_into(self, path: Path, name: str, offsets: I64, lengths: I64, out: U8, out_offsets: I64, gap: int) -> None:
        """As ``ObjectStore.read_into``, of the file at ``path``; ``name`` is for messages.

        Raises:
            FileNotFoundError, NotADirectoryError, IsADirectoryError: no such file.
        """
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(path)
        check_ranges(name, status.st_size, offsets, lengths, out, out_offsets)
        data = self._mapped(path, status)
        if data is not None:
            bad = kernel("copy_ranges")(data, offsets, lengths, out, out_offsets)
            assert bad < 0, "ranges were checked"
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for position, parts in _plan_reads(offsets, lengths, out_offsets, out.data, gap):
                _read_parts(descriptor, name, position, parts)
        finally:
            os.close(descriptor)

    def mapped(self, path: Path) -> U8 | None:
        """The whole file; None where it cannot be mapped. Raises as ``read_into``."""
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(path)
        return self._mapped(path, status)

    def forget(self, path: Path) -> None:
        """Let go of a file that is to be deleted, so that its space can be freed."""
        with self._lock:
            self._maps.pop(path, None)

    def _mapped(self, path: Path, status: os.stat_result) -> U8 | None:
        """The whole file; None where it cannot be mapped."""
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        with self._lock:
            known = self._maps.get(path)
            if known is not None and known[0] == identity:
                self._maps.move_to_end(path)
                return known[1]
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if os.fstat(descriptor).st_size != status.st_size:
                    return None
                data = np.frombuffer(mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ), np.uint8)
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            return None
        with self._lock:
            self._maps[path] = identity, data
            while len(self._maps) > _MAX_MAPS:
                self._maps.popitem(last=False)
        return data


def check_ranges(name: str, size: int, offsets: I64, lengths: I64, out: U8, out_offsets: I64) -> None:
    outside = (offsets < 0) | (lengths < 0) | (offsets > size) | (lengths > size - offsets)
    if outside.any():
        i = int(outside.argmax())
        raise CorruptionError(f"no {lengths[i]} bytes at {offsets[i]}: the file has {size} bytes", file=name)
    check_places(lengths, out, out_offsets)


def check_places(lengths: I64, out: U8, out_offsets: I64) -> None:
    """Raises InputError where a destination does not lie in ``out``."""
    misplaced = (out_offsets < 0) | (out_offsets > len(out)) | (lengths > len(out) - out_offsets)
    if misplaced.any():
        i = int(misplaced.argmax())
        raise InputError(f"{lengths[i]} bytes at {out_offsets[i]} do not fit a buffer of {len(out)}; allocate more")


@dataclass(frozen=True, slots=True)
class Requests:
    """Ranges joined into requests: request r is bytes ``[start[r], stop[r])`` of object ``which[r]``.

    Attributes:
        which, start, stop: (R,) int64.
        first: (R + 1,) the ranges that request r answers are ``first[r]`` to ``first[r + 1]``.
        offsets, lengths, out_offsets: (N,) the ranges, in order of object and offset; long ones are cut.
    """

    which: I64
    start: I64
    stop: I64
    first: I64
    offsets: I64
    lengths: I64
    out_offsets: I64

    def take(self, request: int, body: U8, out: U8) -> None:
        """Copy what one request brought to where it belongs."""
        mine = slice(int(self.first[request]), int(self.first[request + 1]))
        offsets = self.offsets[mine] - self.start[request]
        bad = kernel("copy_ranges")(body, offsets, self.lengths[mine], out, self.out_offsets[mine])
        assert bad < 0, "ranges were checked"


def plan_requests(which: I64, offsets: I64, lengths: I64, out_offsets: I64, gap: int, max_bytes: int) -> Requests:
    """Join ranges (as of ``ObjectStore.read_many``) of one object that lie at most ``gap`` bytes apart.

    A range longer than ``max_bytes`` is cut, and no request is longer than twice that, so that requests can overlap.

    Worked example: ranges [0, 10), [30, 40) and [1000, 1010) of one object with a gap of 100 become the requests
    [0, 40) and [1000, 1010): 2 requests and 50 bytes for 30.
    """
    parts = -(-lengths // max_bytes)
    source = np.repeat(np.arange(len(lengths)), parts)
    skip = (np.arange(len(source)) - np.repeat(np.cumsum(parts) - parts, parts)) * max_bytes
    begin = offsets[source] + skip
    size = np.minimum(lengths[source] - skip, max_bytes)
    order = np.lexsort((begin, which[source]))
    source, begin, size, skip = source[order], begin[order], size[order], skip[order]
    owner, end = which[source], begin + size
    fresh = np.ones(len(owner), np.bool_)
    fresh[1:] = owner[1:] != owner[:-1]
    cuts = np.flatnonzero(fresh)
    reach = end.copy()
    for a, b in zip(cuts.tolist(), [*cuts[1:].tolist(), len(owner)], strict=False):
        np.maximum.accumulate(end[a:b], out=reach[a:b])
    fresh[1:] |= begin[1:] - reach[:-1] > gap
    window = (begin - np.repeat(begin[fresh], np.diff(np.flatnonzero(np.append(fresh, True))))) // max_bytes
    fresh[1:] |= window[1:] != window[:-1]
    first = np.flatnonzero(fresh)
    stop = np.maximum.reduceat(end, first) if len(first) else end
    return Requests(
        owner[first], begin[first], stop, np.append(first, len(owner)), begin, size, out_offsets[source] + skip
    )


def _plan_reads(
    offsets: I64, lengths: I64, out_offsets: I64, out: memoryview, gap: int
) -> Iterator[tuple[int, list[memoryview]]]:
    """Reads as (position, destinations one after another); bytes of gaps go to a buffer that nobody looks at."""
    order = np.argsort(offsets, kind="stable")
    order = order[lengths[order] > 0]
    if not len(order):
        return
    begin, size, place = offsets[order], lengths[order], out_offsets[order]
    end = begin + size
    # Neighbours in the file that are neighbours in the buffer too become one destination.
    joined = (begin[1:] == end[:-1]) & (place[1:] == place[:-1] + size[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    last = np.append(first[1:], len(begin)) - 1
    begin, end, place = begin[first], end[last], place[first]
    between = np.append(begin[1:] - end[:-1], gap + 1)
    waste = memoryview(bytearray(max(gap, 1)))
    parts: list[memoryview] = []
    position, total = 0, 0
    pieces = zip(begin.tolist(), end.tolist(), place.tolist(), between.tolist(), strict=True)
    for start, stop, at, space in pieces:
        if not parts:
            position, total = start, 0
        parts.append(out[at : at + stop - start])
        total += stop - start + space
        if 0 <= space <= gap and len(parts) + 2 < _MAX_PARTS and total < _MAX_READ:
            if space:
                parts.append(waste[:space])
        else:
            yield position, parts
            parts = []


def _read_parts(descriptor: int, name: str, position: int, parts: Sequence[memoryview]) -> None:
    wanted = sum(map(len, parts))
    done = os.preadv(descriptor, parts, position) if wanted <= _MAX_READ else 0
    if done == wanted:
        return
    # A signal or a size limit may cut a read short without an end of file.
    for part in parts:
        filled = min(done, len(part))
        done -= filled
        position += filled
        while filled < len(part):
            n = os.preadv(descriptor, [part[filled : filled + _MAX_READ]], position)
            if n == 0:
                raise CorruptionError(f"the file ends at {position}, {len(part) - filled} bytes early", file=name)
            filled += n
            position += n
