"""float16 to float32; finite numbers, contiguous arrays of one shape."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinrow.core.half import widen


def widen_half(half: npt.NDArray[np.float16], out: npt.NDArray[np.float32]) -> None:
    """Write ``half`` to ``out``."""
    widen(half, out)
