"""Model: what scores requests, one version of it: the module, what it reads, and where its rows are.

A ranker holds one and replaces it as a whole, so that a request is scored with weights and vectors of one version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from thinrow.checkpoints import Checkpoint
from thinrow.models import RankerInputs, SavedRanker
from thinrow.serving.rows import FetchedRows, RowSource, degraded_of, keys_of

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
    """

    def __init__(
        self,
        saved: SavedRanker,
        name: str,
        source: RowSource | None = None,
        fetched: FetchedRows | None = None,
    ) -> None:
        """``source`` has its rows and ``fetched`` stands where its module has a table; both None where the table is in
        memory."""
        self.name, self.spec, self.inputs = name, saved.spec, saved.spec.inputs
        self.event_schema, self.example_schema = saved.event_schema, saved.example_schema
        self._module, self._source, self._fetched = saved.module, source, fetched

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
        if self._source is None or self._fetched is None:
            return Scores(self._run(inputs), np.zeros(len(inputs), np.int64))
        fetched = self._source.fetch(keys_of(inputs))
        with self._fetched.holding(fetched):
            return Scores(self._run(inputs), degraded_of(inputs, fetched), fetched.seconds)

    def _run(self, inputs: RankerInputs) -> Floats:
        with torch.inference_mode():
            logits = self._module(inputs).view(int(inputs.offsets[-1]), len(self.spec.labels))
            probability: Floats = torch.sigmoid(logits[:, 0]).numpy()
        return probability


__all__ = ["Model", "Scores"]
