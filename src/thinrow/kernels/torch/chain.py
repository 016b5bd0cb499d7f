"""Chains as torch operations, on whatever device the column is: the bits are those of ``kernels.reference.chain``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from thinrow.core.wrap import MASK64
from thinrow.kernels.chain import INT, LN2_HIGH, LN2_LOW, LOG_TERMS, SQRT_HALF, TUPLE, Op, Program, hash_start


def signed(word: int) -> int:
    """The int64 of the bits of an unsigned word."""
    return int(np.uint64(word).view(np.int64))


_M1, _M2 = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def shifted(x: torch.Tensor, n: int) -> torch.Tensor:
    """int64 read as unsigned words, shifted right."""
    return (x >> n) & (MASK64 >> n)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 of int64 read as unsigned words."""
    x = (x ^ shifted(x, 30)) * _M1
    x = (x ^ shifted(x, 27)) * _M2
    return x ^ shifted(x, 31)


def mod_unsigned(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """int64 read as unsigned words, modulo a divisor in [1, 2^63)."""
    # Half of the word is not negative; twice its quotient is the word's, or one less.
    rest = x - (shifted(x, 1) // divisor << 1) * divisor
    return torch.where((rest < 0) | (rest >= divisor), rest - divisor, rest)


def log1p(x: torch.Tensor) -> torch.Tensor:
    """float64 log(1 + x) rounded to float32."""
    u = 1.0 + x
    mantissa, exponent = torch.frexp(u)
    low = mantissa < SQRT_HALF
    f = torch.where(low, 2 * mantissa, mantissa) - 1.0
    e = (exponent - low.int()).double()
    s = f / (2.0 + f)
    z = s * s
    r = torch.full_like(x, LOG_TERMS[-1])
    for term in LOG_TERMS[-2::-1]:
        r = term + z * r
    r = z * r
    half = 0.5 * f * f
    log = e * LN2_HIGH - ((half - (s * (half + r) + e * LN2_LOW)) - f)
    out = torch.where(u == 1.0, x, log * (x / (u - 1.0)))
    out = torch.where(x == torch.inf, x, torch.where(u == 0.0, -torch.inf, out))
    return torch.where(u < 0.0, torch.nan, out).float().double()


def run_chain(values: torch.Tensor, program: Program, slots: list[int]) -> list[torch.Tensor]:
    """(n,) integers or floats -> the slots, int64 or float64."""
    made = [values.double() if values.is_floating_point() else values.long()]
    for i, op in enumerate(program.op.tolist()):
        entries = torch.from_numpy(program.entries[program.table[i] : program.table[i + 1]].copy()).to(values.device)
        made.append(_step(Op(op), made[program.source[i]], program.words[i], entries))
    return [made[s] for s in slots]


def _step(op: Op, v: torch.Tensor, words: npt.NDArray[np.uint64], entries: torch.Tensor) -> torch.Tensor:
    first, second, _ = words.view(np.int64).tolist()
    if op is Op.HASH:
        return mix64(v ^ first)
    if op is Op.MOD:
        return mod_unsigned(v, first)
    if op is Op.BUCKETIZE_INTS:
        return torch.searchsorted(entries, v, right=True)
    if op is Op.BUCKETIZE_FLOATS:
        below = torch.searchsorted(entries.view(torch.float64), v, right=not first)
        return torch.where(torch.isnan(v), len(entries), below)
    if op is Op.CLIP_INTS:
        return v.clamp(first, second)
    if op is Op.CLIP_FLOATS:
        low, high = words[:2].view(np.float64).tolist()
        return torch.where(v < low, low, torch.where(v > high, high, v))
    if op is Op.LOG1P:
        return log1p(v)
    if op is Op.TO_FLOAT:
        return v.double()
    keys, held = entries.chunk(2) if len(entries) else (entries, entries)
    if not len(keys):
        return torch.full_like(v, first)
    at = torch.searchsorted(keys, v).clamp(max=len(keys) - 1)
    return torch.where(keys[at] == v, held[at], first)


def as_dtype(parts: list[torch.Tensor], width: int, dtype: np.dtype[np.generic]) -> torch.Tensor:
    """(n,) slots as one result of a NumPy dtype, (n, width) of a vector."""
    kind: torch.dtype = getattr(torch, dtype.name)
    return torch.stack(parts, 1).to(kind) if width else parts[0].to(kind)


def hash_tuples(columns: list[torch.Tensor], seed: int, buckets: int | None) -> torch.Tensor:
    """(n,) hashes of n tuples of hashes, or their buckets, as ``kernels.reference.features.hash_tuples``."""
    h = torch.full_like(columns[0], signed(hash_start(seed, TUPLE)))
    for column in columns:
        h = mix64(h ^ column)
    return h if buckets is None else mod_unsigned(h, buckets)


def hash_parts(parts: list[torch.Tensor], seeds: list[int]) -> torch.Tensor:
    """Hashes of the int64 of each part under its seed, side by side, as ``kernels.reference.features.hash_parts``."""
    return torch.cat([mix64(part ^ signed(hash_start(seed, INT))) for part, seed in zip(parts, seeds, strict=True)])
