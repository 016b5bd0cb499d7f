"""A whole read of what some users did until now, step by step."""

from __future__ import annotations

import itertools
import zlib
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.core.stripes import (
    FOUND_DELIVERED,
    FOUND_MIXED,
    FOUND_PIECES,
    FOUND_RECENT,
    FOUND_ROWS,
    FOUND_USERS,
    LIVE_HEAD,
    LIVE_ROW_BYTES,
    LIVE_STREAMS,
    SET,
    TAKE,
    USED,
    FewTables,
)
from thinrow.kernels.reference.batch import DONE, UNDONE, plan_few, read_planned
from thinrow.kernels.reference.history import identity_mix

Array: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[np.int64]
#: Of a user: (event_ts, arrival, place in the data) of rows, ascending.
Rows: TypeAlias = list[tuple[int, int, int]]

BEHIND = 4
_NEVER = (1 << 63) - 1
_PAIR, _KEY, _HEADER, _SEAL, _MOST = 20, 16, 24, 4, 4_096


def _recent_rows(
    data: bytes, plan: Ints, users: list[int], request_ts: list[int], watermark: list[int]
) -> tuple[int, list[Rows], list[int]]:
    """How it ended, the rows that each request sees, and the highest arrival that it could see."""
    place, last, rows, bound = _PAIR * len(users), len(data) - 8, [], []
    head, row_bytes = int(plan[LIVE_HEAD]), int(plan[LIVE_ROW_BYTES])
    for x, user in enumerate(users):
        pair, above = data[_PAIR * x : _PAIR * x + _PAIR], watermark[x]
        counter, trimmed = np.frombuffer(pair[:16], "<i8")
        if pair[:16] != b"\xff" * 16:
            check = int(identity_mix(np.array([counter]), np.array([trimmed]))[0]) & 0xFFFFFFFF
            if check != int.from_bytes(pair[16:], "little"):
                return UNDONE, [], []
            if trimmed > above:
                return BEHIND, [], []
        mine, top, key = [], above, (user + (1 << 63)).to_bytes(8, "big")
        while last - place >= _KEY + _HEADER + _SEAL and data[place : place + 8] == key:
            value = place + _KEY
            n, heap = np.frombuffer(data[value + 8 : value + 16], "<u4").tolist()
            first = int.from_bytes(data[value + 16 : value + 24], "little", signed=True)
            stop = value + _HEADER + n * row_bytes + heap + _SEAL
            sealed = data[place : stop - _SEAL]
            if stop > last or int.from_bytes(data[value : value + 8], "little") != head:
                return UNDONE, [], []
            if zlib.crc32(sealed).to_bytes(_SEAL, "little") != data[stop - _SEAL : stop]:
                return UNDONE, [], []
            for i in range(max(above + 1 - first, 0), n):
                at = value + _HEADER + i * row_bytes
                top, t = max(top, first + i), int.from_bytes(data[at : at + 8], "little", signed=True)
                if t < request_ts[x]:
                    mine.append((t, first + i, at))
            place = stop
        if len(mine) > _MOST:
            return UNDONE, [], []
        rows.append(sorted(mine))
        bound.append(top)
    return (DONE if place == last else UNDONE), rows, bound


def read_live(
    tables: FewTables,
    data: Array,
    plan: Ints,
    users: Ints,
    request_ts: Ints,
    max_len: int,
    horizon: int,
    out: Array,
    capacity: int,
    found: Ints,
) -> int:
    """As ``thinrow.kernels.numba.live.read_live``."""
    n, at = len(users), USED + len(tables.columns.kind) + 1
    bounds = np.cumsum([at, n, n, n + 1, n, n, n, n]).tolist()
    distinct, user_of, rows, start, stop, bound, newest = (found[a:b] for a, b in itertools.pairwise(bounds))
    oldest = request_ts - horizon if horizon >= 0 else np.full(n, np.iinfo(np.int64).min)
    everything, newest[:] = np.full(n, _NEVER - 1), max_len
    done, few = plan_few(tables, users, request_ts, everything, oldest, newest, found, distinct, user_of)
    if done != DONE or few.n_users != n:
        return done or UNDONE
    raw, watermark = data.tobytes(), few.by_user[3][user_of].tolist()
    done, recent, bound[:] = _padded(*_recent_rows(raw, plan, users.tolist(), request_ts.tolist(), watermark), n)
    if done != DONE:
        return done
    for x, mine in enumerate(recent):
        late = bool(mine) and few.seen[0][x] > 0 and mine[0][0] < few.seen[3][x]
        newest[x] = max_len if late else max(max_len - len(mine), 0)
    done, few = plan_few(tables, users, request_ts, everything, oldest, newest, found, distinct, user_of)
    order, archived = np.argsort(user_of), np.diff(few.by_user[2])
    added = np.array([len(recent[x]) for x in order])
    rows[:] = np.concatenate([[0], np.cumsum(archived + added)])
    if rows[n] > capacity:
        return UNDONE
    place = few.by_piece[5, : few.n_read]
    behind = np.searchsorted(few.by_user[2][1:], place, side="right")
    streams = read_planned(
        tables, few, place + (np.cumsum(added) - added)[behind] if n else place, int(rows[n]), out, capacity, found
    )
    if streams is None:
        return UNDONE
    n_recent = int(added.sum())
    most = (len(found) - bounds[-1]) // 2
    into, number = found[bounds[-1] :][:most], found[bounds[-1] + most :][:most]
    _merge(tables, raw, plan, recent, order, rows, archived, streams, into, number)
    times = streams[tables.times]
    for x in range(n):
        begin, stop[x] = rows[user_of[x]], rows[user_of[x] + 1]
        begin += np.searchsorted(times[begin : stop[x]], oldest[x])
        start[x] = max(begin, stop[x] - max_len)
    found[FOUND_DELIVERED] = (stop - start).sum()
    found[FOUND_USERS], found[FOUND_ROWS], found[FOUND_RECENT] = n, rows[n], n_recent
    found[FOUND_PIECES], found[FOUND_MIXED] = len(few.records), few.n_mixed
    return DONE


def _padded(done: int, rows: list[Rows], bound: list[int], n: int) -> tuple[int, list[Rows], list[int]]:
    return done, rows, bound if done == DONE else [0] * n


def _merge(
    tables: FewTables,
    data: bytes,
    plan: Ints,
    recent: list[Rows],
    order: Ints,
    rows: Ints,
    archived: Ints,
    streams: list[Array],
    into: Ints,
    number: Ints,
) -> None:
    """Put recent rows among the archived ones of each user; where they went, and their arrivals, by request."""
    first = np.concatenate([[0], np.cumsum([len(mine) for mine in recent])])
    for u, x in enumerate(order):
        mine, base, n = recent[x], int(rows[u]), int(archived[u])
        old = streams[tables.times][base : base + n].copy()
        times = np.array([t for t, _, _ in mine], np.int64)
        # Of two at one time the archived one has the lower number.
        spot = np.searchsorted(old, times, side="right") + np.arange(len(mine))
        rest = np.setdiff1d(np.arange(n + len(mine)), spot)
        into[first[x] : first[x + 1]] = base + spot
        number[first[x] : first[x + 1]] = [arrival for _, arrival, _ in mine]
        for w, stream in enumerate(streams):
            per_row = int(tables.columns.per_row[w])
            block = stream[base * per_row : (base + n + len(mine)) * per_row].reshape(-1, per_row)
            what, argument = plan[LIVE_STREAMS + 2 * w : LIVE_STREAMS + 2 * w + 2].tolist()
            block[rest] = block[:n].copy()
            for k, (_, _, at) in zip(spot, mine, strict=True):
                if what == SET:
                    block[k] = argument
                elif what == TAKE:
                    size = per_row * stream.itemsize
                    block[k] = np.frombuffer(data[at + argument : at + argument + size], stream.dtype)
                else:
                    block[k] = data[at + argument // 8] >> argument % 8 & 1
