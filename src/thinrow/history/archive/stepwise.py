"""Read rows column by column and step by step, from any store, columns of every kind; says what is wrong where.

Worked trace: 512 users over 16 buckets -> their *pieces* (``look_up``) -> rows wanted of each piece -> the
chunks of the stripes that hold them, where they lie in mapped files or fetched into one buffer per feature group ->
headers and CRCs checked -> ``decode_fixed`` once per column over all runs of all users.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core import pool
from thinrow.core.buffers import Buffers
from thinrow.core.errors import CorruptionError, InputError
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.core.users import plain
from thinrow.history.archive.dictionaries import ColumnDictionary
from thinrow.history.archive.layout import MAX_STRIPE_ELEMENTS, MAX_STRIPE_ROWS, StoredColumn, key_columns
from thinrow.history.archive.lookup import Ints, Pieces, naming
from thinrow.history.archive.places import Chunks, Placed, Places, Stripes
from thinrow.history.archive.segment import texts_of
from thinrow.history.archive.segments import GroupStreams, OverlayLayer
from thinrow.jagged import Column
from thinrow.jagged.column import unite_dictionaries
from thinrow.kernels import kernel
from thinrow.schema.event_schema import KEYS_GROUP, MAX_ELEMENTS
from thinrow.storage.codecs import ABSENT, SPARSE, ZSTD_BYTES, BadBlock, decode_bytes, parse_headers
from thinrow.storage.codes import BlockRuns, decode_codes

if TYPE_CHECKING:
    from thinrow.history.archive.generation import Generation
    from thinrow.history.archive.reader import ReadStats

#: Bytes of text that one Arrow array with offsets of int32 holds.
MAX_TEXT = (1 << 31) - 1
_NO_WORDS, _NO_CODES = np.empty(0, np.uint64), np.empty(0, np.int64)


def _beyond(chunks: npt.NDArray[np.void], sizes: Ints) -> npt.NDArray[np.bool_]:
    """Which chunks do not lie in files of ``sizes`` bytes. Their sum could wrap around."""
    offset, size = chunks["offset"], sizes.astype(np.uint64)
    found: npt.NDArray[np.bool_] = (offset > size) | (chunks["length"] > size - np.minimum(offset, size))
    return found


class StepReader:
    """Decodes row ranges of pieces. One instance per batch: it keeps what it fetched until the batch is done."""

    def __init__(
        self, generation: Generation, pieces: Pieces, piece: Ints, start: Ints, stop: Ints, stats: ReadStats
    ) -> None:
        """Rows ``[start[i], stop[i])`` (within the piece) of piece ``piece[i]``, delivered one after another."""
        self.generation, self.pieces, self.stats = generation, pieces, stats
        self.piece = piece
        self.segments = pieces.segments or generation.opened(pieces.segment[piece])
        self._position = self.segments.position[pieces.segment[piece]]
        records = pieces.records[piece]
        self.stripe = records["stripe"].astype(np.int64)
        self.row_from = records["row"].astype(np.int64) + start
        self.row_to = records["row"].astype(np.int64) + stop
        self.n_rows = stop - start
        self.out_pos = offsets_of(self.n_rows)
        self.total = int(self.out_pos[-1])
        self._rows = Places(None, self.row_from, self.row_to, self.out_pos)
        self._chunks: dict[str, Chunks] = {}
        self._bodies: dict[str, npt.NDArray[np.uint8]] = {}
        self._found: Stripes | None = None
        self._every = np.arange(len(piece))

    def column(self, spec: StoredColumn, rows: Ints | None = None) -> Column:
        """One column of all rows; null where a segment does not have it.

        Args:
            rows: (R,) of each run only so many rows are wanted, the first ones; what stands at the others says nothing.
                For a column of fixed width, dense and everywhere.

        Raises:
            CorruptionError: a block is damaged (names file, user and column).
            InputError: 2 GiB or more of text that stands in blocks.
        """
        parts = self._parts(spec)
        if rows is not None:
            values = pool.empty(self.total, spec.dtype)
            at = Places(None, self.row_from, self.row_from + rows, self.out_pos)
            self._decode(parts[0].group, self._every, parts[0].values, spec, values, None, at)
            return Column(values)
        lookup = self.generation.dictionary(spec, tuple(self.segments.numbers.tolist()))
        valid = self._valid(spec, parts)
        at = self._lists(spec, parts) if spec.ragged else self._rows.times(max(spec.size, 1))
        values = pool.empty(int(at.out_pos[-1]), np.int32 if spec.is_bytes else spec.dtype)
        long_runs = np.empty(0, np.int64)
        if len(parts) != 1 or self._runs_of(parts[0].values) is not self._every:
            values[:] = 0
        for part in parts:
            runs = self._runs_of(part.values)
            if not len(runs):
                continue
            if spec.is_bytes:
                coded = self._codec(part.group, runs, part.values) != ZSTD_BYTES
                runs, long_runs = runs[coded], np.concatenate([long_runs, runs[~coded]])
                if len(parts) == 1 and len(long_runs):
                    values[:] = 0
            if part.dtype != spec.dtype and not spec.is_bytes:
                self._decode_widened(part, runs, spec, values, lookup, at)
                continue
            self._decode(part.group, runs, part.values, spec, values, None if spec.is_bytes else lookup, at)
            if spec.is_bytes and len(runs):
                self._unite_codes(runs, spec, values, lookup, at)
        strings = lookup.strings if spec.is_bytes else None
        if len(long_runs):
            strings = self._add_long(long_runs, parts, spec, values, lookup, at)
        return Column(values.reshape(-1, spec.size) if spec.size else values, valid, strings, at.row_off)

    def coded(self, spec: StoredColumn) -> Column:
        """A column of single integers as int32 codes and a dictionary, in which a value may be more than once.

        Raises:
            CorruptionError: as ``column``.
            InputError: the dictionary would have 2^31 entries or more.
        """
        lookup = self.generation.dictionary(spec, tuple(self.segments.numbers.tolist()))
        parts = self._parts(spec)
        found = [(part, runs) for part in parts if len(runs := self._runs_of(part.values))]
        codes = pool.empty(self.total, np.int32)
        if sum(len(runs) for _, runs in found) < len(self.piece):
            codes[:] = 0
        blocks = [self._block_runs(part.group, runs, part.values, spec, lookup, self._rows) for part, runs in found]
        since = time.perf_counter()
        try:
            words = decode_codes(blocks, lookup.words, spec.dtype, codes)
        except BadBlock as e:
            part, runs = found[e.stream]
            raise self._corrupt(int(runs[e.index]), spec.name, e.what, part.group) from e
        self.stats.clock("decode", since)
        return Column(codes, self._valid(spec, parts), pa.array(words))

    def _parts(self, spec: StoredColumn) -> tuple[GroupStreams, ...]:
        """Where the column is, in what it can be read from; before memory is taken for so many rows, they are there."""
        if self.total:
            self._stripes()
        parts = self.segments.streams(spec.id)
        for part in parts:
            if not part.serves(spec):
                held = int(np.flatnonzero(part.values >= 0)[0])
                what = f"it is stored as {part.shape} of {part.dtype}"
                raise CorruptionError(what, file=self.segments.names[held], column=spec.name)
        return parts

    def _valid(self, spec: StoredColumn, parts: Sequence[GroupStreams]) -> npt.NDArray[np.bool_] | None:
        """(rows,) False where null; None where nothing is."""
        held = np.zeros(len(self.segments.numbers), np.bool_)
        for part in parts:
            held |= part.values >= 0
        missing = ~held[self._position]
        if not missing.any() and not any((part.nulls >= 0).any() for part in parts):
            return None
        null = np.zeros(self.total, np.int8)
        if missing.any():
            null[:] = np.repeat(missing, self.n_rows)
        for part in parts:
            self._decode(part.group, self._runs_of(part.nulls), part.nulls, spec, null, None, self._rows, True)
        return null == 0 if null.any() else None

    def _runs_of(self, stream: Ints) -> Ints:
        """The runs whose segments have the stream (by position in the set)."""
        if (stream >= 0).all():
            return self._every
        return np.flatnonzero(stream[self._position] >= 0)

    def _lists(self, spec: StoredColumn, parts: Sequence[GroupStreams]) -> Places:
        """Where the elements of lists lie: the lengths of whole stripes say it."""
        n_runs = len(self.piece)
        first, last, n = np.zeros(n_runs, np.int64), np.zeros(n_runs, np.int64), np.zeros(n_runs, np.int64)
        row_lengths = np.zeros(self.total, np.int64)
        for part in parts:
            runs = self._runs_of(part.lengths)
            if not len(runs):
                continue
            chunks = self._fetch(part.group)
            of_run = chunks.of_run[runs]
            chunk, one, inverse = np.unique(of_run, return_index=True, return_inverse=True)
            base = offsets_of(chunks.rows[chunk])
            found = np.empty(int(base[-1]), np.int64)
            # All rows of each chunk, under the name of one of its runs.
            start, stop, out = np.zeros(n_runs, np.int64), np.zeros(n_runs, np.int64), np.zeros(n_runs, np.int64)
            stop[runs[one]], out[runs[one]] = chunks.rows[chunk], base[:-1]
            self._decode(part.group, runs[one], part.lengths, spec, found, None, Places(None, start, stop, out))
            wrong = np.flatnonzero((found < 0) | (found > MAX_ELEMENTS))
            if len(wrong):
                at = int(np.searchsorted(base, wrong[0], side="right")) - 1
                raise self._corrupt(int(runs[one][at]), spec.name, f"a list of {found[wrong[0]]} elements")
            total, begin = offsets_of(found), base[inverse]
            elements = np.diff(total[base])
            if int(elements.max()) > MAX_STRIPE_ELEMENTS:
                at = int((elements > MAX_STRIPE_ELEMENTS).argmax())
                what = f"lists of {elements[at]} elements in one stripe; {MAX_STRIPE_ELEMENTS} at most"
                raise self._corrupt(int(runs[one][at]), spec.name, what)
            first[runs] = total[begin + self.row_from[runs]] - total[begin]
            last[runs] = total[begin + self.row_to[runs]] - total[begin]
            n[runs] = total[base[inverse + 1]] - total[begin]
            rows, _ = ranges_index(begin + self.row_from[runs], begin + self.row_to[runs])
            place, _ = ranges_index(self.out_pos[:-1][runs], self.out_pos[1:][runs])
            row_lengths[place] = found[rows]
        row_off = offsets_of(row_lengths)
        return Places(n, first, last, row_off[self.out_pos], row_off)

    def _codec(self, group: str, runs: Ints, stream: Ints) -> npt.NDArray[np.uint8]:
        """Codec of the block of each run in one stream (``stream``: by segment number)."""
        chunks = self._fetch(group)
        codec: npt.NDArray[np.uint8] = chunks.headers.codec[stream[self._position[runs]], chunks.of_run[runs]]
        return codec

    def _decode_widened(
        self,
        part: GroupStreams,
        runs: Ints,
        spec: StoredColumn,
        values: npt.NDArray[Any],
        lookup: ColumnDictionary,
        at: Places,
    ) -> None:
        """Decode the runs as the narrower dtype in which their segments have the column, then widen them."""
        narrow = pool.empty(len(values), part.dtype)
        self._decode(part.group, runs, part.values, spec, narrow, lookup, at)
        rows = ranges_index(at.out_pos[:-1][runs], at.out_pos[1:][runs])[0]
        values[rows] = narrow[rows]

    def _unite_codes(
        self, runs: Ints, spec: StoredColumn, codes: npt.NDArray[Any], lookup: ColumnDictionary, at: Places
    ) -> None:
        seg = self.segments.numbers[self._position[runs]]
        bad = kernel("remap_codes")(
            codes, at.out_pos[runs], (at.last - at.first)[runs], lookup.remap, lookup.offset[seg], lookup.n[seg]
        )
        if bad >= 0:
            raise self._corrupt(int(runs[bad]), spec.name, "a code lies outside its dictionary")

    def _add_long(
        self,
        runs: Ints,
        parts: Sequence[GroupStreams],
        spec: StoredColumn,
        codes: npt.NDArray[Any],
        lookup: ColumnDictionary,
        at: Places,
    ) -> pa.Array:
        """Decode runs whose strings stand in their blocks; returns the strings that all codes now refer to."""
        found = [lookup.strings]
        where = []
        for part, k in ((part, k) for part in parts for k in np.unique(self._position[runs]) if part.values[k] >= 0):
            mine = runs[self._position[runs] == k]
            found.append(self._zstd_runs(mine, part.group, int(part.values[k]), spec, at))
            where.append(ranges_index(at.out_pos[:-1][mine], at.out_pos[1:][mine])[0])
        strings, maps = unite_dictionaries(found)
        if len(maps[0]):
            codes[:] = maps[0][codes]
        for rows, into in zip(where, maps[1:], strict=True):
            codes[rows] = into
        return strings

    def _zstd_runs(self, runs: Ints, group: str, stream: int, spec: StoredColumn, at: Places) -> pa.Array:
        chunks = self._fetch(group)
        of_run = chunks.of_run[runs]
        self._check(chunks, runs, np.full(len(self.segments.numbers), stream), spec)
        try:
            offsets, data = decode_bytes(
                chunks.buffers,
                chunks.source[of_run],
                chunks.headers.block[stream, of_run],
                chunks.headers.length[stream, of_run],
                at.in_blocks(runs, chunks.run_rows),
                at.first[runs],
                at.last[runs],
            )
        except BadBlock as e:
            raise self._corrupt(int(runs[e.index]), spec.name, e.what, group) from e
        if offsets[-1] > MAX_TEXT:
            raise InputError(
                f"{offsets[-1]} bytes of column {spec.name!r} at once; {MAX_TEXT} at most: read fewer users"
            )
        try:
            return texts_of(offsets, data, spec)
        except pa.ArrowInvalid as e:
            raise self._corrupt(int(runs[0]), spec.name, f"a block holds no {spec.dtype}: {e}", group) from e

    def _check(self, chunks: Chunks, runs: Ints, stream: Ints, spec: StoredColumn) -> None:
        """CRC of every block of a stream (by position in the set) that the runs lie in, each once."""
        headers = chunks.headers
        if runs is self._every and (stream == stream[0]).all():
            k = int(stream[0])
            bad = kernel("check_crcs")(
                chunks.buffers, chunks.source, headers.block[k], headers.length[k], headers.crc[k]
            )
            chunk, size = chunks.of_run, headers.length[k].sum()
        else:
            chunk = chunks.of_run[runs]
            used = np.unique(chunk)
            k_of = stream[chunks.position[used]]
            bad = kernel("check_crcs")(
                chunks.buffers,
                chunks.source[used],
                headers.block[k_of, used],
                headers.length[k_of, used],
                headers.crc[k_of, used],
            )
            bad = int(used[bad]) if bad >= 0 else -1
            size = headers.length[k_of, used].sum()
        self.stats.book_bytes(spec.id, int(size))
        if bad >= 0:
            run = int(runs[np.flatnonzero(chunk == bad)[0]])
            raise self._corrupt(run, spec.name, "the block's CRC does not match", chunks.group)

    def _decode(
        self,
        group: str,
        runs: Ints,
        stream: Ints,
        spec: StoredColumn,
        out: npt.NDArray[Any],
        lookup: ColumnDictionary | None,
        at: Places,
        nulls: bool = False,
    ) -> None:
        """Decode the runs' blocks of one stream (by position in the set), values or ``nulls``, into ``out``."""
        if not len(runs):
            return
        b = self._block_runs(group, runs, stream, spec, lookup, at, nulls)
        since = time.perf_counter()
        words = _NO_WORDS if lookup is None else lookup.words
        bad = kernel("decode_fixed")(
            *b.blocks, words, b.dict_off, b.dict_n, b.block, b.n_rows, b.first, b.last, b.out_pos,
            out.view(f"i{out.dtype.itemsize}"),
        )  # fmt: skip
        if bad >= 0:
            raise self._corrupt(int(runs[bad]), spec.name, "the block does not decode", group)
        self.stats.clock("decode", since)

    def _block_runs(
        self,
        group: str,
        runs: Ints,
        stream: Ints,
        spec: StoredColumn,
        lookup: ColumnDictionary | None,
        at: Places,
        nulls: bool = False,
    ) -> BlockRuns:
        """The runs in their blocks of one stream (by position in the set), fetched and their CRCs checked."""
        chunks = self._fetch(group)
        since = time.perf_counter()
        self._check(chunks, runs, stream, spec)
        self.stats.clock("crc", since)
        headers, chunk, position = chunks.headers, chunks.of_run, self._position
        first, last, out_pos = at.first, at.last, at.out_pos[:-1] if len(at.out_pos) > len(self.piece) else at.out_pos
        if runs is not self._every:
            chunk, position, first, last, out_pos = (a[runs] for a in (chunk, position, first, last, out_pos))
        if (stream == stream[0]).all():
            k = int(stream[0])
            blocks = headers.block[k], headers.length[k], headers.codec[k], headers.width[k]
        else:
            k_of = stream[chunks.position], np.arange(len(chunks.position))
            blocks = headers.block[k_of], headers.length[k_of], headers.codec[k_of], headers.width[k_of]
        if (blocks[2] == ABSENT).any():
            blocks = self._absent(group, runs, stream, spec, nulls)
        dict_off, dict_n = _NO_CODES, _NO_CODES
        if lookup is not None and len(lookup.words):
            seg = self.segments.numbers[chunks.position]
            dict_off, dict_n = lookup.offset[seg], lookup.n[seg]
        n_rows = at.in_blocks(runs, chunks.run_rows)
        return BlockRuns(chunks.buffers, chunks.source, *blocks, dict_off, dict_n, chunk, n_rows, first, last, out_pos)

    def _absent(
        self, group: str, runs: Ints, stream: Ints, spec: StoredColumn, nulls: bool
    ) -> tuple[Ints, Ints, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Blocks of a stream of nulls, some of which the block of the stream after it tells."""
        chunks = self._fetch(group)
        headers, k, each = chunks.headers, stream[chunks.position], np.arange(len(chunks.position))
        absent = (headers.codec[k, each] == ABSENT) & (k >= 0)
        after = np.minimum(k + absent, len(headers.codec) - 1)
        wrong = np.flatnonzero(absent & ((headers.codec[after, each] != SPARSE) | (not nulls)))
        if len(wrong):
            run = runs[np.flatnonzero(np.isin(chunks.of_run[runs], wrong))[0]]
            raise self._corrupt(int(run), spec.name, "nulls without a block that tells them", group)
        self._check(chunks, runs, np.where(stream >= 0, stream + 1, stream), spec)
        codec = np.where(absent, ABSENT, headers.codec[k, each]).astype(np.uint8)
        return headers.block[after, each], headers.length[after, each], codec, headers.width[k, each]

    def _fetch(self, group: str) -> Chunks:
        if group not in self._chunks:
            self._chunks[group] = self._fetch_now(group)
        return self._chunks[group]

    def _stripes(self) -> Stripes:
        """The stripes that the runs lie in, with their records: looked up once for all groups."""
        if self._found is not None:
            return self._found
        fresh = np.ones(len(self.piece), np.bool_)
        fresh[1:] = (self.stripe[1:] != self.stripe[:-1]) | (self._position[1:] != self._position[:-1])
        of_run, one = np.cumsum(fresh) - 1, np.flatnonzero(fresh)
        position, stripe = self._position[one], self.stripe[one]
        beyond = np.flatnonzero(stripe >= self.segments.n_stripes[position])
        if len(beyond):
            raise self._corrupt(int(one[beyond[0]]), "event_ts", "the index names a stripe that is not there")
        with self.naming(0):
            records = self.segments.stripes(position, stripe)
        many = np.flatnonzero(records["n_rows"] > MAX_STRIPE_ROWS)
        if len(many):
            what = f"a stripe of {records['n_rows'][many[0]]} rows; {MAX_STRIPE_ROWS} at most"
            raise self._corrupt(int(one[many[0]]), "event_ts", what)
        long = np.flatnonzero(self.row_to > records["n_rows"][of_run])
        if len(long):
            raise self._corrupt(int(long[0]), "event_ts", "the index names rows beyond the stripe")
        outside = np.flatnonzero(_beyond(records["chunks"], self.segments.sizes[position, None]).any(axis=1))
        if len(outside):
            raise self._corrupt(int(one[outside[0]]), "event_ts", "the index names bytes beyond the file")
        self._found = Stripes(of_run, position, stripe, records)
        return self._found

    def prefetch(self, columns: Sequence[StoredColumn]) -> None:
        """Read the keys' and all these columns' blocks at once, where each read is a round trip to a distant store."""
        if self.segments.buffers is not None or not self.total:
            return
        groups = dict.fromkeys(p.group for c in (*key_columns(), *columns) for p in self.segments.streams(c.id))
        since = time.perf_counter()
        self._read_bodies({g: self._placed(g) for g in groups if g not in self._chunks})
        self.stats.clock("fetch", since)

    def _read_bodies(self, groups: Mapping[str, Placed]) -> None:
        """Read the chunks of groups into memory, one after another, in one call."""
        files = {name: k for k, name in enumerate(dict.fromkeys(n for p in groups.values() for n in p.files))}
        which = np.concatenate([np.array([files[n] for n in p.files], np.int64)[p.source] for p in groups.values()])
        chunk = np.concatenate([p.chunk for p in groups.values()])
        offset, length = chunk["offset"].astype(np.int64), chunk["length"].astype(np.int64)
        ends, total = np.cumsum(length), int(length.sum())
        size = {name: s for p in groups.values() for name, s in zip(p.files, p.sizes.tolist(), strict=True)}
        asked = np.bincount(which, length, len(files))
        if (asked > [size[name] for name in files]).any():
            # Each lies in its file, but chunks that overlap would take more memory than there are bytes. A stripe that
            # several users share is read as often as runs come back to it, and is no second chunk.
            once = np.concatenate([_first_of_each(p.position, p.stripe) for p in groups.values()])
            asked = np.bincount(which[once], length[once], len(files))
            for name, n_bytes in zip(files, asked.tolist(), strict=True):
                if n_bytes > size[name]:
                    raise CorruptionError(f"chunks of {n_bytes:.0f} bytes in a file of {size[name]}", file=name)
        buffer = pool.empty(total // 8 + 1, np.int64).view(np.uint8)[:total]
        self.generation.objects.read_many(list(files), which, offset, length, buffer, ends - length)
        stop = offsets_of([int(p.chunk["length"].sum(dtype=np.int64)) for p in groups.values()])
        for k, group in enumerate(groups):
            self._bodies[group] = buffer[stop[k] : stop[k + 1]]

    def _placed(self, group: str) -> Placed:
        stripes, (place, _) = self._stripes(), self.segments.group(group)
        of_run, position, number, records = stripes.of_run, stripes.position, stripes.number, stripes.records
        if (place < 0).any():
            have = place[position] >= 0
            of_run = np.where(have, np.cumsum(have) - 1, -1)[of_run]
            position, number, records = position[have], number[have], records[have]
        files, sizes, buffers = self.segments.names, self.segments.sizes, self.segments.buffers
        source = position
        layer = self.segments.layer(group)
        if layer is not None:
            files, sizes, buffers = layer.names, layer.sizes, layer.buffers
            source = layer.file[position]
            records = self._overlay_records(layer, group, source, number, records, of_run)
        chunk = records["chunks"][np.arange(len(records)), place[position]]
        return Placed(of_run, position, records, chunk, number, files, sizes, source, buffers)

    def _fetch_now(self, group: str) -> Chunks:
        """Find or read the chunks of all runs, and check their headers."""
        since = time.perf_counter()
        placed = self._placed(group)
        of_run, position, records, chunk = placed.of_run, placed.position, placed.records, placed.chunk
        offset, length = chunk["offset"].astype(np.int64), chunk["length"].astype(np.int64)
        self.stats.bytes_read += int(length.sum())
        buffers, source = placed.buffers, placed.source
        if buffers is None:
            if group not in self._bodies:
                self._read_bodies({group: placed})
            buffers = Buffers([self._bodies.pop(group)])
            source, offset = np.zeros(len(offset), np.int64), np.cumsum(length) - length
        widths = self.segments.group(group)[1]
        header_crc = np.ascontiguousarray(chunk["header_crc"])
        try:
            headers = parse_headers(buffers, source, offset, length, widths[position], header_crc)
        except BadBlock as e:
            run = int(np.flatnonzero(of_run == e.index)[0])
            raise self._corrupt(run, self._stream_name(group, run, e.stream), e.what, group) from e
        self.stats.clock("fetch", since)
        rows = records["n_rows"].astype(np.int64)
        return Chunks(group, buffers, position, source, rows, headers, of_run, rows[of_run])

    def _overlay_records(
        self, layer: OverlayLayer, group: str, file: Ints, number: Ints, records: npt.NDArray[np.void], of_run: Ints
    ) -> npt.NDArray[np.void]:
        """Records of the same stripes in the overlays, which must have the same rows."""
        with self.naming(0):
            found = layer.stripes.take(file, number)
        wrong = (found["n_rows"] != records["n_rows"]) | _beyond(found["chunks"][:, 0], layer.sizes[file])
        if wrong.any():
            run = int(np.flatnonzero(of_run == int(wrong.argmax()))[0])
            what = "the index names other rows than the segment's, or bytes beyond the file"
            raise self._corrupt(run, layer.column, what, group)
        return found

    def _stream_name(self, group: str, run: int, stream: int) -> str:
        layer = self.segments.layer(group)
        if layer is not None:
            return layer.column
        if stream < 0:
            return f"group {group}"
        return self.segments.segments[int(self._position[run])].stream_names(group)[stream]

    def naming(self, run: int) -> AbstractContextManager[None]:
        """Damage found meanwhile hits at least the user of ``run``."""
        if not len(self.piece):
            return nullcontext()
        return naming(self.pieces.users[np.searchsorted(self.pieces.piece_off, self.piece[run], side="right") - 1])

    def _corrupt(self, run: int, column: str, what: str, group: str = KEYS_GROUP) -> CorruptionError:
        position, layer = int(self._position[run]), self.segments.layer(group)
        file = self.segments.names[position] if layer is None else layer.names[int(layer.file[position])]
        user = np.searchsorted(self.pieces.piece_off, self.piece[run], side="right") - 1
        return CorruptionError(
            f"{what} (stripe {self.stripe[run]})",
            file=file,
            user=plain(self.pieces.users[user]),
            column=column,
        )


def _first_of_each(position: Ints, stripe: Ints) -> npt.NDArray[np.bool_]:
    """Marks the first of those that have the same place of a segment and the same stripe."""
    first = np.zeros(len(stripe), np.bool_)
    first[np.unique(np.stack([position, stripe]), axis=1, return_index=True)[1]] = True
    return first
