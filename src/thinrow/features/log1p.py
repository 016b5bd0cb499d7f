"""Log1p: a number v -> log(1 + v), for counts, prices and durations whose ratios matter, not their differences.

0 -> 0.0, 1 -> 0.6931472, 1000 -> 6.908755; -1 -> -inf, what is below -> NaN; null stays. The bits are the same on every
machine and device: they come from a stated order of basic operations, not from the machine's library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from thinrow.features.node import Elementwise, Formula, within_int64
from thinrow.kernels.chain import Op, Step


@dataclass(frozen=True)
class Log1p(Elementwise):
    """float32, of integers or floats, computed in float64."""

    op: ClassVar[str] = "log1p"

    def formula(self, dtype: np.dtype[Any]) -> Formula:
        within_int64(dtype, "log1p")
        steps = (Step(Op.LOG1P),) if dtype.kind == "f" else (Step(Op.TO_FLOAT), Step(Op.LOG1P))
        return Formula((steps,), np.dtype(np.float32))
