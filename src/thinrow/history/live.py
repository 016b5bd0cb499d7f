"""What users did until now, read in one compiled call: the newest archived events and those of the recent tier.

Worked example: the newest 200 events of a user, 64 of them recent. The newest generation is pinned, the tier gives what
it holds of the user as bytes, and ``read_live`` finds the user's index entries, drops rows of the tier that are
archived too, decodes 136 archived rows and puts the 64 behind them. No version is made of it: whoever logs what was
read takes a snapshot, and rebuilds that.

What the call cannot do the long way does, which is its oracle: a snapshot, and its reconstruction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from thinrow.core import pool
from thinrow.core.stripes import FOUND_RECENT, FOUND_ROWS, SET, TAKE, TEST, USED
from thinrow.core.units import NEVER
from thinrow.core.users import Users
from thinrow.history.archive.few import Few
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.lookup import Ints
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import Window
from thinrow.history.recent.blocks import BlockTier
from thinrow.history.recent.keys import PAIR_DTYPE
from thinrow.history.recent.rows import layout_of
from thinrow.history.reconstruct import Reconstruction, count_columns
from thinrow.jagged import Events, SharedHistories
from thinrow.kernels import kernel
from thinrow.schema import EventSchema, Projection

_DONE, _BEHIND = 0, 4
_PAIR, _KEY = PAIR_DTYPE.itemsize, 16
_TRIES = 3
_BEGINNING = np.iinfo(np.int64).min


def read_live(
    pin: Callable[[], Generation], recent: BlockTier, users: Users, request_ts: Ints, projection: Projection
) -> Reconstruction | None:
    """What distinct ``users`` (X,) did before ``request_ts`` (X,), as a snapshot taken now would see it; None where
    that is to be read the long way.

    Raises:
        Erased: the generation was revoked meanwhile.
        SchemaError: the projection does not fit the schema.
    """
    n, max_len, p = len(users), projection.max_len, projection
    if p.align > 1 or p.codes or p.shortest is not None or (n > 1 and len(set(users.tolist())) < n):
        return None
    for _ in range(_TRIES):
        generation, stats, since = pin(), ReadStats(), time.perf_counter()
        if generation.tombstone_index.files and len(generation.tombstones(users)):
            # What was erased raises the watermark, and its corrections hide nothing.
            return None
        columns = generation.columns_of(projection)[1]
        reads = generation.tables.few
        few = reads.of(generation, columns, users, max_len)
        if few is None or max_len is None:
            return None
        generation.require_readable()
        data = recent.held(users)
        plan = _plan(few, generation.schema, recent, data, n)
        if plan is None:
            return None
        done, found = _read(generation, few, plan, data, users, request_ts, projection, stats)
        if reads.prepared(done, few, generation, users):
            done, found = _read(generation, few, plan, data, users, request_ts, projection, stats)
        if found is not None:
            stats.clock("decode", since)
            count_columns(generation, columns, stats, n)
            return Reconstruction(found, stats, np.zeros(n, np.int8), np.arange(n))
        if done != _BEHIND:
            return None
    return None


def _read(
    generation: Generation,
    few: Few,
    plan: tuple[int, Ints],
    data: bytes,
    users: Users,
    request_ts: Ints,
    projection: Projection,
    stats: ReadStats,
) -> tuple[int, SharedHistories | None]:
    tables, n, max_len = few.tables, len(users), projection.max_len
    assert tables is not None
    assert max_len is not None
    row_bytes, layout = plan
    most = (len(data) - n * _PAIR) // row_bytes
    capacity = (n * max_len + most + 7) & ~7
    at = USED + len(tables.row_bytes)
    out, found = pool.empty(capacity * few.row_bytes, np.uint8), np.zeros(at + 7 * n + 1 + 2 * most, np.int64)
    horizon = -1 if projection.horizon_ms is None else projection.horizon_ms
    done = kernel("read_live")(
        tables, np.frombuffer(data, np.uint8), layout, users, request_ts, max_len, horizon, out, capacity, found
    )
    if done != _DONE:
        return done, None
    head = found[:at].tolist()
    n_recent = head[FOUND_RECENT]
    stats.events_decoded += head[FOUND_ROWS] - n_recent
    event_ts, columns = few.columns_in(out, capacity, head, stats)
    distinct, user_of, offsets = found[at : at + n], found[at + n : at + 2 * n], found[at + 2 * n : at + 3 * n + 1]
    at += 3 * n + 1
    start, stop, bound = found[at : at + n], found[at + n : at + 2 * n], found[at + 2 * n : at + 3 * n]
    at += 3 * n

    def visibility() -> tuple[Ints, Ints]:
        """Arrival and hidden_from of the same rows, which few ask for."""
        arrival, hidden = np.empty(len(event_ts), np.int64), np.full(len(event_ts), NEVER)
        archived = np.ones(len(event_ts), np.bool_)
        place = found[at + n : at + n + n_recent]
        archived[place] = False
        arrival[place] = found[at + n + most : at + n + most + n_recent]
        if n_recent < len(event_ts):
            oldest = np.full(n, _BEGINNING) if horizon < 0 else request_ts - horizon
            latest = np.full(n, NEVER - 1)
            window = Window(generation, distinct, user_of, request_ts, latest, ReadStats())
            read = window.read(found[at : at + n].copy(), oldest, ())
            arrival[archived], hidden[archived] = read.arrival, read.hidden_from
        return arrival, hidden

    events = Events.lazy(distinct, offsets, event_ts, visibility, columns)
    return done, SharedHistories(events, user_of, start, stop, bound, np.ones(n, np.bool_))


def _plan(few: Few, schema: EventSchema, recent: BlockTier, data: bytes, n_users: int) -> tuple[int, Ints] | None:
    """Bytes of a row of the tier's blocks, all of the kind of the first one in ``data``, and how the streams of ``few``
    are read of it; None where they cannot be."""
    at = n_users * _PAIR + _KEY
    head = int.from_bytes(data[at : at + 8], "little") if len(data) > at + 8 else 0
    if head not in few.live:
        few.live[head] = _new_plan(few, schema, recent, head)
    return few.live[head]


def _new_plan(few: Few, schema: EventSchema, recent: BlockTier, head: int) -> tuple[int, Ints] | None:
    tables = few.tables
    assert tables is not None
    streams = np.zeros((len(tables.row_bytes) - 1, 2), np.int64)
    if not head:
        # No block, and so no row.
        return 8, np.array([0, 8, *streams.ravel().tolist()], np.int64)
    written = recent.schema_of(head >> 32)
    if written is None or head >> 32 > schema.schema_id:
        return None
    layout = layout_of(written, 0)
    if layout.head != head:
        # Corrections, or another format.
        return None
    fields: Mapping[str, Any] = layout.dtype.fields or {}
    held, nulls = {c.id: c for c in written.columns}, fields.get("nulls", (None, 0))[1]
    for i, (_, column_id, _, dtype, elements, _, w, w_nulls) in enumerate(few.parts):
        name = "event_ts" if i == 0 else f"c{column_id}"
        if i and column_id not in held:
            streams[w] = SET, 0
            if w_nulls < 0:
                return None
            streams[w_nulls] = SET, 1
            continue
        kind, offset = fields[name][:2]
        if kind.base != dtype or kind.shape != ((elements,) if elements else ()):
            return None
        streams[w] = TAKE, offset
        if w_nulls >= 0:
            streams[w_nulls] = SET, 0
        if name in layout.nullable:
            if w_nulls < 0:
                return None
            streams[w_nulls] = TEST, 8 * nulls + layout.nullable.index(name)
    size = layout.dtype.itemsize
    return size, np.array([head, size, *streams.ravel().tolist()], np.int64)
