"""Clip: a number -> the nearest one between two bounds.

With low 0 and high 10: -5 -> 0, 7 -> 7, 11 -> 10; NaN and null stay. Either bound may be left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from thinrow.core.errors import InputError
from thinrow.features.node import Elementwise, Formula, as_number
from thinrow.kernels.chain import Op, Step, bits


@dataclass(frozen=True)
class Clip(Elementwise):
    """The dtype stays: signed integers, float32 or float64. Of integers the bounds are rounded inwards and cut at what
    the dtype holds, of floats rounded to the dtype.
    """

    low: float | None = None
    high: float | None = None
    op: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound is not None:
                object.__setattr__(self, name, as_number("clip", name, bound))
        if self.low is None and self.high is None:
            raise InputError("clip without bounds; give low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise InputError(f"clip: low={self.low} is above high={self.high}")

    def formula(self, dtype: np.dtype[Any]) -> Formula:
        if dtype.kind not in "if" or dtype == np.float16:
            raise InputError(f"clip of a column of {dtype}; it takes signed integers, float32 and float64: convert it")
        if dtype.kind == "f":
            low, high = (
                float(dtype.type(bound)) if bound is not None else end
                for bound, end in ((self.low, -math.inf), (self.high, math.inf))
            )
            step = Step(Op.CLIP_FLOATS, (bits(low), bits(high)))
        else:
            ends = np.iinfo(dtype)
            least = int(ends.min) if self.low is None else math.ceil(self.low)
            most = int(ends.max) if self.high is None else math.floor(self.high)
            if least > most or least > ends.max or most < ends.min:
                raise InputError(
                    f"clip of a column of {dtype} between {self.low} and {self.high}; it holds no such value"
                )
            step = Step(Op.CLIP_INTS, (max(least, int(ends.min)), min(most, int(ends.max))))
        return Formula(((step,),), dtype)
