"""How the compiled attention cuts a layout into blocks of queries, tasks of threads and chunks of gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

#: Queries of one row that the kernel takes together.
BLOCK = 32

#: What the kernel hands out at a time costs about this many (query, key) pairs: some tens of microseconds.
_TASK_PAIRS = 1 << 15

#: Backward splits the work of a head in about this many parts, and no part below the second number of pairs. The split
#: is part of the result's rounding, so it depends on the layout alone and not on the number of threads.
_PARTS, _PART_PAIRS = 8, 1 << 18


@dataclass(frozen=True, eq=False)
class Plan:
    """Attributes:
    blocks: (B, 3 + 4 R) int64, of each block of at most ``BLOCK`` queries: first query, number of queries, first key of
        its row; then for each range, of the queries that have keys in it: the least start, the greatest start, the
        least stop and the greatest stop. All queries see the keys from the second to the third; where one has no keys
        in the range, the second and third are the fourth. The blocks of a row are neighbours.
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


def plan_of(q_offsets: Ints, k_offsets: Ints, starts: Ints, stops: Ints) -> Plan:
    """The plan of a ``layout.AttentionLayout`` with these arrays."""
    n_queries = np.diff(q_offsets)
    n_blocks = -(-n_queries // BLOCK)
    row = np.repeat(np.arange(len(n_queries)), n_blocks)
    if not len(row):
        none = np.zeros(1, np.int64)
        blocks = np.empty((0, 3 + 4 * starts.shape[1]), np.int64)
        return Plan(blocks, none, np.empty((0, 3), np.int64), none, [], int(k_offsets[-1]), 0)
    within = np.arange(len(row)) - np.repeat(np.cumsum(n_blocks) - n_blocks, n_blocks)
    first = q_offsets[row] + within * BLOCK
    count = np.minimum(q_offsets[row + 1] - first, BLOCK)
    bounds, hull_first, hull_stop, seen = bounds_of(first, starts, stops)
    # Vectors are filled up to 16 queries; a block without keys costs something too.
    cost = (seen + 8) * (-(-count // 16) * 16)
    total = int(cost.sum())

    row_cost = np.bincount(row, cost).astype(np.int64)[row]
    before = np.cumsum(cost) - cost
    before -= np.repeat(before[within == 0], n_blocks[n_blocks > 0])
    parts = -(-row_cost // max(total // _PARTS, _PART_PAIRS))
    part = before * parts // row_cost
    start = np.flatnonzero(np.diff(row, prepend=-1) | np.diff(part, prepend=0))
    stop = np.append(start[1:], len(row))
    apart = row[start] == np.append(-1, row[start[:-1]])
    low = np.minimum.reduceat(hull_first, start)
    n_apart = np.where(apart, np.maximum(np.maximum.reduceat(hull_stop, start) - low, 0), 0)
    at = k_offsets[-1] + np.cumsum(n_apart) - n_apart
    key = k_offsets[row[start]] + low
    folds = [(int(k), int(k + n), int(a)) for k, n, a in zip(key[apart], n_apart[apart], at[apart], strict=True)]
    return Plan(
        _table(first, count, k_offsets[row], *bounds),
        _tasks(cost),
        _table(start, stop, np.where(apart, at - key, 0)),
        _tasks(np.add.reduceat(cost, start)),
        folds,
        int(k_offsets[-1] + n_apart.sum()),
        total,
    )


def bounds_of(first: Ints, starts: Ints, stops: Ints) -> tuple[list[Ints], Ints, Ints, Ints]:
    """Of the blocks that begin at the queries ``first``: the columns of bounds, the first key and the end of what any
    range has, and the keys to go along."""
    columns: list[Ints] = []
    far = np.iinfo(np.int64).max
    hull_first, hull_stop, seen = (
        np.full(len(first), far),
        np.zeros(len(first), np.int64),
        np.zeros(len(first), np.int64),
    )
    for r in range(starts.shape[1]):
        begin, end = starts[:, r], stops[:, r]
        least, most = np.minimum.reduceat(begin, first), np.maximum.reduceat(begin, first)
        low, high = np.minimum.reduceat(end, first), np.maximum.reduceat(end, first)
        empty = begin == end
        if empty.any():
            has = np.maximum.reduceat(end - begin, first) > 0
            least = np.where(has, np.minimum.reduceat(np.where(empty, far, begin), first), least)
            high = np.where(has, np.maximum.reduceat(np.where(empty, 0, end), first), least)
            some = np.logical_or.reduceat(empty, first)
            most, low = np.where(some, high, most), np.where(some, high, low)
        columns += [least, most, low, high]
        hull_first = np.where(high > least, np.minimum(hull_first, least), hull_first)
        hull_stop = np.maximum(hull_stop, np.where(high > least, high, 0))
        seen += high - least
    return columns, np.minimum(hull_first, hull_stop), hull_stop, seen


def _table(*columns: Ints) -> Ints:
    return np.ascontiguousarray(np.stack(columns, axis=1))


def _tasks(cost: Ints) -> Ints:
    """Offsets of runs of neighbours that cost about ``_TASK_PAIRS`` together."""
    cuts = np.flatnonzero(np.diff(np.cumsum(cost) // _TASK_PAIRS)) + 1
    return np.concatenate([[0], cuts, [len(cost)]]).astype(np.int64)
