"""Items and what follows what: towers that turn an item's fields into a vector, and the loss of the next one.

Worked example. Two requests of a user on one pass with items 5, 6, 5, 7 (the first request sees three of them)::

    what is predicted    6 after (5), 5 after (5, 6), 7 after (5, 6, 5): each once, however many requests see it
    negatives            drawn from these three targets: item 7 with probability 1/3
    loss of the last     log(e^(q . 7) + sum over draws j, not 7, of e^(q . j) / (K / 3)) - q . 7

A target is predicted once for each different past that leads to it, so a pass for twenty requests and twenty passes
have one loss: pasts are told apart by a hash of the events in them.

Shape letters: E events, N targets, K negatives, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.features.node import Domain
from thinrow.jagged.passes import Passes
from thinrow.jagged.torch import tensor
from thinrow.kernels import kernel
from thinrow.models.inputs import InputSpec
from thinrow.models.layers import CrossLayers, KindLinear

Ints = npt.NDArray[np.int64]


def places(spec: InputSpec, domain: Domain, names: Sequence[str]) -> list[int]:
    """Where the vectors of outputs stand among those of their domain.

    Raises:
        InputError: there is no such output.
    """
    have = spec.vectors(domain)
    for name in names:
        if name not in have:
            raise InputError(f"the plan has no key {name!r} beside {domain}; there are {', '.join(have)}")
    return [have.index(name) for name in names]


class ItemTower(nn.Module):
    """An item's fields -> its vector: DCN-V2 and a projection, with weights for each domain.

    Args:
        n_in: width of the fields side by side.
        width: W.
        cross_layers: of DCN-V2; 0 for the projection alone.
        domains: how many.
    """

    def __init__(self, n_in: int, width: int, cross_layers: int, domains: int = 1) -> None:
        super().__init__()
        self.domains = domains
        self.cross = CrossLayers(n_in, cross_layers, domains)
        self.out = KindLinear(n_in, width, domains)

    def forward(self, fields: Tensor, domain: Tensor | None = None) -> Tensor:
        """(n, n_in) and the (n,) int64 domain of each -> (n, W)."""
        x = fields
        if domain is None or self.domains == 1:
            bounds = [0, *[len(x)] * self.domains]
            whole: Tensor = self.out(self.cross(x, bounds), bounds)
            return whole
        order = torch.argsort(domain, stable=True)
        bounds = [0, *torch.bincount(domain, minlength=self.domains).cumsum(0).tolist()]
        out: Tensor = self.out(self.cross(x[order], bounds), bounds)
        return out[torch.argsort(order)]


@dataclass(frozen=True, slots=True)
class Targets:
    """Attributes:
    slot: (N,) int64, position in ``passes.index`` of each event that is predicted.
    event: (N,) int64, which event that is.
    """

    slot: Ints
    event: Ints


def targets_of(passes: Passes) -> Targets:
    """Every event that has one before it, once for each different past; in an order that hangs on the pasts alone.
    Copies of an event (``Passes.same``) are one."""
    lengths = np.diff(passes.offsets)
    # Events of a pass are in order, so a past is told by the set of its events: by a sum of their hashes.
    event = passes.index if passes.same is None else passes.same[passes.index]
    total = np.cumsum(kernel("mix64")(event.astype(np.uint64) + np.uint64(1)), dtype=np.uint64)
    before = np.concatenate([np.zeros(1, np.uint64), total])[passes.offsets[:-1]]
    past = total - np.repeat(before, lengths)
    follows = np.arange(len(passes.index)) > np.repeat(passes.offsets[:-1], lengths)
    slots = np.flatnonzero(follows)
    _, first = np.unique(past[slots], return_index=True)
    slot = slots[first]
    return Targets(slot, passes.index[slot])


class NextItem(nn.Module):
    """The loss of predicting which item comes next: a softmax over sampled negatives, with logQ, in each domain.

    Vectors are compared by cosine over ``temperature``. Negatives are drawn with replacement from the targets of the
    batch in the same domain, by a hash of step and number, so that a resumed run draws the same.
    """

    def __init__(self, negatives: int, temperature: float) -> None:
        super().__init__()
        self.negatives, self.temperature = negatives, temperature
        self.draws: Tensor
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))

    def score(self, query: Tensor, item: Tensor) -> Tensor:
        """(n,) logits of n queries and n items, each (n, W)."""
        return (F.normalize(query, dim=1) * F.normalize(item, dim=1)).sum(1) / self.temperature

    def forward(self, query_NW: Tensor, item_NW: Tensor, item_id: Tensor, domain: Tensor | None) -> Tensor:
        """(N,) losses of queries, the items that came, their (N,) int64 ids, and (N,) domains where there are any."""
        query, item = F.normalize(query_NW, dim=1) / self.temperature, F.normalize(item_NW, dim=1)
        step = int(self.draws)
        if self.training:
            self.draws += 1
        if not len(query):
            # A rank without targets goes backward with the others.
            return (query * item).sum(1)
        loss = query.new_zeros(len(query))
        for d in torch.unique(domain).tolist() if domain is not None else [0]:
            rows = torch.arange(len(query)) if domain is None else torch.nonzero(domain == d)[:, 0]
            number = np.arange(self.negatives, dtype=np.uint64) + np.uint64(step * self.negatives)
            at = tensor((kernel("mix64")(number + np.uint64(1)) % np.uint64(len(rows))).astype(np.int64))
            _, kind, count = torch.unique(item_id[rows], return_inverse=True, return_counts=True)
            expected = self.negatives * count[kind[at]].to(query.dtype) / len(rows)
            drawn = rows[at]
            found = kernel("sampled_softmax")(
                query[rows], item[rows], item_id[rows], item[drawn], item_id[drawn], expected.log()
            )
            loss = loss.index_put((rows,), found)
        return loss
