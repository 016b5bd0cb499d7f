"""Training on a log of splits as it grows: the loop of ``training.loop``, over a session that follows.

Worked example: blocks of 256 rows, a split of 40 rows every ten seconds. A step is taken a minute after the last one;
the checkpoint of step 200 holds the position in the log. The process is killed at step 230, resumes at 200, and takes
steps 201 to 230 again with the losses that they had: a batch depends on the log alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thinrow.core.errors import InputError, NothingNew
from thinrow.dpp import RowFilter, follow
from thinrow.dpp.batch import Batch
from thinrow.dpp.client import Pinnable
from thinrow.examples.splits import SplitLog
from thinrow.training.config import TrainConfig
from thinrow.training.loop import OnStep, Trainer, TrainResult, begin

#: Between two looks at whether to stop, while no split comes.
_LOOK_S = 1.0


class StreamTrainer(Trainer):
    """A run over a log of splits.

    Args:
        config: of the run; one epoch, no filter of rows.
        store: of the histories; its newest generation is read.
        log: the examples.
        threads: of the reader; None for one a core. Any number gives the same losses.
        wait_s: without a new split, after which ``run`` raises NothingNew; None for no end.
        poll_s: between two looks at the log.

    Raises:
        InputError: the plan does not fit store and log; or the configuration has epochs, a filter of rows, or a budget.
    """

    def __init__(
        self,
        config: TrainConfig,
        store: Pinnable,
        log: SplitLog,
        *,
        threads: int | None = None,
        wait_s: float | None = None,
        poll_s: float = 0.2,
    ) -> None:
        if config.epochs != 1 or config.rows != RowFilter():
            raise InputError(
                f"epochs={config.epochs}, rows={config.rows}; a log that grows is read once, whole: leave both out, or "
                "train on a table"
            )
        if config.budget is not None:
            raise InputError(
                f"{config.budget} needs the sizes of all rows, and a log grows; train on a table, or leave budget out"
            )
        self.log, self.wait_s = log, wait_s
        self._idle: NothingNew | None = None
        self.snapshot_id, self._t = 0, -1
        self._make(config, store.pin(), log.example_schema, threads)
        self.loader = follow(
            store,
            log,
            projection=config.ranker.projection,
            plan=config.ranker.plan,
            seed=config.seed,
            threads=threads,
            base_rows=config.base_rows,
            block=config.block,
            poll_s=poll_s,
            wait_s=_LOOK_S if wait_s is None else min(wait_s, _LOOK_S),
        )

    def _batches(self, stop: threading.Event) -> Iterator[Batch]:
        since = time.monotonic()
        while not stop.is_set():
            try:
                for batch in self.loader:
                    yield batch
                    since = time.monotonic()
                return
            except NothingNew as e:
                if self.wait_s is not None and time.monotonic() - since >= self.wait_s:
                    self._idle = e
                    return

    def run(
        self,
        out: Path | None = None,
        *,
        stop_after: int | None = None,
        on_step: OnStep | None = None,
        stop: threading.Event | None = None,
    ) -> TrainResult:
        """As ``Trainer.run``; the end is that of a sealed log.

        Raises:
            NothingNew: no split came for ``wait_s``; what was learned is in a checkpoint.
        """
        self._idle = None
        result = super().run(out, stop_after=stop_after, on_step=on_step, stop=stop)
        if self._idle is not None:
            raise self._idle
        return result

    def _open_again(self, meta: Mapping[str, Any]) -> None:
        # The session reads the newest generation, as it did in the run.
        pass

    def _has_source(self, meta: Mapping[str, Any]) -> str | None:
        return None if meta["reader"].get("table") == self.log.id else "log of splits"


def train_stream(
    config: TrainConfig,
    store: Pinnable,
    log: SplitLog,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    threads: int | None = None,
    wait_s: float | None = None,
    on_step: OnStep | None = None,
    stop: threading.Event | None = None,
) -> tuple[StreamTrainer, TrainResult]:
    """Train a ranker on a log of splits until it is sealed or ``stop`` is set; with ``out``, leave checkpoints and a
    log of steps there.

    Args:
        resume: go on from the newest checkpoint in ``out``: with the losses of a run that was never interrupted, as
            long as the store's newest generation is the same.

    Raises:
        InputError: ``out`` holds checkpoints and ``resume`` is not set; further as ``StreamTrainer``.
        CheckpointMismatch: as ``Trainer.resume``.
        NothingNew: no split came for ``wait_s``; what was learned is in a checkpoint.
    """
    trainer = StreamTrainer(config, store, log, threads=threads, wait_s=wait_s)
    return trainer, trainer.run(begin(trainer, out, resume), on_step=on_step, stop=stop)
