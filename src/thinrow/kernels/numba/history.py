"""Compiled kernels of the history store: digests, visibility windows, merging.

Arrays of a *batch of pieces* are grouped by user: the pieces of user u are ``[piece_off[u], piece_off[u + 1])``,
sorted by (segment, first_ts). Keys (event_ts, arrival, hidden_from) of some pieces have been decoded: those of piece p
are at ``[key_off[p], key_off[p] + n_rows[p])``, or ``key_off[p] == -1``. An example sees an event when ``event_ts <
request_ts`` (strict), ``arrival <= bound`` and ``hidden_from > bound``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.jit import njit

Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_NEVER = np.int64((1 << 63) - 1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_NULL_WORD = np.uint64(0xA5A5A5A5A5A5A5A5)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@njit
def _mix64(x: Any) -> Any:
    x ^= x >> _S30
    x *= _M1
    x ^= x >> _S27
    x *= _M2
    x ^= x >> _S31
    return x


@njit
def identity_mix(event_ts: Ints, arrival: Ints) -> Words:
    out = np.empty(len(event_ts), np.uint64)
    for i in range(len(event_ts)):
        out[i] = _mix64(_mix64(np.uint64(event_ts[i]) + _GOLDEN) + np.uint64(arrival[i]))
    return out


@njit
def content_digest(identity: Words, words: Words, null: Bools, column_id: int) -> np.uint64:
    salt = np.uint64(column_id) * _GOLDEN
    total = np.uint64(0)
    has_null = len(null) > 0
    for i in range(len(identity)):
        value = _NULL_WORD if has_null and null[i] else words[i]
        total += _mix64(identity[i] ^ _mix64(salt + value))
    return total


@njit
def fold_bytes(offsets: Ints, data: npt.NDArray[np.uint8]) -> Words:
    n = len(offsets) - 1
    out = np.empty(n, np.uint64)
    for i in range(n):
        a, b = offsets[i], offsets[i + 1]
        h = np.uint64(b - a)
        p = a
        while p < b:
            word = np.uint64(0)
            if b - p >= 8:  # unrolled, so that it compiles to one load
                for j in range(8):
                    word |= np.uint64(data[p + j]) << np.uint64(8 * j)
            else:
                for j in range(b - p):
                    word |= np.uint64(data[p + j]) << np.uint64(8 * j)
            h = _mix64(h ^ word)
            p += 8
        out[i] = h
    return out


@njit
def _lower_bound(values: Ints, lo: Any, hi: Any, x: Any) -> Any:
    while lo < hi:
        mid = (lo + hi) // 2
        if values[mid] < x:
            lo = mid + 1
        else:
            hi = mid
    return lo


@njit
def apply_hides(
    range_off: Ints,
    user_of: Ints,
    event_ts: Ints,
    arrival: Ints,
    hidden_from: Ints,
    hide_off: Ints,
    hide_ts: Ints,
    hide_arrival: Ints,
    hide_from: Ints,
) -> None:
    """Lower ``hidden_from`` (in place) of the events that a hide names.

    Range r holds events of user ``user_of[r]`` in order of event_ts; its hides are those of that user.
    """
    for r in range(len(range_off) - 1):
        a, b = range_off[r], range_off[r + 1]
        if a == b:
            continue
        for h in range(hide_off[user_of[r]], hide_off[user_of[r] + 1]):
            if hide_ts[h] < event_ts[a] or hide_ts[h] > event_ts[b - 1]:
                continue
            i = _lower_bound(event_ts, a, b, hide_ts[h])
            while i < b and event_ts[i] == hide_ts[h]:
                if arrival[i] == hide_arrival[h]:
                    hidden_from[i] = min(hidden_from[i], hide_from[h])
                i += 1


@njit
def tighten_pieces(
    piece_off: Ints, first_ts: Ints, last_ts: Ints, min_hidden: Ints, hide_off: Ints, hide_ts: Ints, hide_from: Ints
) -> None:
    """Lower ``min_hidden`` (in place) of the pieces that may hold a hidden event."""
    for u in range(len(piece_off) - 1):
        for h in range(hide_off[u], hide_off[u + 1]):
            for p in range(piece_off[u], piece_off[u + 1]):
                if first_ts[p] <= hide_ts[h] <= last_ts[p]:
                    min_hidden[p] = min(min_hidden[p], hide_from[h])


@njit
def mark_mixed(
    piece_off: Ints,
    first_ts: Ints,
    last_ts: Ints,
    max_arrival: Ints,
    min_hidden: Ints,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
) -> Bools:
    """Which pieces hold both events that some example sees and events that it does not (or may)."""
    mixed = np.zeros(len(first_ts), np.bool_)
    for x in range(len(user_of)):
        u = user_of[x]
        for p in range(piece_off[u], piece_off[u + 1]):
            if first_ts[p] < request_ts[x] and (
                last_ts[p] >= request_ts[x] or max_arrival[p] > bound[x] or min_hidden[p] <= bound[x]
            ):
                mixed[p] = True
    return mixed


@njit
def summarize(
    piece_off: Ints,
    first_ts: Ints,
    last_ts: Ints,
    max_arrival: Ints,
    min_hidden: Ints,
    digest: Words,
    n_rows: Ints,
    key_off: Ints,
    key_ts: Ints,
    key_arrival: Ints,
    key_hidden: Ints,
    key_mix: Words,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
) -> tuple[Ints, Words, Ints, Ints]:
    """Of what each example sees in the archive: count, identity digest, first and last event time (0, 0 if none)."""
    n = len(user_of)
    count = np.zeros(n, np.int64)
    total = np.zeros(n, np.uint64)
    start = np.zeros(n, np.int64)
    end = np.zeros(n, np.int64)
    for x in range(n):
        t, b = request_ts[x], bound[x]
        lo, hi = _NEVER, np.int64(-1)
        c = np.int64(0)
        d = np.uint64(0)
        for p in range(piece_off[user_of[x]], piece_off[user_of[x] + 1]):
            if first_ts[p] >= t:
                continue
            if last_ts[p] < t and max_arrival[p] <= b and min_hidden[p] > b:
                c += n_rows[p]
                d += digest[p]
                lo = min(lo, first_ts[p])
                hi = max(hi, last_ts[p])
                continue
            for i in range(key_off[p], key_off[p] + n_rows[p]):
                if key_ts[i] >= t:
                    break
                if key_arrival[i] <= b and key_hidden[i] > b:
                    c += 1
                    d += key_mix[i]
                    lo = min(lo, key_ts[i])
                    hi = max(hi, key_ts[i])
        count[x] = c
        total[x] = d
        if c > 0:
            start[x] = lo
            end[x] = hi
    return count, total, start, end


@njit
def _last_row(p: Any, t: Any, n_rows: Ints, last_ts: Ints, key_off: Ints, key_ts: Ints) -> Any:
    """Rows of piece p with event_ts < t; a piece that t cuts has its keys decoded."""
    if last_ts[p] < t:
        return n_rows[p]
    lo, hi = np.int64(0), np.int64(n_rows[p])
    while lo < hi:
        mid = (lo + hi) // 2
        if key_ts[key_off[p] + mid] < t:
            lo = mid + 1
        else:
            hi = mid
    return lo


@njit
def read_ranges(
    run_off: Ints,
    run_of_user: Ints,
    first_ts: Ints,
    last_ts: Ints,
    max_arrival: Ints,
    min_hidden: Ints,
    n_rows: Ints,
    key_off: Ints,
    key_ts: Ints,
    key_arrival: Ints,
    key_hidden: Ints,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
    oldest_ts: Ints,
    max_len: Ints,
) -> tuple[Ints, Ints]:
    """The rows that the examples of a user need of each run, at least.

    A *run* is the pieces of one user in one segment: run r holds the pieces ``[run_off[r], run_off[r + 1])`` and user u
    the runs ``[run_of_user[u], run_of_user[u + 1])``. For example x each run gives its newest ``max_len[x]`` visible
    events (the newest after merging are among them), down to ``oldest_ts[x]`` (inclusive; to the piece). Returns the
    half-open range of rows within each run, first and last + 1; first >= last where nothing is needed.
    """
    n_runs = len(run_off) - 1
    first = np.full(n_runs, _NEVER, np.int64)
    last = np.zeros(n_runs, np.int64)
    for x in range(len(user_of)):
        t, b = request_ts[x], bound[x]
        for r in range(run_of_user[user_of[x]], run_of_user[user_of[x] + 1]):
            end = np.int64(0)
            p_end = run_off[r]
            while p_end < run_off[r + 1] and first_ts[p_end] < t:
                end += _last_row(p_end, t, n_rows, last_ts, key_off, key_ts)
                p_end += 1
            if end == 0:
                continue
            last[r] = max(last[r], end)
            begin = end
            need = max_len[x]
            p = p_end - 1
            while p >= run_off[r] and need > 0 and last_ts[p] >= oldest_ts[x]:
                rows = _last_row(p, t, n_rows, last_ts, key_off, key_ts)
                if last_ts[p] < t and max_arrival[p] <= b and min_hidden[p] > b:
                    took = min(need, rows)
                    begin -= took
                    need -= took
                else:
                    i = rows - 1
                    while i >= 0 and need > 0:
                        k = key_off[p] + i
                        if key_arrival[k] <= b and key_hidden[k] > b:
                            need -= 1
                        begin -= 1
                        i -= 1
                p -= 1
            first[r] = min(first[r], begin)
    return first, last


@njit
def merge_runs(run_of_user: Ints, run_start: Ints, run_stop: Ints, event_ts: Ints, arrival: Ints) -> Ints:
    """Order that merges the sorted runs of each user by (event_ts, arrival): source position of every output row."""
    total = 0
    widest = 0
    for u in range(len(run_of_user) - 1):
        widest = max(widest, run_of_user[u + 1] - run_of_user[u])
        for r in range(run_of_user[u], run_of_user[u + 1]):
            total += run_stop[r] - run_start[r]
    order = np.empty(total, np.int64)
    head = np.empty(widest, np.int64)
    out = 0
    for u in range(len(run_of_user) - 1):
        a, b = run_of_user[u], run_of_user[u + 1]
        for r in range(a, b):
            head[r - a] = run_start[r]
        while True:
            best = -1
            for r in range(a, b):
                i = head[r - a]
                if i >= run_stop[r]:
                    continue
                if best < 0:
                    best = r
                    continue
                j = head[best - a]
                if event_ts[i] < event_ts[j] or (event_ts[i] == event_ts[j] and arrival[i] < arrival[j]):
                    best = r
            if best < 0:
                break
            order[out] = head[best - a]
            head[best - a] += 1
            out += 1
    return order


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
) -> tuple[Ints, Ints, Bools]:
    """Start, stop and exactness of each example's newest ``max_len[x]`` visible events with event_ts >= oldest_ts.

    ``whole[x]`` says that example x sees every event before its request; ``arrival`` and ``hidden_from`` may be empty
    where all are so.
    """
    n = len(user_of)
    start = np.empty(n, np.int64)
    stop = np.empty(n, np.int64)
    exact = np.empty(n, np.bool_)
    # Of users with such examples: the highest arrival up to each event, and the least hidden_from.
    top = np.empty(len(arrival), np.int64)
    least_hidden = np.full(len(event_off) - 1, _NEVER, np.int64)
    known = np.zeros(len(event_off) - 1, np.bool_)
    for x in range(n):
        u = user_of[x]
        b = bound[x]
        if not whole[x] and not known[u]:
            known[u] = True
            highest = np.int64(-1)
            for i in range(event_off[u], event_off[u + 1]):
                highest = max(highest, arrival[i])
                top[i] = highest
                least_hidden[u] = min(least_hidden[u], hidden_from[i])
        end = _lower_bound(event_ts, event_off[u], event_off[u + 1], request_ts[x])
        begin = _lower_bound(event_ts, event_off[u], end, oldest_ts[x])
        stop[x] = end
        if end == begin or whole[x] or (top[end - 1] <= b and least_hidden[u] > b):
            start[x] = max(begin, end - min(max_len[x], end - begin))
            exact[x] = True
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
    return start, stop, exact


@njit
def rows_before(offsets: Ints, event_ts: Ints, before: Ints) -> Ints:
    """Rows of each range ``[offsets[i], offsets[i + 1])``, in order of time, that have ``event_ts < before[i]``."""
    rows = np.empty(len(before), np.int64)
    for i in range(len(before)):
        rows[i] = _lower_bound(event_ts, offsets[i], offsets[i + 1], before[i]) - offsets[i]
    return rows


@njit
def all_visible(
    piece_off: Ints,
    first_ts: Ints,
    last_ts: Ints,
    max_arrival: Ints,
    min_hidden: Ints,
    n_rows: Ints,
    key_off: Ints,
    key_ts: Ints,
    key_arrival: Ints,
    key_hidden: Ints,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
) -> Bools:
    """Whether each example sees every event of its user with ``event_ts < request_ts``."""
    whole = np.ones(len(user_of), np.bool_)
    for x in range(len(user_of)):
        t, b = request_ts[x], bound[x]
        for p in range(piece_off[user_of[x]], piece_off[user_of[x] + 1]):
            if first_ts[p] >= t or (max_arrival[p] <= b and min_hidden[p] > b):
                continue
            for i in range(key_off[p], key_off[p] + n_rows[p]):
                if key_ts[i] >= t:
                    break
                if key_arrival[i] > b or key_hidden[i] <= b:
                    whole[x] = False
                    break
            if not whole[x]:
                break
    return whole


@njit
def piece_summaries(
    row_off: Ints, event_ts: Ints, arrival: Ints, hidden_from: Ints, mix: Words
) -> tuple[Ints, Ints, Words]:
    """Of each piece (rows ``[row_off[p], row_off[p + 1])``): max arrival, min hidden_from, identity digest."""
    n = len(row_off) - 1
    top = np.empty(n, np.int64)
    least = np.empty(n, np.int64)
    digest = np.empty(n, np.uint64)
    for p in range(n):
        a = np.int64(-1)
        h = _NEVER
        d = np.uint64(0)
        for i in range(row_off[p], row_off[p + 1]):
            a = max(a, arrival[i])
            h = min(h, hidden_from[i])
            d += mix[i]
        top[p] = a
        least[p] = h
        digest[p] = d
    return top, least, digest


@njit
def remap_codes(
    out: npt.NDArray[Any], run_pos: Ints, run_rows: Ints, lut: npt.NDArray[np.int32], lut_off: Ints, lut_n: Ints
) -> int:
    """Segment codes to united codes, in place. Index of the first run with a code outside its dictionary, or -1."""
    for r in range(len(run_pos)):
        for i in range(run_pos[r], run_pos[r] + run_rows[r]):
            code = out[i]
            if code < 0 or code >= lut_n[r]:
                return r
            out[i] = lut[lut_off[r] + code]
    return -1


@njit
def runs_of_rows(run_off: Ints, n_rows: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut each run's rows ``[first, last)`` at piece bounds: piece, first row and last + 1 within the piece."""
    n = 0
    for r in range(len(run_off) - 1):
        row = np.int64(0)
        for p in range(run_off[r], run_off[r + 1]):
            if row < last[r] and row + n_rows[p] > first[r]:
                n += 1
            row += n_rows[p]
    piece = np.empty(n, np.int64)
    start = np.empty(n, np.int64)
    stop = np.empty(n, np.int64)
    n = 0
    for r in range(len(run_off) - 1):
        row = np.int64(0)
        for p in range(run_off[r], run_off[r + 1]):
            if row < last[r] and row + n_rows[p] > first[r]:
                piece[n] = p
                start[n] = max(first[r] - row, 0)
                stop[n] = min(last[r] - row, n_rows[p])
                n += 1
            row += n_rows[p]
    return piece, start, stop


@njit
def cut_stripes(lengths: Ints, stripe_rows: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Pieces of users with ``lengths`` rows each (format section 2): user, rows, stripe, row within the stripe."""
    n = 0
    for u in range(len(lengths)):
        n += max(1, (lengths[u] + stripe_rows - 1) // stripe_rows) if lengths[u] > 0 else 0
    user = np.empty(n, np.int64)
    rows = np.empty(n, np.int64)
    stripe = np.empty(n, np.int64)
    first = np.empty(n, np.int64)
    p = 0
    current: Any = np.int64(-1)
    used: Any = np.int64(stripe_rows)
    for u in range(len(lengths)):
        left = lengths[u]
        if left == 0:
            continue
        if used + left > stripe_rows:
            current += 1
            used = 0
        while left > 0:
            if used == stripe_rows:
                current += 1
                used = 0
            took = min(left, stripe_rows - used)
            user[p] = u
            rows[p] = took
            stripe[p] = current
            first[p] = used
            used += took
            left -= took
            p += 1
    return user, rows, stripe, first


@njit
def distinct_words(words: Words, limit: int, known: Words) -> tuple[Words, npt.NDArray[np.uint32]]:
    """``known`` distinct words and the new ones of ``words`` in order of first appearance, and the place of each of
    ``words`` among them; both empty where these are more than ``limit``."""
    size = 64
    while size < 4 * limit:
        size *= 2
    slots = np.full(size, -1, np.int64)
    found = np.empty(limit, np.uint64)
    codes = np.empty(len(words), np.uint32)
    if len(known) > limit:
        return found[:0], codes[:0]
    n = 0
    for i in range(-len(known), len(words)):
        word = words[i] if i >= 0 else known[i + len(known)]
        at = np.int64(_mix64(word) & np.uint64(size - 1))
        while slots[at] >= 0 and found[slots[at]] != word:
            at = (at + 1) & (size - 1)
        if slots[at] < 0:
            if n == limit:
                return found[:0], codes[:0]
            slots[at] = n
            found[n] = word
            n += 1
        if i >= 0:
            codes[i] = slots[at]
    return found[:n], codes


@njit
def code_words(words: Words, known: Words) -> npt.NDArray[np.uint32]:
    """(n,) the place of each of ``words`` among the distinct ``known`` ones; 0xFFFFFFFF where it is not there."""
    size = 64
    while size < 2 * len(known):
        size *= 2
    slots = np.full(size, 0xFFFFFFFF, np.uint32)
    codes = np.empty(len(words), np.uint32)
    for i in range(-len(known), len(words)):
        word = words[i] if i >= 0 else known[i + len(known)]
        at = np.int64(_mix64(word) & np.uint64(size - 1))
        while slots[at] != 0xFFFFFFFF and known[slots[at]] != word:
            at = (at + 1) & (size - 1)
        if i >= 0:
            codes[i] = slots[at]
        else:
            slots[at] = i + len(known)
    return codes
