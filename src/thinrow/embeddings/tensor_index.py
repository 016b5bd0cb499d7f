"""TensorIndex: ``KeyIndex`` on any device, as keys in order beside their rows (decision 051).

Most keys are in a large part; new ones are merged into a recent part, which joins the large one when it is an eighth of
it. Inserting keys (7, -1, 7) into an empty index gives rows (0, 1, 0); then the recent part is [-1, 7] of rows [1, 0].
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinrow.embeddings.tensor_rows import RowTensor
from thinrow.kernels.dispatch import device_kernel

#: Keys of the recent part at least before it joins, and the share of the large one that it may be.
_MIN_RECENT, _RECENT_SHARE = 4096, 8


class TensorIndex:
    """The row number of every 64-bit key. Rows are numbered in order of first insertion."""

    def __init__(self, device: torch.device, most: int | None = None) -> None:
        """``most``: rows up to which keys are inserted; None for any number."""
        self._most = most
        self._of_row = RowTensor(1, "int64", device, fill=None, most=most)
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._large = self._recent = nothing, nothing

    def __len__(self) -> int:
        return len(self._of_row)

    @property
    def keys(self) -> Tensor:
        """(n,) int64 view: the key of each row."""
        return self._of_row.rows[:, 0]

    def rows(self, wanted: Tensor, *, insert: bool) -> Tensor:
        """(m,) row of each wanted key; absent ones are inserted while there is room, or -1.

        Waits for the device where it inserts: how many keys are absent decides how much memory they take.
        """
        rows: Tensor = device_kernel("find_keys")((self._large, self._recent), wanted)
        if not insert:
            return rows
        absent = torch.nonzero(rows < 0)[:, 0]
        if len(absent):
            keys, numbers, of = device_kernel("number_keys")(wanted[absent])
            numbers += len(self)
            most = len(self) + len(keys) if self._most is None else self._most
            new = numbers[of]
            rows[absent] = torch.where(new < most, new, -1)
            if len(self) + len(keys) > most:
                keys, numbers = keys[numbers < most], numbers[numbers < most]
            if len(keys):
                self._add(keys, numbers)
        return rows

    def _add(self, keys: Tensor, rows: Tensor) -> None:
        """``keys`` ascend, and are not there."""
        merge = device_kernel("merge_keys")
        self._of_row.grow(len(self) + len(keys))
        self._of_row.blocks[rows, 0] = keys
        self._recent = merge(self._recent, (keys, rows))
        if len(self._recent[0]) > max(_MIN_RECENT, len(self._large[0]) // _RECENT_SHARE):
            self._large = merge(self._large, self._recent)
            self._recent = self._recent[0][:0], self._recent[1][:0]

    def fill(self, keys: Tensor) -> None:
        """``keys`` (n,), each there once, become rows 0 to n - 1; what was there is forgotten."""
        self._of_row.grow(max(len(self), len(keys)))
        self._of_row.blocks[: len(keys), 0] = keys
        self._sort(len(keys))

    def drop(self, gone: Tensor) -> tuple[Tensor, Tensor]:
        """Forget the keys of the rows ``gone`` (n,) bool. The last rows that stay take their places.

        Returns:
            Rows that moved and where to, both ascending.
        """
        left = int((~gone).sum())
        source, target = torch.nonzero(~gone[left:])[:, 0] + left, torch.nonzero(gone[:left])[:, 0]
        self._of_row.blocks[target] = self._of_row.blocks[source]
        self._sort(left)
        return source, target

    def _sort(self, n_rows: int) -> None:
        """Keep the first ``n_rows`` rows, all in the large part."""
        nothing = torch.empty(0, dtype=torch.int64, device=self._of_row.blocks.device)
        self._of_row.move(nothing, nothing, n_rows)
        in_order, rows = torch.sort(self.keys)
        self._large, self._recent = (in_order, rows), (nothing, nothing)
