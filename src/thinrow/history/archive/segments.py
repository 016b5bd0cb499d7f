"""SegmentSet: some segments of a generation, opened and read as one.

Worked example: the 16 segments that a batch's users are in have one index (``pieces``), one list of maps (``buffers``)
and, of a column, one table that says which stream of which group it is in each segment. All of it is made once for a
set and kept by the generation, so that a batch costs a few calls, not a few for each segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinrow.core.buffers import Buffers
from thinrow.history.archive.layout import StoredColumn, overlay_region, stripe_dtype
from thinrow.history.archive.overlay import Overlay
from thinrow.history.archive.segment import Segment
from thinrow.schema.evolution import WIDER
from thinrow.storage.index import Index
from thinrow.storage.objects import ObjectStore

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupStreams:
    """Where one column is in a feature group, by position in the set; -1 where a segment has it elsewhere or not.

    Attributes:
        group: name of the group.
        dtype: in which these segments have the column.
        values, nulls, lengths: (T,) number of the stream in the group's chunks.
    """

    group: str
    dtype: str
    ragged: bool
    size: int
    values: Ints
    nulls: Ints
    lengths: Ints

    def serves(self, spec: StoredColumn) -> bool:
        """Whether it can be read as ``spec``: in its shape, and of its dtype or a narrower one."""
        same = (self.ragged, self.size) == (spec.ragged, spec.size)
        return same and (self.dtype == spec.dtype or spec.dtype in WIDER.get(self.dtype, ()))

    @property
    def shape(self) -> str:
        """In words, for messages."""
        return "lists" if self.ragged else f"vectors of {self.size}" if self.size else "single values"


def _kind(group: str, _: int, stored: StoredColumn) -> tuple[str, str, bool, int]:
    return group, stored.dtype, stored.ragged, stored.size


class OverlayLayer:
    """The overlays of one column, over the segments of a set.

    Attributes:
        column: name of the column.
        file: (T,) which of ``names`` each segment's is; -1 where it has none.
        width: (T,) blocks of its chunks.
        names, sizes, buffers: of the files, as ``SegmentSet`` has those of the segments.
        stripes: their stripe records.
    """

    def __init__(self, objects: ObjectStore, overlays: Sequence[Overlay | None]) -> None:
        held = [o for o in overlays if o is not None]
        self.column = held[0].column.name
        has = np.array([o is not None for o in overlays])
        self.file = np.where(has, np.cumsum(has) - 1, -1)
        self.width = np.array([0 if o is None else o.column.n_streams for o in overlays], np.int64)
        self.names = [o.name for o in held]
        self.sizes = np.array([o.container.size for o in held], np.int64)
        maps = objects.mapped(self.names)
        self.buffers = None if maps is None else Buffers(maps)
        self.stripes = Index(objects, [o.stripes for o in held])


class SegmentSet:
    """Attributes:
    segments: opened, in order of their number.
    position: number of a segment in the generation -> place here, -1 for others.
    names: of the files.
    sizes: (T,) bytes of each file.
    buffers: the mapped files; None where they cannot be mapped.
    with_hides: places of the segments that have a hide-list.
    """

    def __init__(
        self,
        objects: ObjectStore,
        segments: Sequence[Segment],
        numbers: Ints,
        n_segments: int,
        overlay: Callable[[int, int], Overlay | None],
    ) -> None:
        """``overlay(number, column id)``: the overlay of a column of a segment, opened, if there is one."""
        self._objects, self._overlay = objects, overlay
        self.segments = tuple(segments)
        self.numbers = numbers
        self.position = np.full(n_segments, -1, np.int64)
        self.position[numbers] = np.arange(len(numbers))
        self.names = [s.name for s in segments]
        self.sizes = np.array([s.container.size for s in segments], np.int64)
        self.n_stripes = np.array([s.stripes.n_records for s in segments], np.int64)
        self.with_hides = [k for k, s in enumerate(segments) if len(s.hides.users)]
        maps = objects.mapped(self.names) if segments else None
        self.buffers = None if maps is None else Buffers(maps)
        widths = np.array([len(s.groups) for s in segments], np.int64)
        self._layouts = [(w, np.flatnonzero(widths == w)) for w in np.unique(widths).tolist()]
        members_of = [[segments[k].stripes for k in members.tolist()] for _, members in self._layouts]
        self._stripes = [Index(objects, tables) for tables in members_of]
        self._pieces: Index | None = None
        self._groups: dict[str, tuple[Ints, Ints]] = {}
        self._columns: dict[int, tuple[GroupStreams, ...]] = {}
        self._layers: dict[str, OverlayLayer] = {}

    @property
    def pieces(self) -> Index:
        """The piece indexes as one."""
        if self._pieces is None:
            # Two threads may both make it: either is right.
            self._pieces = Index(self._objects, [s.pieces for s in self.segments])
        return self._pieces

    def stripes(self, position: Ints, stripe: Ints) -> npt.NDArray[np.void]:
        """Stripe records: (n,) of the widest layout here. Raises CorruptionError."""
        if len(self._layouts) == 1:
            return self._stripes[0].take(position, stripe)
        out = np.zeros(len(stripe), stripe_dtype(self._layouts[-1][0]))
        for (width, members), index in zip(self._layouts, self._stripes, strict=True):
            mine = np.flatnonzero(np.isin(position, members))
            records = index.take(np.searchsorted(members, position[mine]), stripe[mine])
            out["n_rows"][mine] = records["n_rows"]
            out["chunks"][mine, :width] = records["chunks"]
        return out

    def group(self, name: str) -> tuple[Ints, Ints]:
        """(T,) place of the group in each segment's stripe records (-1: it lacks it), and (T,) blocks of its chunks.

        The region of a column's overlays is the only one in the records of its ``layer``.
        """
        layer = self._layers.get(name)
        if layer is not None:
            return np.minimum(layer.file, 0), layer.width
        found = self._groups.get(name)
        if found is None:
            has = [name in s.groups for s in self.segments]
            place = [s.groups.index(name) if h else -1 for s, h in zip(self.segments, has, strict=True)]
            width = [s.n_streams(name) if h else 0 for s, h in zip(self.segments, has, strict=True)]
            found = self._groups[name] = np.array(place, np.int64), np.array(width, np.int64)
        return found

    def layer(self, region: str) -> OverlayLayer | None:
        """The overlays that make up a region; None where it is a feature group of the segments."""
        return self._layers.get(region)

    def streams(self, column_id: int) -> tuple[GroupStreams, ...]:
        """Where a column is: one entry for each group and dtype in which some segment holds it."""
        found = self._columns.get(column_id)
        if found is None:
            found = self._columns[column_id] = self._find_streams(column_id)
        return found

    def _find_streams(self, column_id: int) -> tuple[GroupStreams, ...]:
        overlays = [self._overlay(number, column_id) for number in self.numbers.tolist()]
        name = overlay_region(column_id)
        if any(overlays):
            self._layers[name] = OverlayLayer(self._objects, overlays)
        parts = [
            s.stream_of(column_id) if o is None else (name, o.column.n_streams - 1, o.column)
            for s, o in zip(self.segments, overlays, strict=True)
        ]
        found = []
        for kind in dict.fromkeys(_kind(*part) for part in parts if part is not None):
            entry = GroupStreams(*kind, *(np.full(len(parts), -1, np.int64) for _ in range(3)))
            for k, part in enumerate(parts):
                if part is not None and _kind(*part) == kind:
                    _, stream, stored = part
                    entry.values[k] = stream
                    entry.lengths[k] = stream - 1 if stored.ragged else -1
                    entry.nulls[k] = stream - 1 - stored.ragged if stored.nullable else -1
            found.append(entry)
        return tuple(found)
