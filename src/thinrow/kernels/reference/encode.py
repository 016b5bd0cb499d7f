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
#: Codes must save a byte for so many values.
CODE_MARGIN = 16
_WORD = 1 << 64
#: Code of a word that the segment dictionary does not hold.
NO_CODE = 0xFFFFFFFF
_EXPONENTS, _MOST = 16, 2.0**51


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


def _float_of(word: int, kind: int) -> float:
    if kind == 32:
        return float(np.array([word], np.uint32).view(np.float32)[0])
    return float(np.array([word], np.uint64).view(np.float64)[0])


def _scaled(word: int, power: float, kind: int) -> int | None:
    """The integer that, divided by ``power``, is the float of these bits; None where there is none."""
    value = _float_of(word, kind)
    scaled = value * power
    if not abs(scaled) < _MOST or (value == 0.0 and word != 0):
        return None
    q = round(scaled)
    found = q / power
    return q if (float(np.float32(found)) if kind == 32 else found) == value else None


def _decimal(values: list[int], kind: int) -> tuple[int, list[int]] | None:
    """(exponent, integers) of floats that all are integers divided by one power of ten."""
    e = 0
    with np.errstate(all="ignore"):
        for word in values:
            while _scaled(word, 10.0**e, kind) is None:
                e += 1
                if e == _EXPONENTS:
                    return None
        found = [_scaled(word, 10.0**e, kind) for word in values]
    return None if None in found else (e, [q for q in found if q is not None])


def _mixed(values: list[int], codes: list[int], n_words: int, local_width: int) -> list[tuple[int, int, int]]:
    """Codec 12 as (bytes, words of the segment dictionary, own words), for each number of the former that may be."""
    n, code_of = len(values), dict(zip(values, codes, strict=True)) if n_words else dict.fromkeys(values, NO_CODE)
    found = []
    octaves = (1 << b for b in range(3, 31))
    bounds = [*range(9), *(o * quarters // 4 for o in octaves for quarters in (5, 6, 7, 8))]
    hots = dict.fromkeys(min(bound, n_words) for bound in bounds)
    for hot in hots:
        own = sum(code >= hot for code in code_of.values())
        if own <= MAX_LOCAL:
            lanes, many = LANES if n >= LANES_FROM else 0, LANES if own >= LANES_FROM else 0
            width = (hot + own - 1).bit_length()
            size = 24 + packed_bytes(own, local_width | many) + packed_bytes(n, width | lanes)
            found.append((size, hot, own))
    return found


def plan_blocks(
    words: Array, kind: int, stripe_offsets: Array, restarts: Array, itemsize: int, codes: Array, n_words: int
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
        if n_words and int(codes[start:stop].max()) != NO_CODE:
            bits = int(codes[start:stop].max()).bit_length()
            options.append((4, bits | lanes, packed_bytes(n, bits | lanes), base, scale))
        distinct = len(set(values))
        if distinct <= MAX_LOCAL:
            bits = (distinct - 1).bit_length()
            options.append((5, bits | lanes, 8 + 8 * distinct + packed_bytes(n, bits | lanes), base, scale))
        options.append((6, itemsize * 8, (n * itemsize + 7) // 8 * 8, base, scale))
        decimal = _decimal(values, kind) if kind else None
        if decimal is not None:
            exponent, whole = decimal
            bits = (max(whole) - min(whole)).bit_length() | lanes
            options.append((11, bits, 16 + packed_bytes(n, bits), min(whole) % _WORD, exponent | kind << 8))
        signed = _signed(values)
        local_width = (max(signed) - min(signed)).bit_length()
        for n_bytes, hot, own in _mixed(values, codes[start:stop].tolist(), n_words, local_width):
            options.append((12, (hot + own - 1).bit_length() | lanes, n_bytes, base, hot))
        extra = dict.fromkeys((4, 5, 12), n // CODE_MARGIN)
        cost = [(option[2] + extra.get(option[0], 0), option[0]) for option in options]
        plans.append(options[cost.index(min(cost))])
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


def _mixed_block(values: list[int], codes: list[int], width: int, base: int, hot: int) -> bytes:
    code_of = dict(zip(values, codes, strict=True)) if codes else dict.fromkeys(values, NO_CODE)
    own = sorted((v - base) % _WORD for v, code in code_of.items() if code >= hot)
    rank = {q: i for i, q in enumerate(own)}
    local_width = max((v - base) % _WORD for v in values).bit_length() | (LANES if len(own) >= LANES_FROM else 0)
    coded = [code_of[v] if code_of[v] < hot else hot + rank[(v - base) % _WORD] for v in values]
    return _u64(hot | len(own) << 32, base, local_width) + _pack(own, local_width) + _pack(coded, width)


def _block(
    values: list[int],
    kind: int,
    rows: list[int],
    itemsize: int,
    codes: list[int],
    codec: int,
    width: int,
    base: int,
    scale: int,
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
    if codec == 11:
        whole = [_scaled(v, 10.0 ** (scale & 0xFF), kind) for v in values]
        return _u64(base, scale) + _pack([(v - base) % _WORD for v in whole if v is not None], width)
    if codec == 12:
        return _mixed_block(values, codes, width, base, scale)
    if codec == 5:
        table = sorted(set(values))
        code_of = {v: c for c, v in enumerate(table)}
        return _u64(len(table), *table) + _pack([code_of[v] for v in values], width)
    return _padded(b"".join((v % (1 << (8 * itemsize))).to_bytes(itemsize, "little") for v in values))


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
    """As ``thinrow.kernels.numba.encode.write_blocks``."""
    for s in range(len(stripe_offsets) - 1):
        start, stop = int(stripe_offsets[s]), int(stripe_offsets[s + 1])
        block = _block(
            words[start:stop].tolist(),
            kind,
            _pieces(start, stop, restarts),
            itemsize,
            codes[start:stop].tolist() if n_words else [],
            int(codec[s]),
            int(width[s]),
            int(base[s]),
            int(scale[s]),
        )
        payload[offsets[s] : offsets[s + 1]] = np.frombuffer(block, np.uint8)
