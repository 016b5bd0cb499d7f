"""Look-ups cut by shard, and the answers of the shards put together again.

Worked example: keys 1, 2 and 3 of which shard 0 has 2 and shard 1 the others are two asks, ``[2]`` and ``[1, 3]``; rows
go back to places 1, and 0 and 2. Of a bag of all three, shard 0 sums one key and shard 1 two; the sums are added in the
order of the shards, from zeros, in float32. A mean is that sum over the number of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError, ProtocolError
from thinrow.core.pool import empty
from thinrow.core.routing import Routing
from thinrow.kernels import kernel
from thinrow.serving.lookups.messages import MOST_NAME_BYTES, Ask, Floats, Ints, Pooling, Rows

POOLINGS = ("sum", "mean")


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """Keys to be pooled.

    Attributes:
        keys: (n,) int64.
        bounds: (b + 1,) int64; bag i has the keys ``[bounds[i], bounds[i + 1])``, from 0 to n.
        pooling: ``sum``, or ``mean``: the sum over the number of keys, zeros for an empty bag.
        weights: (n,) float32, by which vectors are multiplied before they are added; None for 1.
    """

    keys: Ints
    bounds: Ints
    pooling: str = "sum"
    weights: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """What was looked up in one table.

    Attributes:
        vectors: (r, dim) float32, a row a key or a bag; a key that is nowhere reads as the table's default.
        found: (r,) bool, or with bags (r,) int64: how many of their keys were found.
        degraded: (r,) bool: made with the default in place of a server that did not answer.
    """

    vectors: Floats
    found: npt.NDArray[Any]
    degraded: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Wanted:
    """One table's look-ups, cut by shard.

    Attributes:
        asks: shard -> what to ask it.
        at: shard -> rows of the answer that its rows are of.
    """

    table: str
    bags: Bags | None
    rows: int
    asks: dict[int, Ask] = field(default_factory=dict)
    at: dict[int, Any] = field(default_factory=dict)


def cut(table: str, what: Ints | Bags, routing: Routing) -> Wanted:
    """Cut the look-ups in one table by shard.

    Raises:
        InputError: keys, bounds or weights are not what ``Bags`` says.
    """
    if len(table.encode()) > MOST_NAME_BYTES:
        raise InputError(f"a table's name of {len(table.encode())} bytes; it has at most {MOST_NAME_BYTES}")
    bags = what if isinstance(what, Bags) else None
    keys = _checked(table, bags.keys if bags is not None else what)
    bag_of = None
    if bags is not None:
        _check_bags(table, bags)
        bag_of = np.repeat(np.arange(len(bags.bounds) - 1), np.diff(bags.bounds))
    wanted = Wanted(table, bags, len(keys) if bags is None else len(bags.bounds) - 1)
    if len(routing) == 1:
        _cut_shard(wanted, 0, keys, slice(None), bag_of)
        return wanted
    shards = routing.shards(keys)
    order = np.argsort(shards, kind="stable")
    ends = np.cumsum(np.bincount(shards, minlength=len(routing)))
    for shard, end in enumerate(ends.tolist()):
        at = order[ends[shard - 1] if shard else 0 : end]
        # Where there are no keys at all, one shard says how wide the table is.
        if len(at) or (shard == 0 and not len(keys)):
            _cut_shard(wanted, shard, keys[at], at, bag_of)
    return wanted


def _cut_shard(wanted: Wanted, shard: int, keys: Ints, at: Any, bag_of: Ints | None) -> None:
    bags = wanted.bags
    if bags is None or bag_of is None:
        wanted.asks[shard], wanted.at[shard] = Ask(wanted.table, keys), at
        return
    # Bags come in ascending order, those without a key of this shard not at all.
    here, lengths = np.unique(bag_of[at], return_counts=True)
    weights = None if bags.weights is None else np.ascontiguousarray(bags.weights[at])
    kind = Pooling.SUM if weights is None else Pooling.WEIGHTED
    wanted.asks[shard] = Ask(wanted.table, keys, kind, lengths.astype(np.uint32), weights)
    wanted.at[shard] = here


def joined(wanted: Wanted, default: Floats, answers: dict[int, Rows | None]) -> Vectors:
    """The answers of all shards together; a shard whose answer is None reads as ``default``.

    Raises:
        ProtocolError: an answer has other rows than were asked for.
    """
    dim, pooled = len(default), wanted.bags is not None
    # Its memory comes back when the caller lets go of it: fresh pages take longer than the copy.
    vectors: Floats = empty(wanted.rows * dim, np.float32).reshape(wanted.rows, dim)
    if pooled:
        vectors[:] = 0
    found: npt.NDArray[Any] = np.zeros(wanted.rows, np.int64 if pooled else np.bool_)
    degraded = np.zeros(wanted.rows, np.bool_)
    for shard, at in wanted.at.items():
        ask, rows = wanted.asks[shard], answers[shard]
        if rows is None:
            degraded[at] = True
            part: npt.NDArray[Any] = default if not pooled else _default_sums(ask, default)
        else:
            if rows.values.shape != (ask.rows, dim) or (rows.found.dtype == np.bool_) == pooled:
                raise ProtocolError(f"an answer of {rows.values.shape} of table {ask.table!r}, not {(ask.rows, dim)}")
            if rows.values.dtype == np.float16 and isinstance(at, slice) and not pooled:
                # Straight to where it belongs.
                kernel("widen_half")(rows.values, vectors)
                found[at] = rows.found
                continue
            part = rows.as_float()
            found[at] += rows.found
        if pooled:
            vectors[at] += part
        else:
            vectors[at] = part
    if wanted.bags is not None and wanted.bags.pooling == "mean":
        sizes = np.diff(wanted.bags.bounds)
        np.divide(vectors, np.maximum(sizes, 1).astype(np.float32)[:, None], out=vectors)
    return Vectors(vectors, found, degraded)


def _default_sums(ask: Ask, default: Floats) -> Floats:
    """What the bags of ``ask`` sum to where each key reads as ``default``."""
    assert ask.lengths is not None
    if ask.weights is None or not len(ask.weights):
        return ask.lengths.astype(np.float32)[:, None] * default
    starts = np.concatenate([[0], np.cumsum(ask.lengths[:-1], dtype=np.int64)])
    return np.add.reduceat(ask.weights, starts)[:, None] * default


def _checked(table: str, keys: Any) -> Ints:
    if not isinstance(keys, np.ndarray) or keys.dtype != np.int64 or keys.ndim != 1:
        raise InputError(f"keys of table {table!r} must be a one-dimensional int64 array")
    return np.ascontiguousarray(keys)


def _check_bags(table: str, bags: Bags) -> None:
    bounds, weights = bags.bounds, bags.weights
    if bags.pooling not in POOLINGS:
        raise InputError(f"pooling={bags.pooling!r} of table {table!r}; it must be one of {', '.join(POOLINGS)}")
    sound = isinstance(bounds, np.ndarray) and bounds.dtype == np.int64 and bounds.ndim == 1 and len(bounds) > 0
    if not sound or bounds[0] != 0 or bounds[-1] != len(bags.keys) or (np.diff(bounds) < 0).any():
        raise InputError(f"bounds of table {table!r} must be int64 and ascend from 0 to {len(bags.keys)}, its keys")
    if weights is None:
        return
    if not isinstance(weights, np.ndarray) or weights.dtype != np.float32 or weights.shape != bags.keys.shape:
        raise InputError(f"weights of table {table!r} must be ({len(bags.keys)},) float32, one a key")
    if not np.isfinite(weights).all():
        raise InputError(f"weights of table {table!r} must be finite; {weights[~np.isfinite(weights)][0]} is not")
