"""A row-wise sharded table of TorchRec as a job for ``thinrow.testing.ranks``, to compare ours with.

Both start from ``start(rows, dim)``, read the same keys and get the same gradients. TorchRec divides gradients by the
number of ranks, ours adds them up, so TorchRec's loss is that number times ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from thinrow.embeddings import DynamicTable, ShardedEmbedding, SparseAdagrad, SparseRowWiseAdagrad, SparseSGD
from thinrow.embeddings.ranks import Ranks

Ints = npt.NDArray[np.int64]
#: Vectors as read in each step, then those of all rows of this rank (ours in order of key) at the end.
Outcome = tuple[list[npt.NDArray[Any]], npt.NDArray[Any]]

_LR, _EPS = 0.1, 1e-8


def start(rows: Ints, dim: int) -> npt.NDArray[np.float32]:
    """(n, dim) vectors of ``rows`` (n,) before the first step."""
    vectors: npt.NDArray[np.float32] = np.sin(rows[:, None] * 3.0 + np.arange(dim)).astype(np.float32)
    return vectors


def init(keys: Ints, dim: int, seed: int) -> npt.NDArray[np.float32]:
    """``start`` as the ``init`` of a table."""
    return start(keys, dim)


def ours(ranks: Ranks, optimizer: str, n_rows: int, dim: int, steps: Sequence[Sequence[Ints]]) -> Outcome:
    """Look ``steps[t][rank]`` up and train on it, in each step."""
    table = DynamicTable(dim, init=f"{__name__}:init")
    items = ShardedEmbedding(table, ranks)
    every = np.arange(n_rows)
    table.rows(every[items.shard.owners(every) == ranks.rank], insert=True)
    make: Any = {
        "sgd": lambda: SparseSGD(items, lr=_LR),
        "adagrad": lambda: SparseAdagrad(items, lr=_LR, eps=_EPS),
        "rowwise_adagrad": lambda: SparseRowWiseAdagrad(items, lr=_LR, eps=_EPS),
    }
    sparse, seen = make[optimizer](), []
    for keys in (step[ranks.rank] for step in steps):
        vectors = items(torch.from_numpy(keys))
        seen.append(vectors.detach().numpy().copy())
        _loss(vectors).backward()  # type: ignore[no-untyped-call]
        sparse.step()
    held = table.keys()
    return seen, np.column_stack([held, table.read(np.arange(len(held)))])


def torchrecs(ranks: Ranks, optimizer: str, n_rows: int, dim: int, steps: Sequence[Sequence[Ints]]) -> Outcome:
    """As ``ours``, by TorchRec's ``EmbeddingCollection`` over the default process group."""
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    config = EmbeddingConfig(name="rows", embedding_dim=dim, num_embeddings=n_rows, feature_names=["item"])
    module = EmbeddingCollection(tables=[config], device=torch.device("cpu"))
    with torch.no_grad():
        module.embeddings["rows"].weight.copy_(torch.from_numpy(start(np.arange(n_rows), dim)))
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    settings = {"lr": _LR} if optimizer == "sgd" else {"lr": _LR, "eps": _EPS}
    apply_optimizer_in_backward(kinds[optimizer], module.parameters(), settings)
    sharder = EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        module, {"rows": row_wise()}, sharder=sharder, local_size=ranks.size, world_size=ranks.size, device_type="cpu"
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded, seen = sharder.shard(module, plan, env, torch.device("cpu")), []
    for keys in (step[ranks.rank] for step in steps):
        lengths = torch.ones(len(keys), dtype=torch.int64)
        found = sharded(KeyedJaggedTensor.from_lengths_sync(["item"], torch.from_numpy(keys), lengths))
        vectors = found.wait()["item"].values()
        seen.append(vectors.detach().numpy().copy())
        (_loss(vectors) * ranks.size).backward()  # type: ignore[no-untyped-call]
    (shard,) = sharded.state_dict()["embeddings.rows.weight"].local_shards()
    first = shard.metadata.shard_offsets[0]
    return seen, np.column_stack([np.arange(first, first + len(shard.tensor)), shard.tensor.numpy()])


def _loss(vectors: torch.Tensor) -> torch.Tensor:
    weights = torch.cos(torch.arange(vectors.numel(), dtype=torch.float32)).view_as(vectors)
    return (vectors * weights).sum() + vectors.square().sum()
