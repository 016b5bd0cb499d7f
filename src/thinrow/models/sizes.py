"""How large a model is, before it is built: weights, and the arithmetic of an event and of a candidate.

Worked example: a layer of width W has ``5 W^2`` weights in its two matrices, each of which a token multiplies and adds
once: 10 W^2 floating-point operations a token. A pair of tokens costs W multiply-adds for the score and as many for the
sum: 4 W. Of 8 layers of width 512 over 2,048 events these are 21 and 4.3 million an event and layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from thinrow.embeddings import DynamicTable
from thinrow.models.sequence import SequenceConfig
from thinrow.models.spec import MODELS, RankerSpec

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Attributes:
    parameters: weights of the module; the table grows with the keys and is not in them.
    layer_parameters: of these, in the layers of a sequence model; 0 of others.
    row_bytes: of a key's vector in float32, without the optimizer's numbers.
    """

    parameters: int
    layer_parameters: int
    row_bytes: int
    _width: int
    _layers: int
    _per_event: int
    _most: int | None = None

    def forward_flops(self, events: int, candidates: int) -> float:
        """Floating-point operations to score the candidates of one request after so many events.

        Of a sequence model; matrices that only events or only candidates pass are counted for both, which is little.
        """
        tokens = events * self._per_event
        most = tokens if self._most is None else min(self._most * self._per_event, tokens)
        # A token sees those before it and itself; behind the first ``most``, so many and itself.
        pairs = most * (most + 1) / 2 + (tokens - most) * (most + 1) + candidates * (most + 1)
        once = self.parameters - self.layer_parameters
        dense = 2.0 * self.layer_parameters * (tokens + candidates) + 2.0 * once * (events + candidates)
        return dense + 4.0 * self._width * self._layers * pairs

    def batch_flops(self, lengths: Ints, seen: Ints) -> float:
        """Of a training step on passes of (P,) ``lengths``, with (C,) candidates that see so many events of theirs; 0
        for models that are none of sequences."""
        if not self._layers:
            return 0.0
        tokens = lengths.astype(np.float64) * self._per_event
        pairs = (tokens * (tokens + 1) / 2).sum() + (seen * self._per_event + 1.0).sum()
        once = self.parameters - self.layer_parameters
        dense = 2.0 * self.layer_parameters * (tokens.sum() + len(seen)) + 2.0 * once * (lengths.sum() + len(seen))
        return float(3 * (dense + 4.0 * self._width * self._layers * pairs))

    def step_flops(self, events: int, candidates: int) -> float:
        """Of a training step on it: backward costs twice what forward does."""
        return 3 * self.forward_flops(events, candidates)


def sizes_of(spec: RankerSpec) -> Sizes:
    """The sizes of a ranker, whose weights take no memory here.

    Raises:
        InputError: the model does not fit its inputs.
    """
    with torch.device("meta"):
        module = MODELS[spec.name][1](spec.model, spec.inputs, DynamicTable(spec.dim), len(spec.labels))
    total = sum(p.numel() for p in module.parameters())
    width, layers, in_layers, per_event, most = 0, 0, 0, 1, None
    if isinstance(spec.model, SequenceConfig):
        width, layers = spec.model.width, spec.model.layers
        in_layers = sum(p.numel() for n, p in module.named_parameters() if n.startswith("layers."))
        per_event = 2 if getattr(spec.model, "early", False) else 1
        if spec.model.window is not None:
            most = spec.model.window + max(spec.model.first, getattr(spec.model, "static_events", 0))
    return Sizes(total, in_layers, 4 * spec.dim, width, layers, per_event, most)
