"""The oracle: the same kernels in plain NumPy and Python, written to be checked by eye, not to be fast."""
