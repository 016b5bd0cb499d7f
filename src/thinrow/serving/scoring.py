"""Model: what scores requests, one version of it: the module, what it reads, and where its rows are.

A ranker holds one and replaces it as a whole, so that a request is scored with weights and vectors of one version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thinrow.checkpoints import Checkpoint
from thinrow.models import RankerInputs, SavedRanker
from thinrow.serving.cache import RowCache
from thinrow.serving.prefixes import Prefixes
from thinrow.serving.rows import Fetched, FetchedRows, RowSource, degraded_keys, degraded_of, keys_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scores:
    """Attributes:
    probability: (C,) float32 of the label, in the order of the candidates.
    degraded: (X,) int64, rows that each request's scores read for which a default stood in.
    seconds: of each shard of rows that answered.
    """

    probability: Floats
    degraded: Ints
    seconds: Mapping[int, float] = field(default_factory=dict)


class Model:
    """Any number of threads may score at once.

    Attributes:
        name: what impressions say of it.
        spec: what it reads.
        event_schema, example_schema: those that it was trained on.
        prefixes: states of histories that are kept; None for none.
    """

    def __init__(
        self,
        saved: SavedRanker,
        name: str,
        source: RowSource | None = None,
        fetched: FetchedRows | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """``source`` has its rows and ``fetched`` stands where its module has a table; both None where the table is in
        memory. States of histories are kept in ``prefixes``, where the module has such."""
        self.name, self.spec, self.inputs = name, saved.spec, saved.spec.inputs
        self.event_schema, self.example_schema = saved.event_schema, saved.example_schema
        self._module, self._source, self._fetched = saved.module, source, fetched
        #: Numbers that all linear layers make of a token.
        self._outputs = sum(m.out_features for m in saved.module.modules() if isinstance(m, torch.nn.Linear))
        self.prefixes = prefixes if hasattr(saved.module, "event_states") else None

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, name: str | None = None) -> Model:
        """A checkpoint's, its table in memory.

        Raises:
            CheckpointMismatch: it is no ranker's.
        """
        saved = SavedRanker.of(checkpoint.meta, checkpoint.tensors, checkpoint.path)
        return cls(saved, name or f"{saved.spec.name}@{checkpoint.step}")

    @property
    def remote(self) -> bool:
        """Rows come from elsewhere, so that an answer may be degraded."""
        return self._source is not None

    def score(self, inputs: RankerInputs) -> Scores:
        """Raises as the source of the rows."""
        if not inputs.offsets[-1]:
            return Scores(np.empty(0, np.float32), np.zeros(len(inputs), np.int64))
        if self.prefixes is not None:
            return self._score_held(inputs, self.prefixes)
        fetched = self._fetch(inputs)
        if fetched is None or self._fetched is None:
            return Scores(self._run(inputs), np.zeros(len(inputs), np.int64))
        with self._fetched.holding(fetched):
            return Scores(self._run(inputs), degraded_of(inputs, fetched), fetched.seconds)

    def _score_held(self, inputs: RankerInputs, prefixes: Prefixes) -> Scores:
        """In two parts, whether states of a pass are kept or not: so both give the same bits."""
        parts = [inputs.of_pass(p) for p in range(len(inputs.histories.passes))]
        digests = [part.event_digest() for part in parts]
        held = [prefixes.get(digest) for digest in digests]
        bare = inputs.without_events()
        needed = [part for part, states in zip(parts, held, strict=True) if states is None]
        lost = np.zeros(len(parts), np.int64)
        fetched = self._fetch(bare, *needed)
        with nullcontext() if fetched is None or self._fetched is None else self._fetched.holding(fetched):
            for p, part in enumerate(parts):
                if held[p] is not None:
                    continue
                with torch.inference_mode():
                    held[p] = states = self._module.event_states(part)  # type: ignore[operator]
                lost[p] = 0 if fetched is None else degraded_keys(part.event_keys, part.event_bags, fetched).sum()
                if not lost[p]:
                    prefixes.put(digests[p], states)
            whole = [states for states in held if states is not None]
            layers = zip(*whole, strict=True)
            found = self._run(inputs, [(_cat([k for k, _ in one]), _cat([v for _, v in one])) for one in layers])
        degraded = lost[inputs.histories.passes.pass_of]
        if fetched is not None:
            degraded = degraded + degraded_of(bare, fetched, events=False)
        return Scores(found, degraded, {} if fetched is None else fetched.seconds)

    def need_bytes(self, inputs: RankerInputs) -> int:
        """About what scoring them takes at most: the outputs of all linear layers, and the rows."""
        tokens = len(inputs.histories.passes.index) + int(inputs.offsets[-1])
        numbers = inputs.event_keys.numel() + inputs.candidate_keys.numel() + inputs.context_keys.numel()
        return 4 * (tokens * self._outputs + 2 * numbers * self.spec.dim)

    def _fetch(self, *inputs: RankerInputs) -> Fetched | None:
        if self._source is None:
            return None
        if isinstance(self._source, RowCache):
            self._source.make_room(sum(map(self.need_bytes, inputs)))
        return self._source.fetch(keys_of(*inputs))

    def _run(self, inputs: RankerInputs, *held: Any) -> Floats:
        with torch.inference_mode():
            logits = self._module(inputs, *held).view(int(inputs.offsets[-1]), len(self.spec.labels))
            probability: Floats = torch.sigmoid(logits[:, 0]).numpy()
        return probability


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


__all__ = ["Model", "Scores"]
