"""Sketch: about how often keys were seen that have no row yet, a byte or two for each.

Seeing (7, 7, 9) gives counts (1, 2, 1); a key whose cells are all shared with others may be counted too high.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.kernels import kernel

Ints = npt.NDArray[np.int64]

#: Sightings a cell after which counts are halved.
_SIGHTINGS = 8


class Sketch:
    """A count-min sketch with conservative update (Estan and Varghese 2002), of two rows.

    Attributes:
        cells: (2, m) uint8.
        sightings: since the counts were last halved.
    """

    def __init__(self, n_cells: int) -> None:
        """``n_cells``: of a row, a power of two."""
        self.cells = np.zeros((2, n_cells), np.uint8)
        self.sightings = 0

    def seen(self, keys: Ints) -> npt.NDArray[np.uint8]:
        """Count each of ``keys`` (n,), one after another; (n,) its count after that, 255 for more."""
        counts: npt.NDArray[np.uint8] = kernel("count_keys")(self.cells, keys)
        self.sightings += len(keys)
        if self.sightings >= _SIGHTINGS * self.cells.shape[1]:
            self.cells >>= 1
            self.sightings = 0
        return counts

    @classmethod
    def of(cls, cells: npt.NDArray[np.uint8], sightings: int, n_cells: int) -> Sketch:
        """As it was saved. Raises InputError where the cells are not those of ``n_cells``."""
        if cells.shape != (2, n_cells) or cells.dtype != np.uint8:
            raise InputError(f"sketch of the state is {cells.dtype} {cells.shape}; it must be uint8 {(2, n_cells)}")
        sketch = cls(n_cells)
        sketch.cells[:] = cells
        sketch.sightings = sightings
        return sketch
