"""Checkpoints of an embedding table with Adagrad, of which 1% of the rows were touched since the last one.

- ``full``, ``delta``: ``save`` of the table's state, and of its delta; copy included, durable, every byte with its CRC.
- ``torch_save``: ``torch.save`` of the same arrays, copy included, and fsync.
- ``load``, ``replay``: a full one, and a full one with ten deltas on it, every byte checked.
- ``step``, ``tracked_step``: a step of 20% of the rows, changes noted or not.

``vs_full_ms`` and ``vs_full_bytes`` are what a delta costs of a full one; ``blocked_ms``, in the figures, is how long
training stands still for each when it is written in the background.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.datagen.datasets import Work
from bench.harness import Options, Result
from thinrow.checkpoints import load, save, version_of
from thinrow.embeddings import DynamicTable, SparseAdagrad

_DELTAS = 10


def run(options: Options) -> Result:
    """A million rows of 64; with ``quick`` a fiftieth of that."""
    rows, dim, rounds = (20_000, 64, 1) if options.quick else (1_000_000, 64, options.rounds or 5)
    touched = rows // 100
    result = Result("deltas", {"rows": rows, "dim": dim, "touched_rows": touched, "rounds": rounds})
    with Work(options.work) as work:
        seen = _Table(work.path, rows, dim, touched).measure(rounds)
    medians = {name: statistics.median(values) for name, values in seen.items()}
    result.figures = {name: round(value, 3) for name, value in medians.items()}
    result.ratios = {
        "vs_full_ms": statistics.median(d / f for d, f in zip(seen["delta_ms"], seen["full_ms"], strict=True)),
        "vs_full_bytes": medians["delta_bytes"] / medians["full_bytes"],
        "vs_torch_save": medians["torch_save_ms"] / medians["full_ms"],
        "vs_load_ms.ten_deltas": medians["replay_ms"] / medians["load_ms"],
        "vs_untracked": statistics.median(a / b for a, b in zip(seen["step_ms"], seen["tracked_step_ms"], strict=True)),
    }
    return result


class _Table:
    def __init__(self, work: Path, rows: int, dim: int, touched: int) -> None:
        self.work, self.rows, self.touched, self.rng = work, rows, touched, np.random.default_rng(0)
        self.table = DynamicTable(dim)
        self.optimizer = SparseAdagrad(self.table, lr=0.01)
        self.table.rows(np.arange(rows), insert=True)
        self.step(rows)

    def step(self, n: int) -> None:
        rows = self.table.rows(self.rng.integers(0, self.rows, n), insert=True)
        self.table.add_gradient(rows, np.ones((n, self.table.dim), np.float32))
        self.optimizer.step()

    def measure(self, rounds: int) -> dict[str, list[float]]:
        seen: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            found = self._round()
            # The first compiles and fills caches.
            for name, value in found.items() if number else ():
                seen.setdefault(name, []).append(value)
        return seen

    def _round(self) -> dict[str, float]:
        out: dict[str, float] = {}
        folder = self.work / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.sync()
        out |= self._steps()
        out["torch_save_ms"] = _ms(lambda: _torch_save(folder / "torch.pt", self.table.state()))
        (folder / "torch.pt").unlink()
        os.sync()
        changes = self.table.track()
        out["blocked_ms.full"] = _ms(self.table.state)
        out["full_ms"] = _ms(lambda: save(folder, 1, tensors=self.table.state(), meta={}))
        out["full_bytes"] = _bytes(folder / "step-00000001")
        base = version_of(folder / "step-00000001")
        changes.mark(base)
        out["load_ms"] = _ms(lambda: load(folder))
        took = []
        for step in range(2, 2 + _DELTAS):
            self.step(self.touched)
            out["blocked_ms.delta"] = _ms(lambda: self.table.delta(changes))
            since = time.perf_counter()
            save(folder, step, tensors=self.table.delta(changes), meta={}, base=base)
            took.append((time.perf_counter() - since) * 1e3)
            out["delta_bytes"] = _bytes(folder / f"step-{step:08d}")
            base = version_of(folder / f"step-{step:08d}")
            changes.mark(base)
        out["delta_ms"] = statistics.median(took)
        out["replay_ms"] = _ms(lambda: load(folder))
        self.table.untrack(changes)
        return out

    def _steps(self) -> dict[str, float]:
        seen: dict[str, list[float]] = {"step_ms": [], "tracked_step_ms": []}
        for number in range(16):
            # Each is first as often.
            for name in list(seen)[:: 1 if number % 2 else -1]:
                changes = self.table.track() if name == "tracked_step_ms" else None
                seen[name].append(_ms(lambda: self.step(self.rows // 5)))
                if changes is not None:
                    self.table.untrack(changes)
        return {name: statistics.median(values) for name, values in seen.items()}


def _torch_save(path: Path, state: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        torch.save({name: torch.from_numpy(array) for name, array in state.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _ms(work: Callable[[], Any]) -> float:
    since = time.perf_counter()
    work()
    return (time.perf_counter() - since) * 1e3
