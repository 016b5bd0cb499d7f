"""TrainConfig: everything that settles a training run, as data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinrow.core.errors import InputError
from thinrow.dpp import BatchBudget, RowFilter
from thinrow.embeddings import SparseAdagrad, SparseAdam, SparseAdamW, SparseRowWiseAdagrad, SparseSGD
from thinrow.models import MODELS, RankerSpec

#: Name in a configuration -> what updates the table.
SPARSE_OPTIMIZERS: dict[str, type[SparseAdagrad] | type[SparseAdam] | type[SparseSGD]] = {
    "adagrad": SparseAdagrad,
    "rowwise_adagrad": SparseRowWiseAdagrad,
    "adam": SparseAdam,
    "adamw": SparseAdamW,
    "sgd": SparseSGD,
}

_POSITIVE = ("epochs", "base_rows", "block", "accumulate", "checkpoint_every")

#: Values that came after checkpoints were written: those say nothing of them, and mean this.
_ABSENT = {"deltas": 0, "objective": "rank", "start": None, "accumulate": 1, "deterministic": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """With equal configs, stores and tables, runs on one machine have bit-identical losses.

    Attributes:
        ranker: model, feature plan, projection and label.
        rows: which examples to train on.
        epochs: passes over them.
        seed: of the weights and of the reader's order.
        base_rows: examples that a worker reads at a time.
        block: base batches that are shuffled together and make a training batch.
        budget: what a training batch may cost; batches are then cut from blocks by it. None for a block each.
        accumulate: batches a step: their gradients are those of the loss over all of them, and only one at a time is in
            memory.
        dense_lr: learning rate of Adam on the module's weights.
        sparse_lr: learning rate of the table's optimizer.
        sparse_optimizer: "adagrad", "rowwise_adagrad", "adam", "adamw" or "sgd" (``thinrow.embeddings``).
        checkpoint_every: steps between checkpoints.
        deltas: checkpoints after a full one that hold only the rows that changed since the one before.
        keep: checkpoints that are kept, the newest ones, beside those that they rest on.
        objective: what is learned: "rank", the label of candidates; or "next_item", which item comes next in a history.
        start: a checkpoint (or a folder of them: the newest) whose weights and table the run begins with; None for new
            ones.
        deterministic: whether operations of torch that are not (some on GPUs) raise instead; all that a CPU runs are.
    """

    ranker: RankerSpec
    rows: RowFilter = field(default_factory=RowFilter)
    epochs: int = 1
    seed: int = 0
    base_rows: int = 64
    block: int = 4
    budget: BatchBudget | None = None
    accumulate: int = 1
    dense_lr: float = 3e-3
    sparse_lr: float = 0.05
    sparse_optimizer: str = "adagrad"
    checkpoint_every: int = 200
    deltas: int = 0
    keep: int = 2
    objective: str = "rank"
    start: str | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in (*_POSITIVE, "keep"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise InputError(f"{name}={getattr(self, name)}; it must be from 1 to 2^31 - 1")
        if not 0 <= self.deltas < 1 << 31:
            raise InputError(f"deltas={self.deltas}; it must be from 0 to 2^31 - 1")
        for name in ("dense_lr", "sparse_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name}={getattr(self, name)}; it must be above 0 and finite")
        if self.objective not in ("rank", "next_item"):
            raise InputError(f"objective={self.objective!r}; there are rank and next_item")
        if self.objective == "next_item" and not hasattr(MODELS[self.ranker.name][1], "next_item"):
            able = [n for n, (_, module) in MODELS.items() if hasattr(module, "next_item")]
            raise InputError(f"the model {self.ranker.name} predicts no next item; take one of {', '.join(able)}")
        if self.sparse_optimizer not in SPARSE_OPTIMIZERS:
            raise InputError(
                f"sparse_optimizer={self.sparse_optimizer!r}; there are {', '.join(sorted(SPARSE_OPTIMIZERS))}"
            )

    def with_history(self, max_len: int | None, align: int = 1) -> TrainConfig:
        """The same run on the newest ``max_len`` events; see ``Projection``."""
        projection = dataclasses.replace(self.ranker.projection, max_len=max_len, align=align)
        return dataclasses.replace(self, ranker=dataclasses.replace(self.ranker, projection=projection))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; ``from_dict`` reverses it."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain |= {"ranker": self.ranker.to_dict(), "rows": dataclasses.asdict(self.rows)}
        for name, absent in _ABSENT.items():
            if plain[name] == absent:
                del plain[name]
        budget = plain.pop("budget")
        return plain if budget is None else plain | {"budget": dataclasses.asdict(budget)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainConfig:
        """Reverse of ``to_dict``. Raises InputError on anything else."""
        try:
            plain = {**data, "ranker": RankerSpec.from_dict(data["ranker"]), "rows": RowFilter(**data["rows"])}
            if "budget" in data:
                plain["budget"] = BatchBudget(**data["budget"])
            return cls(**plain)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError) as e:
            raise InputError(f"not a training configuration: {e!r}; write it with TrainConfig.to_dict") from e
