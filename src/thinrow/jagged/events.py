"""Events of many users, grouped by user, as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.core.ragged import copy_ranges, offsets_of
from thinrow.core.units import NEVER
from thinrow.core.users import Users
from thinrow.jagged.column import Column, concat_columns

#: One hidden event: the time and arrival of the event that is hidden, and the arrival of its correction.
HIDE_DTYPE = np.dtype([("event_ts", "<i8"), ("arrival", "<i8"), ("hidden_from", "<i8")])


#: Arrival and hidden_from of events, (E,) int64 each.
VisibilityKeys: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]

_NONE = np.empty(0, np.int64)


class Events:
    """Events of many users. Never changed once made.

    Attributes:
        users: (U,) ids, each at most once.
        offsets: (U + 1,) int64; the events of ``users[u]`` are ``[offsets[u], offsets[u + 1])``.
        event_ts: (E,) int64 ms.
        columns: name -> (E,) Column.
    """

    __slots__ = ("_keys", "columns", "event_ts", "offsets", "users")

    def __init__(
        self,
        users: Users,
        offsets: npt.NDArray[np.int64],
        event_ts: npt.NDArray[np.int64],
        arrival: npt.NDArray[np.int64],
        hidden_from: npt.NDArray[np.int64],
        columns: dict[str, Column],
    ) -> None:
        self.users, self.offsets, self.event_ts, self.columns = users, offsets, event_ts, columns
        self._keys: VisibilityKeys | Callable[[], VisibilityKeys] = (arrival, hidden_from)

    @classmethod
    def lazy(
        cls,
        users: Users,
        offsets: npt.NDArray[np.int64],
        event_ts: npt.NDArray[np.int64],
        keys: Callable[[], VisibilityKeys],
        columns: dict[str, Column],
    ) -> Events:
        """Events whose ``arrival`` and ``hidden_from`` come of ``keys`` when somebody asks for them: where all events
        of a window are visible, nobody does."""
        events = cls(users, offsets, event_ts, _NONE, _NONE, columns)
        events._keys = keys
        return events

    def _visibility(self) -> VisibilityKeys:
        found = self._keys
        if not isinstance(found, tuple):
            # Two threads may both do it, and get the same.
            found = self._keys = found()
        return found

    @property
    def keys_known(self) -> bool:
        """Whether somebody has asked for ``arrival`` or ``hidden_from``, or they were given."""
        return isinstance(self._keys, tuple)

    @property
    def arrival(self) -> npt.NDArray[np.int64]:
        """(E,) int64, unique within a user."""
        return self._visibility()[0]

    @property
    def hidden_from(self) -> npt.NDArray[np.int64]:
        """(E,) int64, the arrival of the correction that hides the event, else ``NEVER``."""
        return self._visibility()[1]

    def __reduce__(self) -> tuple[Any, ...]:
        if getattr(self._keys, "travels", False):
            return Events.lazy, (self.users, self.offsets, self.event_ts, self._keys, self.columns)
        return Events, (self.users, self.offsets, self.event_ts, *self._visibility(), self.columns)

    def with_columns(self, columns: dict[str, Column]) -> Events:
        """The same events with other columns."""
        return self._derived(self.users, self.offsets, self.event_ts, lambda keys: keys, columns)

    def _derived(
        self,
        users: Users,
        offsets: npt.NDArray[np.int64],
        event_ts: npt.NDArray[np.int64],
        change: Callable[[VisibilityKeys], VisibilityKeys],
        columns: dict[str, Column],
    ) -> Events:
        """Events of these; their keys are changed ones of these, when somebody asks where nobody has yet."""
        if isinstance(self._keys, tuple):
            return Events(users, offsets, event_ts, *change(self._keys), columns)
        return Events.lazy(users, offsets, event_ts, lambda: change(self._visibility()), columns)

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
        return self._derived(
            self.users,
            offsets,
            self.event_ts[index],
            lambda keys: (keys[0][index], keys[1][index]),
            {n: c.take(index) for n, c in self.columns.items()},
        )

    def take_users(self, rows: npt.NDArray[np.intp]) -> Events:
        """The users at ``rows`` with their events, in that order, copied."""
        start, stop = self.offsets[:-1][rows], self.offsets[1:][rows]
        return self._derived(
            self.users[rows],
            offsets_of(stop - start),
            copy_ranges(self.event_ts, start, stop),
            lambda keys: (copy_ranges(keys[0], start, stop), copy_ranges(keys[1], start, stop)),
            {n: c.take_ranges(start, stop) for n, c in self.columns.items()},
        )

    @staticmethod
    def concat(parts: Sequence[Events]) -> Events:
        """The users of ``parts`` one after another (a user of two parts is there twice), each with its events."""
        base = np.cumsum([0, *(len(p) for p in parts)])
        shifted = [p.offsets[1:] + b for p, b in zip(parts, base, strict=False)]
        names = list(parts[0].columns)
        return Events.lazy(
            np.concatenate([p.users for p in parts]),
            np.concatenate([[0], *shifted]).astype(np.int64),
            np.concatenate([p.event_ts for p in parts]),
            lambda: (np.concatenate([p.arrival for p in parts]), np.concatenate([p.hidden_from for p in parts])),
            {n: concat_columns([p.columns[n] for p in parts]) for n in names},
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
