"""Read a batch of users from a generation: all columns of mapped segments in one call, what is left step by step.

Worked trace: 512 users over 16 buckets -> their *pieces* (``look_up``) -> rows wanted of each piece -> the kernel
``read_stripes`` finds the stripes' records, checks headers and blocks and decodes all columns -> text codes are mapped
to one dictionary. Lists, overlays, widened columns and stores that are not mapped are read by ``StepReader``, and so is
whatever the kernel finds wrong, which then says what it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinrow.core import pool
from thinrow.core.ragged import offsets_of
from thinrow.core.stripes import PLACE
from thinrow.history.archive.layout import STRIPE_ROWS, StoredColumn
from thinrow.history.archive.lookup import Ints, Pieces, naming
from thinrow.history.archive.stepwise import StepReader
from thinrow.history.archive.tables import ReadTables
from thinrow.jagged import Column
from thinrow.kernels import kernel
from thinrow.storage.meter import Meter

if TYPE_CHECKING:
    from thinrow.history.archive.generation import Generation


_NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class ReadStats:
    """What a read cost. ``seconds`` by stage: index, fetch, crc, decode, verify, merge; no second is booked twice.

    What is read of mapped files in one call is booked as decode: headers, CRCs and decoding go stripe by stripe.

    ``bytes_read`` are the chunks that were asked for, those of keys once where planning and reading both did; ``io``
    counts the requests and bytes that this took, index and gaps between joined ranges included. ``column_bytes``: bytes
    of blocks, by column id."""

    bytes_read: int = 0
    events_decoded: int = 0
    events_delivered: int = 0
    pieces: int = 0
    mixed_pieces: int = 0
    versions_verified: int = 0
    column_bytes: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    io: Meter = field(default_factory=Meter)

    def add(self, other: ReadStats) -> None:
        """Add the figures of another read to these."""
        self.bytes_read += other.bytes_read
        self.events_decoded += other.events_decoded
        self.events_delivered += other.events_delivered
        self.pieces += other.pieces
        self.mixed_pieces += other.mixed_pieces
        self.versions_verified += other.versions_verified
        counts = other.io.counts()
        if any(counts.values()):
            self.io.add(**counts)
        for column, size in other.column_bytes.items():
            self.book_bytes(column, size)
        for stage, s in other.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + s

    def book_bytes(self, column: int, size: int) -> None:
        """Add bytes of blocks to those of a column id."""
        self.column_bytes[column] = self.column_bytes.get(column, 0) + size

    def clock(self, stage: str, since: float) -> float:
        """Book the time since ``since`` under ``stage``; returns now."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - since
        return now


class RowReader:
    """Decodes row ranges of pieces. One instance per batch: it keeps what it fetched until the batch is done.

    Attributes:
        out_pos: (R + 1,) where the rows of each range go.
        total: rows in all.
    """

    def __init__(
        self,
        generation: Generation,
        pieces: Pieces,
        piece: Ints,
        start: Ints,
        stop: Ints,
        stats: ReadStats,
        out_pos: Ints | None = None,
        counted: Ints = _NONE,
    ) -> None:
        """Rows ``[start[i], stop[i])`` (within the piece) of piece ``piece[i]``, delivered one after another.

        ``out_pos``: the offsets of these ranges in what is delivered, where the caller has them. ``counted``: (P,), 0
        or more of pieces whose keys were read, and their bytes counted, before."""
        self.generation, self.pieces, self.stats = generation, pieces, stats
        self._runs, self._counted = (piece, start, stop), counted
        self.out_pos = offsets_of(stop - start) if out_pos is None else out_pos
        self.total = int(self.out_pos[-1])
        # Not ``cached_property``: before Python 3.12 its lock is one for all readers, and kept by a fork.
        self._segments: Ints | None = None
        self._stepwise: StepReader | None = None

    def column(self, spec: StoredColumn, rows: Ints | None = None) -> Column:
        """``columns`` of one."""
        return self.columns((spec,), rows)[0]

    def columns(self, specs: Sequence[StoredColumn], rows: Ints | None = None) -> list[Column]:
        """Columns of all rows; null where a segment does not have one.

        Args:
            specs: which, each once.
            rows: (R,) of each run only so many rows are wanted, the first ones; what stands at the others says nothing.
                For columns of fixed width, dense and everywhere.

        Raises:
            CorruptionError: a block is damaged (names file, user and column).
            InputError: 2 GiB or more of text that stands in blocks.
        """
        found: list[Column | None] = [None] * len(specs)
        mine = tuple(i for i, spec in enumerate(specs) if not spec.ragged)
        if self.total and mine:
            for i, column in zip(mine, self._at_once(tuple(specs[i] for i in mine), rows), strict=True):
                found[i] = column
        return [self._steps.column(s, rows) if c is None else c for s, c in zip(specs, found, strict=True)]

    def coded(self, spec: StoredColumn) -> Column:
        """``StepReader.coded``."""
        return self._steps.coded(spec)

    def prefetch(self, columns: Sequence[StoredColumn]) -> None:
        """Read the keys' and all these columns' blocks at once, where each read is a round trip to a distant store."""
        if self.total and not self._mapped:
            self._steps.prefetch(columns)

    def naming(self, run: int) -> AbstractContextManager[None]:
        """Damage found meanwhile hits at least the user of ``run``."""
        piece = self._runs[0]
        if not len(piece):
            return nullcontext()
        return naming(self.pieces.users[np.searchsorted(self.pieces.piece_off, piece[run], side="right") - 1])

    @property
    def _steps(self) -> StepReader:
        if self._stepwise is None:
            self._stepwise = StepReader(self.generation, self.pieces, *self._runs, self.stats)
        return self._stepwise

    @property
    def _segment(self) -> Ints:
        """Numbers of the segments that the runs lie in."""
        if self._segments is None:
            self._segments = self.pieces.segment[self._runs[0]]
        return self._segments

    @property
    def _mapped(self) -> bool:
        return self._prepare(self.generation.tables.of(len(self.generation.segments), ()))

    def _prepare(self, found: ReadTables) -> bool:
        """``ReadTables.prepare`` of what the runs lie in, or of all that their index entries were looked up in."""
        if self.pieces.segments is None:
            return found.prepare(self.generation, self._segment)
        return found.prepare_set(self.generation, self.pieces.segments)

    def _at_once(self, specs: tuple[StoredColumn, ...], rows: Ints | None) -> list[Column | None]:
        """The columns in one call; None of those that it cannot read."""
        since = time.perf_counter()
        found = self.generation.tables.of(len(self.generation.segments), specs)
        nothing: list[Column | None] = [None] * len(specs)
        if not self._prepare(found):
            return nothing
        # Memory for more rows than stripes are written with is taken when they are known to be there.
        if self.total > len(self._segment) * STRIPE_ROWS and not self._read(found, [], rows)[0]:
            return nothing
        out = [pool.empty(self.total * n, t) for n, t in found.shapes]
        sound, refused, used = self._read(found, out, rows)
        if not sound:
            return nothing
        columns = [self._column(found, i, spec, out, refused) for i, spec in enumerate(specs)]
        self._count(found, specs, columns, used.tolist())
        self.stats.clock("decode", since)
        return columns

    def _read(
        self, found: ReadTables, out: Sequence[npt.NDArray[Any]], rows: Ints | None
    ) -> tuple[bool, npt.NDArray[np.bool_], Ints]:
        """All streams into ``out`` (or into none: whether all rows are there); whether all is sound, and what the
        kernel says of what it refused and used."""
        piece, start, stop = self._runs
        refused, used = np.zeros(len(out), np.bool_), np.zeros(len(out) + 1, np.int64)
        bad = kernel("read_stripes")(
            found.tables, self.pieces.records.view(np.uint64).reshape(-1, 8), self.pieces.segment, piece, start,
            stop if rows is None else start + rows, self.out_pos, out, refused, used, self._counted, found.keys,
        )  # fmt: skip
        return bad < 0, refused, used

    def _column(
        self,
        found: ReadTables,
        i: int,
        spec: StoredColumn,
        out: Sequence[npt.NDArray[Any]],
        refused: npt.NDArray[np.bool_],
    ) -> Column | None:
        """Column i of those of ``found``; None where some of it could not be read."""
        w, nulls = found.values[i], found.nulls[i]
        if refused[w] or (nulls >= 0 and refused[nulls]):
            return None
        values, valid = out[w], None
        if nulls >= 0 and out[nulls].any():
            valid = out[nulls] == 0
        if not spec.is_bytes:
            return Column(values.reshape(-1, spec.size) if spec.size else values, valid)
        segment = self._segment
        lookup = self.generation.dictionary(spec, tuple(np.unique(segment).tolist()))
        here = np.flatnonzero(found.tables.streams[w, segment, PLACE] >= 0)
        bad = kernel("remap_codes")(
            values, self.out_pos[here], np.diff(self.out_pos)[here], lookup.remap, lookup.offset[segment[here]],
            lookup.n[segment[here]],
        )  # fmt: skip
        return Column(values, valid, lookup.strings) if bad < 0 else None

    def _count(
        self, found: ReadTables, specs: Sequence[StoredColumn], columns: Sequence[Column | None], used: Sequence[int]
    ) -> None:
        """Book what was read; of a column that is still to be read, nothing."""
        self.stats.bytes_read += used[-1]
        if found.keys >= 0:
            self._counted = np.zeros(len(self.pieces.records), np.int64)
        for i, (spec, column) in enumerate(zip(specs, columns, strict=True)):
            if column is not None:
                size = used[found.values[i]] + (used[found.nulls[i]] if found.nulls[i] >= 0 else 0)
                self.stats.book_bytes(spec.id, size)
