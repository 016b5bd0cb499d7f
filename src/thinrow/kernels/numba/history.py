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
from thinrow.kernels.numba.scalar import GOLDEN, identity_of, lower_bound, mix

Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Codes: TypeAlias = npt.NDArray[np.uint32]

_NEVER = np.int64((1 << 63) - 1)
_ONE = np.uint64(1)
#: Words that are no further apart than this are looked up by themselves.
_NEAR = 1 << 16
_NULL_WORD = np.uint64(0xA5A5A5A5A5A5A5A5)


@njit
def identity_mix(event_ts: Ints, arrival: Ints) -> Words:
    out = np.empty(len(event_ts), np.uint64)
    for i in range(len(event_ts)):
        out[i] = identity_of(event_ts[i], arrival[i])
    return out


@njit
def content_digest(identity: Words, words: Words, null: Bools, column_id: int) -> np.uint64:
    salt = np.uint64(column_id) * GOLDEN
    total = np.uint64(0)
    # Without a branch in it the loop compiles to vectors.
    if len(null) == 0:
        for i in range(len(identity)):
            total += mix(identity[i] ^ mix(salt + words[i]))
        return total
    for i in range(len(identity)):
        value = _NULL_WORD if null[i] else words[i]
        total += mix(identity[i] ^ mix(salt + value))
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
            h = mix(h ^ word)
            p += 8
        out[i] = h
    return out


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
            i = lower_bound(event_ts, a, b, hide_ts[h])
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
def piece_summaries(
    row_off: Ints, event_ts: Ints, arrival: Ints, hidden_from: Ints, mix: Words
) -> tuple[Ints, Ints, Words]:
    """Of each piece (rows ``[row_off[p], row_off[p + 1])``): max arrival, min hidden_from, identity digest."""
    n = len(row_off) - 1
    top = np.empty(n, np.int64)
    least = np.empty(n, np.int64)
    digest = np.empty(n, np.uint64)
    for p in range(n):
        rows = slice(row_off[p], row_off[p + 1])
        arrivals, hidden, mixes = arrival[rows], hidden_from[rows], mix[rows]
        a, h, d = np.int64(-1), _NEVER, np.uint64(0)
        for i in range(len(arrivals)):
            a = max(a, arrivals[i])
            h = min(h, hidden[i])
        for i in range(len(mixes)):
            d += mixes[i]
        top[p], least[p], digest[p] = a, h, d
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
def _reach_of(words: Words) -> tuple[np.int64, np.uint64]:
    """The least of ``words`` (read as signed, some), and how far above it the greatest is."""
    signed = words.view(np.int64)
    low = high = signed[0]
    for i in range(len(signed)):
        low, high = min(low, signed[i]), max(high, signed[i])
    return low, np.uint64(high) - np.uint64(low)


@njit
def _distinct_near(words: Words, limit: int, least: np.int64, slots: Ints, found: Words, codes: Codes, n: int) -> int:
    """As ``distinct_words`` of words that are ``least`` or up to the number of ``slots`` more: one for each of them.
    How many are found, -1 where these are more than ``limit``."""
    low = np.uint64(least)
    for i in range(len(words)):
        at = words[i] - low
        if slots[at] < 0:
            if n == limit:
                return -1
            slots[at], found[n] = n, words[i]
            n += 1
        codes[i] = slots[at]
    return n


@njit
def distinct_words(words: Words, limit: int, known: Words) -> tuple[Words, Codes]:
    """``known`` distinct words and the new ones of ``words`` in order of first appearance, and the place of each of
    ``words`` among them; both empty where these are more than ``limit``."""
    found = np.empty(limit, np.uint64)
    codes = np.empty(len(words), np.uint32)
    if len(known) > limit:
        return found[:0], codes[:0]
    if len(known) == 0 and len(words) > 0:
        least, reach = _reach_of(words)
        if reach < np.uint64(_NEAR):
            near = np.full(np.int64(reach) + 1, -1, np.int64)
            held = _distinct_near(words, limit, least, near, found, codes, 0)
            return found[: max(held, 0)], codes[: len(words) if held >= 0 else 0]
    size = 64
    while size < 4 * limit:
        size *= 2
    slots = np.full(size, -1, np.int64)
    n = 0
    for i in range(-len(known), len(words)):
        word = words[i] if i >= 0 else known[i + len(known)]
        at = np.int64(mix(word) & np.uint64(size - 1))
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
def code_words(words: Words, known: Words) -> Codes:
    """(n,) the place of each of ``words`` among the distinct ``known`` ones; 0xFFFFFFFF where it is not there."""
    # Of eight slots seven are free: most words that are not known fall on one, and are not compared.
    bits = 6
    while 1 << bits < 8 * len(known):
        bits += 1
    mask, shift = np.uint64((1 << bits) - 1), np.uint64(64 - bits)
    slots = np.full(1 << bits, 0xFFFFFFFF, np.uint32)
    codes = np.empty(len(words), np.uint32)
    for k in range(len(known)):
        at = (known[k] * GOLDEN) >> shift
        while slots[at] != 0xFFFFFFFF:
            at = (at + _ONE) & mask
        slots[at] = k
    for i in range(len(words)):
        word = words[i]
        at = (word * GOLDEN) >> shift
        code = slots[at]
        while code != 0xFFFFFFFF and known[code] != word:
            at = (at + _ONE) & mask
            code = slots[at]
        codes[i] = code
    return codes
