"""Compiled kernels of the recent tier: rows of a call grouped by user, numbered, sealed as blocks (recent-v2).

A call of one user and ten rows costs as much Python as a call of a thousand users: so what is done for each row, block
or pair is done here, in two calls for rows of any number. Memory is given by the caller and large enough.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.core.units import EPOCH_BITS
from thinrow.kernels.numba.crc import crc_tables
from thinrow.kernels.numba.intrinsics import load64
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.scalar import identity_of

Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_NEVER = np.int64((1 << 63) - 1)
_SIGN = np.uint64(1 << 63)
_BYTE = np.uint64(0xFF)
#: As ``recent.rows``: rows of a block at most, bytes of its header, of a pair, of a CRC.
_BLOCK_ROWS, HEADER, PAIR, SEAL = 256, 24, 20, 4
RESIDUE = np.uint32(0x2144DF1C)
_EPOCH_BITS = np.int64(EPOCH_BITS)


#: Of zlib's polynomial.
_CRC = crc_tables(0xEDB88320)


@njit
def crc32_of(data: Bytes, first: Any, last: Any, crc: Any) -> Any:
    """zlib's CRC-32 of ``data[first:last]``, going on from ``crc``, uint32."""
    state = np.uint32(crc) ^ np.uint32(0xFFFFFFFF)
    at = first
    while last - at >= 8:
        word = load64(data, at) ^ np.uint64(state)
        state = (
            _CRC[7, word & _BYTE]
            ^ _CRC[6, (word >> np.uint64(8)) & _BYTE]
            ^ _CRC[5, (word >> np.uint64(16)) & _BYTE]
            ^ _CRC[4, (word >> np.uint64(24)) & _BYTE]
            ^ _CRC[3, (word >> np.uint64(32)) & _BYTE]
            ^ _CRC[2, (word >> np.uint64(40)) & _BYTE]
            ^ _CRC[1, (word >> np.uint64(48)) & _BYTE]
            ^ _CRC[0, word >> np.uint64(56)]
        )
        at += 8
    while at < last:
        state = (state >> np.uint32(8)) ^ _CRC[0, (state ^ np.uint32(data[at])) & np.uint32(0xFF)]
        at += 1
    return state ^ np.uint32(0xFFFFFFFF)


@njit
def _put(out: Bytes, at: Any, value: Any, n_bytes: int) -> None:
    """The low bytes of ``value``, little-endian."""
    word = np.uint64(value)
    for i in range(n_bytes):
        out[at + i] = np.uint8(word & _BYTE)
        word >>= np.uint64(8)


@njit
def _put_big(out: Bytes, at: Any, value: Any) -> None:
    """Eight bytes, big-endian."""
    word = np.uint64(value)
    for i in range(8):
        out[at + 7 - i] = np.uint8(word & _BYTE)
        word >>= np.uint64(8)


@njit
def big64(data: Bytes, at: Any) -> Any:
    """Eight bytes, big-endian."""
    word = np.uint64(0)
    for i in range(8):
        word = (word << np.uint64(8)) | np.uint64(data[at + i])
    return word


@njit
def user_runs(users: Ints, event_ts: Ints, ids: Ints, starts: Ints, user_keys: Bytes, id_keys: Bytes) -> Any:
    """(number U of users, whether all times are from 0 to NEVER - 2); U is -1 where users do not ascend.

    Fills ``starts[:U + 1]``, where each user's rows begin, ``user_keys`` with the 8 bytes of each user's key, and
    ``id_keys`` with the 16 of each row's event id, where ``ids`` is not empty.
    """
    n, n_users, sound = len(users), 0, True
    for i in range(n):
        if i == 0 or users[i] != users[i - 1]:
            if i and users[i] < users[i - 1]:
                return -1, False
            starts[n_users] = i
            _put_big(user_keys, 8 * n_users, np.uint64(users[i]) ^ _SIGN)
            n_users += 1
        sound &= 0 <= event_ts[i] < _NEVER - 1
    starts[n_users] = n
    if len(ids):
        for i in range(n):
            _put_big(id_keys, 16 * i, np.uint64(users[i]) ^ _SIGN)
            _put_big(id_keys, 16 * i + 8, np.uint64(ids[i]) ^ _SIGN)
    return n_users, sound


@njit
def _put_pair(out: Bytes, at: Any, a: Any, b: Any) -> None:
    _put(out, at, a, 8)
    _put(out, at + 8, b, 8)
    _put(out, at + 16, identity_of(a, b), 4)


@njit
def pack_pairs(a: Ints, b: Ints, out: Bytes) -> None:
    """Each pair with its check number, 20 bytes each."""
    for i in range(len(a)):
        _put_pair(out, PAIR * i, a[i], b[i])


@njit
def open_pair(data: Bytes, at: Any) -> Any:
    """(a, b, whether its check number is right)."""
    a, b, check = np.int64(load64(data, at)), np.int64(load64(data, at + 8)), np.uint32(0)
    for k in range(4):
        check |= np.uint32(data[at + 16 + k]) << np.uint32(8 * k)
    return a, b, np.uint32(identity_of(a, b)) == check


@njit
def open_pairs(data: Bytes, a: Ints, b: Ints) -> int:
    """The pairs at ``data``, 20 bytes each; how many fail their check number."""
    wrong = 0
    for i in range(len(a)):
        a[i], b[i], sound = open_pair(data, PAIR * i)
        wrong += not sound
    return wrong


@njit
def number_rows(
    known: Bytes,
    name_off: Ints,
    floors: Ints,
    offsets: Ints,
    id_rows: Ints,
    rows: Bytes,
    row_bytes: int,
    heap: Bytes,
    heap_off: Ints,
    head: int,
    numbers: Ints,
    out: Bytes,
) -> Any:
    """Number rows of users, and seal them as blocks of up to 256, each after its key. Few arrays, because each that is
    given to a compiled call costs as much as a row.

    Args:
        known: the pair (counter, trimmed) of each user, 20 bytes of 0xFF where nobody knows it; then their keys.
        name_off: (U + 1,) where each user's key begins among the keys; all are 8 bytes where it is empty.
        floors: the number up to which none is given to each user, or one for all; its epoch is begun by all of them.
        offsets: (U + 1,) rows of user u are ``[offsets[u], offsets[u + 1])``, numbered from the counter + 1 on.
        id_rows: which rows have an event id.
        rows: ``row_bytes`` of each row, event_ts first.
        heap, heap_off: bytes of strings of row i are ``heap[heap_off[i]:heap_off[i + 1]]``; of no row where
            ``heap_off`` is empty.
        head: the first 8 bytes of a header.
        numbers: filled with the numbers of the rows, then with where key b and value b begin in ``out``, at 2 b and
            2 b + 1, and then the end.
        out: filled with the pair (counter, trimmed) of each user, then (arrival, event_ts) of each of ``id_rows``, then
            key, value, key, value, ...

    Returns (blocks, users whose pair fails its check number, the first user whose numbers would end beyond all, or -1).
    """
    n_users, n_blocks, wrong = len(offsets) - 1, 0, 0
    cuts, names = offsets[n_users], PAIR * n_users
    at = PAIR * (n_users + len(id_rows))
    for u in range(n_users):
        floor = floors[u if len(floors) > 1 else 0]
        counter, trimmed, sound = open_pair(known, PAIR * u)
        if counter == -1 and trimmed == -1:
            counter, trimmed, sound = floor, 0, True
        wrong += not sound
        counter = max(counter, floor >> _EPOCH_BITS << _EPOCH_BITS)
        added = offsets[u + 1] - offsets[u]
        if counter > _NEVER - 1 - added:
            return n_blocks, wrong, u
        for i in range(offsets[u], offsets[u + 1]):
            numbers[i] = counter + 1 + i - offsets[u]
        _put_pair(out, PAIR * u, counter + added, trimmed)
        low, high = (name_off[u], name_off[u + 1]) if len(name_off) else (8 * u, 8 * u + 8)
        for first in range(offsets[u], offsets[u + 1], _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, offsets[u + 1])
            numbers[cuts + 2 * n_blocks], numbers[cuts + 2 * n_blocks + 1] = at, at + high - low + 8
            at = _seal_block(
                known, names + low, names + high, numbers[first], rows, row_bytes, heap, heap_off, head, first, last,
                out, at,
            )  # fmt: skip
            n_blocks += 1
    numbers[cuts + 2 * n_blocks] = at
    for i in range(len(id_rows)):
        event_ts = np.int64(load64(rows, row_bytes * id_rows[i]))
        _put_pair(out, PAIR * (n_users + i), numbers[id_rows[i]], event_ts)
    return n_blocks, wrong, -1


@njit
def _seal_block(
    names: Bytes,
    low: Any,
    high: Any,
    number: Any,
    rows: Bytes,
    row_bytes: int,
    heap: Bytes,
    heap_off: Ints,
    head: int,
    first: Any,
    last: Any,
    out: Bytes,
    at: Any,
) -> Any:
    """Rows [first, last) as a block after its key, at ``out[at:]``; where it ends."""
    begin = at
    for i in range(low, high):
        out[at] = names[i]
        at += 1
    _put_big(out, at, number)
    at += 8
    a, b = (heap_off[first], heap_off[last]) if len(heap_off) else (0, 0)
    _put(out, at, head, 8)
    _put(out, at + 8, last - first, 4)
    _put(out, at + 12, b - a, 4)
    _put(out, at + 16, number, 8)
    at += HEADER
    for i in range(first * row_bytes, last * row_bytes):
        out[at] = rows[i]
        at += 1
    for i in range(a, b):
        out[at] = heap[i]
        at += 1
    _put(out, at, crc32_of(out, begin, at, np.uint32(0)), SEAL)
    return at + SEAL


@njit
def open_blocks(
    data: Bytes,
    lengths: Ints,
    blocks: Ints,
    after: Ints,
    head: int,
    row_bytes: int,
    fields: Ints,
    capacity: int,
    out: Bytes,
    arrival: Ints,
    offsets: Ints,
) -> int:
    """Rows of blocks of one kind, as columns; whether all is sound and of that kind, and nothing is said where not.

    Args:
        data, lengths: key, value, key, value, ..., and how long each is.
        blocks, after: (U,) how many blocks are each user's, and the arrival above which its rows are wanted.
        head: what the first 8 bytes of each header are.
        row_bytes, fields: of a row, and (F + 1,) where each field begins in it. Rows have no strings.
        capacity: rows that there is room for.
        out: filled: field f of row i is at ``capacity * fields[f] + i * (fields[f + 1] - fields[f])``.
        arrival: filled with the numbers of the rows.
        offsets: (U + 1,) filled: rows of user u are ``[offsets[u], offsets[u + 1])``.
    """
    at, b, n = 0, 0, 0
    offsets[0] = 0
    for u in range(len(blocks)):
        for _ in range(blocks[u]):
            value = at + lengths[2 * b]
            end = value + lengths[2 * b + 1]
            if end - value < HEADER + SEAL or crc32_of(data, at, end, np.uint32(0)) != RESIDUE:
                return False
            sizes = load64(data, value + 8)
            held = np.int64(sizes & np.uint64(0xFFFFFFFF))
            if load64(data, value) != np.uint64(head) or sizes >> np.uint64(32):
                return False
            if end - value != HEADER + held * row_bytes + SEAL or n + held > capacity:
                return False
            first = np.int64(load64(data, value + 16))
            skipped = min(max(after[u] + 1 - first, 0), held)
            for f in range(len(fields) - 1):
                size = fields[f + 1] - fields[f]
                to = capacity * fields[f] + n * size
                source = value + HEADER + skipped * row_bytes + fields[f]
                for _ in range(held - skipped):
                    for k in range(size):
                        out[to + k] = data[source + k]
                    to += size
                    source += row_bytes
            for i in range(held - skipped):
                arrival[n + i] = first + skipped + i
            n += held - skipped
            at, b = end, b + 1
        offsets[u + 1] = n
    return True


@njit
def follows(
    event_ts: Ints,
    arrival: Ints,
    offsets: Ints,
    request_ts: Ints,
    bound: Ints,
    above: Ints,
) -> int:
    """Whether the rows ``[offsets[u], offsets[u + 1])`` of each request are in order of (event_ts, arrival), before
    ``request_ts[u]`` and with arrivals above ``above[u]`` up to ``bound[u]``: all that it sees, behind what was there.
    """
    for u in range(len(request_ts)):
        for i in range(offsets[u], offsets[u + 1]):
            if not (event_ts[i] < request_ts[u] and above[u] < arrival[i] <= bound[u]):
                return False
            if i > offsets[u] and (
                event_ts[i] < event_ts[i - 1] or (event_ts[i] == event_ts[i - 1] and arrival[i] <= arrival[i - 1])
            ):
                return False
    return True
