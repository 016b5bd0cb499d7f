"""Value: a feature on its way through a plan, per row or per distinct entry.

The string column ``["a", "b", None, "a"]`` enters as ``Value(entries=pa.array(["a", "b"]), codes=[0, 1, 0, 0],
valid=[True, True, False, True])``. Elementwise ops replace ``entries`` alone: they cost what the referenced distinct
entries cost. ``finish`` gathers by ``codes`` once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.core.ragged import copy_ranges, offsets_of, ranges_index
from thinrow.jagged import Column, Jagged

Entries: TypeAlias = npt.NDArray[Any] | pa.Array


@dataclass(frozen=True, slots=True)
class Value:
    """Attributes:
    entries: (n,) numbers of the rows, or, with ``codes``, (d,) numbers or strings of the distinct entries; of vectors
        (n, width) or (d, width), of lists their elements one after another.
    codes: (n,) row -> entry; None where entries are the rows.
    valid: (n,) bool, False where null; None where nothing is null.
    offsets: (rows + 1,) of a jagged value; None of a flat one.
    lists: (d + 1,), where an entry is a list: those elements are ``entries[lists[i]:lists[i + 1]]``; else None.
    """

    entries: Entries
    codes: npt.NDArray[np.int32] | None
    valid: npt.NDArray[np.bool_] | None
    offsets: npt.NDArray[np.int64] | None
    lists: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        if self.codes is not None:
            return len(self.codes)
        return len(self.entries) if self.lists is None else len(self.lists) - 1

    def take(self, index: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64] | None) -> Value:
        """The elements at ``index``, regrouped by ``offsets``."""
        valid = None if self.valid is None else self.valid[index]
        if self.codes is not None:
            return Value(self.entries, self.codes[index], valid, offsets, self.lists)
        if self.lists is not None:
            return Value(self.entries, index.astype(np.int32), valid, offsets, self.lists)
        return Value(self.entries[index], None, valid, offsets)

    def take_ranges(self, start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> Value:
        """The elements of half-open ranges, each range a row; long ranges are copied as slices."""
        offsets = offsets_of(np.maximum(stop - start, 0))
        if self.codes is None and self.lists is not None:
            return self.take(ranges_index(start, stop)[0], offsets)
        valid = None if self.valid is None else copy_ranges(self.valid, start, stop)
        if self.codes is not None:
            return Value(self.entries, copy_ranges(self.codes, start, stop), valid, offsets, self.lists)
        return Value(copy_ranges(self.entries, start, stop), None, valid, offsets)

    def spread(self, offsets: npt.NDArray[np.int64] | None, op: str) -> Value:
        """The value with one element for each of the jagged rows of ``offsets``: a flat value stands beside every
        element of its row. Raises InputError where rows do not match."""
        if offsets is None or self.offsets is offsets:
            return self
        rows = (len(self) if self.offsets is None else len(self.offsets) - 1), len(offsets) - 1
        if rows[0] != rows[1]:
            raise InputError(f"{op} of a column of {rows[0]} rows with one of {rows[1]}; they must be as many")
        if self.offsets is None:
            return self.take(np.repeat(np.arange(rows[0]), np.diff(offsets)), offsets)
        if not np.array_equal(self.offsets, offsets):
            raise InputError(f"{op} of jagged columns whose rows differ in length; truncate both alike, or neither")
        return self

    def numbers(self) -> npt.NDArray[Any]:
        """(n,) numbers of the rows, 0 where null; (n, width) of vectors."""
        assert isinstance(self.entries, np.ndarray)
        rows = self.entries
        if self.codes is not None:
            rows = rows[self.codes] if len(rows) else np.zeros((len(self.codes), *rows.shape[1:]), rows.dtype)
        if self.valid is None:
            return rows
        return np.where(self.valid if rows.ndim == 1 else self.valid[:, None], rows, rows.dtype.type(0))

    def elements(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Of lists: the elements of all rows one after another, and (n + 1,) offsets; a null row is an empty list."""
        assert isinstance(self.entries, np.ndarray)
        assert self.lists is not None
        start, stop = self.lists[:-1], self.lists[1:]
        if self.codes is not None:
            start, stop = (b[self.codes] if len(b) else np.zeros(len(self.codes), np.int64) for b in (start, stop))
        if self.valid is not None:
            stop = np.where(self.valid, stop, start)
        return copy_ranges(self.entries, start, stop), offsets_of(stop - start)


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
    if value.lists is not None:
        elements, lists = value.elements()
        column = Column(elements, value.valid, None, lists)
    elif isinstance(value.entries, np.ndarray):
        column = Column(value.numbers(), value.valid)
    else:
        assert value.codes is not None
        column = Column(value.codes, value.valid, value.entries)
    return column if value.offsets is None else Jagged(column, value.offsets)


def aligned(values: Sequence[Value], op: str) -> tuple[list[Value], npt.NDArray[np.int64] | None]:
    """Values of as many elements, in the rows of the first that has rows, and these rows.

    Raises:
        InputError: rows or elements do not match.
    """
    jagged = [v.offsets for v in values if v.offsets is not None]
    offsets = jagged[0] if jagged else None
    parts = [v.spread(offsets, op) for v in values]
    if len({len(p) for p in parts}) > 1:
        raise InputError(f"{op} of columns of {', '.join(str(len(p)) for p in parts)} values; they must be as many")
    return parts, offsets


def united_mask(values: Sequence[Value]) -> npt.NDArray[np.bool_] | None:
    """(n,) False where any of the values is null; None where none ever is."""
    masks = [v.valid for v in values if v.valid is not None]
    return np.logical_and.reduce(masks) if masks else None


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
