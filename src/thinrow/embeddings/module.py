"""Embedding: a torch module that looks keys up in a table; GroupEmbedding, one of several logical tables.

    embedding = Embedding(DynamicTable(dim=2))
    embedding(torch.tensor([[7, -1], [7, 7]]))    # (2, 2, 2); inserts keys 7 and -1: the module is in training mode
    embedding.eval()(torch.tensor([3]))           # [[0, 0]]: key 3 is unknown, and stays so

Gradients do not pass through ``.grad``: backward sums them by row and leaves them with the table, where the sparse
optimizer takes them. The table is a ``DynamicTable``, of keys on the CPU, or a ``DeviceTable``, of keys on its device.

``torch.compile`` compiles what is before and behind these modules; a look-up itself runs as it is, in a graph break
(decision 051).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinrow.core.errors import InputError
from thinrow.core.pool import empty
from thinrow.embeddings.device import DeviceTable
from thinrow.embeddings.group import TableGroup
from thinrow.embeddings.shards import Shard
from thinrow.embeddings.table import DynamicTable
from thinrow.embeddings.uncompiled import uncompiled

Table = DynamicTable | DeviceTable
Rows = npt.NDArray[np.int64] | Tensor

_CPU = torch.device("cpu")


@uncompiled
class Embedding(torch.nn.Module):
    """Vectors of 64-bit keys. It has no parameters and no ``state_dict``: the table is trained by a sparse optimizer
    and saved by ``table.state()``.

    In training mode absent keys are inserted, also under ``torch.no_grad``. In evaluation mode the table is only read:
    absent keys are zeros, and nothing gets a gradient.

    Attributes:
        table: the table.
    """

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def forward(self, keys: Tensor) -> Tensor:
        """``keys`` int64 of any shape -> (*shape, dim) in the table's dtype.

        Backward sums the gradients of all positions of a key, also over several calls and backward passes, until the
        optimizer steps.

        Raises:
            InputError: ``keys`` is not int64 on the table's device; in backward, the gradient of a key is NaN or
                infinite.
        """
        rows = _rows(self.table, keys, insert=self.training)
        if self.training:
            vectors = cast(Tensor, _Read.apply(torch.empty(0, requires_grad=True), self.table, rows))  # type: ignore[no-untyped-call]
        else:
            vectors = _read(self.table, rows)
        return vectors.view(*keys.shape, self.table.dim)

    def extra_repr(self) -> str:
        return f"dim={self.table.dim}, rows={len(self.table)}"


@uncompiled
class EmbeddingBag(torch.nn.Module):
    """Sums or means of the vectors of bags of keys, which are never written out one by one.

        bag = EmbeddingBag(DynamicTable(dim=2))
        bag(torch.tensor([7, 8, 7]), torch.tensor([0, 2, 2, 3]))    # (3, 2): of 7 and 8, of nothing, of 7

    As ``Embedding`` otherwise.

    Attributes:
        table: the table.
        mode: ``sum`` or ``mean``, over the keys that have a row or not; an empty bag is zeros.
    """

    def __init__(self, table: Table, mode: str = "sum") -> None:
        super().__init__()
        if mode not in ("sum", "mean"):
            raise InputError(f"mode={mode!r}; it must be 'sum' or 'mean'")
        self.table, self.mode = table, mode

    def forward(self, keys: Tensor, bounds: Tensor) -> Tensor:
        """``keys`` (n,) int64 and ``bounds`` (b + 1,) int64 from 0 to n -> (b, dim) in the table's dtype.

        Raises:
            InputError: as ``Embedding.forward``, or ``bounds`` do not ascend from 0 to n.
        """
        _check_keys(bounds, _device(self.table))
        ends = bounds.detach().reshape(-1)
        rows = _rows(self.table, keys, insert=self.training)
        if self.training:
            pooled = cast(Tensor, _Pool.apply(torch.empty(0, requires_grad=True), self.table, rows, ends))  # type: ignore[no-untyped-call]
        else:
            pooled = _pool(self.table, rows, ends)
        if self.mode == "mean":
            sizes = ends.diff().clamp_(min=1).to(pooled.dtype)
            pooled = pooled / sizes[:, None]
        return pooled

    def extra_repr(self) -> str:
        return f"dim={self.table.dim}, rows={len(self.table)}, mode={self.mode}"


@uncompiled
class GroupEmbedding(torch.nn.Module):
    """Vectors of keys of several logical tables, in one look-up.

        embedding = GroupEmbedding(TableGroup(("item", "store")), Embedding(DynamicTable(dim=2)))
        embedding({"item": torch.tensor([[7, 8]]), "store": torch.tensor([7])})    # (1, 2, 2) and (1, 2)

    Attributes:
        group: the logical tables.
        embedding: looks the keys up; may be any module of int64 keys (n,) -> (n, dim) with a ``table``.
    """

    def __init__(self, group: TableGroup, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.group, self.embedding = group, embedding

    @property
    def table(self) -> Table:
        return cast(Table, self.embedding.table)

    @property
    def shard(self) -> Shard | None:
        """This rank's part, where the embedding is a ``ShardedEmbedding``."""
        return cast("Shard | None", getattr(self.embedding, "shard", None))

    def forward(self, keys: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name -> int64 keys of any shape; name -> (*shape, dim). Tables that are not named are not read.

        Raises:
            InputError: the group has no such table, or keys are not int64 on the table's device.
        """
        for k in keys.values():
            _check_keys(k, _device(self.table))
        sizes = [k.numel() for k in keys.values()]
        flat = [k.reshape(-1) for k in keys.values()]
        if isinstance(self.table, DeviceTable):
            found = self.group.keys_of_tensors(tuple(keys), flat) if flat else self.table.keys()[:0]
        else:
            whole = torch.cat(flat) if flat else torch.empty(0, dtype=torch.int64)
            bounds = np.cumsum([0, *sizes], dtype=np.int64)
            found = torch.from_numpy(self.group.keys_of_parts(tuple(keys), whole.numpy(), bounds))
        shapes = [k.shape for k in keys.values()]
        parts = _Parts.apply(self.embedding(found), sizes, shapes)  # type: ignore[no-untyped-call]
        return dict(zip(keys, parts, strict=True))


def _device(table: Table) -> torch.device:
    return table.device if isinstance(table, DeviceTable) else _CPU


def _check_keys(keys: Tensor, device: torch.device = _CPU) -> None:
    if keys.dtype != torch.int64 or keys.device != device:
        where = "the CPU" if device == _CPU else device
        raise InputError(f"keys: {keys.dtype} on {keys.device}; they must be int64 on {where}")


def flat_keys(keys: Tensor) -> npt.NDArray[np.int64]:
    """(n,) view or copy of ``keys``. Raises InputError where they are not int64 on the CPU."""
    _check_keys(keys)
    return cast(npt.NDArray[np.int64], keys.detach().reshape(-1).contiguous().numpy())


def _given(table: Table, numbers: Tensor) -> Any:
    """``numbers`` as the table takes them: a tensor, or an array in the same memory."""
    return numbers.contiguous() if isinstance(table, DeviceTable) else numbers.contiguous().numpy()


def _rows(table: Table, keys: Tensor, insert: bool) -> Rows:
    _check_keys(keys, _device(table))
    return table.rows(_given(table, keys.detach().reshape(-1)), insert=insert)


def _read(table: Table, rows: Any) -> Tensor:
    # The table gave these rows: to check them would be to wait for the device.
    return table.read(rows, check=False) if isinstance(table, DeviceTable) else torch.from_numpy(table.read(rows))


def _pool(table: Table, rows: Any, bounds: Tensor) -> Tensor:
    pooled = table.pool(rows, _given(table, bounds))
    return pooled if isinstance(pooled, Tensor) else torch.from_numpy(pooled)


class _Read(torch.autograd.Function):
    """``table.read(rows)``; ``anchor``, an empty tensor, only makes autograd call backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, table: Table, rows: Rows) -> Tensor:
        ctx.table, ctx.rows = table, rows
        return _read(table, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.table.add_gradient(ctx.rows, _given(ctx.table, gradient))
        return None, None, None


class _Pool(torch.autograd.Function):
    """``table.pool(rows, bounds)``; ``anchor`` as in ``_Read``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, table: Table, rows: Rows, bounds: Tensor) -> Tensor:
        ctx.table, ctx.rows, ctx.bounds = table, rows, bounds
        return _pool(table, rows, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        of = torch.repeat_interleave(ctx.bounds.diff(), output_size=len(ctx.rows))
        ctx.table.add_gradient(ctx.rows, _given(ctx.table, gradient), _given(ctx.table, of))
        return None, None, None, None


class _Parts(torch.autograd.Function):
    """Vectors in parts of the given sizes, each in the shape of its keys. ``torch.split`` does that too, but its
    backward takes fresh memory for all gradients together, whose page faults are as long as the copy."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, sizes: list[int], shapes: list[torch.Size]) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.width = sizes, vectors.shape[1]
        parts = torch.split(vectors.detach(), sizes)
        return tuple(part.view(*shape, ctx.width) for part, shape in zip(parts, shapes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        if not gradients:
            return None, None, None
        flat = [g.reshape(-1, ctx.width) for g in gradients]
        if flat[0].device != _CPU:
            return torch.cat(flat), None, None
        kind = torch.empty(0, dtype=flat[0].dtype).numpy().dtype
        whole = torch.from_numpy(empty(sum(ctx.sizes) * ctx.width, kind)).view(-1, ctx.width)
        return torch.cat(flat, out=whole), None, None
