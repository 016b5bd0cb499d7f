"""The vectors that rankers without a sequence interact: of the candidate, of its request, and of the pooled history.

A history is the mean of its events' vectors, field by field: how much of everything was in it, but not when. Worked
example: events with 2 fields, 3 candidate fields and 1 of the request: a candidate has 2 + 3 + 1 vectors, and one of
its numbers.

Shape letters: X requests, C candidates, F vectors, N numbers, d width of a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinrow.embeddings import DynamicTable
from thinrow.features.node import DOMAINS
from thinrow.models.embed import InputEmbedding
from thinrow.models.inputs import InputSpec, RankerInputs


class PooledRanker(nn.Module):
    """Attributes:
    n_vectors: F, vectors of a candidate.
    dim: d.
    """

    def __init__(self, spec: InputSpec, table: DynamicTable) -> None:
        super().__init__()
        self.inputs = InputEmbedding(spec, table)
        n_numbers = sum(len(names) for names in spec.numbers.values())
        self.n_vectors = sum(len(spec.vectors(d)) for d in DOMAINS) + (1 if n_numbers else 0)
        self.dim = table.dim
        self.numbers = nn.Linear(n_numbers, table.dim) if n_numbers else None

    def vectors(self, inputs: RankerInputs) -> Tensor:
        """(C, F, d), in the order of ``inputs.candidate_keys``."""
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
        return torch.cat(vectors, dim=1)
