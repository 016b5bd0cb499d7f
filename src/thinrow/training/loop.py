"""The training loop, top to bottom: batch -> inputs -> logits -> loss -> gradients -> both optimizers -> checkpoint.

The loss of a step is the sum over its labelled candidates divided by their number; so it does not depend on how many
requests they came in, and shared passes weigh no user more. Metrics are *progressive*: a batch is scored before the
step that learns from it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinrow.checkpoints import Checkpoint, load, save, steps
from thinrow.core.errors import CheckpointMismatch, InputError, StoreNotFound
from thinrow.dpp.batch import Batch
from thinrow.dpp.client import Loader, Pinnable, loader
from thinrow.embeddings import SparseAdagrad, SparseAdam
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Generation
from thinrow.jagged.torch import JaggedTensor
from thinrow.models import RankerInputs, SavedRanker, saved
from thinrow.training.config import TrainConfig
from thinrow.training.metrics import ProgressiveNE
from thinrow.training.optimizer_state import load_optimizer, optimizer_tensors

LOG = "log.jsonl"

#: Called after each step with the step's number (from 1), the number of all steps and the step's record.
OnStep = Callable[[int, int, dict[str, Any]], None]


@dataclass(slots=True)
class TrainResult:
    """Attributes:
    losses: loss of each step of this call.
    ne: progressive normalized entropy over the whole run, resumed parts included.
    steps: steps of the whole run.
    seconds: of this call.
    waited_s: of these, waiting for the reader.
    candidates: labelled candidates of this call.
    examples: requests of this call.
    """

    losses: list[float] = field(default_factory=list)
    ne: float = float("nan")
    steps: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    candidates: int = 0
    examples: int = 0


class Trainer:
    """A run: its module, table, optimizers and reader.

    Args:
        config: of the run.
        store: a HistoryStore (its newest generation is read) or a generation.
        table: the examples.
        threads: of the reader; None for one a core. Any number gives the same losses.

    Raises:
        InputError: the plan does not fit store and table, or no example passes ``config.rows``.
    """

    def __init__(
        self, config: TrainConfig, store: Pinnable | Generation, table: ExampleTable, *, threads: int | None = None
    ) -> None:
        spec = config.ranker
        if spec.label not in dict(table.example_schema.outcomes):
            raise InputError(
                f"label={spec.label!r}; the table has the outcomes {', '.join(dict(table.example_schema.outcomes))}"
            )
        self.config, self.table = config, table
        self.generation = store if isinstance(store, Generation) else store.pin()
        self.module, self.embeddings = spec.build(config.seed)
        self.threads = threads
        self._inputs = spec.inputs
        self._open(table.snapshot_id)
        self._make_optimizers()
        self.progressive = ProgressiveNE()

    def _open(self, snapshot_id: int | None) -> None:
        config = self.config
        self.snapshot_id = snapshot_id
        self.loader: Loader = loader(
            self.generation,
            self.table,
            projection=config.ranker.projection,
            plan=config.ranker.plan,
            epochs=config.epochs,
            seed=config.seed,
            threads=self.threads,
            base_rows=config.base_rows,
            block=config.block,
            snapshot_id=snapshot_id,
            rows=config.rows,
        )
        if not len(self.loader):
            raise InputError(f"no example to train on: none of the table passes {config.rows}; widen rows")

    def _make_optimizers(self) -> None:
        sparse = SparseAdagrad if self.config.sparse_optimizer == "adagrad" else SparseAdam
        self.dense = torch.optim.Adam(self.module.parameters(), lr=self.config.dense_lr)
        self.sparse = sparse(self.embeddings, lr=self.config.sparse_lr)

    def run(
        self, out: Path | None = None, *, stop_after: int | None = None, on_step: OnStep | None = None
    ) -> TrainResult:
        """Train to the end, or to step ``stop_after``; checkpoints and the log of steps go to ``out``."""
        result, began = TrainResult(), time.perf_counter()
        waited = self.loader.stats.waited_s
        self.module.train()
        with _StepLog(out) as log:
            for batch in self.loader:
                loss, record = self.step(batch)
                result.losses.append(loss)
                result.examples += len(batch)
                result.candidates += record["candidates"]
                log.write(record)
                step = batch.t + 1
                last = step in (len(self.loader), stop_after)
                if out is not None and (last or step % self.config.checkpoint_every == 0):
                    self.save(out, step)
                if on_step is not None:
                    on_step(step, len(self.loader), record)
                if last:
                    break
        self.loader.close()
        result.steps = int(self.loader.state_dict()["t"]) + 1
        result.ne = self.progressive.value
        result.seconds = time.perf_counter() - began
        result.waited_s = self.loader.stats.waited_s - waited
        return result

    def step(self, batch: Batch) -> tuple[float, dict[str, Any]]:
        """Score a batch, then learn from it."""
        inputs = self.inputs(batch)
        labels = JaggedTensor.of(batch.labels[self.config.ranker.label]).values.to(torch.float32)
        record: dict[str, Any] = {"step": batch.t + 1, "loss": 0.0, "examples": len(batch), "candidates": len(labels)}
        if not len(labels):
            return 0.0, record
        logits = self.module(inputs)
        self.progressive.add(logits.detach().numpy(), labels.numpy())
        loss = loss_of(logits, labels)
        self.dense.zero_grad()
        self.sparse.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.dense.step()
        self.sparse.step()
        record["loss"] = float(loss.detach())
        return record["loss"], record

    def inputs(self, batch: Batch) -> RankerInputs:
        """What the model reads of a batch."""
        return RankerInputs(self._inputs, batch.histories, batch.features, batch.request_ts)

    def save(self, out: Path, step: int) -> Path:
        """Write a checkpoint: weights, table, both optimizers, and where the reader stands."""
        config = self.config
        meta = SavedRanker.meta(config.ranker, self.generation.schema, self.table.example_schema) | {
            "train": config.to_dict(),
            "generation": self.generation.number,
            "snapshot_id": self.snapshot_id,
            "reader": self.loader.state_dict(),
            "progressive": self.progressive.state(),
        }
        tensors = saved(self.module, self.embeddings) | optimizer_tensors(self.dense)
        return save(out, step, tensors=tensors, meta=meta, keep=config.keep)

    def resume(self, out: Path) -> int:
        """Go on from the newest checkpoint under ``out``; returns its step. The losses that follow are those of a run
        that was never interrupted.

        Raises:
            CheckpointMismatch: there is none, or it was written by another configuration, store or table.
        """
        checkpoint = load(out)
        mine, theirs = self.config.to_dict(), checkpoint.meta["train"]
        for name in mine:
            if mine[name] != theirs.get(name):
                plans = mine["ranker"]["plan"], theirs.get("ranker", {}).get("plan")
                what = f"another {name!r}" if plans[0] == plans[1] else "another feature plan"
                raise CheckpointMismatch(
                    f"{checkpoint.path} was written with {what}; resume with the configuration of the run, or train "
                    "into another folder"
                )
        self._check_place(checkpoint)
        self._open(checkpoint.meta["snapshot_id"])
        self.loader.load_state_dict(checkpoint.meta["reader"])
        self.module, self.embeddings = self.config.ranker.restore(checkpoint.tensors)
        self._make_optimizers()
        load_optimizer(self.dense, checkpoint.tensors)
        self.progressive = ProgressiveNE.from_state(checkpoint.meta["progressive"])
        _cut_log(out, checkpoint.step)
        return checkpoint.step

    def _check_place(self, checkpoint: Checkpoint) -> None:
        """The store and the table must be those of the run, or grown from them."""
        own = SavedRanker.meta(self.config.ranker, self.generation.schema, self.table.example_schema)
        other = [n for n in ("event_schema", "example_schema") if own[n] != checkpoint.meta[n]]
        other += ["generation"] if checkpoint.meta["generation"] > self.generation.number else []
        try:
            self.table.data_files(checkpoint.meta["snapshot_id"])
        except StoreNotFound:
            other.append("snapshot of the table")
        if other:
            raise CheckpointMismatch(
                f"{checkpoint.path} was written on another store or table: its {other[0].replace('_', ' ')} is not "
                "here; resume on those of the run, or train into another folder"
            )


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy, summed over the candidates (C,) and divided by their number."""
    total = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
    return total / max(len(labels), 1)


def train(
    config: TrainConfig,
    store: Pinnable | Generation,
    table: ExampleTable,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    threads: int | None = None,
    on_step: OnStep | None = None,
) -> tuple[Trainer, TrainResult]:
    """Train a ranker; with ``out``, leave checkpoints and a log of steps there.

    Args:
        resume: go on from the newest checkpoint in ``out``.

    Raises:
        InputError: ``out`` holds checkpoints and ``resume`` is not set; further as ``Trainer``.
        CheckpointMismatch: as ``Trainer.resume``.
    """
    trainer = Trainer(config, store, table, threads=threads)
    folder = None if out is None else Path(out)
    if folder is not None and resume:
        trainer.resume(folder)
    elif folder is not None and steps(folder):
        raise InputError(f"{folder} holds checkpoints of an earlier run; pass --resume to go on, or another folder")
    elif folder is not None:
        _cut_log(folder, 0)
    return trainer, trainer.run(folder, on_step=on_step)


class _StepLog:
    """One JSON line a step; nothing where there is no folder."""

    def __init__(self, out: Path | None) -> None:
        self._file = None
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            self._file = (out / LOG).open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def __enter__(self) -> _StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _cut_log(out: Path, step: int) -> None:
    """Drop what the log has beyond ``step``: a killed run took steps after its last checkpoint."""
    path = out / LOG
    if not path.exists():
        return
    # Each run logs every step from 1 on, so that line i is step i; the last may be torn.
    kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[:step]
    path.write_text("".join(kept), encoding="utf-8")
