"""The rival: fat rows, one Parquet row a request that holds a copy of its whole visible history.

Written from the raw events with NumPy and pyarrow alone: nothing here passes through thinrow's store, so a fat row is
the oracle of a rebuilt history as well as its competitor. Tuned in good faith:

- values plain-encoded, zstd level 3, pages of 4 MB: across neighbouring rows of one user the codec removes most copies
  (measured: 49 MB sorted by user against 498 MB in arrival order, before candidates);
- strings as int32 codes of a dictionary kept once in the file's metadata, compressed; null as -1: no offsets, no copies
  on reading;
- no element is nullable, no statistics.

Worked example: household 7 bought at 10, 20 and 30 ms; its request at 30 ms has the row ``event_ts = [10, 20]``, and
the newest one of it is ``[20]``. Where the event of 20 ms became known only after that request, the row is ``[10]``.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from thinrow.cli.demo.data import DemoData
from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.core.users import Users, bucket_of, distinct
from thinrow.jagged import Column, Jagged

#: A row group ends at the first row with which it holds so many history events: about 40 MB in memory.
GROUP_EVENTS = 500_000
_PAGE_BYTES = 4 << 20
_ZSTD_LEVEL = 3
_DICTIONARIES = b"thinrow.demo.dictionaries"
_COUNT_EVENTS = 4_000_000
#: Stands for null in every fat column; no value of the data is negative.
NULL = -1


@dataclass(frozen=True, slots=True)
class FatRowSource:
    """All events by (user, event_ts, arrival), where the history of each request is, and the requests' candidates.

    The history of request r is the events ``[start[r], stop[r])`` whose ``arrival`` is below ``bound[r]``; without late
    events that is all of them.

    Attributes:
        request_id: (R,) int64.
        users: (R,) ids.
        request_ts: (R,) int64 ms.
        start: (R,) int64 first event of the request's user in ``columns`` (inclusive).
        stop: (R,) int64 first event that is not before the request (exclusive end).
        bound: (R,) int64 arrival of the first event that the request could not know (exclusive).
        lengths: (R,) int64 number of visible events.
        arrival: (E,) int64 rank of each event in order of arrival, from 0.
        columns: ``event_ts`` and the event columns, (E,) each; strings as codes, null as -1.
        scalars: context fields, (R,) each.
        candidates: candidate fields and ``label_<outcome>``, R rows each.
        dictionaries: the strings that the codes of a column mean.
    """

    request_id: npt.NDArray[np.int64]
    users: Users
    request_ts: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    bound: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    arrival: npt.NDArray[np.int64]
    columns: dict[str, npt.NDArray[Any]]
    scalars: dict[str, npt.NDArray[Any]]
    candidates: dict[str, Jagged]
    dictionaries: dict[str, pa.Array]

    @classmethod
    def of(cls, data: DemoData, candidates: dict[str, Jagged]) -> FatRowSource:
        """The fat rows of ``data``; ``candidates`` adds to the requests' own (its arrays may be filled in later)."""
        r = data.requests
        everyone, user = distinct(data.users)
        order = np.lexsort((data.event_ts, user))
        user, event_ts = user[order], data.event_ts[order]
        # Ranks of times, not times: a user's number times the span of a bad date could exceed 63 bits.
        times = np.unique(np.concatenate([event_ts, r.request_ts]))
        asking = np.searchsorted(everyone, r.users)
        key = user * len(times) + np.searchsorted(times, event_ts)
        start = np.searchsorted(user, asking)
        stop = np.searchsorted(key, asking * len(times) + np.searchsorted(times, r.request_ts))
        bound = data.bundle_offsets[r.bundle]
        lists = {f"cand_{n}": j for n, j in (r.candidates | candidates).items()}
        lists |= {f"label_{n}": j for n, j in r.labels.items()}
        dictionaries = {n: c.dictionary for n, c in data.columns.items() if c.dictionary is not None}
        dictionaries |= {n: j.column.dictionary for n, j in lists.items() if j.column.dictionary is not None}
        dictionaries |= {f"ctx_{n}": c.dictionary for n, c in r.context.items() if c.dictionary is not None}
        return cls(
            request_id=r.request_id,
            users=r.users,
            request_ts=r.request_ts,
            start=start,
            stop=stop,
            bound=bound,
            lengths=_count_known(user, order, start, stop, bound),
            arrival=order,
            columns={"event_ts": event_ts} | {n: filled(c)[order] for n, c in data.columns.items()},
            scalars={f"ctx_{n}": c.values for n, c in r.context.items()},
            candidates=lists,
            dictionaries=dictionaries,
        )

    def history(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Positions in ``columns`` of the histories of the requests ``rows``, one after another, and their offsets."""
        index, offsets = ranges_index(self.start[rows], self.stop[rows])
        lengths = self.lengths[rows]
        if int(lengths.sum()) == len(index):
            return index, offsets
        known = self.arrival[index] < np.repeat(self.bound[rows], np.diff(offsets))
        return index[known], offsets_of(lengths)

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows, with the dictionaries in its metadata."""
        user = pa.int64() if self.users.dtype == np.int64 else pa.string()
        keys = {"request_id": pa.int64(), "user_id": user, "request_ts": pa.int64()}
        fields = [pa.field(n, kind, nullable=False) for n, kind in keys.items()]
        fields += [pa.field(n, pa.from_numpy_dtype(v.dtype), nullable=False) for n, v in self.scalars.items()]
        fields += [_list_field(n, v.dtype) for n, v in self.columns.items()]
        fields += [_list_field(n, j.values.dtype) for n, j in self.candidates.items()]
        words = {n: d.to_pylist() for n, d in self.dictionaries.items()}
        packed = base64.b64encode(zlib.compress(json.dumps(words).encode()))
        return pa.schema(fields, metadata={_DICTIONARIES: packed})

    def table(self, rows: npt.NDArray[np.int64], schema: pa.Schema) -> pa.Table:
        """The fat rows of the requests ``rows``, in that order."""
        index, offsets = self.history(rows)
        arrays = [pa.array(a[rows]) for a in (self.request_id, self.users, self.request_ts, *self.scalars.values())]
        for name, values in self.columns.items():
            arrays.append(_list_array(values[index], offsets, schema.field(name).type))
        for name, jagged in self.candidates.items():
            taken = jagged.take(rows)
            arrays.append(_list_array(taken.values, taken.offsets, schema.field(name).type))
        return pa.Table.from_arrays(arrays, schema=schema)


def _count_known(
    user: npt.NDArray[np.int64],
    arrival: npt.NDArray[np.int64],
    start: npt.NDArray[np.int64],
    stop: npt.NDArray[np.int64],
    bound: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """(R,) how many of the events ``[start, stop)`` of each request arrived before its bound."""
    lengths = stop - start
    # The latest arrival among a user's events up to each: where it is below the bound, so are all before it.
    latest = np.maximum.accumulate(user * len(user) + arrival) - user * len(user)
    late = np.flatnonzero((lengths > 0) & (latest[stop - 1] >= bound)) if len(user) else np.empty(0, np.int64)
    part = np.cumsum(lengths[late]) // _COUNT_EVENTS
    for rows in np.split(late, np.flatnonzero(np.diff(part)) + 1):
        index, offsets = ranges_index(start[rows], stop[rows])
        known = offsets_of(arrival[index] < np.repeat(bound[rows], np.diff(offsets)))
        lengths[rows] = known[offsets[1:]] - known[offsets[:-1]]
    return lengths


def filled(column: Column) -> npt.NDArray[Any]:
    """The values of a column (codes, for strings) with ``NULL`` where null."""
    if column.valid is None:
        return column.values
    return np.where(column.valid, column.values, NULL).astype(column.values.dtype)


def _list_field(name: str, dtype: np.dtype[Any]) -> pa.Field:
    element = pa.field("element", pa.from_numpy_dtype(dtype), nullable=False)
    return pa.field(name, pa.list_(element), nullable=False)


def _list_array(values: npt.NDArray[Any], offsets: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values), type=kind)


class FatRowWriter:
    """Streams fat rows into one Parquet file; holds at most one row group. Use as a context manager."""

    def __init__(self, path: Path, source: FatRowSource) -> None:
        self._source = source
        self._schema = source.schema
        self._pending = np.empty(0, np.int64)
        encodings = {
            f.name if not pa.types.is_list(f.type) else f"{f.name}.list.element": "PLAIN" for f in self._schema
        }
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            use_dictionary=False,
            column_encoding=encodings,
            write_statistics=False,
            data_page_size=_PAGE_BYTES,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.end_group()
        self._writer.close()

    def append(self, rows: npt.NDArray[np.int64]) -> None:
        """Add the fat rows of the requests ``rows``, in that order."""
        self._pending = np.concatenate([self._pending, rows])
        while True:
            total = np.cumsum(self._source.lengths[self._pending])
            n = int(np.searchsorted(total, GROUP_EVENTS)) + 1
            if n > len(total):
                return
            self._write(self._pending[:n])
            self._pending = self._pending[n:]

    def end_group(self) -> None:
        """End the row group here, so that the next row starts another."""
        if len(self._pending):
            self._write(self._pending)
            self._pending = self._pending[:0]

    def _write(self, rows: npt.NDArray[np.int64]) -> None:
        self._writer.write_table(self._source.table(rows, self._schema), row_group_size=len(rows))


def write_sorted(path: Path, source: FatRowSource, n_buckets: int) -> None:
    """All fat rows by (bucket, user, request time); a row group holds rows of one bucket."""
    bucket = bucket_of(source.users, n_buckets)
    order = np.lexsort((source.request_ts, distinct(source.users)[1], bucket))
    cuts = np.flatnonzero(np.diff(bucket[order])) + 1
    with FatRowWriter(path, source) as writer:
        for rows in np.split(order, cuts):
            writer.append(rows)
            writer.end_group()


@dataclass(frozen=True, slots=True)
class FatBatch:
    """Histories as read from fat rows.

    Attributes:
        request_id: (X,) int64.
        offsets: (X + 1,) int64.
        columns: name -> (offsets[-1],) values, codes for strings, null as -1.
    """

    request_id: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    columns: dict[str, npt.NDArray[Any]]

    def take(self, rows: npt.NDArray[np.int64]) -> FatBatch:
        """The histories at ``rows``, in that order, copied."""
        index, offsets = ranges_index(self.offsets[:-1][rows], self.offsets[1:][rows])
        return FatBatch(self.request_id[rows], offsets, {n: v[index] for n, v in self.columns.items()})

    def newest(self, n: int | None) -> FatBatch:
        """The newest ``n`` events of each history, copied; itself for None."""
        if n is None:
            return self
        index, offsets = ranges_index(np.maximum(self.offsets[:-1], self.offsets[1:] - n), self.offsets[1:])
        return FatBatch(self.request_id, offsets, {name: v[index] for name, v in self.columns.items()})


class FatRowReader:
    """Reads a file of fat rows, a row group at a time; by request through a bounded cache of row groups."""

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        *,
        others: Sequence[str] = (),
        threads: bool = False,
        cache_groups: int = 8,
    ) -> None:
        """``columns``: history columns to read. ``others``: columns read beside them, so that a measurement is of whole
        training rows. ``threads``: decode the columns of a row group in parallel."""
        self._file = pq.ParquetFile(path)
        self._columns, self._others = list(columns), list(others)
        self._threads = threads
        self._cache: OrderedDict[int, FatBatch] = OrderedDict()
        self._cache_groups = cache_groups
        words = json.loads(zlib.decompress(base64.b64decode(self._file.schema_arrow.metadata[_DICTIONARIES])))
        self.dictionaries: dict[str, pa.Array] = {n: pa.array(w, pa.string()) for n, w in words.items()}
        self.n_groups: int = self._file.num_row_groups
        self.request_id: npt.NDArray[np.int64] = self._file.read(columns=["request_id"])["request_id"].to_numpy()
        sizes = [self._file.metadata.row_group(g).num_rows for g in range(self.n_groups)]
        self._first_row = np.cumsum([0, *sizes])
        self._by_id = np.argsort(self.request_id)

    def read_group(self, group: int) -> FatBatch:
        """The fat rows of a row group, whole: a list cannot be read from its end."""
        wanted = ["request_id", *self._columns, *self._others]
        table = self._file.read_row_group(group, columns=wanted, use_threads=self._threads)
        lists = {n: table[n].chunk(0) for n in self._columns}
        offsets = lists[self._columns[0]].offsets.to_numpy().astype(np.int64)
        columns = {n: a.values.to_numpy() for n, a in lists.items()}
        return FatBatch(table["request_id"].to_numpy(), offsets, columns)

    def fetch(self, request_id: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], FatBatch]]:
        """The histories of the given requests, a row group at a time: positions in ``request_id``, and their histories.

        Raises:
            InputError: the file has no row of an id.
        """
        at = np.searchsorted(self.request_id, request_id, sorter=self._by_id)
        rows = self._by_id[np.minimum(at, len(self._by_id) - 1)]
        unknown = self.request_id[rows] != request_id
        if unknown.any():
            wrong, n = request_id[unknown][0], len(self._by_id)
            raise InputError(f"no fat row of request {wrong}; the file holds {n} requests")
        groups = np.searchsorted(self._first_row, rows, side="right") - 1
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            yield places, self._cached(group).take(rows[places] - self._first_row[group])

    def _cached(self, group: int) -> FatBatch:
        batch = self._cache.pop(group, None) or self.read_group(group)
        self._cache[group] = batch
        if len(self._cache) > self._cache_groups:
            self._cache.popitem(last=False)
        return batch
