"""Cells of the quality table: one model, history length and seed each, trained and scored in processes of their own.

A worker has one thread, so that cells do not get in each other's way, and reads archive and table only: files that do
not change. What a cell leaves is a checkpoint; what comes back is figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thinrow.checkpoints import load
from thinrow.dpp import RowFilter, loader
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Archive, Generation
from thinrow.jagged import Column, Jagged
from thinrow.models import SavedRanker
from thinrow.storage.objects import LocalObjects
from thinrow.training import TrainConfig, evaluate, score, train
from thinrow.training.metrics import ndcg, single_feature_auc

#: Batches of 128 requests whose columns are looked at one by one, at most, on either side of the cut.
_SINGLE_COLUMN_BATCHES = 140


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker reads: folders of the store and of the table."""

    store: Path
    table: Path

    def generation(self) -> Generation:
        """The archive's newest generation."""
        return Archive(LocalObjects(self.store / "archive")).pin()


@dataclass(frozen=True, slots=True)
class Cell:
    """Attributes:
    model: "hstu" or "dlrm".
    history: name of the length.
    config: of the run.
    out: folder of its checkpoint.
    """

    model: str
    history: str
    config: TrainConfig
    out: Path


def use_one_thread() -> None:
    """Of a worker, before it does anything."""
    torch.set_num_threads(1)


def train_cell(place: Place, cell: Cell) -> dict[str, Any]:
    """Train, leave a checkpoint, and tell what it took."""
    with ExampleTable.open(place.table) as table:
        trainer, result = train(cell.config, place.generation(), table, out=cell.out, threads=1)
    return {
        "ne_progressive": result.ne,
        "steps": result.steps,
        "requests": result.examples,
        "candidates": result.candidates,
        "seconds": result.seconds,
        "waited_s": result.waited_s,
        "keys": len(trainer.embeddings),
    }


def score_cell(place: Place, cell: Cell, rows: RowFilter) -> dict[str, Any]:
    """Score the held-out requests with the cell's checkpoint."""
    checkpoint = load(cell.out)
    ranker = SavedRanker.of(checkpoint.meta, checkpoint.tensors, checkpoint.path)
    with ExampleTable.open(place.table) as table:
        scored = score(ranker.spec, ranker.module, place.generation(), table, rows, threads=1)
    found = evaluate(scored)
    return {
        "ne": found.ne,
        "auc": found.auc,
        "gauc": found.gauc,
        "ndcg_10": ndcg(scored.logits, scored.labels, scored.offsets, 10),
        "held_out_requests": found.requests,
        "held_out_candidates": found.candidates,
        "base_rate": found.base_rate,
    }


def single_columns(place: Place, config: TrainConfig, held_out: RowFilter) -> dict[str, Any]:
    """How well any one input column tells the label: its AUC on held-out requests, learned on those of training."""
    spec = config.ranker
    columns: dict[str, list[npt.NDArray[Any]]] = {}
    labels, before = [], []
    with ExampleTable.open(place.table) as table:
        for rows in (config.rows, held_out):
            reader = loader(
                place.generation(),
                table,
                projection=spec.projection,
                plan=spec.plan,
                rows=rows,
                threads=1,
                base_rows=128,
                block=1,
            )
            for batch in reader:
                if batch.t >= _SINGLE_COLUMN_BATCHES:
                    break
                shown = batch.labels[spec.label]
                for name, feature in batch.features.items():
                    columns.setdefault(name, []).append(_beside_candidates(feature, shown))
                labels.append(shown.values)
                before.append(np.full(len(shown.values), rows == config.rows))
            reader.close()
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    found = single_feature_auc(joined, np.concatenate(labels), np.concatenate(before))
    return {"column": found.name, "auc": found.auc, "columns": found.each}


def _beside_candidates(feature: Column | Jagged, shown: Jagged) -> npt.NDArray[Any]:
    return feature.values if isinstance(feature, Jagged) else np.repeat(feature.values, shown.lengths)
