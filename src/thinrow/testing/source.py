"""A source of examples in memory, by arithmetic, and a digest of what a batch says.

Example r of split s is request 1000 s + r of user 1000 s + r // 3, at 100 ms more, who has seven events.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.units import NEVER
from thinrow.dpp.batch import Batch
from thinrow.examples.records import ExampleBatch, text_column
from thinrow.history.archive.reader import ReadStats
from thinrow.history.missing import OnMissing
from thinrow.history.reconstruct import Reconstruction
from thinrow.history.requests import RequestBatch
from thinrow.jagged import HIDE_DTYPE, Column, Events, Jagged, SharedHistories
from thinrow.schema import VERSION_DTYPE, Projection

Ints = npt.NDArray[np.int64]

ROWS = (23, 0, 9, 14)
EVENTS = 7
SPLIT = 1000


class FakeSource:
    """A ``Source``. ``broken`` is a request id whose base batch fails."""

    def __init__(self, split_rows: Sequence[int] = ROWS, broken: int | None = None) -> None:
        self.split_rows = tuple(split_rows)
        self.broken = broken
        self.names = {"ctx.hour", "cand.item", "cand.price"}
        self.read: list[tuple[int, int, int]] = []

    def history_names(self, projection: Projection) -> Collection[str]:
        """See ``Source.history_names``."""
        return {"item", "shop"}

    def examples(self, split: int, first_row: int, stop_row: int) -> tuple[ExampleBatch, Ints]:
        """See ``Source.examples``."""
        self.read.append((split, first_row, stop_row))
        row = np.arange(first_row, stop_row)
        request_id = split * SPLIT + row
        if self.broken is not None and self.broken in request_id:
            raise RuntimeError(f"request {self.broken} cannot be read")
        n, users = len(row), split * SPLIT + row // 3
        versions = np.zeros(n, VERSION_DTYPE)
        versions["snapshot_arrival"] = EVENTS
        none = Events.empty(users, {})
        batch = RequestBatch(
            users, 100 + request_id, versions, none, np.empty(0, HIDE_DTYPE), np.zeros(n + 1, np.int64)
        )
        lengths = 1 + request_id % 3
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        item = Jagged(Column(np.repeat(request_id, lengths)), offsets)
        price = Jagged(Column(np.repeat(request_id / 8, lengths)), offsets)
        label = Jagged(Column(np.repeat(request_id % 2, lengths).astype(np.int32)), offsets)
        hour = Column((request_id % 24).astype(np.int8))
        names = text_column("model", n), text_column(f"arm {split}", n)
        context, candidates = {"hour": hour}, {"item": item, "price": price}
        examples = ExampleBatch(request_id, batch, context, candidates, {"click": label}, *names, np.zeros(n, np.int64))
        return examples, np.arange(n)

    def rebuild(
        self, batch: RequestBatch, projection: Projection, verify: bool, on_missing: OnMissing
    ) -> Reconstruction:
        """See ``Source.rebuild``."""
        users, user_of = np.unique(np.asarray(batch.users, np.int64), return_inverse=True)
        n = len(users)
        position = np.tile(np.arange(EVENTS), n)
        owner = np.repeat(users, EVENTS)
        shops = Column(position.astype(np.int32), None, pa.array([f"shop {users[0]}.{i}" for i in range(EVENTS)]))
        events = Events(
            users,
            np.arange(n + 1) * EVENTS,
            owner * 10 + position,
            position + 1,
            np.full(n * EVENTS, NEVER),
            {"item": Column(owner + position), "shop": shops},
        )
        stop = user_of * EVENTS + 1 + batch.request_ts % EVENTS
        start = np.maximum(stop - (projection.max_len or EVENTS), user_of * EVENTS)
        exact = np.ones(len(batch), np.bool_)
        histories = SharedHistories(events, user_of, start, stop, batch.versions["snapshot_arrival"], exact)
        stats = ReadStats(bytes_read=10, events_decoded=len(events), versions_verified=len(batch) * verify)
        return Reconstruction(histories, stats, np.zeros(len(batch), np.int8), np.arange(len(batch)))


def digest(batch: Batch) -> str:
    """Content of a batch, independent of how it is laid out (which codes a dictionary gives, say)."""
    h = hashlib.sha256()
    names = ["event_ts", *batch.histories.events.columns]
    # Under names of their own: a candidate's column may have the name of a history's.
    rows = {f"history.{n}": batch.histories.to_jagged(n).to_arrow().to_pylist() for n in names}
    rows |= {n: c.to_arrow().to_pylist() for n, c in batch.context.items()}
    for group in (batch.candidates, batch.labels, batch.features):
        rows |= {n: c.to_arrow().to_pylist() for n, c in group.items()}
    rows |= {"arm": batch.arm.to_arrow().to_pylist(), "users": batch.users.tolist()}
    h.update(repr((batch.t, batch.request_id.tolist(), batch.request_ts.tolist(), sorted(rows.items()))).encode())
    return h.hexdigest()
