"""Reconstruction: the exact history that each request saw, from any generation not older than the one it pinned.

Worked example. A request of user 7 at T = 100 ms logged bound 5, a version of 3 archived events, and arrivals 4 and 5
inline. Today's generation holds arrivals 1 to 9 of user 7. The events with event_ts < 100, arrival <= 5 and
hidden_from > 5 are five; arrivals 4 and 5 are known from the log, so the sum over the five must be the version's
checksum plus the identities of those two. If arrivals 4 and 5 were not archived yet, the archive must give the three,
and the two are merged in from the log. Nothing is read from the recent tier.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.core import check
from thinrow.core.errors import InputError, ObjectNotFound, StoreError, VersionMismatch
from thinrow.core.ragged import offsets_of
from thinrow.core.units import EPOCH_BITS
from thinrow.core.users import Users, plain
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.hides import hide
from thinrow.history.archive.layout import StoredColumn
from thinrow.history.archive.lookup import Ints, distinct_users
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import Window, cut_windows, merge, read_everything
from thinrow.history.missing import COMPLETE, Missing, OnMissing, check_policy
from thinrow.history.recast import recast
from thinrow.history.requests import RequestBatch
from thinrow.jagged import Column, Events, SharedHistories
from thinrow.jagged.column import concat_columns
from thinrow.kernels import kernel
from thinrow.schema import ColumnSpec, EventSchema, Projection
from thinrow.schema.projection import PROJECTION
from thinrow.storage.meter import metering

_GENERATION = check.instance(Generation, "give one: store.pin()")
_BATCH = check.instance(RequestBatch, "give logged requests: store.snapshot(users, request_ts).requests")
_BEGINNING = np.iinfo(np.int64).min

#: (X,) number and identity digest of the events of each archive part; first and last time of these and of the inline
#: events that have been archived since (0, 0 where none); and how many the latter are.
_ArchivePart: TypeAlias = tuple[Ints, npt.NDArray[np.uint64], Ints, Ints, Ints]


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Attributes:
    histories: one example a request that is delivered, in the batch's order.
    stats: what it cost.
    status: (X,) int8, of every request of the batch: COMPLETE, STATUS_ERASED or STATUS_EXPIRED.
    kept: positions in the batch of the requests that are delivered, ascending; all of them unless some were skipped.
    """

    histories: SharedHistories
    stats: ReadStats
    status: npt.NDArray[np.int8]
    kept: Ints


def reconstruct(
    generation: Generation,
    batch: RequestBatch,
    projection: Projection | None = None,
    *,
    verify: bool = True,
    on_missing: OnMissing = "fail",
) -> Reconstruction:
    """Rebuild the histories of a batch of requests, one shared copy per user.

    Args:
        generation: any generation at or after the one that each request pinned.
        batch: (X,) requests as logged.
        projection: columns, newest n (exactly, or aligned), horizon; everything by default.
        verify: check every version against what the archive holds (always on but in measurements of its cost).
        on_missing: what becomes of a request that saw events which were erased or have expired since: "fail" raises,
            "skip" leaves it out, "shorten" delivers what is left.

    Raises:
        Erased, Expired: with "fail", a request saw events that are gone; Erased also where the generation was revoked.
        VersionMismatch: a history is not the one that its version describes (names the user).
        CorruptionError: stored bytes are damaged.
        StoreError: the histories take more memory than there is.
        InputError, SchemaError: the projection does not fit the schema, or the generation is older than the version.
    """
    _GENERATION(generation, "generation")
    _BATCH(batch, "batch")
    if projection is not None:
        PROJECTION(projection, "projection")
    check_policy(on_missing)
    stats = ReadStats()
    projection = projection or Projection()
    if verify:
        found = _few(generation, batch, projection, stats)
        if found is not None:
            return found
        stats = ReadStats()
    with metering(stats.io):
        try:
            return _reconstruct(generation, batch, projection, verify, stats, on_missing)
        except ObjectNotFound:
            # An erasure in another process removes what was open here.
            generation.require_live()
            raise
        except MemoryError as e:
            raise StoreError(
                f"the histories of {len(batch)} requests take more memory than there is; read fewer requests, columns "
                "or events (max_len) at a time"
            ) from e


def _reconstruct(
    generation: Generation,
    batch: RequestBatch,
    projection: Projection,
    verify: bool,
    stats: ReadStats,
    on_missing: OnMissing,
) -> Reconstruction:
    specs, columns = generation.columns_of(projection)
    if projection.horizon_ms is not None:
        oldest = batch.request_ts - projection.horizon_ms
    else:
        oldest = np.empty(len(batch), np.int64)
        oldest.fill(_BEGINNING)
    if projection.shortest is None:
        newest = projection.newest(oldest)
    else:
        newest = projection.drawn(batch.request_ts, np.ascontiguousarray(batch.versions["checksum"]))
    bound = np.ascontiguousarray(batch.versions["snapshot_arrival"])
    window = None
    if not len(batch.hides):
        window = Window.at_once(generation, batch.users, batch.request_ts, bound, oldest, newest, stats)
    users, user_of = distinct_users(batch.users) if window is None else (window.pieces.users, window.user_of)
    missing = Missing.of(generation, batch, users, user_of)
    logged, batch = batch, missing.batch
    if window is None or len(missing.graves):
        window = _window(generation, batch, users, user_of, stats)
    archived = _archived_since(generation, batch, window)
    gone = _prove(generation, batch, window, archived, missing, verify)
    if verify or len(missing.graves):
        stats.versions_verified += len(batch)
    if on_missing == "fail":
        missing.refuse(gone)
    status = missing.status(gone)
    kept = np.flatnonzero(status == COMPLETE) if on_missing == "skip" else np.arange(len(batch))
    if len(kept) < len(batch):
        rest = _reconstruct(generation, logged.take(kept), projection, verify, stats, "fail")
        return Reconstruction(rest.histories, stats, status, kept)
    if projection.align > 1:
        # The version says how many events are visible before any of them is read.
        newest = projection.newest(batch.versions["seq_len"] - gone + batch.inline.lengths)
    events = window.read(newest, oldest, columns, projection.codes)
    since = time.perf_counter()
    whole = window.all_visible()
    if len(archived) and not archived.all():
        events = _merge_inline(events, batch, user_of, ~archived, window, specs)
        # What one request saw as recent may not be what an earlier one of the same user saw.
        whole[:] = False
    histories, delivered = cut_windows(events, user_of, batch.request_ts, window.bound, oldest, newest, whole)
    stats.clock("merge", since)
    stats.events_delivered += delivered
    count_columns(generation, columns, stats, len(batch))
    return Reconstruction(histories, stats, status, kept)


def _few(
    generation: Generation, batch: RequestBatch, projection: Projection, stats: ReadStats
) -> Reconstruction | None:
    """A few requests whose archived events are read in one call; None where that cannot be.

    Of those that saw recent events each must be of another user, and none of these events archived by now.
    """
    n, p, inline = len(batch), projection, len(batch.inline)
    if p.align > 1 or p.codes or p.shortest is not None or len(batch.hides) or generation.tombstone_index.files:
        return None
    if inline and n > 1 and len(set(batch.users.tolist())) < n:
        return None
    specs, columns = generation.columns_of(p)
    found = generation.tables.few.read(
        generation, columns, batch.users, batch.request_ts, batch.versions, p.max_len, p.horizon_ms, inline > 0, stats
    )
    if found is None:
        return None
    if inline:
        since = time.perf_counter()
        joined = _joined(found, batch, batch.schema or generation.schema, specs, p)
        if joined is None:
            return None
        found, stats.events_delivered = joined
        stats.clock("merge", since)
    stats.versions_verified += n
    count_columns(generation, columns, stats, n)
    return Reconstruction(found, stats, np.zeros(n, np.int8), np.arange(n))


def count_read(generation: Generation, projection: Projection, stats: ReadStats, n: int) -> None:
    """Count a read of n requests that another process did, among those of the store's columns."""
    count_columns(generation, generation.columns_of(projection)[1], stats, n)


def count_columns(generation: Generation, columns: Sequence[StoredColumn], stats: ReadStats, n: int) -> None:
    """Count a read of n requests among those of the store's columns."""
    if generation.usage is not None:
        sizes = {c.id: stats.column_bytes.get(c.id, 0) for c in columns}
        generation.usage.add(sizes, n, stats.events_delivered)


def _window(generation: Generation, batch: RequestBatch, users: Users, user_of: Ints, stats: ReadStats) -> Window:
    bound = np.ascontiguousarray(batch.versions["snapshot_arrival"])
    owner = None
    if len(batch.hides):
        owner = user_of[np.repeat(np.arange(len(batch)), np.diff(batch.hide_offsets))]
    return Window(generation, users, user_of, batch.request_ts, bound, stats, hide_user=owner, hides=batch.hides)


def _archived_since(generation: Generation, batch: RequestBatch, window: Window) -> npt.NDArray[np.bool_]:
    """Which inline events the generation holds.

    It holds all numbers up to its watermark but those that a recent tier gave out and lost. Only a watermark of a later
    epoch raises that question, and then the keys are read.
    """
    arrival = batch.inline.arrival
    if not len(arrival):
        return np.empty(0, np.bool_)
    owner = np.repeat(window.user_of, batch.inline.lengths)
    watermark = window.pieces.watermark[owner]
    archived = arrival <= watermark
    doubtful = np.flatnonzero(archived & (arrival >> EPOCH_BITS < watermark >> EPOCH_BITS))
    if len(doubtful):
        asked, row = np.unique(owner[doubtful], return_inverse=True)
        held = read_everything(generation, window.pieces.users[asked], [], ReadStats())
        archived[doubtful] = np.isin(
            _keyed(row, arrival[doubtful]), _keyed(np.repeat(np.arange(len(asked)), held.lengths), held.arrival)
        )
    return archived


def _keyed(user: Ints, arrival: Ints) -> npt.NDArray[np.void]:
    keys = np.empty(len(user), np.dtype([("user", np.int64), ("arrival", np.int64)]))
    keys["user"], keys["arrival"] = user, arrival
    return keys


def _prove(
    generation: Generation,
    batch: RequestBatch,
    window: Window,
    archived: npt.NDArray[np.bool_],
    missing: Missing,
    verify: bool,
) -> Ints:
    """Refuse a generation that does not hold yet what a request saw in the archive, and hold count, identity digest and
    bounds of every example against its version and its archived inline events.

    Returns (X,) how many events of its archive part are gone, by its user's tombstones.
    """
    watermark = window.pieces.watermark
    if not verify and not len(missing.graves):
        _require_all(generation, batch, window, batch.versions["last_arrival"] > watermark[window.user_of])
        return np.zeros(len(batch), np.int64)
    found = window.summarize()
    if not len(archived) or not archived.any():
        behind, wrong = kernel("compare_versions")(batch.versions, window.user_of, watermark, *found)
        if behind < 0 and wrong < 0:
            return np.zeros(len(batch), np.int64)
    _require_all(generation, batch, window, batch.versions["last_arrival"] > watermark[window.user_of])
    return _verify(generation, batch, _archive_part(batch, found, archived), missing)


def _require_all(generation: Generation, batch: RequestBatch, window: Window, behind: npt.NDArray[np.bool_]) -> None:
    if behind.any():
        i = int(np.flatnonzero(behind)[0])
        raise InputError(
            f"request {i} of user {plain(batch.users[i])!r} pinned arrivals up to {batch.versions['last_arrival'][i]}, "
            f"but generation {generation.number} holds them only up to {window.pieces.watermark[window.user_of[i]]}; "
            "reconstruct from a later generation"
        )


def _verify(generation: Generation, batch: RequestBatch, part: _ArchivePart, missing: Missing) -> Ints:
    versions = batch.versions
    count, checksum, start, end, known = part
    wrong = (count != versions["seq_len"]) | (checksum != versions["checksum"])
    alone = known == 0
    wrong |= alone & ((start != versions["start_ts"]) | (end != versions["end_ts"]))
    gone: Ints = versions["seq_len"] - count
    if len(missing.graves):
        inside = ~alone | (count == 0) | ((start >= versions["start_ts"]) & (end <= versions["end_ts"]))
        wrong &= ~((gone > 0) & (gone <= missing.allowed()) & inside)
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise VersionMismatch(
            f"request {i} at {batch.request_ts[i]} ms saw {versions['seq_len'][i]} archived events and {known[i]} "
            f"since archived, but generation {generation.number} rebuilds {count[i] + known[i]}"
            f"{'' if gone[i] else ' others'}",
            file=f"manifests/{generation.number:020d}.json",
            user=plain(batch.users[i]),
        )
    return gone


def _archive_part(
    batch: RequestBatch, found: tuple[Ints, npt.NDArray[np.uint64], Ints, Ints], archived: npt.NDArray[np.bool_]
) -> _ArchivePart:
    """Of what ``Window.summarize`` found; what came inline and has been archived since is no part of it."""
    count, digest, start, end = found
    inline = batch.inline
    mix = np.where(archived, kernel("identity_mix")(inline.event_ts, inline.arrival), np.uint64(0))
    sums = np.concatenate([[np.uint64(0)], np.cumsum(mix, dtype=np.uint64)])
    counts = offsets_of(archived)
    known = counts[inline.offsets[1:]] - counts[inline.offsets[:-1]]
    return count - known, digest - (sums[inline.offsets[1:]] - sums[inline.offsets[:-1]]), start, end, known


def survivors(generation: Generation, batch: RequestBatch) -> tuple[Ints, npt.NDArray[np.uint64], Ints, Ints]:
    """(X,) how many events of each archive part are gone, and ``checksum``, ``start_ts``, ``end_ts`` of what is left.

    Raises as ``reconstruct`` on a request that is not what its version describes.
    """
    users, user_of = distinct_users(batch.users)
    missing = Missing.of(generation, batch, users, user_of)
    batch = missing.batch
    window = _window(generation, batch, users, user_of, ReadStats())
    archived = _archived_since(generation, batch, window)
    _require_all(generation, batch, window, batch.versions["last_arrival"] > window.pieces.watermark[user_of])
    part = _archive_part(batch, window.summarize(), archived)
    gone = _verify(generation, batch, part, missing)
    _, checksum, start, end, _ = part
    return gone, checksum, start, end


def _joined(
    found: SharedHistories,
    batch: RequestBatch,
    schema: EventSchema,
    specs: Sequence[ColumnSpec],
    projection: Projection,
) -> tuple[SharedHistories, int] | None:
    """Recent events behind the archived ones, each request of another user, and how many events all see; None where
    that is not their order, or a request does not see one of them."""
    inline, old, n = batch.inline, found.events, len(batch)
    ts, arrival = inline.event_ts, inline.arrival
    # What is archived has numbers up to ``last_arrival``, so that of two at one time the archived one comes first.
    above = np.ascontiguousarray(batch.versions["last_arrival"])
    # Copies, because memory that is not ours may be of a kind that the kernel was not compiled for.
    keys = ts.copy(), arrival.copy(), inline.offsets.copy()
    if not kernel("follows")(*keys, batch.request_ts.copy(), found.bound.copy(), above):
        return None
    request = np.argsort(found.user_of) if n > 1 else found.user_of
    bounds = list(
        zip(
            old.offsets[:-1].tolist(),
            old.offsets[1:].tolist(),
            inline.offsets[request].tolist(),
            inline.offsets[request + 1].tolist(),
            strict=True,
        )
    )
    if any(a < b and c < d and old.event_ts[b - 1] > ts[c] for a, b, c, d in bounds):
        return None

    def join(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if n == 1:
            return np.concatenate((x, y))
        return np.concatenate([part for a, b, c, d in bounds for part in (x[a:b], y[c:d])])

    def joined_column(x: Column, y: Column) -> Column:
        valid = None
        if x.valid is not None or y.valid is not None:
            valid = join(*(np.ones(len(c), np.bool_) if c.valid is None else c.valid for c in (x, y)))
        return Column(join(x.values, y.values), valid)

    fresh = recast(inline.columns, schema, specs, len(ts))
    offsets = old.offsets + (inline.offsets if n == 1 else offsets_of([d - c for _, _, c, d in bounds]))
    columns = {name: joined_column(old.columns[name], column) for name, column in fresh.items()}
    events = Events.lazy(
        old.users,
        offsets,
        join(old.event_ts, ts),
        lambda: (join(old.arrival, arrival), join(old.hidden_from, inline.hidden_from)),
        columns,
    )
    horizon, newest = (
        projection.horizon_ms,
        projection.newest(batch.request_ts),
    )
    oldest = np.full(n, _BEGINNING) if horizon is None else batch.request_ts - horizon
    return cut_windows(events, found.user_of, batch.request_ts, found.bound, oldest, newest, np.ones(n, np.bool_))


def _merge_inline(
    events: Events,
    batch: RequestBatch,
    user_of: Ints,
    wanted: npt.NDArray[np.bool_],
    window: Window,
    columns: Sequence[ColumnSpec],
) -> Events:
    """Add the inline events that the archive does not hold, each once per user."""
    inline = batch.inline
    owner = np.repeat(user_of, inline.lengths)
    rows = np.flatnonzero(wanted)
    rows = rows[np.lexsort((inline.arrival[rows], inline.event_ts[rows], owner[rows]))]
    first = np.ones(len(rows), np.bool_)
    first[1:] = (owner[rows][1:] != owner[rows][:-1]) | (inline.arrival[rows][1:] != inline.arrival[rows][:-1])
    rows = rows[first]
    n_users, base = len(events.users), len(events)
    # What a tier lost was seen under that tier's numbers only, which end where the next epoch begins.
    arrival = inline.arrival[rows]
    lost = arrival <= window.pieces.watermark[owner[rows]]
    hidden = np.where(lost, ((arrival >> EPOCH_BITS) + 1) << EPOCH_BITS, inline.hidden_from[rows])
    fresh = recast(inline.columns, batch.schema or window.generation.schema, columns, len(inline), rows)
    extra_off = base + np.searchsorted(owner[rows], np.arange(n_users + 1)).astype(np.int64)
    joined = Events(
        events.users,
        events.offsets,
        np.concatenate([events.event_ts, inline.event_ts[rows]]),
        np.concatenate([events.arrival, inline.arrival[rows]]),
        np.concatenate([events.hidden_from, hidden]),
        {n: concat_columns([events.columns[n], c]) for n, c in fresh.items()},
    )
    starts = np.stack([events.offsets[:-1], extra_off[:-1]], axis=1).ravel()
    stops = np.stack([events.offsets[1:], extra_off[1:]], axis=1).ravel()
    merged = merge(joined, np.arange(0, 2 * n_users + 1, 2), starts, stops)
    return hide(merged, window.pieces.hides, window.pieces.hide_off)
