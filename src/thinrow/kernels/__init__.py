"""Compiled loops, one name each, in interchangeable backends; see ``dispatch``."""

from thinrow.kernels.dispatch import BACKENDS, KERNELS, active, kernel, use

__all__ = ["BACKENDS", "KERNELS", "active", "kernel", "use"]
