"""Mod: an integer -> its remainder, the integer read as an unsigned 64-bit word.

With divisor 10: 7 -> 7, 25 -> 5, -1 -> 5 (18446744073709551615 mod 10). So no remainder is negative, in any language.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from thinrow.features.node import Elementwise, as_int64, check_bucket_count
from thinrow.features.value import Entries
from thinrow.kernels import kernel


@dataclass(frozen=True)
class Mod(Elementwise):
    """int64 in [0, divisor). Narrow integers are sign-extended to 64 bits first."""

    divisor: int
    op: ClassVar[str] = "mod"

    def __post_init__(self) -> None:
        check_bucket_count("mod", "divisor", self.divisor)

    def compute(self, entries: Entries) -> npt.NDArray[Any]:
        values = as_int64(entries, "mod", "bucketize floats, hash strings")
        return np.asarray(kernel("mod_unsigned")(values, self.divisor))
