"""Kernels of the dynamic embedding table in NumPy: the oracle that other backends must equal bit for bit.

Rows are kept in equal blocks whose row count is a power of two: row r is ``blocks[r // R][r % R]`` with R = ``len(
blocks[0])``. A new block never moves an old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.wrap import GOLDEN64, mix64, mix64_words

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]


def touch_rows(usage: Sequence[Ints], rows: Ints, step: int) -> None:
    """Count the use of ``rows`` (n,), -1 of nobody, in ``step``: column 0 of ``usage`` is how often, column 1 when."""
    distinct, counts = np.unique(rows[rows >= 0], return_counts=True)
    if len(distinct):
        held = _get(usage, distinct)
        _put(usage, distinct, np.stack([held[:, 0] + counts, np.full(len(distinct), step)], axis=1))


def start_rows(blocks: Sequence[Floats], first: int, keys: Ints, seed: int, scale: float, normal: bool) -> None:
    """Write the start of the rows ``first``, ``first + 1``, ..., whose keys are ``keys``.

    With G = 2^64 / golden ratio, w = mix64(key ^ mix64(seed + G)) and word k = mix64(w + (k + 1) * G), the value of
    column c is ``scale * ((word c >> 40) * 2^-23 - 1)``: uniform over 2^24 steps of [-scale, scale). With ``normal`` it
    is ``scale * (s * 2^-16 - 6)``, s the sum of the twelve 16-bit quarters of the words 3c to 3c + 2, a half added to
    each: mean 0, deviation ``scale`` to 9 digits, within six of it, near normal (Irwin-Hall). One rounding, to the
    table's dtype. ``seed`` is in [0, 2^63).
    """
    if not blocks:
        return
    dtype, width = blocks[0].dtype, blocks[0].shape[1]
    seeded = np.uint64(mix64((seed + GOLDEN64) & ((1 << 64) - 1)))
    steps = np.arange(1, width * (3 if normal else 1) + 1, dtype=np.uint64) * np.uint64(GOLDEN64)
    words = mix64_words(mix64_words(keys.view(np.uint64) ^ seeded)[:, None] + steps)
    if normal:
        quarters = words[..., None] >> np.array([0, 16, 32, 48], np.uint64) & np.uint64(0xFFFF)
        unit = (quarters.reshape(len(keys), width, 12).sum(axis=2) + 6.0) * 2.0**-16 - 6
    else:
        unit = (words >> np.uint64(40)) * 2.0**-23 - 1
    _put(blocks, np.arange(first, first + len(keys)), unit.astype(dtype) * dtype.type(scale))


def gather_rows(blocks: Sequence[Floats], n_rows: int, rows: Ints, out: Floats) -> int:
    """Copy ``rows`` into ``out`` (n, width); row -1 is zeros.

    Returns the first position whose row is not in [-1, n_rows), or -1; such rows are left alone.
    """
    valid = (rows >= 0) & (rows < n_rows)
    out[rows == -1] = 0
    if valid.any():
        out[valid] = _get(blocks, rows[valid])
    bad = np.flatnonzero(~valid & (rows != -1))
    return int(bad[0]) if len(bad) else -1


def pool_rows(blocks: Sequence[Floats], n_rows: int, rows: Ints, bounds: Ints, out: Floats) -> int:
    """``out[b]`` (b, width) = the sum of the rows ``rows[bounds[b]:bounds[b + 1]]``, added in this order to zeros; row
    -1 is zeros.

    Returns the first position whose row is not in [-1, n_rows), or -1; its bag then says nothing.
    """
    held = np.zeros((len(rows), out.shape[1]), out.dtype)
    bad = gather_rows(blocks, n_rows, rows, held)
    out[:] = 0
    sizes = np.diff(bounds)
    for k in range(int(sizes.max(initial=0))):
        more = np.flatnonzero(sizes > k)
        out[more] += held[bounds[more] + k]
    return bad


def distinct_rows(rows: Ints, n_rows: int) -> tuple[Ints, Ints]:
    """The distinct ones of ``rows`` (n,), which are in [0, n_rows), ascending, and of each row its place among them."""
    distinct, places = np.unique(rows, return_inverse=True)
    return distinct, places.astype(np.int64, copy=False)


def sum_rows(gradient: Floats, of: Ints | None, places: Ints, out: Floats) -> int:
    """``out[p]`` = the sum of ``gradient[of[i]]`` of all positions i with ``places[i] == p``, added in their order;
    without ``of`` that of ``gradient[i]``. ``out`` is (d, width), and every place in [0, d) there.

    Returns the first place whose sum has a NaN or an infinity, or -1.
    """
    order = np.argsort(places, kind="stable")
    starts = np.searchsorted(places[order], np.arange(len(out) + 1))
    if of is not None:
        order = of[order]
    sizes = np.diff(starts)
    out[:] = gradient[order[starts[:-1]]]
    for k in range(1, int(sizes.max(initial=1))):
        more = np.flatnonzero(sizes > k)
        out[more] += gradient[order[starts[more] + k]]
    bad = np.flatnonzero(~np.isfinite(out).all(axis=1))
    return int(bad[0]) if len(bad) else -1


def adagrad_rows(
    values: Sequence[Floats], sums: Sequence[Floats], rows: Ints, gradient: Floats, lr: float, eps: float, decay: float
) -> None:
    """One step of Adagrad (Duchi, Hazan, Singer 2011) on distinct ``rows``, whose gradient is (d, width).

    g += decay * value; s += g^2; value -= lr * (g / (sqrt(s) + eps)).
    """
    if not len(rows):
        return
    of = gradient.dtype.type
    gradient = _decayed(values, rows, gradient, decay)
    total = _get(sums, rows) + gradient * gradient
    _put(sums, rows, total)
    _put(values, rows, _get(values, rows) - of(lr) * (gradient / (np.sqrt(total) + of(eps))))


def rowwise_adagrad_rows(
    values: Sequence[Floats], sums: Sequence[Floats], rows: Ints, gradient: Floats, lr: float, eps: float, decay: float
) -> None:
    """One step of Adagrad with one sum a row (``sums`` of width 1), as FBGEMM's exact row-wise Adagrad.

    g += decay * value; s += mean of g^2 over the row, added from its first element on; value -= lr * (g / (sqrt(s) +
    eps)).
    """
    if not len(rows):
        return
    of = gradient.dtype.type
    gradient = _decayed(values, rows, gradient, decay)
    mean = np.zeros(len(rows), gradient.dtype)
    for column in gradient.T:
        mean = mean + column * column
    total = _get(sums, rows) + (mean / of(gradient.shape[1]))[:, None]
    _put(sums, rows, total)
    _put(values, rows, _get(values, rows) - of(lr) * (gradient / (np.sqrt(total) + of(eps))))


def sgd_rows(values: Sequence[Floats], rows: Ints, gradient: Floats, lr: float, decay: float) -> None:
    """One step of gradient descent on distinct ``rows``: g += decay * value; value -= lr * g."""
    if len(rows):
        gradient = _decayed(values, rows, gradient, decay)
        _put(values, rows, _get(values, rows) - gradient.dtype.type(lr) * gradient)


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
    """One step of Adam (Kingma, Ba 2015, algorithm 1) on distinct ``rows``, each with a step count t of its own; with
    ``decoupled`` that of AdamW (Loshchilov, Hutter 2019, algorithm 2).

    g += decay * value; t += 1; m += (1 - beta1) * (g - m); v = beta2 * v + (1 - beta2) * g^2;
    value = value * (1 - lr * decoupled) - lr / (1 - beta1^t) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps)).
    """
    if not len(rows):
        return
    of = gradient.dtype.type
    gradient = _decayed(values, rows, gradient, decay)
    count = _get(steps, rows) + 1
    _put(steps, rows, count)
    mean = _get(means, rows)
    mean = mean + of(1 - beta1) * (gradient - mean)
    _put(means, rows, mean)
    square = of(beta2) * _get(squares, rows) + of(1 - beta2) * (gradient * gradient)
    _put(squares, rows, square)
    rate = (lr / (1 - _powers(beta1, count))).astype(gradient.dtype)
    root = np.sqrt(1 - _powers(beta2, count)).astype(gradient.dtype)
    kept = _get(values, rows) * of(1 - lr * decoupled)
    _put(values, rows, kept - rate * (mean / (np.sqrt(square) / root + of(eps))))


def _decayed(values: Sequence[Floats], rows: Ints, gradient: Floats, decay: float) -> Floats:
    return gradient if decay == 0 else gradient + gradient.dtype.type(decay) * _get(values, rows)


def _get(blocks: Sequence[npt.NDArray[Any]], rows: Ints) -> npt.NDArray[Any]:
    block, within = np.divmod(rows, len(blocks[0]))
    out = np.empty((len(rows), blocks[0].shape[1]), blocks[0].dtype)
    for k in np.unique(block):
        out[block == k] = blocks[k][within[block == k]]
    return out


def _put(blocks: Sequence[npt.NDArray[Any]], rows: Ints, values: npt.NDArray[Any]) -> None:
    block, within = np.divmod(rows, len(blocks[0]))
    for k in np.unique(block):
        blocks[k][within[block == k]] = values[block == k]


def _powers(base: float, exponents: Ints) -> npt.NDArray[np.float64]:
    """``base ** exponents`` by repeated squaring, so that every backend rounds alike."""
    out, square, left = np.ones(exponents.shape), np.float64(base), exponents.copy()
    while left.any():
        np.multiply(out, square, out=out, where=(left & 1) == 1)
        square, left = square * square, left >> 1
    return out
