"""Sort rows by two integer keys, which together are unique, in bounded memory: sorted pieces on disk, then their merge.

Worked example, pieces of 3 rows: ``5 1 4 | 2 3 0`` is written as ``1 4 5`` and ``0 2 3``. With blocks of 2 rows the
first keys are ``1 4`` and ``0 2``; the least last key is 2, so 1, 0 and 2 are final and leave as ``0 1 2``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.history.bulk.runs import whole_batches, write_batches
from thinrow.storage.objects import LocalObjects

Ints = npt.NDArray[np.int64]


def sorted_tables(tables: Iterable[pa.Table], keys: tuple[str, str], folder: Path, rows: int) -> Iterator[pa.Table]:
    """All rows by ``keys`` (two int64 columns), in tables of ``rows`` rows, the last one shorter.

    ``tables`` have about ``rows`` rows each; they are sorted one by one and kept in ``folder``, which is made.

    Raises:
        StoreError: the disk refuses.
    """
    objects = LocalObjects(folder)
    paths = []
    for i, table in enumerate(tables):
        a, b = (table.column(k).to_numpy() for k in keys)
        piece = table.take(pa.array(np.lexsort((b, a))))
        name = f"{i}.arrow"
        with objects.create(name) as writer:
            write_batches(writer, piece.schema, iter(whole_batches(piece)))
        paths.append(folder / name)
    held: list[pa.Table] = []
    n = 0
    for table in _merged(paths, keys):
        held.append(table)
        n += table.num_rows
        if n >= rows:
            joined = pa.concat_tables(held)
            for at in range(0, n - n % rows, rows):
                yield joined.slice(at, rows)
            held, n = [joined.slice(n - n % rows)], n % rows
    if n:
        yield pa.concat_tables(held)


def _merged(paths: list[Path], keys: tuple[str, str]) -> Iterator[pa.Table]:
    pieces = [_Piece(path, keys) for path in paths]
    while True:
        for piece in pieces:
            piece.fill()
        pieces = [p for p in pieces if len(p.a)]
        if not pieces:
            return
        ends = [(int(p.a[-1]), int(p.b[-1])) for p in pieces]
        taken = [p.take(min(ends)) for p in pieces]
        joined = pa.concat_tables([t for t in taken if t.num_rows])
        a, b = (joined.column(k).to_numpy() for k in keys)
        yield joined.take(pa.array(np.lexsort((b, a))))


class _Piece:
    """One sorted piece, a block at a time."""

    def __init__(self, path: Path, keys: tuple[str, str]) -> None:
        self._batches = _read(path)
        self._keys = keys
        self._table: pa.Table | None = None
        self.a: Ints = np.empty(0, np.int64)
        self.b: Ints = self.a

    def fill(self) -> None:
        """Read a block where none is held."""
        if not len(self.a):
            batch = next(self._batches, None)
            if batch is not None:
                self._hold(pa.Table.from_batches([batch]))

    def take(self, through: tuple[int, int]) -> pa.Table:
        """Let go of the rows up to the key ``through`` (inclusive)."""
        assert self._table is not None
        first, last = (int(np.searchsorted(self.a, through[0], side)) for side in ("left", "right"))
        n = first + int(np.searchsorted(self.b[first:last], through[1], "right"))
        taken = self._table.slice(0, n)
        self._hold(self._table.slice(n))
        return taken

    def _hold(self, table: pa.Table) -> None:
        self._table = table
        self.a, self.b = (table.column(k).to_numpy() for k in self._keys)


def _read(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        for i in range(file.num_record_batches):
            yield file.get_batch(i)
