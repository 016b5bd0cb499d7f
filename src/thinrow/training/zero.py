"""The dense half spread over ranks as ZeRO has it, by PyTorch's FSDP2: of every weight, of its gradient and of its
optimizer's numbers each rank holds a part.

With two ranks and a layer of 12 million weights, 192 MB in float32 with gradients and Adam are 96 MB a rank; beside
them, one layer at a time is whole: gathered before it is computed, dropped behind it, gathered again in backward.
Gradients are summed over ranks and never divided, as ``training.ranks`` does it; the order of the additions is torch's,
so losses are those of one process to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from thinrow.core.errors import InputError, RankLost
from thinrow.embeddings import Ranks


def shard_module(module: nn.Module, ranks: Ranks) -> None:
    """Spread the weights of ``module`` over the ranks, which must be all of ``torch.distributed``; a unit for each of
    its ``layers``, and one for the rest.

    Raises:
        InputError: they are not.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    size = dist.get_world_size() if dist.is_initialized() else 0
    if ranks.size != size:
        raise InputError(
            f"{ranks.size} of {size} processes of torch.distributed would share the dense weights; start all of them "
            "as ranks, or leave shard_dense out"
        )
    mesh = init_device_mesh("cpu", (size,))
    for unit in (*getattr(module, "layers", ()), module):
        fully_shard(unit, mesh=mesh)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    if hasattr(module, "next_item"):
        register_fsdp_forward_method(module, "next_item")


def part_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Of ``whole``, which all ranks have, what this one holds of ``parameter``; all of it where it holds all."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or not whole.dim():
        return whole
    part: Tensor = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return part


@contextlib.contextmanager
def lost_as_such() -> Iterator[None]:
    """An exchange of torch's own that fails is ``RankLost``: these say nothing of who it was."""
    try:
        yield
    except dist.DistError as e:
        raise RankLost(f"an exchange of dense weights failed: {e}", rank=-1) from e
    except RuntimeError as e:
        if "gloo" not in str(e).lower() and "connection" not in str(e).lower():
            raise
        raise RankLost(f"an exchange of dense weights failed: {e}", rank=-1) from e
