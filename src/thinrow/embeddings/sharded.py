"""ShardedEmbedding: ``Embedding`` over a table whose rows are spread over ranks (``shards``).

    ranks = GlooRanks()                                    # after torch.distributed.init_process_group
    items = ShardedEmbedding(DynamicTable(64), ranks)
    optimizer = SparseAdagrad(items)
    loss_of(items(keys)).backward()                        # looking up: all ranks; backward: each by itself
    optimizer.step()                                       # all ranks

``ShardedEmbeddings`` looks several tables up in one exchange; ``ShardedEmbeddingBag`` sums or averages bags of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinrow.embeddings.module import check_mode, flat_keys, in_mode, in_parts, reached
from thinrow.embeddings.ranks import Ranks
from thinrow.embeddings.shards import Found, Lookup, Shard
from thinrow.embeddings.table import DynamicTable
from thinrow.embeddings.uncompiled import uncompiled


@uncompiled
class ShardedEmbedding(torch.nn.Module):
    """Vectors of 64-bit keys, as ``Embedding``: no parameters, no ``state_dict``, absent keys inserted in training mode
    and zeros in evaluation mode, CPU only.

    Looking up, prefetching and stepping are collective: every rank does them, as often and in the same order, with an
    empty tensor where it has no keys. Gradients are sums over all ranks, never divided by their number: divide the
    loss by the all-reduced count of its terms.

    Attributes:
        shard: this rank's part of the table.
    """

    def __init__(self, table: DynamicTable, ranks: Ranks, *, whole: bool = False, wire: str | None = None) -> None:
        """As ``Shard``."""
        super().__init__()
        self.shard = Shard(table, ranks, whole=whole, wire=wire)
        self._lookup = Lookup([self.shard])

    @property
    def table(self) -> DynamicTable:
        """The table of this rank."""
        return self.shard.table

    def forward(self, keys: Tensor) -> Tensor:
        """``keys`` int64 of any shape -> (*shape, dim) in the table's dtype.

        Raises:
            InputError: ``keys`` is not int64 on the CPU, other keys were prefetched, or another rank does something
                else; in backward, the gradient of a key is NaN or infinite.
            RankLost: a rank is lost.
        """
        return _look_up(self._lookup, [keys], self.training)[0]

    def parts(self, keys: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
        """As ``Embedding.parts``; raises as ``forward``."""
        (found,) = self._lookup([flat_keys(keys)], insert=self.training)
        return cast(tuple[Tensor, ...], _spread(self.shard, found, self.training, shapes))

    def prefetch(self, keys: Tensor) -> None:
        """Begin to exchange the ids of the next ``forward``, which will have these keys, beside what this rank
        computes until then. Results are the same bits with or without. Raises as ``forward``."""
        self._lookup.prefetch([flat_keys(keys)])

    def forget(self) -> None:
        """Drop what was prefetched: no ``forward`` will come for it. All ranks must. Raises RankLost."""
        self._lookup.forget()

    def extra_repr(self) -> str:
        return _placed(self.shard)


@uncompiled
class ShardedEmbeddingBag(torch.nn.Module):
    """Sums or means of the vectors of bags of keys, as ``EmbeddingBag``; collective as ``ShardedEmbedding``.

    Bags are pooled at the rank that has them: each owner sends the vector of a distinct key once, however many bags
    have it, and backward leaves one gradient a key (decision 049).

    Attributes:
        shard: this rank's part of the table.
        mode: ``sum`` or ``mean``, over the keys that have a row or not; an empty bag is zeros.
    """

    def __init__(
        self, table: DynamicTable, ranks: Ranks, mode: str = "sum", *, whole: bool = False, wire: str | None = None
    ) -> None:
        """As ``Shard``; raises InputError also for another mode."""
        self._make(Shard(table, ranks, whole=whole, wire=wire), mode)

    @classmethod
    def over(cls, shard: Shard, mode: str = "sum") -> ShardedEmbeddingBag:
        """Bags of a table that a ``ShardedEmbedding`` reads as well, whose ``shard`` it is."""
        bag = cls.__new__(cls)
        bag._make(shard, mode)
        return bag

    def _make(self, shard: Shard, mode: str) -> None:
        super().__init__()
        self.shard, self.mode = shard, check_mode(mode)
        self._lookup = Lookup([shard])

    @property
    def table(self) -> DynamicTable:
        """The table of this rank."""
        return self.shard.table

    def forward(self, keys: Tensor, bounds: Tensor) -> Tensor:
        """``keys`` (n,) int64 and ``bounds`` (b + 1,) int64 from 0 to n -> (b, dim) in the table's dtype.

        Raises:
            InputError: as ``ShardedEmbedding.forward``, or ``bounds`` do not ascend from 0 to n; nothing was exchanged
                then.
            RankLost: a rank is lost.
        """
        flat = flat_keys(keys)
        self.table.check_bounds(flat_keys(bounds, "bounds"), len(flat))
        ends = bounds.detach().reshape(-1)
        (found,) = self._lookup([flat], insert=self.training)
        if self.training:
            anchor = torch.empty(0, requires_grad=True)
            pooled = cast(Tensor, _Pooled.apply(anchor, self.shard, found, ends))  # type: ignore[no-untyped-call]
        else:
            pooled = _pooled(found, ends)
        return in_mode(self.mode, pooled, ends)

    def prefetch(self, keys: Tensor) -> None:
        """As ``ShardedEmbedding.prefetch``."""
        self._lookup.prefetch([flat_keys(keys)])

    def forget(self) -> None:
        """As ``ShardedEmbedding.forget``."""
        self._lookup.forget()

    def extra_repr(self) -> str:
        return f"{_placed(self.shard)}, mode={self.mode}"


@uncompiled
class ShardedEmbeddings(torch.nn.Module):
    """Several ``ShardedEmbedding`` of the same ranks, of any widths, looked up by one exchange."""

    def __init__(self, *embeddings: ShardedEmbedding) -> None:
        """Raises InputError where they are not of the same ranks."""
        super().__init__()
        self.embeddings = torch.nn.ModuleList(embeddings)
        self._lookup = Lookup([e.shard for e in embeddings])

    def forward(self, *keys: Tensor) -> tuple[Tensor, ...]:
        """``ShardedEmbedding.forward`` of each, one ``keys`` for each embedding."""
        return tuple(_look_up(self._lookup, keys, self.training))

    def prefetch(self, *keys: Tensor) -> None:
        """As ``ShardedEmbedding.prefetch``."""
        self._lookup.prefetch([flat_keys(k) for k in keys])


def _placed(shard: Shard) -> str:
    ranks, placed = shard.ranks, "whole" if shard.whole else "row-wise"
    return f"dim={shard.table.dim}, rows={len(shard.table)} on rank {ranks.rank} of {ranks.size}, {placed}"


def _look_up(lookup: Lookup, keys: Sequence[Tensor], training: bool) -> list[Tensor]:
    found = lookup([flat_keys(k) for k in keys], insert=training)
    out = []
    for shard, given, some in zip(lookup.shards, keys, found, strict=True):
        vectors = cast(Tensor, _spread(shard, some, training, None))
        out.append(vectors.view(*given.shape, shard.table.dim))
    return out


def _spread(
    shard: Shard, found: Found, training: bool, shapes: Sequence[torch.Size] | None
) -> Tensor | tuple[Tensor, ...]:
    """The vectors of all positions, in parts where they have shapes."""
    if not training:
        return _at_places(found, shapes)
    return _Spread.apply(torch.empty(0, requires_grad=True), shard, found, shapes)  # type: ignore[no-untyped-call,no-any-return]


def _at_places(found: Found, shapes: Sequence[torch.Size] | None) -> Tensor | tuple[Tensor, ...]:
    return in_parts(torch.from_numpy(found.vectors).index_select(0, torch.from_numpy(found.places)), shapes)


class _Spread(torch.autograd.Function):
    """``_at_places``; ``anchor``, an empty tensor, only makes autograd call backward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, shard: Shard, found: Found, shapes: Sequence[torch.Size] | None
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shard, ctx.keys, ctx.places, ctx.shapes = shard, found.keys, found.places, shapes
        return _at_places(found, shapes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        some = reached(gradients, ctx.shapes, ctx.places)
        if some is not None:
            places, gradient = some
            ctx.shard.add_gradient(ctx.keys, places, gradient.contiguous().numpy())
        return (None,) * 4


def _pooled(found: Found, bounds: Tensor) -> Tensor:
    """(b, dim): of every bag the sum of its vectors, added in their order."""
    vectors = torch.from_numpy(found.vectors)
    if not len(found.places):
        return vectors.new_zeros(len(bounds) - 1, vectors.shape[1])
    places = torch.from_numpy(found.places)
    return torch.nn.functional.embedding_bag(places, vectors, bounds, mode="sum", include_last_offset=True)


class _Pooled(torch.autograd.Function):
    """``_pooled``; ``anchor`` as in ``_Spread``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shard: Shard, found: Found, bounds: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.shard, ctx.keys, ctx.places, ctx.bounds = shard, found.keys, found.places, bounds
        return _pooled(found, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, ...]:
        if gradient is not None:
            of = torch.repeat_interleave(ctx.bounds.diff(), output_size=len(ctx.places))
            ctx.shard.add_gradient(ctx.keys, ctx.places, gradient.contiguous().numpy(), of.numpy())
        return (None,) * 4
