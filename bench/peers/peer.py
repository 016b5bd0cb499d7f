"""What all contestants share: a peer prepares its files once, and reads batches into preallocated memory."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bench.datagen.datasets import Histories, Ints, Work
from bench.datagen.requests import Batch
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.kernels import kernel

#: Preallocated arrays by column; a read fills their beginning.
Out = dict[str, npt.NDArray[Any]]
Bytes = npt.NDArray[np.uint8]


class Peer(ABC):
    """One store that holds the histories.

    ``read`` delivers the newest n events of every request of a batch, request after request, oldest event first, all
    columns, into ``out``, and returns how many events that were.
    """

    #: In ratio keys.
    name: ClassVar[str]
    #: The importable package it needs; None for none beyond the project's own.
    package: ClassVar[str | None] = None

    def __init__(self, work: Work, data: Histories) -> None:
        """Write or find the peer's files and open them."""
        self.data = data

    @classmethod
    def missing(cls) -> bool:
        """Whether its package is not installed."""
        return cls.package is not None and importlib.util.find_spec(cls.package) is None

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """How it was tuned, and its bytes."""

    @abstractmethod
    def read(self, batch: Batch, newest: int | None, out: Out) -> int:
        """Deliver one batch."""

    def close(self) -> None:
        """Release what is open."""
        return


def tree_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def copy_values(source: npt.NDArray[Any], start: Ints, length: Ints, out: npt.NDArray[Any], at: Ints) -> None:
    """Ranges of ``source`` to positions ``at`` of ``out`` (in values, one dtype), in one compiled call."""
    size = source.itemsize
    bad = kernel("copy_ranges")(source.view(np.uint8), start * size, length * size, out.view(np.uint8), at * size)
    assert bad < 0


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where the events of a batch lie in stripes.

    Attributes:
        stripes: (S,) the stripes to fetch, ascending, each once.
        slot: (P,) which of them each piece lies in; pieces by request, then time.
        row: (P,) first row within the stripe.
        length: (P,) rows.
        at: (P + 1,) where each piece goes in the output.
    """

    stripes: Ints
    slot: Ints
    row: Ints
    length: Ints
    at: Ints


class Stripes:
    """Each user's history cut into stripes of ``rows`` events from its first on (the last one shorter)."""

    def __init__(self, data: Histories, rows: int) -> None:
        """Number the stripes, user after user."""
        self.rows, self.first = rows, data.first
        counts = -(-np.diff(data.first) // rows)
        self.base = offsets_of(counts)
        index, _ = ranges_index(np.zeros(len(counts), np.int64), counts)
        owner = np.repeat(np.arange(len(counts)), counts)
        #: Positions in the columns: (S,) first (inclusive) and last (exclusive) of each stripe.
        self.start = data.first[owner] + index * rows
        self.stop = np.minimum(self.start + rows, data.first[owner + 1])

    def pieces(self, batch: Batch, newest: int | None) -> Pieces:
        """The stripes and rows of the newest n events of each request."""
        start, _ = batch.cut(newest)
        first = self.first[batch.users]
        a = self.base[batch.users] + (start - first) // self.rows
        b = np.where(batch.stop > start, self.base[batch.users] + (batch.stop - 1 - first) // self.rows + 1, a)
        stripe, offsets = ranges_index(a, b)
        request = np.repeat(np.arange(len(batch)), np.diff(offsets))
        begin = np.maximum(self.start[stripe], start[request])
        end = np.minimum(self.stop[stripe], batch.stop[request])
        stripes, slot = np.unique(stripe, return_inverse=True)
        return Pieces(stripes, slot, begin - self.start[stripe], end - begin, offsets_of(end - begin))


def new_out(data: Histories, batches: Sequence[Batch], newest: int | None) -> Out:
    """Arrays that hold the largest batch, written once so that their pages are there."""
    most = max(int(b.cut(newest)[1][-1]) for b in batches)
    return {n: np.ones(most, v.dtype) for n, v in data.columns.items()}


def same(a: Out, b: Out, n: int) -> bool:
    """Whether the first ``n`` events are the same, bit for bit."""
    return all(np.array_equal(a[c][:n].view(np.uint8), b[c][:n].view(np.uint8)) for c in a)


#: Opens a peer over data.
Open = Callable[[Work, Histories], Peer]
