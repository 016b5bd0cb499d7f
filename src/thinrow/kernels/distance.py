"""Distances of a query to its keys, in buckets: where a bias of attention is looked up.

A distance is by how much the query's place is past the key's, 0 where it is not. With ``bits=2`` each of the first 2**2
distances has a bucket of its own, each of the next 2**2 buckets takes two distances, of the next four, and so on::

    distance  0 1 2 3 4 5 6 7 8 9 10 11 12 ... 15 16 ... 19
    bucket    0 1 2 3 4 4 5 5 6 6  7  7  8 ...  8  9 ...  9

With n buckets the last takes all that is farther. 128 buckets of ``bits=2`` reach past any distance; 512 of ``bits=5``
keep the first 32 positions apart; with ``2**bits`` the longest history there is one for each position.

Times are whole seconds, each time's own: the distance is that from the query's second to the key's. A query's time is
the one that is known when it is asked (an event's own, a candidate's request), never that of what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError

Int32s = npt.NDArray[np.int32]

#: Places lie in [0, this); so distances and what is added to them fit into int32.
_SPAN = 1 << 30

#: Most bits of a bucket's number that lie within a doubling: 32,768 distances apart.
_MAX_BITS = 15

_MS = 1_000


@dataclass(frozen=True, eq=False)
class Distances:
    """Where queries and keys stand. Built once for a batch, for all layers.

    Attributes:
        q: (T,) int32 places of queries, 0 or more.
        k: (S,) int32 places of keys.
        bits: see the module.
    """

    q: Int32s
    k: Int32s
    bits: int

    @staticmethod
    def of(q: npt.ArrayLike, k: npt.ArrayLike, bits: int) -> Distances:
        """From integers of any origin: (T,) of queries and (S,) of keys, as positions.

        Raises:
            InputError: no integers of one dimension, a span of 2**30 or more, or ``bits`` outside [0, 15].
        """
        if not 0 <= bits <= _MAX_BITS:
            raise InputError(f"bits={bits}; it must be from 0 to {_MAX_BITS}")
        places = []
        for name, values in (("q", q), ("k", k)):
            array = np.asarray(values)
            if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
                raise InputError(f"{name} is {array.ndim}-dimensional of {array.dtype}; pass (tokens,) int64")
            places.append(array.astype(np.int64))
        first = min((int(p.min()) for p in places if len(p)), default=0)
        last = max((int(p.max()) for p in places if len(p)), default=0)
        if last - first >= _SPAN:
            raise InputError(f"places from {first} to {last} span {last - first}; at most {_SPAN - 1}")
        q_place, k_place = ((p - first).astype(np.int32) for p in places)
        return Distances(q_place, k_place, bits)

    @staticmethod
    def of_times(q_ms: npt.ArrayLike, k_ms: npt.ArrayLike, bits: int) -> Distances:
        """From times in milliseconds: (T,) of queries and (S,) of keys.

        Raises:
            InputError: as ``of``; the span is 34 years.
        """
        return Distances.of(np.asarray(q_ms) // _MS, np.asarray(k_ms) // _MS, bits)


class Bias(NamedTuple):
    """What is added to the scores.

    Attributes:
        table_HN: (H, N) of the tensors' type and device: of each head, for each bucket. A table that all heads share is
            ``table.expand(H, N)``.
        distances: of the queries and keys of the call.
    """

    table_HN: Any
    distances: Distances


def check_biases(biases: tuple[Bias, ...], q_THD: Any, n_keys: int, scale: float) -> None:
    """Hold tables and places against the tensors.

    Raises:
        InputError: a table of another shape, type or device, places that are not one a token, or a scale of 0.
    """
    for i, (table, distances) in enumerate(biases):
        if table.ndim != 2 or table.shape[0] != q_THD.shape[1] or not table.shape[1]:
            raise InputError(
                f"bias {i} has a table of shape {tuple(table.shape)}; pass ({q_THD.shape[1]}, buckets), one line a head"
            )
        if table.dtype != q_THD.dtype or table.device != q_THD.device:
            raise InputError(
                f"bias {i} has a table of {table.dtype} on {table.device} and q is {q_THD.dtype} on {q_THD.device}; "
                "convert it"
            )
        for name, places, n in (("q", distances.q, q_THD.shape[0]), ("k", distances.k, n_keys)):
            if len(places) != n:
                raise InputError(f"bias {i} has places of {len(places)} tokens of {name}, which has {n}; pass one each")
    if biases and scale == 0:
        raise InputError("scale=0 with biases; a scale other than 0 is needed to find their gradients")
