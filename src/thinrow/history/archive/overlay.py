"""Overlays: one column of a segment whose values came after the segment was written (format section 13).

An overlay has the segment's stripes, row for row, and in them the streams of one column. So a reader that wants the
column takes its blocks from the overlay's chunks instead of the segment's, and nothing else changes. Worked example: a
segment of 700 rows in stripes of 512 and 188; a backfill of 3 of its events writes an overlay of two chunks, 512 and
188 rows, with those 3 values and null (or what the segment holds) in the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import CorruptionError
from thinrow.history.archive.encode import ColumnEncoder, Stripes
from thinrow.history.archive.layout import OverlayInfo, StoredColumn, stripe_dtype
from thinrow.history.archive.segment import Segment, load_dictionary
from thinrow.jagged import Column
from thinrow.storage.codecs import interleave
from thinrow.storage.container import Container, ContainerWriter, crc_of
from thinrow.storage.objects import ObjectStore
from thinrow.storage.pages import PageCache, PagedTable, write_pages

_U64 = npt.NDArray[np.uint64]


class Overlay:
    """One overlay file, opened. Safe to share between threads.

    Attributes:
        column: what it holds, as stored.
        codec_counts: codec -> stripes whose values it holds.
        stripes: stripe records, one group; the rows of each are the segment's.
    """

    def __init__(
        self, objects: ObjectStore, info: OverlayInfo, segment: Segment, cache: PageCache | None = None
    ) -> None:
        """Open, and hold the file to what the manifest says of it and to its segment.

        Raises:
            CorruptionError, NewerFormatError or ObjectNotFound.
        """
        self.objects, self.name = objects, info.name
        self.container = Container.open(objects, info.name)
        meta = self.container.meta
        try:
            self.column = StoredColumn(**meta["column"])
            self.column.check()
            self._dictionary_at = meta["dictionary"]
            self.codec_counts: dict[str, int] = dict(meta["codec_counts"])
            said = meta["kind"], meta["segment"], meta["n_rows"], self.column.id, int(meta["digest"])
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise CorruptionError(f"overlay meta is not an overlay's: {e}", file=info.name) from e
        wanted = "overlay", segment.name, segment.n_rows, info.column, info.digest
        if said != wanted or self.container.size != info.bytes:
            raise CorruptionError(
                f"it is {said} of {self.container.size} bytes, the manifest names {wanted} of {info.bytes}",
                file=info.name,
            )
        self.stripes = PagedTable.open(objects, self.container, "stripes", stripe_dtype(1), None, cache)
        if self.stripes.n_records != segment.stripes.n_records:
            raise CorruptionError(
                f"{self.stripes.n_records} stripes, its segment has {segment.stripes.n_records}", file=info.name
            )
        self._lock = threading.Lock()
        self._loaded: list[npt.NDArray[np.uint64] | pa.Array | None] = []

    def dictionary(self) -> _U64 | pa.Array | None:
        """The column's dictionary, as ``Segment.dictionary``."""
        with self._lock:
            if not self._loaded:
                self._loaded.append(load_dictionary(self.objects, self.container, self._dictionary_at, self.column))
            return self._loaded[0]


def write_overlay(
    objects: ObjectStore,
    name: str,
    segment: Segment,
    column: StoredColumn,
    parts: Iterable[tuple[Column, Stripes, _U64]],
) -> OverlayInfo:
    """Write the rows of ``column`` of a whole segment: ``parts`` are whole stripes in order, their cut and identities.

    Raises:
        StoreError: the medium refused; nothing is left behind.
    """
    encoder = ColumnEncoder(column)
    records = np.zeros(segment.stripes.n_records, stripe_dtype(1))
    with objects.create(name) as writer:
        out = ContainerWriter(writer)
        out.begin_section(f"group:{column.group}")
        stripe = n_rows = 0
        for values, cut, mix in parts:
            chunks, offsets, crc = interleave(encoder.add(values, cut, mix))
            here = records[stripe : stripe + len(crc)]
            here["n_rows"] = np.diff(cut.stripe_off)
            here["chunks"]["offset"][:, 0] = out.append(chunks) + offsets[:-1]
            here["chunks"]["length"][:, 0], here["chunks"]["header_crc"][:, 0] = np.diff(offsets), crc
            stripe += len(crc)
            n_rows += len(values)
        assert (stripe, n_rows) == (len(records), segment.n_rows), "an overlay covers its segment"
        out.end_section(crc=False)
        encoded = encoder.finish()
        data = encoded.dictionary
        out.begin_section("dictionaries")
        out.append(data or b"")
        out.end_section(crc=True)
        write_pages(out, "stripes", records, None)
        out.finish(
            {
                "kind": "overlay",
                "segment": segment.name,
                "n_rows": n_rows,
                "column": asdict(column),
                "codec_counts": {str(codec): n for codec, n in encoded.codec_counts.items()},
                "dictionary": data and {"offset": 0, "length": len(data), "n": encoded.entries, "crc": crc_of(data)},
                "digest": str(encoded.digest),
            }
        )
    return OverlayInfo(name, objects.size(name), column.id, encoded.digest)


def stripe_parts(
    segment: Segment, rows_at_once: int
) -> Iterator[tuple[npt.NDArray[np.void], npt.NDArray[Any], Stripes]]:
    """The pieces of a segment, their users, and how they are cut, in parts of whole stripes: of at most so many rows,
    or one stripe."""
    pages = list(segment.pieces.scan())
    if not pages:
        return
    pieces = np.concatenate([records for _, records, _ in pages])
    owners = np.concatenate([keys for _, _, keys in pages if keys is not None])
    starts = np.flatnonzero(np.diff(pieces["stripe"].astype(np.int64), prepend=-1))
    ends = np.append(starts[1:], len(pieces))
    rows = np.cumsum(pieces["n_rows"].astype(np.int64))
    first = 0
    while first < len(starts):
        before = int(rows[starts[first] - 1]) if first else 0
        last = max(int(np.searchsorted(rows[ends - 1], before + rows_at_once, side="right")), first + 1)
        here = np.arange(starts[first], ends[last - 1])
        records = pieces[here]
        n = records["n_rows"].astype(np.int64)
        piece_off = np.append(0, np.cumsum(n))
        stripe_off = np.append(piece_off[starts[first:last] - starts[first]], piece_off[-1])
        user, stripe = np.arange(len(n)), records["stripe"].astype(np.int64) - first
        yield (
            records,
            owners[here],
            Stripes(user, n, stripe, records["row"].astype(np.int64), piece_off, stripe_off),
        )
        first = last
