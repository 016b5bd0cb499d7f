"""Passes: the rows of events that a causal model runs over, one for all requests of a user that share a start.

Worked example. User 7 has events at 10, 20, 30, 40 ms, of which that at 20 ms arrived late, after request A::

    A at 35 ms   sees events 0   2       a pass of its own   [0 2]        A sees its first 2
    B at 35 ms   sees events 0 1 2       one pass            [0 1 2 3]    B sees its first 3
    C at 45 ms   sees events 0 1 2 3                                      C sees its first 4

**The shared-pass rule.** Under a causal mask an event sees itself and what is before it in its pass, and a request sees
a prefix. So one pass gives every request exactly what a pass of its own would give, if (1) the requests start at the
same event and (2) each sees *every* event of its slice: then its visible set is closed under the mask. A request that
an event of its slice is hidden from (late, or corrected since) gets a pass of its own; a shared one would carry that
event into its neighbours' states, and from there to the request. (3) What a model reads of an event must not depend on
the request: here that holds by type, since only ``SharedHistories.events`` goes in; positions count from the start of
the pass, never from its end. A mask under which a static part at the start sees itself whole is closed for requests
that see all of that part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.core.users import distinct
from thinrow.jagged.events import Events
from thinrow.jagged.shared import SharedHistories

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Passes:
    """Attributes:
    index: (S,) int64, positions in ``histories.events``, pass after pass, in order of (event_ts, arrival).
    offsets: (P + 1,) int64; pass p is ``index[offsets[p]:offsets[p + 1]]``.
    pass_of: (X,) int64, example -> pass.
    visible: (X,) int64, example x sees the first ``visible[x]`` events of its pass.
    same: (E,) int64, equal numbers for copies of one event; None where there is one of each.
    """

    index: Ints
    offsets: Ints
    pass_of: Ints
    visible: Ints
    same: Ints | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def order(self) -> npt.NDArray[np.intp]:
        """(X,) the examples by pass, those of a pass by what they see."""
        return np.lexsort((self.visible, self.pass_of))


def copies_of(events: Events) -> Ints | None:
    """(E,) the first event of the batch that each is a copy of: a user of several base batches is there several times.
    None where nobody is."""
    known, number = distinct(events.users)
    if len(known) == len(events.users):
        return None
    owner, arrival = np.repeat(number, np.diff(events.offsets)), np.asarray(events.arrival)
    order = np.lexsort((arrival, owner))
    begins = np.append(True, (np.diff(owner[order]) != 0) | (np.diff(arrival[order]) != 0))[: len(order)]
    first = np.empty(len(order), np.int64)
    first[order] = order[begins][np.cumsum(begins) - 1]
    return first


def plan_passes(histories: SharedHistories, *, share: bool = True, static: int = 0) -> Passes:
    """The passes of a batch by the rule above, each as long as its longest request needs; ``share=False`` gives every
    request a pass of its own (the oracle of the shared ones).

    ``static`` is for masks under which the first so many events of a pass see each other: requests that see as many
    share passes, and those that see fewer share others, in which no event sees a later one.
    """
    n = len(histories)
    # Requests that must stand alone get a number of their own, the others 0.
    alone = np.zeros(n, np.int64)
    own = ~histories.exact if share else np.ones(n, np.bool_)
    alone[own] = np.arange(1, own.sum() + 1)
    short = (histories.stop - histories.start < static).astype(np.int64)
    key = np.stack([histories.user_of, histories.start, alone, short], axis=1)
    distinct, pass_of = np.unique(key, axis=0, return_inverse=True)
    pass_of = pass_of.reshape(n).astype(np.int64)
    stop = distinct[:, 1].copy()
    np.maximum.at(stop, pass_of, histories.stop)
    index, offsets = ranges_index(distinct[:, 1], stop)
    visible = histories.stop - histories.start
    if not histories.exact.all():
        index, offsets, visible = _drop_hidden(histories, pass_of, index, offsets, visible)
    return Passes(index, offsets, pass_of, visible)


def _drop_hidden(
    histories: SharedHistories, pass_of: Ints, index: Ints, offsets: Ints, visible: Ints
) -> tuple[Ints, Ints, Ints]:
    """Take out of the passes of inexact requests what those do not see."""
    inexact = np.flatnonzero(~histories.exact)
    n_passes = len(offsets) - 1
    bound = np.zeros(n_passes, np.int64)
    checked = np.zeros(n_passes, np.bool_)
    bound[pass_of[inexact]], checked[pass_of[inexact]] = histories.bound[inexact], True
    of_event = np.repeat(np.arange(n_passes), np.diff(offsets))
    events, limit = histories.events, bound[of_event]
    seen = (events.arrival[index] <= limit) & (events.hidden_from[index] > limit)
    keep = seen | ~checked[of_event]
    kept = offsets_of(keep)[offsets]
    lengths = visible.copy()
    lengths[inexact] = np.diff(kept)[pass_of[inexact]]
    return index[keep], kept, lengths
