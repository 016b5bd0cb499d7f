"""Several paged tables looked up as one: a batch's keys in all segments in a few compiled calls.

Worked example: users 7 and 9 are looked up in tables 0 and 1, which hold pieces of both. ``find([0, 0, 1, 1],
[7, 9, 7, 9])`` gives the first and last record of each pair; ``take`` of those records reads them where they lie. A
page is checked when it is first used: of mapped files it is then read in place, others go through the ``PageCache``.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        self._checked = np.zeros(len(self._first), np.bool_)
        self._keys: tuple[npt.NDArray[Any], ...] = ()
        if self._kind == "int64":
            self._keys = (np.concatenate([t.first_keys for t in tables if t.first_keys is not None]),)
        elif self._kind == "string":
            self._keys = _encoded(np.concatenate([t.first_keys for t in tables if t.first_keys is not None]))
        maps = objects.mapped([t.file for t in tables])
        self._buffers = None if maps is None else Buffers(maps)
        if self._buffers is not None:
            self._address = self._buffers.address[self._owner] + self._offset

    def find(self, table: I64, keys: Keys) -> tuple[I64, I64]:
        """The records of ``keys[i]`` in table ``table[i]`` as half-open ranges of record numbers (empty where absent).

        Args:
            table: (n,) int64.
            keys: (n,) of the tables' kind.

        Returns:
            first (inclusive) and last (exclusive), (n,) int64 each.

        Raises:
            CorruptionError: a page is damaged.
        """
        if self._kind == "int64":
            low, high = kernel("pages_of_keys")(self._page_off, *self._keys, table, keys)
            address, _held = self._load(np.concatenate([low, high]))
            found: tuple[I64, I64] = kernel("rows_of_keys")(
                address, self._first, self._count, low, high, keys, self.dtype.itemsize
            )
            return found
        texts = _encoded(keys)
        low, high = kernel("pages_of_texts")(self._page_off, *self._keys, table, *texts)
        address, _held = self._load(np.concatenate([low, high]))
        first, last, bad = kernel("rows_of_texts")(
            address, self._first, self._count, low, high, *texts, self.dtype.itemsize
        )
        if bad >= 0:
            owner = self._tables[self._owner[bad]]
            raise CorruptionError(f"a key of {owner.name!r} lies outside its heap", file=owner.file)
        return first, last

    def take(self, table: I64, numbers: I64) -> Records:
        """Record ``numbers[i]`` of table ``table[i]``, in that order.

        Raises:
            CorruptionError: a number that the table does not have (something that refers to it is damaged), or a
                damaged page.
        """
        page = kernel("pages_of_records")(self._page_off, self._first, self.n_records, table, numbers)
        if len(page) and page.min() < 0:
            i = int(page.argmin())
            owner = self._tables[table[i]]
            raise CorruptionError(
                f"record {numbers[i]} of {owner.name!r}, which has {owner.n_records}", file=owner.file
            )
        address, _held = self._load(page)
        out = np.empty(len(numbers), self.dtype)
        kernel("take_records")(address, self._first, page, numbers, self.dtype.itemsize, out.view(np.uint8))
        return out

    def _load(self, pages: I64) -> tuple[I64, Sequence[U8]]:
        """Addresses of all pages, right for ``pages`` (below 0: none), and what must live while they are used."""
        if self._buffers is not None:
            fresh = pages[pages >= 0]
            fresh = np.unique(fresh[~self._checked[fresh]])
            for t in np.unique(self._owner[fresh]).tolist():
                mine = fresh[self._owner[fresh] == t]
                self._tables[t].check(self._buffers.arrays[t], mine - self._page_off[t])
                self._checked[mine] = True
            return self._address, self._buffers.arrays
        wanted = np.unique(pages[pages >= 0])
        address, held = np.zeros(len(self._first), np.int64), []
        used = np.unique(self._owner[wanted]).tolist()
        parts = [wanted[self._owner[wanted] == t] for t in used]

        def load(k: int) -> list[U8]:
            pages: list[U8] = self._tables[used[k]].load(parts[k] - self._page_off[used[k]])
            return pages

        for mine, loaded in zip(parts, each(self._objects, load, range(len(used))), strict=True):
            address[mine] = Buffers(loaded).address
            held += loaded
        return address, held


def _encoded(keys: Keys) -> tuple[I64, U8]:
    """Texts as offsets and UTF-8 bytes."""
    texts = [str(k).encode() for k in keys]
    return offsets_of([len(t) for t in texts]), np.frombuffer(b"".join(texts), np.uint8)
