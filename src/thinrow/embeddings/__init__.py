"""Dynamic embedding tables: 64-bit keys, growth without copying, sparse optimizers fused with the gradient.

``DynamicTable`` and the optimizers are NumPy inside; only the torch modules (``Embedding``, ``EmbeddingBag``,
``GroupEmbedding``, ``ShardedEmbedding``, ...), ``DeviceTable`` and ``GlooRanks`` need torch. Every name loads its
module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinrow.core.errors import MissingExtraError

if TYPE_CHECKING:
    from thinrow.embeddings.budget import Budget
    from thinrow.embeddings.device import DeviceTable
    from thinrow.embeddings.gloo import GlooRanks
    from thinrow.embeddings.group import TableGroup
    from thinrow.embeddings.module import Embedding, EmbeddingBag, GroupEmbedding
    from thinrow.embeddings.optim import SparseAdagrad, SparseAdam, SparseAdamW, SparseRowWiseAdagrad, SparseSGD
    from thinrow.embeddings.placement import Plan, Rates, TableLoad, plan_tables
    from thinrow.embeddings.ranks import Ranks
    from thinrow.embeddings.sharded import ShardedEmbedding, ShardedEmbeddingBag, ShardedEmbeddings
    from thinrow.embeddings.table import DynamicTable
    from thinrow.embeddings.traffic import Traffic, stream_bandwidth

_WHERE = {
    "Budget": "budget",
    "DeviceTable": "device",
    "DynamicTable": "table",
    "Embedding": "module",
    "EmbeddingBag": "module",
    "GlooRanks": "gloo",
    "GroupEmbedding": "module",
    "Plan": "placement",
    "Ranks": "ranks",
    "Rates": "placement",
    "ShardedEmbedding": "sharded",
    "ShardedEmbeddingBag": "sharded",
    "ShardedEmbeddings": "sharded",
    "SparseAdagrad": "optim",
    "SparseAdam": "optim",
    "SparseAdamW": "optim",
    "SparseRowWiseAdagrad": "optim",
    "SparseSGD": "optim",
    "TableGroup": "group",
    "TableLoad": "placement",
    "Traffic": "traffic",
    "plan_tables": "placement",
    "stream_bandwidth": "traffic",
}

__all__ = [
    "Budget",
    "DeviceTable",
    "DynamicTable",
    "Embedding",
    "EmbeddingBag",
    "GlooRanks",
    "GroupEmbedding",
    "Plan",
    "Ranks",
    "Rates",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "ShardedEmbeddings",
    "SparseAdagrad",
    "SparseAdam",
    "SparseAdamW",
    "SparseRowWiseAdagrad",
    "SparseSGD",
    "TableGroup",
    "TableLoad",
    "Traffic",
    "plan_tables",
    "stream_bandwidth",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinrow.embeddings' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"thinrow.embeddings.{_WHERE[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", "train") from error
    return getattr(module, name)
