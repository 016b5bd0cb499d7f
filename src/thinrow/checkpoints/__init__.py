"""Checkpoints: named tensors and JSON beside them, whole or absent."""
