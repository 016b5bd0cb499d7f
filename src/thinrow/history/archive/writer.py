"""Write one segment: the events of one bucket, sorted, striped, encoded, indexed and digested.

Events come in parts, users ascending; memory is that of one part. What lies apart in the file (regions of feature
groups, index pages) grows side by side in spools, and the segment appears in the store whole or not at all::

    with SegmentWriter(objects, name, schema, bucket=0, n_buckets=4) as writer:
        for events in parts:
            writer.add(events)
        info = writer.finish(hides)
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.stripes import PIECE_DTYPE
from thinrow.history.archive.encode import ColumnEncoder, EncodedColumn, Stripes, column_of, content_digest
from thinrow.history.archive.hides import Hides, encode_hides
from thinrow.history.archive.layout import (
    MAX_STRIPE_ROWS,
    STRIPE_ROWS,
    SegmentInfo,
    groups_of,
    stored_columns,
    stripe_dtype,
)
from thinrow.jagged import Events
from thinrow.kernels import kernel
from thinrow.schema import EventSchema
from thinrow.storage.codecs import EncodedStream, interleave
from thinrow.storage.container import ContainerWriter, crc_of
from thinrow.storage.objects import LocalObjects, ObjectStore
from thinrow.storage.pages import PageWriter
from thinrow.storage.spool import Spool

_RECORDS_AT_ONCE = 1 << 16


class SegmentWriter:
    """Writes a segment part by part. Use as a context manager: it lets go of what was set aside.

    What does not fit in a few MB of memory is set aside in files without names: beside a local store, else in the
    folder of ``tempfile``. So the disk must have room for the segment twice, and a killed process leaves nothing.
    """

    def __init__(
        self,
        objects: ObjectStore,
        name: str,
        schema: EventSchema,
        *,
        bucket: int,
        n_buckets: int,
        stripe_rows: int = STRIPE_ROWS,
    ) -> None:
        """A segment ``name`` of ``bucket``; nothing is in ``objects`` before ``finish``."""
        self._objects, self._name, self._schema = objects, name, schema
        if not 1 <= stripe_rows <= MAX_STRIPE_ROWS:
            raise InputError(f"stripes of {stripe_rows} rows; give 1 to {MAX_STRIPE_ROWS}")
        self._bucket, self._n_buckets, self._stripe_rows = bucket, n_buckets, stripe_rows
        self._columns = stored_columns(schema)
        self._groups = groups_of(self._columns)
        self._encoders = [ColumnEncoder(spec) for spec in self._columns]
        folder = objects.root if isinstance(objects, LocalObjects) else None
        self._folder: Path | None = folder
        with ExitStack() as stack:
            self._regions = [stack.enter_context(Spool(folder)) for _ in self._groups]
            self._stripes = stack.enter_context(Spool(folder))
            self._pieces = PageWriter("pieces", PIECE_DTYPE, schema.user_kind, folder)
            stack.callback(self._pieces.close)
            self._stack = stack.pop_all()
        self._identity = 0
        self._n_rows = self._n_users = self._n_stripes = 0
        self._last_user: object = None
        self._min_ts = self._max_ts = self._max_arrival = 0

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, events: Events) -> None:
        """Add users with their events in order of (event_ts, arrival); users ascend over all calls.

        The first user may be the last one of the call before, going on where it ended. Columns that ``events`` lacks
        are written as null.

        Raises:
            SchemaError: a column that is not nullable is missing or holds a null.
            InputError: users that do not ascend.
            StoreError: no room to set it aside.
        """
        if not len(events):
            return
        cut = Stripes.cut(events.lengths, self._stripe_rows)
        mix = kernel("identity_mix")(events.event_ts, events.arrival)
        self._identity += int(mix.sum(dtype=np.uint64))
        streams: dict[str, list[EncodedStream]] = {g: [] for g in self._groups}
        for spec, encoder in zip(self._columns, self._encoders, strict=True):
            streams[spec.group] += encoder.add(column_of(events, spec), cut, mix)
        records = np.zeros(len(cut.stripe_off) - 1, stripe_dtype(len(self._groups)))
        records["n_rows"] = np.diff(cut.stripe_off)
        for g, (region, members) in enumerate(zip(self._regions, streams.values(), strict=True)):
            chunks, offsets, crc = interleave(members)
            # Relative to the region, until it is known where that begins.
            records["chunks"]["offset"][:, g] = region.size + offsets[:-1]
            records["chunks"]["length"][:, g] = np.diff(offsets)
            records["chunks"]["header_crc"][:, g] = crc
            region.append(chunks)
        self._pieces.add(_piece_records(events, cut, mix, self._n_stripes), events.users[cut.user])
        self._stripes.append(records.view(np.uint8))
        self._count(events, len(records))

    def finish(self, hides: Hides) -> SegmentInfo:
        """Write the segment, whole and durable. ``hides`` names events of older segments.

        Raises:
            StoreError: the medium refused; nothing is left behind.
        """
        encoded = [encoder.finish() for encoder in self._encoders]
        digests = {"identity": self._identity % (1 << 64)}
        digests.update({str(c.id): e.digest for c, e in zip(self._columns, encoded, strict=True)})
        with self._objects.create(self._name) as writer:
            out = ContainerWriter(writer)
            bases = []
            for group, region in zip(self._groups, self._regions, strict=True):
                out.begin_section(f"group:{group}")
                bases.append(out.offset)
                for block in region.blocks():
                    out.append(block)
                out.end_section(crc=False)
            out.begin_section("dictionaries")
            for column in encoded:
                out.append(column.dictionary or b"")
            out.end_section(crc=True)
            out.begin_section("hides")
            out.append(encode_hides(hides))
            out.end_section(crc=True)
            self._pieces.finish(out)
            self._write_stripes(out, bases)
            out.finish(self._meta(encoded, digests))
        return SegmentInfo(self._name, self._objects.size(self._name), self._n_rows, self._n_users, digests)

    def _count(self, events: Events, n_stripes: int) -> None:
        some = events.users[np.flatnonzero(events.lengths)]
        self._n_users += len(some) - int(self._n_rows > 0 and some[0] == self._last_user)
        self._last_user = some[-1]
        low = int(events.event_ts.min())
        self._min_ts = low if not self._n_rows else min(self._min_ts, low)
        self._max_ts = max(self._max_ts, int(events.event_ts.max()))
        self._max_arrival = max(self._max_arrival, int(events.arrival.max()))
        self._n_rows += len(events)
        self._n_stripes += n_stripes

    def _write_stripes(self, out: ContainerWriter, bases: list[int]) -> None:
        kind = stripe_dtype(len(self._groups))
        pages = PageWriter("stripes", kind, None, self._folder)
        self._stack.callback(pages.close)
        for block in self._stripes.blocks(_RECORDS_AT_ONCE * kind.itemsize):
            records = np.frombuffer(block, kind).copy()
            records["chunks"]["offset"] += np.array(bases, np.uint64)
            pages.add(records)
        pages.finish(out)

    def _meta(self, encoded: list[EncodedColumn], digests: dict[str, int]) -> dict[str, Any]:
        described = []
        at = 0
        for spec, column in zip(self._columns, encoded, strict=True):
            data = column.dictionary
            place = data and {"offset": at, "length": len(data), "n": column.entries, "crc": crc_of(data)}
            at += len(data or b"")
            described.append(
                {
                    "id": spec.id,
                    "name": spec.name,
                    "dtype": spec.dtype,
                    "nullable": spec.nullable,
                    "codec_counts": {str(codec): n for codec, n in column.codec_counts.items()},
                    "codec_bytes": {str(codec): n for codec, n in column.codec_bytes.items()},
                    "dictionary": place,
                }
                | _inner(column)
            )
        return {
            "kind": "segment",
            "bucket": self._bucket,
            "n_buckets": self._n_buckets,
            "schema": self._schema.to_dict(),
            "schema_id": self._schema.schema_id,
            "user_kind": self._schema.user_kind,
            "n_rows": self._n_rows,
            "n_users": self._n_users,
            "stripe_rows": self._stripe_rows,
            "min_ts": self._min_ts,
            "max_ts": self._max_ts,
            "max_arrival": self._max_arrival,
            "groups": [{"name": g, "columns": [c.id for c in self._columns if c.group == g]} for g in self._groups],
            "columns": described,
            "digests": {k: str(v) for k, v in digests.items()},
        }


def _inner(column: EncodedColumn) -> dict[str, Any]:
    """What the blocks within are, where there are such."""
    found = {str(outer): {str(c): n for c, n in inner.items()} for outer, inner in column.inner_counts.items()}
    return {"inner_counts": found} if found else {}


def content_digests(events: Events, schema: EventSchema) -> dict[str, int]:
    """Identity digest and content digest of each column (format section 8), as a segment of these events has them."""
    mix = kernel("identity_mix")(events.event_ts, events.arrival)
    digests = {"identity": int(mix.sum(dtype=np.uint64))}
    for spec in stored_columns(schema):
        digests[str(spec.id)] = content_digest(spec, column_of(events, spec), mix)
    return digests


def _piece_records(
    events: Events, cut: Stripes, mix: npt.NDArray[np.uint64], first_stripe: int
) -> npt.NDArray[np.void]:
    records = np.zeros(len(cut.user), PIECE_DTYPE)
    top, least, digest = kernel("piece_summaries")(
        cut.piece_off, events.event_ts, events.arrival, events.hidden_from, mix
    )
    records["first_ts"] = events.event_ts[cut.piece_off[:-1]]
    records["last_ts"] = events.event_ts[cut.piece_off[1:] - 1]
    records["max_arrival"], records["min_hidden_from"], records["digest"] = top, least, digest
    records["stripe"], records["row"], records["n_rows"] = first_stripe + cut.stripe, cut.first, cut.rows
    return records
