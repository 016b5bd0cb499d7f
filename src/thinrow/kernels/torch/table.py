"""Kernels of the embedding table as torch operations, on whatever device its tensors are.

Vectors, gradients and states are the bits of ``kernels.reference.table`` where the tensors are on the CPU. All rows are
one tensor (capacity, width). The index is no hash table but the keys (n,) int64 in ascending order beside their rows
(n,), in two parts or more: a search is one operation, where probing a hash table is a round for every step of the
longest probe (decision 051).

``number_keys`` and ``group_rows`` wait for the device: how much they return is in the data. Nothing else here does.

Worked example: looking keys (3, 4, -5) up in the part [-5, 3, 9] with rows [1, 0, 2] gives rows (0, -1, 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinrow.core.wrap import GOLDEN64, MASK64
from thinrow.core.wrap import mix64 as mix_word
from thinrow.kernels.torch.chain import mix64, shifted, signed

#: Keys in ascending order, and the row of each; both (n,) int64.
Part = tuple[Tensor, Tensor]


def find_keys(parts: Sequence[Part], wanted: Tensor) -> Tensor:
    """(n,) int64 row of each wanted key, -1 where no part has it."""
    rows = torch.full_like(wanted, -1)
    for keys, of in parts:
        if len(keys):
            at = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
            rows = torch.where(keys[at] == wanted, of[at], rows)
    return rows


def number_keys(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number distinct keys in order of first appearance: (9, 3, 9, 7) are (0, 1, 0, 2).

    Returns the distinct keys (d,) ascending, the number of each (d,), and of each position (n,) the place of its key
    among the distinct ones.
    """
    distinct, of = torch.unique(keys, return_inverse=True)
    positions = torch.arange(len(keys), device=keys.device)
    first = torch.full_like(distinct, len(keys)).scatter_reduce_(0, of, positions, "amin")
    numbers = torch.empty_like(distinct)
    numbers[first.argsort()] = positions[: len(distinct)]
    return distinct, numbers, of


def merge_keys(a: Part, b: Part) -> Part:
    """One part of both, which have no key in common."""
    places = [
        torch.searchsorted(other, mine) + torch.arange(len(mine), device=mine.device)
        for mine, other in ((a[0], b[0]), (b[0], a[0]))
    ]
    keys, rows = (torch.empty(len(x) + len(y), dtype=x.dtype, device=x.device) for x, y in zip(a, b, strict=True))
    for at, part in zip(places, (a, b), strict=True):
        keys[at], rows[at] = part
    return keys, rows


def touch_rows(usage: Tensor, rows: Tensor, step: int) -> None:
    """Count the use of ``rows`` (n,), -1 of nobody, in ``step``: column 0 of ``usage`` is how often, column 1 when."""
    held, at = rows >= 0, rows.clamp(min=0)
    usage[:, 0].index_add_(0, at, held.long())
    usage[:, 1].scatter_reduce_(0, at, held.long() * step, "amax")


def start_rows(values: Tensor, first: int, keys: Tensor, seed: int, scale: float, normal: bool) -> None:
    """Write the start of the rows ``first``, ``first + 1``, ..., whose keys are ``keys`` (``kernels.reference``)."""
    width = values.shape[1]
    steps = torch.arange(1, width * (3 if normal else 1) + 1, device=keys.device) * signed(GOLDEN64)
    words = mix64(mix64(keys ^ signed(mix_word(seed + GOLDEN64 & MASK64)))[:, None] + steps)
    if normal:
        quarters = torch.stack([shifted(words, n) & 0xFFFF for n in (0, 16, 32, 48)], 2)
        unit = (quarters.view(len(keys), width, 12).sum(2) + 6.0).double() * 2.0**-16 - 6
    else:
        unit = shifted(words, 40).double() * 2.0**-23 - 1
    values[first : first + len(keys)] = unit.to(values.dtype) * scale


def gather_rows(values: Tensor, rows: Tensor) -> Tensor:
    """(n, width) copy of ``rows``; row -1 is zeros."""
    return values.index_select(0, rows.clamp(min=0)).masked_fill_((rows < 0)[:, None], 0)


def pool_rows(values: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
    """(b, width): the sums of the rows ``rows[bounds[b]:bounds[b + 1]]``, added in this order to zeros; row -1 is
    zeros. ``bounds`` ascend from 0 to n: nothing checks it here."""
    return _sum_in_order(gather_rows(values, rows), bounds.diff(), 0.0)


def group_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of equal rows together: the distinct rows (d,) ascending, how often each is there (d,), and the
    positions (n,), those of the first row first, each row's ascending."""
    by_row, order = torch.sort(rows, stable=True)
    distinct, counts = torch.unique_consecutive(by_row, return_counts=True)
    return distinct, counts, order


def sum_groups(gradient: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """(d, width): the sums of ``counts[k]`` gradients each, in the order of ``order``, added one by one."""
    # To -0 every number adds to itself, -0 as well.
    return _sum_in_order(gradient.index_select(0, order), counts, -0.0)


def sgd_rows(values: Tensor, rows: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
    """One step of gradient descent on distinct ``rows``: g += decay * value; value -= lr * g."""
    held = values[rows]
    values[rows] = held - lr * _decayed(held, gradient, decay)


def adagrad_rows(
    values: Tensor, sums: Tensor, rows: Tensor, gradient: Tensor, lr: float, eps: float, decay: float
) -> None:
    """One step of Adagrad on distinct ``rows``, whose gradient is (d, width) (``kernels.reference``)."""
    held = values[rows]
    gradient = _decayed(held, gradient, decay)
    total = sums[rows] + gradient * gradient
    sums[rows] = total
    values[rows] = held - lr * (gradient / (_root(total) + eps))


def rowwise_adagrad_rows(
    values: Tensor, sums: Tensor, rows: Tensor, gradient: Tensor, lr: float, eps: float, decay: float
) -> None:
    """One step of Adagrad with one sum a row, that of the mean of g^2 (``kernels.reference``)."""
    held = values[rows]
    gradient = _decayed(held, gradient, decay)
    width = torch.full((1,), gradient.shape[1], device=rows.device)
    squares = _sum_in_order((gradient * gradient).T.contiguous(), width, 0.0)[0]
    # Not by the number itself: a device may multiply by its reciprocal, which rounds twice.
    total = sums[rows] + (squares / width.to(squares.dtype))[:, None]
    sums[rows] = total
    values[rows] = held - lr * (gradient / (_root(total) + eps))


def adam_rows(
    values: Tensor,
    means: Tensor,
    squares: Tensor,
    steps: Tensor,
    rows: Tensor,
    gradient: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    decoupled: float,
) -> None:
    """One step of Adam on distinct ``rows``, each with a step count of its own; with ``decoupled`` of AdamW
    (``kernels.reference``)."""
    held = values[rows]
    gradient = _decayed(held, gradient, decay)
    count = steps[rows] + 1
    steps[rows] = count
    mean = means[rows]
    mean = mean + (1 - beta1) * (gradient - mean)
    means[rows] = mean
    square = beta2 * squares[rows] + (1 - beta2) * (gradient * gradient)
    squares[rows] = square
    left = 1 - _powers(beta1, count)
    rate = (torch.full_like(left, lr) / left).to(gradient.dtype)
    root = _root(1 - _powers(beta2, count)).to(gradient.dtype)
    values[rows] = held * (1 - lr * decoupled) - rate * (mean / (_root(square) / root + eps))


def _decayed(held: Tensor, gradient: Tensor, decay: float) -> Tensor:
    return gradient if decay == 0 else gradient + decay * held


def _sum_in_order(numbers: Tensor, sizes: Tensor, start: float) -> Tensor:
    """(b, width): sums of the next ``sizes[b]`` rows each, added one by one to ``start``, by a thread a number of the
    result: the order, and so the bits, are the same in every run."""
    return torch.segment_reduce(numbers, "sum", lengths=sizes, initial=start, unsafe=True)


def _root(x: Tensor) -> Tensor:
    """Square roots, correctly rounded. On the CPU torch may ask MKL, whose last bit is wrong for one number in 140."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def _powers(base: float, exponents: Tensor) -> Tensor:
    """float64 ``base ** exponents`` by repeated squaring, for a base in [0, 1): at most 63 rounds, whatever the
    exponents are, for then the square is 0."""
    out, square, bit = torch.ones(exponents.shape, dtype=torch.float64, device=exponents.device), base, 0
    while square and bit < 63:
        out = torch.where((exponents >> bit & 1) == 1, out * square, out)
        square, bit = square * square, bit + 1
    return torch.where(exponents >> bit > 0, 0.0, out) if bit < 63 else out
