"""Element for element: a rebuilt history against the fat row of the same request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.cli.demo.fat_rows import NULL, FatBatch, FatRowReader
from thinrow.core.wrap import mix64_words
from thinrow.jagged import Column, SharedHistories
from thinrow.kernels import kernel


def count_mismatches(ours: SharedHistories, fat: FatBatch, dictionaries: dict[str, pa.Array]) -> int:
    """Number of examples that differ from their fat row in length or in any element of any column of ``fat``.

    Example i of ``ours`` belongs to row i of ``fat``. Floats are compared by their bits.
    """
    index, offsets = ours.positions()
    wrong = np.diff(offsets) != np.diff(fat.offsets)
    if wrong.any():
        # Rows of unequal length are wrong as they are; the others are compared beside each other.
        same = np.flatnonzero(~wrong)
        if len(same) == 0:
            return int(wrong.sum())
        return int(wrong.sum()) + count_mismatches(ours.select(same), fat.take(same), dictionaries)
    differs = np.zeros(len(index), np.bool_)
    for name, values in fat.columns.items():
        column = Column(ours.events.event_ts) if name == "event_ts" else ours.events.columns[name]
        differs |= _bits(fat_values(column, dictionaries.get(name))[index]) != _bits(values)
    example = np.repeat(np.arange(len(wrong)), np.diff(offsets))
    return len(np.unique(example[differs]))


def count_altered(written: Path, rewritten: Path, columns: Sequence[str]) -> int:
    """Number of requests whose row in one file of fat rows is not bit for bit their row in the other.

    ``written`` holds the rows as they were kept at request time, ``rewritten`` the same in another order.
    """
    ids, rows = _row_digests(written, columns)
    other_ids, other_rows = _row_digests(rewritten, columns)
    if len(ids) != len(other_ids):
        return max(len(ids), len(other_ids))
    return int(((ids != other_ids) | (rows != other_rows)).sum())


def _row_digests(path: Path, columns: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Request ids, ascending, and a digest of the bytes of each one's row."""
    ids, digests = [], []
    reader = FatRowReader(path, columns, threads=True)
    for batch in (reader.read_group(g) for g in range(reader.n_groups)):
        total = np.zeros(len(batch.request_id), np.uint64)
        for values in batch.columns.values():
            plain = np.ascontiguousarray(values)
            folded = kernel("fold_bytes")(batch.offsets * plain.itemsize, plain.view(np.uint8))
            total = mix64_words(total ^ folded)
        ids.append(batch.request_id)
        digests.append(total)
    request_id = np.concatenate(ids)
    order = np.argsort(request_id)
    return request_id[order], np.concatenate(digests)[order]


def fat_values(column: Column, dictionary: pa.Array | None) -> npt.NDArray[Any]:
    """Values as a fat row has them: codes of ``dictionary`` for strings (-2 for a string it lacks), -1 for null."""
    values = column.values
    if column.dictionary is not None:
        codes = pc.index_in(column.dictionary, dictionary).fill_null(-2).to_numpy(zero_copy_only=False)
        values = codes[values] if len(codes) else values
    return values if column.valid is None else np.where(column.valid, values, NULL)


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.view(np.dtype(f"i{values.itemsize}")) if values.dtype.kind == "f" else values
