"""Compiled kernels of a batch's plan: users to index entries, entries to what each example sees, that to rows to read.

Index entries of *pieces* (PIECE_DTYPE) are grouped by run and user: a run is the pieces of one user in one segment, in
order of time; run r holds the pieces ``[run_off[r], run_off[r + 1])``, user u the runs ``[run_of_user[u],
run_of_user[u + 1])``. Keys (event_ts, arrival, hidden_from) of *mixed* pieces have been decoded: those of piece p are
at ``[key_off[p], key_off[p] + n_rows)``, or ``key_off[p] == -1``; ``key_hidden`` is empty where nothing is hidden. An
example sees an event when ``event_ts < request_ts`` (strict), ``arrival <= bound`` and ``hidden_from > bound``.

Worked example. A run of three pieces of 512 rows, the last event of each at 10, 20 and 30 ms. An example at 25 ms takes
the first two from running sums over the index entries, and counts in the third, which is mixed, the rows before 25.

Results go to arrays of the caller's, because one that a kernel makes costs a microsecond.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.intrinsics import identities32
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.scalar import identity_of, lower_bound

Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Records: TypeAlias = npt.NDArray[Any]

_NEVER = np.int64((1 << 63) - 1)
_LOW = np.uint64(0xFFFFFFFF)
#: Rows whose digest is summed at once and kept: 1 << 6.
_BLOCK_BITS = 6


@njit
def distinct_keys(keys: Ints, distinct: Ints, row_of: Ints) -> int:
    """The distinct of (n,) ``keys``, ascending, to ``distinct``, and the place of each among them to ``row_of``.
    Returns how many there are."""
    ascending = True
    for i in range(1, len(keys)):
        if keys[i] < keys[i - 1]:
            ascending = False
            break
    n = 0
    if ascending:
        for i in range(len(keys)):
            if i == 0 or keys[i] != keys[i - 1]:
                distinct[n] = keys[i]
                n += 1
            row_of[i] = n - 1
        return n
    order = np.argsort(keys)
    for k in range(len(order)):
        key = keys[order[k]]
        if k == 0 or key != distinct[n - 1]:
            distinct[n] = key
            n += 1
        row_of[order[k]] = n - 1
    return n


@njit
def _rotated(x: Any, by: int) -> Any:
    return ((x << np.uint64(by)) | (x >> np.uint64(32 - by))) & _LOW


@njit
def _murmur3(key: Any) -> Any:
    """murmur3_x86_32, seed 0, of the 8 bytes of a key: ``thinrow.core.users``."""
    bits = np.uint64(key)
    h = np.uint64(0)
    for half in range(2):
        k = (bits >> np.uint64(32 * half)) & _LOW
        k = _rotated((k * np.uint64(0xCC9E2D51)) & _LOW, 15)
        h ^= (k * np.uint64(0x1B873593)) & _LOW
        h = (_rotated(h, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & _LOW
    h ^= np.uint64(8)
    h = ((h ^ (h >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & _LOW
    h = ((h ^ (h >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & _LOW
    return h ^ (h >> np.uint64(16))


@njit
def buckets_of_keys(keys: Ints, first: Ints, last: Ints, bucket: Ints) -> Any:
    """``thinrow.core.users.bucket_of`` of (n,) keys, to ``bucket``; returns how many pairs of key and segment there
    are, where bucket b has segments ``[first[b], last[b])``."""
    pairs: Any = np.int64(0)
    for i in range(len(keys)):
        b = np.int64(_murmur3(keys[i]) & np.uint64(0x7FFFFFFF)) % len(first)
        bucket[i] = b
        pairs += last[b] - first[b]
    return pairs


@njit
def pairs_of_users(bucket: Ints, first: Ints, last: Ints, user: Ints, segment: Ints, used: Bools) -> None:
    """Pairs of user and segment, by user, then oldest segment first.

    Args:
        bucket: (U,) of each user.
        first, last: (B,) segments of each bucket, ``[first, last)``.
        user, segment: get those of each pair.
        used: (S,) False; becomes True of segments that are in a pair.
    """
    n = 0
    for u in range(len(bucket)):
        for s in range(first[bucket[u]], last[bucket[u]]):
            user[n] = u
            segment[n] = s
            used[s] = True
            n += 1


@njit
def group_pieces(
    records: Records,
    pair_user: Ints,
    pair_segment: Ints,
    first: Ints,
    last: Ints,
    most_rows: int,
    piece_off: Ints,
    run_off: Ints,
    run_of_user: Ints,
    segment: Ints,
    watermark: Ints,
) -> tuple[int, int]:
    """Runs and users of (P,) index entries, those of pair i being ``last[i] - first[i]`` of them.

    Args:
        most_rows: what no piece exceeds.
        piece_off, run_of_user: (U + 1,) pieces and runs of each user.
        run_off: pieces of each run; one longer than there are pairs.
        segment: (P,) of each piece.
        watermark: (U,) highest arrival of each user's pieces, 0 where there is none.

    Returns:
        the number of runs, and the first pair with a piece of no rows or of too many, or two pieces that are not in
        ascending stripes, or -1.
    """
    pair, p, r = 0, 0, 0
    run_off[0] = 0
    piece_off[0], run_of_user[0] = 0, 0
    for u in range(len(watermark)):
        top: Any = np.int64(0)
        begin = p
        while pair < len(pair_user) and pair_user[pair] == u:
            n = last[pair] - first[pair]
            above = np.int64(-1)
            for _ in range(n):
                rows, stripe = np.int64(records[p].n_rows), np.int64(records[p].stripe)
                if rows <= 0 or rows > most_rows or stripe <= above:
                    return r, pair
                above = stripe
                arrival = np.int64(records[p].max_arrival)
                if p == begin or arrival > top:
                    top = arrival
                segment[p] = pair_segment[pair]
                p += 1
            if n > 0:
                r += 1
                run_off[r] = p
            pair += 1
        watermark[u] = top
        piece_off[u + 1], run_of_user[u + 1] = p, r
    return r, -1


@njit
def _running(records: Records, run_off: Ints) -> Any:
    """Over the pieces of each run up to and with each piece: rows, highest arrival, lowest hidden_from."""
    n = len(records)
    rows, top, least = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    for r in range(len(run_off) - 1):
        total = np.int64(0)
        highest: Any = np.iinfo(np.int64).min
        lowest: Any = _NEVER
        for p in range(run_off[r], run_off[r + 1]):
            total += np.int64(records[p].n_rows)
            highest = max(highest, np.int64(records[p].max_arrival))
            lowest = min(lowest, np.int64(records[p].min_hidden_from))
            rows[p], top[p], least[p] = total, highest, lowest
    return rows, top, least


@njit
def first_not_before(records: Records, a: Any, b: Any, t: Any) -> Any:
    """The first of a run's pieces ``[a, b)`` that does not end before t."""
    while a < b:
        middle = (a + b) >> 1
        if np.int64(records[middle].last_ts) < t:
            a = middle + 1
        else:
            b = middle
    return a


@njit
def mark_mixed(
    records: Records,
    run_off: Ints,
    run_of_user: Ints,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
    key_off: Ints,
    mixed: Ints,
    latest: Ints,
    out_pos: Ints,
) -> tuple[int, int, bool]:
    """Which pieces hold both events that some example sees and events that it does not (or may).

    Args:
        key_off: (P,) gets where the keys of these pieces go, one after another, and -1 for the others.
        mixed: (P,) gets their numbers.
        latest: (P,) gets the last request that their user has.
        out_pos: (P + 1,) gets offsets of their rows one after another.

    Returns:
        the number of such pieces and of their rows, and whether an event in one of them is hidden.
    """
    _, top, least = _running(records, run_off)
    n_users = len(run_of_user) - 1
    last_request = np.zeros(n_users, np.int64)
    for p in range(len(records)):
        key_off[p] = -1
    for x in range(len(user_of)):
        u, t, b = user_of[x], request_ts[x], bound[x]
        last_request[u] = max(last_request[u], t)
        for r in range(run_of_user[u], run_of_user[u + 1]):
            begin, stop = run_off[r], run_off[r + 1]
            end = first_not_before(records, begin, stop, t)
            if end > begin and (top[end - 1] > b or least[end - 1] <= b):
                for p in range(begin, end):
                    if np.int64(records[p].max_arrival) > b or np.int64(records[p].min_hidden_from) <= b:
                        key_off[p] = 0
            if end < stop and np.int64(records[end].first_ts) < t:
                key_off[end] = 0
    n, hides = 0, False
    rows: Any = np.int64(0)
    out_pos[0] = 0
    for u in range(n_users):
        for p in range(run_off[run_of_user[u]], run_off[run_of_user[u + 1]]):
            if key_off[p] == 0:
                key_off[p], mixed[n], latest[n] = rows, p, last_request[u]
                rows += np.int64(records[p].n_rows)
                out_pos[n + 1] = rows
                hides |= np.int64(records[p].min_hidden_from) != _NEVER
                n += 1
    return n, rows, hides


@njit
def rows_before(offsets: Ints, event_ts: Ints, before: Ints, rows: Ints) -> None:
    """To ``rows`` how many of each range ``[offsets[i], offsets[i + 1])``, in order of time, have ``event_ts <
    before[i]``."""
    for i in range(len(before)):
        rows[i] = lower_bound(event_ts, offsets[i], offsets[i + 1], before[i]) - offsets[i]


@njit
def sum_of_mixes(key_ts: Ints, key_arrival: Ints, a: Any, b: Any) -> Any:
    total, whole = np.uint64(0), a + ((b - a) & ~31)
    times, arrivals = key_ts.ctypes.data, key_arrival.ctypes.data
    for i in range(8 * a, 8 * whole, 256):
        total += identities32(times + i, arrivals + i)
    # Views, because an index that counts from 0 is one that the compiler takes into vector registers.
    rest, numbers = key_ts[whole:b], key_arrival[whole:b]
    for i in range(len(rest)):
        total += identity_of(rest[i], numbers[i])
    return total


@njit
def digest_before(a: Any, n: Any, key_ts: Ints, key_arrival: Ints, known: Ints, p: Any, place: Any, sums: Words) -> Any:
    """Identity digest of the first n rows of piece p, whose keys begin at a; sums of whole blocks are kept."""
    blocks = n >> _BLOCK_BITS
    while known[p] < blocks:
        k = known[p]
        begin = a + (k << _BLOCK_BITS)
        here = sum_of_mixes(key_ts, key_arrival, begin, begin + (1 << _BLOCK_BITS))
        sums[place + k + 1] = sums[place + k] + here
        known[p] = k + 1
    return sums[place + blocks] + sum_of_mixes(key_ts, key_arrival, a + (blocks << _BLOCK_BITS), a + n)


@njit
def summarize(
    records: Records,
    run_off: Ints,
    run_of_user: Ints,
    key_off: Ints,
    key_ts: Ints,
    key_arrival: Ints,
    key_hidden: Ints,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
    count: Ints,
    total: Words,
    start: Ints,
    end: Ints,
    whole: Bools,
) -> None:
    """Of what each example sees in the archive: count, identity digest, first and last event time (0, 0 if none); and
    whether that is every event of its user before ``request_ts``. (X,) each."""
    rows_to, top, least = _running(records, run_off)
    n_pieces = len(records)
    digest_to, place = np.empty(n_pieces, np.uint64), np.empty(n_pieces, np.int64)
    known, mixed = np.zeros(n_pieces, np.int64), np.int64(0)
    for r in range(len(run_off) - 1):
        d = np.uint64(0)
        for p in range(run_off[r], run_off[r + 1]):
            d += np.uint64(records[p].digest)
            digest_to[p] = d
            if key_off[p] >= 0:
                place[p] = (key_off[p] >> _BLOCK_BITS) + mixed
                mixed += 1
    sums = np.zeros((len(key_ts) >> _BLOCK_BITS) + mixed + 1, np.uint64)
    for x in range(len(user_of)):
        t, b = request_ts[x], bound[x]
        c, before, d = np.int64(0), np.int64(0), np.uint64(0)
        lo, hi = _NEVER, np.int64(-1)
        for r in range(run_of_user[user_of[x]], run_of_user[user_of[x] + 1]):
            begin, stop = run_off[r], run_off[r + 1]
            cut = first_not_before(records, begin, stop, t)
            if cut > begin:
                before += rows_to[cut - 1]
                if top[cut - 1] <= b and least[cut - 1] > b:
                    c += rows_to[cut - 1]
                    d += digest_to[cut - 1]
                    lo = min(lo, np.int64(records[begin].first_ts))
                    hi = max(hi, np.int64(records[cut - 1].last_ts))
                    begin = cut
            stop = cut + 1 if cut < stop and np.int64(records[cut].first_ts) < t else cut
            for p in range(begin, stop):
                seen = np.int64(records[p].max_arrival) <= b and np.int64(records[p].min_hidden_from) > b
                n, a = np.int64(records[p].n_rows), key_off[p]
                if p < cut and seen:
                    c += n
                    d += np.uint64(records[p].digest)
                    lo = min(lo, np.int64(records[p].first_ts))
                    hi = max(hi, np.int64(records[p].last_ts))
                    continue
                if p == cut:
                    n = lower_bound(key_ts, a, a + n, t) - a
                    before += n
                if seen and n > 0:
                    c += n
                    d += digest_before(a, n, key_ts, key_arrival, known, p, place[p], sums)
                    lo = min(lo, key_ts[a])
                    hi = max(hi, key_ts[a + n - 1])
                    continue
                for i in range(a, a + n):
                    if key_arrival[i] <= b and (len(key_hidden) == 0 or key_hidden[i] > b):
                        c += 1
                        d += identity_of(key_ts[i], key_arrival[i])
                        lo = min(lo, key_ts[i])
                        hi = max(hi, key_ts[i])
        count[x], total[x], whole[x] = c, d, c == before
        start[x] = lo if c > 0 else 0
        end[x] = hi if c > 0 else 0


@njit
def compare_versions(
    versions: Records,
    user_of: Ints,
    watermark: Ints,
    count: Ints,
    digest: Words,
    start: Ints,
    end: Ints,
) -> tuple[int, int]:
    """The first example whose version knows arrivals above its user's ``watermark`` (U,), and the first that is not
    what its version (VERSION_DTYPE) says; -1 where none is."""
    behind, wrong = -1, -1
    for x in range(len(user_of)):
        v = versions[x]
        if behind < 0 and v.last_arrival > watermark[user_of[x]]:
            behind = x
        if wrong < 0 and (
            v.seq_len != count[x] or v.checksum != digest[x] or v.start_ts != start[x] or v.end_ts != end[x]
        ):
            wrong = x
    return behind, wrong


@njit
def read_ranges(
    records: Records,
    run_off: Ints,
    run_of_user: Ints,
    key_off: Ints,
    key_ts: Ints,
    key_arrival: Ints,
    key_hidden: Ints,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
    oldest_ts: Ints,
    max_len: Ints,
    first: Ints,
    last: Ints,
    piece: Ints,
    start: Ints,
    stop: Ints,
    out_pos: Ints,
    user_rows: Ints,
) -> tuple[int, bool]:
    """The rows that the examples of a user need of each run, at least.

    For example x each run gives its newest ``max_len[x]`` visible events (the newest after merging are among them),
    down to ``oldest_ts[x]`` (inclusive; to the piece).

    Args:
        first, last: (R,) get the half-open range of rows within each run; first >= last where nothing is needed.
        piece, start, stop: (P,) get the same, cut at piece bounds: piece, first row and last + 1 within the piece.
        out_pos: (P + 1,) gets offsets of these rows one after another.
        user_rows: (U + 1,) gets offsets of each user's rows among them.

    Returns:
        how many of ``piece``, ``start`` and ``stop`` there are, and whether a user has several runs.
    """
    rows_to, _, _ = _running(records, run_off)
    for r in range(len(run_off) - 1):
        first[r], last[r] = _NEVER, 0
    for x in range(len(user_of)):
        t, b = request_ts[x], bound[x]
        for r in range(run_of_user[user_of[x]], run_of_user[user_of[x] + 1]):
            cut = first_not_before(records, run_off[r], run_off[r + 1], t)
            tail = np.int64(0)
            p = cut - 1
            if cut < run_off[r + 1] and np.int64(records[cut].first_ts) < t:
                a = key_off[cut]
                tail = lower_bound(key_ts, a, a + np.int64(records[cut].n_rows), t) - a
                p = cut
            end = tail + (rows_to[cut - 1] if cut > run_off[r] else np.int64(0))
            if end == 0:
                continue
            last[r] = max(last[r], end)
            begin, need = end, max_len[x]
            while p >= run_off[r] and need > 0 and np.int64(records[p].last_ts) >= oldest_ts[x]:
                rows = tail if p == cut else np.int64(records[p].n_rows)
                if np.int64(records[p].max_arrival) <= b and np.int64(records[p].min_hidden_from) > b:
                    took = min(need, rows)
                    begin -= took
                    need -= took
                else:
                    i = key_off[p] + rows - 1
                    while i >= key_off[p] and need > 0:
                        if key_arrival[i] <= b and (len(key_hidden) == 0 or key_hidden[i] > b):
                            need -= 1
                        begin -= 1
                        i -= 1
                p -= 1
            first[r] = min(first[r], begin)
    n = _cut_at_pieces(records, run_off, run_of_user, rows_to, first, last, piece, start, stop, out_pos, user_rows)
    several = False
    for u in range(len(run_of_user) - 1):
        several |= run_of_user[u + 1] - run_of_user[u] > 1
    return n, several


@njit
def _piece_of_row(rows_to: Ints, a: Any, b: Any, row: Any) -> Any:
    """The first of a run's pieces ``[a, b)`` that ends behind a row."""
    while a < b:
        middle = (a + b) >> 1
        if rows_to[middle] <= row:
            a = middle + 1
        else:
            b = middle
    return a


@njit
def _cut_at_pieces(
    records: Records,
    run_off: Ints,
    run_of_user: Ints,
    rows_to: Ints,
    first: Ints,
    last: Ints,
    piece: Ints,
    start: Ints,
    stop: Ints,
    out_pos: Ints,
    user_rows: Ints,
) -> int:
    n, total = 0, np.int64(0)
    user_rows[0], out_pos[0] = 0, 0
    for u in range(len(run_of_user) - 1):
        for r in range(run_of_user[u], run_of_user[u + 1]):
            p = _piece_of_row(rows_to, run_off[r], run_off[r + 1], first[r])
            while first[r] < last[r] and p < run_off[r + 1]:
                row = rows_to[p] - np.int64(records[p].n_rows)
                if row >= last[r]:
                    break
                piece[n] = p
                start[n] = max(first[r] - row, 0)
                stop[n] = min(last[r], rows_to[p]) - row
                total += stop[n] - start[n]
                n += 1
                out_pos[n] = total
                p += 1
        user_rows[u + 1] = total
    return n


@njit
def example_slices(
    event_off: Ints,
    event_ts: Ints,
    arrival: Ints,
    hidden_from: Ints,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
    oldest_ts: Ints,
    max_len: Ints,
    whole: Bools,
    start: Ints,
    stop: Ints,
    exact: Bools,
) -> Any:
    """Start, stop and exactness of each example's newest ``max_len[x]`` visible events with event_ts >= oldest_ts; the
    sum of these numbers of events.

    ``whole[x]`` says that example x sees every event before its request; ``arrival`` and ``hidden_from`` may be empty
    where all are so.
    """
    delivered: Any = np.int64(0)
    # Of users with such examples: the highest arrival up to each event, and the least hidden_from.
    top = np.empty(len(arrival), np.int64)
    least_hidden = np.full(len(event_off) - 1, _NEVER, np.int64)
    known = np.zeros(len(event_off) - 1, np.bool_)
    for x in range(len(user_of)):
        u = user_of[x]
        b = bound[x]
        if not whole[x] and not known[u]:
            known[u] = True
            highest = np.int64(-1)
            for i in range(event_off[u], event_off[u + 1]):
                highest = max(highest, arrival[i])
                top[i] = highest
                least_hidden[u] = min(least_hidden[u], hidden_from[i])
        begin, end = event_off[u], event_off[u + 1]
        # Mostly the first and the last event show that nothing has to be searched.
        if begin < end and event_ts[end - 1] >= request_ts[x]:
            end = lower_bound(event_ts, begin, end, request_ts[x])
        if begin < end and event_ts[begin] < oldest_ts[x]:
            begin = lower_bound(event_ts, begin, end, oldest_ts[x])
        stop[x] = end
        if end == begin or whole[x] or (top[end - 1] <= b and least_hidden[u] > b):
            start[x] = max(begin, end - min(max_len[x], end - begin))
            exact[x] = True
            delivered += end - start[x]
            continue
        need = max_len[x]
        first = end
        hidden = 0
        seen_hidden = 0
        i = end - 1
        while i >= begin and need > 0:
            if arrival[i] <= b and hidden_from[i] > b:
                need -= 1
                first = i
                hidden = seen_hidden
            else:
                seen_hidden += 1
            i -= 1
        start[x] = first
        exact[x] = hidden == 0
        delivered += max_len[x] - need
    return delivered
