"""Ours: an archive of one segment a bucket, versions as requests logged them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.datagen.datasets import Histories, Work
from bench.datagen.requests import Batch
from bench.peers.peer import Out, Peer, copy_values
from thinrow.core.ragged import offsets_of
from thinrow.history.archive import layout
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import Window
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.jagged import HIDE_DTYPE, Events, SharedHistories
from thinrow.jagged.column import null_column
from thinrow.schema import VERSION_DTYPE, Projection

#: What decides which bytes a segment holds, below the package.
_WRITING = (
    *(f"history/archive/{name}.py" for name in ("encode", "layout", "writer")),
    "kernels/numba/encode*.py",
    "kernels/numba/nested.py",
    "storage/blocks.py",
    "storage/codecs.py",
)


class Thinrow(Peer):
    """Look-up, fetch, CRC, decode and verification of every version, then copies or shared views."""

    name: ClassVar[str] = "thinrow"

    def __init__(self, work: Work, data: Histories, batches: Sequence[Batch] = ()) -> None:
        """Load the histories in bulk, and log the requests of ``batches``."""
        super().__init__(work, data)
        self.path = work.cached("thinrow", {**data.parameters, "writer": _writer()}, self._build)
        with HistoryStore.open(self.path) as store:
            self.generation = store.pin()
            self._projections: dict[int | None, Projection] = {}
            self._requests = {id(b): store.snapshot(b.users, b.request_ts).requests for b in batches}

    def _build(self, path: Path) -> None:
        with HistoryStore.create(path, self.data.schema) as store:
            store.bulk_load(self.data.table())
            store.compact(full=True)

    def settings(self) -> dict[str, Any]:
        """What it reads."""
        return {"segments": len(self.generation.segments), "verify": True, "bytes": self.generation.bytes}

    def requests(self, batch: Batch) -> RequestBatch:
        """The batch as it was logged."""
        return self._requests[id(batch)]

    def shared(self, batch: Batch, newest: int | None) -> SharedHistories:
        """One copy a user, and a slice an example: what a batch carries."""
        projection = self._projections.get(newest)
        if projection is None:
            projection = self._projections[newest] = Projection(max_len=newest)
        return reconstruct(self.generation, self.requests(batch), projection).histories

    def coded(self) -> tuple[str, ...]:
        """Columns whose codes are smaller than their values."""
        return tuple(c.name for c in self.data.schema.columns if c.dtype == "int64")

    def read_codes(self, batch: Batch, newest: int | None, out: Out) -> int:
        """Copies of every example's events; of ``coded`` columns int32 codes, in the first half of their arrays, into
        one dictionary a batch."""
        codes = self.coded()
        out = {n: v.view(np.int32) if n in codes else v for n, v in out.items()}
        return self.copy(self._shared_codes(batch, newest), out)

    def check_codes(self, batch: Batch, newest: int | None) -> bool:
        """Whether the codes stand for the values."""
        values, codes = self.shared(batch, newest).events.columns, self._shared_codes(batch, newest).events.columns
        return all(np.array_equal(codes[n].decoded().values, values[n].values) for n in values)

    def _shared_codes(self, batch: Batch, newest: int | None) -> SharedHistories:
        projection = Projection(max_len=newest, codes=self.coded())
        return reconstruct(self.generation, self.requests(batch), projection).histories

    def read_shared(self, batch: Batch, newest: int | None) -> int:
        """Events that the shared views of one batch show."""
        return int(self.shared(batch, newest).lengths().sum())

    def read(self, batch: Batch, newest: int | None, out: Out) -> int:
        """Copies of every example's events."""
        return self.copy(self.shared(batch, newest), out)

    def copy(self, histories: SharedHistories, out: Out) -> int:
        """The columns of ``out``, a copy for each example; returns events delivered."""
        assert histories.exact.all()
        if len(histories) == 1:
            a, b = int(histories.start[0]), int(histories.stop[0])
            for name in out:
                held = histories.events.event_ts if name == "event_ts" else histories.events.columns[name].values
                out[name][: b - a] = held[a:b]
            return b - a
        length = histories.stop - histories.start
        at = offsets_of(length)
        for name in out:
            source = histories.events.event_ts if name == "event_ts" else histories.events.columns[name].values
            copy_values(source, histories.start, length, out[name], at[:-1])
        return int(at[-1])


def _writer() -> str:
    """A digest of the code that decides what a segment holds, so that a kept store is not of an older writer."""
    digest = hashlib.sha256()
    for name in _WRITING:
        for path in sorted(Path(layout.__file__).parents[2].glob(name)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def logged_at_its_time(generation: Generation, data: Histories, batch: Batch) -> RequestBatch:
    """The requests as they were logged when only the events that had arrived by then were archived."""
    arrival_ts = data.columns["event_ts"] if data.arrival_ts is None else data.arrival_ts
    known = [
        int(np.count_nonzero(arrival_ts[a:b] < t))
        for a, b, t in zip(data.first[batch.users], data.first[batch.users + 1], batch.request_ts, strict=True)
    ]
    # Numbers are given in order of arrival, so what had arrived by then are the first of them.
    bound = np.array(known, np.int64)
    users, user_of = np.unique(batch.users, return_inverse=True)
    window = Window(generation, users, user_of.astype(np.int64), batch.request_ts, bound, ReadStats())
    versions = np.zeros(len(batch), VERSION_DTYPE)
    versions["seq_len"], versions["checksum"], versions["start_ts"], versions["end_ts"] = window.summarize()
    versions["last_arrival"] = versions["snapshot_arrival"] = bound
    versions["schema_id"] = generation.schema.schema_id
    columns = {c.name: null_column(c.dtype, 0) for c in data.schema.columns}
    return RequestBatch(
        batch.users,
        batch.request_ts,
        versions,
        Events.empty(batch.users, columns),
        np.empty(0, HIDE_DTYPE),
        np.zeros(len(batch) + 1, np.int64),
    )
