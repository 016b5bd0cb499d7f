"""Where everything lies in the files of a store: fields, the CRCs over them, and ranges that may trade places.

Read from the bytes of a *sound* file by docs/format/archive-v2.md. Worked example: the layout of a segment says that
bytes 24 to 28 are the ``length`` of a block, that the CRC over bytes 16 to 56 stands in the stripe record at byte
17,320, and that the CRC of the page around that record stands in the directory.
"""

from __future__ import annotations

import heapq
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.stripes import PIECE_DTYPE
from thinrow.history.archive.layout import groups_of, stored_columns, stripe_dtype
from thinrow.history.archive.tombstones import TOMBSTONE_DTYPE
from thinrow.jagged import HIDE_DTYPE
from thinrow.schema import EventSchema
from thinrow.storage.codecs import ENTRY_DTYPE, header_bytes
from thinrow.storage.container import VERSION, crc_of

_TAIL = struct.Struct("<QIIH6x8s")
_WORDS_OF_A_BLOCK = 6


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``[start, stop)`` of a file that mean one thing, such as ``piece.n_rows``."""

    start: int
    stop: int
    what: str


@dataclass(frozen=True, slots=True)
class Crc:
    """The CRC of bytes ``[start, stop)`` stands at ``at``."""

    at: int
    start: int
    stop: int


@dataclass(slots=True)
class Block:
    """One block of a chunk, its entry in the chunk's header, and the rows and number of its stripe."""

    start: int
    stop: int
    entry: int
    codec: int
    width: int
    rows: int
    stream: str
    stripe: int


@dataclass(slots=True)
class Layout:
    """Of one container.

    Attributes:
        body: bytes before the meta.
        meta: with "sections".
        fields: numbers and bytes with a meaning of their own.
        crcs: inner ones before those around them.
        blocks: of all chunks.
        alike: ranges of one kind and length, which may trade places.
        bounds: (2, number of CRCs) starts and stops of what they cover, once it was asked for.
    """

    body: int
    meta: dict[str, Any]
    fields: list[Span] = field(default_factory=list)
    crcs: list[Crc] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    alike: dict[tuple[str, int], list[Span]] = field(default_factory=dict)
    bounds: npt.NDArray[np.int64] | None = None

    def group(self, span: Span) -> None:
        """Add a range that others of its kind may replace."""
        self.alike.setdefault((span.what, span.stop - span.start), []).append(span)


def read_layout(data: bytes) -> Layout:
    """The layout of a sound container."""
    place, length, _, _, _ = _TAIL.unpack(data[-_TAIL.size :])
    meta = json.loads(data[place : place + length])
    found = Layout(place, meta)
    kind = meta["kind"]
    if kind == "tombstones":
        at, size, _ = meta["sections"]["tombstones"]
        _records(found, TOMBSTONE_DTYPE, at, size // TOMBSTONE_DTYPE.itemsize, "tombstone")
        return found
    if kind == "segment":
        columns = stored_columns(EventSchema.from_dict(meta["schema"]))
        _hides(found, data)
        _pages(found, data, "pieces", PIECE_DTYPE, meta["user_kind"])
        streams = [[c.name for c in columns if c.group == g for _ in range(c.n_streams)] for g in groups_of(columns)]
    else:
        column = meta["column"]
        streams = [[column["name"]] * (1 + column["nullable"] + column["ragged"])]
    stripes = _pages(found, data, "stripes", stripe_dtype(len(streams)), None)
    inner: list[Crc] = []
    for stripe, at in enumerate(stripes):
        (rows,) = struct.unpack_from("<I", data, at)
        for g, names in enumerate(streams):
            inner += _chunk(found, data, at + 8 + 16 * g, rows, names, stripe)
    found.crcs[:0] = inner
    _dictionaries(found, data)
    return found


def _chunk(found: Layout, data: bytes, record: int, rows: int, names: list[str], stripe: int) -> Iterator[Crc]:
    offset, length = struct.unpack_from("<QI", data, record)
    head = header_bytes(len(names))
    at = offset + head
    for k, name in enumerate(names):
        entry = offset + k * ENTRY_DTYPE.itemsize
        codec, width, _, size, _ = struct.unpack_from("<BBHII", data, entry)
        for start, stop, what in ((0, 1, "codec"), (1, 2, "width"), (2, 4, "reserved"), (4, 8, "length")):
            found.fields.append(Span(entry + start, entry + stop, f"header.{what}"))
        found.group(Span(entry, entry + 8, "header.entry"))
        if size:
            yield Crc(entry + 8, at, at + size)
            found.group(Span(at, at + size, "block"))
            for word in range(min(size // 8, _WORDS_OF_A_BLOCK)):
                found.fields.append(Span(at + 8 * word, at + 8 * word + 8, f"block.{codec}.{word}"))
        found.blocks.append(Block(at, at + size, entry, codec, width, rows, name, stripe))
        at += size
    assert at == offset + length
    found.group(Span(record, record + 16, "chunk"))
    yield Crc(record + 12, offset, offset + head)


def _records(found: Layout, dtype: np.dtype[Any], at: int, n: int, what: str) -> None:
    for i in range(n):
        start = at + i * dtype.itemsize
        found.group(Span(start, start + dtype.itemsize, what))
        for name in dtype.names or ():
            kind, offset = dtype.fields[name][:2]  # type: ignore[index]
            if kind.subdtype is None:
                found.fields.append(Span(start + offset, start + offset + kind.itemsize, f"{what}.{name}"))
                continue
            for k in range(kind.shape[0]):
                chunk = start + offset + 16 * k
                for a, b, part in ((0, 8, "offset"), (8, 12, "length"), (12, 16, "header_crc")):
                    found.fields.append(Span(chunk + a, chunk + b, f"{what}.chunk.{part}"))


def _pages(found: Layout, data: bytes, name: str, dtype: np.dtype[Any], kind: str | None) -> list[int]:
    """Places of the records of a table."""
    at = found.meta["sections"][f"{name}.directory"][0]
    n_pages, _ = struct.unpack_from("<QQ", data, at)
    row = {None: 24, "int64": 32, "string": 40}[kind]
    found.fields += [Span(at, at + 8, f"{name}.n_pages"), Span(at + 8, at + 16, f"{name}.n_records")]
    places = []
    for p in range(n_pages):
        start = at + 16 + p * row
        parts = [(0, 8, "offset"), (8, 12, "length"), (16, 24, "first"), (24, 32, "key"), (32, 40, "key_length")]
        found.fields += [Span(start + a, start + b, f"{name}.page.{part}") for a, b, part in parts if b <= row]
        page, length = struct.unpack_from("<QI", data, start)
        n, heap = struct.unpack_from("<II", data, page)
        found.fields += [Span(page, page + 4, f"{name}.n"), Span(page + 4, page + 8, f"{name}.heap")]
        _records(found, dtype, page + 8, n, name)
        places += [page + 8 + i * dtype.itemsize for i in range(n)]
        if heap:
            end = page + 8 + n * dtype.itemsize
            found.fields += [Span(i, i + 1, f"{name}.text") for i in range(end, end + heap, 3)]
        found.crcs.append(Crc(start + 12, page, page + length))
        found.group(Span(page, page + length, f"{name}.page"))
    return places


def _hides(found: Layout, data: bytes) -> None:
    at, size, _ = found.meta["sections"]["hides"]
    (n,) = struct.unpack_from("<Q", data, at)
    found.fields.append(Span(at, at + 8, "hides.n"))
    end = at + size - n * HIDE_DTYPE.itemsize
    found.fields += [Span(i, i + 8, "hides.user") for i in range(at + 8, end - 7, 8)]
    _records(found, HIDE_DTYPE, end, n, "hide")


def _dictionaries(found: Layout, data: bytes) -> None:
    at, size, _ = found.meta["sections"]["dictionaries"]
    # Words of fixed-width columns, or offsets and then bytes.
    found.fields += [Span(i, i + 8, "dictionary.word") for i in range(at, at + size - 7, 8)]


def places_of_dictionaries(meta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The entries of the meta that describe a dictionary."""
    columns = meta.get("columns")
    columns = columns if isinstance(columns, list) else []
    entries = [c["dictionary"] for c in columns if isinstance(c, dict) and "dictionary" in c]
    for entry in (*entries, meta.get("dictionary")):
        if isinstance(entry, dict) and {"offset", "length", "crc"} <= set(entry):
            yield entry


def close(body: bytearray, meta: dict[str, Any]) -> bytes:
    """The file of a body and its meta, whatever they hold, with CRCs of sections, dictionaries, meta made anew."""
    sections = meta.get("sections")
    for entry in sections.values() if isinstance(sections, dict) else ():
        if isinstance(entry, list) and len(entry) == 3 and type(entry[2]) is int:
            start, stop = _bounds(entry[0], entry[1])
            entry[2] = crc_of(bytes(body[start:stop]))
    base = sections.get("dictionaries") if isinstance(sections, dict) else None
    if isinstance(base, list) and len(base) == 3 and type(base[0]) is int:
        for entry in places_of_dictionaries(meta):
            start, stop = _bounds(entry["offset"], entry["length"])
            entry["crc"] = crc_of(bytes(body[base[0] + start : base[0] + stop]))
    text = json.dumps(meta, separators=(",", ":")).encode()
    return bytes(body) + text + _TAIL.pack(len(body), len(text), crc_of(text), VERSION, b"THINROW\0")


def _bounds(offset: object, length: object) -> tuple[int, int]:
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        return 0, 0
    return offset, offset + length


def mend(body: bytearray | memoryview, layout: Layout, dirty: list[tuple[int, int]], kept: set[int]) -> None:
    """Make the CRCs over ``dirty`` ranges of ``body`` anew, from the inside outwards; those at ``kept`` stay."""
    if layout.bounds is None:
        layout.bounds = np.array([(c.start, c.stop) for c in layout.crcs], np.int64).reshape(-1, 2).T
    starts, stops = layout.bounds
    waiting: list[int] = []
    for a, b in dirty:
        waiting += np.flatnonzero((starts < b) & (stops > a)).tolist()
    heapq.heapify(waiting)
    last = -1
    while waiting:
        number = heapq.heappop(waiting)
        crc = layout.crcs[number]
        if number == last or crc.at in kept:
            continue
        last = number
        struct.pack_into("<I", body, crc.at, crc_of(bytes(body[crc.start : crc.stop])))
        for around in np.flatnonzero((starts < crc.at + 4) & (stops > crc.at)).tolist():
            heapq.heappush(waiting, around)
