"""Kernels of the recent tier in NumPy and zlib: see ``thinrow.kernels.numba.recent``."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.units import EPOCH_BITS
from thinrow.kernels.reference.history import identity_mix

Array = npt.NDArray[Any]

_SIGN = np.uint64(1 << 63)
_NEVER = (1 << 63) - 1
_BLOCK_ROWS, _HEADER, _PAIR, _SEAL, _RESIDUE = 256, 24, 20, 4, 0x2144DF1C
_PAIRS = np.dtype([("a", "<i8"), ("b", "<i8"), ("check", "<u4")])


def _big(values: Array) -> Array:
    return (values.view(np.uint64) ^ _SIGN).astype(">u8")


def user_runs(
    users: Array, event_ts: Array, ids: Array, starts: Array, user_keys: Array, id_keys: Array
) -> tuple[int, bool]:
    """As ``thinrow.kernels.numba.recent.user_runs``."""
    if (users[1:] < users[:-1]).any():
        return -1, False
    first = np.flatnonzero(np.append(np.ones(min(len(users), 1), np.bool_), users[1:] != users[:-1]))
    n = len(first)
    starts[:n], starts[n] = first, len(users)
    user_keys[: 8 * n] = _big(users[first]).view(np.uint8)
    if len(ids):
        words = (_big(x).view(np.uint8).reshape(-1, 8) for x in (users, ids))
        id_keys[: 16 * len(ids)] = np.concatenate(list(words), axis=1).ravel()
    return n, bool(((event_ts >= 0) & (event_ts < _NEVER - 1)).all())


def _checks(a: Array, b: Array) -> Array:
    return identity_mix(a, b).astype(np.uint32)


def pack_pairs(a: Array, b: Array, out: Array) -> None:
    """As ``thinrow.kernels.numba.recent.pack_pairs``."""
    made = np.empty(len(a), _PAIRS)
    made["a"], made["b"], made["check"] = a, b, _checks(a, b)
    out[: _PAIR * len(a)] = np.frombuffer(made.tobytes(), np.uint8)


def open_pairs(data: Array, a: Array, b: Array) -> int:
    """As ``thinrow.kernels.numba.recent.open_pairs``."""
    pairs = np.frombuffer(data.tobytes(), _PAIRS, len(a))
    a[:], b[:] = pairs["a"], pairs["b"]
    return int((_checks(a, b) != pairs["check"]).sum())


def number_rows(
    known: Array,
    name_off: Array,
    floors: Array,
    offsets: Array,
    id_rows: Array,
    rows: Array,
    row_bytes: int,
    heap: Array,
    heap_off: Array,
    head: int,
    numbers: Array,
    out: Array,
) -> tuple[int, int, int]:
    """As ``thinrow.kernels.numba.recent.number_rows``."""
    added, n, n_users = np.diff(offsets), int(offsets[-1]), len(offsets) - 1
    counters, trimmed = np.empty(n_users, np.int64), np.empty(n_users, np.int64)
    wrong = open_pairs(known, counters, trimmed)
    unknown = (counters == -1) & (trimmed == -1)
    wrong -= int(unknown.sum())
    counters, trimmed = np.where(unknown, floors, counters), np.where(unknown, 0, trimmed)
    counters = np.maximum(counters, floors >> EPOCH_BITS << EPOCH_BITS)
    over = np.flatnonzero(counters > _NEVER - 1 - added)
    if len(over):
        return 0, wrong, int(over[0])
    numbers[:n] = np.repeat(counters + 1 - offsets[:-1], added) + np.arange(n)
    event_ts = rows.reshape(-1, row_bytes)[:, :8].copy().view(np.int64).ravel()
    pack_pairs(np.append(counters + added, numbers[id_rows]), np.append(trimmed, event_ts[id_rows]), out)
    names, cuts, n_blocks = known[_PAIR * n_users :], numbers[n:], 0
    name_off, at = name_off if len(name_off) else np.arange(0, 8 * n_users + 8, 8), _PAIR * (n_users + len(id_rows))
    for u, counter in enumerate(counters.tolist()):
        name = names[name_off[u] : name_off[u + 1]].tobytes()
        for first in range(int(offsets[u]), int(offsets[u + 1]), _BLOCK_ROWS):
            last, number = min(first + _BLOCK_ROWS, int(offsets[u + 1])), counter + 1 + first - int(offsets[u])
            strings = heap[heap_off[first] : heap_off[last]].tobytes() if len(heap_off) else b""
            key = name + number.to_bytes(8, "big")
            header = [head.to_bytes(8, "little"), *(x.to_bytes(4, "little") for x in (last - first, len(strings)))]
            body = b"".join([*header, number.to_bytes(8, "little")])
            block = key + body + rows[first * row_bytes : last * row_bytes].tobytes() + strings
            block += zlib.crc32(block).to_bytes(4, "little")
            out[at : at + len(block)] = np.frombuffer(block, np.uint8)
            cuts[2 * n_blocks], cuts[2 * n_blocks + 1] = at, at + len(key)
            at, n_blocks = at + len(block), n_blocks + 1
    cuts[2 * n_blocks] = at
    return n_blocks, wrong, -1


def open_blocks(
    data: Array,
    lengths: Array,
    blocks: Array,
    after: Array,
    head: int,
    row_bytes: int,
    fields: Array,
    capacity: int,
    out: Array,
    arrival: Array,
    offsets: Array,
) -> bool:
    """As ``thinrow.kernels.numba.recent.open_blocks``."""
    ends, n, b = np.cumsum(lengths).tolist(), 0, 0
    offsets[0] = 0
    for u, count in enumerate(blocks.tolist()):
        for _ in range(count):
            begin, value, end = (ends[2 * b - 1] if b else 0), ends[2 * b], ends[2 * b + 1]
            block, b = data[value:end].tobytes(), b + 1
            if len(block) < _HEADER + _SEAL or zlib.crc32(data[begin:end].tobytes()) != _RESIDUE:
                return False
            held, strings = (int.from_bytes(block[i : i + 4], "little") for i in (8, 12))
            first = int.from_bytes(block[16:24], "little", signed=True)
            if int.from_bytes(block[:8], "little") != head or strings or n + held > capacity:
                return False
            if len(block) != _HEADER + held * row_bytes + _SEAL:
                return False
            skipped = min(max(int(after[u]) + 1 - first, 0), held)
            rows = np.frombuffer(block, np.uint8, held * row_bytes, _HEADER).reshape(held, row_bytes)[skipped:]
            for a, z in zip(fields[:-1].tolist(), fields[1:].tolist(), strict=True):
                to = capacity * a + n * (z - a)
                out[to : to + len(rows) * (z - a)] = rows[:, a:z].ravel()
            arrival[n : n + len(rows)] = first + skipped + np.arange(len(rows))
            n += len(rows)
        offsets[u + 1] = n
    return True


def follows(event_ts: Array, arrival: Array, offsets: Array, request_ts: Array, bound: Array, above: Array) -> bool:
    """As ``thinrow.kernels.numba.recent.follows``."""
    for u, (a, b) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        rows = list(zip(event_ts[a:b].tolist(), arrival[a:b].tolist(), strict=True))
        if sorted(set(rows)) != rows or any(t >= request_ts[u] or not above[u] < n <= bound[u] for t, n in rows):
            return False
    return True
