"""Encoding of fixed-width columns: every block that the format allows is built, the smallest is kept."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.reference.blocks import LANES, packed_bytes

Array = npt.NDArray[Any]

MAX_LOCAL = 4096
#: Packed values lie in lanes in stripes of this many rows or more.
LANES_FROM = 64
_WORD = 1 << 64


def _signed(words: list[int]) -> list[int]:
    return [w - _WORD if w >> 63 else w for w in words]


def _affine(values: list[int]) -> tuple[int, int, int]:
    """(base, scale, width) of unsigned words; base is the least, read as signed."""
    if not values:
        return 0, 1, 0
    signed = _signed(values)
    base = min(signed)
    scale = math.gcd(*(v - base for v in signed))
    return base % _WORD, max(scale, 1), ((max(signed) - base) // max(scale, 1)).bit_length()


def _pieces(start: int, stop: int, restarts: Array) -> list[int]:
    return [int(r) - start for r in restarts if start <= r < stop]


def _steps(words: list[int], rows: list[int]) -> list[int]:
    restarting = set(rows)
    return [(words[r] - words[r - 1]) % _WORD for r in range(len(words)) if r not in restarting]


def plan_blocks(
    words: Array, stripe_offsets: Array, restarts: Array, itemsize: int, codes: Array, has_codes: bool
) -> tuple[Array, Array, Array, Array, Array]:
    """As ``thinrow.kernels.numba.encode.plan_blocks``."""
    plans = []
    for start, stop in zip(stripe_offsets[:-1].tolist(), stripe_offsets[1:].tolist(), strict=True):
        values = words[start:stop].tolist()
        n = len(values)
        if not any(values):
            plans.append((0, 0, 0, 0, 1))
            continue
        base, scale, width = _affine(values)
        if width == 0:
            plans.append((1, 0, 8, base, scale))
            continue
        rows = _pieces(start, stop, restarts)
        lanes = LANES if n >= LANES_FROM else 0
        step, step_scale, step_width = _affine(_steps(values, rows))
        options = [(2, width | lanes, 16 + packed_bytes(n, width | lanes), base, scale)]
        delta_bytes = 24 + (len(rows) * 4 + 7) // 8 * 8 + len(rows) * 8 + packed_bytes(n, step_width | lanes)
        options.append((3, step_width | lanes, delta_bytes, step, step_scale))
        if has_codes:
            bits = int(codes[start:stop].max()).bit_length()
            options.append((4, bits | lanes, packed_bytes(n, bits | lanes), base, scale))
        distinct = len(set(values))
        if distinct <= MAX_LOCAL:
            bits = (distinct - 1).bit_length()
            options.append((5, bits | lanes, 8 + 8 * distinct + packed_bytes(n, bits | lanes), base, scale))
        options.append((6, itemsize * 8, (n * itemsize + 7) // 8 * 8, base, scale))
        plans.append(min(options, key=lambda option: (option[2], option[0])))
    codec, width_of, size, bases, scales = (
        (list(c) for c in zip(*plans, strict=True)) if plans else ([], [], [], [], [])
    )
    return (
        np.array(codec, np.uint8),
        np.array(width_of, np.uint8),
        np.array(size, np.int64),
        np.array(bases, np.uint64),
        np.array(scales, np.uint64),
    )


def _pack(values: list[int], width: int) -> bytes:
    size = packed_bytes(len(values), width)
    if not width & LANES:
        return _bit_string(values, width, size)
    lanes = [_bit_string(values[lane::8], width & (LANES - 1), size // 8) for lane in range(8)]
    return b"".join(lane[at : at + 8] for at in range(0, size // 8, 8) for lane in lanes)


def _bit_string(values: list[int], width: int, size: int) -> bytes:
    number = 0
    for i, value in enumerate(values):
        number |= value << (i * width)
    return number.to_bytes(size, "little")


def _u64(*values: int) -> bytes:
    return b"".join(v.to_bytes(8, "little") for v in values)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def _block(
    values: list[int], rows: list[int], itemsize: int, codes: list[int], codec: int, width: int, base: int, scale: int
) -> bytes:
    if codec == 0:
        return b""
    if codec == 1:
        return _u64(base)
    if codec == 2:
        return _u64(base, scale) + _pack([(v - base) % _WORD // scale for v in values], width)
    if codec == 3:
        restarting = set(rows)
        q = [0 if r in restarting else (v - values[r - 1] - base) % _WORD // scale for r, v in enumerate(values)]
        places = _padded(b"".join(r.to_bytes(4, "little") for r in rows))
        return _u64(base, scale, len(rows)) + places + _u64(*(values[r] for r in rows)) + _pack(q, width)
    if codec == 4:
        return _pack(codes, width)
    if codec == 5:
        table = sorted(set(values))
        code_of = {v: c for c, v in enumerate(table)}
        return _u64(len(table), *table) + _pack([code_of[v] for v in values], width)
    return _padded(b"".join((v % (1 << (8 * itemsize))).to_bytes(itemsize, "little") for v in values))


def write_blocks(
    words: Array,
    stripe_offsets: Array,
    restarts: Array,
    itemsize: int,
    codes: Array,
    codec: Array,
    width: Array,
    base: Array,
    scale: Array,
    offsets: Array,
    payload: Array,
) -> None:
    """As ``thinrow.kernels.numba.encode.write_blocks``."""
    for s in range(len(stripe_offsets) - 1):
        start, stop = int(stripe_offsets[s]), int(stripe_offsets[s + 1])
        block = _block(
            words[start:stop].tolist(),
            _pieces(start, stop, restarts),
            itemsize,
            codes[start:stop].tolist(),
            int(codec[s]),
            int(width[s]),
            int(base[s]),
            int(scale[s]),
        )
        payload[offsets[s] : offsets[s + 1]] = np.frombuffer(block, np.uint8)
