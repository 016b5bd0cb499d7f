"""Answers to look-ups, from the body of a request to the body of its reply, in compiled loops: keys are looked up, rows
copied or pooled and rounded in one pass over blocks of keys, whose memory is asked for ahead.

``serving.lookups.served`` and ``messages`` define what they do, and answer whatever is refused here: ``plan`` and
``write`` say no to all that is not the usual case, malformed bodies and unknown names included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from thinrow.kernels.lookups import (
    FLOAT16,
    FLOAT32,
    INT8,
    P_BUCKETS,
    P_GONE,
    P_INDEX,
    P_KIND,
    P_LAST,
    P_LOW,
    P_N_GONE,
    P_SCALES,
    P_SHIFT,
    P_VALUES,
    P_WORDS,
    T_BEFORE,
    T_CRC,
    T_DEFAULT,
    T_DEFAULT16,
    T_DEPTH,
    T_DIM,
    T_END,
    T_EXPORT,
    T_FIRST,
    T_HALF,
    T_HASH,
    T_NAME,
    T_NAME_BYTES,
    T_STEP,
)
from thinrow.kernels.numba.crc import advance_at
from thinrow.kernels.numba.half import widen_at
from thinrow.kernels.numba.intrinsics import address, pointer, prefetch, prefetch_range, word_at
from thinrow.kernels.numba.jit import intrinsic, njit
from thinrow.kernels.numba.scalar import mix
from thinrow.kernels.numba.sockets import memcpy, number_at, put_half_word, put_word

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

#: Keys that are looked up in one go.
_BLOCK = 64
_LOW32 = np.uint64(0xFFFFFFFF)
_MOST_TABLES = 1 << 10
_MOST_BYTES = (1 << 32) - 1
#: Places of an ask in the plan: its table, pooling, keys, bags, and addresses of keys, lengths and weights.
_TABLE, _POOLING, _N_KEYS, _N_BAGS, _KEYS, _LENGTHS, _WEIGHTS, _ASK_FIELDS = range(8)
_SIGN, _REST = np.int32(-0x80000000), np.int32(0x7FFFFFFF)


@intrinsic
def _bits(typingctx: Any, number: Any) -> Any:
    """Of a float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), emit


@intrinsic
def _number(typingctx: Any, bits: Any) -> Any:
    """The float32 of these bits."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), emit


@njit
def _half_at(address: int) -> Any:
    return np.int64(word_at(address) & np.uint64(0xFFFF))


@njit
def _word32_at(address: int) -> Any:
    return np.int64(word_at(address) & _LOW32)


@njit
def _same(a: int, b: int, size: int) -> bool:
    x, y = carray(pointer(a), (size,), np.uint8), carray(pointer(b), (size,), np.uint8)
    differs = False
    for i in range(size):
        differs |= x[i] != y[i]
    return not differs


@njit
def _table_of(tables: Ints, newest: int, names: int, name: int, size: int) -> Any:
    """The newest table of a name; the first ``newest`` are those, sorted by hash. -1 where there is none."""
    wanted = np.int64(~np.uint32(advance_at(np.uint32(0xFFFFFFFF), name, size)))
    low, high = 0, newest
    while low < high:
        middle = (low + high) // 2
        if tables[middle, T_HASH] < wanted:
            low = middle + 1
        else:
            high = middle
    while low < newest and tables[low, T_HASH] == wanted:
        if tables[low, T_NAME_BYTES] == size and _same(names + tables[low, T_NAME], name, size):
            return low
        low += 1
    return -1


@njit
def _pinned(tables: Ints, number: int, step: int, crc: int) -> Any:
    while number >= 0 and (tables[number, T_STEP] != step or tables[number, T_CRC] != crc):
        number = tables[number, T_BEFORE]
    return number


@njit
def plan(
    body: int, size: int, tables: Ints, newest: int, names: int, chosen: Ints, asks: Ints
) -> tuple[int, int, int, int]:
    """Read a request at an address.

    Args:
        chosen: (exports,) room for which version of each export is read.
        asks: (1,024, 7) room for what is asked of each table.

    Returns:
        how many tables, or -1 where Python should look at it; bytes of the work, as ``ServedTables.work_bytes``; bytes
        of the reply; keys.
    """
    none = -1, 0, 0, 0
    if size < 8:
        return none
    dtype, n = _half_at(body), _half_at(body + 2)
    if dtype > INT8 or n < 1 or n > _MOST_TABLES or size < 8 + 24 * n:
        return none
    item = 4 if dtype == FLOAT32 else 2 if dtype == FLOAT16 else 1
    chosen[:] = -1
    at = 8 + 24 * n
    for i in range(n):
        record = body + 8 + 24 * i
        length = _half_at(record)
        if at + length > size:
            return none
        number = _table_of(tables, newest, names, body + at, length)
        pooling, pinned = _half_at(record + 2) & 0xFF, _half_at(record + 2) >> 8
        if number < 0 or pooling > 2 or pinned > 1:
            return none
        if pinned:
            crc, step = _word32_at(record + 12), number_at(record + 16)
            number = _pinned(tables, number, step, crc)
            if number < 0:
                return none
        export = tables[number, T_EXPORT]
        if chosen[export] != -1 and chosen[export] != tables[number, T_DEPTH]:
            return none
        chosen[export] = tables[number, T_DEPTH]
        asks[i, _TABLE], asks[i, _POOLING] = number, pooling
        asks[i, _N_KEYS], asks[i, _N_BAGS] = _word32_at(record + 4), _word32_at(record + 8)
        if pooling == 0 and asks[i, _N_BAGS] != 0:
            return none
        at += length
    at = (at + 7) & ~7
    work, reply, keys = 0, 8 + 24 * n, 0
    for i in range(n):
        n_keys, n_bags, pooling = asks[i, _N_KEYS], asks[i, _N_BAGS], asks[i, _POOLING]
        asks[i, _KEYS] = body + at
        at += 8 * n_keys
        asks[i, _LENGTHS] = body + at
        at += (4 * n_bags + 7) & ~7
        asks[i, _WEIGHTS] = body + at
        at += ((4 * n_keys + 7) & ~7) if pooling == 2 else 0
        if at > size:
            return none
        rows, dim = n_bags if pooling else n_keys, tables[asks[i, _TABLE], T_DIM]
        work += 4 * dim * (n_keys + rows)
        reply += (rows * dim * item + 7) & ~7
        reply += (4 * rows + 7) & ~7 if dtype == INT8 else 0
        reply += ((4 * rows + 7) if pooling else (((rows + 7) >> 3) + 7)) & ~7
        keys += n_keys
        if pooling:
            total, lengths = 0, carray(pointer(asks[i, _LENGTHS]), (n_bags,), np.uint32)
            for b in range(n_bags):
                total += lengths[b]
            if total != n_keys:
                return none
    if at != size or reply > _MOST_BYTES:
        return none
    return n, work, reply, keys


@njit
def _bucket_of(parts: Ints, p: int, word: Any) -> Any:
    """Of a mixed key in a part; what is not in its range may have any."""
    return (word - np.uint64(parts[p, P_LOW])) >> np.uint64(parts[p, P_SHIFT])


@njit
def _lower(words: int, low: int, high: int, word: Any) -> Any:
    while low < high:
        middle = (low + high) >> 1
        if word_at(words + 8 * middle) < word:
            low = middle + 1
        else:
            high = middle
    return low


@njit
def _look(parts: Ints, first: int, end: int, row_bytes: Ints, words: Any, n: int, found: Ints, places: Ints) -> None:
    """Find ``n`` mixed keys: the part of each, -1 where it is nowhere, and its place there. What is found is asked for
    from memory."""
    for k in range(n):
        found[k] = -2
    left = n
    for p in range(first, end):
        if left == 0:
            break
        index, held, buckets = parts[p, P_INDEX], parts[p, P_WORDS], np.uint64(parts[p, P_BUCKETS])
        low, last = np.uint64(parts[p, P_LOW]), np.uint64(parts[p, P_LAST])
        for k in range(n):
            if found[k] == -2 and low <= words[k] <= last:
                prefetch(index + 8 * np.int64(_bucket_of(parts, p, words[k])))
        for k in range(n):
            if found[k] == -2 and low <= words[k] <= last and _bucket_of(parts, p, words[k]) < buckets:
                begin = number_at(index + 8 * np.int64(_bucket_of(parts, p, words[k])))
                prefetch(held + 8 * begin)
                # A bucket is about a line long, and seldom begins with one.
                prefetch(held + 8 * begin + 56)
        for k in range(n):
            if found[k] != -2 or not low <= words[k] <= last:
                continue
            bucket = _bucket_of(parts, p, words[k])
            if bucket < buckets:
                begin = number_at(index + 8 * np.int64(bucket))
                stop = number_at(index + 8 * np.int64(bucket) + 8)
                at = _lower(held, begin, stop, words[k])
                if at < stop and word_at(held + 8 * at) == words[k]:
                    found[k], places[k] = p, at
                    left -= 1
                    prefetch_range(parts[p, P_VALUES] + at * row_bytes[parts[p, P_KIND]], row_bytes[parts[p, P_KIND]])
                    continue
            gone = parts[p, P_N_GONE]
            if gone >= 0:
                at = _lower(parts[p, P_GONE], 0, gone, words[k])
            if gone < 0 or (at < gone and word_at(parts[p, P_GONE] + 8 * at) == words[k]):
                found[k] = -1
                left -= 1
    for k in range(n):
        if found[k] == -2:
            found[k] = -1


@njit
def _row(parts: Ints, part: int, place: int, dim: int, default: Floats, out: Floats) -> None:
    """One vector as float32."""
    if part < 0:
        for c in range(dim):
            out[c] = default[c]
    elif parts[part, P_KIND] == FLOAT32:
        single = carray(pointer(parts[part, P_VALUES] + 4 * dim * place), (dim,), np.float32)
        for c in range(dim):
            out[c] = single[c]
    elif parts[part, P_KIND] == FLOAT16:
        widen_at(parts[part, P_VALUES] + 2 * dim * place, dim, address(out))
    else:
        scale = carray(pointer(parts[part, P_SCALES] + 4 * place), (1,), np.float32)[0]
        packed = carray(pointer(parts[part, P_VALUES] + dim * place), (dim,), np.int8)
        for c in range(dim):
            out[c] = np.float32(packed[c]) * scale


@njit
def _to_half(value: Any) -> Any:
    """The bits of a finite float32 as float16, to the nearest, then the even one; from 0x7C00 on it is beyond."""
    bits = _bits(value)
    sign, size = bits & _SIGN, bits & _REST
    # Small ones are rounded by an addition that moves their last bit to the end of a float32.
    small = _bits(np.float32(_number(size) + np.float32(0.5))) - np.int32(126 << 23)
    odd = (size >> np.int32(13)) & np.int32(1)
    large = (size - np.int32(112 << 23) + np.int32(0xFFF) + odd) >> np.int32(13)
    magnitude = small if size < np.int32(113 << 23) else large
    magnitude = np.int32(0x7C00) if size >= np.int32(143 << 23) else magnitude
    return np.int32(magnitude | ((sign >> np.int32(16)) & np.int32(0x8000)))


@njit
def _encode(row: Floats, dim: int, dtype: int, out: int, scale: int) -> bool:
    """Write a vector at an address, and its scale with int8. Returns whether it can be."""
    wrong = False
    for c in range(dim):
        wrong |= row[c] - row[c] != 0
    if wrong:
        return False
    if dtype == FLOAT32:
        memcpy(out, np.int64(row.ctypes.data), np.uint64(4 * dim))
    elif dtype == FLOAT16:
        half = carray(pointer(out), (dim,), np.uint16)
        for c in range(dim):
            bits = _to_half(row[c])
            wrong |= (bits & np.int32(0x7FFF)) >= np.int32(0x7C00)
            half[c] = np.uint16(bits)
    else:
        most = np.float32(0)
        for c in range(dim):
            most = max(most, np.float32(abs(row[c])))
        by = np.float32(most / np.float32(127))
        carray(pointer(scale), (1,), np.float32)[0] = by
        packed = carray(pointer(out), (dim,), np.int8)
        for c in range(dim):
            step = np.rint(np.float32(row[c] / by)) if by > 0 else np.float32(0)
            packed[c] = np.int8(min(max(step, np.float32(-127)), np.float32(127)))
    return not wrong


@njit
def _zero(address: int, size: int) -> None:
    if size > 0:
        data = carray(pointer(address), (size,), np.uint8)
        for i in range(size):
            data[i] = 0


@njit
def _answer(asks: Ints, i: int, tables: Ints, parts: Ints, low: Any, last: Any, dtype: int, out: int) -> Any:
    """Write the arrays of one table at an address. Returns the address after them, or 0 where Python should answer."""
    table, pooling, n = asks[i, _TABLE], asks[i, _POOLING], asks[i, _N_KEYS]
    dim, first, end = tables[table, T_DIM], tables[table, T_FIRST], tables[table, T_END]
    rows = asks[i, _N_BAGS] if pooling else n
    item = 4 if dtype == FLOAT32 else 2 if dtype == FLOAT16 else 1
    copied = dtype == FLOAT16 and pooling == 0 and tables[table, T_HALF] != 0
    default = carray(pointer(tables[table, T_DEFAULT]), (dim,), np.float32)
    keys = carray(pointer(asks[i, _KEYS]), (n,), np.uint64)
    lengths = carray(pointer(asks[i, _LENGTHS]), (asks[i, _N_BAGS],), np.uint32)
    weights = carray(pointer(asks[i, _WEIGHTS]), (n if pooling == 2 else 0,), np.float32)
    values_bytes = rows * dim * item
    scales = out + ((values_bytes + 7) & ~7)
    scales_bytes = 4 * rows if dtype == INT8 else 0
    marks = scales + ((scales_bytes + 7) & ~7)
    marks_bytes = 4 * rows if pooling else (rows + 7) >> 3
    stop = marks + ((marks_bytes + 7) & ~7)
    _zero(out + values_bytes, scales - out - values_bytes)
    _zero(scales + scales_bytes, marks - scales - scales_bytes)
    _zero(marks, stop - marks)
    bits = carray(pointer(marks), (0 if pooling else marks_bytes,), np.uint8)
    counts = carray(pointer(marks), (rows if pooling else 0,), np.uint32)
    row_bytes = np.array([4 * dim, 2 * dim, dim])
    words = np.empty(_BLOCK, np.uint64)
    # Of two blocks: one is looked up while the memory of the other's rows is fetched.
    found, places = np.empty(2 * _BLOCK, np.int64), np.empty(2 * _BLOCK, np.int64)
    row, total = np.empty(dim, np.float32), np.zeros(dim, np.float32)
    bag, in_bag = 0, 0
    for ahead in range(0, n + _BLOCK, _BLOCK):
        here = min(_BLOCK, n - ahead)
        # Of the block after this, what is looked at first.
        for k in range(ahead + _BLOCK, min(ahead + 2 * _BLOCK, n)):
            prefetch(parts[end - 1, P_INDEX] + 8 * np.int64(_bucket_of(parts, end - 1, mix(keys[k]))))
        for k in range(here):
            words[k] = mix(keys[ahead + k])
            if not low <= words[k] <= last:
                return 0
        if here > 0:
            side = ahead & _BLOCK
            _look(parts, first, end, row_bytes, words, here, found[side:], places[side:])
        for at in range(max(0, ahead - _BLOCK), min(ahead, n)):
            k = at & (2 * _BLOCK - 1)
            part = found[k]
            if pooling == 0:
                if part >= 0:
                    bits[at >> 3] |= np.uint8(1 << (at & 7))
                if copied:
                    source = tables[table, T_DEFAULT16]
                    if part >= 0:
                        source = parts[part, P_VALUES] + 2 * dim * places[k]
                    memcpy(out + 2 * dim * at, source, np.uint64(2 * dim))
                else:
                    _row(parts, part, places[k], dim, default, row)
                    if not _encode(row, dim, dtype, out + item * dim * at, scales + 4 * at):
                        return 0
                continue
            while in_bag == lengths[bag]:
                if not _encode(total, dim, dtype, out + item * dim * bag, scales + 4 * bag):
                    return 0
                total[:] = 0
                bag, in_bag = bag + 1, 0
            _row(parts, part, places[k], dim, default, row)
            if pooling == 2:
                for c in range(dim):
                    row[c] = row[c] * weights[at]
            for c in range(dim):
                total[c] += row[c]
            counts[bag] += np.uint32(part >= 0)
            in_bag += 1
    while pooling and bag < rows:
        if not _encode(total, dim, dtype, out + item * dim * bag, scales + 4 * bag):
            return 0
        total[:] = 0
        bag += 1
    return stop


@njit
def write(
    body: int, n: int, asks: Ints, tables: Ints, parts: Ints, low: Any, last: Any, out: int
) -> bool:  # fmt: skip
    """Write the body of the reply to a request that ``plan`` has read, at an address.

    Args:
        low, last: the range of mixed keys that is answered for.

    Returns:
        whether it could; else Python should answer.
    """
    dtype = _half_at(body)
    put_word(out, dtype | (n << 16))
    at = out + 8 + 24 * n
    for i in range(n):
        table = asks[i, _TABLE]
        record, pooled = out + 8 + 24 * i, asks[i, _POOLING] != 0
        put_half_word(record, asks[i, _N_BAGS] if pooled else asks[i, _N_KEYS])
        put_half_word(record + 4, tables[table, T_DIM])
        put_half_word(record + 8, tables[table, T_CRC])
        put_half_word(record + 12, np.int64(pooled))
        put_word(record + 16, tables[table, T_STEP])
        at = _answer(asks, i, tables, parts, low, last, dtype, at)
        if at == 0:
            return False
    return True
