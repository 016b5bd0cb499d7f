"""One dictionary for the segments of a generation: strings get the same codes in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.history.archive.layout import StoredColumn
from thinrow.jagged.column import unite_dictionaries

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ColumnDictionary:
    """Segment dictionaries as one: that of segment s is at ``[offset[s], offset[s] + n[s])``.

    Attributes:
        words: fixed-width values as 64-bit words (empty for strings).
        remap: int32 codes of ``strings`` for each segment's codes (empty for fixed-width columns).
        strings: the united strings; None for fixed-width columns.
        remaps: whether any segment's codes differ from the united ones.
    """

    words: npt.NDArray[np.uint64]
    remap: npt.NDArray[np.int32]
    strings: pa.Array | None
    offset: Ints
    n: Ints


def unite(
    held: Mapping[int, npt.NDArray[np.uint64] | pa.Array | None], n_segments: int, spec: StoredColumn
) -> ColumnDictionary:
    """The dictionaries ``held`` of ``spec`` by some of a generation's ``n_segments`` segments, by number."""
    n = np.zeros(n_segments, np.int64)
    found = {number: dictionary for number, dictionary in held.items() if dictionary is not None}
    for number, dictionary in found.items():
        n[number] = len(dictionary)
    offset = np.cumsum(n) - n
    if not spec.is_bytes:
        words = np.concatenate([np.empty(0, np.uint64), *found.values()])
        return ColumnDictionary(words, np.empty(0, np.int32), None, offset, n)
    kind = pa.string() if spec.dtype == "string" else pa.binary()
    strings, maps = pa.array([], kind), [np.empty(0, np.int32)]
    if len(found) == 1:
        (strings,) = found.values()
        maps = [np.arange(len(strings), dtype=np.int32)]
    elif found:
        strings, maps = unite_dictionaries([d for d in found.values() if isinstance(d, pa.Array)])
    return ColumnDictionary(np.empty(0, np.uint64), np.concatenate(maps), strings, offset, n)
