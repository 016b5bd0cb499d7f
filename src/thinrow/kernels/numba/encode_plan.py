"""The smallest plain block of a stripe: what each codec would take, without writing it.

Worked example: one stripe of words ``[100, 115, 105]`` in one piece, 8 bytes each. Raw takes 24 bytes, bit-packing
``base 100, scale 5, q = [0, 3, 1]`` 32, delta more: the plan says raw. With 60 such words bit-packing (40) wins.

A stripe is gone over several times while it lies in the nearest cache. What is dear (hash tables of its words) is only
done where a bound that is cheap to find does not rule it out already: the choice is the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.encode_packed import (
    LANES,
    LANES_FROM,
    N_LENGTHS,
    NEVER,
    NO_CODE,
    NO_LENGTH,
    divide,
    fit,
    fit_codes,
    inverse_of,
    packed_bytes,
    tally,
)
from thinrow.kernels.numba.intrinsics import bit_length, trailing_zeros
from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

ZERO, CONSTANT, PACKED, DELTA, DICTIONARY, LOCAL, RAW = 0, 1, 2, 3, 4, 5, 6
DECIMAL, MIXED, MARKED = 11, 12, 13
_BUCKETS = 8 + 4 * 28
#: Powers of ten that codec 11 divides by, and the bound of what is divided: integers below it are exact as floats.
POWERS, _MOST = np.array([10.0**e for e in range(16)]), 2.0**51
#: Codes must save a byte for so many values, half a bit each: a look-up takes as long as all else.
CODE_MARGIN = 16
#: Most words of a local dictionary: they are sorted by insertion.
MAX_LOCAL = 4096
#: Places of hashes that are marked to see how many words there are at least, 2^13.
_SEEN, _SEEN_SHIFT = 1 << 13, np.uint64(64 - 13)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
#: Floats that are looked at together.
_TOGETHER = 64


class Room(NamedTuple):
    """Scratch arrays, of as many places as the longest stripe has rows unless said.

    Attributes:
        q, step: (rows + 1,) uint64 what is packed.
        lengths, fresh: (65,) int64 how many values, and how many distinct words by their codes, are of each length.
        room, counts: uint8 and (4 * 65,) int32, see ``tally``.
        slots, seen: uint16 hashes of words; (2^13,) uint8 which of them were seen.
        halves, floats: uint32 and float64, what words are as floats.
        slot_stamp, slot_word: int64 and uint64, a hash table of twice the rows or more.
        found: (4096,) uint64 distinct words.
    """

    q: Array
    step: Array
    lengths: Array
    fresh: Array
    room: Array
    counts: Array
    slots: Array
    seen: Array
    halves: Array
    floats: Array
    slot_stamp: Array
    slot_word: Array
    found: Array


def room_for(stripe_offsets: Array) -> Room:
    """Scratch for any of the stripes."""
    rows = int(np.diff(stripe_offsets).max(initial=1))
    n_slots = 2 << rows.bit_length()
    return Room(
        np.empty(rows + 1, np.uint64),
        np.empty(rows + 1, np.uint64),
        np.zeros(N_LENGTHS, np.int64),
        np.zeros(N_LENGTHS, np.int64),
        np.empty(rows, np.uint8),
        np.empty(4 * N_LENGTHS, np.int32),
        np.empty(rows, np.uint16),
        np.zeros(_SEEN, np.uint8),
        np.empty(rows, np.uint32),
        np.empty(rows, np.float64),
        np.full(n_slots, -1, np.int64),
        np.zeros(n_slots, np.uint64),
        np.zeros(MAX_LOCAL, np.uint64),
    )


@njit
def _gcd(a: Any, b: Any) -> Any:
    while b:
        a, b = b, a % b
    return a


@njit
def _multiples(q: Array, odd: Any) -> bool:
    """Whether ``odd`` divides all of ``q``: the product with its inverse is small of multiples only."""
    inverse, most, bad = inverse_of(odd), np.uint64(0xFFFFFFFFFFFFFFFF) // odd, 0
    for r in range(len(q)):
        bad += q[r] * inverse > most
    return bad == 0


@njit
def _scale_of(q: Array, reach: Any) -> Any:
    """The greatest number that divides ``reach`` (not 0) and all of ``q``."""
    bits = reach
    for r in range(len(q)):
        bits |= q[r]
    shift = np.uint64(trailing_zeros(bits))
    scale, at, n = reach >> shift, 0, 8
    while not scale & _ONE:
        scale >>= _ONE
    # A power of two that is not in all of them is in none of what they share.
    while at < len(q) and scale != _ONE:
        part = q[at : at + n]
        if not _multiples(part, scale):
            for r in range(len(part)):
                if scale == _ONE:
                    break
                if part[r] % scale:
                    scale = _gcd(part[r], scale)
        at, n = at + n, 2 * n
    return scale << shift


@njit
def _reach(signed: Array) -> Any:
    """The least of ``signed``, and how far above it the greatest is."""
    low = high = signed[0]
    for r in range(len(signed)):
        low, high = min(low, signed[r]), max(high, signed[r])
    return np.uint64(low), np.uint64(high) - np.uint64(low)


@njit
def from_word(words: Array, base: Any, q: Array) -> None:
    """Words less ``base``."""
    for r in range(len(q)):
        q[r] = words[r] - base


@njit
def steps_of(words: Array, rows: Array, start: Any, step: Array) -> Any:
    """The steps from word to word into ``step`` but where a piece begins, at ``rows`` less ``start``; the least, read
    as signed, and how far above it the greatest is. 0 and 0 where all begin one."""
    for r in range(1, len(words)):
        step[r] = words[r] - words[r - 1]
    signed = step.view(np.int64)
    low, high = np.int64((1 << 63) - 1), np.int64(-(1 << 63))
    for k in range(len(rows)):
        part = signed[rows[k] - start + 1 : rows[k + 1] - start if k + 1 < len(rows) else len(words)]
        for r in range(len(part)):
            low, high = min(low, part[r]), max(high, part[r])
    if len(rows) == len(words):
        low = high = np.int64(0)
    return np.uint64(low), np.uint64(high) - np.uint64(low)


@njit
def from_base(rows: Array, start: Any, base: Any, step: Array) -> None:
    """Steps less ``base``, 0 where a piece begins: what codec 3 packs, times its scale."""
    for r in range(len(step)):
        step[r] -= base
    for k in range(len(rows)):
        step[rows[k] - start] = 0


@njit
def distinct_words(words: Array, best: int, stamp: int, at: Room) -> int:
    """Number of distinct words, put into ``found``; -1 once a local dictionary cannot be below ``best`` bytes."""
    mask, n = np.uint64(len(at.slot_word) - 1), 0
    for r in range(len(words)):
        word = words[r]
        slot = ((word * _MIX) >> np.uint64(32)) & mask
        while at.slot_stamp[slot] == stamp and at.slot_word[slot] != word:
            slot = (slot + _ONE) & mask
        if at.slot_stamp[slot] != stamp:
            if n == MAX_LOCAL or _local_bytes(len(words), n + 1) >= best:
                return -1
            at.slot_stamp[slot] = stamp
            at.slot_word[slot] = word
            at.found[n] = word
            n += 1
    return n


@njit
def _local_bytes(n: int, distinct: int) -> int:
    return 8 + 8 * distinct + packed_bytes(n, bit_length(np.uint64(distinct - 1)))


@njit
def _at_least(words: Array, codes: Array, stamp: Any, at: Room) -> Any:
    """A lower bound of the number of distinct words, and into ``fresh`` of those whose codes are of each length; words
    without one have the length of ``NO_CODE``. ``stamp``, 1 to 255, is one that ``seen`` does not hold."""
    n, slots, seen, fresh, room = 0, at.slots, at.seen, at.fresh, at.room
    fresh[:] = 0
    for r in range(len(words)):
        slots[r] = (words[r] * _MIX) >> _SEEN_SHIFT
    if len(codes) == 0:
        for r in range(len(words)):
            n += seen[slots[r]] != stamp
            seen[slots[r]] = stamp
        fresh[NO_LENGTH] = n
        return n
    for r in range(len(words)):
        room[r] = bit_length(np.uint64(codes[r]))
    for r in range(len(words)):
        new = seen[slots[r]] != stamp
        n += new
        fresh[room[r]] += new
        seen[slots[r]] = stamp
    return n


@njit
def to_floats(words: Array, kind: int, at: Room) -> Array:
    """The floats of ``kind`` bits that words are."""
    halves, floats = at.halves[: len(words)], at.floats[: len(words)]
    if kind == 64:
        return words.view(np.float64)
    for r in range(len(words)):
        halves[r] = np.uint32(words[r] & np.uint64(0xFFFFFFFF))
    singles = halves.view(np.float32)
    for r in range(len(words)):
        floats[r] = singles[r]
    return floats


@njit
def _is_decimal(value: Any, power: Any, kind: int) -> Any:
    """Whether an integer divided by ``power`` is ``value``, a float of ``kind`` bits."""
    scaled = value * power
    if not abs(scaled) < _MOST:
        return False
    found = np.rint(scaled) / power
    return np.float64(np.float32(found)) == value if kind == 32 else found == value


@njit
def _are_decimal(floats: Array, power: Any, kind: int) -> bool:
    """Whether all are."""
    bad = 0
    if kind == 32:
        for r in range(len(floats)):
            scaled = floats[r] * power
            found = np.float64(np.float32(np.rint(scaled) / power))
            bad += (not abs(scaled) < _MOST) | (found != floats[r])
    else:
        for r in range(len(floats)):
            scaled = floats[r] * power
            bad += (not abs(scaled) < _MOST) | (np.rint(scaled) / power != floats[r])
    return bad == 0


@njit
def integers_of(floats: Array, power: Any, q: Array) -> None:
    """Floats times ``power``, rounded: int64 into ``q``."""
    for r in range(len(floats)):
        q[r] = np.int64(np.rint(floats[r] * power))


@njit
def _plan_decimal(words: Array, kind: int, at: Room) -> Any:
    """(exponent, base, width, bytes packed) of ``(base + q) / 10^exponent``, bit for bit; or exponent -1."""
    none, floats, n, bad = (-1, np.uint64(0), 0, 0), to_floats(words, kind, at), len(words), 0
    # No integer is -0.0.
    for r in range(n):
        bad += (floats[r] == 0.0) & (words[r] != np.uint64(0))
    if bad:
        return none
    e, last, first = 0, 0, 0
    while first < n:
        stop = min(first + _TOGETHER, n)
        if not _are_decimal(floats[first:stop], POWERS[e], kind):
            for r in range(first, stop):
                while not _is_decimal(floats[r], POWERS[e], kind):
                    e, last = e + 1, r
                    if e == len(POWERS):
                        return none
        first = stop
    # The rows before the one that asked for the last power were seen under a lower one.
    if not _are_decimal(floats[:last], POWERS[e], kind):
        return none
    q = at.q[:n]
    signed = q.view(np.int64)
    integers_of(floats, POWERS[e], signed)
    low, _ = _reach(signed)
    for r in range(n):
        q[r] -= low
    tally(q, at.lengths, at.room, at.counts)
    size, width, _, _ = fit(at.lengths, n)
    return e, low, width, size


@njit
def _bucket(code: Any) -> Any:
    """Bucket of a code: one each below 8, then four from each power of two to the next."""
    if code < 8:
        return code
    b = bit_length(np.uint64(code))
    return 8 + (b - 4) * 4 + ((code >> (b - 3)) & 3)


@njit
def _bound(bucket: int) -> int:
    """The codes of a bucket and of those before it are below this."""
    return bucket + 1 if bucket < 8 else (5 + ((bucket - 8) & 3)) << ((bucket - 8 >> 2) + 1)


@njit
def _mixed_bytes(n: int, hot: int, local: int, local_width: int) -> int:
    return 24 + packed_bytes(local, local_width) + packed_bytes(n, bit_length(np.uint64(hot + local - 1)))


@njit
def _own_bytes(own: int, width: int) -> int:
    """Bytes that so many words or more take at least: fewer values than in lanes may take more."""
    return packed_bytes(own, width) if own >= LANES_FROM else 0


@njit
def _mixed_at_least(n: int, distinct: int, local_width: int, n_words: int, fresh: Array) -> int:
    """A lower bound of the bytes of codec 12, of lower bounds of what a stripe holds, see ``_at_least``."""
    least = _own_bytes(distinct, local_width) + packed_bytes(n, bit_length(np.uint64(distinct - 1)))
    own: Any = distinct
    for k in range(bit_length(np.uint64(n_words)) + 1):
        # With more than half of 1 << k codes, at most all, its own words are those without one and those beyond.
        own -= fresh[k]
        width = bit_length(np.uint64((1 << k >> 1) + own))
        least = min(least, _own_bytes(own, local_width) + packed_bytes(n, width))
    return 24 + least


@njit
def _plan_mixed(words: Array, codes: Array, n_words: int, local_width: int, best: int, stamp: int, at: Room) -> Any:
    """(bytes, words of the segment dictionary that it uses, the first ones, and of its own) of the smallest block of
    codec 12 below ``best``; ``best`` bytes where there is none."""
    mask = np.uint64(len(at.slot_word) - 1)
    n, distinct = len(words), 0
    # Distinct words by their code, in buckets of which four double it; those without a code come last.
    by_code = np.zeros(_BUCKETS + 1, np.int64)
    for r in range(n):
        word = words[r]
        slot = ((word * _MIX) >> np.uint64(32)) & mask
        while at.slot_stamp[slot] == stamp and at.slot_word[slot] != word:
            slot = (slot + _ONE) & mask
        if at.slot_stamp[slot] != stamp:
            at.slot_stamp[slot], at.slot_word[slot] = stamp, word
            distinct += 1
            if n_words == 0:
                if distinct > MAX_LOCAL or _mixed_bytes(n, 0, distinct, local_width) >= best:
                    return best, 0, 0
            else:
                by_code[_BUCKETS if codes[r] == NO_CODE else _bucket(np.int64(codes[r]))] += 1
                # Words without a code are its own, and all need codes.
                rare = by_code[_BUCKETS]
                if rare >= LANES_FROM and _mixed_bytes(n, distinct - rare, rare, local_width) >= best:
                    return best, 0, 0
    size, hot, own = best, 0, distinct
    if distinct <= MAX_LOCAL:
        size = min(size, _mixed_bytes(n, 0, distinct, local_width))
    local = distinct
    for b in range(_BUCKETS):
        most = min(_bound(b), n_words)
        local -= by_code[b]
        if n_words > 0 and local <= MAX_LOCAL:
            other = _mixed_bytes(n, most, local, local_width)
            if other < size:
                size, hot, own = other, most, local
        if most == n_words:
            break
    return size, hot, own


@njit
def _least_packed(q: Array) -> int:
    """Bytes that these ``LANES_FROM`` values or more, not all 0, take at least in any form: each its own bits."""
    bits, n = 0, len(q)
    for r in range(n):
        bits += bit_length(q[r])
    return max(bits >> 3, min(packed_bytes(n, 1), 8 + (n + 63) // 64 * 8))


@njit
def _fit_affine(width: Any, scale: Any, is_float: bool, q: Array, at: Room) -> Any:
    """(bytes, width) of ``q / scale``, the longest of which has ``width`` bits; of floats without patches."""
    if len(q) < LANES_FROM or width < 2 or is_float:
        return packed_bytes(len(q), width), width
    divide(q, scale)
    tally(q, at.lengths, at.room, at.counts)
    size, width, _, _ = fit(at.lengths, len(q))
    return size, width


@njit
def _plan_delta(words: Array, rows: Array, start: Any, most: Any, at: Room) -> Any:
    """(base, scale, bytes, width) of codec 3, of the stripe from row ``start`` on with pieces from ``rows`` on: with
    patches where the steps have ``most`` bits or fewer."""
    step = at.step[: len(words)]
    base, reach = steps_of(words, rows, start, step)
    scale, n, width = _ONE, len(words), 0
    if reach > np.uint64(0):
        from_base(rows, start, base, step)
        scale = _scale_of(step, reach)
        width = bit_length(reach // scale)
    size = packed_bytes(n, width)
    if n >= LANES_FROM and 2 <= width <= most:
        divide(step, scale)
        tally(step, at.lengths, at.room, at.counts)
        size, width, _, _ = fit(at.lengths, n)
    return base, scale, 24 + (len(rows) * 4 + 7) // 8 * 8 + len(rows) * 8 + size, width


@njit
def plan_stripe(
    words: Array,
    rows: Array,
    start: Any,
    kind: int,
    itemsize: int,
    codes: Array,
    n_words: int,
    stamps: Any,
    at: Room,
) -> Any:
    """(codec, width, bytes, base, scale) of a stripe that is not empty.

    Args:
        words: (n,) those of the stripe, which begins at row ``start``.
        rows: where its pieces begin, the first at ``start``.
        codes: (n,) those of the stripe; empty where ``n_words`` is 0.
        stamps: three stamps: one that ``seen`` does not hold, two that ``slot_stamp`` does not hold.
    """
    n = len(words)
    a, reach = _reach(words.view(np.int64))
    if reach == np.uint64(0):
        return (CONSTANT if a else ZERO), 0, (8 if a else 0), a, _ONE
    best: Any = (PACKED, 64, NEVER, a, _ONE)
    q, local_width, margin = at.q[:n], bit_length(reach), n // CODE_MARGIN
    from_word(words, a, q)
    e = _scale_of(q, reach)
    whole = bit_length(reach // e)
    base, scale, size, width = _plan_delta(words, rows, start, whole, at)
    coded, coded_bits, lacking = NEVER, 0, 0
    if n_words > 0:
        coded, coded_bits, lacking = fit_codes(codes, local_width, at.lengths, at.room, at.counts)
    # What surely loses to steps or to codes need not be known.
    if n < LANES_FROM or kind > 0 or e != _ONE or 16 + _least_packed(q) <= min(size, coded + margin):
        other, bits = _fit_affine(whole, e, kind > 0, q, at)
        best = PACKED, bits, 16 + other, a, e
    if size < best[2]:
        best = DELTA, width, size, base, scale
    cost = best[2]
    if n_words > 0 and lacking == 0 and coded + margin < cost:
        best, cost = (DICTIONARY, coded_bits, coded, best[3], best[4]), coded + margin
    raw = (n * itemsize + 7) // 8 * 8
    # A local dictionary that costs as much as raw would win the tie by its lower id.
    limit = min(cost, raw + 1) - margin
    # What is larger than codec 13 loses to it, here and below.
    limit = limit if lacking == 0 else min(limit, coded + 1)
    # There are two words or more.
    least, known = 2, _local_bytes(n, 2) < limit
    if known:
        least = _at_least(words, codes, stamps[0], at)
    if least <= MAX_LOCAL and _local_bytes(n, least) < limit:
        distinct = distinct_words(words, limit, stamps[1], at)
        if distinct >= 0:
            size, width = _local_bytes(n, distinct), bit_length(np.uint64(distinct - 1))
            best, cost = (LOCAL, width, size, best[3], best[4]), size + margin
    if raw < cost:
        best, cost = (RAW, itemsize * 8, raw, best[3], best[4]), raw
    if kind > 0:
        exponent, c, u, other = _plan_decimal(words, kind, at)
        if exponent >= 0 and 16 + other < cost:
            best, cost = (DECIMAL, u, 16 + other, c, np.uint64(exponent | kind << 8)), 16 + other
    most = cost - margin if lacking == 0 else min(cost - margin, coded + 1)
    if not known and 24 + packed_bytes(n, 1) < most:
        least, known = _at_least(words, codes, stamps[0], at), True
    if known and _mixed_at_least(n, least, local_width, n_words, at.fresh) < most:
        other, hot, own = _plan_mixed(words, codes, n_words, local_width, most, stamps[2], at)
        if other < most:
            width = bit_length(np.uint64(hot + own - 1))
            best, cost = (MIXED, width, other, a, np.uint64(hot)), other + margin
    if lacking > 0 and coded + margin < cost:
        best = MARKED, coded_bits, coded, a, np.uint64(lacking)
    packed = n - (lacking if best[0] == MARKED else 0)
    if packed >= LANES_FROM and best[0] != RAW:
        return best[0], best[1] | LANES, best[2], best[3], best[4]
    return best
