"""One dictionary for the segments of a generation: strings get the same codes in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.history.archive.layout import StoredColumn
from thinrow.history.archive.segment import Segment
from thinrow.jagged.column import unite_dictionaries

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ColumnDictionary:
    """A column's segment dictionaries as one: those of segment s are at ``[offset[s], offset[s] + n[s])``.

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


def unite(segments: Sequence[Segment], spec: StoredColumn) -> ColumnDictionary:
    """The dictionaries of ``spec`` over all segments of a generation."""
    found = []
    for segment in segments:
        part = segment.stream_of(spec.id)
        found.append(None if part is None else segment.dictionary(part[2]))
    if len(found) == 1 and isinstance(found[0], pa.Array):
        same = np.arange(len(found[0]), dtype=np.int32)
        one = np.array([len(same)], np.int64)
        return ColumnDictionary(np.empty(0, np.uint64), same, found[0], np.zeros(1, np.int64), one)
    n = np.array([0 if d is None else len(d) for d in found], np.int64)
    offset = np.concatenate([[0], np.cumsum(n)]).astype(np.int64)[:-1]
    if not spec.is_bytes:
        words = np.concatenate([np.empty(0, np.uint64), *(d for d in found if d is not None)])
        return ColumnDictionary(words, np.empty(0, np.int32), None, offset, n)
    kind = pa.string() if spec.dtype == "string" else pa.binary()
    present = [d.cast(kind) for d in found if isinstance(d, pa.Array)]
    if not present:
        return ColumnDictionary(np.empty(0, np.uint64), np.empty(0, np.int32), pa.array([], kind), offset, n)
    strings, maps = unite_dictionaries(present)
    return ColumnDictionary(np.empty(0, np.uint64), np.concatenate(maps), strings, offset, n)
