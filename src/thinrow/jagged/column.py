"""Column: the values of one feature, with validity, and a dictionary for strings and bytes.

Strings and bytes are never stored as Python objects. ``["a", "b", None, "a"]`` is::

    Column(values=int32 [0, 1, 0, 0], valid=[True, True, False, True], dictionary=pa.array(["a", "b"]))

The value under a null is 0 and says nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import SchemaError
from thinrow.core.ragged import copy_ranges

#: Arrow type of a column by its dtype name.
ARROW_TYPES: dict[str, pa.DataType] = {
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
}


@dataclass(frozen=True, slots=True)
class Column:
    """Attributes:
    values: (n,) the values, or int32 codes into ``dictionary``.
    valid: (n,) bool, False where null; None where nothing is null.
    dictionary: the distinct strings or bytes that codes refer to; None for fixed-width columns.
    """

    values: npt.NDArray[Any]
    valid: npt.NDArray[np.bool_] | None = None
    dictionary: pa.Array | None = None

    def __len__(self) -> int:
        return len(self.values)

    def take(self, index: npt.NDArray[np.intp] | slice) -> Column:
        """Rows at ``index`` (a slice gives views)."""
        return Column(self.values[index], None if self.valid is None else self.valid[index], self.dictionary)

    def take_ranges(self, start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> Column:
        """Rows of half-open ranges one after another, copied."""
        valid = None if self.valid is None else copy_ranges(self.valid, start, stop)
        return Column(copy_ranges(self.values, start, stop), valid, self.dictionary)

    def to_arrow(self) -> pa.Array:
        """The same values as an Arrow array of the plain (not dictionary) type."""
        mask = None if self.valid is None else ~self.valid
        array = pa.array(self.values, mask=mask)
        if self.dictionary is None:
            return array
        if len(self.dictionary) == 0:
            return pa.nulls(len(self.values), self.dictionary.type)
        return self.dictionary.take(array)

    @classmethod
    def from_arrow(cls, array: pa.Array | pa.ChunkedArray, dtype: str) -> Column:
        """An Arrow array as a Column of ``dtype``: integers must fit, float64 is rounded to float32, a timestamp is cut
        to whole milliseconds.

        Raises:
            SchemaError: a value does not fit ``dtype``.
        """
        array = _one_array(array)
        if pa.types.is_dictionary(array.type) and not _serves(array.dictionary, dtype):
            array = array.dictionary_decode()
        target = ARROW_TYPES[dtype]
        valid = None if array.null_count == 0 else np.asarray(pc.is_valid(array))
        try:
            if dtype in ("string", "binary"):
                return cls._encode(array, target, valid)
            if pa.types.is_timestamp(array.type):
                finer = pc.CastOptions(pa.timestamp("ms", array.type.tz), allow_time_truncate=True)
                array = array.cast(options=finer).cast(pa.int64())
            cast = array.cast(target)
            if dtype == "float32" and not pc.all(pc.equal(pc.is_inf(cast), pc.is_inf(array)), min_count=0).as_py():
                raise pa.ArrowInvalid("a value is beyond the largest float32")
            array = cast
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
            raise SchemaError(f"a value of type {array.type} is not a {dtype}: {e}; cast the column first") from e
        if valid is not None:
            array = pc.fill_null(array, 0)
        return cls(array.to_numpy(zero_copy_only=False), valid)

    @classmethod
    def _encode(cls, array: pa.Array, target: pa.DataType, valid: npt.NDArray[np.bool_] | None) -> Column:
        if pa.types.is_dictionary(array.type):
            array = pa.DictionaryArray.from_arrays(array.indices.cast(pa.int32()), array.dictionary.cast(target))
        if not pa.types.is_dictionary(array.type):
            array = array.cast(target).dictionary_encode()
        codes = pc.fill_null(array.indices.cast(pa.int32()), 0)
        return cls(codes.to_numpy(zero_copy_only=False), valid, array.dictionary)


def _one_array(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(array, pa.ChunkedArray):
        return array
    if pa.types.is_dictionary(array.type) and any(c.dictionary.null_count for c in array.chunks):
        # Arrow does not unite dictionaries that hold a null.
        array = array.cast(array.type.value_type)
    array = array.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array


def _serves(dictionary: pa.Array, dtype: str) -> bool:
    """Whether a column of ``dtype`` may keep the dictionary. A null in it is one that the array's ``null_count`` does
    not count, and an entry that is there twice would give one value two codes."""
    texts = dtype in ("string", "binary")
    return texts and dictionary.null_count == 0 and len(dictionary.unique()) == len(dictionary)


def null_column(dtype: str, n: int) -> Column:
    """n nulls of a schema dtype."""
    null = np.zeros(n, np.bool_)
    if dtype in ("string", "binary"):
        return Column(np.zeros(n, np.int32), null, pa.array([], ARROW_TYPES[dtype]))
    return Column(np.zeros(n, dtype), null)


def concat_columns(parts: Sequence[Column]) -> Column:
    """Rows of ``parts`` one after another; differing dictionaries are united (order of first appearance)."""
    if len(parts) == 1:
        return parts[0]
    valid = None
    if any(p.valid is not None for p in parts):
        valid = np.concatenate([np.ones(len(p), np.bool_) if p.valid is None else p.valid for p in parts])
    if parts[0].dictionary is None:
        return Column(np.concatenate([p.values for p in parts]), valid)
    first = parts[0].dictionary
    if all(p.dictionary is first or (p.dictionary is not None and p.dictionary.equals(first)) for p in parts):
        return Column(np.concatenate([p.values for p in parts]), valid, first)
    united, remaps = unite_dictionaries([p.dictionary for p in parts])
    values = [r[p.values] if len(r) else p.values for r, p in zip(remaps, parts, strict=True)]
    return Column(np.concatenate(values), valid, united)


def unite_dictionaries(dictionaries: Sequence[pa.Array]) -> tuple[pa.Array, list[npt.NDArray[np.int32]]]:
    """One dictionary for several, and for each the map from its codes to the united ones."""
    joined = pa.concat_arrays(list(dictionaries)).dictionary_encode()
    codes = joined.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    bounds = np.cumsum([0, *(len(d) for d in dictionaries)])
    return joined.dictionary, [codes[a:b] for a, b in itertools.pairwise(bounds)]
