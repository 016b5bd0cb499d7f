"""Checkpoints: named tensors and JSON beside them, whole or absent. Training writes them, serving reads them."""

from thinrow.checkpoints.checkpoint import Checkpoint, has_checkpoints, load, save, steps

__all__ = ["Checkpoint", "has_checkpoints", "load", "save", "steps"]
