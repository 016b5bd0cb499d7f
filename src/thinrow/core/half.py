"""float16 to float32 in a few passes over whole arrays, which NumPy's own cast does number by number.

Worked example: 1.5 is 0x3e00 in float16: sign 0, exponent 15, fraction 0x200. Moved up by 13 bits, to 0x07c00000, all
has its place in a float32, and the exponent is 112 too small, which one exact product mends: 0x3fc00000.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

#: All bits but those between the sign and the five of the exponent, to which the sign was copied.
_KEPT = np.int32(-0x70000001)
_SCALE = np.float32(2.0**112)


def widen(half: npt.NDArray[np.float16], out: npt.NDArray[np.float32]) -> None:
    """Write finite ``half`` to ``out``, both of one shape and contiguous, exactly, as long as the thread's floating
    point does not flush subnormal numbers to zero."""
    words: npt.NDArray[Any] = out.view(np.int32)
    words[...] = half.view(np.int16)
    np.left_shift(words, 13, out=words)
    np.bitwise_and(words, _KEPT, out=words)
    np.multiply(out, _SCALE, out=out)
