"""Embedding: a torch module that looks keys up in a DynamicTable.

    embedding = Embedding(DynamicTable(dim=2))
    embedding(torch.tensor([[7, -1], [7, 7]]))    # (2, 2, 2); inserts keys 7 and -1: the module is in training mode
    embedding.eval()(torch.tensor([3]))           # [[0, 0]]: key 3 is unknown, and stays so

Gradients do not pass through ``.grad``: backward sums them by row and leaves them with the table, where the sparse
optimizer takes them.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinrow.core.errors import InputError
from thinrow.embeddings.table import DynamicTable


class Embedding(torch.nn.Module):
    """Vectors of 64-bit keys. It has no parameters and no ``state_dict``: the table is trained by a sparse optimizer
    and saved by ``table.state()``.

    In training mode absent keys are inserted, also under ``torch.no_grad``. In evaluation mode the table is only read:
    absent keys are zeros, and nothing gets a gradient. CPU only.

    Attributes:
        table: the table.
    """

    def __init__(self, table: DynamicTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, keys: Tensor) -> Tensor:
        """``keys`` int64 of any shape -> (*shape, dim) in the table's dtype.

        Backward sums the gradients of all positions of a key, also over several calls and backward passes, until the
        optimizer steps.

        Raises:
            InputError: ``keys`` is not int64 on the CPU; in backward, the gradient of a key is NaN or infinite.
        """
        if keys.dtype != torch.int64 or keys.device.type != "cpu":
            raise InputError(f"keys: {keys.dtype} on {keys.device}; they must be int64 on the CPU")
        rows = self.table.rows(keys.detach().reshape(-1).contiguous().numpy(), insert=self.training)
        if self.training:
            vectors = cast(Tensor, _Read.apply(torch.empty(0, requires_grad=True), self.table, rows))  # type: ignore[no-untyped-call]
        else:
            vectors = torch.from_numpy(self.table.read(rows))
        return vectors.view(*keys.shape, self.table.dim)

    def extra_repr(self) -> str:
        return f"dim={self.table.dim}, rows={len(self.table)}"


class _Read(torch.autograd.Function):
    """``table.read(rows)``; ``anchor``, an empty tensor, only makes autograd call backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, table: DynamicTable, rows: npt.NDArray[np.int64]) -> Tensor:
        ctx.table, ctx.rows = table, rows
        return torch.from_numpy(table.read(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.table.add_gradient(ctx.rows, gradient.contiguous().numpy())
        return None, None, None
