"""BatchBudget: batches cut by what they cost instead of by a number of examples, and balanced over ranks.

Worked example: ``BatchBudget(limit=100, event=1)``, a window with users of 60, 30, 50 and 40 events, in that order
after shuffling. Read from the front, 60 + 30 is within 100, and so is 50 + 40: two batches, of 90 each. Nothing is
padded, dropped or carried over: a window that needs n batches is cut as evenly as its order allows, so that no small
one is left. Two ranks get 60 and 30 of the first.

The same class is every policy:

- a number of events (of tokens, to a transformer): ``BatchBudget(limit=200_000)``
- attention and linear cost, memory bounded: ``BatchBudget(limit=4e5, event=1, pair=1 / 512, max_events=200_000)``
- by length, for a model that pads: ``BatchBudget(limit=200_000, by_length=True)``
- a number of examples, users whole: ``BatchBudget(limit=1024, row=1, event=0)``
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import InputError
from thinrow.examples.layout import load_int64
from thinrow.schema import Projection

#: Stored columns that sizes are made of, and those that drawn lengths are made of beside them.
SIZE_COLUMNS = ("user_id", "v_seq_len", "recent_event_ts")
DRAW_COLUMNS = ("request_ts", "v_checksum")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """What a global batch may cost. What is counted are units: the examples of a user in a window, which share a
    history, or, with ``shared=False``, each example.

    A unit with m events and k examples costs ``row * k + event * m + pair * m**2``. The m of a user is the longest
    history among its examples and, under ``max_len``, what their windows reach over, of drawn lengths
    (``Projection.shortest``) those that were drawn. Counts are those that were logged:
    with a horizon a batch holds less, with late events, which only some of a user's examples see, a little more.

    Attributes:
        limit: cost of a batch at most. A unit that costs more is a batch alone.
        event: cost of an event: the linear part of a model.
        pair: cost of a pair of events: attention.
        row: cost of an example.
        max_events: events of a batch at most, for its memory; None for no bound. A unit that has more is a batch alone.
        by_length: batches of histories of about one length, in random order; else users are in random order.
        shared: whether the examples of a user are one unit, in one batch of the window and on one rank.
    """

    limit: float
    event: float = 1.0
    pair: float = 0.0
    row: float = 0.0
    max_events: int | None = None
    by_length: bool = False
    shared: bool = True

    def __post_init__(self) -> None:
        for name in ("limit", "event", "pair", "row"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError(f"{name}={value}; it must be a number from 0")
            object.__setattr__(self, name, float(value))
        if self.limit == 0 or self.event + self.pair + self.row == 0:
            raise InputError(f"limit={self.limit} and costs {self.event}, {self.pair}, {self.row}: nothing is bounded")
        if self.max_events is not None and self.max_events < 1:
            raise InputError(f"max_events={self.max_events}; it must be 1 or more, or None for no bound")

    def costs(self, rows: Ints, events: Ints) -> Floats:
        """(U,) cost of units of these numbers of examples and events."""
        m = events.astype(np.float64)
        cost: Floats = self.row * rows + self.event * m + self.pair * (m * m)
        return cost


@dataclass(frozen=True, slots=True)
class RowSizes:
    """What a budget needs to know of the rows of all splits, one split after another; 8 bytes a row.

    Attributes:
        events: (n,) int32 how many events an example saw.
        users: (n,) int32 the number of its user, in [0, n_users).
        n_users: how many numbers there are.
        reads: (n,) int32 of these events, those that it reads where lengths are drawn; None where they are not.
    """

    events: npt.NDArray[np.int32]
    users: npt.NDArray[np.int32]
    n_users: int
    reads: npt.NDArray[np.int32] | None = None

    def fingerprint(self) -> str:
        """16 hex digits; equal sizes have equal ones."""
        found = hashlib.sha256(self.events.tobytes())
        found.update(self.users.tobytes())
        if self.reads is not None:
            found.update(self.reads.tobytes())
        return found.hexdigest()[:16]

    def held(self, rows: Ints, max_len: int | None, starts: Ints | None) -> Ints:
        """(U,) events that units hold.

        Args:
            rows: positions of examples, those of a unit together.
            max_len: newest events that an example reads; None for all.
            starts: (U,) where units begin in ``rows``; None for one an example.
        """
        seen = self.events[rows].astype(np.int64)
        if self.reads is not None:
            read: Ints = self.reads[rows].astype(np.int64)
        else:
            read = seen if max_len is None else np.minimum(seen, max_len)
        if starts is None:
            return read
        if not len(starts):
            return np.empty(0, np.int64)
        longest: Ints = np.maximum.reduceat(seen, starts)
        return longest - np.minimum.reduceat(seen - read, starts)


def state_of(budget: BatchBudget, max_len: int | None, sizes: str) -> dict[str, Any]:
    """What a state of the reader says of its budget; two orders are the same where it is."""
    names = ("limit", "event", "pair", "row", "max_events", "by_length", "shared")
    return {n: getattr(budget, n) for n in names} | {"max_len": max_len, "sizes": sizes}


def row_draws(rows: pa.Table, projection: Projection) -> Ints:
    """(n,) how many of their newest events n stored rows read, which have ``DRAW_COLUMNS``."""
    return projection.drawn(load_int64(rows["request_ts"]), load_int64(rows["v_checksum"]).view(np.uint64))


def row_sizes(rows: pa.Table) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Of n stored rows, which have ``SIZE_COLUMNS``: (n,) events that each saw, (n,) its user, numbered from 0."""
    recent = pc.list_value_length(rows["recent_event_ts"])
    events = load_int64(rows["v_seq_len"]) + load_int64(pc.fill_null(recent, 0).cast(pa.int64()))
    users = rows["user_id"].combine_chunks().dictionary_encode().indices
    return events.astype(np.int32), users.to_numpy()
