"""Evaluation: every example of a range once, scored by a ranker that learns nothing from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of
from thinrow.core.users import Users, as_users, distinct
from thinrow.dpp import RowFilter
from thinrow.dpp.client import Pinnable, loader
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Generation
from thinrow.models import RankerInputs, RankerSpec
from thinrow.training.metrics import auc, gauc, hit_rate, ndcg, normalized_entropy

#: Called after each batch with the number of batches done and that of all.
OnBatch = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Scored:
    """C candidates of X requests, in the reader's order.

    Attributes:
        request_id: (X,) int64.
        users: (X,) user of each request.
        offsets: (X + 1,) int64, the candidates of each request.
        logits: (C,) float32.
        labels: (C,) int32.
    """

    request_id: npt.NDArray[np.int64]
    users: Users
    offsets: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Attributes:
    ne: normalized entropy against the base rate of the same candidates; below 1 is better than knowing that rate.
    auc: over all candidates.
    gauc: mean AUC of a user's candidates, weighted by their number.
    requests, users, candidates: how many were scored.
    base_rate: share of positive labels.
    hit_rate, ndcg: at 10, by request.
    """

    ne: float
    auc: float
    gauc: float
    requests: int
    users: int
    candidates: int
    base_rate: float
    hit_rate: float
    ndcg: float


def score(
    spec: RankerSpec,
    module: nn.Module,
    store: Pinnable | Generation,
    table: ExampleTable,
    rows: RowFilter | None = None,
    *,
    threads: int | None = None,
    on_batch: OnBatch | None = None,
    task: str | None = None,
) -> Scored:
    """Score every example that passes ``rows``, once.

    Args:
        task: an outcome of ``spec.given`` to score in place of the label, on the candidates that have the label.

    Raises:
        InputError: none does, or the table does not have the label.
    """
    spec.check_label(table.example_schema)
    task = spec.label if task is None else task
    if task not in spec.labels:
        raise InputError(f"task={task!r}; the model has {', '.join(spec.labels)}")
    rows = rows or RowFilter()
    reader = loader(
        store, table, projection=spec.projection, plan=spec.plan, threads=threads, base_rows=256, block=1, rows=rows
    )
    if not len(reader):
        raise InputError(f"the evaluation set is empty: no example passes {rows}; widen the range of times")
    module.eval()
    inputs_spec = spec.inputs
    ids, users, lengths, logits, labels = [], [], [], [], []
    with torch.inference_mode():
        for batch in reader:
            inputs = RankerInputs(inputs_spec, batch.histories, batch.features, batch.request_ts)
            known = batch.labels[spec.label].values
            kept = np.ones(len(known), np.bool_) if task == spec.label else known == 1
            found = module(inputs).view(len(known), len(spec.labels))[:, spec.labels.index(task)]
            logits.append(found.numpy()[kept])
            labels.append(batch.labels[task].values[kept])
            ids.append(batch.request_id)
            users.append(batch.users)
            lengths.append(np.diff(offsets_of(kept)[inputs.offsets]))
            if on_batch is not None:
                on_batch(batch.t + 1, len(reader))
    offsets = offsets_of(np.concatenate(lengths))
    joined = [np.concatenate(parts) for parts in (logits, labels)]
    return Scored(np.concatenate(ids), as_users(np.concatenate(users)), offsets, *joined)


def evaluate(scored: Scored) -> Evaluation:
    """NE, AUC, GAUC (by user), hit rate and NDCG (by request) of scored candidates.

    Raises:
        InputError: there are none, or all have one label.
    """
    known, user_of = distinct(scored.users)
    group = np.repeat(user_of, np.diff(scored.offsets))
    logits, labels = scored.logits.astype(np.float64), scored.labels
    return Evaluation(
        ne=normalized_entropy(logits, labels),
        auc=auc(logits, labels),
        gauc=gauc(logits, labels, group),
        requests=len(scored.request_id),
        users=len(known),
        candidates=len(labels),
        base_rate=float(labels.mean()),
        hit_rate=hit_rate(logits, labels, scored.offsets, 10),
        ndcg=ndcg(logits, labels, scored.offsets, 10),
    )
