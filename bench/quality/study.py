"""The runs of the quality study: a cell is a model, a data set, a history length, changed values and a seed.

Cells of a data set are alike in all that is not named: batches of 32 requests whatever the model, one pass over the
requests before the cut of a share of the users that the seed draws, and metrics on held-out requests of other shares,
the same for all cells. So cells of one seed are paired.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.quality.tastes import TASTES, best, cut_ms
from thinrow.dpp import RowFilter
from thinrow.dpp.batch import Batch
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.place import archive_objects
from thinrow.models import RankerInputs
from thinrow.models.sizes import sizes_of
from thinrow.recipes.data import DataSet
from thinrow.recipes.git import GIT
from thinrow.recipes.override import override
from thinrow.recipes.rankers import argus_pretrain
from thinrow.recipes.registry import SMALL
from thinrow.recipes.retail import RETAIL
from thinrow.training import TrainConfig, Trainer, evaluate, score

#: Of the synthetic data.
USERS, REQUESTS, HELD_OUT = 600, 12, 3
LENGTHS = (16, 64, 256, 1024)
_DATA: dict[str, DataSet] = {d.name: d for d in (RETAIL, GIT, TASTES)}


@dataclass(frozen=True, slots=True)
class Cell:
    """Attributes:
    study: what question it belongs to.
    data: name of the data set.
    model: name of its recipe, or "best".
    history: events, at most.
    seed: of weights, users and order.
    change: ``name=value`` of the recipe, as ``--set`` takes them.
    pretrain: passes of next items before it ranks.
    share: one pass for all requests of a user.
    """

    study: str
    data: str
    model: str
    history: int
    seed: int
    change: tuple[str, ...] = ()
    pretrain: int = 0
    share: bool = True

    @property
    def key(self) -> str:
        """What tells it from all others, the study apart."""
        return json.dumps({n: v for n, v in asdict(self).items() if n != "study"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a data set lies, and how much of it is used: about so many requests to train on and to score."""

    store: Path
    examples: Path
    train: int = 3_000
    held_out: int = 1_000


class _Trainer(Trainer):
    """Reads a pass a request where the cell says so."""

    share = True

    def inputs(self, batch: Batch) -> RankerInputs:
        return RankerInputs(self._inputs, batch.histories, batch.features, batch.request_ts, share=self.share)


class Study:
    """Trains cells on one data set."""

    def __init__(self, name: str, place: Place, held_out_ms: int) -> None:
        self.name, self.place, self.data = name, place, _DATA[name]
        self.generation: Generation = Archive(archive_objects(place.store)).pin()
        self.table = ExampleTable.open(place.examples)
        buckets = range(self.table.n_buckets)
        times = [
            self.table.scan_bucket(b, self.table.snapshot_id, columns=("request_ts",))["request_ts"].to_numpy()
            for b in buckets
        ]
        request_ts = np.concatenate(times).astype(np.int64)
        self.cut = held_out_ms if held_out_ms > 0 else int(request_ts.max()) + held_out_ms
        before = int((request_ts < self.cut).sum())
        self.train_share = min(1.0, place.train / before)
        self.held_out_share = min(1.0, place.held_out / (len(request_ts) - before))

    def run(self, cell: Cell) -> dict[str, Any]:
        """Train, score, and tell."""
        if cell.model == "best":
            ne, gauc = best(USERS, REQUESTS, HELD_OUT, cell.history, _align(cell.history))
            return {**asdict(cell), "ne": ne, "gauc": gauc}
        config, began = self._config(cell), time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            if cell.pretrain:
                first = replace(
                    config, objective="next_item", epochs=cell.pretrain, dense_lr=1e-3, checkpoint_every=1 << 20
                )
                Trainer(first, self.generation, self.table, threads=1).run(Path(folder))
                config = replace(config, start=folder)
            trainer = _Trainer(config, self.generation, self.table, threads=1)
            trainer.share = cell.share
            result = trainer.run()
        trained_s = time.process_time() - began
        spec, held_out = config.ranker, RowFilter(since_ms=self.cut, user_share=self.held_out_share, user_seed=1 << 20)
        found = evaluate(score(spec, trainer.module, self.generation, self.table, held_out, threads=1))
        sizes = sizes_of(spec)
        return {
            **asdict(cell),
            "ne": found.ne,
            "auc": found.auc,
            "gauc": found.gauc,
            "progressive_ne": result.ne,
            "requests": result.examples,
            "steps": result.steps,
            "held_out": found.candidates,
            "parameters": sizes.parameters,
            "flops": sizes.forward_flops(cell.history, 20),
            "cpu_s": round(trained_s, 1),
        }

    def _config(self, cell: Cell) -> TrainConfig:
        recipe = argus_pretrain if cell.pretrain else SMALL[cell.model]
        config = replace(recipe(self.data), objective="rank", budget=None, base_rows=32, block=1, seed=cell.seed)
        for change in cell.change:
            name, _, value = change.partition("=")
            config = override(config, name, value)
        rows = RowFilter(until_ms=self.cut, user_share=self.train_share, user_seed=cell.seed)
        return replace(config.with_history(cell.history, _align(cell.history)), rows=rows)


def _align(history: int) -> int:
    # Windows of three quarters of the length and more: requests that are near each other share a pass.
    return max(history // 4, 1)


def held_out_ms(name: str) -> int:
    """From when requests are held out: a time, or how long before the last one."""
    return cut_ms(REQUESTS, HELD_OUT) if name == "tastes" else -42 * 86_400_000


def cells(study: str, data: str, seeds: int) -> Iterator[Cell]:
    """The cells of a study, the first seed of all before the second."""
    if study == "length" and data == "tastes":
        yield from (Cell(study, data, "best", n, 0) for n in LENGTHS)
    for seed in range(seeds):
        for model, history, change, options in _VARIANTS[study](data):
            yield Cell(study, data, model, history, seed, change, **options)


_Variant = tuple[str, int, tuple[str, ...], dict[str, Any]]
_M = "ranker.model."


def _length(data: str) -> Iterator[_Variant]:
    for model in ("hstu", "dlrm", "mtgr", "argus", "sim", "wukong", "hstu_plain", "moe", "multi_embedding"):
        for n in LENGTHS:
            yield model, n, (), {}


def _mtgr(data: str) -> Iterator[_Variant]:
    for change in (
        (),
        (f"{_M}cross_features=false",),
        (f"{_M}group_norm=false",),
        (f"{_M}static_events=0", f"{_M}user_tokens=false"),
    ):
        yield "mtgr", 256, change, {}


def _argus(data: str) -> Iterator[_Variant]:
    yield "argus", 256, (), {}
    yield "argus", 256, (), {"pretrain": 1}
    yield "argus", 256, (), {"pretrain": 3}
    yield "argus", 256, ("epochs=2",), {}
    yield "argus", 256, (f"{_M}early=false",), {}
    yield "argus", 256, (f"{_M}early=false",), {"pretrain": 1}
    yield "argus", 256, (f"{_M}domains=1", f"{_M}domain=null"), {}
    yield "argus", 256, (f"{_M}domains=1", f"{_M}domain=null"), {"pretrain": 1}


def _shared(data: str) -> Iterator[_Variant]:
    for model in ("hstu", "mtgr"):
        yield model, 256, (), {"share": False}
        yield model, 256, (), {}


def _scale(data: str) -> Iterator[_Variant]:
    for layers in (1, 2, 4):
        yield "mtgr", 256, (f"{_M}layers={layers}",) if layers != 2 else (), {}
    for width in (16, 64):
        rotated = (f"{_M}time_pairs=2", f"{_M}position_pairs=2") if width == 16 else ()
        yield "mtgr", 256, (*rotated, f"{_M}width={width}"), {}
    for n in LENGTHS:
        if n != 256:
            yield "mtgr", n, (), {}


_VARIANTS = {"length": _length, "mtgr": _mtgr, "argus": _argus, "shared": _shared, "scale": _scale}
STUDIES = tuple(_VARIANTS)


def run(
    study: str, name: str, place: Place, lines: Path, *, seeds: int = 3, models: tuple[str, ...] = (), seconds: float
) -> None:
    """Train the cells that ``lines`` has no line of, and add one for each, until the time is up."""
    torch.set_num_threads(1)
    done = set()
    if lines.exists():
        names = [f.name for f in fields(Cell)]
        found = [json.loads(line) for line in lines.read_text().splitlines()]
        done = {Cell(**{n: f[n] for n in names} | {"change": tuple(f["change"])}).key for f in found}
    at, until = Study(name, place, held_out_ms(name)), time.monotonic() + seconds
    for cell in cells(study, name, seeds):
        if cell.key in done or (models and cell.model not in models):
            continue
        if time.monotonic() > until:
            return
        figures = at.run(cell)
        with lines.open("a") as out:
            out.write(json.dumps(figures) + "\n")
        done.add(cell.key)
