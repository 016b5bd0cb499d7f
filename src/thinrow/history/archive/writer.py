"""Write one segment: the events of one bucket, sorted, striped, encoded, indexed and digested.

Everything is done a column at a time over all rows of the bucket; a segment appears in the store whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import SchemaError
from thinrow.core.ragged import offsets_of
from thinrow.core.users import kind_of
from thinrow.history.archive.hides import Hides, encode_hides
from thinrow.history.archive.layout import (
    PIECE_DTYPE,
    STRIPE_ROWS,
    SegmentInfo,
    StoredColumn,
    groups_of,
    stored_columns,
    stripe_dtype,
)
from thinrow.jagged import Column, Events
from thinrow.jagged.column import null_column
from thinrow.kernels import kernel
from thinrow.schema import EventSchema
from thinrow.storage.codecs import DICTIONARY, EncodedStream, encode_bytes, encode_fixed, interleave
from thinrow.storage.container import ContainerWriter
from thinrow.storage.objects import ObjectStore
from thinrow.storage.pages import write_pages

#: A fixed-width column has a segment dictionary where its distinct values are at most this many.
_MAX_WORDS = 4_096
#: A string column has one where they are at most this many and few against the rows.
_MAX_STRINGS = 65_536
_ALWAYS_STRINGS = 256


@dataclass(frozen=True, slots=True)
class _Stripes:
    """How the rows are cut: pieces (user, rows, stripe, row in stripe) and the row offsets of pieces and stripes."""

    user: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    stripe: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    piece_off: npt.NDArray[np.int64]
    stripe_off: npt.NDArray[np.int64]

    @classmethod
    def cut(cls, lengths: npt.NDArray[np.int64], stripe_rows: int) -> _Stripes:
        user, rows, stripe, first = kernel("cut_stripes")(lengths, stripe_rows)
        piece_off = offsets_of(rows)
        starts = np.flatnonzero(np.diff(stripe, prepend=-1))
        stripe_off = np.concatenate([piece_off[:-1][starts], piece_off[-1:]])
        return cls(user, rows, stripe, first, piece_off, stripe_off)


def write_segment(
    objects: ObjectStore,
    name: str,
    events: Events,
    hides: Hides,
    schema: EventSchema,
    *,
    bucket: int,
    n_buckets: int,
    stripe_rows: int = STRIPE_ROWS,
) -> SegmentInfo:
    """Write ``events`` (users ascending, each user's events in order of (event_ts, arrival)) as segment ``name``.

    ``hides`` names events of older segments. Columns that ``events`` lacks are written as null.

    Raises:
        SchemaError: a column that is not nullable is missing or holds a null.
        OSError: the disk refused; nothing is left behind.
    """
    cut = _Stripes.cut(events.lengths, stripe_rows)
    mix = kernel("identity_mix")(events.event_ts, events.arrival)
    columns = stored_columns(schema)
    digests = {"identity": int(mix.sum(dtype=np.uint64))}
    described: list[dict[str, Any]] = []
    dictionaries: list[bytes] = []
    streams: dict[str, list[EncodedStream]] = {g: [] for g in groups_of(columns)}
    at = 0
    for spec in columns:
        encoded, dictionary, n, digest = _encode_column(spec, _column(events, spec), cut, mix)
        streams[spec.group] += encoded
        digests[str(spec.id)] = digest
        counts = np.unique(encoded[-1].codec, return_counts=True)
        described.append(
            {
                "id": spec.id,
                "name": spec.name,
                "dtype": spec.dtype,
                "nullable": spec.nullable,
                "codec_counts": {str(c): int(k) for c, k in zip(*counts, strict=True)},
                "dictionary": dictionary and {"offset": at, "length": len(dictionary), "n": n, "crc": _crc(dictionary)},
            }
        )
        if dictionary is not None:
            dictionaries.append(dictionary)
            at += len(dictionary)
    with objects.create(name) as writer:
        out = ContainerWriter(writer)
        records = _write_groups(out, streams, cut)
        out.begin_section("dictionaries")
        out.append(b"".join(dictionaries))
        out.end_section(crc=True)
        out.begin_section("hides")
        out.append(encode_hides(hides))
        out.end_section(crc=True)
        write_pages(out, "pieces", _piece_records(events, cut, mix), events.users[cut.user])
        write_pages(out, "stripes", records, None)
        out.finish(_meta(events, schema, columns, described, digests, bucket, n_buckets, stripe_rows))
    return SegmentInfo(name, objects.size(name), len(events), int((events.lengths > 0).sum()), digests)


def _meta(
    events: Events,
    schema: EventSchema,
    columns: tuple[StoredColumn, ...],
    described: list[dict[str, Any]],
    digests: dict[str, int],
    bucket: int,
    n_buckets: int,
    stripe_rows: int,
) -> dict[str, Any]:
    return {
        "kind": "segment",
        "bucket": bucket,
        "n_buckets": n_buckets,
        "schema": schema.to_dict(),
        "schema_id": schema.schema_id,
        "user_kind": schema.user_kind,
        "n_rows": len(events),
        "n_users": int((events.lengths > 0).sum()),
        "stripe_rows": stripe_rows,
        "min_ts": int(events.event_ts.min(initial=0)),
        "max_ts": int(events.event_ts.max(initial=0)),
        "max_arrival": int(events.arrival.max(initial=0)),
        "groups": [{"name": g, "columns": [c.id for c in columns if c.group == g]} for g in groups_of(columns)],
        "columns": described,
        "digests": {k: str(v) for k, v in digests.items()},
    }


def content_digests(events: Events, schema: EventSchema) -> dict[str, int]:
    """Identity digest and content digest of each column (format section 8), as a segment of these events has them."""
    mix = kernel("identity_mix")(events.event_ts, events.arrival)
    digests = {"identity": int(mix.sum(dtype=np.uint64))}
    for spec in stored_columns(schema):
        digests[str(spec.id)] = content_digest(spec, _column(events, spec), mix)
    return digests


def _null_of(spec: StoredColumn, column: Column) -> npt.NDArray[np.bool_]:
    """(n,) where null; empty for a column that cannot be."""
    if not spec.nullable:
        return np.zeros(0, np.bool_)
    return np.zeros(len(column), np.bool_) if column.valid is None else ~column.valid


def content_digest(spec: StoredColumn, column: Column, mix: npt.NDArray[np.uint64]) -> int:
    null = _null_of(spec, column)
    if column.dictionary is None:
        words = as_words(column.values)
    elif len(column.dictionary):
        words = kernel("fold_bytes")(*bytes_of(column.dictionary))[column.values]
    else:
        words = np.zeros(len(column), np.uint64)
    return int(kernel("content_digest")(mix, words, null, spec.id))


def _crc(data: bytes) -> int:
    return int(kernel("crc32c")(np.frombuffer(data, np.uint8)))


def _column(events: Events, spec: StoredColumn) -> Column:
    if spec.name in ("event_ts", "arrival", "hidden_from"):
        return Column(getattr(events, spec.name))
    column = events.columns.get(spec.name)
    n = len(events)
    if column is None:
        if not spec.nullable:
            raise SchemaError(f"column {spec.name!r} is missing and not nullable; add it or make it nullable")
        return null_column(spec.dtype, n)
    if column.valid is not None and not spec.nullable and not column.valid.all():
        row = int(np.flatnonzero(~column.valid)[0])
        raise SchemaError(f"column {spec.name!r} is null in row {row} and not nullable; fill it or make it nullable")
    return column


def as_words(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Fixed-width values as the format's 64-bit words: integers sign-extended, floats by their bits."""
    if values.dtype == np.float64:
        return np.ascontiguousarray(values).view(np.uint64)
    if values.dtype == np.float32:
        return np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    return values.astype(np.int64).view(np.uint64)


def _encode_column(
    spec: StoredColumn, column: Column, cut: _Stripes, mix: npt.NDArray[np.uint64]
) -> tuple[list[EncodedStream], bytes | None, int, int]:
    """Streams of one column, its dictionary (or None) with the number of entries, and its content digest."""
    streams = []
    digest = content_digest(spec, column, mix)
    null = _null_of(spec, column)
    if spec.nullable:
        streams.append(encode_fixed(null.astype(np.uint64), cut.stripe_off, cut.piece_off[:-1], 1, None))
    if spec.is_bytes:
        return (*_encode_strings(spec, column, cut, streams, null), digest)
    words = as_words(column.values)
    if len(null):
        words = np.where(null, np.uint64(0), words)
    itemsize = np.dtype(spec.dtype).itemsize
    codes, dictionary = None, None
    if spec.id > 0:
        distinct, inverse = kernel("distinct_words")(words, min(_MAX_WORDS, max(2, len(words) // 4)))
        if len(distinct) > 1:
            codes, dictionary = (inverse, len(distinct)), distinct.astype("<u8").tobytes()
    encoded = encode_fixed(words, cut.stripe_off, cut.piece_off[:-1], itemsize, codes)
    if dictionary is not None and not (encoded.codec == DICTIONARY).any():
        dictionary = None
    streams.append(encoded)
    return streams, dictionary, len(dictionary) // 8 if dictionary else 0, digest


def _encode_strings(
    spec: StoredColumn,
    column: Column,
    cut: _Stripes,
    streams: list[EncodedStream],
    null: npt.NDArray[np.bool_],
) -> tuple[list[EncodedStream], bytes | None, int]:
    assert column.dictionary is not None
    shown = column.values[~null] if len(null) else column.values
    used = np.flatnonzero(np.bincount(shown, minlength=len(column.dictionary)))
    place = np.zeros(max(len(column.dictionary), 1), np.int64)
    place[used] = np.arange(len(used))
    inverse = place[column.values]
    if len(null):
        inverse[null] = 0  # nulls take an entry that others use, so that they cost no entry
    blank = pa.scalar("" if spec.dtype == "string" else b"", column.dictionary.type)
    entries = column.dictionary.take(pa.array(used, pa.int64())) if len(used) else pa.array([blank])
    offsets, data = bytes_of(entries)
    n = len(entries)
    if n <= _ALWAYS_STRINGS or (n <= _MAX_STRINGS and n <= len(inverse) // 2):
        streams.append(encode_fixed(inverse.astype(np.uint64), cut.stripe_off, cut.piece_off[:-1], 4, None))
        return streams, offsets.astype("<u8").tobytes() + data.tobytes(), n
    per_row = entries.take(pa.array(inverse))
    if len(null):
        per_row = pc.if_else(pa.array(null), blank, per_row)
    streams.append(encode_bytes(bytes_of(per_row), cut.stripe_off))
    return streams, None, 0


def bytes_of(array: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Offsets and bytes of a string or binary array without nulls."""
    large = array.cast(pa.large_binary())
    _, offsets, data = large.buffers()
    off = (
        np.frombuffer(offsets, np.int64)[large.offset : large.offset + len(large) + 1]
        if offsets
        else np.zeros(1, np.int64)
    )
    raw = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return (off - off[0]).astype(np.int64), raw[off[0] : off[-1]]


def _write_groups(out: ContainerWriter, streams: dict[str, list[EncodedStream]], cut: _Stripes) -> npt.NDArray[np.void]:
    records = np.zeros(len(cut.stripe_off) - 1, stripe_dtype(len(streams)))
    records["n_rows"] = np.diff(cut.stripe_off)
    for g, (group, members) in enumerate(streams.items()):
        region, offsets, crc = interleave(members)
        out.begin_section(f"group:{group}")
        start = out.append(region.data)
        out.end_section(crc=False)
        records["chunks"]["offset"][:, g] = start + offsets[:-1]
        records["chunks"]["length"][:, g] = np.diff(offsets)
        records["chunks"]["header_crc"][:, g] = crc
    return records


def _piece_records(events: Events, cut: _Stripes, mix: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
    records = np.zeros(len(cut.user), PIECE_DTYPE)
    top, least, digest = kernel("piece_summaries")(
        cut.piece_off, events.event_ts, events.arrival, events.hidden_from, mix
    )
    if kind_of(events.users) == "int64":
        records["key"] = events.users[cut.user]
    records["first_ts"] = events.event_ts[cut.piece_off[:-1]]
    records["last_ts"] = events.event_ts[cut.piece_off[1:] - 1]
    records["max_arrival"], records["min_hidden_from"], records["digest"] = top, least, digest
    records["stripe"], records["row"], records["n_rows"] = cut.stripe, cut.first, cut.rows
    return records
