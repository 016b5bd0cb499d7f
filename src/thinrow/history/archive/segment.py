"""Read side of one segment file: its index, dictionaries and hide-list, each checked when it is loaded."""

from __future__ import annotations

import itertools
import operator
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import CorruptionError
from thinrow.core.stripes import PIECE_DTYPE
from thinrow.core.users import UserKind
from thinrow.history.archive.hides import Hides
from thinrow.history.archive.layout import (
    SegmentInfo,
    StoredColumn,
    groups_of,
    stored_columns,
    stripe_dtype,
)
from thinrow.jagged import HIDE_DTYPE
from thinrow.kernels import kernel
from thinrow.schema import EventSchema
from thinrow.storage.container import Container
from thinrow.storage.objects import ObjectStore
from thinrow.storage.pages import PageCache, PagedTable


class Segment:
    """One immutable segment file, opened. Safe to share between threads."""

    def __init__(self, objects: ObjectStore, name: str, cache: PageCache | None = None) -> None:
        """Open and check head, tail and meta; index pages go through ``cache``.

        Raises:
            CorruptionError, NewerFormatError or ObjectNotFound.
        """
        self.objects, self.name = objects, name
        self.container = Container.open(objects, name)
        self.meta: dict[str, Any] = self.container.meta
        try:
            self.schema = EventSchema.from_dict(self.meta["schema"])
            self.columns: tuple[StoredColumn, ...] = stored_columns(self.schema)
            self.groups = groups_of(self.columns)
            self._dictionaries = {c["id"]: c["dictionary"] for c in self.meta["columns"]}
            kind: UserKind = self.meta["user_kind"]
            self.n_rows: int = self.meta["n_rows"]
            if type(self.n_rows) is not int or kind != self.schema.user_kind:
                raise ValueError(f"{self.n_rows!r} rows of users of kind {kind!r}")
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise CorruptionError(f"segment meta is not a segment's: {e}", file=name) from e
        self.user_kind = kind
        self.pieces = PagedTable.open(objects, self.container, "pieces", PIECE_DTYPE, kind, cache)
        self.stripes = PagedTable.open(objects, self.container, "stripes", stripe_dtype(len(self.groups)), None, cache)
        self._width: dict[str, int] = {}
        self._streams: dict[int, tuple[str, int, StoredColumn]] = {}
        for column in self.columns:
            self._width[column.group] = self._width.get(column.group, 0) + column.n_streams
            self._streams[column.id] = column.group, self._width[column.group] - 1, column
        self._lock = threading.Lock()
        self._hides: Hides | None = None
        self._loaded: dict[int, npt.NDArray[np.uint64] | pa.Array | None] = {}

    def require(self, bucket: int, info: SegmentInfo) -> None:
        """Hold the segment to what a manifest says of it: a sound file in another one's place would hide users.

        Raises:
            CorruptionError: it is another segment.
        """
        for what, found, wanted in (
            ("bucket", self.meta.get("bucket"), bucket),
            ("size in bytes", self.container.size, info.bytes),
            ("number of events", self.n_rows, info.n_rows),
        ):
            if found != wanted:
                raise CorruptionError(f"its {what} is {found}, that of the manifest's segment {wanted}", file=self.name)
        if self.meta.get("digests") != info.to_dict()["digests"]:
            raise CorruptionError("its digests are not those of the manifest's segment", file=self.name)

    def stream_of(self, column_id: int) -> tuple[str, int, StoredColumn] | None:
        """Group, index of the value stream within the group's chunk, and spec; None where the column is not stored."""
        return self._streams.get(column_id)

    def n_streams(self, group: str) -> int:
        """Blocks in each of the group's chunks."""
        return self._width[group]

    def stream_names(self, group: str) -> list[str]:
        """Column name of each stream of a group."""
        return [c.name for c in self.columns if c.group == group for _ in range(c.n_streams)]

    def dictionary(self, spec: StoredColumn) -> npt.NDArray[np.uint64] | pa.Array | None:
        """The segment dictionary of a column: words, or an Arrow array for strings; None where it has none."""
        with self._lock:
            if spec.id not in self._loaded:
                where = self._dictionaries.get(spec.id)
                self._loaded[spec.id] = load_dictionary(self.objects, self.container, where, spec)
            return self._loaded[spec.id]

    @property
    def hides(self) -> Hides:
        """The events of older segments that events of this one supersede."""
        with self._lock:
            if self._hides is None:
                self._hides = self._load_hides()
            return self._hides

    def _load_hides(self) -> Hides:
        data = self.container.read_section("hides")
        try:
            return self._parse_hides(data)
        except (ValueError, OverflowError, IndexError) as e:
            raise CorruptionError(f"section 'hides' is not a hide-list: {e}", file=self.name) from e

    def _parse_hides(self, data: bytes) -> Hides:
        (n,) = np.frombuffer(data[:8], "<u8")
        n = int(n)
        records = np.frombuffer(data, HIDE_DTYPE, count=n, offset=len(data) - n * HIDE_DTYPE.itemsize)
        if self.user_kind == "int64":
            users: npt.NDArray[Any] = np.frombuffer(data, "<i8", count=n, offset=8)
        else:
            off = np.frombuffer(data, "<u8", count=n + 1, offset=8).astype(np.int64)
            heap = data[8 + 8 * (n + 1) : len(data) - n * HIDE_DTYPE.itemsize]
            if off[0] != 0 or off[-1] != len(heap) or (off[1:] < off[:-1]).any():
                raise ValueError("offsets of users do not ascend")
            users = np.array([heap[a:b].decode() for a, b in itertools.pairwise(off)], object)
        if n == 0:
            return Hides(users, np.zeros(1, np.int64), records)
        starts = np.concatenate([[0], np.flatnonzero(users[1:] != users[:-1]) + 1, [n]]).astype(np.int64)
        return Hides(users[starts[:-1]], starts, records)


def load_dictionary(
    objects: ObjectStore, container: Container, where: dict[str, int] | None, spec: StoredColumn
) -> npt.NDArray[np.uint64] | pa.Array | None:
    """The dictionary that the container's meta describes as ``where``. Raises CorruptionError."""
    if where is None:
        return None
    base, room, _ = container.section("dictionaries")
    try:
        offset, length, n, crc = (operator.index(where[k]) for k in ("offset", "length", "n", "crc"))
    except (KeyError, TypeError) as e:
        raise CorruptionError("its dictionary is not described", file=container.name, column=spec.name) from e
    # What the entries take at least: so many are there, and none is counted that is not.
    least = 8 * (n + 1) if spec.is_bytes else 8 * n
    if offset < 0 or n < 0 or not least <= length <= room - offset or (not spec.is_bytes and length != least):
        raise CorruptionError("dictionary lies outside its section", file=container.name, column=spec.name)
    data = np.empty(length, np.uint8)
    one = np.array([base + offset], np.int64), np.array([length], np.int64)
    objects.read_into(container.name, *one, data, np.zeros(1, np.int64))
    if int(kernel("crc32c")(data)) != crc:
        raise CorruptionError("CRC of the dictionary differs", file=container.name, column=spec.name)
    if not spec.is_bytes:
        return data.view("<u8")
    offsets, texts = data[:least].view("<i8"), data[least:]
    # Arrow trusts offsets: it would read wherever they point.
    if offsets[0] != 0 or offsets[-1] != len(texts) or (offsets[1:] < offsets[:-1]).any():
        raise CorruptionError("offsets of the dictionary do not ascend", file=container.name, column=spec.name)
    try:
        return texts_of(offsets, texts, spec)
    except pa.ArrowInvalid as e:
        raise CorruptionError(
            f"the dictionary holds no {spec.dtype}: {e}", file=container.name, column=spec.name
        ) from e


def texts_of(offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8], spec: StoredColumn) -> pa.Array:
    """Arrow strings or bytes of ascending ``offsets`` into ``data``. Raises pa.ArrowInvalid: it is no UTF-8."""
    buffers = [None, *(pa.py_buffer(np.ascontiguousarray(part)) for part in (offsets, data))]
    raw = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    plain = raw.cast(pa.binary())
    return plain.cast(pa.string()) if spec.dtype == "string" else plain
