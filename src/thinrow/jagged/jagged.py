"""Jagged: rows of different lengths as one flat Column and offsets.

``[[5, 6], [], [7]]`` is ``Jagged(Column(values=[5, 6, 7]), offsets=[0, 2, 2, 3])``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.check import integer
from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.jagged.column import Column, one_array


@dataclass(frozen=True, slots=True)
class Jagged:
    """Attributes:
    column: (offsets[-1],) the flat values.
    offsets: (rows + 1,) int64; row i is ``column[offsets[i]:offsets[i + 1]]``.
    """

    column: Column
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def values(self) -> npt.NDArray[Any]:
        """The flat values (codes, for strings; (n, size) of vectors). Raises InputError for rows of lists."""
        if self.column.offsets is not None:
            raise InputError("rows of lists have no flat values; take the lists themselves from `column`")
        return self.column.values

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(rows,) length of each row."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.column.nbytes + self.offsets.nbytes

    def row(self, i: int) -> npt.NDArray[Any]:
        """Row i, a view."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def take(self, rows: npt.NDArray[np.intp]) -> Jagged:
        """The rows at ``rows``, in that order, copied."""
        start, stop = self.offsets[:-1][rows], self.offsets[1:][rows]
        return Jagged(self.column.take_ranges(start, stop), offsets_of(stop - start))

    def to_padded(self, width: int, fill: float = 0) -> npt.NDArray[Any]:
        """(rows, width): each row's *last* ``width`` values, left-aligned, the rest ``fill``; (rows, width, size) of
        vectors. Raises InputError for rows of lists."""
        integer(0)(width, "width")
        values = self.values
        out = np.full((len(self), width, *values.shape[1:]), fill, values.dtype)
        start = np.maximum(self.offsets[:-1], self.offsets[1:] - width)
        index, offsets = ranges_index(start, self.offsets[1:])
        row = np.repeat(np.arange(len(self)), np.diff(offsets))
        out[row, np.arange(len(index)) - offsets[:-1][row]] = values[index]
        return out

    def to_arrow(self) -> pa.LargeListArray:
        """A large_list array of the same rows."""
        return pa.LargeListArray.from_arrays(pa.array(self.offsets), self.column.to_arrow())

    @classmethod
    def from_arrow(
        cls, array: pa.Array | pa.ChunkedArray, dtype: str, *, ragged: bool = False, size: int = 0
    ) -> Jagged:
        """Reverse of ``to_arrow``; takes any list type without null rows. ``ragged`` and ``size`` as for
        ``Column.from_arrow``."""
        array = one_array(array)
        if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
            offsets = np.cumsum(np.append(0, array.value_lengths()), dtype=np.int64)
            return cls(Column.from_arrow(array.flatten(), dtype, ragged=ragged, size=size), offsets)
        offsets = array.offsets.to_numpy().astype(np.int64)
        flat = array.values.slice(offsets[0], offsets[-1] - offsets[0]) if len(offsets) else array.values
        column = Column.from_arrow(flat, dtype, ragged=ragged, size=size)
        return cls(column, offsets - offsets[0] if len(offsets) else np.zeros(1, np.int64))
