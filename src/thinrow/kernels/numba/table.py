"""Kernels of the dynamic embedding table in compiled loops; ``kernels.reference.table`` defines what they do.

Blocks reach the loops as an array of addresses, so a loop is compiled once for any number of blocks. Look-ups, copies,
sums and updates run on several threads: each output row is made by one of them, in a fixed order, so the number of
threads changes no bit. What a loop will need ``_AHEAD`` items later is prefetched: at 1M rows of 256 bytes that took a
fifth off copies, a third off sums and a tenth off updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from thinrow.core.blocks import addresses_of
from thinrow.core.pool import empty
from thinrow.core.wrap import GOLDEN64, MASK64, mix64
from thinrow.kernels.numba.intrinsics import (
    LINE,
    address,
    pass_line,
    pointer_like,
    popcount,
    prefetch,
    prefetch_range,
    trailing_zeros,
)
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.scalar import GOLDEN, mix
from thinrow.kernels.numba.threads import even_bounds, slice_count, spread
from thinrow.kernels.reference import table as reference

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]

_S16, _S32, _S40 = np.uint64(16), np.uint64(32), np.uint64(40)
_HALVES, _LOW = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)

_AHEAD = 16
_PAST_BYTES = 1 << 22
#: Bits of a row number that one pass of the sort looks at, at most.
_DIGIT = 11
#: Rows are marked in a map of all rows while there are so many for a position at most, and sorted above.
_ROWS_A_POSITION = 64


@njit
def _address(addresses: Ints, shift: int, row: int, row_bytes: int) -> Any:
    return addresses[row >> shift] + (row & ((1 << shift) - 1)) * row_bytes


@njit
def _touch(addresses: Ints, shift: int, rows: Ints, step: int) -> None:
    for i in range(len(rows)):
        if i + _AHEAD < len(rows) and rows[i + _AHEAD] >= 0:
            prefetch(_address(addresses, shift, rows[i + _AHEAD], 16))
        if rows[i] >= 0:
            held = carray(pointer_like(_address(addresses, shift, rows[i], 16), rows), (2,))
            held[0] += 1
            held[1] = step


@njit
def _start(
    addresses: Ints, shift: int, like: Floats, row: int, keys: Ints, seeded: Any, scale: Any, normal: bool, first: int,
    last: int,
) -> None:  # fmt: skip
    width = like.shape[1]
    row_bytes = width * like.itemsize
    for i in range(first, last):
        value = carray(pointer_like(_address(addresses, shift, row + i, row_bytes), like), (width,))
        word = mix(np.uint64(keys[i]) ^ seeded)
        for c in range(width):
            # Two assignments: the first is exact in any dtype, the second rounds in the table's.
            if normal:
                total = np.uint64(6)
                for _ in range(3):
                    word += GOLDEN
                    total += _quarters(mix(word))
                value[c] = np.int64(total) * 2.0**-16 - 6.0
            else:
                word += GOLDEN
                value[c] = np.int64(mix(word) >> _S40) * 2.0**-23 - 1.0
            value[c] *= scale


@njit
def _quarters(word: Any) -> Any:
    """Sum of the four numbers of 16 bits in a word."""
    pairs = (word & _HALVES) + ((word >> _S16) & _HALVES)
    return (pairs & _LOW) + (pairs >> _S32)


@njit
def _gather(addresses: Ints, shift: int, n_rows: int, rows: Ints, out: Floats, first: int, last: int) -> int:
    width = out.shape[1]
    row_bytes = width * out.itemsize
    # What is larger than a cache would only push out of it what is read next.
    past = out.nbytes >= _PAST_BYTES and row_bytes % LINE == 0 and address(out) % LINE == 0
    bad = -1
    for i in range(first, last):
        if i + _AHEAD < last:
            row = rows[i + _AHEAD]
            if 0 <= row < n_rows:
                prefetch_range(_address(addresses, shift, row, row_bytes), row_bytes)
        row = rows[i]
        if past and 0 <= row < n_rows:
            begin = _address(addresses, shift, row, row_bytes)
            for at in range(0, row_bytes, LINE):
                pass_line(begin + at, address(out) + i * row_bytes + at)
        elif 0 <= row < n_rows:
            value = carray(pointer_like(_address(addresses, shift, row, row_bytes), out), (width,))
            for c in range(width):
                out[i, c] = value[c]
        elif row == -1:
            for c in range(width):
                out[i, c] = 0
        elif bad < 0:
            bad = i
    return bad


@njit
def _pool(
    addresses: Ints, shift: int, n_rows: int, rows: Ints, bounds: Ints, out: Floats, first: int, last: int
) -> int:
    width = out.shape[1]
    row_bytes = width * out.itemsize
    bad = -1
    for b in range(first, last):
        for c in range(width):
            out[b, c] = 0
        for i in range(bounds[b], bounds[b + 1]):
            if i + _AHEAD < len(rows):
                later = rows[i + _AHEAD]
                if 0 <= later < n_rows:
                    prefetch_range(_address(addresses, shift, later, row_bytes), row_bytes)
            row = rows[i]
            if 0 <= row < n_rows:
                value = carray(pointer_like(_address(addresses, shift, row, row_bytes), out), (width,))
                for c in range(width):
                    out[b, c] += value[c]
            elif row != -1 and bad < 0:
                bad = i
    return bad


@njit
def _sort_words(words: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64], bits: int) -> npt.NDArray[np.uint64]:
    """Words sorted by their ``bits`` from bit 32 on, stably; ``words`` or ``other``, which are both written."""
    passes = -(-bits // _DIGIT)
    # Passes alike: the fewer places a pass writes to, the more of them are in the nearest cache.
    digit = -(-bits // max(passes, 1))
    low = np.uint64((1 << digit) - 1)
    ends = np.zeros((passes, 1 << digit), np.int64)
    for word in words:
        for p in range(passes):
            ends[p, (word >> np.uint64(32 + p * digit)) & low] += 1
    for p in range(passes):
        total = 0
        for k in range(1 << digit):
            total, ends[p, k] = total + ends[p, k], total
        for word in words:
            at = (word >> np.uint64(32 + p * digit)) & low
            other[ends[p, at]] = word
            ends[p, at] += 1
        words, other = other, words
    return words


@njit
def _sorted_part(rows: Ints, low: int, high: int) -> tuple[npt.NDArray[np.uint64], int]:
    """The rows in [low, high), less ``low``, above their positions, sorted; and how many of them differ."""
    n, bits, differ = 0, 0, 0
    while (high - 1 - low) >> bits > 0:
        bits += 1
    words = np.empty(len(rows), np.uint64)
    for i in range(len(rows)):
        # Written always and counted if it is one: no branch that hangs on the data.
        words[n] = (np.uint64(rows[i] - low) << _S32) | np.uint64(i)
        n += (low <= rows[i]) & (rows[i] < high)
    words = words[:n]
    words = _sort_words(words, np.empty_like(words), bits)
    for i in range(n):
        differ += i == 0 or words[i] >> _S32 != words[i - 1] >> _S32
    return words, differ


@njit
def _number_sorted(words: npt.NDArray[np.uint64], low: int, first: int, distinct: Ints, places: Ints) -> None:
    """Number the rows of a ``_sorted_part`` from ``first`` on."""
    k = first - 1
    for i in range(len(words)):
        if i == 0 or words[i] >> _S32 != words[i - 1] >> _S32:
            k += 1
            distinct[k] = low + np.int64(words[i] >> _S32)
        places[words[i] & _LOW] = k


@njit
def _mark(rows: Ints, words: npt.NDArray[np.uint64]) -> Ints:
    """Sets bit ``row % 64`` of ``words[row // 64, 0]`` of every row; the distinct rows, ascending, and in column 1 how
    many are before a word's."""
    for row in rows:
        words[row >> 6, 0] |= np.uint64(1) << np.uint64(row & 63)
    n = 0
    for w in range(len(words)):
        words[w, 1] = n
        n += popcount(words[w, 0])
    distinct, k = np.empty(n, np.int64), 0
    for w in range(len(words)):
        word = words[w, 0]
        while word:
            distinct[k] = 64 * w + trailing_zeros(word)
            k += 1
            word &= word - np.uint64(1)
    return distinct


@njit
def _place(rows: Ints, words: npt.NDArray[np.uint64], places: Ints, first: int, last: int) -> None:
    for i in range(first, last):
        below = (np.uint64(1) << np.uint64(rows[i] & 63)) - np.uint64(1)
        places[i] = np.int64(words[rows[i] >> 6, 1]) + popcount(words[rows[i] >> 6, 0] & below)


@njit
def _sum(gradient: Floats, of: Ints, places: Ints, out: Floats, low: int, high: int) -> int:
    """``sum_rows`` of the places in [low, high); an empty ``of`` is none. The positions are gone through in their
    order: gradients come from memory nearly in order, and sums, which are fewer, mostly from a cache."""
    width, n = gradient.shape[1], 0
    row_bytes = width * gradient.itemsize
    source, target = np.empty(len(places), np.int64), np.empty(len(places), np.int64)
    for i in range(len(places)):
        source[n] = of[i] if len(of) else i
        target[n] = places[i]
        n += (low <= places[i]) & (places[i] < high)
    begin, out_begin = address(gradient), address(out)
    begun = np.zeros((high - low + 63) >> 6, np.uint64)
    bad = high
    for j in range(n):
        if j + _AHEAD < n:
            # What comes much later starts the prefetching of the processor itself, since positions ascend.
            prefetch(begin + source[min(j + 3 * _AHEAD, n - 1)] * row_bytes)
            prefetch_range(begin + source[j + _AHEAD] * row_bytes, row_bytes)
            prefetch_range(out_begin + target[j + _AHEAD] * row_bytes, row_bytes)
        at, k = source[j], target[j]
        word, bit = (k - low) >> 6, np.uint64(1) << np.uint64((k - low) & 63)
        if begun[word] & bit:
            for c in range(width):
                out[k, c] += gradient[at, c]
        else:
            begun[word] |= bit
            for c in range(width):
                out[k, c] = gradient[at, c]
        wrong = False
        for c in range(width):
            # x - x is 0 but for a NaN or an infinity, which a sum keeps; unlike isfinite it is vectorised.
            wrong |= out[k, c] - out[k, c] != 0
        if wrong and k < bad:
            bad = k
    return bad if bad < high else -1


@njit
def _adagrad(
    values: Ints, sums: Ints, shift: int, rows: Ints, gradient: Floats, scalars: Floats, first: int, last: int
) -> None:
    """``scalars`` is (lr, eps, decay) in the table's dtype."""
    width = gradient.shape[1]
    row_bytes = width * gradient.itemsize
    lr, eps, decay = scalars[0], scalars[1], scalars[2]
    for i in range(first, last):
        if i + _AHEAD < last:
            prefetch_range(_address(values, shift, rows[i + _AHEAD], row_bytes), row_bytes)
            prefetch_range(_address(sums, shift, rows[i + _AHEAD], row_bytes), row_bytes)
        value = carray(pointer_like(_address(values, shift, rows[i], row_bytes), gradient), (width,))
        total = carray(pointer_like(_address(sums, shift, rows[i], row_bytes), gradient), (width,))
        for c in range(width):
            g = gradient[i, c] if decay == 0 else gradient[i, c] + decay * value[c]
            s = total[c] + g * g
            total[c] = s
            value[c] -= lr * (g / (np.sqrt(s) + eps))


@njit
def _rowwise_adagrad(
    values: Ints, sums: Ints, shift: int, rows: Ints, gradient: Floats, scalars: Floats, first: int, last: int
) -> None:
    """``scalars`` as for ``_adagrad``."""
    width = gradient.shape[1]
    row_bytes = width * gradient.itemsize
    lr, eps, decay = scalars[0], scalars[1], scalars[2]
    total = np.empty(1, gradient.dtype)
    for i in range(first, last):
        if i + _AHEAD < last:
            prefetch_range(_address(values, shift, rows[i + _AHEAD], row_bytes), row_bytes)
            prefetch(_address(sums, shift, rows[i + _AHEAD], gradient.itemsize))
        value = carray(pointer_like(_address(values, shift, rows[i], row_bytes), gradient), (width,))
        held = carray(pointer_like(_address(sums, shift, rows[i], gradient.itemsize), gradient), (1,))
        # One after another: a sum in any other order would round otherwise.
        total[0] = 0
        for c in range(width):
            g = gradient[i, c] if decay == 0 else gradient[i, c] + decay * value[c]
            total[0] += g * g
        total[0] /= width
        held[0] += total[0]
        total[0] = np.sqrt(held[0])
        rate = total[0] + eps
        for c in range(width):
            g = gradient[i, c] if decay == 0 else gradient[i, c] + decay * value[c]
            value[c] -= lr * (g / rate)


@njit
def _sgd(values: Ints, shift: int, rows: Ints, gradient: Floats, scalars: Floats, first: int, last: int) -> None:
    """``scalars`` is (lr, decay) in the table's dtype."""
    width = gradient.shape[1]
    row_bytes = width * gradient.itemsize
    lr, decay = scalars[0], scalars[1]
    for i in range(first, last):
        if i + _AHEAD < last:
            prefetch_range(_address(values, shift, rows[i + _AHEAD], row_bytes), row_bytes)
        value = carray(pointer_like(_address(values, shift, rows[i], row_bytes), gradient), (width,))
        for c in range(width):
            g = gradient[i, c] if decay == 0 else gradient[i, c] + decay * value[c]
            value[c] -= lr * g


@njit
def _power(base: float, exponent: int) -> float:
    out = 1.0
    while exponent > 0:
        if exponent & 1:
            out *= base
        base *= base
        exponent >>= 1
    return out


@njit
def _adam(
    values: Ints,
    means: Ints,
    squares: Ints,
    steps: Ints,
    shift: int,
    rows: Ints,
    gradient: Floats,
    lr: float,
    beta1: float,
    beta2: float,
    scalars: Floats,
    first: int,
    last: int,
) -> None:
    """``scalars`` is (1 - beta1, beta2, 1 - beta2, eps, decay, 1 - lr * decoupled) in the table's dtype; the arithmetic
    of rows stays in it."""
    width = gradient.shape[1]
    row_bytes = width * gradient.itemsize
    rest1, keep2, rest2, eps = scalars[0], scalars[1], scalars[2], scalars[3]
    decay, kept = scalars[4], scalars[5]
    corrections = np.empty(2, gradient.dtype)
    for i in range(first, last):
        if i + _AHEAD < last:
            later = rows[i + _AHEAD]
            prefetch_range(_address(values, shift, later, row_bytes), row_bytes)
            prefetch_range(_address(means, shift, later, row_bytes), row_bytes)
            prefetch_range(_address(squares, shift, later, row_bytes), row_bytes)
            prefetch(_address(steps, shift, later, 8))
        value = carray(pointer_like(_address(values, shift, rows[i], row_bytes), gradient), (width,))
        mean = carray(pointer_like(_address(means, shift, rows[i], row_bytes), gradient), (width,))
        square = carray(pointer_like(_address(squares, shift, rows[i], row_bytes), gradient), (width,))
        step = carray(pointer_like(_address(steps, shift, rows[i], 8), rows), (1,))
        step[0] += 1
        corrections[0] = lr / (1.0 - _power(beta1, step[0]))
        corrections[1] = np.sqrt(1.0 - _power(beta2, step[0]))
        rate, root = corrections[0], corrections[1]
        for c in range(width):
            g = gradient[i, c] if decay == 0 else gradient[i, c] + decay * value[c]
            m = mean[c] + rest1 * (g - mean[c])
            v = keep2 * square[c] + rest2 * (g * g)
            mean[c] = m
            square[c] = v
            value[c] = value[c] * kept - rate * (m / (np.sqrt(v) / root + eps))


def touch_rows(usage: Sequence[Ints], rows: Ints, step: int) -> None:
    # In one thread: a row may be there more than once.
    _touch(addresses_of(usage), _shift(usage), rows, step)


def start_rows(blocks: Sequence[Floats], first: int, keys: Ints, seed: int, scale: float, normal: bool) -> None:
    if not blocks:
        return
    seeded = np.uint64(mix64((seed + GOLDEN64) & MASK64))
    addresses, shift, like = addresses_of(blocks), _shift(blocks), blocks[0]
    typed = like.dtype.type(scale)
    bounds = even_bounds(len(keys), _row_bytes(like))
    spread(lambda a, b: _start(addresses, shift, like, first, keys, seeded, typed, normal, a, b), bounds)


def gather_rows(blocks: Sequence[Floats], n_rows: int, rows: Ints, out: Floats) -> int:
    addresses, shift = addresses_of(blocks), _shift(blocks)
    bounds = even_bounds(len(rows), 2 * _row_bytes(out))
    return _first(spread(lambda a, b: _gather(addresses, shift, n_rows, rows, out, a, b), bounds))


def pool_rows(blocks: Sequence[Floats], n_rows: int, rows: Ints, bounds: Ints, out: Floats) -> int:
    addresses, shift = addresses_of(blocks), _shift(blocks)
    ends = _bounds_of_equal_parts(bounds, len(rows), _row_bytes(out))
    return _first(spread(lambda a, b: _pool(addresses, shift, n_rows, rows, bounds, out, a, b), ends))


def distinct_rows(rows: Ints, n_rows: int) -> tuple[Ints, Ints]:
    if max(len(rows), n_rows) > 1 << 32:
        # Row and position do not fit in a word.
        return reference.distinct_rows(rows, n_rows)
    places = empty(len(rows), np.int64)
    if n_rows <= _ROWS_A_POSITION * len(rows):
        words = np.zeros(((n_rows + 63) >> 6, 2), np.uint64)
        distinct = _mark(rows, words)
        spread(lambda a, b: _place(rows, words, places, a, b), even_bounds(len(rows), LINE))
        return distinct, places
    # A part a thread: low rows are those of the keys that came first, often used ones.
    cuts = _even_cuts(rows, slice_count(2 * rows.nbytes), n_rows)
    parts = spread(lambda a, b: _sorted_part(rows, a, b), cuts)
    ends = [0, *accumulate(differ for _, differ in parts)]
    distinct = np.empty(ends[-1], np.int64)
    spread(lambda k, _: _number_sorted(parts[k][0], cuts[k], ends[k], distinct, places), range(len(cuts)))
    return distinct, places


def sum_rows(gradient: Floats, of: Ints | None, places: Ints, out: Floats) -> int:
    given = np.empty(0, np.int64) if of is None else of
    cuts = _even_cuts(places, slice_count(len(places) * _row_bytes(gradient)), len(out))
    return _first(spread(lambda a, b: _sum(gradient, given, places, out, a, b), cuts))


def adagrad_rows(
    values: Sequence[Floats], sums: Sequence[Floats], rows: Ints, gradient: Floats, lr: float, eps: float, decay: float
) -> None:
    at, sums_at, shift = addresses_of(values), addresses_of(sums), _shift(values)
    scalars = np.array([lr, eps, decay], gradient.dtype)
    bounds = even_bounds(len(rows), 5 * _row_bytes(gradient))
    spread(lambda a, b: _adagrad(at, sums_at, shift, rows, gradient, scalars, a, b), bounds)


def rowwise_adagrad_rows(
    values: Sequence[Floats], sums: Sequence[Floats], rows: Ints, gradient: Floats, lr: float, eps: float, decay: float
) -> None:
    at, sums_at, shift = addresses_of(values), addresses_of(sums), _shift(values)
    scalars = np.array([lr, eps, decay], gradient.dtype)
    bounds = even_bounds(len(rows), 3 * _row_bytes(gradient))
    spread(lambda a, b: _rowwise_adagrad(at, sums_at, shift, rows, gradient, scalars, a, b), bounds)


def sgd_rows(values: Sequence[Floats], rows: Ints, gradient: Floats, lr: float, decay: float) -> None:
    at, shift, scalars = addresses_of(values), _shift(values), np.array([lr, decay], gradient.dtype)
    bounds = even_bounds(len(rows), 3 * _row_bytes(gradient))
    spread(lambda a, b: _sgd(at, shift, rows, gradient, scalars, a, b), bounds)


def adam_rows(
    values: Sequence[Floats],
    means: Sequence[Floats],
    squares: Sequence[Floats],
    steps: Sequence[Ints],
    rows: Ints,
    gradient: Floats,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    decoupled: float,
) -> None:
    v, m, s, t = (addresses_of(blocks) for blocks in (values, means, squares, steps))
    shift = _shift(values)
    scalars = np.array([1 - beta1, beta2, 1 - beta2, eps, decay, 1 - lr * decoupled], gradient.dtype)
    bounds = even_bounds(len(rows), 7 * _row_bytes(gradient))
    spread(lambda a, b: _adam(v, m, s, t, shift, rows, gradient, lr, beta1, beta2, scalars, a, b), bounds)


def _bounds_of_equal_parts(starts: Ints, n: int, item_bytes: int) -> list[int]:
    """Slices of the groups that begin at ``starts`` with about equally many of their n items each: a few groups can
    hold most of them."""
    count = slice_count(n * item_bytes)
    ends = np.searchsorted(starts[1:], [n * k // count for k in range(1, count)], side="right")
    return [0, *ends.tolist(), len(starts) - 1]


def _even_cuts(numbers: Ints, parts: int, n: int) -> list[int]:
    """Slices of [0, n) with about equally many of ``numbers`` each, by a sample of these."""
    sample = np.sort(numbers[:: max(1, len(numbers) // 1024)])
    return [0, *(int(sample[len(sample) * k // parts]) for k in range(1, parts)), n]


def _shift(blocks: Sequence[npt.NDArray[Any]]) -> int:
    return len(blocks[0]).bit_length() - 1 if blocks else 0


def _row_bytes(rows: Floats) -> int:
    return int(rows.shape[1]) * rows.itemsize


def _first(positions: list[int]) -> int:
    """The first that is not -1; slices are in order, so it is the lowest."""
    return next((p for p in positions if p >= 0), -1)
