"""Value: a feature on its way through a plan, per row or per distinct entry.

The string column ``["a", "b", None, "a"]`` enters as ``Value(entries=pa.array(["a", "b"]), codes=[0, 1, 0, 0],
valid=[True, True, False, True])``. Elementwise ops replace ``entries`` alone: they cost what the referenced distinct
entries cost. ``finish`` gathers by ``codes`` once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.jagged import Column, Jagged

Entries: TypeAlias = npt.NDArray[Any] | pa.Array


@dataclass(frozen=True, slots=True)
class Value:
    """Attributes:
    entries: (n,) numbers of the rows, or, with ``codes``, (d,) numbers or strings of the distinct entries.
    codes: (n,) row -> entry; None where entries are the rows.
    valid: (n,) bool, False where null; None where nothing is null.
    offsets: (rows + 1,) of a jagged value; None of a flat one.
    """

    entries: Entries
    codes: npt.NDArray[np.int32] | None
    valid: npt.NDArray[np.bool_] | None
    offsets: npt.NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.entries if self.codes is None else self.codes)

    def take(self, index: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64] | None) -> Value:
        """The elements at ``index``, regrouped by ``offsets``."""
        valid = None if self.valid is None else self.valid[index]
        if self.codes is None:
            return Value(self.entries[index], None, valid, offsets)
        return Value(self.entries, self.codes[index], valid, offsets)

    def numbers(self) -> npt.NDArray[Any]:
        """(n,) numbers of the rows, 0 where null."""
        assert isinstance(self.entries, np.ndarray)
        rows = self.entries
        if self.codes is not None:
            rows = rows[self.codes] if len(rows) else np.zeros(len(self.codes), rows.dtype)
        return rows if self.valid is None else np.where(self.valid, rows, rows.dtype.type(0))


def start(source: Column | Jagged) -> Value:
    """The value of a plan's input; of a dictionary only the entries that are referenced.

    Raises:
        InputError: rows hold lists or vectors.
    """
    column = source.column if isinstance(source, Jagged) else source
    if column.offsets is not None or column.size:
        raise InputError(
            f"a feature op of a column of {column.shape_name}; ops take single values: output the column itself"
        )
    offsets = source.offsets if isinstance(source, Jagged) else None
    if column.dictionary is None:
        return Value(column.values, None, column.valid, offsets)
    codes, entries = _referenced(column.values, column.valid, column.dictionary)
    if not column.is_text:
        entries = entries.to_numpy()
    return Value(entries, codes, column.valid, offsets)


def finish(value: Value) -> Column | Jagged:
    """The value as the plan's output."""
    if isinstance(value.entries, np.ndarray):
        column = Column(value.numbers(), value.valid)
    else:
        assert value.codes is not None
        column = Column(value.codes, value.valid, value.entries)
    return column if value.offsets is None else Jagged(column, value.offsets)


def _referenced(
    codes: npt.NDArray[np.int32], valid: npt.NDArray[np.bool_] | None, dictionary: pa.Array
) -> tuple[npt.NDArray[np.int32], pa.Array]:
    n = len(dictionary)
    live = codes if valid is None else codes[valid]
    if n <= 8 * len(live):
        flags = np.zeros(n, np.bool_)
        flags[live] = True
        used = np.flatnonzero(flags)
    else:
        used = np.unique(live)
    if len(used) == n:
        return codes, dictionary
    position = np.zeros(n + 1, np.int32)
    position[used] = np.arange(len(used), dtype=np.int32)
    kept = position[codes] if valid is None else position[np.where(valid, codes, n)]
    return kept, dictionary.take(pa.array(used))
