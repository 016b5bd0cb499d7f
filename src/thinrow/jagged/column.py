"""Column: the values of one feature, with validity, and a dictionary for strings and bytes.

Strings and bytes are never stored as Python objects. ``["a", "b", None, "a"]`` is::

    Column(values=int32 [0, 1, 0, 0], valid=[True, True, False, True], dictionary=pa.array(["a", "b"]))

A column of lists has the elements of all rows as its values, and offsets; ``[[5, 6], None, [7]]`` is::

    Column(values=[5, 6, 7], valid=[True, False, True], offsets=[0, 2, 2, 3])

A column of vectors has values of shape (n, size). The value under a null is 0 (an empty list) and says nothing;
elements are never null.
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

from thinrow.core.errors import InputError, SchemaError
from thinrow.core.ragged import copy_ranges, offsets_of

#: Entries that int32 codes tell apart.
_MAX_ENTRIES = (1 << 31) - 1

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

_NUMPY_TYPES = {name: np.dtype(name) for name, kind in ARROW_TYPES.items() if pa.types.is_primitive(kind)}


@dataclass(frozen=True, slots=True)
class Column:
    """Attributes:
    values: (n,) the values, or int32 codes into ``dictionary``; (n, size) of vectors; (offsets[-1],) the elements of
        lists.
    valid: (n,) bool, False where null; None where nothing is null.
    dictionary: what the codes refer to: distinct strings or bytes, or the integers of a column that is read as codes,
        where one may be there more than once; None where ``values`` are the values.
    offsets: (n + 1,) int64, of lists: those of row i are ``values[offsets[i]:offsets[i + 1]]``, the first offset is 0
        and the last ``len(values)``; None where a row has one value.
    """

    values: npt.NDArray[Any]
    valid: npt.NDArray[np.bool_] | None = None
    dictionary: pa.Array | None = None
    offsets: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def size(self) -> int:
        """Elements of a vector; 0 of a column that holds none."""
        return int(self.values.shape[1]) if self.values.ndim == 2 else 0

    @property
    def shape_name(self) -> str:
        """What a row holds, in words for messages."""
        if self.offsets is not None:
            return "lists"
        return f"vectors of {self.size}" if self.values.ndim == 2 else "single values"

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays; a dictionary counts though other columns may share it."""
        parts = (self.values, self.valid, self.dictionary, self.offsets)
        return sum(int(p.nbytes) for p in parts if p is not None)

    @property
    def is_text(self) -> bool:
        """Whether the values are strings or bytes, which always are codes."""
        return self.dictionary is not None and not pa.types.is_integer(self.dictionary.type)

    def decoded(self) -> Column:
        """The same column with integers in place of their codes; text stays codes."""
        if self.dictionary is None or self.is_text:
            return self
        entries = self.dictionary.to_numpy()
        values = entries[self.values] if len(entries) else np.zeros(len(self.values), entries.dtype)
        return Column(values, self.valid, None, self.offsets)

    def take(self, index: npt.NDArray[np.intp] | slice) -> Column:
        """Rows at ``index`` (a slice gives views)."""
        if self.offsets is not None:
            return self._take_lists(index, self.offsets)
        return Column(self.values[index], None if self.valid is None else self.valid[index], self.dictionary)

    def _take_lists(self, index: npt.NDArray[np.intp] | slice, offsets: npt.NDArray[np.int64]) -> Column:
        valid = None if self.valid is None else self.valid[index]
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(len(self))
            cut = offsets[start : max(start, stop) + 1]
            return Column(self.values[cut[0] : cut[-1]], valid, self.dictionary, cut - cut[0])
        first, last = offsets[:-1][index], offsets[1:][index]
        return Column(copy_ranges(self.values, first, last), valid, self.dictionary, offsets_of(last - first))

    def take_ranges(self, start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> Column:
        """Rows of half-open ranges one after another, copied."""
        valid = None if self.valid is None else copy_ranges(self.valid, start, stop)
        if self.offsets is None:
            return Column(copy_ranges(self.values, start, stop), valid, self.dictionary)
        lengths = copy_ranges(np.diff(self.offsets), start, stop)
        stop = np.maximum(start, stop)
        values = copy_ranges(self.values, self.offsets[start], self.offsets[stop])
        return Column(values, valid, self.dictionary, offsets_of(lengths))

    def elements(self) -> Column:
        """The values of all rows one after another, as a column of single values that are not null."""
        return Column(self.values.reshape(-1), None, self.dictionary)

    def to_arrow(self) -> pa.Array:
        """The same values as an Arrow array of the plain (not dictionary) type; lists are large lists.

        Raises:
            InputError: text of 2 GiB or more, which is what one Arrow array of it holds.
        """
        mask = None if self.valid is None else pa.array(~self.valid)
        if self.offsets is not None:
            return pa.LargeListArray.from_arrays(pa.array(self.offsets), self.elements().to_arrow(), mask=mask)
        if self.values.ndim == 2:
            return pa.FixedSizeListArray.from_arrays(self.elements().to_arrow(), self.size, mask=mask)
        array = pa.array(self.values, mask=None if self.valid is None else ~self.valid)
        if self.dictionary is None:
            return array
        if len(self.dictionary) == 0:
            return pa.nulls(len(self.values), self.dictionary.type)
        try:
            return self.dictionary.take(array)
        except pa.ArrowInvalid as e:
            raise InputError(
                f"{len(array)} rows have more text than one Arrow array holds ({e}); convert fewer rows at once"
            ) from e

    @classmethod
    def from_arrow(
        cls, array: pa.Array | pa.ChunkedArray, dtype: str, *, ragged: bool = False, size: int = 0
    ) -> Column:
        """An Arrow array as a Column of ``dtype``: integers must fit, float64 is rounded to float32, a timestamp is cut
        to whole milliseconds. ``ragged`` reads lists, ``size`` vectors of so many elements, from any kind of list.

        Raises:
            SchemaError: a value does not fit ``dtype``, or a row is not the list or vector that it should be.
            InputError: chunks of more text or elements than one array of their type holds.
        """
        array = one_array(array)
        if ragged or size:
            return _nested(array, dtype, size)
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
            if (
                dtype == "float32"
                and array.type != target
                and not pc.all(pc.equal(pc.is_inf(cast), pc.is_inf(array)), min_count=0).as_py()
            ):
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


def one_array(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The chunks as one. Raises InputError where one array of the type cannot hold them."""
    if not isinstance(array, pa.ChunkedArray):
        return array
    if pa.types.is_dictionary(array.type) and any(c.dictionary.null_count for c in array.chunks):
        # Arrow does not unite dictionaries that hold a null.
        array = array.cast(array.type.value_type)
    if array.num_chunks < 2:
        return array.chunk(0) if array.num_chunks else pa.array([], array.type)
    try:
        return pa.concat_arrays(array.chunks)
    except pa.ArrowInvalid as e:
        raise InputError(
            f"{array.num_chunks} chunks of {array.type} are more than one Arrow array holds ({e}); "
            "pass fewer rows at once"
        ) from e


def _serves(dictionary: pa.Array, dtype: str) -> bool:
    """Whether a column of ``dtype`` may keep the dictionary. A null in it is one that the array's ``null_count`` does
    not count, and an entry that is there twice would give one value two codes."""
    texts = dtype in ("string", "binary")
    return texts and dictionary.null_count == 0 and len(dictionary.unique()) == len(dictionary)


def _nested(array: pa.Array, dtype: str, size: int) -> Column:
    """Lists of any kind as lists (``size`` 0) or vectors. Raises as ``Column.from_arrow``."""
    n, kind = len(array), array.type
    if pa.types.is_null(kind):
        return null_column(dtype, n, ragged=not size, size=size)
    if not pa.types.is_nested(kind) or not hasattr(kind, "value_type") or pa.types.is_map(kind):
        wanted = f"a vector of {size}" if size else "a list"
        raise SchemaError(f"a value of type {kind} is not {wanted} of {dtype}; wrap single values in a list first")
    valid = None if array.null_count == 0 else np.asarray(pc.is_valid(array))
    rows = np.arange(n) if valid is None else np.flatnonzero(valid)
    lengths = np.zeros(n, np.int64)
    lengths[rows] = np.asarray(pc.fill_null(pc.list_value_length(array), 0))[rows]
    elements = Column.from_arrow(array.flatten(), dtype)
    if elements.valid is not None:
        at = int(np.flatnonzero(~elements.valid)[0])
        row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise SchemaError(f"row {row} holds a null element; leave it out of its list, or make the whole row null")
    if not size:
        return Column(elements.values, valid, elements.dictionary, offsets_of(lengths))
    wrong = rows[lengths[rows] != size]
    if len(wrong):
        raise SchemaError(f"row {wrong[0]} holds {lengths[wrong[0]]} elements; every vector has {size}")
    if valid is None:
        return Column(elements.values.reshape(n, size))
    values = np.zeros((n, size), dtype)
    values[rows] = elements.values.reshape(-1, size)
    return Column(values, valid)


def null_column(dtype: str, n: int, *, ragged: bool = False, size: int = 0) -> Column:
    """n nulls of a schema dtype: single values, lists (``ragged``) or vectors of ``size`` elements."""
    null, elements = np.zeros(n, np.bool_), 0 if ragged else n
    offsets = np.zeros(n + 1, np.int64) if ragged else None
    if dtype in ("string", "binary"):
        return Column(np.zeros(elements, np.int32), null, pa.array([], ARROW_TYPES[dtype]), offsets)
    return Column(np.zeros((n, size) if size else elements, dtype), null, None, offsets)


def cast_column(column: Column, dtype: str) -> Column:
    """The same values under a dtype that holds them all; strings and bytes as they are."""
    if column.dictionary is None and column.values.dtype == _NUMPY_TYPES.get(dtype):
        return column
    if column.is_text:
        return column
    if column.dictionary is not None:
        return Column(column.values, column.valid, column.dictionary.cast(ARROW_TYPES[dtype]))
    return Column(column.values.astype(dtype), column.valid, None, column.offsets)


def concat_columns(parts: Sequence[Column]) -> Column:
    """Rows of ``parts`` one after another. Differing dictionaries of text are united (order of first appearance);
    entries of integers are put one after another, and values beside codes become entries.

    Raises:
        InputError: these are 2^31 or more.
    """
    if len(parts) == 1:
        return parts[0]
    valid = None
    if any(p.valid is not None for p in parts):
        valid = np.concatenate([np.ones(len(p), np.bool_) if p.valid is None else p.valid for p in parts])
    offsets = None
    if parts[0].offsets is not None:
        offsets = offsets_of(np.concatenate([np.diff(p.offsets) for p in parts if p.offsets is not None]))
    if all(p.dictionary is None for p in parts):
        return Column(np.concatenate([p.values for p in parts]), valid, None, offsets)
    if not all(p.is_text for p in parts):
        return Column(*_join_integers(parts, valid))
    first = parts[0].dictionary
    if all(p.dictionary is first or (p.dictionary is not None and p.dictionary.equals(first)) for p in parts):
        return Column(np.concatenate([p.values for p in parts]), valid, first, offsets)
    united, remaps = unite_dictionaries([p.dictionary for p in parts])
    values = [r[p.values] if len(r) else p.values for r, p in zip(remaps, parts, strict=True)]
    return Column(np.concatenate(values), valid, united, offsets)


def _join_integers(
    parts: Sequence[Column], valid: npt.NDArray[np.bool_] | None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_] | None, pa.Array]:
    kind = next(p.dictionary.type for p in parts if p.dictionary is not None)
    entries: list[tuple[int, pa.Array]] = []
    codes, shift = [], 0
    for part in parts:
        held = pa.array(part.values, kind) if part.dictionary is None else part.dictionary
        rows = np.arange(len(part), dtype=np.int32) if part.dictionary is None else part.values
        same = next((at for at, other in entries if other is held), None)
        if same is None:
            same, shift = shift, shift + len(held)
            entries.append((same, held))
        if shift > _MAX_ENTRIES:
            raise InputError(f"{shift} entries of a dictionary; {_MAX_ENTRIES} at most: join fewer, or decoded columns")
        codes.append(rows + np.int32(same))
    joined = entries[0][1] if len(entries) == 1 else pa.concat_arrays([held for _, held in entries])
    return np.concatenate(codes), valid, joined


def unite_dictionaries(dictionaries: Sequence[pa.Array]) -> tuple[pa.Array, list[npt.NDArray[np.int32]]]:
    """One dictionary for several, and for each the map from its codes to the united ones. Raises as ``one_array``."""
    joined = one_array(pa.chunked_array(list(dictionaries))).dictionary_encode()
    codes = joined.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    bounds = np.cumsum([0, *(len(d) for d in dictionaries)])
    return joined.dictionary, [codes[a:b] for a, b in itertools.pairwise(bounds)]
