"""Read a batch of users from a generation: index look-up, one fetch, one decode call per column.

Worked trace: 512 users over 16 buckets -> their *pieces* (``look_up``) -> rows wanted of each piece -> the
chunks of the stripes that hold them, fetched into one buffer per feature group -> headers and CRCs checked ->
``decode_fixed`` once per column over all runs of all users.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.buffers import Buffers
from thinrow.core.errors import CorruptionError
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.core.users import Users, bucket_of, plain
from thinrow.history.archive.dictionaries import ColumnDictionary
from thinrow.history.archive.hides import group_hides
from thinrow.history.archive.layout import PIECE_DTYPE, StoredColumn
from thinrow.jagged import HIDE_DTYPE, Column
from thinrow.jagged.column import unite_dictionaries
from thinrow.kernels import kernel
from thinrow.schema.event_schema import MAX_ELEMENTS
from thinrow.storage.codecs import ZSTD_BYTES, BadBlock, Headers, decode_bytes, parse_headers
from thinrow.storage.meter import Meter

if TYPE_CHECKING:
    from thinrow.history.archive.generation import Generation
    from thinrow.history.archive.segment import Segment

Ints = npt.NDArray[np.int64]
#: By segment number: the stream of values of a column, of its nulls and of its lengths; -1 where there is none.
_Streams: TypeAlias = tuple[Ints, Ints, Ints]
#: Feature group, and the dtype in which its segments have a column.
_Key: TypeAlias = tuple[str, str]


@dataclass(slots=True)
class ReadStats:
    """What a read cost. ``seconds`` by stage: index, fetch, crc, decode, verify, merge; no second is booked twice.

    ``bytes_read`` are the chunks that were asked for; ``io`` counts the requests and bytes that this took, index and
    gaps between joined ranges included.
    """

    bytes_read: int = 0
    events_decoded: int = 0
    events_delivered: int = 0
    pieces: int = 0
    mixed_pieces: int = 0
    versions_verified: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    io: Meter = field(default_factory=Meter)

    def add(self, other: ReadStats) -> None:
        """Add the figures of another read to these."""
        for name in ("bytes_read", "events_decoded", "events_delivered", "pieces", "mixed_pieces", "versions_verified"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.io.add(**other.io.counts())
        for stage, s in other.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + s

    def clock(self, stage: str, since: float) -> float:
        """Book the time since ``since`` under ``stage``; returns now."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - since
        return now


@dataclass(frozen=True, slots=True)
class Pieces:
    """The index entries of a batch of users.

    Attributes:
        users: (U,) distinct ids.
        piece_off: (U + 1,) pieces of each user.
        records: (P,) PIECE_DTYPE, by user, then segment, then time; ``min_hidden_from`` takes hide-lists into account.
        segment: (P,) number of the segment in the generation's list.
        run_off: (R + 1,) pieces of each run (one user in one segment).
        run_of_user: (U + 1,) runs of each user.
        watermark: (U,) highest arrival that the generation holds or has a tombstone for (0 where none).
        hide_off, hides: the hide-list by user (HIDE_DTYPE).
    """

    users: Users
    piece_off: Ints
    records: npt.NDArray[np.void]
    segment: Ints
    run_off: Ints
    run_of_user: Ints
    watermark: Ints
    hide_off: Ints
    hides: npt.NDArray[np.void]

    def field(self, name: str) -> npt.NDArray[Any]:
        """One field of the records, contiguous."""
        return np.ascontiguousarray(self.records[name])


@contextmanager
def naming(user: object) -> Iterator[None]:
    """Damage that hits a whole file or page names a user who cannot be read for it."""
    try:
        yield
    except CorruptionError as e:
        if e.user is not None:
            raise
        raise CorruptionError(e.what, file=e.file, user=plain(user), column=e.column) from e


def look_up(generation: Generation, users: Users) -> Pieces:
    """Index entries of distinct ``users``. Raises CorruptionError on a damaged file or index page."""
    owner: list[Ints] = []
    found: list[npt.NDArray[np.void]] = []
    source: list[Ints] = []
    hide_user: list[Ints] = []
    hide_rows: list[npt.NDArray[np.void]] = []
    buckets = bucket_of(users, generation.n_buckets)
    for bucket in np.unique(buckets):
        numbers = generation.segments_of(int(bucket))
        if not numbers:
            continue
        members = np.flatnonzero(buckets == bucket)
        members = members[np.argsort(users[members], kind="stable")]
        keys = users[members]
        with naming(keys[0]):
            for number in numbers:
                segment = generation.segment(number)
                first, last = segment.pieces.find(keys)
                rows, offsets = ranges_index(first, last)
                if len(rows):
                    found.append(segment.pieces.take(rows))
                    owner.append(np.repeat(members, np.diff(offsets)))
                    source.append(np.full(len(rows), number, np.int64))
                _collect_hides(segment, keys, members, hide_user, hide_rows)
    pieces = _arrange(users, owner, found, source, hide_user, hide_rows)
    # What was erased at the end of a user's arrivals was archived all the same.
    np.maximum(pieces.watermark, generation.tombstones(users).watermark(), out=pieces.watermark)
    return pieces


def _collect_hides(
    segment: Segment, keys: Users, members: Ints, hide_user: list[Ints], hide_rows: list[npt.NDArray[np.void]]
) -> None:
    hides = segment.hides
    if not len(hides.users):
        return
    at = np.searchsorted(hides.users, keys)
    hit = np.flatnonzero((at < len(hides.users)) & (hides.users[np.minimum(at, len(hides.users) - 1)] == keys))
    rows, offsets = ranges_index(hides.offsets[at[hit]], hides.offsets[at[hit] + 1])
    hide_user.append(np.repeat(members[hit], np.diff(offsets)))
    hide_rows.append(hides.records[rows])


def _arrange(
    users: Users,
    owner: list[Ints],
    found: list[npt.NDArray[np.void]],
    source: list[Ints],
    hide_user: list[Ints],
    hide_rows: list[npt.NDArray[np.void]],
) -> Pieces:
    n = len(users)
    who = np.concatenate([np.empty(0, np.int64), *owner])
    segment = np.concatenate([np.empty(0, np.int64), *source])
    records = np.concatenate([np.empty(0, PIECE_DTYPE), *found])
    order = np.lexsort((segment, who))
    who, segment, records = who[order], segment[order], records[order]
    piece_off = np.searchsorted(who, np.arange(n + 1)).astype(np.int64)
    new_run = np.ones(len(who), np.bool_)
    new_run[1:] = (who[1:] != who[:-1]) | (segment[1:] != segment[:-1])
    starts = np.flatnonzero(new_run)
    run_off = np.append(starts, len(who)).astype(np.int64)
    run_of_user = np.searchsorted(who[starts], np.arange(n + 1)).astype(np.int64)
    watermark = np.zeros(n, np.int64)
    np.maximum.at(watermark, who, records["max_arrival"])
    hides, hide_off = group_hides(
        n, np.concatenate([np.empty(0, np.int64), *hide_user]), np.concatenate([np.empty(0, HIDE_DTYPE), *hide_rows])
    )
    return with_hides(
        Pieces(
            users, piece_off, records, segment, run_off, run_of_user, watermark, hide_off[:1].repeat(n + 1), hides[:0]
        ),
        hides,
        hide_off,
    )


def with_hides(pieces: Pieces, hides: npt.NDArray[np.void], hide_off: Ints) -> Pieces:
    """The same pieces under a longer hide-list."""
    records = pieces.records
    if len(hides):
        least = pieces.field("min_hidden_from").copy()
        kernel("tighten_pieces")(
            pieces.piece_off,
            pieces.field("first_ts"),
            pieces.field("last_ts"),
            least,
            hide_off,
            np.ascontiguousarray(hides["event_ts"]),
            np.ascontiguousarray(hides["hidden_from"]),
        )
        records = records.copy()
        records["min_hidden_from"] = least
    return Pieces(
        pieces.users,
        pieces.piece_off,
        records,
        pieces.segment,
        pieces.run_off,
        pieces.run_of_user,
        pieces.watermark,
        hide_off,
        hides,
    )


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Chunks of one feature group, where they lie.

    Attributes:
        buffers: mapped segments, or one buffer with what was fetched.
        of_run: chunk of each run, -1 where its segment lacks the group.
        source: (C,) buffer of each chunk.
        rows: (C,) rows of each chunk's stripe.
        headers: of the chunks.
    """

    buffers: Buffers
    of_run: Ints
    source: Ints
    rows: Ints
    headers: Headers


@dataclass(frozen=True, slots=True)
class _Needed:
    """The stripes of one segment that some runs lie in: ``runs[i]`` lies in ``stripes[inverse[i]]``."""

    number: int
    segment: Segment
    runs: Ints
    inverse: Ints
    stripes: Ints
    records: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the values of each run lie in its block and in the output.

    Attributes:
        n: (R,) values in the whole block; None where they are ``per_row`` for each row of the stripe.
        first, last: (R,) the values wanted, ``[first, last)`` of the block.
        out_pos: (R + 1,) where they go.
        row_off: (rows + 1,) offsets of the lists of all rows; None where they are none.
    """

    n: Ints | None
    first: Ints
    last: Ints
    out_pos: Ints
    row_off: Ints | None = None
    per_row: int = 1

    def times(self, per_row: int) -> _Places:
        """The same rows with so many values each."""
        if per_row == 1:
            return self
        return _Places(None, self.first * per_row, self.last * per_row, self.out_pos * per_row, None, per_row)

    def in_blocks(self, runs: Ints, rows: Ints) -> Ints:
        """Values in the blocks of ``runs``, whose stripes have ``rows`` rows."""
        return rows * self.per_row if self.n is None else self.n[runs]


class RowReader:
    """Decodes row ranges of pieces. One instance per batch: it keeps what it fetched until the batch is done."""

    def __init__(
        self, generation: Generation, pieces: Pieces, piece: Ints, start: Ints, stop: Ints, stats: ReadStats
    ) -> None:
        """Rows ``[start[i], stop[i])`` (within the piece) of piece ``piece[i]``, delivered one after another."""
        self.generation, self.pieces, self.stats = generation, pieces, stats
        self.piece = piece
        self.segment = pieces.segment[piece]
        records = pieces.records[piece]
        self.stripe = records["stripe"].astype(np.int64)
        self.row_from = records["row"].astype(np.int64) + start
        self.row_to = records["row"].astype(np.int64) + stop
        self.n_rows = stop - start
        self.out_pos = offsets_of(self.n_rows)
        self.total = int(self.out_pos[-1])
        self._rows = _Places(None, self.row_from, self.row_to, self.out_pos)
        self._chunks: dict[str, _Chunks] = {}
        self._needed: list[_Needed] | None = None

    def column(self, spec: StoredColumn) -> Column:
        """One column of all rows; null where a segment does not have it.

        Raises:
            CorruptionError: a block is damaged (names file, user and column).
        """
        parts = {n.number: n.segment.stream_of(spec.id) for n in self._stripes_needed()}
        null = np.zeros(self.total, np.int8)
        missing = [s for s, part in parts.items() if part is None]
        if missing:
            null[:] = np.repeat(np.isin(self.segment, missing), self.n_rows)
        lookup = self.generation.dictionary(spec, tuple(parts))
        long_runs = np.empty(0, np.int64)
        keys = {(p[0], p[2].dtype) for p in parts.values() if p is not None}
        streams = {key: self._streams_of(key, parts) for key in keys}
        for (group, _), (_, nulls, _) in streams.items():
            self._decode(group, np.flatnonzero(nulls[self.segment] >= 0), nulls, spec, null, None, self._rows)
        at = self._lists(spec, streams) if spec.ragged else self._rows.times(max(spec.size, 1))
        values = np.zeros(int(at.out_pos[-1]), np.int32 if spec.is_bytes else spec.dtype)
        for (group, dtype), (stream, _, _) in streams.items():
            runs = np.flatnonzero(stream[self.segment] >= 0)
            if spec.is_bytes:
                coded = self._codec(group, runs, stream) != ZSTD_BYTES
                runs, long_runs = runs[coded], np.concatenate([long_runs, runs[~coded]])
            if dtype != spec.dtype and not spec.is_bytes:
                self._decode_widened(group, runs, stream, spec, values, lookup, at, dtype)
                continue
            self._decode(group, runs, stream, spec, values, None if spec.is_bytes else lookup, at)
            if spec.is_bytes and len(runs):
                self._unite_codes(runs, spec, values, lookup, at)
        strings = lookup.strings if spec.is_bytes else None
        if len(long_runs):
            strings = self._add_long(long_runs, parts, spec, values, lookup, at)
        valid = null == 0 if null.any() else None
        return Column(values.reshape(-1, spec.size) if spec.size else values, valid, strings, at.row_off)

    def _streams_of(self, key: _Key, parts: Mapping[int, tuple[str, int, StoredColumn] | None]) -> _Streams:
        stream = np.full(len(self.generation.segments), -1, np.int64)
        nulls, lengths = stream.copy(), stream.copy()
        for s, part in parts.items():
            if part is not None and (part[0], part[2].dtype) == key:
                stream[s] = part[1]
                lengths[s] = part[1] - 1 if part[2].ragged else -1
                nulls[s] = part[1] - 1 - part[2].ragged if part[2].nullable else -1
        return stream, nulls, lengths

    def _lists(self, spec: StoredColumn, streams: Mapping[_Key, _Streams]) -> _Places:
        """Where the elements of lists lie: the lengths of whole stripes say it."""
        n_runs = len(self.piece)
        first, last, n = np.zeros(n_runs, np.int64), np.zeros(n_runs, np.int64), np.zeros(n_runs, np.int64)
        row_lengths = np.zeros(self.total, np.int64)
        for (group, _), (_, _, lengths) in streams.items():
            runs = np.flatnonzero(lengths[self.segment] >= 0)
            if not len(runs):
                continue
            chunks = self._fetch(group)
            of_run = chunks.of_run[runs]
            chunk, one, inverse = np.unique(of_run, return_index=True, return_inverse=True)
            base = offsets_of(chunks.rows[chunk])
            found = np.empty(int(base[-1]), np.int64)
            # All rows of each chunk, under the name of one of its runs.
            start, stop, out = np.zeros(n_runs, np.int64), np.zeros(n_runs, np.int64), np.zeros(n_runs, np.int64)
            stop[runs[one]], out[runs[one]] = chunks.rows[chunk], base[:-1]
            self._decode(group, runs[one], lengths, spec, found, None, _Places(None, start, stop, out))
            wrong = np.flatnonzero((found < 0) | (found > MAX_ELEMENTS))
            if len(wrong):
                at = int(np.searchsorted(base, wrong[0], side="right")) - 1
                raise self._corrupt(int(runs[one][at]), spec.name, f"a list of {found[wrong[0]]} elements")
            total, begin = offsets_of(found), base[inverse]
            first[runs] = total[begin + self.row_from[runs]] - total[begin]
            last[runs] = total[begin + self.row_to[runs]] - total[begin]
            n[runs] = total[base[inverse + 1]] - total[begin]
            rows, _ = ranges_index(begin + self.row_from[runs], begin + self.row_to[runs])
            place, _ = ranges_index(self.out_pos[:-1][runs], self.out_pos[1:][runs])
            row_lengths[place] = found[rows]
        row_off = offsets_of(row_lengths)
        return _Places(n, first, last, row_off[self.out_pos], row_off)

    def _codec(self, group: str, runs: Ints, stream: Ints) -> npt.NDArray[np.uint8]:
        """Codec of the block of each run in one stream (``stream``: by segment number)."""
        chunks = self._fetch(group)
        codec: npt.NDArray[np.uint8] = chunks.headers.codec[chunks.of_run[runs], stream[self.segment[runs]]]
        return codec

    def _decode_widened(
        self,
        group: str,
        runs: Ints,
        stream: Ints,
        spec: StoredColumn,
        values: npt.NDArray[Any],
        lookup: ColumnDictionary,
        at: _Places,
        dtype: str,
    ) -> None:
        """Decode the runs as the narrower ``dtype`` in which their segments have the column, then widen them."""
        narrow = np.zeros(len(values), dtype)
        self._decode(group, runs, stream, spec, narrow, lookup, at)
        rows = ranges_index(at.out_pos[:-1][runs], at.out_pos[1:][runs])[0]
        values[rows] = narrow[rows]

    def _unite_codes(
        self, runs: Ints, spec: StoredColumn, codes: npt.NDArray[Any], lookup: ColumnDictionary, at: _Places
    ) -> None:
        seg = self.segment[runs]
        bad = kernel("remap_codes")(
            codes, at.out_pos[runs], (at.last - at.first)[runs], lookup.remap, lookup.offset[seg], lookup.n[seg]
        )
        if bad >= 0:
            raise self._corrupt(int(runs[bad]), spec.name, "a code lies outside its dictionary")

    def _add_long(
        self,
        runs: Ints,
        parts: dict[int, tuple[str, int, StoredColumn] | None],
        spec: StoredColumn,
        codes: npt.NDArray[Any],
        lookup: ColumnDictionary,
        at: _Places,
    ) -> pa.Array:
        """Decode runs whose strings stand in their blocks; returns the strings that all codes now refer to."""
        kind = pa.string() if spec.dtype == "string" else pa.binary()
        found = [lookup.strings]
        where = []
        for s in np.unique(self.segment[runs]):
            part = parts[int(s)]
            assert part is not None
            mine = runs[self.segment[runs] == s]
            found.append(self._zstd_runs(mine, part[0], part[1], spec, at).cast(kind))
            where.append(ranges_index(at.out_pos[:-1][mine], at.out_pos[1:][mine])[0])
        strings, maps = unite_dictionaries(found)
        if len(maps[0]):
            codes[:] = maps[0][codes]
        for rows, into in zip(where, maps[1:], strict=True):
            codes[rows] = into
        return strings

    def _zstd_runs(self, runs: Ints, group: str, stream: int, spec: StoredColumn, at: _Places) -> pa.Array:
        chunks = self._fetch(group)
        of_run = chunks.of_run[runs]
        self._check(chunks, runs, np.full(len(runs), stream), spec)
        try:
            offsets, data = decode_bytes(
                chunks.buffers,
                chunks.source[of_run],
                chunks.headers.block[of_run, stream],
                chunks.headers.length[of_run, stream],
                at.in_blocks(runs, chunks.rows[of_run]),
                at.first[runs],
                at.last[runs],
            )
        except BadBlock as e:
            raise self._corrupt(int(runs[e.index]), spec.name, e.what) from e
        n = len(offsets) - 1
        raw = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), n, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
        )
        return raw.cast(pa.binary())

    def _check(self, chunks: _Chunks, runs: Ints, stream: Ints, spec: StoredColumn) -> None:
        """CRC of every block that the runs lie in, each once; ``stream`` is that of each run."""
        of_run = chunks.of_run[runs]
        # Runs of one stripe follow each other.
        fresh = np.ones(len(runs), np.bool_)
        fresh[1:] = of_run[1:] != of_run[:-1]
        chunk, k = of_run[fresh], stream[fresh]
        headers = chunks.headers
        bad = kernel("check_crcs")(
            chunks.buffers,
            chunks.source[chunk],
            headers.block[chunk, k],
            headers.length[chunk, k],
            headers.crc[chunk, k],
        )
        if bad >= 0:
            raise self._corrupt(int(runs[fresh][bad]), spec.name, "the block's CRC does not match")

    def _decode(
        self,
        group: str,
        runs: Ints,
        stream: Ints,
        spec: StoredColumn,
        out: npt.NDArray[Any],
        lookup: ColumnDictionary | None,
        at: _Places,
    ) -> None:
        """Decode the runs' blocks of one stream (``stream``: by segment number) into ``out``."""
        if not len(runs):
            return
        chunks = self._fetch(group)
        since = time.perf_counter()
        seg = self.segment[runs]
        of_run, k = chunks.of_run[runs], stream[seg]
        self._check(chunks, runs, k, spec)
        since = self.stats.clock("crc", since)
        none = np.zeros(len(runs), np.int64)
        headers = chunks.headers
        bad = kernel("decode_fixed")(
            chunks.buffers,
            chunks.source[of_run],
            headers.block[of_run, k],
            headers.length[of_run, k],
            headers.codec[of_run, k],
            headers.width[of_run, k],
            at.in_blocks(runs, chunks.rows[of_run]),
            at.first[runs],
            at.last[runs],
            at.out_pos[runs],
            np.empty(0, np.uint64) if lookup is None else lookup.words,
            none if lookup is None else lookup.offset[seg],
            none if lookup is None else lookup.n[seg],
            out.view(f"i{out.dtype.itemsize}"),
        )
        if bad >= 0:
            raise self._corrupt(int(runs[bad]), spec.name, "the block does not decode")
        self.stats.clock("decode", since)

    def _fetch(self, group: str) -> _Chunks:
        if group not in self._chunks:
            self._chunks[group] = self._fetch_now(group)
        return self._chunks[group]

    def _stripes_needed(self) -> list[_Needed]:
        """The stripes that the runs lie in, by segment, with their records: looked up once for all groups."""
        if self._needed is None:
            order = np.argsort(self.segment, kind="stable")
            numbers, starts = np.unique(self.segment[order], return_index=True)
            self._needed = []
            for s, runs in zip(numbers.tolist(), np.split(order, starts[1:]), strict=False):
                segment = self.generation.segment(s)
                stripes, inverse = np.unique(self.stripe[runs], return_inverse=True)
                beyond = np.flatnonzero(self.stripe[runs] >= segment.stripes.n_records)
                if len(beyond):
                    raise self._corrupt(int(runs[beyond[0]]), "event_ts", "the index names a stripe that is not there")
                with self.naming(int(runs[0])):
                    records = segment.stripes.take(stripes)
                long = np.flatnonzero(self.row_to[runs] > records["n_rows"][inverse])
                if len(long):
                    raise self._corrupt(int(runs[long[0]]), "event_ts", "the index names rows beyond the stripe")
                end = records["chunks"]["offset"] + records["chunks"]["length"]
                if len(end) and int(end.max()) > segment.container.size:
                    raise self._corrupt(int(runs[0]), "event_ts", "the index names bytes beyond the file")
                self._needed.append(_Needed(s, segment, runs, inverse, stripes, records))
        return self._needed

    def _fetch_now(self, group: str) -> _Chunks:
        """Find or read the chunks of all runs, and check their headers."""
        since = time.perf_counter()
        of_run = np.full(len(self.piece), -1, np.int64)
        needed = [n for n in self._stripes_needed() if group in n.segment.groups]
        first = 0
        for n in needed:
            of_run[n.runs] = first + n.inverse
            first += len(n.stripes)
        chunk = np.concatenate([n.records["chunks"][:, n.segment.groups.index(group)] for n in needed])
        rows = np.concatenate([n.records["n_rows"] for n in needed]).astype(np.int64)
        which = np.repeat(np.arange(len(needed)), [len(n.stripes) for n in needed])
        offset, length = chunk["offset"].astype(np.int64), chunk["length"].astype(np.int64)
        self.stats.bytes_read += int(length.sum())
        names = [n.segment.name for n in needed]
        mapped = self.generation.objects.mapped(names)
        if mapped is None:
            ends = np.cumsum(length)
            buffer = np.empty(int(length.sum()) // 8 + 1, np.uint64).view(np.uint8)[: int(length.sum())]
            self.generation.objects.read_many(names, which, offset, length, buffer, ends - length)
            mapped, which, offset = (buffer,), np.zeros(len(which), np.int64), ends - length
        buffers = Buffers(mapped)
        n_streams = np.array([n.segment.n_streams(group) for n in needed])
        widths = np.repeat(n_streams, [len(n.stripes) for n in needed])
        try:
            headers = parse_headers(buffers, which, offset, length, widths, np.ascontiguousarray(chunk["header_crc"]))
        except BadBlock as e:
            run = int(np.flatnonzero(of_run == e.index)[0])
            columns = self.generation.segment(int(self.segment[run])).stream_names(group)
            raise self._corrupt(run, columns[e.stream] if e.stream >= 0 else f"group {group}", e.what) from e
        self.stats.clock("fetch", since)
        return _Chunks(buffers, of_run, which, rows, headers)

    def naming(self, run: int) -> AbstractContextManager[None]:
        """Damage found meanwhile hits at least the user of ``run``."""
        if not len(self.piece):
            return nullcontext()
        return naming(self.pieces.users[np.searchsorted(self.pieces.piece_off, self.piece[run], side="right") - 1])

    def _corrupt(self, run: int, column: str, what: str) -> CorruptionError:
        user = np.searchsorted(self.pieces.piece_off, self.piece[run], side="right") - 1
        return CorruptionError(
            f"{what} (stripe {self.stripe[run]})",
            file=self.generation.segment(int(self.segment[run])).name,
            user=plain(self.pieces.users[user]),
            column=column,
        )
