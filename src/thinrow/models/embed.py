"""The embedded inputs of a ranker: one look-up a batch in one table (a second one for bags), keys of a token side by
side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinrow.embeddings import DynamicTable, Embedding, EmbeddingBag, ShardedEmbedding, ShardedEmbeddingBag
from thinrow.models.inputs import Bags, InputSpec, RankerInputs


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors of F keys of width d beside each event (E), request (X) and candidate (C), and their N numbers."""

    event_EFd: Tensor
    context_XFd: Tensor
    candidate_CFd: Tensor
    event_EN: Tensor
    context_XN: Tensor
    candidate_CN: Tensor


class InputEmbedding(nn.Module):
    """Embeds all keys of a batch in one look-up.

    Attributes:
        event_width: F * d + N of an event; likewise ``context_width`` and ``candidate_width``.
    """

    def __init__(self, spec: InputSpec, table: DynamicTable) -> None:
        super().__init__()
        self.embedding = Embedding(table)
        self.bags = EmbeddingBag(table) if any(spec.bags.values()) else None
        widths = {d: len(spec.vectors(d)) * table.dim + len(spec.numbers[d]) for d in spec.keys}
        self.event_width, self.context_width = widths["history"], widths["ctx"]
        self.candidate_width = widths["cand"]

    def prefetch(self, inputs: RankerInputs) -> None:
        """Where the table is spread over ranks, begin the exchange of the keys that the next ``forward``, of these
        inputs, will look up (``ShardedEmbedding.prefetch``)."""
        if isinstance(self.embedding, ShardedEmbedding):
            self.embedding.prefetch(torch.cat([k.reshape(-1) for k in _keys(inputs)]))
        if isinstance(self.bags, ShardedEmbeddingBag):
            self.bags.prefetch(torch.cat([b.keys for b in _bags(inputs)]))

    def forward(self, inputs: RankerInputs) -> Embedded:
        """Vectors in the table's dtype."""
        keys = _keys(inputs)
        vectors = self.embedding(torch.cat([k.reshape(-1) for k in keys]))
        split = torch.split(vectors, [k.numel() for k in keys])
        found = [v.view(*k.shape, vectors.shape[1]) for v, k in zip(split, keys, strict=True)]
        if self.bags is not None:
            found = self._with_bags(self.bags, inputs, found)
        event, context, candidate = found
        numbers = inputs.event_numbers, inputs.context_numbers, inputs.candidate_numbers
        return Embedded(event, context, candidate, *(n.to(vectors.dtype) for n in numbers))

    @staticmethod
    def _with_bags(embed: EmbeddingBag, inputs: RankerInputs, found: list[Tensor]) -> list[Tensor]:
        bags = _bags(inputs)
        sizes = torch.cat([b.bounds.diff() for b in bags])
        pooled = embed(torch.cat([b.keys for b in bags]), F.pad(sizes.cumsum(0), (1, 0)))
        split = torch.split(pooled, [len(b.bounds) - 1 for b in bags])
        parts = zip(found, split, bags, strict=True)
        return [torch.cat([f, p.view(len(f), b.per_row, p.shape[1])], dim=1) for f, p, b in parts]


def _keys(inputs: RankerInputs) -> tuple[Tensor, ...]:
    return inputs.event_keys, inputs.context_keys, inputs.candidate_keys


def _bags(inputs: RankerInputs) -> tuple[Bags, ...]:
    return inputs.event_bags, inputs.context_bags, inputs.candidate_bags


def flat(vectors: Tensor, numbers: Tensor) -> Tensor:
    """(n, F, d) and (n, N) -> (n, F * d + N)."""
    return torch.cat([vectors.flatten(1), numbers], dim=1)
