"""What a few requests see, group after group of stripes: keys of cut pieces are decoded, and summed up while they are
in the nearest caches.

For requests that see every archived event before their time, in one segment a user: nearly all. Of others, and of
whatever is wrong, each step here says that it is not done, and the long way (``plan``) does it or says what it is.
Worked example: user 7 has pieces of 512, 512 and 300 rows, a request cuts the third at row 40. ``cut_users`` sums up
the entries of the first two and asks for the keys of the third; ``prove`` finds row 40 by time, adds the digest of the
rows before it and compares; ``ranges_of_users`` takes the newest 256: rows 296 to 512 of the second, 0 to 40 of the
third.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from thinrow.kernels.numba.intrinsics import pointer
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.plan import digest_before, first_not_before, sum_of_mixes
from thinrow.kernels.numba.scalar import lower_bound
from thinrow.kernels.numba.stripes import (
    FROM,
    TO,
    TOGETHER,
    bare,
    come_to,
    decode_stream,
    find_runs,
    first_run_after,
)

Array: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[np.int64]

_NEVER = np.int64((1 << 63) - 1)
#: Rows that the stripes of a group have at most, or else the long way reads them.
_GROUP_ROWS = TOGETHER * 512
#: Rows whose digest is kept, where several requests cut a piece: 1 << 6.
_BLOCK_BITS = 6
#: Of a request: first piece that does not end before it; the place of its keys among cut pieces or -1; events before
#: that piece and, of these, the first and last time; events before it in that piece.
_CUT, _SLOT, CUT_BEFORE, _FIRST_TS, CUT_LAST_TS, CUT_TAIL, CUT_FIELDS = range(7)


@njit
def by_user_of(user_of: Ints, n_users: int) -> tuple[Ints, Ints]:
    """Requests in order of their users: (U + 1,) offsets, (X,) numbers of the requests."""
    offsets, order = np.zeros(n_users + 1, np.int64), np.empty(len(user_of), np.int64)
    for u in user_of:
        offsets[u + 1] += 1
    for u in range(n_users):
        offsets[u + 1] += offsets[u]
    place = offsets[:n_users].copy()
    for x in range(len(user_of)):
        order[place[user_of[x]]] = x
        place[user_of[x]] += 1
    return offsets, order


@njit
def cut_users(
    records: Array,
    run_off: Ints,
    run_of_user: Ints,
    asked: Ints,
    order: Ints,
    request_ts: Ints,
    bound: Ints,
    rows_to: Ints,
    key_off: Ints,
    mixed: Ints,
    latest: Ints,
    out_pos: Ints,
    mixed_off: Ints,
    cut: Ints,
    digest: Array,
) -> Any:
    """Which piece each request cuts, and what it sees before that.

    Args:
        asked, order: as of ``by_user_of``; the others as ``plan`` has them.
        rows_to: (P,) gets the rows of a run up to and with each piece that ends before the last request.
        key_off, mixed, latest, out_pos: as of ``plan.mark_mixed``.
        mixed_off: (U + 1,) gets cut pieces of each user as offsets.
        cut: (CUT_FIELDS, X) gets all but ``CUT_TAIL``, which becomes 0.
        digest: (X,) gets the identity digest of the events before the cut piece.

    Returns:
        how many cut pieces there are; -1 where the long way is to be gone.
    """
    n, rows, n_pieces = np.int64(0), np.int64(0), len(records)
    digest_to, top_to, least_to = np.empty(n_pieces, np.uint64), np.empty(n_pieces, np.int64), np.empty_like(rows_to)
    out_pos[0], mixed_off[0] = 0, 0
    for u in range(len(run_of_user) - 1):
        r = run_of_user[u]
        if run_of_user[u + 1] - r > 1:
            return -1
        begin, stop = run_off[r], run_off[run_of_user[u + 1]]
        last = np.iinfo(np.int64).min
        for k in range(asked[u], asked[u + 1]):
            last = max(last, request_ts[order[k]])
        end = _add_up(records, begin, stop, last, rows_to, digest_to, top_to, least_to, key_off)
        for k in range(asked[u], asked[u + 1]):
            x = order[k]
            t, b, at = request_ts[x], bound[x], first_not_before(records, begin, end, request_ts[x])
            cut[_CUT, x], cut[_SLOT, x], cut[CUT_TAIL, x] = at, -1, 0
            if at > begin:
                if top_to[at - 1] > b or least_to[at - 1] <= b:
                    return -1
                cut[CUT_BEFORE, x], digest[x] = rows_to[at - 1], digest_to[at - 1]
                cut[_FIRST_TS, x], cut[CUT_LAST_TS, x] = records[begin].first_ts, records[at - 1].last_ts
            else:
                cut[CUT_BEFORE, x], cut[_FIRST_TS, x], cut[CUT_LAST_TS, x], digest[x] = 0, _NEVER, -1, 0
            if at < stop and np.int64(records[at].first_ts) < t:
                if np.int64(records[at].min_hidden_from) != _NEVER:
                    return -1
                # Its place among cut pieces is known when all of these are.
                cut[_SLOT, x], key_off[at] = 0, 0
        for p in range(begin, min(end + 1, stop)):
            if key_off[p] == 0:
                key_off[p], mixed[n], latest[n] = rows, p, last
                rows += np.int64(records[p].n_rows)
                n += 1
                out_pos[n] = rows
        mixed_off[u + 1] = n
        for k in range(asked[u], asked[u + 1]):
            x = order[k]
            if cut[_SLOT, x] == 0:
                cut[_SLOT, x] = lower_bound(mixed, mixed_off[u], n, cut[_CUT, x])
    return n


@njit
def _add_up(
    records: Array,
    begin: int,
    stop: int,
    before: int,
    rows_to: Ints,
    digest_to: Array,
    top_to: Ints,
    least_to: Ints,
    key_off: Ints,
) -> Any:
    """Rows, digest, highest arrival and lowest hidden_from up to and with each of the pieces ``[begin, stop)`` that
    ends before a time. Returns where these end."""
    rows, digest = np.int64(0), np.uint64(0)
    top: Any = np.iinfo(np.int64).min
    least: Any = _NEVER
    end = begin
    for p in range(begin, stop):
        key_off[p] = -1
        if end == p and np.int64(records[p].last_ts) < before:
            rows += np.int64(records[p].n_rows)
            digest += np.uint64(records[p].digest)
            top, least = max(top, np.int64(records[p].max_arrival)), min(least, np.int64(records[p].min_hidden_from))
            rows_to[p], digest_to[p], top_to[p], least_to[p] = rows, digest, top, least
            end = p + 1
    return end


@njit
def prove(
    segments: Ints,
    streams: Ints,
    kind: Ints,
    per_row: Ints,
    records: Array,
    segment: Ints,
    mixed: Ints,
    latest: Ints,
    out_pos: Ints,
    mixed_off: Ints,
    asked: Ints,
    order: Ints,
    request_ts: Ints,
    bound: Ints,
    cut: Ints,
    digest: Array,
    key_ts: Ints,
    used: Ints,
    runs: Ints,
    blocks: Ints,
    scratch: Array,
    room: Array,
) -> bool:
    """Decode the keys of cut pieces, times to ``key_ts``, and add to ``cut`` and ``digest`` what each request sees of
    them; whether all is sound and every event there before a request was seen by it.

    Args:
        segments, streams, kind, per_row: tables of the streams event_ts and arrival.
        mixed, latest, out_pos, mixed_off, cut, digest: as ``cut_users`` left them.
        used: (3,) gets bytes of the blocks of event_ts and arrival, and of chunks.
        runs, blocks: ``stripes.rooms`` of these pieces and two streams.
    """
    n, none, blocks = len(mixed), np.empty(0, np.int64), bare(blocks, np.int64)
    segments, streams, runs = bare(segments, np.int64), bare(streams, np.int64), bare(runs, np.int64)
    scratch, room = bare(scratch, np.uint64), bare(room, np.uint64)
    words = carray(pointer(records.ctypes.data), (len(records), 8), np.uint64)
    bad, n_stripes = find_runs(segments, words, segment, mixed, np.zeros(n, np.int64), np.diff(out_pos), none, runs)
    if bad >= 0:
        return False
    target, refused = np.empty((2, 3), np.int64), np.zeros(2, np.bool_)
    target[0, 0], target[0, 1], target[:, 2] = key_ts.ctypes.data, len(key_ts), 8
    arrivals, known = np.empty(_GROUP_ROWS, np.int64), np.empty(_GROUP_ROWS, np.int64)
    sums = np.empty((_GROUP_ROWS >> _BLOCK_BITS) + _GROUP_ROWS + 1, np.uint64)
    run: Any = np.int64(0)
    user: Any = np.int64(0)
    for first in range(-TOGETHER, n_stripes, TOGETHER):
        if come_to(segments, streams, kind, runs, n_stripes, first, -1, -1, blocks, used) >= 0:
            return False
        if first < 0:
            continue
        begin, run = run, first_run_after(runs, run, n, first)
        base = out_pos[begin]
        if out_pos[run] - base > _GROUP_ROWS:
            return False
        target[1, 0], target[1, 1] = arrivals.ctypes.data - 8 * base, out_pos[run]
        for w in range(2):
            bad = decode_stream(
                streams, w, kind[w], per_row[w], False, runs, n_stripes, first, blocks, begin, run, out_pos, target,
                refused, scratch, room,
            )  # fmt: skip
            if bad >= 0 or refused[w]:
                return False
            for i in range(begin, run if w == 0 else begin):
                # Of what no request reaches no arrival number is asked.
                reached = lower_bound(key_ts, out_pos[i], out_pos[i + 1], latest[i]) - out_pos[i]
                runs[TO, i] = runs[FROM, i] + reached
                known[i - begin], sums[((out_pos[i] - base) >> _BLOCK_BITS) + i - begin] = 0, 0
        user = _prove_users(
            records, mixed, out_pos, mixed_off, asked, order, request_ts, bound, cut, digest, key_ts, arrivals, known,
            sums, begin, run, user,
        )  # fmt: skip
        if user < 0:
            return False
    return True


@njit
def _prove_users(
    records: Array,
    mixed: Ints,
    out_pos: Ints,
    mixed_off: Ints,
    asked: Ints,
    order: Ints,
    request_ts: Ints,
    bound: Ints,
    cut: Ints,
    digest: Array,
    key_ts: Ints,
    arrivals: Ints,
    known: Ints,
    sums: Array,
    begin: int,
    stop: int,
    user: int,
) -> Any:
    """``prove`` of the requests that cut the pieces ``mixed[begin:stop]``, of the users from ``user`` on; ``arrivals``
    are theirs alone. Returns the first user who has a later cut piece, or -1 where one did not see an event."""
    base, u = out_pos[begin], user
    while u < len(mixed_off) - 1 and mixed_off[u] < stop:
        for k in range(asked[u], asked[u + 1]):
            x = order[k]
            s = cut[_SLOT, x]
            if s < begin or s >= stop:
                continue
            a, p = out_pos[s], mixed[s]
            tail = lower_bound(key_ts, a, out_pos[s + 1], request_ts[x]) - a
            times, numbers = key_ts[a : a + tail], arrivals[a - base : a - base + tail]
            if np.int64(records[p].max_arrival) > bound[x] and _exceeds(numbers, bound[x]):
                return -1
            cut[CUT_TAIL, x] = tail
            if tail > 0:
                cut[_FIRST_TS, x] = min(cut[_FIRST_TS, x], times[0])
                cut[CUT_LAST_TS, x] = max(cut[CUT_LAST_TS, x], times[tail - 1])
            if asked[u + 1] - asked[u] == 1:
                digest[x] += sum_of_mixes(times, numbers, 0, tail)
            else:
                place = ((a - base) >> _BLOCK_BITS) + s - begin
                digest[x] += digest_before(0, tail, times, numbers, known, s - begin, place, sums)
        if mixed_off[u + 1] > stop:
            return u
        u += 1
    return u


@njit
def _exceeds(numbers: Ints, limit: int) -> bool:
    highest = np.iinfo(np.int64).min
    for i in range(len(numbers)):
        highest = max(highest, numbers[i])
    return bool(highest > limit)


@njit
def as_versions_say(versions: Array, watermark: Ints, user_of: Ints, cut: Ints, digest: Array, same: bool) -> bool:
    """Whether every request (X) saw what its version says, and nothing its user's ``watermark`` (U,) is below; with
    ``same``, whether nothing was archived since."""
    for x in range(len(user_of)):
        v, top, n = versions[x], watermark[user_of[x]], cut[CUT_BEFORE, x] + cut[CUT_TAIL, x]
        first = cut[_FIRST_TS, x] if n > 0 else np.int64(0)
        last = cut[CUT_LAST_TS, x] if n > 0 else np.int64(0)
        if v.last_arrival > top or (same and v.last_arrival != top):
            return False
        if v.seq_len != n or v.checksum != digest[x] or v.start_ts != first or v.end_ts != last:
            return False
    return True


@njit
def ranges_of_users(
    records: Array,
    run_off: Ints,
    run_of_user: Ints,
    asked: Ints,
    order: Ints,
    rows_to: Ints,
    cut: Ints,
    oldest_ts: Ints,
    newest: Ints,
    piece: Ints,
    start: Ints,
    stop: Ints,
    out_pos: Ints,
    user_rows: Ints,
    shown: Ints,
) -> int:
    """As ``plan.read_ranges``, of requests that see all events before their time and want the ``newest`` (X,) of them;
    ``shown`` (X,) gets where among all rows to be read those that a request sees end. It must choose the same rows:
    who asks for their arrival numbers later gets them from there."""
    n, total = 0, np.int64(0)
    out_pos[0], user_rows[0] = 0, 0
    for u in range(len(run_of_user) - 1):
        begin, end = run_off[run_of_user[u]], run_off[run_of_user[u + 1]]
        first, last, lowest = _NEVER, np.int64(0), end
        for k in range(asked[u], asked[u + 1]):
            x = order[k]
            p, row, need = cut[_CUT, x], cut[CUT_BEFORE, x] + cut[CUT_TAIL, x], newest[x]
            rows = cut[CUT_TAIL, x]
            if row == 0:
                continue
            last = max(last, row)
            if cut[_SLOT, x] < 0:
                p -= 1
                rows = np.int64(records[p].n_rows)
            while need > 0 and np.int64(records[p].last_ts) >= oldest_ts[x]:
                took = min(need, rows)
                row, need, lowest = row - took, need - took, min(lowest, p)
                if p == begin:
                    break
                p -= 1
                rows = np.int64(records[p].n_rows)
            first = min(first, row)
            if need == newest[x]:
                # None of its events is new enough: the rows begin where they would have ended.
                lowest = min(lowest, cut[_CUT, x])
        for k in range(asked[u], asked[u + 1]):
            row = cut[CUT_BEFORE, order[k]] + cut[CUT_TAIL, order[k]]
            shown[order[k]] = total + (row - first if row > 0 else np.int64(0))
        row = rows_to[lowest - 1] if begin < lowest < end else np.int64(0)
        for p in range(lowest, end):
            if row >= last:
                break
            a, b = max(first - row, 0), min(last - row, np.int64(records[p].n_rows))
            row += np.int64(records[p].n_rows)
            if a < b:
                total += b - a
                piece[n], start[n], stop[n], out_pos[n + 1] = p, a, b, total
                n += 1
        user_rows[u + 1] = total
    return n


@njit
def put_times(key_off: Ints, key_ts: Ints, piece: Ints, start: Ints, stop: Ints, out_pos: Ints, out: int) -> None:
    """The times of the ranges that lie in cut pieces to their places at address ``out``."""
    for i in range(len(piece)):
        at = key_off[piece[i]]
        if at >= 0:
            taken = key_ts[at + start[i] : at + stop[i]]
            put = carray(pointer(out + 8 * out_pos[i]), (len(taken),), np.int64)
            for k in range(len(taken)):
                put[k] = taken[k]


@njit
def slices_of_requests(
    user_of: Ints, user_rows: Ints, event_ts: Ints, oldest_ts: Ints, max_len: int, start: Ints, stop: Ints
) -> Any:
    """As ``plan.example_slices``, of requests that see all events before their time; ``stop`` is known."""
    delivered: Any = np.int64(0)
    for x in range(len(user_of)):
        begin, end = user_rows[user_of[x]], stop[x]
        if begin < end and event_ts[begin] < oldest_ts[x]:
            begin = lower_bound(event_ts, begin, end, oldest_ts[x])
        start[x] = max(begin, end - max_len)
        delivered += end - start[x]
    return delivered
