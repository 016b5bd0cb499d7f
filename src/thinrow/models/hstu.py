"""HSTU ranker: a causal sequence model over events, and candidates that look back at the events before their request.

Zhai et al., "Actions speak louder than words" (arXiv 2402.17152): pointwise attention with SiLU in place of softmax,
and gating by U. Group layer norm (events and candidates normalised apart), cross features on candidates and the mask
(a candidate sees the events before its own request, itself, and no other candidate) are MTGR's (arXiv 2505.18654).

All requests of a user run in one pass over the shared events (``thinrow.jagged.passes``). What makes that exact:

- an event's state depends on itself and what is before it in the pass, never on a request;
- positions count from the start of the pass, and a candidate of a request that sees v events stands at position v;
- times enter by rotation: scores depend on the differences between the query's own time and its keys';
- the normaliser is the number of keys that a query sees.

Worked example. A request sees events at days 0, 3, 4 and is at day 5 with two candidates: the event tokens attend to
1, 2 and 3 keys; each candidate attends to those three keys and itself, and divides by 4.

Shape letters: S events of all passes, C candidates, H heads, D width of a head, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.core.ragged import inverse_of, offsets_of, ranges_index
from thinrow.core.units import DAY_MS
from thinrow.embeddings import DynamicTable
from thinrow.jagged.torch import tensor
from thinrow.kernels import kernel
from thinrow.kernels.prefix import PrefixLayout
from thinrow.models.embed import InputEmbedding, flat
from thinrow.models.inputs import InputSpec, RankerInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class HSTUConfig:
    """Attributes:
    width: of tokens.
    heads: attention heads, each ``width / heads`` wide.
    layers: HSTU layers.
    time_pairs: dimensions of a head, in pairs, that are rotated by time.
    position_pairs: the same by position.
    shortest_ms, longest_ms: the periods of the time rotation lie between, in geometric steps.
    base_rate: of the label, where the first prediction starts.
    """

    width: int = 32
    heads: int = 1
    layers: int = 2
    time_pairs: int = 4
    position_pairs: int = 4
    shortest_ms: int = 2 * DAY_MS
    longest_ms: int = 1_000 * DAY_MS
    base_rate: float = 0.1

    def __post_init__(self) -> None:
        for name in ("width", "heads", "layers"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}; it must be 1 or more")
        if self.width % self.heads:
            raise InputError(f"width={self.width} is not a multiple of heads={self.heads}")
        rotated = 2 * (self.time_pairs + self.position_pairs)
        if min(self.time_pairs, self.position_pairs) < 0 or rotated > self.width // self.heads:
            raise InputError(
                f"time_pairs={self.time_pairs} and position_pairs={self.position_pairs} rotate {rotated} dimensions of "
                f"{self.width // self.heads} a head; lower them"
            )
        if not 0 < self.shortest_ms <= self.longest_ms:
            raise InputError(
                f"shortest_ms={self.shortest_ms} and longest_ms={self.longest_ms}; the first must be above 0 and at "
                "most the second"
            )
        if not 0 < self.base_rate < 1:
            raise InputError(f"base_rate={self.base_rate}; it must be between 0 and 1")


class HSTURanker(nn.Module):
    """``forward(inputs)`` gives a logit for each candidate."""

    def __init__(self, config: HSTUConfig, spec: InputSpec, table: DynamicTable) -> None:
        super().__init__()
        self.config = config
        self.inputs = InputEmbedding(spec, table)
        if not self.inputs.event_width:
            raise InputError("no output of the plan stands beside events; HSTU needs one, as Hash(Source('history.X'))")
        width, candidate = config.width, self.inputs.candidate_width + self.inputs.context_width
        self.event_token = nn.Linear(self.inputs.event_width, width)
        self.candidate_token = nn.Sequential(nn.Linear(candidate, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.layers = nn.ModuleList(HSTULayer(config, last=i == config.layers - 1) for i in range(config.layers))
        self.head = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 1))
        last = self.head[2]
        assert isinstance(last, nn.Linear)
        nn.init.constant_(last.bias, math.log(config.base_rate / (1 - config.base_rate)))

    def forward(self, inputs: RankerInputs) -> Tensor:
        """(C,) logits, in the order of ``inputs.candidate_keys``."""
        embedded = self.inputs(inputs)
        layout = _Layout(inputs, embedded.event_EFd.dtype)
        events_SW = self.event_token(flat(embedded.event_EFd, embedded.event_EN))[layout.event_index]
        context = flat(embedded.context_XFd, embedded.context_XN)[inputs.example_of]
        candidate = torch.cat([flat(embedded.candidate_CFd, embedded.candidate_CN), context], dim=1)
        token_CW = self.candidate_token(candidate)[layout.order]
        rotation = layout.rotation(self.config)
        state_CW = token_CW
        for layer in self.layers:
            events_SW, state_CW = layer(events_SW, state_CW, layout, rotation)
        logits: Tensor = self.head(torch.cat([state_CW, token_CW], dim=1))[:, 0]
        return logits[layout.rank]


class HSTULayer(nn.Module):
    """One layer; the ``last`` one does not move the events, whose states nobody reads any more."""

    def __init__(self, config: HSTUConfig, *, last: bool) -> None:
        super().__init__()
        width = config.width
        self.heads, self.last = config.heads, last
        self.uvqk = nn.Linear(width, 4 * width)
        self.out = nn.Linear(width, width)
        self.norm_event, self.norm_candidate = nn.LayerNorm(width), nn.LayerNorm(width)
        self.gate_event = None if last else nn.LayerNorm(width)
        self.gate_candidate = nn.LayerNorm(width)

    def forward(
        self, events_SW: Tensor, candidates_CW: Tensor, layout: _Layout, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """States of events and candidates after the layer."""
        attend, scale = kernel("hstu_attention"), (events_SW.shape[1] // self.heads) ** -0.5
        u, v_SHD, q_SHD, k_SHD = self._project(self.norm_event(events_SW), rotation[0])
        cu, cv, cq, ck = self._project(self.norm_candidate(candidates_CW), rotation[1])
        own = F.silu(scale * (cq * ck).sum(2, keepdim=True)) * cv
        seen = (attend(cq, k_SHD, v_SHD, layout.candidates, scale) + own).flatten(1) * layout.candidate_share
        candidates_CW = candidates_CW + self.out(self.gate_candidate(seen) * cu)
        if self.gate_event is not None:
            mixed = attend(q_SHD, k_SHD, v_SHD, layout.events, scale).flatten(1) * layout.event_share
            events_SW = events_SW + self.out(self.gate_event(mixed) * u)
        return events_SW, candidates_CW

    def _project(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        u, v, q, k = F.silu(self.uvqk(x)).chunk(4, dim=1)
        v, q, k = (t.reshape(len(t), self.heads, x.shape[1] // self.heads) for t in (v, q, k))
        return u, v, _rotate(q, rotation), _rotate(k, rotation)


class _Layout:
    """Who sees whom, once a batch for all layers. Candidates are ordered by pass and by what their request sees."""

    def __init__(self, inputs: RankerInputs, dtype: torch.dtype) -> None:
        passes = inputs.histories.passes
        counts = np.diff(inputs.offsets)
        requests = passes.order()
        order, _ = ranges_index(inputs.offsets[:-1][requests], inputs.offsets[1:][requests])
        visible = np.repeat(passes.visible[requests], counts[requests])
        per_pass = np.bincount(passes.pass_of, counts, minlength=len(passes)).astype(np.int64)
        position = np.arange(len(passes.index)) - np.repeat(passes.offsets[:-1], np.diff(passes.offsets))
        self.order, self.rank = tensor(order), tensor(inverse_of(order))
        self.event_index = tensor(passes.index)
        self.events = PrefixLayout.causal(passes.offsets)
        self.candidates = PrefixLayout(offsets_of(per_pass), passes.offsets, visible)
        self._position = tensor(position), tensor(visible)
        self._time = inputs.event_ts[self.event_index], inputs.request_ts[inputs.example_of[self.order]]
        self._dtype = dtype
        self.event_share, self.candidate_share = (1 / (p + 1).to(dtype)[:, None] for p in self._position)

    def rotation(self, config: HSTUConfig) -> tuple[Tensor, Tensor]:
        """Complex turns (S, 1, pairs) of events and (C, 1, pairs) of candidates, angles taken in float64."""
        periods_ms = np.geomspace(config.shortest_ms, config.longest_ms, config.time_pairs)
        periods = np.geomspace(4, 16_384, config.position_pairs)
        turns = []
        for time_ms, position in zip(self._time, self._position, strict=True):
            cycles = torch.cat([_cycles(time_ms, periods_ms), _cycles(position, periods)], dim=1)
            angle = 2 * math.pi * (cycles - cycles.floor())
            turns.append(torch.polar(torch.ones_like(angle), angle).to(self._dtype.to_complex())[:, None])
        return turns[0], turns[1]


def _cycles(values: Tensor, periods: npt.NDArray[np.float64]) -> Tensor:
    return values.to(torch.float64)[:, None] / tensor(periods)


def _rotate(x_THD: Tensor, turn: Tensor) -> Tensor:
    """Turn the first pairs of dimensions (RoPE, Su et al., arXiv 2104.09864); the rest stays."""
    rotated = 2 * turn.shape[2]
    if not rotated:
        return x_THD
    pairs = torch.view_as_complex(x_THD[..., :rotated].reshape(*x_THD.shape[:2], rotated // 2, 2)) * turn
    return torch.cat([torch.view_as_real(pairs).flatten(2), x_THD[..., rotated:]], dim=2)
