"""DLRM with a pooled history: the baseline that sees how much of everything was in a history, but not when.

Naumov et al., "Deep learning recommendation model" (arXiv 1906.00091): dense numbers through an MLP, keys through
embeddings, dot products of all pairs, an MLP on top. Two variants are switches:

- ``sets``: a vector is cut into so many, which interact apart, as if each key had several embeddings (Guo et al., "On
  the embedding collapse when scaling up recommendation models", arXiv 2310.04400);
- ``experts``: so many MLPs on top, mixed by a gate of softmax for each task (Ma et al., "Modeling task relationships
  in multi-task learning with multi-gate mixture-of-experts", KDD 2018).

Worked example. 6 vectors of width 16 and one of the numbers: 21 dot products, and 7 * 16 + 21 inputs to the MLP on top;
with 2 sets 42 dot products, of 8 numbers each.

Shape letters: C candidates, F vectors, d width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.embeddings import DynamicTable
from thinrow.models.inputs import InputSpec, RankerInputs
from thinrow.models.layers import Heads, check_counts, check_rate, last_layer, mlp
from thinrow.models.pooled import PooledRanker


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRMConfig:
    """Attributes:
    hidden: widths of the layers of the MLP on top.
    base_rate: of the label, where the first prediction starts.
    sets: into how many a vector is cut, which interact apart.
    experts: MLPs on top; 1 for one without a gate.
    cross_features: whether outputs of the plan that relate candidates to the history are read.
    """

    hidden: tuple[int, ...] = (64, 32)
    base_rate: float = 0.1
    sets: int = 1
    experts: int = 1
    cross_features: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if not self.hidden or min(self.hidden) < 1:
            raise InputError(f"hidden={self.hidden}; give one or more widths of 1 or more")
        check_rate("base_rate", self.base_rate)
        check_counts(self, "sets", "experts")


class DLRM(PooledRanker):
    """``forward(inputs)`` gives a logit for each candidate (and task)."""

    def __init__(self, config: DLRMConfig, spec: InputSpec, table: DynamicTable, n_tasks: int = 1) -> None:
        super().__init__(spec, table)
        if table.dim % config.sets:
            raise InputError(f"sets={config.sets} does not divide the width {table.dim} of an embedding")
        self.sets = config.sets
        pairs = torch.tril_indices(self.n_vectors, self.n_vectors, -1)
        self.pairs: Tensor
        self.register_buffer("pairs", pairs[0] * self.n_vectors + pairs[1], persistent=False)
        widths = [self.n_vectors * table.dim + self.sets * pairs.shape[1], *config.hidden]
        self.top: nn.Module = (
            Heads(widths, config.base_rate, n_tasks)
            if config.experts == 1
            else Experts(widths, config.base_rate, n_tasks, config.experts)
        )

    def forward(self, inputs: RankerInputs) -> Tensor:
        """(C,) logits, in the order of ``inputs.candidate_keys``; (C, T) of T tasks."""
        vectors_CFd = self.vectors(inputs)
        cut = vectors_CFd.view(*vectors_CFd.shape[:2], self.sets, self.dim // self.sets)
        sets = cut.transpose(1, 2).flatten(0, 1)
        products = torch.bmm(sets, sets.transpose(1, 2)).flatten(1)[:, self.pairs]
        products = products.view(len(vectors_CFd), self.sets * len(self.pairs))
        logits: Tensor = self.top(torch.cat([vectors_CFd.flatten(1), products], dim=1))
        return logits


class Experts(nn.Module):
    """MLPs whose outputs a gate mixes for each task: (n, widths[0]) -> (n,) of one task, (n, T) of several."""

    def __init__(self, widths: list[int], base_rate: float, n_tasks: int, n_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(*mlp(widths)) for _ in range(n_experts))
        self.gates = nn.ModuleList(nn.Linear(widths[0], n_experts) for _ in range(n_tasks))
        self.last = nn.ModuleList(last_layer(widths[-1], base_rate) for _ in range(n_tasks))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.stack([expert(x) for expert in self.experts], dim=1)
        mixed = [(gate(x).softmax(1)[:, :, None] * found).sum(1) for gate in self.gates]
        logits = torch.cat([last(m) for last, m in zip(self.last, mixed, strict=True)], dim=1)
        return logits if len(self.last) > 1 else logits[:, 0]
