"""What sharded tables must do, as jobs for ``thinrow.testing.ranks``: a small model trained on the batches of all
ranks, and the same by one process with ``Embedding`` on the batches put together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from thinrow.embeddings import (
    Budget,
    DynamicTable,
    Embedding,
    GlooRanks,
    ShardedEmbedding,
    ShardedEmbeddings,
    SparseAdagrad,
    SparseAdam,
    SparseAdamW,
    SparseRowWiseAdagrad,
    SparseSGD,
)
from thinrow.embeddings.ranks import Ranks

Ints = npt.NDArray[np.int64]
State = dict[str, npt.NDArray[Any]]

# A large eps: where gradients cancel, their rounding must not decide the direction of a step.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": SparseSGD,
    "adagrad": functools.partial(SparseAdagrad, eps=0.01),
    "rowwise_adagrad": functools.partial(SparseRowWiseAdagrad, eps=0.01),
    "adam": functools.partial(SparseAdam, eps=0.01),
    "adamw": functools.partial(SparseAdamW, eps=0.01, weight_decay=0.1),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Of one rank in one step: ``users`` and ``items`` (n, 2) int64 keys, ``labels`` (n,) 0 or 1 in float32."""

    users: Ints
    items: Ints
    labels: npt.NDArray[np.float32]

    @property
    def keys(self) -> tuple[Tensor, Tensor]:
        """Of both tables."""
        return torch.from_numpy(self.users), torch.from_numpy(self.items)

    def split(self, n: int) -> list[Batch]:
        """In ``n`` parts; the last may be empty."""
        return [Batch(*some) for some in zip(*(np.array_split(a, n) for a in self._arrays()), strict=True)]

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """One after another."""
        return cls(*(np.concatenate(parts) for parts in zip(*(b._arrays() for b in batches), strict=True)))

    def _arrays(self) -> tuple[Any, ...]:
        return self.users, self.items, self.labels


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes:
    optimizer: name in ``OPTIMIZERS``.
    clip_norm, wire: as there.
    whole_users: the table of users is whole on each rank.
    prefetch: ids of the next look-up are exchanged during this one's compute.
    together: both tables are looked up in one exchange.
    passes: forward and backward passes a step, each on a part of the batch.
    budget: of both tables, over all ranks.
    """

    optimizer: str = "adagrad"
    clip_norm: float | None = None
    wire: str | None = None
    whole_users: bool = False
    prefetch: bool = False
    together: bool = False
    passes: int = 1
    budget: Budget | None = None


@dataclass(slots=True)
class Trained:
    """Attributes:
    vectors: of each pass, (n, 2, 7): those of users and items side by side, as read in training.
    losses: of each step, over all ranks.
    probed: (p, 7) vectors of the keys of ``probe`` in evaluation.
    tables: state of each table of this rank, users first.
    weights: of the dense half.
    """

    probed: npt.NDArray[Any]
    vectors: list[npt.NDArray[Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tables: list[State] = field(default_factory=list)
    weights: npt.NDArray[Any] | None = None


def train(
    ranks: Ranks | None,
    steps: Sequence[Sequence[Batch]],
    settings: Settings,
    probe: Ints,
    start: Sequence[tuple[Sequence[State], npt.NDArray[Any]]] | None = None,
) -> Trained:
    """Train on ``steps[t][rank]``; with ``ranks`` None on all batches of a step as one. ``start``: tables and weights
    to go on from, for each rank."""
    budget = settings.budget
    if budget is not None and ranks is not None:
        budget = budget.share(ranks.size)
    tables = [DynamicTable(dim, seed=dim, init_scale=0.5, budget=budget) for dim in (3, 4)]
    if start is not None:
        states, weights = start[0 if ranks is None else ranks.rank]
        tables = [DynamicTable.from_state(state) for state in states]
    model = _Model(tables, ranks, settings)
    if start is not None:
        model.weights = torch.from_numpy(weights.copy()).requires_grad_()
    optimizer = OPTIMIZERS[settings.optimizer](*model.embeddings, lr=0.1, clip_norm=settings.clip_norm)
    mine = [Batch.joined(step) if ranks is None else step[ranks.rank] for step in steps]
    parts = [part for batch in mine for part in batch.split(settings.passes)]
    out = Trained(np.empty(0))
    for t, step in enumerate(steps):
        count, total = sum(len(b.labels) for b in step), 0.0
        for i in range(t * settings.passes, (t + 1) * settings.passes):
            vectors = model(parts[i])
            if settings.prefetch and i + 1 < len(parts):
                model.prefetch(parts[i + 1])
            out.vectors.append(vectors.detach().numpy())
            if len(parts[i].labels):
                # A rank without labels takes no backward pass at all.
                loss = model.loss(vectors, parts[i]) / count
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
        model.step(ranks)
        optimizer.step()
        out.losses.append(total if ranks is None else float(ranks.add(np.array([total]))[0]))
    wanted = torch.from_numpy(probe)
    out.probed = torch.cat([e.eval()(wanted) for e in model.embeddings], dim=1).numpy()
    out.tables, out.weights = [t.state() for t in tables], model.weights.detach().numpy()
    return out


class _Model:
    """Logits of pairs of users and items: a product of their vectors with dense weights."""

    def __init__(self, tables: Sequence[DynamicTable], ranks: Ranks | None, settings: Settings) -> None:
        self.weights = torch.linspace(-1, 1, 14).requires_grad_()
        self.embeddings: list[Any] = [Embedding(t) for t in tables]
        self._together = None
        if ranks is not None:
            whole = settings.whole_users, False
            self.embeddings = [
                ShardedEmbedding(t, ranks, whole=w, wire=settings.wire) for t, w in zip(tables, whole, strict=True)
            ]
            self._together = ShardedEmbeddings(*self.embeddings) if settings.together else None

    def __call__(self, batch: Batch) -> Tensor:
        if self._together is not None:
            return torch.cat(self._together(*batch.keys), dim=2)
        return torch.cat([e(k) for e, k in zip(self.embeddings, batch.keys, strict=True)], dim=2)

    def prefetch(self, batch: Batch) -> None:
        if self._together is not None:
            self._together.prefetch(*batch.keys)
        elif isinstance(self.embeddings[0], ShardedEmbedding):
            for embedding, keys in zip(self.embeddings, batch.keys, strict=True):
                embedding.prefetch(keys)

    def loss(self, vectors: Tensor, batch: Batch) -> Tensor:
        logits = vectors.flatten(1) @ self.weights
        return F.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels), reduction="sum")

    def step(self, ranks: Ranks | None) -> None:
        """Of the dense weights, with the sum of the gradients of all ranks."""
        gradient = torch.zeros_like(self.weights) if self.weights.grad is None else self.weights.grad
        if ranks is not None:
            gradient = torch.from_numpy(ranks.add(gradient.numpy()))
        with torch.no_grad():
            self.weights -= 0.1 * gradient
        self.weights.grad = None


def keep_training(ranks: Ranks, steps: int) -> int:
    """Train a little in each of ``steps`` steps, with the ids of the next on their way; returns how many there were."""
    items = ShardedEmbedding(DynamicTable(4), ranks)
    optimizer = SparseSGD(items)
    for step in range(steps):
        vectors = items(torch.arange(step, step + 50))
        if step + 1 < steps:
            items.prefetch(torch.arange(step + 1, step + 51))
        vectors.sum().backward()
        optimizer.step()
    return steps


def make_ranks(ranks: Ranks, members: Sequence[int], timeout_s: float) -> int:
    """Connect the processes ``members``, whoever else does; returns how many they are."""
    return GlooRanks(members, timeout_s=timeout_s).size


def send_much(ranks: Ranks, n_bytes: int) -> tuple[int, int]:
    """The first rank sends ``n_bytes`` to the last; each returns how many it got, and their sum."""
    part, nothing = np.zeros(n_bytes if ranks.rank == 0 else 0, np.uint8), np.empty(0, np.uint8)
    part[-5:] = 7
    received = ranks.exchange("much", [nothing] * (ranks.size - 1) + [part])
    return len(received[0]), int(received[0].sum())


def by_key(state: State) -> dict[int, npt.NDArray[Any]]:
    """key -> its vector and all its optimizer state in one row; usage is left out."""
    names = ["values", *sorted(n for n in state if n.startswith("row_state.") and n != "row_state.usage")]
    rows = np.concatenate([state[n].astype(np.float64) for n in names], axis=1)
    return dict(zip(state["keys"].tolist(), rows, strict=True))
