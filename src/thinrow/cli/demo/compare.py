"""Element for element: a rebuilt history against the fat row of the same request."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.cli.demo.fat_rows import NULL, FatBatch
from thinrow.jagged import Column, SharedHistories


def count_mismatches(ours: SharedHistories, fat: FatBatch, dictionaries: dict[str, pa.Array]) -> int:
    """Number of examples that differ from their fat row in length or in any element of any column of ``fat``.

    Example i of ``ours`` belongs to row i of ``fat``. Floats are compared by their bits.
    """
    index, offsets = ours.positions()
    wrong = np.diff(offsets) != np.diff(fat.offsets)
    if wrong.any():
        # Rows of unequal length are wrong as they are; the others are compared beside each other.
        same = np.flatnonzero(~wrong)
        if len(same) == 0:
            return int(wrong.sum())
        return int(wrong.sum()) + count_mismatches(ours.select(same), fat.take(same), dictionaries)
    differs = np.zeros(len(index), np.bool_)
    for name, values in fat.columns.items():
        column = Column(ours.events.event_ts) if name == "event_ts" else ours.events.columns[name]
        differs |= _bits(fat_values(column, dictionaries.get(name))[index]) != _bits(values)
    example = np.repeat(np.arange(len(wrong)), np.diff(offsets))
    return len(np.unique(example[differs]))


def fat_values(column: Column, dictionary: pa.Array | None) -> npt.NDArray[Any]:
    """Values as a fat row has them: codes of ``dictionary`` for strings (-2 for a string it lacks), -1 for null."""
    values = column.values
    if column.dictionary is not None:
        codes = pc.index_in(column.dictionary, dictionary).fill_null(-2).to_numpy(zero_copy_only=False)
        values = codes[values] if len(codes) else values
    return values if column.valid is None else np.where(column.valid, values, NULL)


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.view(np.dtype(f"i{values.itemsize}")) if values.dtype.kind == "f" else values
