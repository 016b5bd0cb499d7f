"""HSTU and MTGR rankers: a causal sequence model over events, and candidates that look back at the events before their
request.

Zhai et al., "Actions speak louder than words" (arXiv 2402.17152); MTGR (arXiv 2505.18654) on top: a norm for each kind
of token, cross features on candidates, and a mask under which a candidate sees what came before its own request and no
other candidate. Masks, layers and what makes shared passes exact are in ``thinrow.models.sequence``. The two are one
module with switches, whose defaults differ::

                     tokens                                          switches of MTGRConfig
    user, U          one for each output beside requests             user_tokens
    static part, S   the first events of a pass, which see all of S  static_events
    recent part, R   the other events, causal
    candidate, C     candidate fields with cross features            cross_features, group_norm

Shape letters: S event tokens of all passes, X requests, C candidates, F fields, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.embeddings import DynamicTable
from thinrow.models.embed import Embedded, InputEmbedding, flat
from thinrow.models.inputs import InputSpec, RankerInputs
from thinrow.models.layers import Heads, KindLinear
from thinrow.models.sequence import EventStates, SequenceConfig, SequenceStack


@dataclass(frozen=True, slots=True, kw_only=True)
class HSTUConfig(SequenceConfig):
    """Attributes:
    user_tokens: a token for each output beside requests, in place of reading these beside each candidate.
    static_events: the first so many events of a pass see each other; 0 for a mask that is causal throughout.
    """

    user_tokens: bool = False
    static_events: int = 0

    def __post_init__(self) -> None:
        SequenceConfig.__post_init__(self)
        if self.static_events < 0:
            raise InputError(f"static_events={self.static_events}; it must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class MTGRConfig(HSTUConfig):
    """HSTU as MTGR has it: all kinds of tokens, each switch on."""

    user_tokens: bool = True
    static_events: int = 64


class HSTURanker(SequenceStack):
    """``forward(inputs)`` gives a logit for each candidate (and task)."""

    def __init__(self, config: HSTUConfig, spec: InputSpec, table: DynamicTable, n_tasks: int = 1) -> None:
        super().__init__(config)
        self.inputs = InputEmbedding(spec, table)
        if not self.inputs.event_width:
            raise InputError("no output of the plan stands beside events; HSTU needs one, as Hash(Source('history.X'))")
        width, candidate = config.width, self.inputs.candidate_width
        self.static, self.n_user_tokens = config.static_events, 0
        if config.user_tokens:
            self.user = UserTokens(spec, table.dim, width)
            self.n_user_tokens = self.user.per_request
        else:
            candidate += self.inputs.context_width
        self.event_token = nn.Linear(self.inputs.event_width, width)
        self.candidate_token = nn.Sequential(nn.Linear(candidate, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.make_layers(requests=bool(self.n_user_tokens))
        self.head = Heads([2 * width, 2 * width], config.base_rate, n_tasks, nn.SiLU)

    def event_states(self, inputs: RankerInputs) -> EventStates:
        """What ``forward`` reads of the events: it hangs on the events of a pass alone, so it can be kept."""
        embedded = self.inputs(inputs)
        layout = self.layout(inputs, embedded.event_EFd.dtype, static=self.static, candidates=False)
        events_SW = self.event_token(flat(embedded.event_EFd, embedded.event_EN))[layout.event_index]
        return self.states_of(events_SW, layout)

    def forward(self, inputs: RankerInputs, held: EventStates | None = None) -> Tensor:
        """(C,) logits, in the order of ``inputs.candidate_keys``; (C, T) of T tasks. Where states of the events are
        ``held``, pass after pass, their keys are not read (``RankerInputs.without_events``)."""
        embedded = self.inputs(inputs if held is None else inputs.without_events())
        layout = self.layout(inputs, embedded.event_EFd.dtype, per_request=self.n_user_tokens, static=self.static)
        candidate = flat(embedded.candidate_CFd, embedded.candidate_CN)
        tokens = []
        if held is None:
            tokens.append(self.event_token(flat(embedded.event_EFd, embedded.event_EN))[layout.event_index])
        if self.n_user_tokens:
            tokens.append(self.user(embedded)[layout.requests].flatten(0, 1))
        else:
            context = flat(embedded.context_XFd, embedded.context_XN)[inputs.example_of]
            candidate = torch.cat([candidate, context], dim=1)
        token_CW = self.candidate_token(candidate)[layout.order]
        states = self.run(torch.cat([*tokens, token_CW]), layout, held=held)
        state_CW = states[len(states) - len(token_CW) :]
        logits: Tensor = self.head(torch.cat([state_CW, token_CW], dim=1))
        return logits[layout.rank]


class UserTokens(nn.Module):
    """A token for each output beside requests: a matrix for each key, and one for all numbers together."""

    def __init__(self, spec: InputSpec, dim: int, width: int) -> None:
        super().__init__()
        n_keys, n_numbers = len(spec.vectors("ctx")), len(spec.numbers["ctx"])
        self.keys = KindLinear(dim, width, n_keys) if n_keys else None
        self.numbers = nn.Linear(n_numbers, width) if n_numbers else None
        self.per_request = n_keys + (1 if n_numbers else 0)

    def forward(self, embedded: Embedded) -> Tensor:
        """(X, M, W)."""
        parts = []
        if self.keys is not None:
            n_requests, n_keys, _ = embedded.context_XFd.shape
            by_key = embedded.context_XFd.transpose(0, 1).flatten(0, 1)
            tokens = self.keys(by_key, [n_requests * f for f in range(n_keys + 1)])
            parts.append(tokens.view(n_keys, n_requests, tokens.shape[1]).transpose(0, 1))
        if self.numbers is not None:
            parts.append(self.numbers(embedded.context_XN)[:, None])
        return torch.cat(parts, dim=1)
