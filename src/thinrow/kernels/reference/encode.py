"""Encoding of fixed-width columns: every block that the format allows is built, the smallest is kept."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.reference.blocks import LANES, PATCHED, packed_bytes

Array = npt.NDArray[Any]

MAX_LOCAL = 4096
#: Packed values lie in lanes in stripes of this many rows or more.
LANES_FROM = 64
#: Codes must save a byte for so many values, patches and bits that mark values too.
CODE_MARGIN = 16
PATCH_MARGIN, MARK_MARGIN = 32, 16
_MOST_PATCHES = 0xFFFF
_WORD = 1 << 64
#: Code of a word that the segment dictionary does not hold.
NO_CODE = 0xFFFFFFFF
_EXPONENTS, _MOST = 16, 2.0**51


def _lanes(n: int) -> int:
    return LANES if n >= LANES_FROM else 0


def _patches(q: list[int]) -> tuple[int, int]:
    """(bytes, low bits) of values with patches in the smallest form, of the most low bits where several are."""
    top, n = max(q, default=0).bit_length(), len(q)
    found = [(1 << 62, 0)]
    for low in range(top - 1, 0, -1):
        own = sum(v.bit_length() > low for v in q)
        if own > _MOST_PATCHES:
            break
        positions = (2 * ((n + 255) // 256) + own + 7) // 8 * 8
        found.append((8 + positions + (own * (top - low) + 63) // 64 * 8 + packed_bytes(n, low | _lanes(n)), low))
    return min(found, key=lambda f: f[0])


def _fit(q: list[int], patched: bool = True) -> tuple[int, int, int, int]:
    """(bytes, width, form, low bits) of packed values in the smallest form: plain, with patches, with bits that mark
    those that are not 0, or both."""
    top, n = max(q, default=0).bit_length(), len(q)
    found = [(packed_bytes(n, top | _lanes(n)), 0, 0, 0)]
    if patched and n >= LANES_FROM and top >= 2:
        size, low = _patches(q)
        found.append((size, n // PATCH_MARGIN, 1, low))
        own = [v for v in q if v]
        head = 8 + (n + 63) // 64 * 8
        found.append((head + packed_bytes(len(own), top | _lanes(len(own))), n // MARK_MARGIN, 2, 0))
        if len(own) >= LANES_FROM:
            size, low = _patches(own)
            found.append((head + size, n // MARK_MARGIN + len(own) // PATCH_MARGIN, 3, low))
    size, _, form, low = min(found, key=lambda f: f[0] + f[1])
    return size, PATCHED if form else top | _lanes(n), form, low


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
        # Floats are no numbers to packing, and steps that are longer than the values never fit better.
        affine_q = [(v - base) % _WORD // scale for v in values]
        taken, packed_width, _, _ = _fit(affine_q, kind == 0)
        options = [(2, packed_width, 16 + taken, base, scale)]
        step_q = [(v - step) % _WORD // step_scale for v in _steps(values, rows)] + [0] * len(rows)
        taken, packed_width, _, _ = _fit(step_q, step_width <= width)
        taken += 24 + (len(rows) * 4 + 7) // 8 * 8 + len(rows) * 8
        options.append((3, packed_width, taken, step, step_scale))
        if n_words:
            known = [c for c in codes[start:stop].tolist() if c != NO_CODE]
            taken, packed_width, _, _ = _fit(known)
            if len(known) == n:
                options.append((4, packed_width, taken, base, scale))
        distinct = len(set(values))
        if distinct <= MAX_LOCAL:
            bits = (distinct - 1).bit_length()
            options.append((5, bits | lanes, 8 + 8 * distinct + packed_bytes(n, bits | lanes), base, scale))
        options.append((6, itemsize * 8, (n * itemsize + 7) // 8 * 8, base, scale))
        decimal = _decimal(values, kind) if kind else None
        if decimal is not None:
            exponent, whole = decimal
            taken, packed_width, _, _ = _fit([v - min(whole) for v in whole])
            options.append((11, packed_width, 16 + taken, min(whole) % _WORD, exponent | kind << 8))
        signed = _signed(values)
        local_width = (max(signed) - min(signed)).bit_length()
        for n_bytes, hot, own in _mixed(values, codes[start:stop].tolist(), n_words, local_width):
            options.append((12, (hot + own - 1).bit_length() | lanes, n_bytes, base, hot))
        if n_words and 0 < len(known) < n:
            lacking = n - len(known)
            taken, packed_width, _, _ = _fit(known)
            taken += 16 + (n + 63) // 64 * 8 + packed_bytes(lacking, local_width | _lanes(lacking))
            options.append((13, packed_width, taken, base, lacking))
        extra = dict.fromkeys((4, 5, 12, 13), n // CODE_MARGIN)
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


def _pack_patches(q: list[int], low: int) -> bytes:
    top, groups = max(q).bit_length(), [q[i : i + 256] for i in range(0, len(q), 256)]
    own = [(r & 255, v >> low) for r, v in enumerate(q) if v >> low]
    ends = itertools.accumulate(sum(v >> low > 0 for v in group) for group in groups)
    places = b"".join(e.to_bytes(2, "little") for e in ends) + bytes(r for r, _ in own)
    highs = _bit_string([v for _, v in own], top - low, (len(own) * (top - low) + 63) // 64 * 8)
    cut = [v & ((1 << low) - 1) for v in q]
    return _u64(len(own) | low << 32 | (top - low) << 40) + _padded(places) + highs + _pack(cut, low | LANES)


def _pack(values: list[int], width: int) -> bytes:
    if width == PATCHED:
        _, _, form, low = _fit(values)
        if form == 1:
            return _pack_patches(values, low)
        own = [v for v in values if v]
        bits = _bit_string([int(v > 0) for v in values], 1, (len(values) + 63) // 64 * 8)
        inner = PATCHED if form == 3 else max(own).bit_length() | _lanes(len(own))
        packed = _pack_patches(own, low) if form == 3 else _pack(own, inner)
        return _u64(len(own) | inner << 32 | 1 << 48) + bits + packed
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
    if codec == 13:
        own_words = [(v - base) % _WORD for v, c in zip(values, codes, strict=True) if c == NO_CODE]
        own_width = max((v - base) % _WORD for v in values).bit_length() | _lanes(len(own_words))
        marks = _bit_string([int(c == NO_CODE) for c in codes], 1, (len(codes) + 63) // 64 * 8)
        held = _pack([c for c in codes if c != NO_CODE], width)
        return _u64(len(own_words) | own_width << 32, base) + marks + _pack(own_words, own_width) + held
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
