"""The blocks that most of a batch is made of, decoded to their place in one go: lanes, patched or not, of codecs 2, 3,
11 and 13, whose items are as wide as the column usually is.

Worked example: a block of codec 13 of 64 rows, bit 3 of its marks set, codes ``[0, 1, 0, 1, ...]`` of the words ``[7,
9]``. The codes are unpacked to 16 bits and moved apart to their rows, ``[0, 1, 0, ., 1, ...]``; all are looked up,
``[7, 9, 7, ., 9, ...]``; then the block's own word goes to row 3. What is no such block, damaged ones too, is left to
the general way (``blocks``), which reads the same or says that it cannot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from thinrow.kernels.numba.intrinsics import (
    expand32,
    expanded_prefix64,
    pointer,
    popcount,
    prefix8,
    quotients16,
    trailing_zeros,
    word_at,
)
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.lanes import (
    LANES,
    PATCHED,
    add_lanes,
    add_patches,
    exact,
    head_of,
    marks_from,
    marks_sound,
    move,
    ones_at,
    packed_bytes,
    patches,
    patches_bytes,
)

Array = npt.NDArray[Any]

PACKED, DELTA, DECIMAL, MARKED = 2, 3, 11, 13
#: Rows at once.
_CHUNK = 512
#: Where, in scratch memory, codes moved to their rows begin; the codes themselves lie before it.
_APART = 2048
#: Integers up to this size are float32, and powers of ten up to this one; so their quotient is that of doubles, rounded
#: (a quotient rounded to 53 bits and then to 24 is as if rounded once: Figueroa 1995).
_EXACT, _POWERS = 1 << 24, np.array([10.0**e for e in range(11)], np.float32)
_ZERO, _ONE = np.uint64(0), np.uint64(1)


@njit
def _open(at: int, end: int, n: Any, width: Any) -> Any:
    """Of n packed values at an address that end where the block does, with the flag ``LANES`` in their width: (width in
    lanes, or 0 where they are not sound or of another form; address of the lanes; bits of a value)."""
    bits = width & (LANES - 1)
    if width < LANES or n == 0:
        return 0, at, 0
    if bits == PATCHED:
        if patches_bytes(at, end, n) != end - at:
            return 0, at, 0
        _, low, high, _, _, lanes = patches(at, n)
        return low, lanes, low + high
    # Of packed steps the width is said within the block, where nobody has looked at it.
    return (bits, at, bits) if bits <= 64 and at + packed_bytes(n, bits, True) == end else (0, at, 0)


@njit
def _packed(
    at: int, end: int, n_rows: int, width: Any, row: int, stop: int, out: int, itemsize: int, spare: int
) -> bool:
    if end - at < 16:
        return False
    low, lanes, bits = _open(at + 16, end, n_rows, width)
    if low == 0:
        return False
    scale = word_at(at + 8)
    exact(lanes, end, low, word_at(at), scale, row, stop, out, itemsize, spare)
    if bits > low:
        add_patches(at + 16, n_rows, row, stop - row, scale, out, itemsize)
    return True


@njit
def _decimal(at: int, end: int, n_rows: int, width: Any, row: int, stop: int, out: int, spare: int) -> bool:
    """As float32."""
    if end - at < 16:
        return False
    low, lanes, bits = _open(at + 16, end, n_rows, width)
    base, exponent = np.int64(word_at(at)), word_at(at + 8) & np.uint64(0xFF)
    if (
        low == 0
        or bits > 24
        or (word_at(at + 8) >> np.uint64(8)) != np.uint64(32)
        or exponent >= np.uint64(len(_POWERS))
        or base < -_EXACT
        or base > _EXACT - (1 << bits)
    ):
        return False
    exact(lanes, end, low, word_at(at), _ONE, row, stop, out, 4, spare)
    if bits > low:
        add_patches(at + 16, n_rows, row, stop - row, _ONE, out, 4)
    power, n = _POWERS[exponent], stop - row
    for i in range(0, n & ~15, 16):
        quotients16(out + 4 * i, power)
    if n & 15:
        rest = out + 4 * (n & ~15)
        move(rest, 4 * (n & 15), spare)
        quotients16(spare, power)
        move(spare, 4 * (n & 15), rest)
    return True


@njit
def _sum(at: int, n: int) -> Any:
    total, words = np.uint64(0), carray(pointer(at), (n,), np.uint64)
    for i in range(n):
        total += words[i]
    return total


@njit
def _running(steps: int, n: int, value: Any, out: int, spare: int) -> Any:
    """``value`` plus the sums of n steps so far, to ``out``; returns the last. ``spare``: 64 bytes."""
    for i in range(0, n & ~7, 8):
        value += prefix8(steps + 8 * i, value, out + 8 * i)
    rest = n & 7
    if rest:
        prefix8(steps + 8 * (n - rest), value, spare)
        move(spare, 8 * rest, out + 8 * (n - rest))
        value = word_at(spare + 8 * (rest - 1))
    return value


@njit
def _running_marked(
    marks: int, rows: int, row: Any, n: int, steps: int, base: Any, value: Any, out: int, spare: int
) -> Any:
    """As ``_running``: the steps of the n rows from ``row`` on are ``base``, or the next of ``steps`` where a row is
    marked. ``spare``: 512 bytes."""
    for i in range(0, n & ~63, 64):
        word = marks_from(marks, rows, row + i)
        value = expanded_prefix64(word, steps, base, value, out + 8 * i)
        steps += 8 * popcount(word)
    rest = n & 63
    if rest:
        word = marks_from(marks, rows, row + n - rest) & ((_ONE << np.uint64(rest)) - _ONE)
        expanded_prefix64(word, steps, base, value, spare)
        move(spare, 8 * rest, out + 8 * (n - rest))
        value = word_at(spare + 8 * (rest - 1))
    return value


@njit
def _restart_row(at: int, k: Any) -> Any:
    return np.int64(word_at(at + 24 + 4 * k) & np.uint64(0xFFFFFFFF))


@njit
def _restarts(at: int, end: int, n_rows: int, row: int) -> Any:
    """Of a delta block: (restarts, -1 where they are not sound; the last at or before ``row``; where their values are;
    where the steps are)."""
    bad = -1, 0, 0, 0
    if end - at < 24 or word_at(at + 16) > np.uint64(n_rows):
        return bad
    n = np.int64(word_at(at + 16))
    values = at + 24 + (n * 4 + 7) // 8 * 8
    # Eight bytes can be read of each row: there are values after them.
    if n == 0 or values + 8 * n > end or _restart_row(at, 0) != 0:
        return bad
    previous: Any = -1
    k: Any = 0
    for r in range(n):
        begin = _restart_row(at, r)
        if begin <= previous or begin >= n_rows:
            return bad
        previous = begin
        if begin <= row:
            k = r
    return n, k, values, values + 8 * n


@njit
def _open_steps(packed: int, end: int, n_rows: int, width: Any) -> Any:
    """(width of the low bits, 0 where the form is another; address of the lanes, of the patches or 0, of the marks or
    0; values in lanes)."""
    bad = 0, 0, 0, 0, 0
    if width != (LANES | PATCHED) or end - packed < 8 or not head_of(word_at(packed))[0]:
        low, lanes, bits = _open(packed, end, n_rows, width)
        return low, lanes, packed if bits > low else 0, 0, n_rows
    _, own, inner_width, form = head_of(word_at(packed))
    marks, inner = packed + 8, packed + 8 + ((n_rows + 63) >> 6) * 8
    if form != 0 or inner > end or own > n_rows or not marks_sound(marks, n_rows, own):
        return bad
    low, lanes, bits = _open(inner, end, own, inner_width)
    return low, lanes, inner if bits > low else 0, marks, own


@njit
def _even_steps(at: int, n_restarts: Any, k: Any, values: int, row: int, stop: int, out: int) -> None:
    """Rows [row, stop) of a delta block whose steps are all alike, as arrival numbers mostly are; k is the last restart
    at or before ``row``."""
    step = word_at(at)
    i: Any = row
    while i < stop:
        following = min(stop, _restart_row(at, k + 1)) if k + 1 < n_restarts else stop
        value = word_at(values + 8 * k) + step * np.uint64(i - _restart_row(at, k))
        put = carray(pointer(out + 8 * (i - row)), (following - i,), np.uint64)
        for j in range(len(put)):
            put[j] = value + step * np.uint64(j)
        i, k = following, k + 1


@njit
def _delta(at: int, end: int, n_rows: int, width: Any, row: int, stop: int, out: int, scratch: int, spare: int) -> bool:
    """To items of eight bytes."""
    n_restarts, k, values, packed = _restarts(at, end, n_rows, row)
    if n_restarts < 0:
        return False
    if width & (LANES - 1) == 0 and packed + packed_bytes(n_rows, 0, width >= LANES) == end:
        _even_steps(at, n_restarts, k, values, row, stop, out)
        return True
    low, lanes, patched, marks, held = _open_steps(packed, end, n_rows, width)
    if low == 0:
        return False
    base, scale = word_at(at), word_at(at + 8)
    first, value = _restart_row(at, k), _ZERO
    while first < stop:
        n = min(_CHUNK, stop - first)
        # Which of the packed steps are these rows'.
        begin, many = first, n
        if marks:
            begin = ones_at(marks, first)
            many = ones_at(marks, first + n) - begin
        if many:
            last = (begin + many + 7) >> 3
            add_lanes(lanes, end, low, base, scale, begin >> 3, last, scratch, 8)
        steps = scratch + 8 * (begin & 7)
        if patched:
            add_patches(patched, held, begin, many, scale, steps, 8)
        value = _sum_up(at, n_restarts, k, values, marks, n_rows, first, first + n, row, steps, base, value, out, spare)
        while k < n_restarts and _restart_row(at, k) < first + n:
            k += 1
        first += n
    return True


@njit
def _sum_up(
    at: int,
    n_restarts: Any,
    k: Any,
    values: int,
    marks: int,
    n_rows: int,
    first: Any,
    last: Any,
    row: int,
    steps: int,
    base: Any,
    value: Any,
    out: int,
    spare: int,
) -> Any:
    """Rows [first, last) of a delta block, the first of which is the next restart k's or one of those after ``value``;
    those from ``row`` on go to ``out``. Returns the last value."""
    i = first
    while i < last:
        if k < n_restarts and _restart_row(at, k) == i:
            # The row's own step, which is added again, does not count.
            marked = marks == 0 or (word_at(marks + (i >> 6) * 8) >> np.uint64(i & 63)) & _ONE
            value = word_at(values + 8 * k) - (word_at(steps) if marked else base)
            k += 1
        following = min(last, _restart_row(at, k) if k < n_restarts else last)
        hidden = min(max(row, i), following)
        if hidden > i:
            held = ones_at(marks, hidden) - ones_at(marks, i) if marks else hidden - i
            value += _sum(steps, held)
            if marks:
                value += base * np.uint64(hidden - i - held)
            steps += 8 * held
        if following > hidden:
            place, n = out + 8 * (hidden - row), following - hidden
            if marks:
                value = _running_marked(marks, n_rows, hidden, n, steps, base, value, place, spare)
                if following < last:
                    steps += 8 * (ones_at(marks, following) - ones_at(marks, hidden))
            else:
                value = _running(steps, n, value, place, spare)
                steps += 8 * n
        i = following
    return value


@njit
def _below(codes: int, n: int, limit: Any) -> bool:
    """Whether n codes of 16 bits are."""
    largest, all_of = np.uint16(0), carray(pointer(codes), (n,), np.uint16)
    for i in range(n):
        largest = max(largest, all_of[i])
    return bool(n == 0 or np.int64(largest) < limit)


@njit
def _look_up(codes: int, table: int, out: int, n: int) -> None:
    of, words = carray(pointer(codes), (n,), np.uint16), carray(pointer(table), (1 << 16,), np.uint64)
    put = carray(pointer(out), (n,), np.uint64)
    for i in range(n):
        put[i] = words[of[i]]


@njit
def _scatter(marks: int, n_rows: int, row: Any, n: int, own: int, out: int) -> None:
    """The next of the words at ``own`` to each of the n rows from ``row`` on that is marked."""
    for i in range(0, n, 64):
        word = marks_from(marks, n_rows, row + i)
        if n - i < 64:
            word &= (_ONE << np.uint64(n - i)) - _ONE
        put = carray(pointer(out + 8 * i), (64,), np.uint64)
        while word:
            put[trailing_zeros(word)] = word_at(own)
            own += 8
            word &= word - _ONE


@njit
def _marked(
    at: int, end: int, n_rows: int, width: Any, row: int, stop: int, table: int, n_table: int, out: int, codes: int,
    room: int,
) -> bool:  # fmt: skip
    """To items of eight bytes. ``codes`` and ``room``: memory of ``unpack.workspace``."""
    marks, begin = at + 16, at + 16 + ((n_rows + 63) >> 6) * 8
    if begin > end or (word_at(at) >> np.uint64(40)) != _ZERO or n_table == 0:
        return False
    head, base = word_at(at), word_at(at + 8)
    n_own: Any = np.int64(head & np.uint64(0xFFFFFFFF))
    own_width: Any = np.int64(head >> np.uint64(32)) - LANES
    if n_own >= n_rows or own_width < 1 or own_width > 64 or not marks_sound(marks, n_rows, n_own):
        return False
    packed, n_codes = begin + packed_bytes(n_own, own_width, True), n_rows - n_own
    if packed > end:
        return False
    low, lanes, bits = _open(packed, end, n_codes, width)
    if low == 0 or bits > 16:
        return False
    apart = codes + _APART
    while row < stop:
        n = min(_CHUNK, stop - row)
        first = ones_at(marks, row)
        held = ones_at(marks, row + n) - first
        f: Any = row - first
        many: Any = n - held
        add_lanes(lanes, end, low, _ZERO, _ONE, f >> 3, (f + many + 7) >> 3, codes, 2)
        source = codes + 2 * (f & 7)
        if bits > low:
            add_patches(packed, n_codes, f, many, _ONE, source, 2)
        if not _below(source, many, n_table):
            return False
        for i in range(0, n, 32):
            others = ~marks_from(marks, n_rows, row + i) & np.uint64(0xFFFFFFFF)
            expand32(others, source, apart + 2 * i)
            source += 2 * popcount(others)
        # A marked row stands for code 0 meanwhile, which there is.
        _look_up(apart, table, out, n)
        if held:
            last = (first + held + 7) >> 3
            add_lanes(begin, end, own_width, base, _ONE, first >> 3, last, room, 8)
            _scatter(marks, n_rows, row, n, room + 8 * (first & 7), out)
        row, out = row + n, out + 8 * n
    return True


@njit
def decode_direct(
    at: int, length: int, codec: Any, width: Any, n_rows: int, row: int, stop: int, table: int, n_table: int, out: int,
    itemsize: int, scratch: int, room: int,
) -> bool:  # fmt: skip
    """Rows [row, stop) of the block of ``length`` bytes at an address, to the items at ``out``; False where the block
    is not of these forms or not sound, and what stands at ``out`` then says nothing.

    ``table`` is the address of a segment dictionary of ``n_table`` words; ``scratch`` and ``room`` those of
    ``unpack.workspace``. Nothing but the block and the dictionary is read, nothing but the rows' own items written.
    """
    end = at + length
    if codec == PACKED:
        return _packed(at, end, n_rows, width, row, stop, out, itemsize, scratch)
    if codec == DELTA and itemsize == 8:
        return _delta(at, end, n_rows, width, row, stop, out, scratch, room)
    if codec == MARKED and itemsize == 8:
        return _marked(at, end, n_rows, width, row, stop, table, n_table, out, scratch, room)
    if codec == DECIMAL and itemsize == 4:
        return _decimal(at, end, n_rows, width, row, stop, out, scratch)
    return False
