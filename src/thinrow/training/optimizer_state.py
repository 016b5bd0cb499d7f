"""The state of a torch optimizer as named tensors and back, so that no checkpoint needs pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thinrow.core.errors import CheckpointMismatch
from thinrow.models.spec import whole
from thinrow.training.zero import part_like

_PREFIX = "dense_optimizer."


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, npt.NDArray[Any]]:
    """``dense_optimizer.PARAMETER.NAME`` -> array, for every tensor of the state; whole, where ranks hold parts."""
    state = optimizer.state_dict()["state"]
    return {f"{_PREFIX}{i}.{name}": whole(t).numpy().copy() for i, entry in state.items() for name, t in entry.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Reverse of ``optimizer_tensors``, onto an optimizer of the same parameters.

    Raises:
        CheckpointMismatch: the state is that of other parameters.
    """
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, values in tensors.items():
        if key.startswith(_PREFIX):
            number, name = key.removeprefix(_PREFIX).split(".", 1)
            state.setdefault(int(number), {})[name] = torch.from_numpy(np.array(values))
    full = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, entry in state.items():
        if i >= len(parameters) or any(t.dim() and t.shape != parameters[i].shape for t in entry.values()):
            raise CheckpointMismatch(
                f"the checkpoint's optimizer has a state for parameter {i} that is none of this model's "
                f"{len(parameters)}; it was written for another model: train again with `thinrow train`"
            )
    held = {i: {name: part_like(parameters[i], t) for name, t in entry.items()} for i, entry in state.items()}
    optimizer.load_state_dict({**full, "state": held})
