"""Kernels in torch, on CPU."""
