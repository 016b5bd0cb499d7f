"""Compiled loops, one name each, in interchangeable backends; see ``dispatch``."""

from thinrow.kernels.dispatch import BACKENDS, KERNELS, active, compiled_loop, kernel, use

__all__ = ["BACKENDS", "KERNELS", "active", "compiled_loop", "kernel", "use"]
