"""Kernels in torch: of autograd on the CPU, and of tensors on any device."""
