"""A table of tensors on CUDA, or without a GPU on the CPU, where it is for tests: how much slower it is there than the
table of arrays.

One figure, ids per second, existing keys; every contestant gets the same ids and the same gradient.

- ``device.look_up``, ``device.read``, ``device.step``: ``DeviceTable``: rows of keys; their vectors; the whole step
  with backward and Adagrad. ``host.*``: the same of ``DynamicTable``.
- ``torch.step``: ``nn.Embedding(sparse=True)`` on the same device with ``torch.optim.Adagrad``, ids in ``[0, rows)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.harness import Options, Result, Work, rates
from thinrow.embeddings import DeviceTable, DynamicTable, Embedding, SparseAdagrad

_BATCHES, _LR, _DIM, _ZIPF = 4, 0.01, 64, 1.2


def run(options: Options) -> Result:
    """A million rows of 64, 200,000 ids a step; with ``quick`` a hundredth of that."""
    rows, ids = (10_000, 2_000) if options.quick else (1_000_000, 200_000)
    rounds = 1 if options.quick else options.rounds or 5
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rng = np.random.default_rng(0)
    keys = [torch.from_numpy((rng.zipf(_ZIPF, ids) - 1) % rows) for _ in range(_BATCHES)]
    gradient = torch.from_numpy(rng.normal(size=(ids, _DIM)).astype(np.float32))
    result = Result("device", {
        "device": str(device), "rows": rows, "dim": _DIM, "ids_a_step": ids, "zipf": _ZIPF,
        "threads": torch.get_num_threads(), "rounds": rounds, "torch": torch.__version__,
    })  # fmt: skip
    there = [k.to(device) for k in keys]
    dense = torch.nn.Embedding(rows, _DIM, sparse=True, device=device)
    works = {
        **_works("host", DynamicTable(_DIM), rows, keys, gradient),
        **_works("device", DeviceTable(_DIM, device=device), rows, there, gradient.to(device)),
        "torch.step": _each(there, _step(dense, torch.optim.Adagrad(dense.parameters(), lr=_LR), gradient.to(device))),
    }
    seen = rates(works, rounds)
    result.figures |= {n: {m: round(v) for m, v in r.items()} for n, r in seen.items()}
    for call in ("look_up", "read", "step"):
        result.ratios[f"vs_host.{call}"] = seen[f"device.{call}"]["median"] / seen[f"host.{call}"]["median"]
    result.ratios["vs_torch.step"] = seen["device.step"]["median"] / seen["torch.step"]["median"]
    return result


def _works(name: str, table: Any, rows: int, batches: Sequence[Tensor], gradient: Tensor) -> dict[str, Work]:
    on_device = isinstance(table, DeviceTable)
    embedding = Embedding(table)
    embedding(torch.arange(rows, device=gradient.device))
    keys = [k if on_device else k.numpy() for k in batches]
    found = [table.rows(k, insert=False) for k in keys]
    unchecked = {"check": False} if on_device else {}
    return {
        f"{name}.look_up": _each(keys, lambda k: table.rows(k, insert=False)),
        f"{name}.read": _each(found, lambda r: table.read(r, **unchecked)),
        f"{name}.step": _each(batches, _step(embedding, SparseAdagrad(table, lr=_LR), gradient)),
    }


def _step(
    embedding: torch.nn.Module, optimizer: SparseAdagrad | torch.optim.Optimizer, gradient: Tensor
) -> Callable[[Tensor], None]:
    def step(keys: Tensor) -> None:
        optimizer.zero_grad()
        embedding(keys).backward(gradient)
        optimizer.step()

    return step


def _each(batches: Sequence[Any], call: Callable[[Any], object]) -> Work:
    def work() -> int:
        for batch in batches:
            call(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return sum(map(len, batches))

    return work
