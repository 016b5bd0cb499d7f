"""HSTU for retrieval: the state after a user's newest event, compared with items.

Zhai et al., "Actions speak louder than words" (arXiv 2402.17152): trained on the next item (``thinrow.models.items``),
it scores candidates by the cosine of the user's state and the item's tower. Items are described by pairs of outputs of
the plan, one beside events and one beside candidates, that mean the same; the first pair says which item it is.

Shape letters: S events of all passes, X requests, C candidates, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.embeddings import DynamicTable
from thinrow.features.node import Domain
from thinrow.jagged.torch import tensor
from thinrow.models.embed import Embedded, InputEmbedding, flat
from thinrow.models.inputs import InputSpec, RankerInputs
from thinrow.models.items import ItemTower, NextItem, places, targets_of
from thinrow.models.layers import check_counts
from thinrow.models.sequence import SequenceConfig, SequenceStack


@dataclass(frozen=True, slots=True, kw_only=True)
class NextItemConfig(SequenceConfig):
    """Attributes:
    items: pairs of outputs, beside events and beside candidates, that describe an item; the first says which it is.
    negatives: drawn for each step and domain.
    temperature: cosines are divided by it.
    cross_layers: DCN-V2 layers of an item's tower.
    """

    items: tuple[tuple[str, str], ...] = ()
    negatives: int = 512
    temperature: float = 0.1
    cross_layers: int = 0

    def __post_init__(self) -> None:
        SequenceConfig.__post_init__(self)
        object.__setattr__(self, "items", tuple((a, b) for a, b in self.items))
        if not self.items:
            raise InputError("items=(); name pairs of outputs that describe an item, as (('e_item', 'c_item'),)")
        check_counts(self, "negatives")
        if self.temperature <= 0 or self.cross_layers < 0:
            raise InputError(
                f"temperature={self.temperature}, cross_layers={self.cross_layers}; give one above 0 and one from 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalConfig(NextItemConfig):
    """The configuration of ``HSTURetrieval``."""


class HSTURetrieval(SequenceStack):
    """``forward(inputs)`` gives a score for each candidate, ``next_item(inputs)`` the losses that it is trained on."""

    def __init__(self, config: RetrievalConfig, spec: InputSpec, table: DynamicTable, n_tasks: int = 1) -> None:
        super().__init__(config)
        if n_tasks > 1:
            raise InputError(f"{n_tasks} tasks; retrieval has one score: leave given empty, or take a ranker")
        self.inputs = InputEmbedding(spec, table)
        self.of_event = places(spec, "history", [a for a, _ in config.items])
        self.of_candidate = places(spec, "cand", [b for _, b in config.items])
        self.id_place = key_place(spec, config.items[0][0])
        self.shown_id = key_place(spec, config.items[0][1], "cand")
        width = config.width
        self.event_token = nn.Linear(self.inputs.event_width, width)
        self.tower = ItemTower(len(config.items) * table.dim, width, config.cross_layers)
        self.make_layers(events_last=True)
        self.query = nn.Linear(width, width)
        self.nobody = nn.Parameter(torch.zeros(width))
        self.next = NextItem(config.negatives, config.temperature)

    def forward(self, inputs: RankerInputs) -> Tensor:
        """(C,) cosines over the temperature, in the order of ``inputs.candidate_keys``."""
        embedded = self.inputs(inputs)
        return self.next.score(self._users(inputs, embedded)[inputs.example_of], self._shown(embedded))

    def queries(self, inputs: RankerInputs) -> Tensor:
        """(X, W): the product with an item of ``items`` is its score in ``forward``."""
        return F.normalize(self._users(inputs, self.inputs(inputs)), dim=1) / self.next.temperature

    def items(self, inputs: RankerInputs) -> Tensor:
        """(C, W), of length 1, of the candidates."""
        return F.normalize(self._shown(self.inputs(inputs)), dim=1)

    def item_ids(self, inputs: RankerInputs) -> Tensor:
        """(C,) int64, which item each candidate is."""
        return inputs.candidate_keys[:, self.shown_id]

    def _users(self, inputs: RankerInputs, embedded: Embedded) -> Tensor:
        states = self._states(inputs, flat(embedded.event_EFd, embedded.event_EN))
        passes = inputs.histories.passes
        newest = tensor(passes.offsets[passes.pass_of] + passes.visible)
        # A request without events has the state of nobody, which stands in front of the others.
        state_XW = torch.cat([self.nobody[None], states])[torch.where(tensor(passes.visible) > 0, newest, 0)]
        found: Tensor = self.query(state_XW)
        return found

    def _shown(self, embedded: Embedded) -> Tensor:
        found: Tensor = self.tower(embedded.candidate_CFd[:, self.of_candidate].flatten(1))
        return found

    def next_item(self, inputs: RankerInputs) -> Tensor:
        """(N,) losses of the items that came next."""
        embedded = self.inputs(inputs)
        states = self._states(inputs, flat(embedded.event_EFd, embedded.event_EN))
        targets = targets_of(inputs.histories.passes)
        event = tensor(targets.event)
        items_NW = self.tower(embedded.event_EFd[event][:, self.of_event].flatten(1))
        query_NW = self.query(states[tensor(targets.slot - 1)])
        found: Tensor = self.next(query_NW, items_NW, inputs.event_keys[event, self.id_place], None)
        return found

    def _states(self, inputs: RankerInputs, events: Tensor) -> Tensor:
        layout = self.layout(inputs, events.dtype, candidates=False)
        return self.run(self.event_token(events)[layout.event_index], layout, events=True)


def key_place(spec: InputSpec, name: str, domain: Domain = "history") -> int:
    """The column of ``event_keys`` (``candidate_keys`` for "cand") with an output. Raises InputError where that is no
    single key."""
    (place,) = places(spec, domain, [name])
    if place >= len(spec.keys[domain]):
        raise InputError(f"{name!r} holds several keys, and cannot say which item it is or of what kind; name another")
    return place
