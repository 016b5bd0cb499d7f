"""Kernels for GPUs, in Triton: the same functions as in ``kernels.torch``, for tensors on CUDA devices."""
