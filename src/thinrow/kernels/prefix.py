"""PrefixLayout: the layout where a query sees a prefix of its row's keys.

Worked example: user 7 has 3 events and user 8 has 2; each event sees itself and what came before::

    PrefixLayout.causal([0, 3, 5])
        q_offsets  0 3 5          k_offsets  0 3 5
        visible    1 2 3 1 2      event 4 (the second of user 8) sees keys 3 and 4

Candidates are the same thing with other numbers. Two candidates of a request that saw 1 event of user 7, one of a
request that saw all 3, none of user 8::

    PrefixLayout([0, 3, 3], [0, 3, 5], [1, 1, 3])
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.kernels.layout import AttentionLayout, Ints, check_offsets, owned


class PrefixLayout(AttentionLayout):
    """An ``AttentionLayout`` of one range a query, ``[0, visible)``.

    ``visible`` is (T,) int64, how many keys of its row a query sees, counted from the row's first:
    ``0 <= visible[i] <= keys of the row``. Any order within a row is right; ascending order is fastest.

    Raises:
        InputError: an array that is not one-dimensional and of integers, offsets that do not ascend from 0 or differ in
            length, or a number of visible keys that is out of range.
    """

    def __init__(self, q_offsets: npt.ArrayLike, k_offsets: npt.ArrayLike, visible: npt.ArrayLike) -> None:
        seen = owned("visible", visible)
        bounds = owned("q_offsets", q_offsets)
        check_offsets("q_offsets", bounds)
        if bounds[-1] != len(seen):
            raise InputError(f"q_offsets end at {bounds[-1]} but visible has {len(seen)} entries; pass one a query")
        super().__init__(bounds, owned("k_offsets", k_offsets), np.zeros((len(seen), 1), np.int64), seen[:, None])

    def _check_ranges(self) -> None:
        n_keys = np.repeat(np.diff(self.k_offsets), np.diff(self.q_offsets))
        wrong = np.flatnonzero((self.visible < 0) | (self.visible > n_keys))
        if len(wrong):
            i = int(wrong[0])
            raise InputError(
                f"query {i} sees {self.visible[i]} keys of a row that has {n_keys[i]}; clip visible to [0, {n_keys[i]}]"
            )

    @property
    def visible(self) -> Ints:
        """(T,) int64."""
        return self.stops[:, 0]

    @staticmethod
    def causal(offsets: npt.ArrayLike) -> PrefixLayout:
        """Each event sees itself and the events of its row before it; ``offsets`` are the (P + 1,) bounds of the rows.

        Raises:
            InputError: as the constructor.
        """
        bounds = owned("offsets", offsets)
        check_offsets("offsets", bounds)
        position = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
        return PrefixLayout(bounds, bounds, position + 1)
