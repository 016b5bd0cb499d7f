"""Several paged tables looked up as one: a batch's keys in all segments in a few compiled calls.

Worked example: users 7 and 9 are looked up in tables 0 and 1, which hold pieces of both. ``find([0, 0, 1, 1],
[7, 9, 7, 9])`` gives the first and last record of each pair; ``take_ranges`` copies them from where they lie. A page is
checked when it is first used: of mapped files it is then read in place, others go through the ``PageCache``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.buffers import Buffers
from thinrow.core.errors import CorruptionError
from thinrow.core.ragged import offsets_of
from thinrow.kernels import kernel
from thinrow.storage.objects import ObjectStore, each
from thinrow.storage.pages import I64, Keys, PagedTable, Records

U8 = npt.NDArray[np.uint8]


#: So many records take no memory to speak of, whatever a damaged table says.
_FEW = 4_096


class Index:
    """Paged tables of one record type and one kind of keys. Safe for threads."""

    def __init__(self, objects: ObjectStore, tables: Sequence[PagedTable]) -> None:
        """One table or more, whose files lie in ``objects``."""
        self._objects, self._tables = objects, tuple(tables)
        first = tables[0]
        self.dtype, self._kind = first.dtype, first.key_kind
        #: (T,) records of each table.
        self.n_records: I64 = np.array([t.n_records for t in tables], np.int64)
        self._page_off = offsets_of([t.n_pages for t in tables])
        self._first = np.concatenate([t.first[:-1] for t in tables])
        self._count = np.concatenate([np.diff(t.first) for t in tables])
        self._offset = np.concatenate([t.offset for t in tables])
        self._owner = np.repeat(np.arange(len(tables)), np.diff(self._page_off))
        self._keys: tuple[npt.NDArray[Any], ...] = ()
        if self._kind == "int64":
            self._keys = (np.concatenate([t.first_keys for t in tables if t.first_keys is not None]),)
        elif self._kind == "string":
            self._keys = _encoded(np.concatenate([t.first_keys for t in tables if t.first_keys is not None]))
        maps = objects.mapped([t.file for t in tables])
        self._buffers = None if maps is None else Buffers(maps)
        #: Of mapped files, the address of each page that has been checked; 0 for the others.
        self._address = np.zeros(len(self._first), np.int64)

    @property
    def pages(self) -> tuple[npt.NDArray[Any], ...] | None:
        """What ``ranges_of_keys`` reads first, where keys are numbers and all files are mapped: offsets of each table's
        pages, first key, first record, records and address of each page (0 until it is checked)."""
        if self._buffers is None or self._kind != "int64":
            return None
        return self._page_off, *self._keys, self._first, self._count, self._address

    def load_all(self, most_bytes: int) -> None:
        """Check all pages of mapped files now, where they have no more than ``most_bytes``. Raises CorruptionError."""
        if self._buffers is not None and sum(int(t.length.sum()) for t in self._tables) <= most_bytes:
            absent = np.flatnonzero(self._address == 0)
            if len(absent):
                self._load(absent, self._address)

    def find(self, table: I64, keys: Keys) -> tuple[I64, I64, int, int]:
        """The records of ``keys[i]`` in table ``table[i]`` as half-open ranges of record numbers (empty where absent).

        Args:
            table: (n,) int64; no pair of table and key is there twice.
            keys: (n,) of the tables' kind.

        Returns:
            first (inclusive) and last (exclusive), (n,) int64 each; how many records that is; and, because a table is
            out of order, the first i whose range ends before it begins, or 0 where there are more records than the
            tables have; else -1.

        Raises:
            CorruptionError: a page is damaged.
        """
        n = len(table)
        first, last, wanted = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(2 * n, np.int64)
        pages, out = (self._first, self._count), (self.dtype.itemsize, first, last, wanted)
        texts = None if self._kind == "int64" else _encoded(keys)
        total, wrong = 0, -1

        def search(address: I64) -> int:
            nonlocal total, wrong
            if texts is None:
                total, missing, wrong = kernel("ranges_of_keys")(
                    self._page_off, *self._keys, *pages, address, table, keys, *out
                )
                return int(missing)
            total, missing, wrong, bad = kernel("ranges_of_texts")(
                self._page_off, *self._keys, *pages, address, table, *texts, *out
            )
            if bad >= 0:
                owner = self._tables[self._owner[bad]]
                raise CorruptionError(f"a key of {owner.name!r} lies outside its heap", file=owner.file)
            return int(missing)

        self._with_pages(search, wanted)
        if wrong < 0 and total > _FEW and total > int(self._count.sum()):
            # Of pages whose first keys descend the ranges of different keys overlap.
            wrong = 0
        return first, last, total, wrong

    def take_ranges(self, table: I64, first: I64, last: I64, n: int) -> Records:
        """The ``n`` records that ``find`` found, one range after another. Raises CorruptionError: a page is damaged."""
        out, wanted = np.empty(n, self.dtype), np.empty(n, np.int64)
        into = out.view(np.uint32)

        def take(address: I64) -> int:
            missing: int = kernel("take_ranges")(
                self._page_off, self._first, self._count, address, table, first, last, self.dtype.itemsize, into, wanted
            )
            return missing

        self._with_pages(take, wanted)
        return out

    def take(self, table: I64, numbers: I64) -> Records:
        """Record ``numbers[i]`` of table ``table[i]``, in that order.

        Raises:
            CorruptionError: a number that the table does not have (something that refers to it is damaged), or a
                damaged page.
        """
        out, wanted = np.empty(len(numbers), self.dtype), np.empty(len(numbers), np.int64)
        into = out.view(np.uint8)

        def take(address: I64) -> int:
            missing, bad = kernel("take_records")(
                self._page_off, self._first, self.n_records, address, table, numbers, self.dtype.itemsize, into, wanted
            )
            if bad >= 0:
                owner = self._tables[table[bad]]
                raise CorruptionError(
                    f"record {numbers[bad]} of {owner.name!r}, which has {owner.n_records}", file=owner.file
                )
            return int(missing)

        self._with_pages(take, wanted)
        return out

    def _with_pages(self, read: Callable[[I64], int], wanted: I64) -> None:
        """Call ``read`` with the addresses of the pages that are there until it wants no others: it answers how many
        of ``wanted`` it does."""
        address, held = self._address if self._buffers is not None else np.zeros_like(self._address), []
        while missing := read(address):
            held.append(self._load(np.unique(wanted[:missing]), address))

    def _load(self, pages: I64, address: I64) -> Sequence[U8]:
        """Enter the addresses of pages (ascending) that are sound. Returns what must live while they are used."""
        used = np.unique(self._owner[pages]).tolist()
        parts = [pages[self._owner[pages] == t] for t in used]
        if self._buffers is not None:
            for t, mine in zip(used, parts, strict=True):
                self._tables[t].check(self._buffers.arrays[t], mine - self._page_off[t])
                address[mine] = self._buffers.address[t] + self._offset[mine]
            return self._buffers.arrays

        def load(k: int) -> list[U8]:
            pages: list[U8] = self._tables[used[k]].load(parts[k] - self._page_off[used[k]])
            return pages

        held = []
        for mine, loaded in zip(parts, each(self._objects, load, range(len(used))), strict=True):
            address[mine] = Buffers(loaded).address
            held += loaded
        return held


def _encoded(keys: Keys) -> tuple[I64, U8]:
    """Texts as offsets and UTF-8 bytes."""
    texts = [str(k).encode() for k in keys]
    return offsets_of([len(t) for t in texts]), np.frombuffer(b"".join(texts), np.uint8)
