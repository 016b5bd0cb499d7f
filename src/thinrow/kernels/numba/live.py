"""A whole read of what some users did until now, archived and recent, in one call.

Worked example: user 7's newest 200. The tier holds 64 rows of the user in one block, all later than what is archived:
so 136 archived rows are decoded, and each field of the 64 is put behind them. Of a row that came late, at a time before
the last archived event, nobody knows yet where it belongs: 200 archived rows are decoded, and those behind its place
make room for it.

What hidden events, corrections, several segments a user or several schemas would need, and whatever is wrong, is not
done here: the call says so, and the long way does it or says what it is.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

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
    N_STREAMS,
    ROW_BYTES,
    TAKE,
    TEST,
    USED,
    FewTables,
)
from thinrow.kernels.numba.batch import DONE, OUT, PIECE, START, STOP, UNDONE, ints_at, read_rows, seen_by
from thinrow.kernels.numba.few import CUT_BEFORE, CUT_LAST_TS, CUT_TAIL, ranges_of_users, slices_of_requests
from thinrow.kernels.numba.intrinsics import load64, pointer
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.recent import HEADER, PAIR, RESIDUE, SEAL, big64, crc32_of, open_pair
from thinrow.kernels.numba.scalar import lower_bound

Array: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_NEVER = np.int64((1 << 63) - 1)
_SIGN = np.uint64(1 << 63)
#: Beyond ``batch``: the tier has dropped what the archive does not hold.
BEHIND = 4
#: Bytes of a key: user and first arrival. A user's recent rows are put in order one by one, so many at most.
_KEY, _MOST = 16, 4_096


@njit
def _recent_rows(
    data: Bytes,
    plan: Ints,
    asked: Ints,
    request_ts: Ints,
    user_of: Ints,
    watermark: Ints,
    at: Ints,
    ts: Ints,
    number: Ints,
    offsets: Ints,
    bound: Ints,
) -> Any:
    """Rows of the tier that requests see, those of each in order of (event_ts, arrival).

    Args:
        data: as of ``read_live``; the last 8 bytes are nobody's.
        watermark: (U,) arrivals up to here are archived.
        at, ts, number: get the place, time and arrival of each row.
        offsets: (X + 1,) gets the rows of each request.
        bound: (X,) gets the highest arrival that it could see.
    """
    n, head, row_bytes = len(asked), np.uint64(plan[LIVE_HEAD]), plan[LIVE_ROW_BYTES]
    place, last, count = np.int64(PAIR * n), np.int64(len(data) - 8), np.int64(0)
    if place > last:
        return UNDONE
    for x in range(n):
        counter, trimmed, sound = open_pair(data, PAIR * x)
        known = counter != -1 or trimmed != -1
        top = watermark[user_of[x]]
        above = top
        if known and not sound:
            return UNDONE
        if known and trimmed > above:
            return BEHIND
        offsets[x] = count
        key = np.uint64(asked[x]) ^ _SIGN
        while last - place >= _KEY + HEADER + SEAL and big64(data, place) == key:
            value = place + _KEY
            sizes, first = load64(data, value + 8), np.int64(load64(data, value + 16))
            held, heap = np.int64(sizes & np.uint64(0xFFFFFFFF)), np.int64(sizes >> np.uint64(32))
            rows = value + HEADER
            stop = rows + held * row_bytes + heap + SEAL
            if stop > last or load64(data, value) != head or crc32_of(data, place, stop, np.uint32(0)) != RESIDUE:
                return UNDONE
            for i in range(max(above + 1 - first, 0), held):
                t = np.int64(load64(data, rows + i * row_bytes))
                top = max(top, first + i)
                if t >= request_ts[x]:
                    continue
                k = count
                while k > offsets[x] and ts[k - 1] > t:
                    at[k], ts[k], number[k] = at[k - 1], ts[k - 1], number[k - 1]
                    k -= 1
                at[k], ts[k], number[k] = rows + i * row_bytes, t, first + i
                count += 1
                if count - offsets[x] > _MOST:
                    return UNDONE
            place = stop
        bound[x] = top
    offsets[n] = count
    return DONE if place == last else UNDONE


@njit
def _make_room(out: Bytes, begin: Any, size: Any, rows: Ints, first: Any, last: Any, base: Any, archived: Any) -> None:
    """Move archived rows of one user, ``archived`` from row ``base`` on, behind the recent ones before them, which go
    to the rows ``rows[first:last]``; of a stream that begins at ``begin``, ``size`` bytes a row."""
    end = archived
    for j in range(last - 1, first - 1, -1):
        by = j - first + 1
        low = rows[j] - base - (by - 1)
        source = begin + (base + low) * size
        for i in range((end - low) * size - 1, -1, -1):
            out[source + by * size + i] = out[source + i]
        end = low


@njit
def _put_stream(data: Bytes, at: Ints, what: Any, number: Any, address: Any, size: Any, rows: Ints, total: Any) -> None:
    """One stream of recent rows ``at`` these places of ``data`` to ``rows`` of the stream at ``address``."""
    n = len(at)
    if what != TAKE:
        flags = carray(pointer(address), (total * size,), np.uint8)
        for j in range(n):
            bit = np.uint8(number)
            if what == TEST:
                bit = (data[at[j] + (number >> 3)] >> np.uint8(number & 7)) & np.uint8(1)
            for k in range(size):
                flags[rows[j] * size + k] = bit
    elif size == 8:
        words = carray(pointer(address), (total,), np.uint64)
        for j in range(n):
            words[rows[j]] = load64(data, at[j] + number)
    elif size == 4:
        halves = carray(pointer(address), (total,), np.uint32)
        for j in range(n):
            halves[rows[j]] = np.uint32(load64(data, at[j] + number))
    else:
        single = carray(pointer(address), (total * size,), np.uint8)
        for j in range(n):
            for k in range(size):
                single[rows[j] * size + k] = data[at[j] + number + k]


@njit
def _put_streams(
    state: Ints,
    data: Bytes,
    plan: Ints,
    at: Ints,
    place: Ints,
    offsets: Ints,
    order: Ints,
    rows: Ints,
    archived: Ints,
    out: Bytes,
    capacity: int,
) -> None:
    """All streams of the recent rows ``at`` to their ``place``; archived rows make room."""
    n, n_streams = len(order), state[N_STREAMS]
    row_bytes = ints_at(state, ROW_BYTES, n_streams + 1)
    for w in range(n_streams):
        size, begin = row_bytes[w + 1] - row_bytes[w], capacity * row_bytes[w]
        for u in range(n):
            first, last = offsets[order[u]], offsets[order[u] + 1]
            if first < last and place[first] < rows[u] + archived[u]:
                _make_room(out, begin, size, place, first, last, rows[u], archived[u])
        what, argument = plan[LIVE_STREAMS + 2 * w], plan[LIVE_STREAMS + 2 * w + 1]
        _put_stream(data, at[: offsets[n]], what, argument, out.ctypes.data + begin, size, place, rows[n])


@njit
def _live(
    state: Ints,
    data: Bytes,
    plan: Ints,
    asked: Ints,
    request_ts: Ints,
    max_len: int,
    horizon: int,
    out: Bytes,
    capacity: int,
    found: Ints,
) -> int:
    n, n_streams = len(asked), state[N_STREAMS]
    base = USED + n_streams + 1
    users, user_of, rows = found[base : base + n], found[base + n : base + 2 * n], found[base + 2 * n :][: n + 1]
    base += 3 * n + 1
    start, stop = found[base : base + n], found[base + n : base + 2 * n]
    bound, newest = found[base + 2 * n : base + 3 * n], found[base + 3 * n : base + 4 * n]
    base += 4 * n
    most = (len(found) - base) // 2
    by_user = np.empty((4, n + 1), np.int64)
    # Nothing that is archived came later than now.
    for x in range(n):
        bound[x] = _NEVER - 1
    done, records, by_piece, runs, n_users, n_mixed, requests, order, rows_to, cut, _, key_ts, scratch, room = seen_by(
        state, asked, request_ts, bound, found, users, user_of, by_user
    )
    if done != DONE:
        return int(done)
    if n_users != n:
        return UNDONE
    at, ts, offsets = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(n + 1, np.int64)
    place, number = found[base : base + most], found[base + most : base + 2 * most]
    done = _recent_rows(data, plan, asked, request_ts, user_of, by_user[3], at, ts, number, offsets, bound)
    if done != DONE:
        return int(done)
    oldest = np.empty(n, np.int64)
    for x in range(n):
        oldest[x] = request_ts[x] - horizon if horizon >= 0 else np.iinfo(np.int64).min
        fresh = offsets[x + 1] - offsets[x]
        late = fresh > 0 and cut[CUT_BEFORE, x] + cut[CUT_TAIL, x] > 0 and ts[offsets[x]] < cut[CUT_LAST_TS, x]
        newest[x] = max_len if late else max(max_len - fresh, 0)
    n_read = ranges_of_users(
        records, runs, by_user[1, : n_users + 1], requests, order, rows_to, cut, oldest, newest,
        by_piece[PIECE], by_piece[START], by_piece[STOP], by_piece[OUT], rows, stop,
    )  # fmt: skip
    # Archived rows of each user leave room for the recent ones behind them.
    shift, i, archived = np.int64(0), 0, np.empty(n, np.int64)
    for u in range(n):
        x, end, begin = order[u], rows[u + 1], rows[u]
        while i < n_read and by_piece[OUT, i] < end:
            by_piece[OUT, i] += shift
            i += 1
        archived[u], rows[u] = end - begin, begin + shift
        shift += offsets[x + 1] - offsets[x]
    rows[n] += shift
    total = rows[n]
    if total > capacity:
        return UNDONE
    by_piece[OUT, n_read] = total
    used = found[USED : USED + n_streams + 1]
    times = read_rows(state, records, by_piece, n_read, total, key_ts, out, capacity, used, scratch, room)
    if times == 0:
        return UNDONE
    event_ts = carray(pointer(times), (total,), np.int64)
    _place_recent(event_ts, ts, offsets, order, rows, archived, place)
    _put_streams(state, data, plan, at, place, offsets, order, rows, archived, out, capacity)
    for x in range(n):
        stop[x] = rows[user_of[x] + 1]
    found[FOUND_DELIVERED] = slices_of_requests(user_of, rows, event_ts, oldest, max_len, start, stop)
    found[FOUND_USERS], found[FOUND_ROWS], found[FOUND_RECENT] = n, total, offsets[n]
    found[FOUND_PIECES], found[FOUND_MIXED] = len(records), n_mixed
    return DONE


@njit
def _place_recent(
    event_ts: Ints, ts: Ints, offsets: Ints, order: Ints, rows: Ints, archived: Ints, place: Ints
) -> None:
    """Where each recent row goes: behind archived ones up to its time, whose numbers are lower."""
    for u in range(len(order)):
        first, base = offsets[order[u]], rows[u]
        before = archived[u]
        if first < offsets[order[u] + 1] and before > 0 and event_ts[base + before - 1] > ts[first]:
            before = 0
        for j in range(first, offsets[order[u] + 1]):
            if before < archived[u]:
                before = lower_bound(event_ts, base + before, base + archived[u], ts[j] + 1) - base
            place[j] = base + before + j - first


def read_live(
    tables: FewTables,
    data: Bytes,
    plan: Ints,
    users: Ints,
    request_ts: Ints,
    max_len: int,
    horizon: int,
    out: Bytes,
    capacity: int,
    found: Ints,
) -> int:
    """The newest events of X distinct users until now, archived ones and those of a recent tier, verified and decoded.

    Args:
        tables: of what is read.
        data: what the tier holds, as ``BlockTier.held`` gives it: the pair (counter, trimmed) of each user, 20 bytes of
            0xFF where nobody knows it; key, value, key, value, ... of all blocks, in order of ``users``; 8 bytes.
        plan: (LIVE_STREAMS + 2 * W,) int64, how rows of the blocks are read.
        users, request_ts: (X,) int64; an event is seen that is before this time.
        max_len, horizon: the newest so many, and ms back from the request, -1 for all time.
        out: (capacity * row_bytes[W],) uint8; stream w begins at ``capacity * row_bytes[w]``.
        capacity: rows that there is room for, a multiple of 8.
        found: (USED + W + 1 + 7 * X + 1 + 2 * R,) int64, 0 at first, R as many as there can be recent rows: gets the
            fields up to ``USED``, bytes by stream and of chunks; then as ``read_few`` has them the users ascending,
            user of each request, offsets, start, stop and bound; how many archived events each request needed; and of
            each recent row where it went, and in the second half its arrival.

    Returns:
        as ``read_few``; or ``BEHIND`` where the tier has dropped events of a user that are not archived here.
    """
    done: int = _live(tables.state, data, plan, users, request_ts, max_len, horizon, out, capacity, found)
    return done
