"""DLRM with a pooled history: the baseline that sees how much of everything was in a history, but not when.

Naumov et al., "Deep learning recommendation model" (arXiv 1906.00091): dense numbers through an MLP, keys through
embeddings, dot products of all pairs, an MLP on top. A history is the mean of its events' vectors, field by field.

Worked example. Events with 2 fields, 3 candidate fields and 1 of the request, width 16: a candidate has 2 + 3 + 1
vectors and one of its numbers, 21 dot products, and 7 * 16 + 21 inputs to the MLP on top.

Shape letters: E events, X requests, C candidates, F fields, N numbers, d width of a vector.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.embeddings import DynamicTable
from thinrow.models.embed import InputEmbedding
from thinrow.models.inputs import InputSpec, RankerInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRMConfig:
    """Attributes:
    hidden: widths of the layers of the MLP on top.
    base_rate: of the label, where the first prediction starts.
    """

    hidden: tuple[int, ...] = (64, 32)
    base_rate: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if not self.hidden or min(self.hidden) < 1:
            raise InputError(f"hidden={self.hidden}; give one or more widths of 1 or more")
        if not 0 < self.base_rate < 1:
            raise InputError(f"base_rate={self.base_rate}; it must be between 0 and 1")


class DLRM(nn.Module):
    """``forward(inputs)`` gives a logit for each candidate."""

    def __init__(self, config: DLRMConfig, spec: InputSpec, table: DynamicTable) -> None:
        super().__init__()
        self.inputs = InputEmbedding(spec, table)
        n_numbers = sum(len(names) for names in spec.numbers.values())
        n_vectors = sum(len(names) for names in spec.keys.values()) + (1 if n_numbers else 0)
        self.numbers = nn.Linear(n_numbers, table.dim) if n_numbers else None
        pairs = torch.tril_indices(n_vectors, n_vectors, -1)
        self.pairs: Tensor
        self.register_buffer("pairs", pairs[0] * n_vectors + pairs[1], persistent=False)
        widths = [n_vectors * table.dim + pairs.shape[1], *config.hidden]
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        last = nn.Linear(widths[-1], 1)
        nn.init.constant_(last.bias, math.log(config.base_rate / (1 - config.base_rate)))
        self.top = nn.Sequential(*layers, last)

    def forward(self, inputs: RankerInputs) -> Tensor:
        """(C,) logits, in the order of ``inputs.candidate_keys``."""
        embedded = self.inputs(inputs)
        n_examples = len(inputs)
        pooled_XFd = inputs.histories.mean(embedded.event_EFd.flatten(1)).view(
            n_examples, *embedded.event_EFd.shape[1:]
        )
        request_XFd = torch.cat([pooled_XFd, embedded.context_XFd], dim=1)
        vectors = [embedded.candidate_CFd, request_XFd[inputs.example_of]]
        if self.numbers is not None:
            pooled_XN = inputs.histories.mean(embedded.event_EN)
            of_request = torch.cat([pooled_XN, embedded.context_XN], dim=1)[inputs.example_of]
            dense = self.numbers(torch.cat([embedded.candidate_CN, of_request], dim=1))
            vectors.append(torch.relu(dense)[:, None])
        vectors_CFd = torch.cat(vectors, dim=1)
        products = torch.bmm(vectors_CFd, vectors_CFd.transpose(1, 2)).flatten(1)[:, self.pairs]
        logits: Tensor = self.top(torch.cat([vectors_CFd.flatten(1), products], dim=1))
        return logits[:, 0]
