"""Compiled functions of single values that several kernels call.

Worked example: ``mix(0) = 0`` and ``mix(1) = 0x5692161D100B05E5``: every bit of the result hangs on every bit of the
value, and no two values share one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.wrap import GOLDEN64
from thinrow.kernels.numba.jit import njit

GOLDEN = np.uint64(GOLDEN64)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@njit
def mix(z: Any) -> Any:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), of a uint64."""
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


@njit
def identity_of(event_ts: Any, arrival: Any) -> Any:
    """What an event adds to an identity digest (docs/protocol.md), uint64; of two int64."""
    return mix(mix(np.uint64(event_ts) + GOLDEN) + np.uint64(arrival))


@njit
def lower_bound(values: npt.NDArray[Any], lo: Any, hi: Any, x: Any) -> Any:
    """The first place in ``[lo, hi)`` of ascending ``values`` that holds ``x`` or more; ``hi`` where none does."""
    while lo < hi:
        mid = (lo + hi) // 2
        if values[mid] < x:
            lo = mid + 1
        else:
            hi = mid
    return lo
