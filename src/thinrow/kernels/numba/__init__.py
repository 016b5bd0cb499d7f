"""The default backend: loops compiled by numba for this CPU, cached on disk."""
