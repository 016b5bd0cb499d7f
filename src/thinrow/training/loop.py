"""The training loop, top to bottom: batch -> inputs -> logits -> loss -> gradients -> both optimizers -> checkpoint.

The next batch becomes inputs while this one is learned from (``training.pipeline``).

The loss of a step is the sum over its labelled candidates (or over the items that came next) divided by their number;
so it does not depend on how many requests they came in, and shared passes weigh no user more. Metrics are
*progressive*: a batch is scored before the step that learns from it.

Over several ranks each step is that of one process on the batches of all, to rounding (``training.ranks``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinrow.checkpoints import Checkpoint, Incremental, RankIncremental, has_checkpoints, load, load_shard
from thinrow.core.errors import CheckpointMismatch, InputError, ObjectNotFound, StoreNotFound
from thinrow.core.routing import Routing
from thinrow.dpp.batch import Batch
from thinrow.dpp.client import Loader, Pinnable, loader
from thinrow.dpp.engines import EngineChoice, EngineName, InTurn
from thinrow.embeddings import DynamicTable, Ranks, ShardedEmbedding, ShardedEmbeddingBag
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Generation
from thinrow.models import TABLE, SavedRanker, weights_of
from thinrow.models.sizes import sizes_of
from thinrow.schema import ExampleSchema
from thinrow.training.config import SPARSE_OPTIMIZERS, TrainConfig
from thinrow.training.log import StepLog, cut_log
from thinrow.training.metrics import ProgressiveNE
from thinrow.training.optimizer_state import load_optimizer, optimizer_tensors
from thinrow.training.pipeline import Ahead, OneByOne
from thinrow.training.ranks import same_everywhere, spread, sum_gradients, totals, union
from thinrow.training.step import Part, Scores, dispatch, loss_of_part, ready
from thinrow.training.zero import lost_as_such, shard_module

#: What a checkpoint of a run has beside its tensors.
_META = ("train", "event_schema", "example_schema", "generation", "snapshot_id", "reader", "progressive", "tensors")

#: Called after each step with the step's number (from 1), the number of all steps (None: not known yet) and the step's
#: record in the log; beside what the log has, ``ne`` (progressive, of the run), ``seconds`` and ``waited_s`` of this
#: call, and of this rank ``scored`` (``training.step.Scores``) and ``flops`` of the model.
OnStep = Callable[[int, int | None, dict[str, Any]], None]


@dataclass(slots=True)
class TrainResult:
    """Attributes:
    losses: loss of each step of this call.
    ne: progressive normalized entropy over the whole run, resumed parts included.
    steps: steps of the whole run.
    seconds: of this call.
    waited_s: of these, waiting for a batch that the model can read.
    candidates: labelled candidates of this call.
    examples: requests of this call.
    table_bytes: that the embedding table's calls had to move in this call (``thinrow.embeddings.Traffic``).

    Over several ranks all but the times are of all of them.
    """

    losses: list[float] = field(default_factory=list)
    ne: float = float("nan")
    steps: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    candidates: int = 0
    examples: int = 0
    table_bytes: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a step."""
        self.losses.append(record["loss"])
        self.examples += record["examples"]
        self.candidates += record["candidates"]
        self.table_bytes += record["table_bytes"]


_NOBODY = np.empty(0, np.int64)


class Trainer:
    """A run: its module, table, optimizers and reader.

    Args:
        config: of the run.
        store: a HistoryStore (its newest generation is read) or a generation.
        table: the examples.
        threads: workers of the reader; None for one a core. Any number gives the same losses.
        engine: what runs them, as in ``thinrow.loader``. Any gives the same losses.
        overlap: whether batches are read and made ready beside the steps before them. Without, one thing comes after
            another, the reader's work included where ``engine`` is "threads": the same losses, later.
        shard_dense: whether ranks share the dense weights, their gradients and their optimizer's numbers (FSDP2), each
            with a part of them: less memory, more exchange. ``score`` of the module is then collective too.
        ranks: the processes that train together; each makes a Trainer of the same arguments, and all calls of ``run``,
            ``step``, ``save`` and ``resume`` are collective. None for this process alone.

    Raises:
        InputError: the plan does not fit store and table, no example passes ``config.rows``, or ranks differ.
        RankLost: a rank is lost; so do all other calls.
    """

    #: None where this process trains alone.
    ranks: Ranks | None = None
    overlap = shard_dense = False

    def __init__(
        self,
        config: TrainConfig,
        store: Pinnable | Generation,
        table: ExampleTable,
        *,
        threads: int | None = None,
        engine: EngineName | EngineChoice = "threads",
        overlap: bool = True,
        ranks: Ranks | None = None,
        shard_dense: bool = False,
    ) -> None:
        self.table, self.overlap, self.shard_dense = table, overlap, shard_dense
        self.engine = InTurn() if engine == "threads" and not overlap else engine
        generation, snapshot_id = store if isinstance(store, Generation) else store.pin(), table.snapshot_id
        several = ranks is not None and ranks.size > 1
        if shard_dense and not several:
            raise InputError("shard_dense with one process; start several (torchrun), or leave it out")
        if ranks is not None and several:
            self.ranks = ranks
            same_everywhere("configuration", config.to_dict(), ranks)
            # What one rank sees already another may not yet: all read what the first does.
            number, snapshot = ranks.gather("place", np.array([generation.number, snapshot_id or 0]))[0].tolist()
            generation, snapshot_id = generation.at(number), snapshot or None
        self._make(config, generation, table.example_schema, threads)
        self._open(snapshot_id)

    def _make(self, config: TrainConfig, generation: Generation, examples: ExampleSchema, threads: int | None) -> None:
        spec = config.ranker
        spec.check_label(examples)
        self.config, self.example_schema = config, examples
        self.generation = generation
        self.module, self.embeddings = spec.build(config.seed)
        self.threads = threads
        self._inputs = spec.inputs
        self._sizes = sizes_of(spec)
        self._tasks = spec.labels if config.objective == "rank" else ()
        self._stop, self._stopping = threading.Event(), False
        #: Whether neither a step was taken nor a checkpoint loaded.
        self._fresh = True
        #: Of the batches of the last step, on this rank.
        self.scored: list[Scores] = []
        self._make_optimizers()
        self.progressive = ProgressiveNE()
        #: What the table was loaded from, and no step has changed yet; without its tensors.
        self._resumed: Checkpoint | None = None

    def _open(self, snapshot_id: int | None) -> None:
        config = self.config
        self.snapshot_id = snapshot_id
        #: The last batch that was learned from.
        self._t = -1
        self.loader: Loader = loader(
            self.generation,
            self.table,
            projection=config.ranker.projection,
            plan=config.ranker.plan,
            epochs=config.epochs,
            seed=config.seed,
            engine=self.engine,
            workers=self.threads,
            base_rows=config.base_rows,
            block=config.block,
            budget=config.budget,
            snapshot_id=snapshot_id,
            rows=config.rows,
            rank=0 if self.ranks is None else self.ranks.rank,
            n_ranks=1 if self.ranks is None else self.ranks.size,
        )
        if not len(self.loader):
            raise InputError(f"no example to train on: none of the table passes {config.rows}; widen rows")

    def _make_optimizers(self) -> None:
        sparse = SPARSE_OPTIMIZERS[self.config.sparse_optimizer]
        self._sharded = None if self.ranks is None else spread(self.module, self.embeddings, self.ranks)
        if self.ranks is not None and self.shard_dense:
            shard_module(self.module, self.ranks)
        self.dense = torch.optim.Adam(self.module.parameters(), lr=self.config.dense_lr)
        self.sparse = sparse(self._sharded or self.embeddings, lr=self.config.sparse_lr)

    def _batches(self, stop: threading.Event) -> Iterator[Batch]:
        """Batches from where the reader stands; ``stop`` is looked at while there is none."""
        return iter(self.loader)

    def run(
        self,
        out: Path | None = None,
        *,
        stop_after: int | None = None,
        on_step: OnStep | None = None,
        stop: threading.Event | None = None,
    ) -> TrainResult:
        """Train to the end, or to step ``stop_after`` of the run (one more step where that has passed), or until
        ``stop`` is set (of several ranks, on any); checkpoints and the log of steps go to ``out``, which is the same
        folder on all ranks."""
        if self._fresh:
            self._begin()
        stop = self._stop = stop or threading.Event()
        if stop_after is not None and stop_after < 1:
            raise InputError(f"stop_after={stop_after}; it must be 1 or more, or None for the end")
        result, began = TrainResult(), time.perf_counter()
        self.module.train()
        saved = self.steps
        parts = (ready(batch, self._inputs, self._tasks) for batch in self._batches(stop))
        with (
            self._saving(out) as saving,
            StepLog(out if self._leads else None) as log,
            _deterministic(self.config.deterministic),
            contextlib.closing(Ahead(parts) if self.overlap else OneByOne(parts)) as source,
        ):
            while some := self._take(source):
                step = some[-1].t // self.config.accumulate + 1
                total = self.n_steps
                last = step == total or (stop_after is not None and step >= stop_after)
                record = self.step(some, None if last else source)
                self._t = some[-1].t
                result.add(record)
                log.write(record)
                last = last or (stop.is_set() if self.ranks is None else self._stopping)
                if saving is not None and (last or step % self.config.checkpoint_every == 0):
                    log.sync()
                    self.save(saving, step)
                    saved = step
                result.waited_s, result.seconds = source.waited_s, time.perf_counter() - began
                if on_step is not None:
                    on_step(step, total, record | self._beside(some, result))
                if last:
                    break
            if saving is not None and self.steps > saved:
                # That it was the last step was not known yet when it was taken.
                log.sync()
                self.save(saving, self.steps)
        self._stay()
        result.steps, result.ne = self.steps, self.progressive.value
        result.seconds = time.perf_counter() - began
        return result

    @property
    def steps(self) -> int:
        """Steps of the whole run so far."""
        return -(-(self._t + 1) // self.config.accumulate)

    @property
    def n_steps(self) -> int | None:
        """Steps of the whole run; None where it has no end yet."""
        n_batches = self.loader.n_batches
        return None if n_batches is None else -(-n_batches // self.config.accumulate)

    def _take(self, source: Ahead[Part] | OneByOne[Part]) -> list[Part]:
        """The batches of the next step; none where there are not enough of them and more may come."""
        parts: list[Part] = []
        while len(parts) < self.config.accumulate and (part := source.take()) is not None:
            parts.append(part)
        whole = parts and (len(parts) == self.config.accumulate or parts[-1].t + 1 == self.loader.n_batches)
        return parts if whole else []

    def _stay(self) -> None:
        """End the reader; it will go on after the last batch that was learned from."""
        self.loader.close()
        if self.loader.state_dict()["t"] != self._t:
            self.loader.load_state_dict(self._place())

    def _place(self) -> dict[str, Any]:
        """The reader's state after the last batch that was learned from; it is ahead of that."""
        return self.loader.state_dict() | {"t": self._t}

    def step(self, parts: list[Part], following: Ahead[Part] | OneByOne[Part] | None = None) -> dict[str, Any]:
        """Score batches, then learn from them; returns the step's record for the log. The keys of the batch that comes
        next from ``following`` are exchanged meanwhile, where there are ranks."""
        moved = self.embeddings.traffic.total
        here: list[float] = [sum(len(p.inputs) for p in parts), sum(p.terms for p in parts), self._stop.is_set()]
        examples, candidates, stops = (int(n) for n in totals("step", here, self.ranks))
        step = parts[-1].t // self.config.accumulate + 1
        record: dict[str, Any] = {
            "step": step, "loss": 0.0, "examples": examples, "candidates": candidates, "table_bytes": 0,
        }  # fmt: skip
        self._resumed, self._stopping, self.scored = None, stops > 0, []
        if not candidates:
            self._forget()
            return record
        scored, losses = ProgressiveNE(), 0.0
        self.dense.zero_grad()
        self.sparse.zero_grad()
        for part, after in itertools.zip_longest(parts, parts[1:]):
            with lost_as_such() if self.shard_dense else contextlib.nullcontext():
                loss, scores = loss_of_part(self.module, part, candidates, scored)
                if self.ranks is not None and self.overlap:
                    self._dispatch(after or (None if following is None or self._stopping else following.peek()))
                loss.backward()  # type: ignore[no-untyped-call]
            losses += float(loss.detach())
            self.scored += [] if scores is None else [scores]
        if self.ranks is not None and not self.shard_dense:
            sum_gradients(self.module.parameters(), self.ranks)
        self.dense.step()
        self.sparse.step()
        moved = self.embeddings.traffic.total - moved
        here = [losses, moved, scored.cross_entropy, scored.count, scored.positives]
        loss_of_all, moved_of_all, *score = totals("loss", here, self.ranks)
        self.progressive.add_sums(*score)
        return record | {"loss": float(loss_of_all), "table_bytes": int(moved_of_all)}

    def _beside(self, parts: list[Part], result: TrainResult) -> dict[str, Any]:
        """What ``on_step`` gets and the log does not: it differs from run to run, or is large."""
        flops = 0.0
        for part in parts:
            passes = part.inputs.histories.passes
            shown = np.repeat(passes.visible, np.diff(part.inputs.offsets)) if part.labels is not None else _NOBODY
            flops += self._sizes.batch_flops(np.diff(passes.offsets), shown)
        times = {"seconds": result.seconds, "waited_s": result.waited_s, "ne": self.progressive.value}
        return {**times, "scored": self.scored, "flops": flops}

    def _dispatch(self, part: Part | None) -> None:
        if part is not None:
            dispatch(self.module, part)

    def _forget(self) -> None:
        """Drop the keys that were exchanged for a step that looks nothing up."""
        for child in self.module.modules():
            if isinstance(child, ShardedEmbedding | ShardedEmbeddingBag):
                child.forget()

    @property
    def _leads(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.ranks is None or self.ranks.rank == 0

    def _begin(self) -> None:
        """Take what the run begins with. Not needed where it is resumed, and only looked for where it is."""
        self._fresh = False
        if self.config.start is not None:
            self.module, self.embeddings = self._started(self.config.start)
            self._make_optimizers()
        if self.ranks is not None:
            weights = {name: zlib.crc32(w.tobytes()) for name, w in weights_of(self.module).items()}
            same_everywhere("first weights", weights, self.ranks)

    def _started(self, start: str) -> tuple[torch.nn.Module, DynamicTable]:
        """Module and table of the checkpoint that a run begins with.

        Raises:
            CheckpointNotFound: there is none.
            CheckpointMismatch: it is of another model, or read other features.
        """
        checkpoint, spec = self._load(Path(start)), self.config.ranker
        if checkpoint.meta.get("ranker", {}).get("plan") != spec.to_dict()["plan"]:
            raise CheckpointMismatch(
                f"{checkpoint.path} was trained with another feature plan, so that its table has other keys; start "
                "from one of the same plan, or leave start out"
            )
        return spec.restore(checkpoint.tensors)

    def _saving(self, out: Path | None) -> contextlib.AbstractContextManager[Incremental | None]:
        """What writes checkpoints while training goes on, and is done with them when it is left."""
        if out is None:
            return contextlib.nullcontext()
        after, self._resumed = self._resumed, None
        config = self.config
        options: dict[str, Any] = {"deltas": config.deltas, "keep": config.keep, "after": after}
        if self._sharded is not None:
            return RankIncremental(out, {TABLE: self._sharded.shard}, **options)
        return Incremental(out, {TABLE: self.embeddings}, **options)

    def save(self, saving: Incremental, step: int) -> None:
        """Begin to write a checkpoint: weights, table, both optimizers, and where the reader stands."""
        config = self.config
        meta = SavedRanker.meta(config.ranker, self.generation.schema, self.example_schema) | {
            "train": config.to_dict(),
            "generation": self.generation.number,
            "snapshot_id": self.snapshot_id,
            "reader": self._place(),
            "progressive": self.progressive.state(),
        }
        tensors = weights_of(self.module) | optimizer_tensors(self.dense)
        names = self.embeddings.state_names()
        if self.ranks is not None:
            # A rank none of whose rows had a gradient yet has no optimizer state.
            names = union(names, self.ranks)
        meta["tensors"] = sorted([*tensors, *(TABLE + name for name in names)])
        saving.save(step, tensors=tensors, meta=meta)

    def resume(self, out: Path) -> int:
        """Go on from the newest checkpoint under ``out``; returns its step. The losses that follow are those of a run
        that was never interrupted: to the bit on as many ranks as wrote it, to rounding on any other number.

        Raises:
            CheckpointNotFound: there is none.
            CheckpointMismatch: it was written by another configuration, store or table.
        """
        checkpoint = self._load(out)
        meta = checkpoint.meta
        lacking = [n for n in _META if n not in meta]
        if lacking or meta["tensors"] != sorted(checkpoint.tensors):
            what = f"it lacks {lacking[0]!r}" if lacking else "its tensors are not those that it was written with"
            raise CheckpointMismatch(f"{checkpoint.path} is no checkpoint of a run: {what}; train into another folder")
        differs = _first_difference(self.config.to_dict(), meta["train"])
        if differs is not None:
            raise CheckpointMismatch(
                f"{checkpoint.path} was written with another {differs}; resume with the configuration of the run, or "
                "train into another folder"
            )
        self._check_place(checkpoint)
        self._open_again(meta)
        self.loader.load_state_dict(meta["reader"])
        self._t, self._fresh = int(meta["reader"]["t"]), False
        self.module, self.embeddings = self.config.ranker.restore(checkpoint.tensors)
        self._make_optimizers()
        load_optimizer(self.dense, checkpoint.tensors)
        self.progressive = ProgressiveNE.from_state(meta["progressive"])
        self._resumed = dataclasses.replace(checkpoint, tensors={})
        if self._leads:
            cut_log(out, checkpoint.step)
        return checkpoint.step

    def _load(self, out: Path) -> Checkpoint:
        """The newest checkpoint, with this rank's rows of the table."""
        if self.ranks is None:
            return load(out)
        checkpoint = load_shard(out, self.ranks.rank, Routing.even(self.ranks.size), split=(TABLE,))
        same_everywhere("newest checkpoint", [checkpoint.step, checkpoint.version.crc32c], self.ranks)
        return checkpoint

    def _open_again(self, meta: Mapping[str, Any]) -> None:
        """Read what the run read."""
        # The run's own generation, while it is there: where late events came since, requests share fewer passes on a
        # later one, and the same histories give the same losses only to rounding.
        opened = self.generation.number, self.snapshot_id
        with contextlib.suppress(ObjectNotFound):
            self.generation = self.generation.at(meta["generation"])
        if opened != (self.generation.number, meta["snapshot_id"]):
            self._open(meta["snapshot_id"])

    def _has_source(self, meta: Mapping[str, Any]) -> str | None:
        """What of the run's examples is not here; None where all is."""
        try:
            self.table.data_files(meta["snapshot_id"])
        except StoreNotFound:
            return "snapshot of the table"
        return None

    def _check_place(self, checkpoint: Checkpoint) -> None:
        """The store and the table must be those of the run, or grown from them."""
        own = SavedRanker.meta(self.config.ranker, self.generation.schema, self.example_schema)
        other = [n for n in ("event_schema", "example_schema") if own[n] != checkpoint.meta[n]]
        other += ["generation"] if checkpoint.meta["generation"] > self.generation.number else []
        lacks = self._has_source(checkpoint.meta)
        other += [] if lacks is None else [lacks]
        if other:
            raise CheckpointMismatch(
                f"{checkpoint.path} was written on another store or table: its {other[0].replace('_', ' ')} is not "
                "here; resume on those of the run, or train into another folder"
            )


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Operations of torch that are not deterministic raise meanwhile, if that is wanted."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def train(
    config: TrainConfig,
    store: Pinnable | Generation,
    table: ExampleTable,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    threads: int | None = None,
    engine: EngineName | EngineChoice = "threads",
    overlap: bool = True,
    on_step: OnStep | None = None,
    ranks: Ranks | None = None,
    shard_dense: bool = False,
    stop: threading.Event | None = None,
) -> tuple[Trainer, TrainResult]:
    """Train a ranker; with ``out``, leave checkpoints and a log of steps there.

    Args:
        resume: go on from the newest checkpoint in ``out``.
        overlap, ranks, shard_dense: as for ``Trainer``.
        stop: ends the run at the next step where it is set, of several ranks on any.

    Raises:
        InputError: ``out`` holds checkpoints and ``resume`` is not set; further as ``Trainer``.
        CheckpointMismatch: as ``Trainer.resume``.
    """
    trainer = Trainer(
        config, store, table, threads=threads, engine=engine, overlap=overlap, ranks=ranks, shard_dense=shard_dense
    )
    return trainer, trainer.run(begin(trainer, out, resume), on_step=on_step, stop=stop)


def begin(trainer: Trainer, out: str | os.PathLike[str] | None, resume: bool) -> Path | None:
    """Make ready for a run into ``out``, new or resumed; returns its path. Raises as ``train``."""
    if out is not None and "://" in os.fspath(out):
        raise InputError(f"out={os.fspath(out)!r} is a URL; checkpoints are written to a folder of a file system")
    folder = None if out is None else Path(out)
    if folder is not None and resume:
        trainer.resume(folder)
    elif folder is not None and has_checkpoints(folder):
        raise InputError(
            f"{folder} holds checkpoints of an earlier run; resume it (resume=True, --resume), or take another folder"
        )
    elif folder is not None and trainer._leads:
        cut_log(folder, 0)
    return folder


def _first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> str | None:
    """The dotted name of the first value that differs, or "feature plan"; None where nothing does."""
    for name in sorted({*mine, *theirs}):
        a, b = mine.get(name), theirs.get(name)
        if a == b:
            continue
        if prefix + name == "ranker.plan":
            return "feature plan"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            return _first_difference(a, b, f"{prefix}{name}.")
        return repr(prefix + name)
    return None
