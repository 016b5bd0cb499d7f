"""Every finite float16 becomes the float32 that NumPy makes of it."""

import numpy as np

from thinrow.core.half import widen


def test_every_finite_number() -> None:
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    half = half[np.isfinite(half)]
    out = np.empty(half.shape, np.float32)
    widen(half, out)
    np.testing.assert_array_equal(out.view(np.uint32), half.astype(np.float32).view(np.uint32))
