"""PrefixLayout: jagged rows of queries and keys where a query sees a prefix of its row's keys.

Worked example: user 7 has 3 events and user 8 has 2; each event sees itself and what came before::

    PrefixLayout.causal([0, 3, 5])
        q_offsets  0 3 5          k_offsets  0 3 5
        visible    1 2 3 1 2      event 4 (the second of user 8) sees keys 3 and 4

Candidates are the same thing with other numbers. Two candidates of a request that saw 1 event of user 7, one of a
request that saw all 3, none of user 8::

    PrefixLayout([0, 3, 3], [0, 3, 5], [1, 1, 3])

A layout is built once for a batch; every layer of a model uses it and the plan of the kernel that hangs on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError

Ints = npt.NDArray[np.int64]

#: Queries of one row that the kernel takes together.
BLOCK = 32

#: What the kernel hands out at a time costs about this many (query, key) pairs: some tens of microseconds.
_TASK_PAIRS = 1 << 15

#: Backward splits the work of a head in about this many parts, and no part below the second number of pairs. The split
#: is part of the result's rounding, so it depends on the layout alone and not on the number of threads.
_PARTS, _PART_PAIRS = 8, 1 << 18


@dataclass(frozen=True, eq=False)
class PrefixLayout:
    """P rows; row p has queries ``[q_offsets[p], q_offsets[p + 1])`` and keys ``[k_offsets[p], k_offsets[p + 1])``.

    The three arrays are copied and read-only.

    Attributes:
        q_offsets: (P + 1,) int64, ascending from 0 to T, the number of queries.
        k_offsets: (P + 1,) int64, ascending from 0 to S, the number of keys.
        visible: (T,) int64, how many keys of its row a query sees, counted from the row's first:
            ``0 <= visible[i] <= keys of the row``. Any order within a row is right; ascending order is fastest.

    Raises:
        InputError: an array that is not one-dimensional and of integers, offsets that do not ascend from 0 or differ in
            length, or a number of visible keys that is out of range.
    """

    q_offsets: Ints
    k_offsets: Ints
    visible: Ints

    def __post_init__(self) -> None:
        for name in ("q_offsets", "k_offsets", "visible"):
            object.__setattr__(self, name, _owned(name, getattr(self, name)))
        for name in ("q_offsets", "k_offsets"):
            _check_offsets(name, getattr(self, name))
        if len(self.q_offsets) != len(self.k_offsets):
            raise InputError(
                f"q_offsets are of {len(self.q_offsets) - 1} rows and k_offsets of {len(self.k_offsets) - 1}; "
                "give an empty range to a row without queries or keys"
            )
        if self.n_queries != len(self.visible):
            raise InputError(
                f"q_offsets end at {self.n_queries} but visible has {len(self.visible)} entries; pass one a query"
            )
        n_keys = np.repeat(np.diff(self.k_offsets), np.diff(self.q_offsets))
        wrong = np.flatnonzero((self.visible < 0) | (self.visible > n_keys))
        if len(wrong):
            i = int(wrong[0])
            raise InputError(
                f"query {i} sees {self.visible[i]} keys of a row that has {n_keys[i]}; clip visible to [0, {n_keys[i]}]"
            )

    @staticmethod
    def causal(offsets: npt.ArrayLike) -> PrefixLayout:
        """Each event sees itself and the events of its row before it; ``offsets`` are the (P + 1,) bounds of the rows.

        Raises:
            InputError: as the constructor.
        """
        bounds = _owned("offsets", offsets)
        _check_offsets("offsets", bounds)
        position = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
        return PrefixLayout(bounds, bounds, position + 1)

    @property
    def n_queries(self) -> int:
        """T."""
        return int(self.q_offsets[-1])

    @property
    def n_keys(self) -> int:
        """S."""
        return int(self.k_offsets[-1])

    @property
    def n_pairs(self) -> int:
        """How many (query, key) pairs there are in which the query sees the key."""
        return int(self.visible.sum())

    @cached_property
    def plan(self) -> Plan:
        """How the fast kernel cuts the work; built on first use and kept."""
        return _plan(self)


@dataclass(frozen=True, eq=False)
class Plan:
    """Attributes:
    blocks: (B, 5) int64, of each block of at most ``BLOCK`` queries: first query, number of queries, first key of its
        row, keys that all of them see, keys that one of them sees. The blocks of a row are neighbours.
    tasks: (n + 1,) int64, offsets into ``blocks``: what one thread of the forward pass takes at a time.
    chunks: (C, 3) int64: first block (inclusive), last block (exclusive), and what is added to a key's number to find
        the row in which this chunk sums the gradient of that key. It is 0 for the first chunk of a row; a later one
        sums apart, after the S keys, so that no two threads write to one place.
    chunk_tasks: (m + 1,) int64, offsets into ``chunks``: what one thread of the backward pass takes at a time.
    folds: for each such later chunk, in the order in which they are to be added: first key (inclusive), last key
        (exclusive), number of the row where its sums begin.
    n_rows: S and the rows of all later chunks.
    cost: pairs to compute for one head, padding of blocks included.
    """

    blocks: Ints
    tasks: Ints
    chunks: Ints
    chunk_tasks: Ints
    folds: list[tuple[int, int, int]]
    n_rows: int
    cost: int


def _plan(layout: PrefixLayout) -> Plan:
    n_queries = np.diff(layout.q_offsets)
    n_blocks = -(-n_queries // BLOCK)
    row = np.repeat(np.arange(len(n_queries)), n_blocks)
    if not len(row):
        none = np.zeros(1, np.int64)
        return Plan(np.empty((0, 5), np.int64), none, np.empty((0, 3), np.int64), none, [], layout.n_keys, 0)
    within = np.arange(len(row)) - np.repeat(np.cumsum(n_blocks) - n_blocks, n_blocks)
    first = layout.q_offsets[row] + within * BLOCK
    count = np.minimum(layout.q_offsets[row + 1] - first, BLOCK)
    sees = np.maximum.reduceat(layout.visible, first)
    # Vectors are filled up to 16 queries; a block without keys costs something too.
    cost = (sees + 8) * (-(-count // 16) * 16)
    total = int(cost.sum())

    row_cost = np.bincount(row, cost).astype(np.int64)[row]
    before = np.cumsum(cost) - cost
    before -= np.repeat(before[within == 0], n_blocks[n_blocks > 0])
    parts = -(-row_cost // max(total // _PARTS, _PART_PAIRS))
    part = before * parts // row_cost
    start = np.flatnonzero(np.diff(row, prepend=-1) | np.diff(part, prepend=0))
    stop = np.append(start[1:], len(row))
    apart = row[start] == np.append(-1, row[start[:-1]])
    n_apart = np.where(apart, np.maximum.reduceat(sees, start), 0)
    at = layout.n_keys + np.cumsum(n_apart) - n_apart
    key = layout.k_offsets[row[start]]
    folds = [(int(k), int(k + n), int(a)) for k, n, a in zip(key[apart], n_apart[apart], at[apart], strict=True)]
    return Plan(
        _table(first, count, layout.k_offsets[row], np.minimum.reduceat(layout.visible, first), sees),
        _tasks(cost),
        _table(start, stop, np.where(apart, at - key, 0)),
        _tasks(np.add.reduceat(cost, start)),
        folds,
        layout.n_keys + int(n_apart.sum()),
        total,
    )


def _table(*columns: Ints) -> Ints:
    return np.ascontiguousarray(np.stack(columns, axis=1))


def _tasks(cost: Ints) -> Ints:
    """Offsets of runs of neighbours that cost about ``_TASK_PAIRS`` together."""
    cuts = np.flatnonzero(np.diff(np.cumsum(cost) // _TASK_PAIRS)) + 1
    return np.concatenate([[0], cuts, [len(cost)]]).astype(np.int64)


def _owned(name: str, values: npt.ArrayLike) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise InputError(f"{name} is {array.ndim}-dimensional of {array.dtype}; pass a one-dimensional int64 array")
    array = array.astype(np.int64)
    array.flags.writeable = False
    return array


def _check_offsets(name: str, offsets: Ints) -> None:
    if not len(offsets) or offsets[0] != 0:
        raise InputError(f"{name} begins with {offsets[:1].tolist()}; offsets begin with 0, one more than rows")
    wrong = np.flatnonzero(np.diff(offsets) < 0)
    if len(wrong):
        i = int(wrong[0])
        raise InputError(f"{name} falls from {offsets[i]} to {offsets[i + 1]} at row {i}; offsets must not descend")


def check_inputs(layout: PrefixLayout, q_THD: Any, k_SHD: Any, v_SHE: Any) -> None:
    """Hold three tensors against each other and the layout.

    Raises:
        InputError: sizes that differ, a data type that is not floating point, or several data types or devices.
    """
    for name, tensor, rows in (
        ("q", q_THD, layout.n_queries),
        ("k", k_SHD, layout.n_keys),
        ("v", v_SHE, layout.n_keys),
    ):
        if tensor.ndim != 3:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}; pass (tokens, heads, width)")
        if tensor.shape[0] != rows:
            raise InputError(
                f"{name} has {tensor.shape[0]} tokens, but the offsets of the layout end at {rows}; pass the same"
            )
        if tensor.shape[1] != q_THD.shape[1]:
            raise InputError(f"{name} has {tensor.shape[1]} heads and q has {q_THD.shape[1]}; pass as many")
        if tensor.dtype != q_THD.dtype or not tensor.dtype.is_floating_point:
            raise InputError(f"{name} is {tensor.dtype} and q is {q_THD.dtype}; pass one floating-point type")
        if tensor.device != q_THD.device:
            raise InputError(f"{name} is on {tensor.device} and q on {q_THD.device}; move them to one device")
    if q_THD.shape[2] != k_SHD.shape[2]:
        raise InputError(f"q has width {q_THD.shape[2]} and k has width {k_SHD.shape[2]}; pass the same")
