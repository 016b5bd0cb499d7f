"""Arithmetic modulo 2^64 outside the kernels: the finaliser that digests, hashes and orders stand on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK64 = (1 << 64) - 1
#: 2^64 over the golden ratio, odd: SplitMix64's step.
GOLDEN64 = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit words: [0, 2^64) -> [0, 2^64)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def mix64_words(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``mix64`` of each element: (n,) uint64 -> (n,) uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
