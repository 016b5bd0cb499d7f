"""Events of many users, grouped by user, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinrow.core.ragged import copy_ranges, offsets_of
from thinrow.core.units import NEVER
from thinrow.core.users import Users
from thinrow.jagged.column import Column

#: One hidden event: the time and arrival of the event that is hidden, and the arrival of its correction.
HIDE_DTYPE = np.dtype([("event_ts", "<i8"), ("arrival", "<i8"), ("hidden_from", "<i8")])


@dataclass(frozen=True, slots=True)
class Events:
    """Attributes:
    users: (U,) ids, each at most once.
    offsets: (U + 1,) int64; the events of ``users[u]`` are ``[offsets[u], offsets[u + 1])``.
    event_ts: (E,) int64 ms.
    arrival: (E,) int64, unique within a user.
    hidden_from: (E,) int64, the arrival of the correction that hides the event, else ``NEVER``.
    columns: name -> (E,) Column.
    """

    users: Users
    offsets: npt.NDArray[np.int64]
    event_ts: npt.NDArray[np.int64]
    arrival: npt.NDArray[np.int64]
    hidden_from: npt.NDArray[np.int64]
    columns: dict[str, Column]

    def __len__(self) -> int:
        return len(self.event_ts)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(U,) number of events of each user."""
        return np.diff(self.offsets)

    @classmethod
    def empty(cls, users: Users, columns: dict[str, Column]) -> Events:
        """No events for each of ``users``; ``columns`` gives names and types, its rows are dropped."""
        none = np.empty(0, np.int64)
        return cls(
            users,
            np.zeros(len(users) + 1, np.int64),
            none,
            none,
            none,
            {n: c.take(slice(0, 0)) for n, c in columns.items()},
        )

    def take_rows(self, index: npt.NDArray[np.intp], offsets: npt.NDArray[np.int64]) -> Events:
        """The events at ``index``, regrouped by ``offsets`` over the same users."""
        return Events(
            self.users,
            offsets,
            self.event_ts[index],
            self.arrival[index],
            self.hidden_from[index],
            {n: c.take(index) for n, c in self.columns.items()},
        )

    def take_users(self, rows: npt.NDArray[np.intp]) -> Events:
        """The users at ``rows`` with their events, in that order, copied."""
        start, stop = self.offsets[:-1][rows], self.offsets[1:][rows]
        return Events(
            self.users[rows],
            offsets_of(stop - start),
            copy_ranges(self.event_ts, start, stop),
            copy_ranges(self.arrival, start, stop),
            copy_ranges(self.hidden_from, start, stop),
            {n: c.take_ranges(start, stop) for n, c in self.columns.items()},
        )

    def in_time_order(self) -> Events:
        """The same events, each user's in order of (event_ts, arrival)."""
        owner = np.repeat(np.arange(len(self.users)), self.lengths)
        return self.take_rows(np.lexsort((self.arrival, self.event_ts, owner)), self.offsets)

    def visible(self, request_ts: npt.NDArray[np.int64], bound: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """(E,) whether each event is visible at its user's request: ``event_ts < request_ts[u]`` (strict),
        ``arrival <= bound[u]`` and ``hidden_from > bound[u]``."""
        t, b = np.repeat(request_ts, self.lengths), np.repeat(bound, self.lengths)
        return (self.event_ts < t) & (self.arrival <= b) & (self.hidden_from > b)


def never_hidden(n: int) -> npt.NDArray[np.int64]:
    """(n,) ``hidden_from`` of events that nothing supersedes."""
    return np.full(n, NEVER, np.int64)
