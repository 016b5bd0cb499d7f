"""Norms and projections of grouped tokens: one call of torch a kind, nothing held that backward can make again.

The worked example and the meaning of arguments are in ``kernels.reference.dense``. Of ``norm_multiply_dropout``
autograd would keep the normalised tokens, the mask and a product; here it keeps x, u and two numbers a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import layer_norm

from thinrow.kernels.groups import FEATURE, NARROW, WIDE, check_groups, keep_below

#: Elements that are worked on at a time.
_BLOCK = 1 << 16


def group_layer_norm(
    x_TW: Tensor, bounds: Sequence[int], weight_GW: Tensor, bias_GW: Tensor, eps: float = 1e-5
) -> Tensor:
    """As ``kernels.reference.dense.group_layer_norm``."""
    check_groups(x_TW, bounds, weight_GW, bias_GW)
    parts = [
        layer_norm(x_TW[rows], x_TW.shape[1:], weight_GW[g], bias_GW[g], eps) for g, rows in enumerate(_rows(bounds))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def norm_multiply_dropout(
    x_TW: Tensor, u_TW: Tensor, bounds: Sequence[int], weight_GW: Tensor, bias_GW: Tensor, *,
    token_T: Tensor, seed: int, rate: float, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """As ``kernels.reference.dense.norm_multiply_dropout``. Differentiable once."""
    check_groups(x_TW, bounds, weight_GW, bias_GW)
    limit = keep_below(x_TW, u_TW, token_T, rate)
    drop = (token_T, seed, limit, rate)
    out: Tensor = _Gate.apply(x_TW, u_TW, tuple(bounds), weight_GW, bias_GW, drop, eps)  # type: ignore[no-untyped-call]
    return out


def jagged_linear(x_TI: Tensor, bounds: Sequence[int], weight_GIO: Tensor, bias_GO: Tensor) -> Tensor:
    """As ``kernels.reference.dense.jagged_linear``: a product of matrices a kind."""
    check_groups(x_TI, bounds, weight_GIO, bias_GO)
    parts = [torch.addmm(bias_GO[g], x_TI[rows], weight_GIO[g]) for g, rows in enumerate(_rows(bounds))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows(bounds: Sequence[int]) -> Iterator[slice]:
    return (slice(a, b) for a, b in itertools.pairwise(bounds))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, u: Tensor, bounds: Any, weight: Tensor, bias: Tensor, drop: Any, eps: float
    ) -> Any:
        ctx.save_for_backward(x, u, weight, bias)
        ctx.bounds, ctx.drop, ctx.eps = bounds, drop, eps
        out = torch.empty_like(x)
        keep = _keep(drop, x)
        for g, rows in _blocks(bounds, x.shape[1]):
            normed = layer_norm(x[rows], x.shape[1:], weight[g], bias[g], eps)
            torch.mul(normed, u[rows], out=out[rows])
            if keep is not None:
                out[rows].mul_(keep(rows))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, u, weight, bias = ctx.saved_tensors
        dx, du = torch.empty_like(x), torch.empty_like(u)
        dweight, dbias = torch.zeros_like(weight), torch.zeros_like(bias)
        shape, keep = list(x.shape[1:]), _keep(ctx.drop, x)
        for g, rows in _blocks(ctx.bounds, x.shape[1]):
            passed = gradient[rows] if keep is None else gradient[rows] * keep(rows)
            normed, mean, rstd = torch.ops.aten.native_layer_norm(x[rows], shape, weight[g], bias[g], ctx.eps)
            torch.mul(passed, normed, out=du[rows])
            dx[rows], dw, db = torch.ops.aten.native_layer_norm_backward(
                passed * u[rows], x[rows], shape, mean, rstd, weight[g], bias[g], [True, True, True]
            )
            dweight[g] += dw
            dbias[g] += db
        return dx, du, None, dweight, dbias, None, None


def _blocks(bounds: Sequence[int], width: int) -> Iterator[tuple[int, slice]]:
    """Kind and rows of blocks that stay in the cache; how rows are cut hangs on the bounds alone."""
    step = max(1, _BLOCK // width)
    for g, rows in enumerate(_rows(bounds)):
        for i in range(rows.start, rows.stop, step):
            yield g, slice(i, min(i + step, rows.stop))


def _keep(drop: tuple[Tensor, int, int, float], like: Tensor) -> Callable[[slice], Tensor] | None:
    """Rows -> what their elements are multiplied by; None where nothing is dropped."""
    token, seed, limit, rate = drop
    if rate == 0:
        return None
    start = _mix(token ^ _mix(torch.tensor([_signed(seed, 64)], device=token.device))).to(torch.int32)[:, None]
    spread = torch.arange(1, like.shape[1] + 1, device=like.device) * _signed(FEATURE, 64)
    feature = _mix(spread).to(torch.int32)
    first, second = (_signed(factor, 32) for factor in NARROW)

    def keep(rows: slice) -> Tensor:
        bits = (start[rows] ^ feature).mul_(first)
        bits ^= bits >> 15 & (1 << 17) - 1
        return (bits.mul_(second) < limit).to(like.dtype).mul_(1 / (1 - rate))

    return keep


def _mix(x: Tensor) -> Tensor:
    for factor in WIDE:
        x = (x ^ (x >> 33 & (1 << 31) - 1)).mul_(_signed(factor, 64))
    return x ^ (x >> 33 & (1 << 31) - 1)


def _signed(word: int, bits: int) -> int:
    """The signed integer of the same bits."""
    half = 1 << bits - 1
    return (word + half) % (2 * half) - half
