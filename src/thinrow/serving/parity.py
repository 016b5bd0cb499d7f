"""Parity: whether what a ranker read and what training rebuilds are the same, request by request.

Each impression of a ranker carries a digest of its inputs and the scores it gave. Here the examples are read back
through the loader, from whatever generation there is now; inputs must agree bit for bit, scores to
``SCORE_TOLERANCE``: a score's last bits depend on how many candidates were scored together. Where a server of
embeddings had not answered, inputs must agree too, and scores cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thinrow.checkpoints import Checkpoint
from thinrow.core.errors import SchemaError
from thinrow.dpp import Batch, RowFilter
from thinrow.dpp.client import Pinnable, loader
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Generation
from thinrow.models import RankerInputs
from thinrow.serving.ranker import DEGRADED, INPUT_DIGEST, SCORE
from thinrow.serving.scoring import Model

SCORE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Parity:
    """Attributes:
    requests: impressions compared.
    input_differences: of these, how many have other inputs when rebuilt.
    score_differences: how many have a score that is off by more than ``SCORE_TOLERANCE``.
    largest_score_difference: over all candidates.
    degraded: impressions whose scores were not compared: a server of embeddings had not answered.
    unknown: impressions that were not compared, of a model that was not given.
    """

    requests: int = 0
    input_differences: int = 0
    score_differences: int = 0
    largest_score_difference: float = 0.0
    degraded: int = 0
    unknown: int = 0

    @property
    def same(self) -> bool:
        """No input differs, and no score of an answer that was whole."""
        return not self.input_differences and not self.score_differences

    def __add__(self, other: Parity) -> Parity:
        return Parity(
            self.requests + other.requests,
            self.input_differences + other.input_differences,
            self.score_differences + other.score_differences,
            float(np.maximum(self.largest_score_difference, other.largest_score_difference)),
            self.degraded + other.degraded,
            self.unknown + other.unknown,
        )


def compare(
    models: Checkpoint | Model | Sequence[Model],
    store: Pinnable | Generation,
    served: ExampleTable,
    rows: RowFilter | None = None,
) -> Parity:
    """Rebuild and score every impression in ``served`` that passes ``rows``.

    Args:
        models: what they were ranked with, by the model version in each; of one alone, whatever they say.
        store: of the histories, or any later generation of it.
        served: joined impressions of a ranker.

    Raises:
        CheckpointMismatch: it is no ranker's checkpoint.
        SchemaError: ``served`` is no table of a ranker's impressions.
    """
    fields = {f.name for f in (*served.example_schema.context, *served.example_schema.candidates)}
    for wanted in (INPUT_DIGEST, SCORE):
        if wanted.name not in fields:
            raise SchemaError(
                f"the table has no field {wanted.name!r}; join the impressions of a Ranker with ranker.schema"
            )
    if isinstance(models, Checkpoint):
        models = Model.of_checkpoint(models)
    if isinstance(models, Model):
        return _compare(models, None, store, served, rows)
    total, names = Parity(), {model.name for model in models}
    for number, model in enumerate(models):
        found = _compare(model, names, store, served, rows)
        # Each pass sees those of no model at all; they count once.
        total += found if not number else replace(found, unknown=0)
    return total


def _compare(
    model: Model,
    names: set[str] | None,
    store: Pinnable | Generation,
    served: ExampleTable,
    rows: RowFilter | None,
) -> Parity:
    """Those of ``model``, or all where ``names`` (of all models) is None."""
    spec = model.spec
    reader = loader(
        store, served, projection=spec.projection, plan=spec.plan, base_rows=256, block=1, rows=rows or RowFilter()
    )
    total = Parity()
    for batch in reader:
        said = np.array(batch.model_version.to_arrow().to_pylist(), object)
        mine = np.ones(len(batch), np.bool_) if names is None else said == model.name
        unknown = 0 if names is None else sum(name not in names for name in said)
        total += Parity(unknown=unknown) + (_of_batch(model, batch, mine) if mine.any() else Parity())
    return total


def _of_batch(model: Model, batch: Batch, mine: np.ndarray) -> Parity:
    inputs = RankerInputs(model.inputs, batch.histories, batch.features, batch.request_ts)
    logged = np.array(batch.context[INPUT_DIGEST.name].to_arrow().to_pylist(), object)
    other = (logged != np.array(inputs.fingerprints(), object)) & mine
    lost = np.zeros(len(batch), np.bool_)
    if DEGRADED.name in batch.context:
        lost = batch.context[DEGRADED.name].values > 0
    row_of = inputs.example_of.numpy()
    compared = (mine & ~lost)[row_of]
    off = np.abs(model.score(inputs).probability - batch.candidates[SCORE.name].values)[compared]
    # NaN is no agreement, and the largest there is.
    wrong = len(np.unique(row_of[compared][~(off <= SCORE_TOLERANCE)]))
    largest = float(np.maximum(0.0, off.max(initial=0)))
    return Parity(int(mine.sum()), int(other.sum()), wrong, largest, int((mine & lost).sum()))
