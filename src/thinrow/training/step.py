"""What a step learns from: a batch made ready for the model, and the loss of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinrow.core.users import Users
from thinrow.dpp.batch import Batch
from thinrow.jagged.torch import JaggedTensor
from thinrow.models import RankerInputs
from thinrow.models.embed import InputEmbedding
from thinrow.models.inputs import InputSpec
from thinrow.models.items import targets_of
from thinrow.training.metrics import ProgressiveNE


class NextItemModel(Protocol):
    """What the objective "next_item" asks of a module."""

    def next_item(self, inputs: RankerInputs) -> Tensor:
        """(N,) losses of the items that came next."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A batch as the model reads it.

    Attributes:
        t: the batch's number, from 0.
        inputs: of the model.
        labels: (C, T) float32 of T tasks; None where the next item is learned.
        terms: of the loss: labelled candidates, or items that came next.
        users: (X,) of the requests.
    """

    t: int
    inputs: RankerInputs
    labels: Tensor | None
    terms: int
    users: Users


@dataclass(frozen=True, slots=True)
class Scores:
    """(C,) logits and labels of the labelled candidates of a batch, and the users of their requests."""

    logits: Any
    labels: Any
    users: Users


def ready(batch: Batch, read: InputSpec, tasks: Sequence[str]) -> Part:
    """The batch as a model with the outputs ``read`` takes it, and its labels of ``tasks``: none where the next item is
    learned."""
    inputs = RankerInputs(read, batch.histories, batch.features, batch.request_ts)
    if not tasks:
        return Part(batch.t, inputs, None, len(targets_of(inputs.histories.passes).event), batch.users)
    labels = torch.stack([_labels(batch, name) for name in tasks], dim=1)
    return Part(batch.t, inputs, labels, len(labels), batch.users)


def dispatch(module: nn.Module, part: Part) -> None:
    """Begin to exchange the keys that ``module`` will look up for ``part``, which is what it reads next; all ranks
    must."""
    for child in module.modules():
        if isinstance(child, InputEmbedding):
            child.prefetch(part.inputs)


def loss_of_part(module: nn.Module, part: Part, terms: int, scored: ProgressiveNE) -> tuple[Tensor, Scores | None]:
    """The sum of the losses of ``part`` over ``terms``, those of the whole step; ``scored`` counts the first task."""
    if part.labels is None:
        return cast(NextItemModel, module).next_item(part.inputs).sum() / terms, None
    logits = module(part.inputs).view(len(part.labels), part.labels.shape[1])
    found = logits[:, 0].detach().to(torch.float32).numpy()
    labels = part.labels[:, 0].numpy()
    if len(labels):
        scored.add(found, labels)
    users = cast(Users, np.repeat(part.users, np.diff(part.inputs.offsets)))
    return loss_of(logits, part.labels, terms), Scores(found, labels, users)


def loss_of(logits: Tensor, labels: Tensor, count: int | None = None) -> Tensor:
    """Binary cross entropy, summed over the candidates (C,) and divided by ``count``, their number on all ranks; None
    for C.

    Of several tasks, both (C, T): that of the first over all candidates, and that of the others over those that have
    the first label. The sum is minus the log of the joint probability, ``p(click) p(conversion | click)``.
    """
    each = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
    if each.dim() == 2:
        clicked = labels[:, :1].to(each.dtype)
        each = torch.cat([each[:, :1], each[:, 1:] * clicked], dim=1)
    return each.sum() / max(len(labels) if count is None else count, 1)


def _labels(batch: Batch, name: str) -> Tensor:
    return JaggedTensor.of(batch.labels[name]).values.to(torch.float32)
