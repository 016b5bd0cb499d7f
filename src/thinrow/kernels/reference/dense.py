"""Norms and projections of grouped tokens in plain torch: the oracle, differentiable as often as wanted.

Tokens of one kind stand together: with ``bounds = (0, 5, 7)`` the first five are of kind 0, the other two of kind 1::

    group_layer_norm(x (7, W), (0, 5, 7), weight (2, W), bias (2, W))
    jagged_linear(x (7, I), (0, 5, 7), weight (2, I, O), bias (2, O))

Shape letters: T tokens, G kinds of tokens, W width, I and O widths of input and output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinrow.kernels.groups import FEATURE, NARROW, WIDE, check_groups, keep_below


def group_layer_norm(
    x_TW: Tensor, bounds: Sequence[int], weight_GW: Tensor, bias_GW: Tensor, eps: float = 1e-5
) -> Tensor:
    """(T, W): layer normalisation of each token, with the scale and the shift of its kind (MTGR, arXiv 2505.18654).

    ``(x - mean) / sqrt(variance + eps) * weight[g] + bias[g]``, mean and variance (over W) of the token itself.

    Raises:
        InputError: bounds that do not ascend from 0 to T, or weights of another number of kinds or width.
    """
    check_groups(x_TW, bounds, weight_GW, bias_GW)
    kind = _kinds(bounds)
    centred = x_TW - x_TW.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + eps).sqrt() * weight_GW[kind] + bias_GW[kind]


def norm_multiply_dropout(
    x_TW: Tensor, u_TW: Tensor, bounds: Sequence[int], weight_GW: Tensor, bias_GW: Tensor, *,
    token_T: Tensor, seed: int, rate: float, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """(T, W): ``dropout(group_layer_norm(x) * u)``, what an HSTU layer does with attended values (arXiv 2402.17152).

    Args:
        token_T: (T,) int64, the number of each token. An element is dropped by a hash of seed, number and feature: a
            token that stands in several rows is dropped alike in all.
        seed: any 64 bits, another for each layer and step.
        rate: share that is dropped, from 0 to below 1; the rest is multiplied by ``1 / (1 - rate)``.

    Raises:
        InputError: as ``group_layer_norm``, or u or numbers of another shape, or a rate out of range.
    """
    limit = keep_below(x_TW, u_TW, token_T, rate)
    gated = group_layer_norm(x_TW, bounds, weight_GW, bias_GW, eps) * u_TW
    if rate == 0:
        return gated
    kept = torch.from_numpy(_bits(token_T.cpu().numpy(), x_TW.shape[1], seed) < limit)
    return gated * kept.to(gated) / (1 - rate)


def jagged_linear(x_TI: Tensor, bounds: Sequence[int], weight_GIO: Tensor, bias_GO: Tensor) -> Tensor:
    """(T, O): ``x[t] @ weight[g] + bias[g]`` with the matrix of the token's kind g.

    Raises:
        InputError: as ``group_layer_norm``.
    """
    check_groups(x_TI, bounds, weight_GIO, bias_GO)
    kind = _kinds(bounds)
    return torch.einsum("ti,tio->to", x_TI, weight_GIO[kind]) + bias_GO[kind]


def _kinds(bounds: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)))


def _bits(token: npt.NDArray[np.int64], width: int, seed: int) -> npt.NDArray[np.int32]:
    """(T, W) 32 bits of each element: those of the token's mix and of the feature's, mixed once more."""
    with np.errstate(over="ignore"):
        # Both are small and consecutive: what is not mixed before would give one layer another one's masks.
        start = _mix(token.view(np.uint64) ^ _mix(np.array([seed % 2**64], np.uint64)))
        feature = _mix(np.arange(1, width + 1, dtype=np.uint64) * np.uint64(FEATURE))
        x = start.astype(np.uint32)[:, None] ^ feature.astype(np.uint32)
        x *= np.uint32(NARROW[0])
        x ^= x >> np.uint32(15)
        x *= np.uint32(NARROW[1])
    return x.view(np.int32)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for factor in WIDE:
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return x ^ (x >> np.uint64(33))
