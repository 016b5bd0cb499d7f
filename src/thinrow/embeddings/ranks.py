"""Ranks: the processes that train one model together, and what they send each other.

All is one call, ``exchange``: each rank has a part for every rank, itself included, and gets one from each. With two
ranks, rank 0 with the parts ``a0 a1`` and rank 1 with ``b0 b1`` get ``a0 b0`` and ``a1 b1``. Every rank must make the
same calls in the same order; each says what it is at, so that ranks that differ are told so and do not read each
other's bytes as something else.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError

Bytes = npt.NDArray[np.uint8]

#: Version of these messages, the number of the call on its channel, the bytes that follow, what the call is.
_HEAD, _VERSION = struct.Struct("<qqq40s"), 1


class Ranks(ABC):
    """Attributes:
    rank: of this process, from 0.
    size: how many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._calls = self._sent_bytes = 0
        self._beside: tuple[Ranks, ThreadPoolExecutor] | None = None

    @property
    def sent_bytes(self) -> int:
        """Bytes that left this rank so far, on both channels."""
        return self._sent_bytes + (self._beside[0].sent_bytes if self._beside else 0)

    def exchange(self, call: str, parts: Sequence[Bytes]) -> list[Bytes]:
        """Send part p, any bytes, to rank p; returns what each rank sent here. ``call`` (ASCII, 40 characters at most)
        says what it is.

        Raises:
            RankLost: a rank ended, or did not answer in time.
            InputError: a rank is at another call; nothing was sent.
        """
        self._calls += 1
        what = call.encode()
        heads = [_bytes_of(_HEAD.pack(_VERSION, self._calls, part.nbytes, what)) for part in parts]
        theirs = [_HEAD.unpack(h.tobytes()) for h in self._swap(heads, [_HEAD.size] * self.size)]
        for rank, (version, number, _, name) in enumerate(theirs):
            if version != _VERSION:
                raise InputError(
                    f"rank {rank} speaks version {version} of these messages, this rank {_VERSION}; install one "
                    "version of thinrow on all"
                )
            if (number, name.rstrip(b"\0")) != (self._calls, what):
                raise InputError(
                    f"rank {rank} is at call {number}, {name.rstrip(bytes(1)).decode()!r}, this rank ({self.rank}) at "
                    f"call {self._calls}, {call!r}; all ranks must look up, prefetch and step the same tables in the "
                    "same order, with no keys where a rank has none"
                )
        sent = sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        self._sent_bytes += sent + (self.size - 1) * _HEAD.size
        return self._swap(parts, [n_bytes for _, _, n_bytes, _ in theirs])

    def gather(self, call: str, part: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """``part`` of each rank, in order of rank; all of one dtype."""
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        return [found.view(part.dtype) for found in self.exchange(call, [flat] * self.size)]

    def agree(self, call: str, error: InputError | None) -> None:
        """Raise on all ranks where one has an error: its own there, elsewhere one that says whose and what it is.
        Without errors nothing but heads is sent."""
        said = _bytes_of(b"" if error is None else str(error).encode())
        found = self.exchange(call, [said] * self.size)
        if error is not None:
            raise error
        for rank, text in enumerate(found):
            if len(text):
                raise InputError(f"rank {rank}: {text.tobytes().decode()}")

    def add(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The sum over all ranks of ``numbers``, of one shape and dtype everywhere: added in order of rank, so the
        same bits on all. For the gradients of dense parameters.
        """
        flat = np.ascontiguousarray(numbers).reshape(-1)
        pieces = [piece.view(np.uint8) for piece in np.array_split(flat, self.size)]
        found = [piece.view(flat.dtype) for piece in self.exchange("add", pieces)]
        total = found[0].copy()
        for piece in found[1:]:
            total += piece
        return np.concatenate(self.gather("add", total)).reshape(numbers.shape)

    def beside(self) -> tuple[Ranks, ThreadPoolExecutor]:
        """A second channel between the same ranks, and the one thread that uses it; every rank must ask for it."""
        if self._beside is None:
            self._beside = self._open_beside(), ThreadPoolExecutor(1, f"thinrow-ranks-{self.rank}")
        return self._beside

    def close(self) -> None:
        """End the thread of the second channel."""
        if self._beside is not None:
            self._beside[1].shutdown()

    @abstractmethod
    def _open_beside(self) -> Ranks:
        """The second channel."""

    @abstractmethod
    def _swap(self, parts: Sequence[Bytes], sizes: Sequence[int]) -> list[Bytes]:
        """``exchange`` where the number of bytes that each rank sends here is known; raises RankLost."""


def _bytes_of(raw: bytes) -> Bytes:
    return np.frombuffer(bytearray(raw), np.uint8)
