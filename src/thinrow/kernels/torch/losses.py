"""Softmax losses over many items that never hold the logits: tiles of them, made again in backward.

The worked example and the meaning of arguments are in ``kernels.reference.losses``. Memory is that of queries, items,
their gradients and one tile, where the logits of 10,000 queries and 1,000,000 items would be 40 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from thinrow.kernels.groups import check_rows

#: Queries of a tile, and the logits that it has at most.
_ROWS, _TILE = 512, 1 << 20


def softmax_cross_entropy(x_NW: Tensor, items_KW: Tensor, offset_K: Tensor, target_N: Tensor) -> Tensor:
    """As ``kernels.reference.losses.softmax_cross_entropy``. Differentiable once."""
    check_rows(x_NW, items_KW, offset_K, target_N)
    own = (x_NW * items_KW[target_N]).sum(1) + offset_K[target_N]
    total: Tensor = _LogSumExp.apply(x_NW, items_KW, offset_K, None, None)  # type: ignore[no-untyped-call]
    return total - own


def sampled_softmax(
    x_NW: Tensor, target_NW: Tensor, target_id_N: Tensor,
    items_KW: Tensor, item_id_K: Tensor, log_expected_K: Tensor,
) -> Tensor:  # fmt: skip
    """As ``kernels.reference.losses.sampled_softmax``. Differentiable once."""
    check_rows(x_NW, items_KW, log_expected_K, target_id_N)
    own = (x_NW * target_NW).sum(1)
    others: Tensor = _LogSumExp.apply(x_NW, items_KW, -log_expected_K, target_id_N, item_id_K)  # type: ignore[no-untyped-call]
    return softplus(others - own)


class _LogSumExp(torch.autograd.Function):
    """(N,) log of the sum over items of ``exp(x . item + offset)``; where a query's ``skip`` is the item's id, without
    it. Of nothing it is -inf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, items: Tensor, offset: Tensor, skip: Tensor | None, ids: Tensor | None) -> Tensor:
        most = x.new_full((len(x),), -torch.inf)
        total = torch.zeros_like(most)
        for rows, columns in _tiles(len(x), len(items)):
            logits = _logits(x, items, offset, skip, ids, rows, columns)
            highest = torch.maximum(most[rows], logits.max(1).values)
            # Of nothing but -inf the highest is -inf, and the difference to it NaN.
            base = highest.clamp(min=torch.finfo(x.dtype).min)
            total[rows] = total[rows] * (most[rows] - base).exp() + logits.sub_(base[:, None]).exp_().sum(1)
            most[rows] = highest
        result = most + total.log()
        ctx.save_for_backward(x, items, offset, result)
        ctx.skip, ctx.ids = skip, ids
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, items, offset, result = ctx.saved_tensors
        dx, ditems, doffset = torch.zeros_like(x), torch.zeros_like(items), torch.zeros_like(offset)
        base = result.clamp(min=torch.finfo(x.dtype).min)
        for rows, columns in _tiles(len(x), len(items)):
            logits = _logits(x, items, offset, ctx.skip, ctx.ids, rows, columns)
            share = logits.sub_(base[rows, None]).exp_().mul_(gradient[rows, None])
            dx[rows].addmm_(share, items[columns])
            ditems[columns].addmm_(share.T, x[rows])
            doffset[columns] += share.sum(0)
        return dx, ditems, doffset, None, None


def _tiles(n: int, k: int) -> Iterator[tuple[slice, slice]]:
    step = max(1, _TILE // max(1, min(n, _ROWS)))
    for i in range(0, n, _ROWS):
        for j in range(0, k, step):
            yield slice(i, i + _ROWS), slice(j, j + step)


def _logits(
    x: Tensor, items: Tensor, offset: Tensor, skip: Tensor | None, ids: Tensor | None, rows: slice, columns: slice
) -> Tensor:
    logits = torch.addmm(offset[columns], x[rows], items[columns].T)
    if skip is not None and ids is not None:
        logits.masked_fill_(skip[rows, None] == ids[columns], -torch.inf)
    return logits
