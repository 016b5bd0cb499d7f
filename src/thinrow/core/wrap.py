"""Arithmetic modulo 2^64 on Python integers: the slow, plain form of what the kernels do on words."""

from __future__ import annotations

MASK64 = (1 << 64) - 1


def mix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit words; format section 8."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)
