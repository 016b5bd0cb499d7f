"""What a run over several ranks does beside one of one: its table spread, its dense gradients summed, its place agreed.

With two ranks, a batch of 16 requests with 128 labelled candidates is two parts of 8 requests. Each rank scores its
own; its loss is the sum over its candidates divided by 128, so that gradients only have to be added:

    dense        by ``sum_gradients``, in order of rank; then every rank makes the same step of Adam
    table        by the sparse optimizer, at the rank that owns a key (``thinrow.embeddings.shards``)

A rank without a request in a batch scores nothing, and does all else as the others do.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from thinrow.core.errors import InputError, RankLost
from thinrow.embeddings import (
    DynamicTable,
    Embedding,
    EmbeddingBag,
    GlooRanks,
    Ranks,
    ShardedEmbedding,
    ShardedEmbeddingBag,
)


@contextlib.contextmanager
def launched(timeout_s: float = 300.0) -> Iterator[Ranks | None]:
    """The ranks of the run that this process is one of, as ``torchrun`` says it in the environment; None where it is
    alone.

    Raises:
        InputError: as ``GlooRanks``.
        RankLost: another one did not come within ``timeout_s``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except dist.DistError as e:
        raise RankLost(f"not all of {os.environ['WORLD_SIZE']} ranks came within {timeout_s:g} s: {e}", rank=-1) from e
    try:
        ranks = GlooRanks(timeout_s=timeout_s)
        yield ranks
        ranks.close()
    finally:
        dist.destroy_process_group()


def spread(module: nn.Module, table: DynamicTable, ranks: Ranks) -> ShardedEmbedding:
    """Look the keys of ``table`` up at the ranks that own them, wherever ``module`` has an ``Embedding`` or an
    ``EmbeddingBag`` of it.

    Raises:
        InputError: the table holds keys of another rank, or ``module`` reads it by something else.
    """
    sharded = ShardedEmbedding(table, ranks)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Embedding) and child.table is table:
                setattr(parent, name, sharded)
            elif isinstance(child, EmbeddingBag) and child.table is table:
                setattr(parent, name, ShardedEmbeddingBag.over(sharded.shard, child.mode))
    for name, child in module.named_modules():
        if vars(child).get("table") is table:
            raise InputError(
                f"{name or 'the model'} reads the table itself, as {type(child).__name__}; over ranks it is read by "
                "Embedding or EmbeddingBag"
            )
    return sharded


def sum_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace every gradient by its sum over ranks, added in order of rank: the same bits on all. A parameter has one
    where any rank has."""
    for dtype, group in groupby(sorted(parameters, key=_dtype), _dtype):
        held = list(group)
        kind = torch.empty(0, dtype=getattr(torch, dtype)).numpy().dtype
        there = np.array([p.grad is not None for p in held], kind)
        own = [np.zeros(p.numel(), kind) if p.grad is None else p.grad.reshape(-1).numpy() for p in held]
        total = ranks.add(np.concatenate([there, *own]))
        ends = np.cumsum([len(held), *(p.numel() for p in held)])
        for p, count, first, stop in zip(held, total, ends[:-1], ends[1:], strict=False):
            p.grad = torch.from_numpy(total[first:stop]).view_as(p) if count else None


def same_everywhere(what: str, value: Mapping[str, Any] | Sequence[Any], ranks: Ranks) -> None:
    """Raises InputError, on every rank, unless all have the same JSON-ready ``value``."""
    crc = zlib.crc32(json.dumps(value, sort_keys=True).encode())
    found = [int(n[0]) for n in ranks.gather(f"same {what}", np.array([crc]))]
    other = next((rank for rank, n in enumerate(found) if n != found[0]), None)
    if other is not None:
        raise InputError(f"rank {other} has another {what} than rank 0; start all ranks alike, on the same files")


def union(names: Iterable[str], ranks: Ranks) -> list[str]:
    """The names that any rank has, sorted."""
    mine = np.frombuffer(json.dumps(sorted(names)).encode(), np.uint8)
    return sorted({name for raw in ranks.gather("names", mine) for name in json.loads(raw.tobytes())})


def totals(call: str, numbers: Sequence[float | int], ranks: Ranks | None) -> npt.NDArray[np.float64]:
    """The sums of ``numbers`` over ranks, added in order of rank."""
    mine = np.array(numbers, np.float64)
    if ranks is None:
        return mine
    first, *others = ranks.gather(call, mine)
    for other in others:
        first = first + other
    return first


def _dtype(parameter: nn.Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")
