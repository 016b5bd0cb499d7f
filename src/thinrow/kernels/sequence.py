"""SequenceLayout: rows of context, history and targets that attend to each other; who sees whom, in words.

A row is ``[context | history | targets]``, any part of which may be empty. Queries and keys are the same tokens.

- A **context** token (the user's profile; MTGR's static long sequence) sees all context tokens of its row and nothing
  else. All tokens of the row see it. It does not see the history, which sees it: what is known late would else reach
  what came early, through the next layer.
- A **history** token sees the context, itself, and the history before it in the row. With a ``window`` of W it sees, of
  what is before it, only the W newest tokens. With ``first=n`` it also sees the n oldest tokens of the history as far
  as they are before it (semi-local attention).
- A **target** (a candidate) of a request that has seen v history tokens stands at place v, behind the v-th: it sees the
  context, those v history tokens and itself, and no other target, of its own request or of another.
- **Where targets and a window meet**, every target sees the W newest of the v tokens that its request has seen, and
  itself. Where a target stands among the targets changes nothing: a window counts history, never other targets. Context
  tokens are outside any window, and so are the ``first`` ones.

So many requests of a user share one row: each target says what its request has seen (``seen``), or its request's time
(``SequenceLayout.by_time``, MTGR's dynamic mask: what is known before the request and nothing later).

Worked example, one context token, three events, two targets, the first of a request that has seen one event; window 1::

    token      0 context   1 event   2 event   3 event   4 target   5 target
    sees       0           0 1       0 1 2     0 2 3     0 1 4      0 3 5
    position   -1          0         1         2         1          3
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.kernels.layout import AttentionLayout, Ints, check_offsets, owned


class SequenceLayout(AttentionLayout):
    """An ``AttentionLayout`` of rows ``[context | history | targets]``; the rules are in the module's words.

    Args:
        offsets: (P + 1,) bounds of the rows.
        context: how many context tokens each row begins with, (P,) or one number for all.
        targets: how many targets each row ends with, the same.
        seen: (M,) for the M targets of all rows, how many history tokens of its row each has seen; None: all of them.
        window: how many history tokens before its own place a token sees at most; None: all of them.
        first: how many of the oldest history tokens are seen in spite of the window.

    Attributes:
        positions: (T,) int64: of history 0, 1, ... within its row; of a target what it has seen; of context tokens the
            negative numbers before 0.

    Raises:
        InputError: counts that do not fit into their rows, or another value out of range.
    """

    positions: Ints

    def __init__(
        self,
        offsets: npt.ArrayLike,
        *,
        context: npt.ArrayLike = 0,
        targets: npt.ArrayLike = 0,
        seen: npt.ArrayLike | None = None,
        window: int | None = None,
        first: int = 0,
    ) -> None:
        rows = _Rows(offsets, context, targets)
        if (window is not None and window < 0) or first < 0:
            raise InputError(f"window={window} and first={first}; neither may be negative")
        token, n_context = rows.token, rows.n_context
        place = np.minimum(token - n_context, rows.n_history)
        if seen is not None:
            place[rows.is_target] = rows.checked(seen)
        # The history that a token sees is [low, high), counted from the row's first event.
        high = np.where(rows.is_context, 0, place + ~rows.is_target)
        low = np.zeros_like(high) if window is None else np.clip(place - window, 0, high)
        starts, stops = [np.zeros_like(token)], [n_context + (high if window is None else np.minimum(high, first))]
        if window is not None:
            starts.append(np.maximum(n_context + low, stops[0]))
            stops.append(np.maximum(n_context + high, starts[-1]))
        if rows.is_target.any():
            starts.append(np.where(rows.is_target, token, stops[-1]))
            stops.append(starts[-1] + rows.is_target)
        super().__init__(rows.offsets, rows.offsets, np.stack(starts, axis=1), np.stack(stops, axis=1))
        place.flags.writeable = False
        object.__setattr__(self, "positions", place)

    @staticmethod
    def by_time(
        offsets: npt.ArrayLike,
        times: npt.ArrayLike,
        *,
        context: npt.ArrayLike = 0,
        targets: npt.ArrayLike = 0,
        window: int | None = None,
        first: int = 0,
    ) -> SequenceLayout:
        """The layout in which a target has seen the history tokens of its row that are earlier than itself.

        ``times`` is (T,) int64: of an event when it happened, of a target when its request came; those of context
        tokens are not read. A history token sees those before it in the row, also those of its own time; a target none
        of its own time.

        Raises:
            InputError: as the constructor; or the history of a row is not in the order of its times.
        """
        rows, when = _Rows(offsets, context, targets), owned("times", times)
        if len(when) != len(rows.token):
            raise InputError(f"times has {len(when)} entries for {len(rows.token)} tokens; pass one a token")
        is_history = ~(rows.is_context | rows.is_target)
        row, when_seen = rows.row[is_history], when[is_history]
        wrong = np.flatnonzero((np.diff(when_seen) < 0) & (np.diff(row) == 0))
        if len(wrong):
            i = int(wrong[0])
            raise InputError(
                f"the history of row {row[i]} goes from time {when_seen[i]} back to {when_seen[i + 1]}; sort it by time"
            )
        # Targets before events of the same row and time: what stands before a target in this order, it has seen.
        is_event = np.concatenate([np.ones(len(row), np.bool_), np.zeros(int(rows.is_target.sum()), np.bool_)])
        all_rows = np.concatenate([row, rows.row[rows.is_target]])
        order = np.lexsort((is_event, np.concatenate([when_seen, when[rows.is_target]]), all_rows))
        before = np.empty(len(order), np.int64)
        before[order] = np.cumsum(is_event[order])
        first_of_row = np.concatenate([[0], np.cumsum(rows.history)])[all_rows]
        seen = (before - first_of_row)[len(row) :]
        return SequenceLayout(
            rows.offsets, context=rows.context, targets=rows.targets, seen=seen, window=window, first=first
        )


class _Rows:
    """The tokens of rows that have been held against their bounds: place within the row, row, and kind."""

    def __init__(self, offsets: npt.ArrayLike, context: npt.ArrayLike, targets: npt.ArrayLike) -> None:
        self.offsets = owned("offsets", offsets)
        check_offsets("offsets", self.offsets)
        lengths = np.diff(self.offsets)
        self.context, self.targets = _counts("context", context, lengths), _counts("targets", targets, lengths)
        self.history = lengths - self.context - self.targets
        if (self.history < 0).any():
            p = int(np.argmax(self.history < 0))
            raise InputError(
                f"row {p} has {lengths[p]} tokens but context={self.context[p]} and targets={self.targets[p]}; "
                "together they must fit into the row"
            )
        self.row = np.repeat(np.arange(len(lengths)), lengths)
        self.token = np.arange(len(self.row)) - self.offsets[self.row]
        self.n_context, self.n_history = self.context[self.row], self.history[self.row]
        self.is_context = self.token < self.n_context
        self.is_target = self.token >= self.n_context + self.n_history

    def checked(self, seen: npt.ArrayLike) -> Ints:
        counts, most = owned("seen", seen), self.n_history[self.is_target]
        if len(counts) != len(most):
            raise InputError(f"seen has {len(counts)} entries and there are {len(most)} targets; pass one a target")
        wrong = (counts < 0) | (counts > most)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise InputError(f"target {i} has seen {counts[i]} tokens of a history of {most[i]}; pass 0 to {most[i]}")
        return counts


def _counts(name: str, values: npt.ArrayLike, lengths: Ints) -> Ints:
    counts = np.asarray(values)
    counts = owned(name, np.broadcast_to(counts, lengths.shape) if counts.ndim == 0 else counts)
    if len(counts) != len(lengths):
        raise InputError(f"{name} has {len(counts)} entries and there are {len(lengths)} rows; pass one a row")
    if (counts < 0).any():
        raise InputError(f"{name} has {counts.min()}; no count may be negative")
    return counts
