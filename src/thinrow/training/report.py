"""What a run says of itself while it goes on: a line of figures, TensorBoard, a trace of some steps.

    meter = Meter(every_s=10, show=print)
    train(config, store, table, out="run", on_step=meter)

    step 1200/4000: loss 0.412, NE 0.8312, AUC 0.741, GAUC 0.702, 3,210 requests/s, stall 2.1%, MBU 5.0%, MFU 31.2%

Loss, AUC and GAUC are of the steps since the line before, each scored before it was learned from, NE of the whole run.
Over ranks AUC and GAUC, which do not add up, are those of this rank's part.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinrow.core.errors import InputError, MissingExtraError
from thinrow.core.users import as_users, distinct
from thinrow.embeddings import stream_bandwidth
from thinrow.training.metrics import auc, gauc
from thinrow.training.step import Scores


class Meter:
    """An ``on_step`` of a run.

    Args:
        every_s: seconds between two lines; the end has one where there was one before, or ``write``.
        show: called with a line.
        write: called with the step and the figures, by name.
        share: of the machine's memory and processors that is this run's figures' (one over the ranks of a machine, of
            figures that are of all ranks).
    """

    def __init__(
        self,
        *,
        every_s: float = 10.0,
        show: Callable[[str], object] | None = None,
        write: Callable[[int, dict[str, float]], object] | None = None,
        share: float = 1.0,
    ) -> None:
        self.every_s, self.show, self.write, self.share = every_s, show, write, share
        self._bytes_s = self._flops_s = 0.0
        self._last, self._began = (0.0, 0.0), time.monotonic()
        self._clear()

    def _clear(self) -> None:
        self._steps, self._losses = 0, 0.0
        self._examples = self._moved = self._flops = 0.0
        self._scored: list[Scores] = []

    def __call__(self, step: int, total: int | None, record: dict[str, Any]) -> None:
        """Count a step; at most once in ``every_s`` say what was counted."""
        self._steps += 1
        self._losses += record["loss"]
        self._examples += record["examples"]
        self._moved += record["table_bytes"]
        self._flops += record["flops"]
        self._scored += record["scored"]
        # Measuring the machine is not for runs that are over before there was a line.
        ends = step == total and (self.write is not None or self._bytes_s > 0)
        if time.monotonic() - self._began < self.every_s and not ends:
            return
        figures = self.figures(record)
        if self.show is not None:
            self.show(line(step, total, figures))
        if self.write is not None:
            self.write(step, figures)
        self._last, self._began = (record["seconds"], record["waited_s"]), time.monotonic()
        self._clear()

    def figures(self, record: dict[str, Any]) -> dict[str, float]:
        """Of the steps since the last line: loss, auc, gauc, requests_s, stall, mbu, mfu; ne of the run. What there is
        nothing to tell from is left out."""
        if not self._bytes_s:
            # Not before there is something to say: it takes a tenth of a second.
            self._bytes_s, self._flops_s = stream_bandwidth(), matmul_rate()
        seconds, waited = record["seconds"] - self._last[0], record["waited_s"] - self._last[1]
        busy = max(seconds - waited, 1e-9)
        found = {
            "loss": self._losses / self._steps,
            "ne": record["ne"],
            **_ranking(self._scored),
            "requests_s": self._examples / max(seconds, 1e-9),
            "stall": waited / max(seconds, 1e-9),
            "mbu": self.share * self._moved / busy / self._bytes_s,
            "mfu": self._flops / busy / self._flops_s if self._flops else math.nan,
        }
        return {name: value for name, value in found.items() if not math.isnan(value)}


def _ranking(scored: list[Scores]) -> dict[str, float]:
    if not scored:
        return {}
    logits, labels = (np.concatenate([getattr(s, n) for s in scored]) for n in ("logits", "labels"))
    _, group = distinct(as_users(np.concatenate([s.users for s in scored])))
    found: dict[str, float] = {}
    with contextlib.suppress(InputError):  # one label only
        found["auc"] = auc(logits, labels)
        found["gauc"] = gauc(logits, labels, group)
    return found


#: Name -> what stands before, how it is written, what stands behind.
_SHOWN = {
    "loss": ("loss ", ".4f", ""),
    "ne": ("NE ", ".4f", ""),
    "auc": ("AUC ", ".3f", ""),
    "gauc": ("GAUC ", ".3f", ""),
    "requests_s": ("", ",.0f", " requests/s"),
    "stall": ("stall ", ".1%", ""),
    "mbu": ("MBU ", ".1%", ""),
    "mfu": ("MFU ", ".1%", ""),
}


def line(step: int, total: int | None, figures: dict[str, float]) -> str:
    """The figures for people."""
    shown = [f"{before}{figures[n]:{form}}{after}" for n, (before, form, after) in _SHOWN.items() if n in figures]
    return f"step {step}{'' if total is None else f'/{total}'}: {', '.join(shown)}"


def matmul_rate(side: int = 1024, rounds: int = 4) -> float:
    """Floating-point operations a second of a product of float32 matrices, the best of some rounds: what MFU is of."""
    a, b, out = (torch.ones(side, side) for _ in range(3))
    best = 0.0
    for _ in range(rounds):
        since = time.perf_counter()
        torch.mm(a, b, out=out)
        best = max(best, 2 * side**3 / (time.perf_counter() - since))
    return best


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A ``Meter.write`` that TensorBoard shows.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise MissingExtraError("tensorboard", "tensorboard") from error
    # Its package has no types, and may not be there.
    make: Any = SummaryWriter
    writer = make(str(folder))

    def write(step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(f"train/{name}", value, step)

    try:
        yield write
    finally:
        writer.close()


@contextlib.contextmanager
def profiled(path: Path, first: int, last: int) -> Iterator[Callable[..., None]]:
    """An ``on_step`` that traces the ``first`` to the ``last`` step (inclusive, from 1) of this call into ``path``, in
    Chrome's format. It must be entered on the thread that trains.

    Raises:
        InputError: ``first`` is below 1 or above ``last``.
    """
    if not 1 <= first <= last:
        raise InputError(f"steps {first} to {last}; the first must be 1 or more, and at most the last")
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    # The step before is traced and dropped, where there is one.
    warmup = min(first - 1, 1)
    when = schedule(wait=first - 1 - warmup, warmup=warmup, active=last - first + 1, repeat=1)

    def save(found: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(path))

    with profile(activities=activities, schedule=when, on_trace_ready=save) as running:
        yield lambda *_: running.step()
