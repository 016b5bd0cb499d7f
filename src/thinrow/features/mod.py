"""Mod: an integer -> its remainder, the integer read as an unsigned 64-bit word.

With divisor 10: 7 -> 7, 25 -> 5, -1 -> 5 (18446744073709551615 mod 10). So no remainder is negative, in any language.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from thinrow.features.node import Elementwise, Formula, as_bucket_count, as_integer, integers
from thinrow.kernels.chain import remainder


@dataclass(frozen=True)
class Mod(Elementwise):
    """int64 in [0, divisor). Narrow integers are sign-extended to 64 bits first."""

    divisor: int
    op: ClassVar[str] = "mod"

    def __post_init__(self) -> None:
        divisor = as_integer("mod", "divisor", self.divisor)
        object.__setattr__(self, "divisor", as_bucket_count("mod", "divisor", divisor))

    def formula(self, dtype: np.dtype[Any]) -> Formula:
        integers(dtype, "mod", "bucketize floats, hash strings")
        return Formula(((remainder(self.divisor),),), np.dtype(np.int64))
