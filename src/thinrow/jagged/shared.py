"""SharedHistories: each user's events once, and per example a slice and a bound.

Worked example: user 7 has events at 10, 20, 30, 40 ms (arrivals 1 to 4). Two requests, at 25 ms and at 45 ms,
newest 2::

    events      10  20  30  40           start  stop  bound
    request A    [-----)                 0      2     2
    request B            [-----)         2      4     4

Event i is visible to an example when ``start <= i < stop`` and ``arrival[i] <= bound < hidden_from[i]``. Where no event
is late or restated the slice alone says it (``exact``). Nothing is copied until somebody asks for copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.check import as_rows
from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.jagged.column import Column
from thinrow.jagged.events import Events
from thinrow.jagged.jagged import Jagged


class _Cut:
    """Which rows of a column the examples have, found once for all columns.

    Attributes:
        offsets: (X + 1,) events of each example.
        rows: their positions; one range, where the examples' slices lie one after another; or starts and stops.
    """

    __slots__ = ("offsets", "rows")

    def __init__(self, offsets: npt.NDArray[np.int64], rows: Any) -> None:
        self.offsets, self.rows = offsets, rows

    @classmethod
    def of(cls, histories: SharedHistories) -> _Cut:
        """That of some examples."""
        start, stop, n = histories.start, histories.stop, len(histories.start)
        if n == 1 and histories.exact[0]:
            first, end = start.tolist()[0], stop.tolist()[0]
            return cls(np.array([0, end - first]), slice(first, end))
        if not histories.exact.all():
            index, offsets = histories.positions()
            return cls(offsets, index)
        offsets = offsets_of(stop - start)
        if n and (start[1:] == stop[:-1]).all() and start[0] <= stop[-1]:
            return cls(offsets, slice(int(start[0]), int(stop[-1])))
        return cls(offsets, (start, stop))

    def taken(self, column: Column) -> Column:
        """The rows of a column: copied, or as they lie there, where they are one range."""
        rows = self.rows
        if isinstance(rows, tuple):
            return column.take_ranges(*rows)
        if not isinstance(rows, slice):
            return column.take(rows)
        if rows.stop - rows.start == len(column):
            return column
        if column.offsets is not None:
            return column.take_ranges(np.array([rows.start]), np.array([rows.stop]))
        valid = None if column.valid is None else column.valid[rows]
        return Column(column.values[rows], valid, column.dictionary)


@dataclass(frozen=True, slots=True)
class SharedHistories:
    """Attributes:
    events: the unique events, by user, each user's in order of (event_ts, arrival).
    user_of: (X,) int64, example -> row of ``events.users``.
    start: (X,) int64, first position in ``events`` (inclusive) of the example's window.
    stop: (X,) int64, last position (exclusive).
    bound: (X,) int64, highest arrival number that the example could see (inclusive).
    exact: (X,) bool, whether every event of the slice is visible to the example.
    """

    events: Events
    user_of: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    bound: npt.NDArray[np.int64]
    exact: npt.NDArray[np.bool_]
    #: What ``to_jagged`` goes by, once it was asked for.
    _cut: list[_Cut] = field(default_factory=list, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.user_of)

    def positions(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Positions of the visible events of every example one after another, and their (X + 1,) offsets."""
        index, offsets = ranges_index(self.start, self.stop)
        if self.exact.all():
            return index, offsets
        bound = np.repeat(self.bound, np.diff(offsets))
        keep = (self.events.arrival[index] <= bound) & (self.events.hidden_from[index] > bound)
        kept = np.zeros(len(index) + 1, np.int64)
        np.cumsum(keep, out=kept[1:])
        return index[keep], kept[offsets]

    def lengths(self) -> npt.NDArray[np.int64]:
        """(X,) number of visible events of each example."""
        if self.exact.all():
            return self.stop - self.start
        return np.diff(self.positions()[1])

    def to_jagged(self, name: str) -> Jagged:
        """One column of each example's events (``event_ts`` and ``arrival`` are names too): a copy, or, where the
        examples' slices are one range of ``events``, that range as it lies there. Copy it before you write into it."""
        if not self._cut:
            # Two threads may both do it: either is right.
            self._cut.append(_Cut.of(self))
        cut = self._cut[0]
        return Jagged(cut.taken(self._column(name)), cut.offsets)

    def to_padded(self, name: str, width: int, fill: float = 0) -> npt.NDArray[Any]:
        """(X, width) copy: each example's newest ``width`` events, left-aligned, the rest ``fill``."""
        return self.to_jagged(name).to_padded(width, fill)

    def select(self, examples: npt.NDArray[np.intp]) -> SharedHistories:
        """The given examples with the users that they need; events of the others are dropped."""
        examples = as_rows(examples, len(self.user_of))
        used, user_of = np.unique(self.user_of[examples], return_inverse=True)
        events = self.events if len(used) == len(self.events.users) else self.events.take_users(used)
        shift = (events.offsets[:-1] - self.events.offsets[:-1][used])[user_of] if len(used) else np.empty(0, np.int64)
        return SharedHistories(
            events,
            user_of.astype(np.int64),
            self.start[examples] + shift,
            self.stop[examples] + shift,
            self.bound[examples],
            self.exact[examples],
        )

    @staticmethod
    def concat(parts: Sequence[SharedHistories]) -> SharedHistories:
        """Examples of ``parts`` one after another. A user in two parts stays there twice: windows may differ."""
        if len(parts) == 1:
            return parts[0]
        n_events = np.cumsum([0, *(len(p.events) for p in parts)])
        n_users = np.cumsum([0, *(len(p.events.users) for p in parts)])
        shifted = list(zip(parts, n_events[:-1], n_users[:-1], strict=True))
        events = Events.concat([p.events for p in parts])
        return SharedHistories(
            events,
            np.concatenate([p.user_of + u for p, _, u in shifted]),
            np.concatenate([p.start + e for p, e, _ in shifted]),
            np.concatenate([p.stop + e for p, e, _ in shifted]),
            np.concatenate([p.bound for p in parts]),
            np.concatenate([p.exact for p in parts]),
        )

    def _column(self, name: str) -> Column:
        if isinstance(name, str) and name in ("event_ts", "arrival"):
            return Column(getattr(self.events, name))
        try:
            return self.events.columns[name]
        except (KeyError, TypeError):
            there = ", ".join(("event_ts", "arrival", *self.events.columns))
            raise InputError(f"no column {name!r:.80} was read; there are {there}") from None
