"""What both backends of the dense kernels share: checks of grouped tokens, and the constants of the dropout hash."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from thinrow.core.errors import InputError

#: Multipliers of the mixes: of 64 bits (MurmurHash3's finalizer, Appleby), of 32 (Wellons, "lowbias32"), and the odd
#: number that spreads features (2^64 over the golden ratio).
WIDE, NARROW = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53), (0x7FEB352D, 0x846CA68B)
FEATURE = 0x9E3779B97F4A7C15


def check_groups(x: Any, bounds: Sequence[int], weight: Any, bias: Any) -> None:
    """Raises InputError unless ``bounds`` are of the rows of ``x``, and there are weights for each group."""
    n_groups = len(bounds) - 1
    ascends = n_groups >= 1 and bounds[0] == 0 and all(a <= b for a, b in itertools.pairwise(bounds))
    if x.dim() != 2 or not ascends or bounds[-1] != len(x):
        raise InputError(f"bounds {tuple(bounds)} for tokens of shape {tuple(x.shape)}; they must ascend from 0 to T")
    wanted = (n_groups, x.shape[1]) + ((bias.shape[-1],) if weight.dim() == 3 else ())
    if tuple(weight.shape) != wanted or tuple(bias.shape) != (n_groups, weight.shape[-1]):
        raise InputError(
            f"weights {tuple(weight.shape)} and biases {tuple(bias.shape)} for {n_groups} kinds of tokens of width "
            f"{x.shape[1]}; give one of {wanted} for all"
        )


def keep_below(x: Any, u: Any, token: Any, rate: float) -> int:
    """The int32 below which an element's bits keep it. Raises InputError where the arguments do not fit."""
    if x.shape != u.shape or token.shape != x.shape[:1]:
        raise InputError(
            f"x {tuple(x.shape)}, u {tuple(u.shape)} and token numbers {tuple(token.shape)}; u must be like x, with a "
            "number a token"
        )
    if not 0 <= rate < 1:
        raise InputError(f"dropout rate={rate}; it must be from 0 to below 1")
    return min(round((1 - rate) * (1 << 32)), (1 << 32) - 1) - (1 << 31)


def check_rows(x: Any, items: Any, offset: Any, target: Any) -> None:
    """Raises InputError unless N queries, K items with an offset each, and N targets fit each other."""
    if x.dim() != 2 or items.dim() != 2 or x.shape[1] != items.shape[1]:
        raise InputError(f"queries {tuple(x.shape)} and items {tuple(items.shape)}; both must be (rows, one width)")
    if tuple(offset.shape) != (len(items),) or tuple(target.shape) != (len(x),):
        raise InputError(
            f"offsets {tuple(offset.shape)} of {len(items)} items and targets {tuple(target.shape)} of {len(x)} "
            "queries; give one for each"
        )
