"""Chains in NumPy, a step at a time over the whole column: the oracle that other backends must equal bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.wrap import mix64_words
from thinrow.kernels.chain import FLOATS, LN2_HIGH, LN2_LOW, LOG_TERMS, SQRT_HALF, Op, Program


def log1p(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(n,) log(1 + v) rounded to float32, from basic float64 operations in a stated order: the same bits anywhere.

    log(u) of u = 1 + v, times v / (u - 1) for what the addition rounded off (Goldberg, "What every computer scientist
    should know about floating-point arithmetic", 1991, theorem 4).
    """
    with np.errstate(all="ignore"):
        u = 1.0 + values
        mantissa, exponent = np.frexp(u)
        low = mantissa < SQRT_HALF
        f = np.where(low, 2 * mantissa, mantissa) - 1.0
        e = (exponent - low).astype(np.float64)
        s = f / (2.0 + f)
        z = s * s
        r = np.full(len(values), LOG_TERMS[-1])
        for term in LOG_TERMS[-2::-1]:
            r = term + z * r
        r = z * r
        half = 0.5 * f * f
        log = e * LN2_HIGH - ((half - (s * (half + r) + e * LN2_LOW)) - f)
        out = np.where(u == 1.0, values, log * (values / (u - 1.0)))
        out = np.where(np.isinf(values) & (values > 0), np.inf, np.where(u == 0, -np.inf, out))
        return np.where(u < 0, np.nan, out).astype(np.float32).astype(np.float64)


def run_chain(
    values: npt.NDArray[Any], program: Program, slots: Sequence[int], outs: Sequence[npt.NDArray[Any]]
) -> None:
    """Walk a chain over a column and write slot ``slots[i]`` to ``outs[i]``.

    Args:
        values: (n,) integers or floats.
        program: the chain.
        slots: 0 for the column, i + 1 for what step i made.
        outs: (n,) arrays, of any stride, of dtypes that hold what is written.
    """
    made: list[npt.NDArray[Any]] = [values.astype(np.float64 if values.dtype.kind == "f" else np.int64)]
    for i, op in enumerate(program.op.tolist()):
        entries = program.entries[program.table[i] : program.table[i + 1]]
        made.append(_step(Op(op), made[program.source[i]], program.words[i], entries))
        assert (made[-1].dtype.kind == "f") == (Op(op) in FLOATS)
    for slot, out in zip(slots, outs, strict=True):
        out[:] = made[slot]


def _step(
    op: Op, v: npt.NDArray[Any], words: npt.NDArray[np.uint64], entries: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    signed = words.view(np.int64)
    if op is Op.HASH:
        return np.asarray(mix64_words(words[0] ^ v.view(np.uint64)).view(np.int64))
    if op is Op.MOD:
        return np.asarray((v.view(np.uint64) % words[0]).view(np.int64))
    if op is Op.BUCKETIZE_INTS:
        return np.asarray(np.searchsorted(entries, v, side="right"))
    if op is Op.BUCKETIZE_FLOATS:
        below = np.searchsorted(entries.view(np.float64), v, side="left" if words[0] else "right")
        return np.where(np.isnan(v), len(entries), below)
    if op is Op.CLIP_INTS:
        return np.asarray(np.clip(v, signed[0], signed[1]))
    if op is Op.CLIP_FLOATS:
        low, high = words[:2].view(np.float64)
        return np.where(v < low, low, np.where(v > high, high, v))
    if op is Op.LOG1P:
        return log1p(v)
    if op is Op.TO_FLOAT:
        return v.astype(np.float64)
    keys, held = np.split(entries, 2)
    if not len(keys):
        return np.full(len(v), signed[0])
    at = np.minimum(np.searchsorted(keys, v), len(keys) - 1)
    return np.where(keys[at] == v, held[at], signed[0])
