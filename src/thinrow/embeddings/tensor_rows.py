"""RowTensor: ``RowBlocks`` as one tensor of any device, with room for more rows than there are.

Blocks would make each look-up an operation for every block; one tensor makes it one operation, and is copied when it is
full: it doubles, so that a row is copied about once in all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MIN_ROWS = 1024


class RowTensor:
    """(n, width) numbers of one dtype.

    Attributes:
        blocks: what update kernels are given: the tensor (capacity, width); rows from n on hold nothing.
        fill: what new rows hold; None for whatever was there, since they are written next.
    """

    def __init__(
        self,
        width: int,
        dtype: npt.DTypeLike,
        device: torch.device,
        fill: float | None = 0.0,
        most: int | None = None,
    ) -> None:
        """``most``: rows beyond which it has no room to spare; None for any number."""
        self.width, self.dtype, self.fill = width, np.dtype(dtype), fill
        self._most, self._n = most, 0
        capacity = _MIN_ROWS if most is None else min(_MIN_ROWS, most)
        self.blocks = torch.empty((capacity, width), dtype=getattr(torch, self.dtype.name), device=device)

    def __len__(self) -> int:
        return self._n

    @property
    def rows(self) -> Tensor:
        """(n, width) view."""
        return self.blocks[: self._n]

    def grow(self, n_rows: int) -> None:
        """Grow to ``n_rows`` rows, at least as many as now; new ones hold ``fill``."""
        if n_rows > len(self.blocks):
            double = 2 * len(self.blocks)
            capacity = max(n_rows, double if self._most is None else min(double, self._most))
            larger = self.blocks.new_empty((capacity, self.width))
            larger[: self._n] = self.rows
            self.blocks = larger
        if self.fill is not None:
            self.blocks[self._n : n_rows] = self.fill
        self._n = n_rows

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Grow by ``rows`` (m, width)."""
        first = self._n
        self.grow(first + len(rows))
        self.blocks[first : self._n] = torch.from_numpy(rows)

    def move(self, source: Tensor, target: Tensor, n_rows: int) -> None:
        """Put rows ``source`` in the places ``target``, then end at ``n_rows`` rows, fewer than now."""
        self.blocks[target] = self.blocks[source]
        self._n = n_rows

    def to_array(self) -> npt.NDArray[Any]:
        """(n, width) copy."""
        return np.array(self.rows.cpu().numpy())
