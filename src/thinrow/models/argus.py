"""ARGUS: events of several domains in one sequence, pretrained on the next item, fine-tuned to rank.

"Scaling recommender transformers to one billion parameters" (arXiv 2507.15994) and its write-up of 2026. An event is a
context (where and how it was asked), an item and an action (what came of it)::

    items      pairs of outputs that describe an item, beside events and candidates; a tower (DCN-V2) for each domain
    contexts   pairs of outputs that describe a context, beside events and requests
    action     every other output beside events

How a context is bound to an item:

    early      an event is two tokens: its context, then item + action. The next item is read off the state of its own
               context's token, and a request is such a token, which its candidates see
    late       an event is one token, the sum of the three. The next item is read off the newest event's state together
               with the next context, at the exit

Worked example, two events and a request with candidates 7 and 8::

    early      c1 i1 c2 i2 | c | 7 8      c2 (which sees c1 i1) predicts i2;  7 sees c1 i1 c2 i2 c 7
    late       e1 e2 | 7 8                (e1, c2) predicts i2;               7, with c in it, sees e1 e2 7

Contexts of several kinds (``kind``) have a matrix each; ``feedback`` adds a loss to that of the next item: what came of
it (a click, a quantity), given the same past and the item::

    early      c2 (which sees c1 i1) and i2 predict a2

Layers are those of HSTU (``thinrow.models.sequence``). Multi-hashed categoricals and words of texts are outputs of the
plan (``MultiHash``, ``BagOfWords``); their vectors are sums of rows of one table.

Shape letters: E events, X requests, C candidates, N targets, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.embeddings import DynamicTable
from thinrow.features.node import Domain
from thinrow.jagged.torch import tensor
from thinrow.models.embed import Embedded, InputEmbedding
from thinrow.models.inputs import InputSpec, RankerInputs
from thinrow.models.items import ItemTower, NextItem, places, targets_of
from thinrow.models.layers import Heads, check_counts
from thinrow.models.retrieval import NextItemConfig, key_place
from thinrow.models.sequence import SequenceLayout, SequenceStack


@dataclass(frozen=True, slots=True, kw_only=True)
class ARGUSConfig(NextItemConfig):
    """Attributes:
    contexts: pairs of outputs, beside events and beside requests, that describe a context.
    domain: outputs beside events and candidates whose remainder by ``domains`` is an item's domain; None for one.
    domains: how many.
    early: whether a context is a token before its item, and not bound to it at the exit.
    kind: outputs beside events and requests whose remainder by ``kinds`` is a context's kind (feed, query, document),
        which has a matrix of its own; what a kind does not have is null. None for one kind.
    kinds: how many.
    feedback: the output beside events whose remainder by ``feedbacks`` is what came of one: it is predicted too, from
        the state that predicts the item, and the item. None to learn the item alone.
    feedbacks: how many there are.
    feedback_weight: of its loss, beside that of the item.
    """

    cross_layers: int = 2
    contexts: tuple[tuple[str, str], ...] = ()
    domain: tuple[str, str] | None = None
    domains: int = 1
    early: bool = True
    kind: tuple[str, str] | None = None
    kinds: int = 1
    feedback: str | None = None
    feedbacks: int = 2
    feedback_weight: float = 1.0

    def __post_init__(self) -> None:
        NextItemConfig.__post_init__(self)
        object.__setattr__(self, "contexts", tuple((a, b) for a, b in self.contexts))
        check_counts(self, "domains", "kinds", "feedbacks")
        if not self.contexts:
            raise InputError("contexts=(); name pairs of outputs that describe a context, as (('e_store', 'x_store'),)")
        for name, count in (("domain", self.domains), ("kind", self.kinds)):
            pair = getattr(self, name)
            if pair is not None:
                beside_events, beside = pair
                object.__setattr__(self, name, (beside_events, beside))
            elif count > 1:
                raise InputError(f"{name}s={count} without a {name}; name outputs, as ('e_{name}', 'c_{name}')")
        if self.feedback_weight <= 0:
            raise InputError(f"feedback_weight={self.feedback_weight}; it must be above 0; feedback=None leaves it out")


class ARGUS(SequenceStack):
    """``forward(inputs)`` gives a logit for each candidate (and task), ``next_item(inputs)`` losses to pretrain on."""

    def __init__(self, config: ARGUSConfig, spec: InputSpec, table: DynamicTable, n_tasks: int = 1) -> None:
        super().__init__(config)
        self.early, self.domains, self.kinds = config.early, config.domains, config.kinds
        self.feedbacks, self.feedback_weight = config.feedbacks, config.feedback_weight
        self.inputs = InputEmbedding(spec, table)
        self.roles = _Roles(config, spec)
        width, dim, roles = config.width, table.dim, self.roles
        self.tower = ItemTower(len(roles.items) * dim, width, config.cross_layers, config.domains)
        n_context = len(roles.contexts) * dim
        self.context = (
            nn.Linear(n_context, width) if config.kinds == 1 else ItemTower(n_context, width, 0, config.kinds)
        )
        action = len(roles.action) * dim + len(spec.numbers["history"])
        self.action = nn.Linear(action, width) if action else None
        rest = (len(roles.rest) + len(roles.profile)) * dim + len(spec.numbers["cand"]) + len(spec.numbers["ctx"])
        self.rest = nn.Sequential(nn.Linear(rest, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) if rest else None
        self.make_layers(requests=self.early, events_last=True)
        self.query = nn.Linear(width if self.early else 2 * width, width)
        self.next = NextItem(config.negatives, config.temperature)
        self.head = Heads([2 * width, 2 * width], config.base_rate, n_tasks, nn.SiLU)
        if config.feedback is not None:
            hidden = nn.Linear(2 * width, 2 * width)
            self.feedback = nn.Sequential(hidden, nn.SiLU(), nn.Linear(2 * width, config.feedbacks))

    def forward(self, inputs: RankerInputs) -> Tensor:
        """(C,) logits, in the order of ``inputs.candidate_keys``; (C, T) of T tasks."""
        embedded, roles = self.inputs(inputs), self.roles
        layout = self._layout(inputs, embedded, candidates=True)
        _, _, events = self._events(inputs, embedded, layout)
        asked_XW = self._contexts(embedded.context_XFd[:, roles.asked], inputs.context_keys, roles.kind[1])
        token_CW = self.tower(
            embedded.candidate_CFd[:, roles.shown].flatten(1),
            _class_of(inputs.candidate_keys, roles.domain[1], self.domains),
        )
        if self.rest is not None:
            of_request = torch.cat([embedded.context_XFd[:, roles.profile].flatten(1), embedded.context_XN], dim=1)
            own = torch.cat([embedded.candidate_CFd[:, roles.rest].flatten(1), embedded.candidate_CN], dim=1)
            token_CW = token_CW + self.rest(torch.cat([own, of_request[inputs.example_of]], dim=1))
        if not self.early:
            token_CW = token_CW + asked_XW[inputs.example_of]
        token_CW = token_CW[layout.order]
        requests = [asked_XW[layout.requests]] if self.early else []
        states = self.run(torch.cat([events, *requests, token_CW]), layout)
        state_CW = states[len(states) - len(token_CW) :]
        logits: Tensor = self.head(torch.cat([state_CW, token_CW], dim=1))
        return logits[layout.rank]

    def next_item(self, inputs: RankerInputs) -> Tensor:
        """(N,) losses of the items that came next."""
        embedded = self.inputs(inputs)
        layout = self._layout(inputs, embedded, candidates=False)
        items_EW, contexts_EW, events = self._events(inputs, embedded, layout)
        states = self.run(events, layout, events=True)
        targets = targets_of(inputs.histories.passes)
        event, slot = tensor(targets.event), tensor(targets.slot)
        exit_NW = states[2 * slot] if self.early else torch.cat([states[slot - 1], contexts_EW[event]], dim=1)
        keys, roles, query_NW = inputs.event_keys[event], self.roles, self.query(exit_NW)
        domain = _class_of(keys, roles.domain[0], self.domains)
        found: Tensor = self.next(query_NW, items_EW[event], keys[:, roles.id_place], domain)
        came = _class_of(keys, roles.feedback, self.feedbacks)
        if came is not None:
            logits = self.feedback(torch.cat([query_NW, items_EW[event]], dim=1))
            found = found + self.feedback_weight * F.cross_entropy(logits, came, reduction="none")
        return found

    def _layout(self, inputs: RankerInputs, embedded: Embedded, *, candidates: bool) -> SequenceLayout:
        per_event, per_request = (2, int(candidates)) if self.early else (1, 0)
        return self.layout(
            inputs, embedded.event_EFd.dtype, per_event=per_event, per_request=per_request, candidates=candidates
        )

    def _events(
        self, inputs: RankerInputs, embedded: Embedded, layout: SequenceLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Items and contexts (E, W) of events, and the tokens of all passes."""
        vectors, roles = embedded.event_EFd, self.roles
        domain = _class_of(inputs.event_keys, roles.domain[0], self.domains)
        items = self.tower(vectors[:, roles.items].flatten(1), domain)
        contexts = self._contexts(vectors[:, roles.contexts], inputs.event_keys, roles.kind[0])
        bound = items
        if self.action is not None:
            bound = items + self.action(torch.cat([vectors[:, roles.action].flatten(1), embedded.event_EN], dim=1))
        if not self.early:
            return items, contexts, (bound + contexts)[layout.event_index]
        pairs = torch.stack([contexts, bound], dim=1)
        return items, contexts, pairs[layout.event_index, layout.event_part]

    def _contexts(self, fields: Tensor, keys: Tensor, place: int | None) -> Tensor:
        """(n, F, d) of contexts -> (n, W)."""
        if self.kinds == 1:
            return cast(Tensor, self.context(fields.flatten(1)))
        return cast(Tensor, self.context(fields.flatten(1), _class_of(keys, place, self.kinds)))


def _class_of(keys: Tensor, place: int | None, n: int) -> Tensor | None:
    return None if place is None else keys[:, place] % n


class _Roles:
    """Which vectors are read as what: places among those of events, candidates and requests."""

    def __init__(self, config: ARGUSConfig, spec: InputSpec) -> None:
        self.items = places(spec, "history", [a for a, _ in config.items])
        self.shown = places(spec, "cand", [b for _, b in config.items])
        self.contexts = places(spec, "history", [a for a, _ in config.contexts])
        self.asked = places(spec, "ctx", [b for _, b in config.contexts])
        self.id_place = key_place(spec, config.items[0][0])
        self.domain, self.kind = _pair(spec, config.domain, "cand"), _pair(spec, config.kind, "ctx")
        self.feedback = None if config.feedback is None else key_place(spec, config.feedback)
        beside: dict[Domain, set[int | None]] = {
            "history": {*self.items, *self.contexts, self.domain[0], self.kind[0], self.feedback},
            "cand": {*self.shown, self.domain[1]},
            "ctx": {*self.asked, self.kind[1]},
        }
        others = {d: [i for i in range(len(spec.vectors(d))) if i not in taken] for d, taken in beside.items()}
        self.action, self.rest, self.profile = others["history"], others["cand"], others["ctx"]


def _pair(spec: InputSpec, names: tuple[str, str] | None, beside: Domain) -> tuple[int | None, int | None]:
    return (None, None) if names is None else (key_place(spec, names[0]), key_place(spec, names[1], beside))
