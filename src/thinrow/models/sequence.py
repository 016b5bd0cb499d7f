"""A stack of HSTU layers over tokens of events, requests and candidates, each kind with the mask of its own.

Who sees whom, all requests of a user in one pass over the shared events (``thinrow.jagged.passes``)::

    event        itself and the events before it, with a window only the newest of them and the first; those of the
                 static part (``static``) all of that part
    request      the events of its request, and the other tokens of that request (a user's profile, say)
    candidate    the events of its request, the tokens of its request, itself, and no other candidate

What makes a shared pass exact:

- an event's state depends on what is before it in the pass (or in its static part), never on a request;
- positions count from the start of the pass, and a token of a request that sees v events stands at position v;
- times enter by rotation: scores depend on the differences between the query's own time and its keys';
- the normaliser is the number of keys that a query sees;
- what dropout drops hangs on step, layer, token and feature, not on where a token stands.

Worked example. A request sees events at days 0, 3, 4 and is at day 5 with two candidates: the event tokens attend to
1, 2 and 3 keys; each candidate attends to those three keys and itself, and divides by 4.

Shape letters: S event tokens of all passes, X requests with M tokens each, C candidates, T = S + X M + C tokens, H
heads, D width of a head, W width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.core.ragged import inverse_of, offsets_of, ranges_index
from thinrow.core.units import DAY_MS
from thinrow.jagged.torch import tensor
from thinrow.kernels import kernel
from thinrow.kernels.layout import AttentionLayout
from thinrow.kernels.prefix import PrefixLayout
from thinrow.models.inputs import RankerInputs
from thinrow.models.layers import check_counts, check_rate

#: Of each layer, turned keys and values (S, H, D) of the events, side by side by pass.
EventStates = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceConfig:
    """Attributes:
    width: of tokens.
    heads: attention heads, each ``width / heads`` wide.
    layers: HSTU layers.
    time_pairs: dimensions of a head, in pairs, that are rotated by time.
    position_pairs: the same by position.
    shortest_ms, longest_ms: the periods of the time rotation lie between, in geometric steps.
    base_rate: of the label, where the first prediction starts.
    group_norm: a norm for each kind of token; False for one that all share.
    dropout: share of a layer's gated values that is dropped in training.
    cross_features: whether outputs of the plan that relate candidates to the history are read.
    window: events before its own place that a token sees at most (semi-local attention); None for all.
    first: of the oldest events, how many are seen in spite of the window.
    """

    width: int = 32
    heads: int = 1
    layers: int = 2
    time_pairs: int = 4
    position_pairs: int = 4
    shortest_ms: int = 2 * DAY_MS
    longest_ms: int = 1_000 * DAY_MS
    base_rate: float = 0.1
    group_norm: bool = True
    dropout: float = 0.0
    cross_features: bool = True
    window: int | None = None
    first: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "width", "heads", "layers")
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
        check_rate("base_rate", self.base_rate)
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout={self.dropout}; it must be from 0 to below 1")
        if (self.window is not None and self.window < 0) or self.first < 0:
            raise InputError(f"window={self.window} and first={self.first}; neither may be negative")


class SequenceLayout:
    """Who sees whom, once a batch for all layers. Requests and candidates are ordered by pass and by what they see.

    Args:
        inputs: of the batch.
        per_event: tokens of an event, one after another.
        per_request: tokens of a request.
        static: the first so many events of a pass see each other, where the pass has as many.
        candidates: False for a pass without candidates.
        window, first: as in ``SequenceConfig``; the static part is outside any window.

    Attributes:
        event_index: (S,) int64, the event of each event token; ``event_part`` (S,) which of its tokens.
        requests: (X,) int64, the requests in order.
        order: (C,) int64, the candidates in order; ``rank`` is its inverse.
        slot: (C,) int64, position in ``requests`` of each candidate in order.
        bounds: (4,) of the kinds: event, request and candidate tokens.
    """

    def __init__(
        self, inputs: RankerInputs, dtype: torch.dtype, *, per_event: int = 1, per_request: int = 0, static: int = 0,
        candidates: bool = True, window: int | None = None, first: int = 0,
    ) -> None:  # fmt: skip
        passes = inputs.histories.passes
        counts = np.diff(inputs.offsets) if candidates else np.zeros(len(inputs), np.int64)
        requests = passes.order()
        begin = inputs.offsets[:-1][requests]
        order, _ = ranges_index(begin, begin + counts[requests])
        offsets, lengths = passes.offsets * per_event, np.diff(passes.offsets)
        seen = passes.visible[requests] * per_event
        position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths * per_event)
        whole = np.repeat(np.where(lengths >= static, static, 0) * per_event, lengths * per_event)
        shown = np.repeat(seen, counts[requests])
        self.n_events, self.per_request = len(position), per_request
        self.requests, self.order, self.rank = (
            tensor(requests.astype(np.int64)),
            tensor(order),
            tensor(inverse_of(order)),
        )
        self.slot = tensor(np.repeat(np.arange(len(requests)), counts[requests]))
        self.event_index = tensor(np.repeat(passes.index, per_event))
        self.event_part = tensor(np.arange(len(position)) % per_event)
        request_sees = np.repeat(seen, per_request)
        per_pass = np.bincount(passes.pass_of, counts, minlength=len(passes)).astype(np.int64)
        asking = offsets_of(np.bincount(passes.pass_of, minlength=len(passes)) * per_request)
        # Events before these are seen whatever the window.
        kept = None if window is None else (window * per_event, max(first, static) * per_event)
        self.events = _within(offsets, offsets, position, np.maximum(position + 1, whole), kept)
        self.of_requests = _within(asking, offsets, request_sees, request_sees, kept)
        self.candidates = _within(offsets_of(per_pass), offsets, shown, shown, kept)
        seen_of = self.events.n_seen, self.of_requests.n_seen + per_request, self.candidates.n_seen + per_request + 1
        keys = np.concatenate(seen_of)
        self.share = 1 / tensor(keys).to(dtype)[:, None]
        self.bounds = tuple(np.cumsum([0, len(position), len(request_sees), len(order)]).tolist())
        asked = tensor(np.repeat(requests, per_request)), inputs.example_of[self.order]
        self._time = torch.cat([inputs.event_ts[self.event_index], *(inputs.request_ts[a] for a in asked)])
        self._position = tensor(np.concatenate([position, request_sees, shown]))
        # Numbers of tokens, for dropout: the same wherever a token stands.
        part = torch.arange(len(request_sees)) % max(per_request, 1)
        self.token = torch.cat(
            [
                self.event_index * per_event + self.event_part,
                (1 << 40) + asked[0] * max(per_request, 1) + part,
                (1 << 41) + self.order,
            ]
        )
        self._dtype = dtype

    def rotation(self, config: SequenceConfig) -> Tensor:
        """Complex turns (T, 1, pairs), angles taken in float64."""
        periods_ms = np.geomspace(config.shortest_ms, config.longest_ms, config.time_pairs)
        periods = np.geomspace(4, 16_384, config.position_pairs)
        cycles = torch.cat([_cycles(self._time, periods_ms), _cycles(self._position, periods)], dim=1)
        angle = 2 * math.pi * (cycles - cycles.floor())
        return torch.polar(torch.ones_like(angle), angle).to(self._dtype.to_complex())[:, None]


def _within(
    q_offsets: npt.NDArray[np.int64],
    k_offsets: npt.NDArray[np.int64],
    place: npt.NDArray[np.int64],
    stop: npt.NDArray[np.int64],
    kept: tuple[int, int] | None,
) -> AttentionLayout:
    """Queries at ``place`` that see the keys before ``stop``; with ``kept`` (window, first) only the newest before
    their place, themselves, and the first."""
    if kept is None:
        return PrefixLayout(q_offsets, k_offsets, stop)
    window, first = kept
    oldest = np.minimum(stop, first)
    start = np.maximum(place - window, oldest)
    starts = np.stack([np.zeros_like(start), start], axis=1)
    return AttentionLayout(q_offsets, k_offsets, starts, np.stack([oldest, np.maximum(stop, start)], axis=1))


class SequenceStack(nn.Module):
    """The layers of a sequence model. A subclass makes what its tokens need, then calls ``make_layers``, so that the
    weights are drawn in the order in which they are used."""

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__()
        self.config = config

    def make_layers(self, *, requests: bool = False, events_last: bool = False) -> None:
        """Make the layers.

        Args:
            requests: whether there are tokens of requests.
            events_last: whether events may move in the last layer too.
        """
        config, last = self.config, self.config.layers - 1
        self.layers = nn.ModuleList(
            HSTULayer(config, events=i < last or events_last, requests=requests) for i in range(config.layers)
        )
        if config.dropout:
            self.steps: Tensor
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def layout(self, inputs: RankerInputs, dtype: torch.dtype, **kinds: Any) -> SequenceLayout:
        """Who sees whom; ``kinds`` go to ``SequenceLayout``."""
        return SequenceLayout(inputs, dtype, window=self.config.window, first=self.config.first, **kinds)

    def run(
        self, tokens_TW: Tensor, layout: SequenceLayout, *, events: bool = False, held: EventStates | None = None
    ) -> Tensor:
        """(T, W) -> states after the layers: (T, W) with ``events``; else (X M + C, W), and the last layer does not
        move events, whose states nobody reads any more. Where states of the events are ``held``, tokens are
        (X M + C, W)."""
        rotation = layout.rotation(self.config)
        if held is not None:
            rotation = rotation[layout.n_events :]
            for layer, of_layer in zip(self.layers, held, strict=True):
                tokens_TW = layer(tokens_TW, layout, rotation, 0, True, of_layer)
            return tokens_TW
        step = 0
        if self.config.dropout and self.training:
            step = int(self.steps)
            self.steps += 1
        for i, layer in enumerate(self.layers):
            stay = i == len(self.layers) - 1 and not events
            tokens_TW = layer(tokens_TW, layout, rotation, step * len(self.layers) + i, stay)
        return tokens_TW

    def states_of(self, tokens_SW: Tensor, layout: SequenceLayout) -> EventStates:
        """What later tokens read of the events, whose tokens are (S, W): in evaluation mode, of a layout without
        requests. They hang on the events alone, so they can be kept."""
        rotation, states = layout.rotation(self.config), []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, HSTULayer)
            _, v, _, k = layer.project(tokens_SW, layout.bounds, rotation)
            states.append((k.contiguous(), v.contiguous()))
            if i < len(self.layers) - 1:
                tokens_SW = layer(tokens_SW, layout, rotation, 0, False)
        return states


class HSTULayer(nn.Module):
    """One layer (arXiv 2402.17152): pointwise attention with SiLU in place of softmax, gated by U; ``events`` says
    whether it can move events."""

    def __init__(self, config: SequenceConfig, *, events: bool, requests: bool) -> None:
        super().__init__()
        width = config.width
        self.config, self.heads = config, config.heads
        self.uvqk = nn.Linear(width, 4 * width)
        self.out = nn.Linear(width, width)
        # Each holds the weights of a kind; without group_norm one of them holds all.
        self.norm_event = nn.LayerNorm(width)
        self.norm_request = nn.LayerNorm(width) if requests and config.group_norm else None
        self.norm_candidate = nn.LayerNorm(width) if config.group_norm else None
        self.gate_event = nn.LayerNorm(width) if events or not config.group_norm else None
        self.gate_request = nn.LayerNorm(width) if requests and config.group_norm else None
        self.gate_candidate = nn.LayerNorm(width) if config.group_norm else None

    def forward(
        self, x_TW: Tensor, layout: SequenceLayout, rotation: Tensor, seed: int, stay: bool,
        held: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """States (T, W) after the layer; (X M + C, W) where events ``stay`` as they are. With keys and values of the
        events ``held``, (S, H, D) each, ``x_TW`` and ``rotation`` are of the other tokens, and events stay."""
        bounds, moved = layout.bounds, slice(0, None)
        others = tuple(max(b - layout.n_events, 0) for b in bounds)
        u, v, q, k = self.project(x_TW, bounds if held is None else others, rotation, held is not None)
        if held is not None:
            k, v, q = torch.cat([held[0], k]), torch.cat([held[1], v]), torch.cat([q.new_empty(held[0].shape), q])
        mixed = self._attend(v, q, k, layout, stay)
        if stay:
            moved, bounds = slice(layout.n_events, None), others
        mine = moved if held is None else slice(0, None)
        gates = None if stay and self.config.group_norm else self.gate_event, self.gate_request, self.gate_candidate
        gated = kernel("norm_multiply_dropout")(
            mixed.flatten(1) * layout.share[moved], u[mine], *self._grouped(gates, bounds),
            token_T=layout.token[moved], seed=seed, rate=self.config.dropout if self.training else 0.0,
        )  # fmt: skip
        result: Tensor = x_TW[mine] + self.out(gated)
        return result

    def project(
        self, x_TW: Tensor, bounds: Sequence[int], rotation: Tensor, no_events: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gates (T, W), and values, turned queries and turned keys (T, H, D), of tokens whose kinds end at ``bounds``;
        ``no_events`` says that there is none of an event among them."""
        first = None if no_events and self.config.group_norm else self.norm_event
        normed = kernel("group_layer_norm")(
            x_TW, *self._grouped((first, self.norm_request, self.norm_candidate), bounds)
        )
        u, v, q, k = F.silu(self.uvqk(normed)).chunk(4, dim=1)
        v, q, k = (t.reshape(len(t), self.heads, x_TW.shape[1] // self.heads) for t in (v, q, k))
        return u, v, _rotate(q, rotation), _rotate(k, rotation)

    def _grouped(
        self, norms: tuple[nn.LayerNorm | None, ...], bounds: Sequence[int]
    ) -> tuple[tuple[int, ...], Tensor, Tensor]:
        """Bounds, scales and shifts of the kinds that have a norm of their own; of one for all where that is so."""
        there = [n for n in norms if n is not None]
        if len(there) == 1 and not self.config.group_norm:
            bounds = (0, bounds[-1])
        else:
            bounds = (0, *(b for b, n in zip(bounds[1:], norms, strict=True) if n is not None))
        return bounds, torch.stack([n.weight for n in there]), torch.stack([n.bias for n in there])

    def _attend(self, v: Tensor, q: Tensor, k: Tensor, layout: SequenceLayout, stay: bool) -> Tensor:
        """(T, H, D) sums over what each token sees, (X M + C, H, D) where events stay."""
        attend, scale = kernel("hstu_attention"), q.shape[2] ** -0.5
        n, m = layout.n_events, layout.per_request
        ends = layout.bounds[2]
        # Split in one, so that backward puts the gradients of the kinds side by side: of slices it would add up wholes.
        kinds = [n, ends - n, len(q) - ends]
        (qe, qr, qc), (keys, kr, kc), (values, vr, vc) = (torch.split(t, kinds) for t in (q, k, v))
        parts = [] if stay else [attend(qe, keys, values, layout.events, scale)]
        q_of_requests = qr
        qr, kr, vr = (t.view(-1, max(m, 1), *t.shape[1:]) for t in (qr, kr, vr))
        if m:
            weight = F.silu(scale * torch.einsum("xahd,xbhd->xhab", qr, kr))
            within = torch.einsum("xhab,xbhd->xahd", weight, vr).flatten(0, 1)
            parts.append(attend(q_of_requests, keys, values, layout.of_requests, scale) + within)
        seen = attend(qc, keys, values, layout.candidates, scale)
        seen = seen + F.silu(scale * (qc * kc).sum(2, keepdim=True)) * vc
        if m:
            weight = F.silu(scale * torch.einsum("chd,cbhd->chb", qc, kr[layout.slot]))
            seen = seen + torch.einsum("chb,cbhd->chd", weight, vr[layout.slot])
        return torch.cat([*parts, seen])


def _cycles(values: Tensor, periods: npt.NDArray[np.float64]) -> Tensor:
    return values.to(torch.float64)[:, None] / tensor(periods)


def _rotate(x_THD: Tensor, turn: Tensor) -> Tensor:
    """Turn the first pairs of dimensions (RoPE, Su et al., arXiv 2104.09864); the rest stays."""
    rotated = 2 * turn.shape[2]
    if not rotated:
        return x_THD
    pairs = torch.view_as_complex(x_THD[..., :rotated].reshape(*x_THD.shape[:2], rotated // 2, 2)) * turn
    return torch.cat([torch.view_as_real(pairs).flatten(2), x_THD[..., rotated:]], dim=2)
