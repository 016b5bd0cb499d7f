"""Bucketize: a number -> the count of boundaries that are <= it, or with ``side="left"`` the count of those < it.

With boundaries (0, 10, 100): -5 -> 0, 0 -> 1, 9.99 -> 1, 10 -> 2, 1000 -> 3; from the left 0 -> 0 and 10 -> 1. NaN -> 3
(above all), null -> null. ``side`` says where a value that equals a boundary goes, as in ``numpy.searchsorted``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from thinrow.core.errors import InputError
from thinrow.features.node import Elementwise, Formula, as_number, within_int64
from thinrow.kernels.chain import Op, Step, bits

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Bucketize(Elementwise):
    """int32 in [0, len(boundaries)]. ``boundaries`` are finite and strictly ascending.

    Integers are compared with boundaries exactly, floats as float64.
    """

    boundaries: tuple[float, ...]
    side: Literal["right", "left"] = "right"
    op: ClassVar[str] = "bucketize"
    later_fields: ClassVar[Mapping[str, Any]] = {"side": "right"}

    def __post_init__(self) -> None:
        boundaries = self.boundaries if isinstance(self.boundaries, Iterable) else (self.boundaries,)
        object.__setattr__(self, "boundaries", tuple(as_number("bucketize", "boundaries", b) for b in boundaries))
        if not self.boundaries:
            raise InputError("bucketize without boundaries; give one finite number or more")
        if self.side not in ("right", "left"):
            raise InputError(f"bucketize: side={self.side!r}; it must be 'right' or 'left'")
        for low, high in zip(self.boundaries[:-1], self.boundaries[1:], strict=True):
            if low >= high:
                raise InputError(f"bucketize: boundary {high} follows {low}; they must ascend strictly")

    def formula(self, dtype: np.dtype[Any]) -> Formula:
        within_int64(dtype, "bucketize")
        if dtype.kind == "f":
            step = Step(Op.BUCKETIZE_FLOATS, (int(self.side == "left"),), tuple(bits(b) for b in self.boundaries))
        else:
            # For integers x >= b is x >= ceil(b), and x > b is x >= floor(b) + 1; one past the largest int64 is never
            # reached.
            least = [math.ceil(b) if self.side == "right" else math.floor(b) + 1 for b in self.boundaries]
            step = Step(Op.BUCKETIZE_INTS, (), tuple(max(b, _INT64_MIN) for b in least if b <= _INT64_MAX))
        return Formula(((step,),), np.dtype(np.int32))
