"""ReadTables: where the streams of some columns are in the segments of a generation, for one call that reads them all.

Worked example: a projection of ``item`` and ``price`` of a store of 16 segments. The first batch that meets segment 3
writes down where its file is mapped, its pages of stripe records, that ``item`` is stream 0 of a chunk of one block and
uses these 4,096 words, and so on; all later batches only look it up. What the call cannot read (an overlay, a column
that was widened since, a file that is not mapped) is marked, and ``StepReader`` reads it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CorruptionError
from thinrow.core.stripes import (
    ELSEWHERE,
    LACKING,
    NEVER_NULL,
    NULLS,
    PAGE_BYTES,
    PAGE_COUNT,
    PAGE_CRC,
    PAGE_FIELDS,
    PAGE_FIRST,
    PAGE_OFFSET,
    TEXT,
    VALUES,
    StripeTables,
)
from thinrow.history.archive.few import FewReads
from thinrow.history.archive.layout import StoredColumn
from thinrow.history.archive.segment import Segment
from thinrow.history.archive.segments import SegmentSet
from thinrow.schema.event_schema import KEYS_GROUP
from thinrow.storage.pages import PagedTable

if TYPE_CHECKING:
    from thinrow.history.archive.generation import Generation

Ints = npt.NDArray[np.int64]

#: Sets of columns whose tables a generation keeps.
_MAX_TABLES = 64


class ReadTables:
    """Of columns that hold no lists. Safe for threads.

    Attributes:
        tables: what the kernel reads.
        values: stream of each column's values.
        nulls: that of its nulls, -1 where it cannot be null.
        dtypes: of what each stream is decoded to.
        shapes: values a row and dtype of each stream.
    """

    def __init__(self, n_segments: int, specs: tuple[StoredColumn, ...]) -> None:
        self._specs, self._lock = specs, threading.Lock()
        self.values, self.nulls = [0] * len(specs), [-1] * len(specs)
        self._streams: list[tuple[StoredColumn, int]] = []
        # Streams of one group follow each other: its header is then opened once.
        for i in sorted(range(len(specs)), key=lambda i: specs[i].group):
            spec = specs[i]
            if spec.nullable:
                self.nulls[i] = len(self._streams)
                self._streams.append((spec, NULLS))
            self.values[i] = len(self._streams)
            self._streams.append((spec, TEXT if spec.is_bytes else VALUES))
        self.keys = next((w for w, (spec, _) in enumerate(self._streams) if spec.group == KEYS_GROUP), -1)
        self.dtypes = [np.dtype(_dtype(spec, kind)) for spec, kind in self._streams]
        per_row = [1 if kind == NULLS else max(spec.size, 1) for spec, kind in self._streams]
        self.shapes = list(zip(per_row, self.dtypes, strict=True))
        self.tables = StripeTables(n_segments, [kind for _, kind in self._streams], per_row)
        self._sets: dict[SegmentSet, bool] = {}

    def prepare_set(self, generation: Generation, segments: SegmentSet) -> bool:
        """``prepare`` of all segments of a set, asked once."""
        found = self._sets.get(segments)
        if found is None:
            if len(self._sets) >= _MAX_TABLES:
                self._sets.clear()
            found = self._sets[segments] = self.prepare(generation, segments.numbers)
        return found

    def prepare(self, generation: Generation, segments: Ints) -> bool:
        """Make the segments of these numbers (repeats allowed) known; False where a file cannot be mapped.

        Raises:
            CorruptionError or ObjectNotFound: a segment cannot be opened.
        """
        known = self.tables.prepared(segments)
        if known.all():
            return True
        with self._lock:
            return all(self._add(generation, number) for number in np.unique(segments[~known]).tolist())

    def _add(self, generation: Generation, number: int) -> bool:
        if self.tables.prepared(np.array([number]))[0]:
            return True
        segment = generation.segment(number)
        maps = generation.objects.mapped([segment.name])
        if maps is None or maps[0].nbytes != segment.container.size:
            return False
        for w, (spec, kind) in enumerate(self._streams):
            self._add_stream(generation, number, segment, w, spec, kind)
        table = segment.stripes
        self.tables.add_segment(number, maps[0], _pages(table), table.n_records, table.dtype.itemsize)
        return True

    def _add_stream(
        self, generation: Generation, number: int, segment: Segment, w: int, spec: StoredColumn, kind: int
    ) -> None:
        found = segment.stream_of(spec.id)
        if any(o.column == spec.id for o in generation.segments[number][1].overlays):
            self.tables.add_stream(w, number, ELSEWHERE, 0, 0, None)
        elif found is None:
            self.tables.add_stream(w, number, LACKING if spec.nullable else ELSEWHERE, 0, 0, None)
        else:
            group, stream, stored = found
            same = (stored.dtype, stored.size, stored.ragged) == (spec.dtype, spec.size, spec.ragged)
            place, words = segment.groups.index(group), None
            if not same or (stored.nullable and not spec.nullable):
                place = ELSEWHERE
            elif kind == NULLS:
                place, stream = (place, stream - 1) if stored.nullable else (NEVER_NULL, 0)
            elif kind == VALUES:
                try:
                    words = generation.held_dictionary(number, spec.id)
                except CorruptionError:
                    # Who reads the column learns of it.
                    place = ELSEWHERE
            self.tables.add_stream(w, number, place, segment.n_streams(group), stream, words)


class KnownTables:
    """The ``ReadTables`` of one generation, by columns; and, as ``few``, what reads of a few requests go by."""

    def __init__(self) -> None:
        self._tables: dict[tuple[StoredColumn, ...], ReadTables] = {}
        self.few = FewReads()
        # By the objects themselves, which are kept so that no others get their ids: this hashes no columns.
        self._same: dict[tuple[int, ...], tuple[tuple[StoredColumn, ...], ReadTables]] = {}

    def of(self, n_segments: int, specs: tuple[StoredColumn, ...]) -> ReadTables:
        """Those of ``specs``, in this order."""
        ids = tuple(map(id, specs))
        same = self._same.get(ids)
        if same is not None:
            return same[1]
        found = self._tables.get(specs)
        if found is None:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            # Two threads may both make it: either is right.
            found = self._tables[specs] = ReadTables(n_segments, specs)
        if len(self._same) >= _MAX_TABLES:
            self._same.clear()
        self._same[ids] = specs, found
        return found


def _dtype(spec: StoredColumn, kind: int) -> str:
    if kind == NULLS:
        return "int8"
    return "int32" if spec.is_bytes else spec.dtype


def _pages(table: PagedTable) -> Ints:
    pages = np.zeros((table.n_pages, PAGE_FIELDS), np.int64)
    pages[:, PAGE_OFFSET], pages[:, PAGE_BYTES], pages[:, PAGE_CRC] = table.offset, table.length, table.crc
    pages[:, PAGE_FIRST], pages[:, PAGE_COUNT] = table.first[:-1], np.diff(table.first)
    return pages
