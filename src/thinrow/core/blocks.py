"""Blocks: arrays that lie apart, and their addresses, which compiled loops read them by.

Three blocks of a matrix have three addresses; those of a fourth one that is appended are added to them. Asking an array
takes half a microsecond, so that of a thousand blocks all would take longer than what is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Blocks(list[npt.NDArray[Any]]):
    """Blocks are only appended: what is there stays where it is."""

    _known: Ints = np.empty(0, np.int64)

    def __getstate__(self) -> None:
        """Of a copy's blocks the addresses are others."""

    @property
    def addresses(self) -> Ints:
        """(len,) int64, of the first byte of each."""
        if len(self._known) < len(self):
            self._known = np.concatenate([self._known, _asked(self[len(self._known) :])])
        return self._known


def addresses_of(blocks: Sequence[npt.NDArray[Any]]) -> Ints:
    """(n,) int64, of the first byte of each."""
    return blocks.addresses if isinstance(blocks, Blocks) else _asked(blocks)


def _asked(blocks: Sequence[npt.NDArray[Any]]) -> Ints:
    return np.array([block.ctypes.data for block in blocks], np.int64)
