"""Paged record tables: millions of fixed-size records, read by number or by key a page at a time (format section 6).

Worked example: 3 records of 16 bytes with keys 5, 5, 9 fit one page: ``u32 3, u32 0`` and 48 bytes. The directory says
1 page, 3 records, and for the page its place, its CRC, first record 0, first key 5. ``find([5, 7])`` reads that page
and answers the half-open ranges [0, 2) and [2, 2).
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CorruptionError, InputError
from thinrow.storage.codecs import check_crcs
from thinrow.storage.container import Container, ContainerWriter, crc_of
from thinrow.storage.objects import ObjectStore
from thinrow.storage.spool import Spool

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Records: TypeAlias = npt.NDArray[Any]
#: (n,) int64, or (n,) object of ``str``.
Keys: TypeAlias = npt.NDArray[Any]
KeyKind = Literal["int64", "string"]

PAGE_BYTES = 16_384
CACHE_BYTES = 64 << 20
_PAGE_HEAD = 8
#: A string key in a record: where its bytes are in the page's heap.
_SLOT = np.dtype([("offset", "<u4"), ("length", "<u4")])
_SCAN_PAGES = 64


def _directory_dtype(key_kind: KeyKind | None) -> np.dtype[Any]:
    key: list[tuple[str, str]] = []
    if key_kind == "int64":
        key = [("key", "<i8")]
    elif key_kind == "string":
        key = [("key_offset", "<u8"), ("key_length", "<u8")]
    return np.dtype([("offset", "<u8"), ("length", "<u4"), ("crc", "<u4"), ("first", "<u8"), *key])


class PageWriter:
    """Pages of records that come in parts; their bytes do not depend on how the records were parted.

    Attributes:
        n_records: records added.
    """

    def __init__(
        self, name: str, dtype: np.dtype[Any], key_kind: KeyKind | None = None, folder: Path | None = None
    ) -> None:
        """Records of ``dtype``; with keys its first field is ``key``, ``<i8``, which is filled here.

        Complete pages wait in memory or in an unnamed file in ``folder`` (see ``Spool``).
        """
        self.name, self.n_records = name, 0
        self._kind = key_kind
        self._pages = Spool(folder)
        self._heap = bytearray()
        self._directory: list[npt.NDArray[Any]] = []
        self._records: Records = np.empty(0, dtype)
        self._keys: Keys = np.empty(0, object if key_kind == "string" else np.int64)

    def add(self, records: Records, keys: Keys | None = None) -> None:
        """Add (n,) records; keys (n,) ascend over all calls (equal ones allowed).

        Raises:
            InputError: keys not ascending, or a record that does not fit a page.
            StoreError: the disk refuses.
        """
        self._records = np.concatenate([self._records, records])
        if keys is not None:
            self._keys = np.concatenate([self._keys, keys])
            if bool((self._keys[:-1] > self._keys[1:]).any()):
                raise InputError(f"keys of {self.name!r} are not ascending; sort the records by key first")
        self._cut(last=False)

    def finish(self, out: ContainerWriter) -> None:
        """Write the sections ``name`` and ``name.directory``, and let go of the pages."""
        self._cut(last=True)
        with self._pages as pages:
            out.begin_section(self.name)
            begin = out.offset
            for block in pages.blocks():
                out.append(block)
            out.end_section(crc=False)
        directory = np.concatenate([np.empty(0, _directory_dtype(self._kind)), *self._directory])
        directory["offset"] += np.uint64(begin)
        out.begin_section(f"{self.name}.directory")
        out.append(np.array([len(directory), self.n_records], "<u8").tobytes() + directory.tobytes())
        out.append(bytes(self._heap))
        out.end_section(crc=True)

    def close(self) -> None:
        """Let go of the pages without writing them."""
        self._pages.close()

    def _cut(self, last: bool) -> None:
        """Cut what has come into pages; the last one waits for more, unless this is the ``last`` call."""
        records, keys = self._records.copy(), self._keys
        texts = _Texts(keys) if self._kind == "string" else None
        if self._kind == "int64":
            records["key"] = keys
        bounds = _cut(len(records), records.dtype.itemsize, texts)
        if not last:
            bounds = bounds[:-1] or [0]
        directory = np.zeros(len(bounds) - 1, _directory_dtype(self._kind))
        directory["first"] = self.n_records + np.array(bounds[:-1], np.int64)
        for p, (start, stop) in enumerate(pairwise(bounds)):
            page_heap = b""
            if texts is not None:
                slots, page_heap = texts.page(start, stop)
                records["key"][start:stop] = slots.view("<i8")
                first = texts.first(start)
                directory["key_offset"][p], directory["key_length"][p] = len(self._heap), len(first)
                self._heap += first
            head = np.array([stop - start, len(page_heap)], "<u4").tobytes()
            page = head + records[start:stop].tobytes() + page_heap
            page += bytes(-len(page) % 8)
            directory["offset"][p] = self._pages.size
            self._pages.append(page)
            directory["length"][p], directory["crc"][p] = len(page), crc_of(page)
        if self._kind == "int64":
            directory["key"] = records["key"][bounds[:-1]]
        self._directory.append(directory)
        self._records, self._keys = self._records[bounds[-1] :], keys[bounds[-1] :]
        self.n_records += bounds[-1]


def write_pages(out: ContainerWriter, name: str, records: Records, keys: Keys | None) -> None:
    """Write the sections ``name`` and ``name.directory``.

    Args:
        records: (n,) structured; with keys its first field is ``key``, ``<i8``, which is filled here.
        keys: None, or (n,) ascending (equal ones allowed): int64, or object of ``str``.

    Raises:
        InputError: keys not ascending, or a record that does not fit a page.
    """
    kind: KeyKind | None = None if keys is None else "int64" if keys.dtype == np.int64 else "string"
    pages = PageWriter(name, records.dtype, kind)
    pages.add(records, keys)
    pages.finish(out)


class _Texts:
    """String keys as the bytes of runs of equal ones."""

    def __init__(self, keys: Keys) -> None:
        fresh = np.ones(len(keys), np.bool_)
        if len(keys) > 1:
            fresh[1:] = keys[1:] != keys[:-1]
        self.run = np.cumsum(fresh) - 1
        self.encoded: list[bytes] = [k.encode() for k in keys[fresh]]
        self.lengths = np.array([len(e) for e in self.encoded], np.int64)
        self.fresh_bytes = np.zeros(len(keys) + 1, np.int64)
        np.cumsum(np.where(fresh, self.lengths[self.run], 0), out=self.fresh_bytes[1:])

    def first(self, row: int) -> bytes:
        """The key of ``row``."""
        return self.encoded[int(self.run[row])]

    def page(self, start: int, stop: int) -> tuple[npt.NDArray[Any], bytes]:
        """Slots of the rows [start, stop), and the heap that they point to, each distinct key once."""
        low, high = int(self.run[start]), int(self.run[stop - 1]) + 1
        places = np.cumsum(self.lengths[low:high]) - self.lengths[low:high]
        slots = np.empty(stop - start, _SLOT)
        slots["offset"] = places[self.run[start:stop] - low]
        slots["length"] = self.lengths[self.run[start:stop]]
        return slots, b"".join(self.encoded[low:high])


def _cut(n: int, itemsize: int, texts: _Texts | None) -> list[int]:
    """Record numbers where pages begin, and n."""
    room = PAGE_BYTES - _PAGE_HEAD
    longest = int(texts.lengths.max(initial=0)) if texts is not None else 0
    if itemsize + longest > room:
        raise InputError(f"a record of {itemsize} bytes and a key of {longest} exceed a page of {PAGE_BYTES} bytes")
    if texts is None:
        return [*range(0, n, room // itemsize), n]
    used = texts.fresh_bytes + np.arange(n + 1) * itemsize
    bounds = [0]
    while bounds[-1] < n:
        start = bounds[-1]
        # A key that began on the page before is written again.
        again = int(texts.lengths[texts.run[start]] - (texts.fresh_bytes[start + 1] - texts.fresh_bytes[start]))
        bounds.append(int(np.searchsorted(used, used[start] + room - again, side="right")) - 1)
    return bounds if n else [0]


class PageCache:
    """Pages of files that cannot be mapped, by (table, number); the least recently used are dropped beyond
    ``capacity_bytes``. Safe for threads."""

    def __init__(self, capacity_bytes: int = CACHE_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._pages: OrderedDict[tuple[int, int], U8] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, table: int, numbers: Iterable[int]) -> dict[int, U8]:
        """Those of the pages that are here."""
        found = {}
        with self._lock:
            for number in numbers:
                page = self._pages.get((table, number))
                if page is not None:
                    self._pages.move_to_end((table, number))
                    found[number] = page
        return found

    def add(self, table: int, pages: dict[int, U8]) -> None:
        """Keep pages, as far as there is room."""
        with self._lock:
            for number, page in pages.items():
                if (table, number) not in self._pages:
                    self._pages[table, number] = page
                    self.used_bytes += page.nbytes
            while self.used_bytes > self.capacity_bytes and self._pages:
                self.used_bytes -= self._pages.popitem(last=False)[1].nbytes


_table_numbers = itertools.count()


class PagedTable:
    """A paged table open for reading; the directory is in memory, pages are loaded and checked when needed.

    Attributes:
        objects, file: the store and the name of the file.
        name: of the section.
        dtype, key_kind: of the records.
        n_records: records in the table.
        n_pages: pages in the table.
        offset, length, crc: (n_pages,) int64 bytes of each page in the file, and its CRC.
        first: (n_pages + 1,) int64 number of the first record of each page, and ``n_records``.
        first_keys: (n_pages,) first key of each page; None for a table without keys.
    """

    def __init__(
        self,
        objects: ObjectStore,
        container: Container,
        name: str,
        dtype: np.dtype[Any],
        key_kind: KeyKind | None,
        directory: npt.NDArray[Any],
        first_keys: Keys | None,
        n_records: int,
        cache: PageCache,
    ) -> None:
        self.objects, self.file, self.name = objects, container.name, name
        self.dtype, self.key_kind = dtype, key_kind
        self.offset, self.length = directory["offset"].astype(np.int64), directory["length"].astype(np.int64)
        self.crc = directory["crc"].copy()
        self.first = np.append(directory["first"].astype(np.int64), n_records)
        self.first_keys = first_keys
        self._cache, self._number = cache, next(_table_numbers)
        self.n_records, self.n_pages = n_records, len(directory)

    @classmethod
    def open(
        cls,
        objects: ObjectStore,
        container: Container,
        name: str,
        dtype: np.dtype[Any],
        key_kind: KeyKind | None = None,
        cache: PageCache | None = None,
    ) -> PagedTable:
        """Read the directory of the table in the section ``name``.

        Args:
            objects: the store that the container lies in.
            dtype: of the records, as they were written.
            key_kind: kind of the keys; None for a table without.
            cache: to share among tables; by default this table's own, of ``CACHE_BYTES``.

        Raises:
            CorruptionError: the directory is damaged.
        """
        data = np.frombuffer(container.read_section(f"{name}.directory"), np.uint8)
        kind = _directory_dtype(key_kind)
        n_pages, n_records = (int(v) for v in data[:16].view("<u8")) if len(data) >= 16 else (0, -1)
        rows_end = 16 + n_pages * kind.itemsize
        if n_records < 0 or rows_end > len(data):
            raise CorruptionError(
                f"the directory of {name!r} has {len(data)} bytes for {n_pages} pages", file=container.name
            )
        directory = data[16:rows_end].view(kind)
        _check_directory(container, name, directory, n_records, dtype.itemsize)
        first_keys: Keys | None = directory["key"].copy() if key_kind == "int64" else None
        if key_kind == "string":
            slots = zip(directory["key_offset"].tolist(), directory["key_length"].tolist(), strict=True)
            first_keys = _texts_of(container.name, name, data[rows_end:].tobytes(), slots)
        return cls(objects, container, name, dtype, key_kind, directory, first_keys, n_records, cache or PageCache())

    def load(self, numbers: I64) -> list[U8]:
        """The bytes of pages, checked, from the cache or the file. Raises CorruptionError."""
        found = self._cache.get(self._number, numbers.tolist())
        if len(found) < len(numbers):
            missing = np.array([p for p in numbers.tolist() if p not in found], np.int64)
            # Copies, so that a cached page does not hold the buffer of its neighbours.
            fresh = {p: page.copy() for p, page in zip(missing.tolist(), self._read(missing), strict=True)}
            self._cache.add(self._number, fresh)
            found.update(fresh)
        return [found[p] for p in numbers.tolist()]

    def check(self, data: U8, numbers: I64) -> None:
        """Hold pages to their CRCs and to the directory; ``data`` is the whole file. Raises CorruptionError."""
        self._check(data, self.offset[numbers], numbers)

    def keys(self) -> Keys:
        """All keys, in order. Raises CorruptionError."""
        assert self.first_keys is not None, "a table without keys"
        found = [keys for _, _, keys in self.scan() if keys is not None]
        return np.concatenate([self.first_keys[:0], *found])

    def scan(self, start: int = 0) -> Iterator[tuple[int, Records, Keys | None]]:
        """(number of the first record, records, keys) page by page, past the cache. Raises CorruptionError."""
        for first in range(start, self.n_pages, _SCAN_PAGES):
            numbers = np.arange(first, min(first + _SCAN_PAGES, self.n_pages))
            for number, page in zip(numbers.tolist(), self._read(numbers), strict=True):
                records, keys = self._parse(page)
                yield int(self.first[number]), records, keys

    def _read(self, numbers: I64) -> list[U8]:
        """Pages from the file, checked."""
        lengths = self.length[numbers]
        places = np.cumsum(lengths) - lengths
        buffer = np.empty(int(lengths.sum()), np.uint8)
        self.objects.read_into(self.file, self.offset[numbers], lengths, buffer, places)
        self._check(buffer, places, numbers)
        return [buffer[a : a + n] for a, n in zip(places.tolist(), lengths.tolist(), strict=True)]

    def _check(self, data: U8, places: I64, numbers: I64) -> None:
        lengths = self.length[numbers]
        bad = check_crcs(data, places, lengths, self.crc[numbers])
        if bad >= 0:
            raise CorruptionError(f"the CRC of page {numbers[bad]} of {self.name!r} does not match", file=self.file)
        for number, place, length in zip(numbers.tolist(), places.tolist(), lengths.tolist(), strict=True):
            n, heap_bytes = (int(v) for v in data[place : place + _PAGE_HEAD].view("<u4"))
            end = _PAGE_HEAD + n * self.dtype.itemsize
            if n != self.first[number + 1] - self.first[number] or (end + heap_bytes + 7) // 8 * 8 != length:
                raise CorruptionError(f"page {number} of {self.name!r} does not hold its records", file=self.file)

    def _parse(self, page: U8) -> tuple[Records, Keys | None]:
        n, heap_bytes = (int(v) for v in page[:_PAGE_HEAD].view("<u4"))
        end = _PAGE_HEAD + n * self.dtype.itemsize
        records = page[_PAGE_HEAD:end].copy().view(self.dtype)
        if self.key_kind is None:
            return records, None
        if self.key_kind == "int64":
            return records, np.ascontiguousarray(records["key"])
        # Runs of one key are decoded once.
        slots = np.ascontiguousarray(records["key"])
        fresh = np.ones(n, np.bool_)
        fresh[1:] = slots[1:] != slots[:-1]
        cut = slots[fresh].view(_SLOT)
        pairs = zip(cut["offset"].tolist(), cut["length"].tolist(), strict=True)
        texts = _texts_of(self.file, self.name, page[end : end + heap_bytes].tobytes(), pairs)
        return records, texts[np.cumsum(fresh) - 1]


def _check_directory(
    container: Container, name: str, directory: npt.NDArray[Any], n_records: int, itemsize: int
) -> None:
    offset, length, _ = container.section(name)
    lengths = directory["length"].astype(np.int64)
    # First, because greater numbers would not fit or wrap around.
    if n_records > length // itemsize or bool((directory["first"] > np.uint64(n_records)).any()):
        raise CorruptionError(f"{n_records} records of {name!r} in {length} bytes of pages", file=container.name)
    first = np.append(directory["first"].astype(np.int64), n_records)
    sound = (
        np.array_equal(directory["offset"].astype(np.int64), offset + np.cumsum(lengths) - lengths)
        and int(lengths.sum()) == length
        and bool(((lengths >= _PAGE_HEAD) & (lengths <= PAGE_BYTES)).all())
        and int(first[0]) == 0
        and bool((np.diff(first) > 0).all())
        and ("key" not in (directory.dtype.names or ()) or bool((directory["key"][1:] >= directory["key"][:-1]).all()))
    )
    if not sound:
        raise CorruptionError(f"the directory of {name!r} does not describe its pages", file=container.name)


def _texts_of(file: str, name: str, heap: bytes, slots: Iterable[tuple[int, int]]) -> Keys:
    found, left = [], len(heap)
    for offset, length in slots:
        text = heap[offset : offset + length]
        # Each has bytes of its own, so that they are no more than the file has.
        left -= length
        if len(text) != length or left < 0:
            raise CorruptionError(f"a key of {name!r} lies outside its heap", file=file)
        found.append(text)
    out = np.empty(len(found), object)
    try:
        out[:] = [t.decode() for t in found]
    except UnicodeDecodeError as e:
        raise CorruptionError(f"a key of {name!r} is not UTF-8", file=file) from e
    return out
