"""The block codec: consecutive events of one user as bytes (docs/format/recent-v2.md, section 4).

Worked example: two events of a schema with columns ``price float64`` (nullable) and ``shop string`` take rows of
8 (event_ts) + 1 (null bits) + 8 (price) + 4 (length of shop) = 21 bytes, so ``(1000, 2.5, "ab"), (1500, null, "c")`` is
a header of 24 bytes, 42 bytes of rows, the heap ``abc`` and the seal: 73 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import CommitConflict, CorruptionError, InputError, NewerFormatError
from thinrow.core.ragged import offsets_of
from thinrow.core.users import UserKind
from thinrow.history.recent.keys import (
    NO_ROWS,
    PAIR_DTYPE,
    UNKNOWN,
    is_sealed,
    joined_pairs,
    listed_pairs,
    refuse_wrong,
    seal,
    users_of_keys,
)
from thinrow.jagged import Column
from thinrow.jagged.column import ARROW_TYPES, cast_column, concat_columns, null_column
from thinrow.kernels import kernel
from thinrow.schema import ColumnSpec, EventSchema

FORMAT = 2
#: Format of blocks under a schema that has neither lists nor vectors: earlier versions read them.
_FORMAT_OF_SINGLE_VALUES = 1
BLOCK_ROWS = 256
HEADER_DTYPE = np.dtype(
    [
        ("format", "u1"),
        ("flags", "u1"),
        ("reserved", "<u2"),
        ("schema_id", "<u4"),
        ("n", "<u4"),
        ("heap_bytes", "<u4"),
        ("first_arrival", "<i8"),
    ]
)
_HEADER, _SEAL = HEADER_DTYPE.itemsize, 4
_U8 = np.dtype(np.uint8)
CORRECTIONS = 1
#: Bytes of strings in one append call (Arrow's 32-bit offsets).
_MAX_HEAP_BYTES = 2**31 - 1
_COUNTERS = "the user counters"
_NO_BYTES: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


@dataclass(slots=True)
class Rows:
    """Attributes:
    event_ts: (n,) int64 ms.
    target_ts, target_arrival: (n,) int64 of the event that each row supersedes, 0 where none; both None where no
        row supersedes any.
    event_ids: (n,) ids, or None.
    columns: name -> (n,) Column.
    """

    event_ts: npt.NDArray[np.int64]
    target_ts: npt.NDArray[np.int64] | None
    target_arrival: npt.NDArray[np.int64] | None
    event_ids: Column | None
    columns: dict[str, Column]

    def take(self, index: npt.NDArray[np.intp]) -> Rows:
        """Rows at ``index``, copied."""
        return Rows(
            self.event_ts[index],
            None if self.target_ts is None else self.target_ts[index],
            None if self.target_arrival is None else self.target_arrival[index],
            None if self.event_ids is None else self.event_ids.take(index),
            {name: column.take(index) for name, column in self.columns.items()},
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Attributes:
    dtype: of one row.
    size: its bytes.
    nullable: what the null bits stand for, in order: field names.
    heaped: what has bytes in the heap, in order: field names.
    format: that blocks of such rows carry.
    head: first 8 bytes of their headers.
    fields: (field, column) of each column.
    """

    dtype: np.dtype[np.void]
    size: int
    nullable: tuple[str, ...]
    heaped: tuple[str, ...]
    format: int
    head: int
    fields: tuple[tuple[str, str], ...]


def _field(spec: ColumnSpec) -> str:
    return f"c{spec.id}"


def _heaped(spec: ColumnSpec) -> list[str]:
    """The parts of a value that lie in the heap: of a list of strings the lengths of the elements, then their bytes."""
    name = _field(spec)
    if spec.ragged and spec.is_bytes:
        return [_lengths_of(name), name]
    return [name] if spec.ragged or spec.is_bytes else []


def _lengths_of(field: str) -> str:
    return f"{field}.lengths"


#: By schema, which is kept so that no other gets its id, and flags.
_layouts: dict[tuple[int, int], tuple[EventSchema, _Layout]] = {}
_MAX_LAYOUTS = 64


def layout_of(schema: EventSchema, flags: int) -> _Layout:
    """The layout of rows; found by the schema's identity: to hash one takes as long as to encode ten rows."""
    held = _layouts.get((id(schema), flags))
    if held is None:
        if len(_layouts) >= _MAX_LAYOUTS:
            _layouts.clear()
        held = _layouts[id(schema), flags] = schema, _new_layout(schema, flags)
    return held[1]


def _new_layout(schema: EventSchema, flags: int) -> _Layout:
    fields: list[Any] = [("event_ts", "<i8")]
    if flags & CORRECTIONS:
        fields += [("target_ts", "<i8"), ("target_arrival", "<i8")]
    nullable = [_field(c) for c in schema.columns if c.nullable]
    heaped = [part for c in schema.columns for part in _heaped(c)]
    if schema.event_id_dtype is not None:
        nullable.insert(0, "event_id")
    if nullable:
        fields.append(("nulls", "u1", ((len(nullable) + 7) // 8,)))
    if schema.event_id_dtype is not None:
        fields.append(("event_id", "<i8" if schema.event_id_dtype == "int64" else "<u4"))
        if schema.event_id_dtype == "string":
            heaped.insert(0, "event_id")
    for c in schema.columns:
        if parts := _heaped(c):
            fields += [(part, "<u4") for part in parts]
        else:
            fields.append((_field(c), np.dtype(c.dtype).newbyteorder("<"), (c.size,) if c.size else ()))
    shaped = any(c.ragged or c.size for c in schema.columns)
    form = FORMAT if shaped else _FORMAT_OF_SINGLE_VALUES
    head = int.from_bytes(np.array((form, flags, 0, schema.schema_id, 0, 0, 0), HEADER_DTYPE).tobytes()[:8], "little")
    columns = tuple((_field(c), c.name) for c in schema.columns)
    row = np.dtype(fields)
    return _Layout(row, row.itemsize, tuple(nullable), tuple(heaped), form, head, columns)


@dataclass(slots=True)
class Encoded:
    """Rows as bytes, before they have numbers.

    Attributes:
        n: of rows.
        table: (n * row_bytes,) uint8 of the rows.
        row_bytes: of one.
        heap: uint8 bytes of strings, row after row.
        heap_off: (n + 1,) where each row's begin; empty where the schema has no strings.
        head: first 8 bytes of the headers of their blocks.
    """

    n: int
    table: npt.NDArray[np.uint8]
    row_bytes: int
    heap: npt.NDArray[np.uint8]
    heap_off: npt.NDArray[np.int64]
    head: int


def encode_rows(schema: EventSchema, rows: Rows) -> Encoded:
    """Rows of ``schema`` as they lie in blocks."""
    n, flags = len(rows.event_ts), 0 if rows.target_ts is None else CORRECTIONS
    layout, columns, ids = layout_of(schema, flags), rows.columns, rows.event_ids
    size = layout.size
    # No bit of nulls is set in most calls.
    raw = np.zeros(n * size, np.uint8) if layout.nullable else np.empty(n * size, np.uint8)
    table: npt.NDArray[np.void] = np.ndarray((n,), layout.dtype, raw)
    table["event_ts"] = rows.event_ts
    if rows.target_ts is not None:
        table["target_ts"], table["target_arrival"] = rows.target_ts, rows.target_arrival
    if not layout.nullable and not layout.heaped:
        for field, name in layout.fields:
            table[field] = columns[name].values
        return Encoded(n, raw, size, _NO_BYTES, NO_ROWS, layout.head)
    of_field = {field: columns[name] for field, name in layout.fields}
    if schema.event_id_dtype is not None:
        of_field["event_id"] = null_column(schema.event_id_dtype, n) if ids is None else ids
    nulls = {}
    for name, column in of_field.items():
        values, valid = column.values, column.valid
        if valid is not None:
            nulls[name] = valid
            if column.dictionary is None and column.offsets is None:
                values = np.where(valid.reshape(-1, *(1,) * (values.ndim - 1)), values, values.dtype.type(0))
        if column.dictionary is None and column.offsets is None:
            table[name] = values
    if nulls and layout.nullable:
        table["nulls"] = _pack_nulls([nulls.get(name) for name in layout.nullable], n)
    if not layout.heaped:
        return Encoded(n, raw, size, _NO_BYTES, NO_ROWS, layout.head)
    heap, lengths = _pack_heap([of_field[name.partition(".")[0]] for name in layout.heaped], layout.heaped, n)
    for j, name in enumerate(layout.heaped):
        table[name] = lengths[:, j]
    return Encoded(n, raw, size, np.frombuffer(heap, np.uint8).copy(), offsets_of(lengths.sum(axis=1)), layout.head)


@dataclass(slots=True)
class Numbered:
    """Attributes:
    arrivals: (n,) int64 of the rows.
    pairs: (counter, trimmed) of each user, then (arrival, event_ts) of each row with an id.
    blocks: (key, sealed value).
    over: the first user whose numbers would end beyond all numbers, and nothing else holds then; -1 where none would.
    """

    arrivals: npt.NDArray[np.int64]
    pairs: list[bytes]
    blocks: list[tuple[bytes, bytes]]
    over: int


def number_rows(
    encoded: Encoded,
    keys: list[bytes],
    held: dict[bytes, bytes],
    floors: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    id_rows: npt.NDArray[np.int64],
    file: str,
) -> Numbered:
    """Give numbers to the rows ``[offsets[u], offsets[u + 1])`` of each user, whose key is ``keys[u]``.

    Args:
        held: the pair (counter, trimmed) of the users that are known, by key.
        floors: (U,) of the others; or (1,), where it is the same for all.
        id_rows: which rows have an event id.

    Raises:
        CorruptionError: a pair is not what was written.
    """
    n, n_users, size = encoded.n, len(keys), PAIR_DTYPE.itemsize
    if held and UNKNOWN in held.values():
        refuse_wrong(1, n_users, file, _COUNTERS)
    known = joined_pairs([held.get(key, UNKNOWN) for key in keys], file, _COUNTERS) + b"".join(keys)
    longest, name_off = 8, NO_ROWS
    if (len(keys[0]) != 8) if n_users == 1 else (set(map(len, keys)) != {8}):
        lengths = [len(k) for k in keys]
        longest, name_off = max(lengths), offsets_of(lengths)
    # Each user has a block that is not full, at most.
    most, n_pairs = n_users + n // BLOCK_ROWS, n_users + len(id_rows)
    sealed_bytes = most * (longest + 8 + _HEADER + _SEAL) + len(encoded.table) + len(encoded.heap)
    numbers, out = np.empty(n + 2 * most + 1, np.int64), np.empty(n_pairs * size + sealed_bytes, np.uint8)
    n_blocks, wrong, over = kernel("number_rows")(
        np.ndarray((len(known),), _U8, known), name_off, floors, offsets, id_rows, encoded.table, encoded.row_bytes,
        encoded.heap, encoded.heap_off, encoded.head, numbers, out,
    )  # fmt: skip
    refuse_wrong(wrong, n_users, file, _COUNTERS)
    if over >= 0:
        return Numbered(NO_ROWS, [], [], over)
    at = numbers[n : n + 2 * n_blocks + 1].tolist()
    data = out[: at[-1]].tobytes()
    blocks = [(data[at[i] : at[i + 1]], data[at[i + 1] : at[i + 2]]) for i in range(0, 2 * n_blocks, 2)]
    return Numbered(numbers[:n], [data[:size]] if n_pairs == 1 else listed_pairs(out, n_pairs), blocks, -1)


def _pack_nulls(valids: list[npt.NDArray[np.bool_] | None], n: int) -> npt.NDArray[np.uint8] | int:
    if all(valid is None for valid in valids):
        return 0
    nulls = np.zeros((n, len(valids)), np.bool_)
    for j, valid in enumerate(valids):
        if valid is not None:
            nulls[:, j] = ~valid
    return np.packbits(nulls, axis=1, bitorder="little")


def _pack_heap(columns: list[Column], names: Sequence[str], n: int) -> tuple[bytes, npt.NDArray[np.int64]]:
    """The heap of all rows, and the (n, k) length of each part; ``names`` of the parts of ``columns``."""
    k = len(columns)
    try:
        parts = [
            _taken(c) if c.offsets is None else _list_part(c, c.offsets, name)
            for c, name in zip(columns, names, strict=True)
        ]
        size = sum(part.total_values_length for part in parts)
        if size > _MAX_HEAP_BYTES:
            raise pa.ArrowInvalid(f"{size} bytes")
        joined = parts[0]
        if k > 1:
            joined = pa.concat_arrays(parts).take(pa.array(np.arange(n * k).reshape(k, n).T.ravel()))
    except pa.ArrowInvalid as e:
        raise InputError(
            f"{n} rows have more than {_MAX_HEAP_BYTES} bytes of strings ({e}); append fewer rows a call"
        ) from e
    _, offsets_buffer, data = joined.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[joined.offset : joined.offset + n * k + 1].astype(np.int64)
    heap = b"" if data is None else data.slice(offsets[0], offsets[-1] - offsets[0]).to_pybytes()
    return heap, np.diff(offsets).reshape(n, k)


def _taken(column: Column) -> pa.BinaryArray:
    """The values of a string or binary column, one a row, as bytes."""
    assert column.dictionary is not None
    mask = None if column.valid is None else ~column.valid
    taken = column.dictionary.take(pa.array(column.values, mask=mask))
    # Strings are bytes already: viewing costs a tenth of a cast, which counts where a call appends ten rows.
    return taken.view(pa.binary()) if taken.type == pa.string() else taken.cast(pa.binary())


def _list_part(column: Column, offsets: npt.NDArray[np.int64], name: str) -> pa.BinaryArray:
    """The elements of each row's list as bytes, or the lengths of the elements."""
    if column.dictionary is None:
        values = column.values.astype(column.values.dtype.newbyteorder("<"), copy=False)
        return _binary(offsets * values.itemsize, values.tobytes())
    elements = _taken(column.elements())
    bounds = np.frombuffer(elements.buffers()[1] or bytes(4), np.int32)[elements.offset :][: len(elements) + 1]
    if name.endswith(_lengths_of("")):
        return _binary(offsets * 4, np.diff(bounds).astype("<u4").tobytes())
    data = elements.buffers()[2]
    cut = b"" if data is None else data.slice(int(bounds[0]), int(bounds[-1] - bounds[0])).to_pybytes()
    return _binary(bounds[offsets].astype(np.int64) - int(bounds[0]), cut)


def _binary(offsets: npt.NDArray[np.int64], data: bytes) -> pa.BinaryArray:
    if len(data) > _MAX_HEAP_BYTES:
        raise pa.ArrowInvalid(f"{len(data)} bytes")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.BinaryArray.from_buffers(pa.binary(), len(offsets) - 1, buffers)


@dataclass(frozen=True, slots=True)
class DecodedBlocks:
    """Attributes:
    counts: (B,) int64 events of each block.
    arrival: (n,) int64.
    rows: the events, block after block.
    """

    counts: npt.NDArray[np.int64]
    arrival: npt.NDArray[np.int64]
    rows: Rows


def decode_blocks(
    schema: EventSchema,
    schema_of: Callable[[int], EventSchema | None],
    keys: list[bytes],
    values: list[bytes],
    file: str,
) -> DecodedBlocks:
    """Blocks as columns of ``schema``, whichever schema each was written under.

    Raises:
        CorruptionError: a seal is wrong (names ``file`` and the user), or a schema is missing.
        CommitConflict: a block was written under a schema newer than ``schema``.
        NewerFormatError: a block was written by a newer thinrow.
    """
    if not values:
        return DecodedBlocks(np.empty(0, np.int64), np.empty(0, np.int64), _empty(schema))
    blob, starts, headers = _open_blocks(keys, values, file, schema.user_kind)
    newest = int(headers["schema_id"].max())
    if newest > schema.schema_id and schema_of(newest) is not None:
        raise CommitConflict(
            f"{file} holds events of schema {newest}, newer than {schema.schema_id}; "
            "pin the newest generation and retry"
        )
    counts = headers["n"].astype(np.int64)
    n = int(counts.sum())
    before = np.repeat(np.cumsum(counts) - counts, counts)
    within = np.arange(n) - before
    arrival = np.repeat(headers["first_arrival"], counts) + within
    kinds = headers["schema_id"].astype(np.int64) << 8 | headers["flags"]
    distinct = np.unique(kinds)
    parts: list[Rows] = []
    for kind in distinct.tolist():
        which = slice(None) if len(distinct) == 1 else np.flatnonzero(kinds == kind)
        written = schema_of(kind >> 8) or (schema if kind >> 8 == schema.schema_id else None)
        if written is None:
            raise CorruptionError(f"a block was written under schema {kind >> 8}, which is not stored", file=file)
        picked = values if len(distinct) == 1 else [values[i] for i in np.flatnonzero(kinds == kind).tolist()]
        parts.append(_decode_kind(schema, written, kind & 0xFF, blob, starts[which], headers[which], picked, file))
    if len(parts) == 1:
        return DecodedBlocks(counts, arrival, parts[0])
    kind_of_row = np.repeat(kinds, counts)
    place = np.argsort(np.argsort(kind_of_row, kind="stable"), kind="stable")
    return DecodedBlocks(counts, arrival, _concat(parts).take(place))


def _open_blocks(
    keys: list[bytes], values: list[bytes], file: str, kind: UserKind
) -> tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.void]]:
    """All values as one, where each starts in it, and their headers."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    damaged = [i for i, (k, v) in enumerate(zip(keys, values, strict=True)) if len(v) < _HEADER or not is_sealed(k, v)]
    if damaged:
        user = users_of_keys([keys[damaged[0]][:-8]], kind).tolist()[0]
        raise CorruptionError("a block of events fails its CRC", file=file, user=user)
    blob = b"".join(values)
    starts = np.cumsum(lengths) - lengths
    headers = _records_at(blob, HEADER_DTYPE, starts)
    newest = int(headers["format"].max())
    if newest > FORMAT:
        raise NewerFormatError(f"{file} holds blocks of format {newest}, newer than {FORMAT}; update thinrow")
    return blob, starts, headers


def _records_at(blob: bytes, dtype: np.dtype[np.void], at: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """Records of ``dtype`` at byte positions ``at``: one memory copy each, whatever the alignment."""
    size = dtype.itemsize
    everywhere: npt.NDArray[np.void] = np.ndarray((len(blob) - size + 1,), f"V{size}", blob, strides=(1,))
    return everywhere[at].view(dtype)


def _decode_kind(
    schema: EventSchema,
    written: EventSchema,
    flags: int,
    blob: bytes,
    starts: npt.NDArray[np.int64],
    headers: npt.NDArray[np.void],
    values: list[bytes],
    file: str,
) -> Rows:
    """Blocks of one schema and one set of flags."""
    layout = layout_of(written, flags)
    size = layout.dtype.itemsize
    counts, heap_bytes = headers["n"].astype(np.int64), headers["heap_bytes"].astype(np.int64)
    whole = _HEADER + counts * size + heap_bytes + _SEAL
    if (whole != np.fromiter(map(len, values), np.int64, len(values))).any() or flags > CORRECTIONS:
        raise CorruptionError(f"a block's length does not follow from its header (flags {flags})", file=file)
    n = int(counts.sum())
    within = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
    table = _records_at(blob, layout.dtype, np.repeat(starts + _HEADER, counts) + within * size)
    valid: dict[str, npt.NDArray[np.bool_]] = {}
    if layout.nullable:
        bits = np.unpackbits(table["nulls"], axis=1, count=len(layout.nullable), bitorder="little")
        for j in np.flatnonzero(bits.any(axis=0)).tolist():
            valid[layout.nullable[j]] = bits[:, j] == 0
    cells, k = None, len(layout.heaped)
    if k:
        heap = b"".join(
            [v[len(v) - _SEAL - h : len(v) - _SEAL] for v, h in zip(values, heap_bytes.tolist(), strict=True)]
        )
        cells = _unpack_heap(heap, [table[name] for name in layout.heaped], file)

    def part(name: str) -> pa.LargeBinaryArray:
        assert cells is not None
        return cells.take(pa.array(np.arange(layout.heaped.index(name), n * k, k)))

    def column(name: str, dtype: str, ragged: bool = False) -> Column:
        if cells is None or name not in layout.heaped:
            return Column(np.ascontiguousarray(table[name]), valid.get(name))
        if ragged:
            lengths = part(_lengths_of(name)) if _lengths_of(name) in layout.heaped else None
            return _lists(part(name), lengths, dtype, valid.get(name), file)
        null = None if name not in valid else ~valid[name]
        index = np.arange(layout.heaped.index(name), n * k, k)
        encoded = cells.take(pa.array(index, mask=null)).dictionary_encode()
        codes = encoded.indices if null is None else encoded.indices.fill_null(0)
        dictionary = encoded.dictionary.cast(pa.binary()).cast(ARROW_TYPES[dtype])
        return Column(codes.to_numpy(zero_copy_only=False).astype(np.int32, copy=False), valid.get(name), dictionary)

    of_id = {c.id: c for c in written.columns}

    def read(spec: ColumnSpec) -> Column:
        held = of_id.get(spec.id)
        if held is None:
            return null_column(spec.dtype, n, ragged=spec.ragged, size=spec.size)
        return cast_column(column(_field(held), held.dtype, held.ragged), spec.dtype)

    event_ids = None
    if schema.event_id_dtype is not None:
        has_ids = written.event_id_dtype is not None
        event_ids = column("event_id", schema.event_id_dtype) if has_ids else null_column(schema.event_id_dtype, n)
    corrections = bool(flags & CORRECTIONS)
    return Rows(
        np.ascontiguousarray(table["event_ts"]),
        np.ascontiguousarray(table["target_ts"]) if corrections else None,
        np.ascontiguousarray(table["target_arrival"]) if corrections else None,
        event_ids,
        {c.name: read(c) for c in schema.columns},
    )


def _lists(
    held: pa.LargeBinaryArray,
    lengths: pa.LargeBinaryArray | None,
    dtype: str,
    valid: npt.NDArray[np.bool_] | None,
    file: str,
) -> Column:
    """Lists of which each row's elements are bytes; ``lengths`` are those of strings."""
    offsets, data = _buffers(held)
    itemsize = 4 if lengths is not None else np.dtype(dtype).itemsize
    counted, sizes = (offsets, data) if lengths is None else _buffers(lengths)
    if (counted % itemsize).any():
        raise CorruptionError(f"a list of {dtype} has a part of an element", file=file)
    list_offsets = counted // itemsize
    if lengths is None:
        values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)
        return Column(values, valid, None, list_offsets)
    bounds = offsets_of(np.frombuffer(sizes, "<u4"))
    if (bounds[list_offsets] != offsets).any():
        raise CorruptionError("lengths of a list's strings do not add up to its bytes", file=file)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    cells = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(bounds) - 1, buffers).dictionary_encode()
    codes = cells.indices.to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
    return Column(codes, valid, cells.dictionary.cast(pa.binary()).cast(ARROW_TYPES[dtype]), list_offsets)


def _buffers(array: pa.LargeBinaryArray) -> tuple[npt.NDArray[np.int64], bytes]:
    """Offsets from 0, and the bytes that they cut."""
    _, offsets_buffer, data = array.buffers()
    offsets = np.frombuffer(offsets_buffer or bytes(8), np.int64)[array.offset : array.offset + len(array) + 1]
    cut = b"" if data is None else data.slice(int(offsets[0]), int(offsets[-1] - offsets[0])).to_pybytes()
    return offsets - offsets[0], cut


def _unpack_heap(heap: bytes, lengths: list[npt.NDArray[np.uint32]], file: str) -> pa.LargeBinaryArray:
    """Values of the heap, row after row."""
    matrix = np.stack(lengths, axis=1)
    offsets = np.zeros(matrix.size + 1, np.int64)
    np.cumsum(matrix.ravel(), out=offsets[1:])
    if offsets[-1] != len(heap):
        raise CorruptionError(f"rows describe {offsets[-1]} bytes of strings, blocks hold {len(heap)}", file=file)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(heap)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), matrix.size, buffers)


def _empty(schema: EventSchema) -> Rows:
    def none(dtype: str, ragged: bool = False, size: int = 0) -> Column:
        column = null_column(dtype, 0, ragged=ragged, size=size)
        return Column(column.values, None, column.dictionary, column.offsets)

    ids = None if schema.event_id_dtype is None else none(schema.event_id_dtype)
    return Rows(
        np.empty(0, np.int64), None, None, ids, {c.name: none(c.dtype, c.ragged, c.size) for c in schema.columns}
    )


def _concat(parts: list[Rows]) -> Rows:
    def targets(name: str) -> npt.NDArray[np.int64]:
        given = [getattr(p, name) for p in parts]
        return np.concatenate(
            [np.zeros(len(p.event_ts), np.int64) if g is None else g for p, g in zip(parts, given, strict=True)]
        )

    ids = [p.event_ids for p in parts if p.event_ids is not None]
    return Rows(
        np.concatenate([p.event_ts for p in parts]),
        targets("target_ts"),
        targets("target_arrival"),
        concat_columns(ids) if ids else None,
        {name: concat_columns([p.columns[name] for p in parts]) for name in parts[0].columns},
    )


def schema_id_of(value: bytes) -> int:
    """The schema id in a block's header."""
    return int(np.frombuffer(value, HEADER_DTYPE, 1)["schema_id"][0]) if len(value) >= _HEADER else -1


def split_block(schema: EventSchema, key: bytes, value: bytes, through: int, file: str, new_key: bytes) -> bytes | None:
    """What a trim leaves of a block: its rows above ``through`` as written, sealed under ``new_key``; or None.

    ``schema`` is the schema that the block was written under.
    """
    _, _, headers = _open_blocks([key], [value], file, schema.user_kind)
    header = headers[0]
    n, first = int(header["n"]), int(header["first_arrival"])
    drop = through - first + 1
    if drop >= n:
        return None
    layout = layout_of(schema, int(header["flags"]))
    size = layout.dtype.itemsize
    table = np.frombuffer(value, layout.dtype, n, _HEADER)
    heap_at = _HEADER + n * size
    dropped_heap = sum(int(table[name][:drop].sum(dtype=np.int64)) for name in layout.heaped)
    kept = headers.copy()
    kept["n"], kept["first_arrival"] = n - drop, through + 1
    kept["heap_bytes"] -= dropped_heap
    rest = value[_HEADER + drop * size : heap_at] + value[heap_at + dropped_heap : -_SEAL]
    return seal(new_key, kept.tobytes() + rest)
