"""Fill: nulls -> a value.

With value -1: [5, null, 7] -> [5, -1, 7], and nothing is null any more; with ``nan=True`` NaN is filled as well. A
string fills a column of strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import InputError
from thinrow.features.node import Node, as_number
from thinrow.features.value import Value


@dataclass(frozen=True)
class Fill(Node):
    """The dtype stays; ``value`` must be one of it."""

    input: Node
    value: float | str
    nan: bool = False
    op: ClassVar[str] = "fill"

    def __post_init__(self) -> None:
        object.__setattr__(self, "nan", bool(self.nan))
        if isinstance(self.value, str):
            return
        object.__setattr__(self, "value", as_number("fill", "value", self.value))

    @property
    def operands(self) -> tuple[Node, ...]:
        return (self.input,)

    def evaluate(self, operands: Sequence[Value]) -> Value:
        (value,) = operands
        if isinstance(value.entries, pa.Array):
            return self._texts(value, value.entries)
        entries = value.entries
        filled = self.number(entries.dtype)
        if self.nan and entries.dtype.kind == "f":
            entries = np.where(np.isnan(entries), filled, entries)
        if value.valid is None:
            return Value(entries, value.codes, None, value.offsets)
        rows = Value(entries, value.codes, value.valid, value.offsets).numbers()
        return Value(np.where(value.valid, rows, filled), None, None, value.offsets)

    def number(self, dtype: np.dtype[Any]) -> np.generic:
        """The value in a column of numbers. Raises InputError where the dtype does not hold it."""
        if isinstance(self.value, str):
            raise InputError(f"fill of a column of {dtype} with {self.value!r}; give a number")
        if dtype.kind != "f" and (self.value != int(self.value) or not _holds(dtype, int(self.value))):
            raise InputError(f"fill of a column of {dtype} with {self.value}; it holds no such value")
        number: np.generic = dtype.type(self.value)
        return number

    def _texts(self, value: Value, entries: pa.Array) -> Value:
        if not isinstance(self.value, str):
            raise InputError(f"fill of a column of {entries.type} with {self.value}; give a string")
        if value.valid is None or value.codes is None:
            return value
        filled = pa.scalar(self.value).cast(entries.type)
        at = pc.index(entries, filled).as_py()
        if at < 0:
            at, entries = len(entries), pa.concat_arrays([entries, pa.array([filled])])
        return Value(entries, np.where(value.valid, value.codes, np.int32(at)), None, value.offsets)


def _holds(dtype: np.dtype[Any], value: int) -> bool:
    if dtype.kind == "b":
        return value in (0, 1)
    ends = np.iinfo(dtype)
    return int(ends.min) <= value <= int(ends.max)
