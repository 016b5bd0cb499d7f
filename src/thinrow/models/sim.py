"""SIM: target attention over the events that a candidate's category finds in a history; a baseline that searches.

SIM (Pi et al., "Search-based user interest modeling", arXiv 2006.05639) finds, of a long history, the newest events of
the candidate's own category ("hard search"), and DIN (Zhou et al., arXiv 1706.06978) weighs each by an MLP of
candidate, event, their product and difference; here with the event's age beside them. A user tower, computed once a
request, has the pooled history and the request's own fields (UserTower-SIM among the baselines of MTGR).

Worked example. Events of categories a b a a, the request sees the first three, and ``found=2``: a candidate of category
a attends to events 0 and 2, one of b to event 1, one of c to none.

Shape letters: E events, X requests, C candidates, K found events, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.core.units import DAY_MS
from thinrow.embeddings import DynamicTable
from thinrow.jagged.torch import tensor
from thinrow.models.embed import InputEmbedding, flat
from thinrow.models.inputs import InputSpec, RankerInputs
from thinrow.models.layers import Heads, check_counts, check_rate, mlp
from thinrow.models.retrieval import key_place

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SIMConfig:
    """Attributes:
    search: outputs beside events and beside candidates that must be equal; None for the newest events of any kind.
    found: K, the newest so many that are.
    width: of events and candidates in attention.
    hidden: widths of the layers of the MLP on top.
    base_rate: of the label, where the first prediction starts.
    cross_features: whether outputs of the plan that relate candidates to the history are read.
    """

    search: tuple[str, str] | None = None
    found: int = 16
    width: int = 32
    hidden: tuple[int, ...] = (64, 32)
    base_rate: float = 0.1
    cross_features: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if self.search is not None:
            event, candidate = self.search
            object.__setattr__(self, "search", (event, candidate))
        if not self.hidden or min(self.hidden) < 1:
            raise InputError(f"hidden={self.hidden}; give one or more widths of 1 or more")
        check_counts(self, "found", "width")
        check_rate("base_rate", self.base_rate)


class SIM(nn.Module):
    """``forward(inputs)`` gives a logit for each candidate (and task)."""

    def __init__(self, config: SIMConfig, spec: InputSpec, table: DynamicTable, n_tasks: int = 1) -> None:
        super().__init__()
        self.inputs, self.found = InputEmbedding(spec, table), config.found
        if not self.inputs.event_width:
            raise InputError("no output of the plan stands beside events; SIM needs one, as Hash(Source('history.X'))")
        self.search: tuple[int, int] | None = None
        if config.search is not None:
            event, candidate = config.search
            self.search = key_place(spec, event), key_place(spec, candidate, "cand")
        width, (events, context) = config.width, (self.inputs.event_width, self.inputs.context_width)
        self.event = nn.Linear(events, width)
        self.candidate = nn.Linear(self.inputs.candidate_width, width)
        self.weigh = nn.Sequential(*mlp([4 * width + 1, width], nn.SiLU), nn.Linear(width, 1))
        self.user = nn.Sequential(*mlp([events + context, 2 * width, width], nn.SiLU))
        self.top = Heads([self.inputs.candidate_width + 3 * width, *config.hidden], config.base_rate, n_tasks)

    def forward(self, inputs: RankerInputs) -> Tensor:
        """(C,) logits, in the order of ``inputs.candidate_keys``; (C, T) of T tasks."""
        embedded = self.inputs(inputs)
        event = flat(embedded.event_EFd, embedded.event_EN)
        shown = flat(embedded.candidate_CFd, embedded.candidate_CN)
        context = flat(embedded.context_XFd, embedded.context_XN)
        user_XW = self.user(torch.cat([inputs.histories.mean(event), context], dim=1))
        candidate_CW = self.candidate(shown)
        interest_CW = self._interest(inputs, self.event(event), candidate_CW)
        parts = [shown, candidate_CW, interest_CW, user_XW[inputs.example_of]]
        logits: Tensor = self.top(torch.cat(parts, dim=1))
        return logits

    def _interest(self, inputs: RankerInputs, event_EW: Tensor, candidate_CW: Tensor) -> Tensor:
        """(C, W) sum of the found events, weighed; the weights are no softmax, so that many events count as many."""
        slot, there = find_events(inputs, self.search, self.found)
        if not len(event_EW):
            return torch.zeros_like(candidate_CW)
        passes = inputs.histories.passes
        index, mask = tensor(passes.index[slot]), tensor(there)
        event_CKW, asked = event_EW[index], candidate_CW[:, None].expand(-1, self.found, -1)
        age_ms = (inputs.request_ts[inputs.example_of][:, None] - inputs.event_ts[index]).clamp(min=0)
        age = torch.log1p(age_ms.to(torch.float64) / DAY_MS).to(event_CKW.dtype)[:, :, None]
        seen = torch.cat([event_CKW, asked, event_CKW * asked, event_CKW - asked, age], dim=2)
        weight = torch.where(mask[:, :, None], self.weigh(seen), 0)
        return (weight * event_CKW).sum(1)


def find_events(inputs: RankerInputs, search: tuple[int, int] | None, found: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """(C, K) places in ``passes.index`` of the newest events that a candidate's request sees and whose key (column
    ``search[0]``) is the candidate's (column ``search[1]``), newest last; and which of them are there."""
    passes = inputs.histories.passes
    asked = inputs.example_of.numpy()
    position = np.arange(len(passes.index)) - np.repeat(passes.offsets[:-1], np.diff(passes.offsets))
    group, wanted = np.repeat(np.arange(len(passes)), np.diff(passes.offsets)), passes.pass_of[asked]
    if search is not None:
        events, candidates = inputs.event_keys[:, search[0]].numpy(), inputs.candidate_keys[:, search[1]].numpy()
        kinds, code = np.unique(np.concatenate([events, candidates]), return_inverse=True)
        group = group * len(kinds) + code[: len(events)][passes.index]
        wanted = wanted * len(kinds) + code[len(events) :]
    # One number says group and position; candidates look for where theirs begins and where their view ends.
    step = int(position.max(initial=0)) + 2
    places = group * step + position
    order = np.argsort(places, kind="stable")
    stop = np.searchsorted(places[order], wanted * step + passes.visible[asked])
    start = np.searchsorted(places[order], wanted * step)
    at = stop[:, None] + np.arange(-found, 0)
    there = at >= start[:, None]
    if not len(order):
        return np.zeros(at.shape, np.int64), np.zeros(at.shape, np.bool_)
    return order[np.where(there, at, 0)], there
