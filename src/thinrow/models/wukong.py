"""Wukong: layers of factorisation machines over the vectors of a candidate; a baseline that scales without a sequence.

Zhang et al., "Wukong: towards a scaling law for large-scale recommendation" (arXiv 2403.02545). A layer turns n vectors
X (n, d) into ``norm(concat(FMB(X), LCB(X)) + residual(X))``::

    FMB   the products X (X^T Y), Y (n, k) learned, through norm and MLP into ``fm_vectors`` vectors
    LCB   ``linear_vectors`` linear mixes of the n vectors

The residual is X where the numbers of vectors agree, else linear mixes of X. Histories are pooled, field by field.

Shape letters: C candidates, F vectors, d width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.embeddings import DynamicTable
from thinrow.models.inputs import InputSpec, RankerInputs
from thinrow.models.layers import Heads, check_counts, check_rate
from thinrow.models.pooled import PooledRanker


@dataclass(frozen=True, slots=True, kw_only=True)
class WukongConfig:
    """Attributes:
    layers: of interaction.
    fm_vectors, linear_vectors: that a layer makes of each kind.
    rank: k, of the products.
    inner: width of the MLP within a layer.
    hidden: widths of the layers of the MLP on top.
    base_rate: of the label, where the first prediction starts.
    cross_features: whether outputs of the plan that relate candidates to the history are read.
    """

    layers: int = 2
    fm_vectors: int = 8
    linear_vectors: int = 8
    rank: int = 8
    inner: int = 64
    hidden: tuple[int, ...] = (64, 32)
    base_rate: float = 0.1
    cross_features: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if not self.hidden or min(self.hidden) < 1:
            raise InputError(f"hidden={self.hidden}; give one or more widths of 1 or more")
        check_counts(self, "layers", "fm_vectors", "linear_vectors", "rank", "inner")
        check_rate("base_rate", self.base_rate)


class Wukong(PooledRanker):
    """``forward(inputs)`` gives a logit for each candidate (and task)."""

    def __init__(self, config: WukongConfig, spec: InputSpec, table: DynamicTable, n_tasks: int = 1) -> None:
        super().__init__(spec, table)
        n_out = config.fm_vectors + config.linear_vectors
        counts = [self.n_vectors, *[n_out] * (config.layers - 1)]
        self.layers = nn.ModuleList(WukongLayer(config, n, table.dim) for n in counts)
        self.top = Heads([n_out * table.dim, *config.hidden], config.base_rate, n_tasks)

    def forward(self, inputs: RankerInputs) -> Tensor:
        """(C,) logits, in the order of ``inputs.candidate_keys``; (C, T) of T tasks."""
        vectors_CFd = self.vectors(inputs)
        for layer in self.layers:
            vectors_CFd = layer(vectors_CFd)
        logits: Tensor = self.top(vectors_CFd.flatten(1))
        return logits


class WukongLayer(nn.Module):
    """(C, F, d) -> (C, fm_vectors + linear_vectors, d)."""

    def __init__(self, config: WukongConfig, n: int, dim: int) -> None:
        super().__init__()
        n_out = config.fm_vectors + config.linear_vectors
        self.project = nn.Linear(n, config.rank, bias=False)
        self.fm = nn.Sequential(
            nn.LayerNorm(n * config.rank),
            nn.Linear(n * config.rank, config.inner),
            nn.ReLU(),
            nn.Linear(config.inner, config.fm_vectors * dim),
        )
        self.linear = nn.Linear(n, config.linear_vectors, bias=False)
        self.residual = nn.Identity() if n == n_out else nn.Linear(n, n_out, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        across = x.transpose(1, 2)
        products = torch.bmm(x, self.project(across))
        made = self.fm(products.flatten(1)).unflatten(1, (-1, x.shape[2]))
        mixed = self.linear(across).transpose(1, 2)
        normed: Tensor = self.norm(torch.cat([made, mixed], dim=1) + self.residual(across).transpose(1, 2))
        return normed
