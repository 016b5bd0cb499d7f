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

from collections.abc import Mapping, Sequence
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
#: What makes autograd call the backward pass of a look-up, whose own inputs have no gradient.
with torch.inference_mode(False):  # wherever this is imported first
    _ANCHOR = torch.empty(0, requires_grad=True)


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
        """Raises InputError where ``table`` is none."""
        super().__init__()
        self.table = _checked_table(table)

    def forward(self, keys: Tensor) -> Tensor:
        """``keys`` int64 of any shape -> (*shape, dim) in the table's dtype.

        Backward sums the gradients of all positions of a key, also over several calls and backward passes, until the
        optimizer steps.

        Raises:
            InputError: ``keys`` is not int64 on the table's device; in backward, the gradient of a key is NaN or
                infinite.
        """
        vectors = cast(Tensor, self._look_up(keys, None))
        return vectors.view(*keys.shape, self.table.dim)

    def parts(self, keys: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
        """``forward`` of keys (n,) that are side by side those of several tables: part k is of ``shapes[k]`` and the
        width of a vector. Rows of a part that the loss does not reach have no gradient, as if looked up alone."""
        return cast(tuple[Tensor, ...], self._look_up(keys, shapes))

    def _look_up(self, keys: Tensor, shapes: Sequence[torch.Size] | None) -> Tensor | tuple[Tensor, ...]:
        rows = _rows(self.table, keys, insert=self.training)
        if not self.training:
            return in_parts(_read(self.table, rows), shapes)
        return _Read.apply(_ANCHOR, (self.table, keys, rows, shapes))  # type: ignore[no-untyped-call,no-any-return]

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
        self.table, self.mode = _checked_table(table), check_mode(mode)

    def forward(self, keys: Tensor, bounds: Tensor) -> Tensor:
        """``keys`` (n,) int64 and ``bounds`` (b + 1,) int64 from 0 to n -> (b, dim) in the table's dtype.

        Raises:
            InputError: as ``Embedding.forward``, or ``bounds`` do not ascend from 0 to n.
        """
        _check_keys(bounds, _device(self.table), "bounds")
        ends = bounds.detach().reshape(-1)
        # Before keys are inserted.
        self.table.check_bounds(_given(self.table, ends), keys.numel())
        rows = _rows(self.table, keys, insert=self.training)
        if self.training:
            pooled = cast(Tensor, _Pool.apply(_ANCHOR, self.table, keys, rows, ends))  # type: ignore[no-untyped-call]
        else:
            pooled = _pool(self.table, rows, ends)
        return in_mode(self.mode, pooled, ends)

    def extra_repr(self) -> str:
        return f"dim={self.table.dim}, rows={len(self.table)}, mode={self.mode}"


@uncompiled
class GroupEmbedding(torch.nn.Module):
    """Vectors of keys of several logical tables, in one look-up.

        embedding = GroupEmbedding(TableGroup(("item", "store")), Embedding(DynamicTable(dim=2)))
        embedding({"item": torch.tensor([[7, 8]]), "store": torch.tensor([7])})    # (1, 2, 2) and (1, 2)

    Attributes:
        group: the logical tables.
        embedding: looks the keys up; may be any module of int64 keys (n,) -> (n, dim) with a ``table``. Of one without
            ``Embedding.parts``, rows of a table that the loss does not reach have a gradient of zeros.
    """

    def __init__(self, group: TableGroup, embedding: torch.nn.Module) -> None:
        """Raises InputError where ``group`` is none, or ``embedding`` has no table."""
        super().__init__()
        if not isinstance(group, TableGroup) or not isinstance(embedding, torch.nn.Module):
            raise InputError(
                f"GroupEmbedding of a {type(group).__name__} and a {type(embedding).__name__}; give a TableGroup and a "
                "module that looks keys up, Embedding(table) say"
            )
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
        look_up = getattr(self.embedding, "parts", None)
        parts = look_up(found, shapes) if look_up is not None else in_parts(self.embedding(found), shapes)
        return dict(zip(keys, parts, strict=True))


def _checked_table(table: Table) -> Table:
    if not isinstance(table, Table):
        raise InputError(f"table={table!r:.40}; it must be a DynamicTable or a DeviceTable")
    return table


def _device(table: Table) -> torch.device:
    return table.device if isinstance(table, DeviceTable) else _CPU


def _check_keys(keys: Tensor, device: torch.device = _CPU, what: str = "keys") -> None:
    is_tensor = isinstance(keys, Tensor)
    if not is_tensor or keys.dtype != torch.int64 or keys.device != device:
        found = f"{keys.dtype} on {keys.device}" if is_tensor else f"a {type(keys).__name__}, no tensor"
        where = "the CPU" if device == _CPU else device
        raise InputError(f"{what}: {found}; they must be int64 on {where}")


def check_mode(mode: str) -> str:
    """``mode``. Raises InputError where bags have none such."""
    if mode not in ("sum", "mean"):
        raise InputError(f"mode={mode!r}; it must be 'sum' or 'mean'")
    return mode


def in_mode(mode: str, sums: Tensor, bounds: Tensor) -> Tensor:
    """What bags of the given bounds are, whose sums are ``sums`` (b, dim)."""
    if mode == "sum":
        return sums
    return sums / bounds.diff().clamp_(min=1).to(sums.dtype)[:, None]


def flat_keys(keys: Tensor, what: str = "keys") -> npt.NDArray[np.int64]:
    """(n,) view or copy of ``keys``. Raises InputError where they are not int64 on the CPU."""
    _check_keys(keys, what=what)
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
    if isinstance(table, DeviceTable):
        return table.pool(rows, bounds.contiguous(), check=False)
    return torch.from_numpy(table.pool(rows, bounds.contiguous().numpy()))


def _keep(ctx: Any, table: Table, keys: Tensor, rows: Rows) -> None:
    """What backward needs to know whose the rows are."""
    ctx.table, ctx.rows, ctx.moves = table, rows, table.moves
    # Not ``save_for_backward``: keys are seldom asked for, and may be of inference mode.
    ctx.keys, ctx.written = keys, _times_written(keys)


def _times_written(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _rows_now(ctx: Any) -> Rows:
    """The rows that were looked up; where rows moved since, in a step that made room, those that the keys have now."""
    if ctx.table.moves == ctx.moves:
        return cast(Rows, ctx.rows)
    if _times_written(ctx.keys) != ctx.written:
        raise InputError(
            "rows of the table moved since a look-up whose keys were written over; call backward before the optimizer "
            "steps, or look up keys that stay"
        )
    return _rows(ctx.table, ctx.keys, insert=False)


class _Read(torch.autograd.Function):
    """``table.read(rows)``, in parts where they have shapes; ``anchor`` is ``_ANCHOR``."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, given: tuple[Table, Tensor, Rows, Sequence[torch.Size] | None]
    ) -> Tensor | tuple[Tensor, ...]:
        # In one, so that autograd does not look at each.
        table, keys, rows, shapes = given
        _keep(ctx, table, keys, rows)
        ctx.shapes = shapes
        if shapes is None:
            return _read(table, rows)
        ctx.set_materialize_grads(False)
        return in_parts(_read(table, rows), shapes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        found = reached(gradients, ctx.shapes, _rows_now(ctx))
        if found is not None:
            rows, gradient = found
            ctx.table.add_gradient(rows, _given(ctx.table, gradient))
        return None, None


class _Pool(torch.autograd.Function):
    """``table.pool(rows, bounds)``; ``anchor`` as in ``_Read``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, table: Table, keys: Tensor, rows: Rows, bounds: Tensor) -> Tensor:
        _keep(ctx, table, keys, rows)
        ctx.bounds = bounds
        return _pool(table, rows, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        of = torch.repeat_interleave(ctx.bounds.diff(), output_size=len(ctx.rows))
        ctx.table.add_gradient(_rows_now(ctx), _given(ctx.table, gradient), _given(ctx.table, of))
        return None, None, None, None, None


def in_parts(vectors: Tensor, shapes: Sequence[torch.Size] | None) -> Tensor | tuple[Tensor, ...]:
    """``vectors`` (n, dim) in parts of (*shape, dim); whole where there are no shapes."""
    if shapes is None:
        return vectors
    parts = torch.split(vectors, [shape.numel() for shape in shapes])
    return tuple(part.view(*shape, vectors.shape[1]) for part, shape in zip(parts, shapes, strict=True))


def reached(
    gradients: Sequence[Tensor | None], shapes: Sequence[torch.Size] | None, numbers: Any
) -> tuple[Any, Tensor] | None:
    """Of what ``in_parts`` gave, ``numbers`` (m,) of the positions (n,) that the loss reached, and their gradients
    (m, dim); None where there is none."""
    if shapes is None:
        (whole_gradient,) = gradients
        return (numbers, whole_gradient) if whole_gradient is not None else None
    given = [g for g in gradients if g is not None]
    if not given:
        return None
    flat = [g.reshape(-1, g.shape[-1]) for g in given]
    if len(given) < len(gradients):
        ends = np.cumsum([0, *(shape.numel() for shape in shapes)])
        held = [numbers[a:b] for a, b, g in zip(ends[:-1], ends[1:], gradients, strict=True) if g is not None]
        numbers = torch.cat(held) if isinstance(numbers, Tensor) else np.concatenate(held)
    if flat[0].device != _CPU:
        return numbers, torch.cat(flat)
    # Fresh memory for all gradients together would cost page faults as long as the copy.
    kind = torch.empty(0, dtype=flat[0].dtype).numpy().dtype
    whole = empty(sum(map(len, flat)) * flat[0].shape[1], kind)
    return numbers, torch.cat(flat, out=torch.from_numpy(whole).view(-1, flat[0].shape[1]))
