"""One sparse step (look-up, backward, update) on existing keys against torch's own sparse optimizers. One figure, ids
per second; every contestant gets the same ids and the same gradient.

- ``thinrow_adagrad``, ``thinrow_adam``: ``DynamicTable`` with ``SparseAdagrad`` and ``SparseAdam``: 64-bit keys.
- ``torch_adagrad``: ``nn.Embedding(sparse=True)`` with ``torch.optim.Adagrad``, ids in ``[0, rows)``.
- ``torch_sparse_adam``: the same with ``torch.optim.SparseAdam``.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bench.harness import Options, Result, Work, rates
from thinrow.embeddings import DynamicTable, Embedding, SparseAdagrad, SparseAdam

_ZIPF, _BATCHES, _LR = 1.05, 4, 0.01


def run(options: Options) -> Result:
    """A million rows of 64, 200,000 ids a step; with ``quick`` a hundredth of that."""
    rows, dim, ids, rounds = (10_000, 64, 2_000, 1) if options.quick else (1_000_000, 64, 200_000, 9)
    rng = np.random.default_rng(0)
    weights = 1 / (np.arange(rows) + 1.0) ** _ZIPF
    shuffled, bounds = rng.permutation(rows), np.cumsum(weights / weights.sum())
    batches = [
        torch.from_numpy(shuffled[np.minimum(np.searchsorted(bounds, rng.random(ids)), rows - 1)])
        for _ in range(_BATCHES)
    ]
    gradient = torch.from_numpy(rng.normal(size=(ids, dim)).astype(np.float32))
    works = {
        "thinrow_adagrad": _ours(SparseAdagrad, rows, dim, batches, gradient),
        "torch_adagrad": _torch(torch.optim.Adagrad, rows, dim, batches, gradient),
        "thinrow_adam": _ours(SparseAdam, rows, dim, batches, gradient),
        "torch_sparse_adam": _torch(torch.optim.SparseAdam, rows, dim, batches, gradient),
    }
    # Each round runs every batch once, so that all contestants see the same ids.
    seen = rates(works, rounds)
    parameters = {
        "rows": rows,
        "dim": dim,
        "ids_a_step": ids,
        "distinct_ids_a_step": [len(np.unique(b)) for b in batches],
        "zipf": _ZIPF,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "torch": torch.__version__,
    }
    result = Result("embedding", parameters, {n: {m: round(v) for m, v in r.items()} for n, r in seen.items()})
    for ours, peer in (("adagrad", "torch_adagrad"), ("adam", "torch_sparse_adam")):
        result.ratios[f"vs_{peer}"] = seen[f"thinrow_{ours}"]["median"] / seen[peer]["median"]
    return result


def _ours(
    make: type[SparseAdagrad] | type[SparseAdam], rows: int, dim: int, batches: list[Tensor], gradient: Tensor
) -> Work:
    table = DynamicTable(dim)
    table.rows(np.arange(rows), insert=True)
    return _step(Embedding(table), make(table, lr=_LR), batches, gradient)


def _torch(make: type[torch.optim.Optimizer], rows: int, dim: int, batches: list[Tensor], gradient: Tensor) -> Work:
    embedding = torch.nn.Embedding(rows, dim, sparse=True)
    return _step(embedding, make(embedding.parameters(), lr=_LR), batches, gradient)  # type: ignore[call-arg]


def _step(
    embedding: torch.nn.Module,
    optimizer: SparseAdagrad | SparseAdam | torch.optim.Optimizer,
    batches: list[Tensor],
    gradient: Tensor,
) -> Work:
    def work() -> int:
        for ids in batches:
            optimizer.zero_grad()
            embedding(ids).backward(gradient)
            optimizer.step()
        return sum(map(len, batches))

    return work
