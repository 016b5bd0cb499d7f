"""The virtual order: which row is in which batch, fixed before any worker runs.

Everything here is a pure function of (seed, epoch, table snapshot, sizes): no clock, no thread, no arrival order. So a
batch is the same with one worker or eight, after a crash, and after a resume at any step.

Worked trace: splits of 5 and 3 rows, base batches of 2 rows, one epoch, interleave 2, blocks of 2, batches of 3::

    base batches   split 0: rows 0-1, 2-3, 4      split 1: rows 0-1, 2
    permutation    [1, 0]                         (of the splits, by seed and epoch)
    interleaved    (1,0) (0,0) | (1,1) (0,1) | (0,2)          virtual index v = 0 1 | 2 3 | 4; '|' ends a block
    block rows     4           | 3           | 1              each permuted by seed and block number
    batches        3 rows, 3 rows, 2 rows                     cut from the one stream of 8 rows

Virtual indices run on over epochs, so a block and a batch may hold the end of one epoch and the start of the next.
Permutations sort mixed counters: no library's random generator, whose streams may change between versions, is used.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of
from thinrow.core.wrap import mix64_words

IntArray = npt.NDArray[np.int64]

_SPLIT_STREAM, ROW_STREAM, UNIT_STREAM, BATCH_STREAM = 1, 2, 3, 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class SplitManifest:
    """What the order needs to know of the table.

    Attributes:
        table: names the table.
        snapshot_id: the table snapshot.
        split_rows: number of rows of each split.
        base_rows: rows of a base batch; the last one of a split may be shorter.
    """

    table: str
    snapshot_id: int
    split_rows: tuple[int, ...]
    base_rows: int

    def __post_init__(self) -> None:
        if self.base_rows < 1:
            raise InputError(f"base_rows={self.base_rows}; it must be 1 or more")

    @property
    def n_rows(self) -> int:
        """Rows of one epoch."""
        return sum(self.split_rows)

    @property
    def n_bases(self) -> int:
        """Base batches of one epoch."""
        return sum(-(-n // self.base_rows) for n in self.split_rows)

    def fingerprint(self) -> str:
        """16 hex digits; equal manifests have equal ones."""
        text = json.dumps([self.table, self.snapshot_id, self.split_rows, self.base_rows])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Base(NamedTuple):
    """One base batch: rows ``[first_row, stop_row)`` of ``split``, in the order in which the table stores them."""

    v: int
    epoch: int
    split: int
    first_row: int
    stop_row: int


class RowRefs(NamedTuple):
    """Rows in order: (n,) virtual index of the base batch of each, and (n,) its row within that base batch."""

    v: IntArray
    row: IntArray


class EpochOrder(NamedTuple):
    """Base batches of one epoch in virtual order: (V,) split, (V,) first row, (V + 1,) running row count."""

    split: IntArray
    first_row: IntArray
    row_start: IntArray


def state(seed: int, stream: int) -> npt.NDArray[np.uint64]:
    """(1,) what a seed and the use that is made of it are mixed to."""
    key = np.array([(seed * 4 + stream) & 0xFFFFFFFFFFFFFFFF], np.uint64)
    return mix64_words(key + _GOLDEN)


def permutation(n: int, seed: int, stream: int, number: int) -> IntArray:
    """A permutation of ``range(n)``, a pure function of its arguments, equal on every platform and version."""
    begun = mix64_words(state(seed, stream) + np.uint64(number))
    keys = mix64_words(begun + np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN)
    return np.argsort(keys, kind="stable").astype(np.int64)


class Manifest(Protocol):
    """What names the rows of an order."""

    @property
    def table(self) -> str:
        """The table or log."""
        ...

    @property
    def snapshot_id(self) -> int:
        """Of the table; 0 without one."""
        ...

    @property
    def n_rows(self) -> int:
        """Rows of one epoch; -1 where they are not fixed."""
        ...

    @property
    def base_rows(self) -> int:
        """Rows of a base batch."""
        ...

    def fingerprint(self) -> str:
        """Equal manifests have equal ones."""
        ...


class Order(Protocol):
    """Which row is in which batch: see ``VirtualOrder`` for the members. What is None has no end, or none yet."""

    @property
    def manifest(self) -> Manifest:
        """The rows."""
        ...

    @property
    def n_bases(self) -> int | None:
        """Base batches of the run."""
        ...

    @property
    def n_batches(self) -> int | None:
        """Global batches of the run."""
        ...

    def base(self, v: int) -> Base:
        """The base batch of virtual index ``v``."""
        ...

    def bases_of(self, t: int) -> range:
        """Virtual indices that batch ``t`` is cut from."""
        ...

    def batch(self, t: int, rank: int = 0, n_ranks: int = 1) -> RowRefs:
        """Rows of batch ``t``."""
        ...


def rows_of_rank(first: int, stop: int, rank: int, n_ranks: int) -> tuple[int, int]:
    """Of n rows [first, stop) those of rank r = ``rank`` of R = ``n_ranks``: ``[r n // R, (r + 1) n // R)``."""
    n = stop - first
    return first + rank * n // n_ranks, first + (rank + 1) * n // n_ranks


@lru_cache(maxsize=4)
def epoch_order(manifest: SplitManifest, seed: int, interleave: int, epoch: int) -> EpochOrder:
    """Splits in permutation(seed, epoch), ``interleave`` of them open at a time, one base batch from each in turn.

    A split that ends hands its lane to the next split of the permutation.
    """
    n_bases = [-(-n // manifest.base_rows) for n in manifest.split_rows]
    lanes = [(0, lane) for lane in range(interleave)]
    turns, lane_of, split_of, number = [], [], [], []
    for split in permutation(len(n_bases), seed, _SPLIT_STREAM, epoch).tolist():
        n = n_bases[split]
        first_turn, lane = heapq.heappop(lanes)
        heapq.heappush(lanes, (first_turn + n, lane))
        turns.append(np.arange(first_turn, first_turn + n))
        lane_of.append(np.full(n, lane))
        split_of.append(np.full(n, split))
        number.append(np.arange(n))
    if not turns:
        none = np.empty(0, np.int64)
        return EpochOrder(none, none, np.zeros(1, np.int64))
    order = np.lexsort((np.concatenate(lane_of), np.concatenate(turns)))
    split = np.concatenate(split_of)[order]
    first_row = np.concatenate(number)[order] * manifest.base_rows
    rows = np.minimum(np.asarray(manifest.split_rows, np.int64)[split] - first_row, manifest.base_rows)
    return EpochOrder(split, first_row, offsets_of(rows))


@dataclass(frozen=True, slots=True)
class VirtualOrder:
    """The order of a whole run.

    Attributes:
        manifest: the splits.
        seed: any integer.
        interleave: splits open at a time, a constant of the run.
        block: base batches whose rows are shuffled together (B), a constant of the run.
        batch_rows: rows of a global batch (G), a constant of the run; only the run's last batch may be shorter. None
            for one block a batch: then a batch has ``base_rows * block`` rows or, where a split ends, fewer, and rows
            that stand together in the table (those of a user) stay in one batch.
        epochs: passes over the table; None for no end.
    """

    manifest: SplitManifest
    seed: int
    interleave: int
    block: int
    batch_rows: int | None
    epochs: int | None

    def __post_init__(self) -> None:
        sizes = {
            "interleave": self.interleave,
            "block": self.block,
            "batch_rows": self.batch_rows,
            "epochs": self.epochs,
        }
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise InputError(f"{name}={value}; it must be 1 or more")

    @property
    def n_rows(self) -> int | None:
        """Rows of the run; None where it has no end."""
        if self.manifest.n_rows == 0:
            return 0
        return None if self.epochs is None else self.epochs * self.manifest.n_rows

    @property
    def n_bases(self) -> int | None:
        """Base batches of the run; None where it has no end."""
        if self.manifest.n_rows == 0:
            return 0
        return None if self.epochs is None else self.epochs * self.manifest.n_bases

    @property
    def n_batches(self) -> int | None:
        """Global batches of the run; None where it has no end."""
        if self.n_rows is None or self.n_bases is None:
            return None
        return -(-self.n_bases // self.block) if self.batch_rows is None else -(-self.n_rows // self.batch_rows)

    def base(self, v: int) -> Base:
        """The base batch of virtual index ``v``."""
        epoch, position = divmod(v, self.manifest.n_bases)
        order = self.epoch(epoch)
        first_row = int(order.first_row[position])
        n = int(order.row_start[position + 1] - order.row_start[position])
        return Base(v, epoch, int(order.split[position]), first_row, first_row + n)

    def bases_of(self, t: int) -> range:
        """Virtual indices of the base batches that batch ``t`` is cut from: those of every block it touches."""
        first, stop = self._rows_of(t)
        v_stop = (self._block_of(stop - 1) + 1) * self.block
        return range(self._block_of(first) * self.block, v_stop if self.n_bases is None else min(v_stop, self.n_bases))

    def batch(self, t: int, rank: int = 0, n_ranks: int = 1) -> RowRefs:
        """Rows of global batch ``t`` for one rank."""
        first, stop = rows_of_rank(*self._rows_of(t), rank, n_ranks)
        parts_v: list[IntArray] = []
        parts_row: list[IntArray] = []
        at = first
        while at < stop:
            block = self._block_of(at)
            start = self._row_start(block * self.block)
            refs = self.block_rows(block)
            parts_v.append(refs.v[at - start : stop - start])
            parts_row.append(refs.row[at - start : stop - start])
            at = start + len(refs.v)
        none = [np.empty(0, np.int64)]
        return RowRefs(np.concatenate(parts_v or none), np.concatenate(parts_row or none))

    def block_rows(self, block: int) -> RowRefs:
        """All rows of a block, permuted by rng(seed, block)."""
        stop = (block + 1) * self.block
        vs = np.arange(block * self.block, stop if self.n_bases is None else min(stop, self.n_bases))
        starts = np.array([self._row_start(v) for v in [*vs.tolist(), int(vs[-1]) + 1]]) - self._row_start(int(vs[0]))
        order = permutation(int(starts[-1]), self.seed, ROW_STREAM, block)
        which = np.searchsorted(starts, order, side="right") - 1
        return RowRefs(vs[which], order - starts[which])

    def epoch(self, epoch: int) -> EpochOrder:
        """Base batches of an epoch."""
        return epoch_order(self.manifest, self.seed, self.interleave, epoch)

    def _rows_of(self, t: int) -> tuple[int, int]:
        if t < 0 or (self.n_batches is not None and t >= self.n_batches):
            raise InputError(f"batch {t} is not in the run; it has {self.n_batches} batches, numbered from 0")
        if self.batch_rows is None:
            v_stop = (t + 1) * self.block
            v_stop = v_stop if self.n_bases is None else min(v_stop, self.n_bases)
            return self._row_start(t * self.block), self._row_start(v_stop)
        first, stop = t * self.batch_rows, (t + 1) * self.batch_rows
        return first, stop if self.n_rows is None else min(stop, self.n_rows)

    def _row_start(self, v: int) -> int:
        """Rows of the run before virtual index ``v``."""
        epoch, position = divmod(v, self.manifest.n_bases)
        before = 0 if position == 0 else int(self.epoch(epoch).row_start[position])
        return epoch * self.manifest.n_rows + before

    def _block_of(self, row: int) -> int:
        """The block that holds row ``row`` of the run (each block's rows are contiguous in the run)."""
        epoch, within = divmod(row, self.manifest.n_rows)
        position = int(np.searchsorted(self.epoch(epoch).row_start, within, side="right")) - 1
        return (epoch * self.manifest.n_bases + position) // self.block
