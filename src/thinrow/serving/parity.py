"""Parity: whether what a ranker read and what training rebuilds are the same, request by request.

Each impression of a ranker carries a digest of its inputs and the scores it gave. Here the examples are read back
through the loader, from whatever generation there is now; inputs must agree bit for bit, scores to
``SCORE_TOLERANCE``: a score's last bits depend on how many candidates were scored together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from thinrow.checkpoints import Checkpoint
from thinrow.core.errors import SchemaError
from thinrow.dpp import RowFilter
from thinrow.dpp.client import Pinnable, loader
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Generation
from thinrow.models import RankerInputs, SavedRanker
from thinrow.serving.ranker import INPUT_DIGEST, SCORE

SCORE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Parity:
    """Attributes:
    requests: impressions compared.
    input_differences: of these, how many have other inputs when rebuilt.
    score_differences: how many have a score that is off by more than ``SCORE_TOLERANCE``.
    largest_score_difference: over all candidates.
    """

    requests: int
    input_differences: int
    score_differences: int
    largest_score_difference: float


def compare(
    checkpoint: Checkpoint, store: Pinnable | Generation, served: ExampleTable, rows: RowFilter | None = None
) -> Parity:
    """Rebuild and score every impression in ``served`` that passes ``rows``.

    Args:
        checkpoint: the one that they were ranked with.
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
    ranker = SavedRanker.of(checkpoint.meta, checkpoint.tensors, checkpoint.path)
    spec, inputs_spec = ranker.spec, ranker.spec.inputs
    reader = loader(
        store, served, projection=spec.projection, plan=spec.plan, base_rows=256, block=1, rows=rows or RowFilter()
    )
    n_requests, n_inputs, n_scores, largest = 0, 0, 0, 0.0
    with torch.inference_mode():
        for batch in reader:
            inputs = RankerInputs(inputs_spec, batch.histories, batch.features, batch.request_ts)
            logged = batch.context[INPUT_DIGEST.name].to_arrow().to_pylist()
            n_inputs += sum(a != b for a, b in zip(logged, inputs.fingerprints(), strict=True))
            scores = batch.candidates[SCORE.name].values
            logits = ranker.module(inputs).view(len(scores), len(spec.labels))[:, 0]
            off = np.abs(torch.sigmoid(logits).numpy() - scores)
            # NaN is no agreement, and the largest there is.
            largest = float(np.maximum(largest, off.max(initial=0)))
            row_of = inputs.example_of.numpy()
            n_scores += len(np.unique(row_of[~(off <= SCORE_TOLERANCE)]))
            n_requests += len(batch)
    return Parity(n_requests, n_inputs, n_scores, largest)
