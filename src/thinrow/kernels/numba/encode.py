"""Encoding of fixed-width columns: first the smallest block of every stripe is planned, then all are written.

Worked example: one stripe of words ``[100, 115, 105]`` in one piece, 8 bytes each. Raw takes 24 bytes, bit-packing
``base 100, scale 5, q = [0, 3, 1]`` 32, delta more: the plan says raw. With 60 such words bit-packing (40) wins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.numba.encode_packed import (
    LANES,
    LANES_FROM,
    N_LENGTHS,
    NEVER,
    NO_CODE,
    fit,
    fit_affine,
    fit_codes,
    fit_delta,
    pack,
    pack_marked,
    packed_bytes,
)
from thinrow.kernels.numba.intrinsics import bit_length
from thinrow.kernels.numba.jit import njit

Array = npt.NDArray[Any]

ZERO, CONSTANT, PACKED, DELTA, DICTIONARY, LOCAL, RAW = 0, 1, 2, 3, 4, 5, 6
DECIMAL, MIXED, MARKED = 11, 12, 13
_BUCKETS = 8 + 4 * 28
#: Powers of ten that codec 11 divides by, and the bound of what is divided: integers below it are exact as floats.
_POWERS, _MOST = np.array([10.0**e for e in range(16)]), 2.0**51

#: Codes must save a byte for so many values, half a bit each: a look-up takes as long as all else.
CODE_MARGIN = 16
#: Most words of a local dictionary: they are sorted by insertion.
MAX_LOCAL = 4096


@njit
def _gcd(a: Any, b: Any) -> Any:
    while b:
        a, b = b, a % b
    return a


@njit
def _plan_affine(words: Array, start: int, stop: int) -> Any:
    """(base, scale, width, reach) of ``base + q * scale``: base is the least word, read as signed, and base + reach the
    greatest."""
    low = np.int64(words[start])
    high = low
    for r in range(start, stop):
        value = np.int64(words[r])
        low, high = min(low, value), max(high, value)
    base = np.uint64(low)
    reach = np.uint64(high) - base
    scale = reach
    for r in range(start, stop):
        if scale == np.uint64(1):
            break
        if (words[r] - base) % scale:
            scale = _gcd(words[r] - base, scale)
    if reach == np.uint64(0):
        return base, np.uint64(1), 0, reach
    return base, scale, bit_length(reach // scale), reach


@njit
def _plan_delta(words: Array, start: int, stop: int, restarts: Array, at: int) -> Any:
    """(min_delta, scale, width, number of restarts); ``restarts[at]`` is ``start``."""
    low, high = np.int64((1 << 63) - 1), np.int64(-(1 << 63))
    k = at
    while k < len(restarts) and restarts[k] < stop:
        first = restarts[k]
        k += 1
        for r in range(first + 1, restarts[k] if k < len(restarts) and restarts[k] < stop else stop):
            step = np.int64(words[r] - words[r - 1])
            low, high = min(low, step), max(high, step)
    n_restarts = k - at
    if n_restarts == stop - start:
        low = high = np.int64(0)
    base = np.uint64(low)
    reach = np.uint64(high) - base
    if reach == np.uint64(0):
        return base, np.uint64(1), 0, n_restarts
    scale = reach
    k = at
    for r in range(start, stop):
        if scale == np.uint64(1):
            break
        if k < len(restarts) and restarts[k] == r:
            k += 1
            continue
        if (words[r] - words[r - 1] - base) % scale:
            scale = _gcd(words[r] - words[r - 1] - base, scale)
    return base, scale, bit_length(reach // scale), n_restarts


@njit
def _distinct(
    words: Array, start: int, stop: int, best: int, stamp: int, slot_stamp: Array, slot_word: Array, found: Array
) -> int:
    """Number of distinct words, put into ``found``; -1 once a local dictionary cannot be below ``best`` bytes."""
    mask = np.uint64(len(slot_word) - 1)
    n = 0
    for r in range(start, stop):
        word = words[r]
        slot = ((word * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask
        while slot_stamp[slot] == stamp and slot_word[slot] != word:
            slot = (slot + np.uint64(1)) & mask
        if slot_stamp[slot] != stamp:
            if n == MAX_LOCAL or _local_bytes(stop - start, n + 1) >= best:
                return -1
            slot_stamp[slot] = stamp
            slot_word[slot] = word
            found[n] = word
            n += 1
    return n


@njit
def _local_bytes(n: int, distinct: int) -> int:
    return 8 + 8 * distinct + packed_bytes(n, bit_length(np.uint64(distinct - 1)))


@njit
def _is_decimal(value: Any, power: Any, kind: int) -> Any:
    """Whether an integer divided by ``power`` is ``value``, a float of ``kind`` bits."""
    scaled = value * power
    if not abs(scaled) < _MOST:
        return False
    found = np.rint(scaled) / power
    return np.float64(np.float32(found)) == value if kind == 32 else found == value


@njit
def _plan_decimal(words: Array, floats: Array, start: int, stop: int, kind: int, lengths: Array) -> Any:
    """(exponent, base, width, bytes packed) of ``(base + q) / 10^exponent``, bit for bit; or exponent -1."""
    none, e, last = (-1, np.uint64(0), 0, 0), 0, start
    for r in range(start, stop):
        # No integer is -0.0.
        if floats[r] == 0.0 and words[r] != np.uint64(0):
            return none
        while not _is_decimal(floats[r], _POWERS[e], kind):
            e, last = e + 1, r
            if e == len(_POWERS):
                return none
    power = _POWERS[e]
    # The rows before the one that asked for the last power were seen under a lower one.
    for r in range(start, last):
        if not _is_decimal(floats[r], power, kind):
            return none
    low: Any = _MOST
    high: Any = -_MOST
    for r in range(start, stop):
        q = np.rint(floats[r] * power)
        low, high = min(low, q), max(high, q)
    low = np.int64(low)
    lengths[:] = 0
    for r in range(start, stop):
        lengths[bit_length(np.uint64(np.int64(np.rint(floats[r] * power)) - low))] += 1
    size, width, _, _ = fit(lengths, stop - start)
    return e, np.uint64(low), width, size


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
def _plan_mixed(
    words: Array,
    start: int,
    stop: int,
    codes: Array,
    n_words: int,
    local_width: int,
    best: int,
    stamp: int,
    slot_stamp: Array,
    slot_word: Array,
) -> Any:
    """(bytes, words of the segment dictionary that it uses, the first ones, and of its own) of the smallest block of
    codec 12 below ``best``; ``best`` bytes where there is none."""
    mask = np.uint64(len(slot_word) - 1)
    n, distinct = stop - start, 0
    # Distinct words by their code, in buckets of which four double it; those without a code come last.
    by_code = np.zeros(_BUCKETS + 1, np.int64)
    for r in range(start, stop):
        word = words[r]
        slot = ((word * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask
        while slot_stamp[slot] == stamp and slot_word[slot] != word:
            slot = (slot + np.uint64(1)) & mask
        if slot_stamp[slot] != stamp:
            slot_stamp[slot], slot_word[slot] = stamp, word
            distinct += 1
            if n_words == 0:
                if distinct > MAX_LOCAL or _mixed_bytes(n, 0, distinct, local_width) >= best:
                    return best, 0, 0
            else:
                by_code[_BUCKETS if codes[r] == NO_CODE else _bucket(np.int64(codes[r]))] += 1
                # Words without a code are its own, and all need codes. Fewer values than in lanes may take more bytes.
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
def _plan(
    words: Array,
    floats: Array,
    kind: int,
    stripe_offsets: Array,
    restarts: Array,
    itemsize: int,
    codes: Array,
    n_words: int,
    codec: Array,
    width: Array,
    size: Array,
    base: Array,
    scale: Array,
    slot_stamp: Array,
    slot_word: Array,
    found: Array,
) -> None:
    piece, lengths = 0, np.zeros(N_LENGTHS, np.int64)
    for s in range(len(codec)):
        start, stop = stripe_offsets[s], stripe_offsets[s + 1]
        n = stop - start
        if n == 0:
            continue
        a, b, w, reach = _plan_affine(words, start, stop)
        base[s], scale[s], width[s] = a, b, w
        if w == 0:
            while piece < len(restarts) and restarts[piece] < stop:
                piece += 1
            if a != np.uint64(0):
                codec[s], size[s] = CONSTANT, 8
            continue
        d, e, v, n_restarts = _plan_delta(words, start, stop, restarts, piece)
        piece += n_restarts
        row_words = words[start:stop]
        other, bits = fit_affine(row_words, a, b, w, kind > 0, lengths)
        codec[s], size[s], width[s] = PACKED, 16 + other, bits
        cost, margin = size[s], n // CODE_MARGIN
        other, bits = fit_delta(row_words, d, e, v, w, restarts[piece - n_restarts : piece], start, lengths)
        other += 24 + (n_restarts * 4 + 7) // 8 * 8 + n_restarts * 8
        if other < cost:
            codec[s], size[s], base[s], scale[s], width[s] = DELTA, other, d, e, bits
            cost = other
        coded, coded_bits, lacking = NEVER, 0, 0
        if n_words > 0:
            coded, coded_bits, lacking = fit_codes(codes[start:stop], bit_length(reach), lengths)
            if lacking == 0 and coded + margin < cost:
                codec[s], size[s], width[s] = DICTIONARY, coded, coded_bits
                cost = coded + margin
        raw = (n * itemsize + 7) // 8 * 8
        # A local dictionary that costs as much as raw would win the tie by its lower id.
        limit = min(cost, raw + 1) - margin
        # What is larger than codec 13 loses to it, here and below.
        limit = limit if lacking == 0 else min(limit, coded + 1)
        distinct = _distinct(words, start, stop, limit, s, slot_stamp, slot_word, found)
        if distinct >= 0:
            codec[s], size[s], width[s] = LOCAL, _local_bytes(n, distinct), bit_length(np.uint64(distinct - 1))
            cost = size[s] + margin
        if raw < cost:
            codec[s], size[s], width[s] = RAW, raw, itemsize * 8
            cost = raw
        if kind > 0:
            exponent, c, u, other = _plan_decimal(words, floats, start, stop, kind, lengths)
            if exponent >= 0 and 16 + other < cost:
                codec[s], size[s], width[s] = DECIMAL, 16 + other, u
                cost = size[s]
                base[s], scale[s] = c, exponent | kind << 8
        stamp = len(codec) + s
        most = cost - margin if lacking == 0 else min(cost - margin, coded + 1)
        other, hot, own = _plan_mixed(
            words, start, stop, codes, n_words, bit_length(reach), most, stamp, slot_stamp, slot_word
        )
        if other < most:
            codec[s], size[s], width[s] = MIXED, other, bit_length(np.uint64(hot + own - 1))
            base[s], scale[s] = a, hot
            cost = other + margin
        if lacking > 0 and coded + margin < cost:
            codec[s], size[s], width[s], base[s], scale[s] = MARKED, coded, coded_bits, a, lacking
        if n - (lacking if codec[s] == MARKED else 0) >= LANES_FROM and codec[s] != RAW:
            width[s] |= LANES


def _scratch(stripe_offsets: Array) -> tuple[Array, Array, Array]:
    """Slot stamps and words of a hash table for any stripe (twice its rows or more), and room for distinct words."""
    rows = int(np.diff(stripe_offsets).max(initial=1))
    n_slots = 2 << rows.bit_length()
    return np.full(n_slots, -1, np.int64), np.zeros(n_slots, np.uint64), np.zeros(MAX_LOCAL, np.uint64)


def _floats(words: Array, kind: int) -> Array:
    """The floats of ``kind`` bits that words are."""
    if kind == 32:
        return words.astype(np.uint32).view(np.float32).astype(np.float64)
    return words.view(np.float64) if kind == 64 else np.empty(0)


def plan_blocks(
    words: Array, kind: int, stripe_offsets: Array, restarts: Array, itemsize: int, codes: Array, n_words: int
) -> tuple[Array, Array, Array, Array, Array]:
    """The smallest plain block (codecs 0 to 6, 11 to 13) of each stripe; ties go to the lower codec.

    Args:
        words: (R,) uint64.
        kind: 32 or 64 where words are floats of so many bits, 0 where they are integers.
        stripe_offsets: (S + 1,) int64, rows of each stripe.
        restarts: (P,) int64 ascending rows where a piece begins; every stripe's first row is one.
        itemsize: bytes of a raw value.
        codes: (R,) uint32 codes into the segment dictionary, ``NO_CODE`` where it lacks the word; ignored where
            ``n_words`` is 0.
        n_words: words in the segment dictionary.

    Returns:
        codec (S,) uint8, width (S,) uint8, size (S,) int64 bytes, base and scale (S,) uint64.
    """
    n = len(stripe_offsets) - 1
    codec, width, size = np.zeros(n, np.uint8), np.zeros(n, np.uint8), np.zeros(n, np.int64)
    base, scale = np.zeros(n, np.uint64), np.ones(n, np.uint64)
    plan = (codec, width, size, base, scale)
    with np.errstate(invalid="ignore"):
        floats = _floats(words, kind)
    scratch = _scratch(stripe_offsets)
    _plan(words, floats, kind, stripe_offsets, restarts, itemsize, codes, n_words, *plan, *scratch)
    return plan


@njit
def _delta_header(words: Array, start: int, stop: int, restarts: Array, at: int, out: Array) -> int:
    """Restarts of codec 3 into ``out`` (uint64, zeros), from its third word on; returns the words before q."""
    n = 0
    while at + n < len(restarts) and restarts[at + n] < stop:
        n += 1
    out[2] = np.uint64(n)
    values = 3 + (n + 1) // 2
    for i in range(n):
        row = restarts[at + i]
        out[3 + i // 2] |= np.uint64(row - start) << np.uint64(32 * (i & 1))
        out[values + i] = words[row]
    return values + n


@njit
def _sort(words: Array) -> None:
    """Ascending, by insertion."""
    for i in range(1, len(words)):
        word = words[i]
        j = i
        while j > 0 and words[j - 1] > word:
            words[j] = words[j - 1]
            j -= 1
        words[j] = word


@njit
def _divide(q: Array, scale: Any) -> None:
    if scale != np.uint64(1):
        for r in range(len(q)):
            q[r] //= scale


@njit
def _quotients(words: Array, kind: int, base: Any, scale: Any, restarts: Array, start: int, q: Array) -> None:
    """What codecs 2, 3 and 6 pack; ``words`` and ``restarts`` begin with the stripe's, whose first row is ``start``."""
    if kind == PACKED:
        for r in range(len(q)):
            q[r] = words[r] - base
        _divide(q, scale)
        return
    if kind == RAW:
        for r in range(len(q)):
            q[r] = words[r]
        return
    q[0] = 0
    for r in range(1, len(q)):
        q[r] = words[r] - words[r - 1] - base
    _divide(q, scale)
    for i in range(len(restarts)):
        row = restarts[i] - start
        if row >= len(q):
            break
        q[row] = 0


@njit
def _ranks(words: Array, table: Array, q: Array) -> None:
    """Position in the ascending ``table`` of each word; all of them are there."""
    for r in range(len(q)):
        low, high = 0, len(table) - 1
        while low < high:
            middle = (low + high) >> 1
            if table[middle] < words[r]:
                low = middle + 1
            else:
                high = middle
        q[r] = low


@njit
def _write_mixed(
    words: Array,
    start: int,
    stop: int,
    codes: Array,
    hot: Any,
    base: Any,
    stamp: int,
    out: Array,
    q: Array,
    slot_stamp: Array,
    slot_word: Array,
    found: Array,
) -> int:
    """Head and own words of a block of codec 12 into ``out``, codes into ``q``; the words before the packed codes."""
    mask = np.uint64(len(slot_word) - 1)
    n, reach = 0, np.uint64(0)
    for r in range(start, stop):
        word = words[r]
        reach = max(reach, word - base)
        if hot > 0 and codes[r] < hot:
            continue
        slot = ((word * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask
        while slot_stamp[slot] == stamp and slot_word[slot] != word:
            slot = (slot + np.uint64(1)) & mask
        if slot_stamp[slot] != stamp:
            slot_stamp[slot], slot_word[slot] = stamp, word
            found[n] = word - base
            n += 1
    table = found[:n]
    _sort(table)
    for r in range(start, stop):
        q[r - start] = words[r] - base
    _ranks(q, table, q)
    for r in range(start, stop):
        q[r - start] = codes[r] if hot > 0 and codes[r] < hot else q[r - start] + np.uint64(hot)
    width = bit_length(reach)
    out[0], out[1] = np.uint64(hot) | np.uint64(n) << np.uint64(32), base
    out[2] = width | LANES if n >= LANES_FROM else width
    pack(table, np.int64(out[2]), out[3:])
    return 3 + packed_bytes(n, width) // 8


@njit
def _write(
    words: Array,
    stripe_offsets: Array,
    restarts: Array,
    codes: Array,
    codec: Array,
    width: Array,
    base: Array,
    scale: Array,
    floats: Array,
    offsets: Array,
    blocks: Array,
    slot_stamp: Array,
    slot_word: Array,
    found: Array,
    numbers: Array,
) -> None:
    piece = 0
    for s in range(len(codec)):
        start, stop = stripe_offsets[s], stripe_offsets[s + 1]
        out = blocks[offsets[s] // 8 : offsets[s + 1] // 8]
        q = numbers[: stop - start]
        kind: Any = np.int64(codec[s])
        packed = 0
        if kind == ZERO:
            continue
        if kind == CONSTANT:
            out[0] = base[s]
            continue
        if kind == DICTIONARY:
            for r in range(len(q)):
                q[r] = codes[start + r]
        elif kind == MIXED:
            packed = _write_mixed(
                words, start, stop, codes, np.int64(scale[s]), base[s], s, out, q, slot_stamp, slot_word, found
            )
        elif kind == MARKED:
            packed, q = pack_marked(words[start:stop], codes[start:stop], base[s], out, q)
        elif kind == DECIMAL:
            power = _POWERS[scale[s] & np.uint64(0xFF)]
            out[0], out[1], packed = base[s], scale[s], 2
            for r in range(len(q)):
                q[r] = np.uint64(np.int64(np.rint(floats[start + r] * power))) - base[s]
        elif kind == LOCAL:
            n = _distinct(words, start, stop, 1 << 62, s, slot_stamp, slot_word, found)
            table = out[1 : 1 + n]
            for i in range(n):
                table[i] = found[i]
            _sort(table)
            _ranks(words[start:stop], table, q)
            out[0] = n
            packed = 1 + n
        else:
            if kind != RAW:
                out[0], out[1] = base[s], scale[s]
                packed = 2
            if kind == DELTA:
                while restarts[piece] < start:
                    piece += 1
                packed = _delta_header(words, start, stop, restarts, piece, out)
            _quotients(words[start:stop], kind, base[s], scale[s], restarts[piece:], start, q)
        pack(q, np.int64(width[s]), out[packed:])


def write_blocks(
    words: Array,
    kind: int,
    stripe_offsets: Array,
    restarts: Array,
    itemsize: int,
    codes: Array,
    n_words: int,
    codec: Array,
    width: Array,
    base: Array,
    scale: Array,
    offsets: Array,
    payload: Array,
) -> None:
    """Write the planned blocks of all stripes one after another.

    Args: those of ``plan_blocks`` and what it returned; ``offsets`` (S + 1,) int64 of the blocks in ``payload``
    (uint8 zeros, ``offsets[-1]`` of them).
    """
    slot_stamp, slot_word, found = _scratch(stripe_offsets)
    with np.errstate(invalid="ignore"):
        floats = _floats(words, kind)
    plan = (codec, width, base, scale, floats, offsets, payload.view(np.uint64))
    scratch = (slot_stamp, slot_word, found, np.empty_like(slot_word))
    _write(words, stripe_offsets, restarts, codes, *plan, *scratch)
