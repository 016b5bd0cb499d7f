"""One sparse step (look-up, backward, update) on existing keys against other libraries' tables. One figure, ids per
second; every contestant gets the same ids and the same gradient.

- ``thinrow_adagrad``, ``thinrow_adam``: ``DynamicTable`` under ``SparseAdagrad``, ``SparseAdam``: 64-bit keys.
  ``thinrow_rowwise.1``, ``.4``: under ``SparseRowWiseAdagrad``, one by one and summed in bags of 4.
- ``thinrow_new_keys``: the first with 5% of the ids new in every step.
- ``torch_adagrad``: ``nn.Embedding(sparse=True)`` with ``torch.optim.Adagrad``, ids in ``[0, rows)``;
  ``torch_sparse_adam``: the same with ``torch.optim.SparseAdam``.
- ``tbe_adagrad``: FBGEMM's table-batched embedding (what TorchRec trains with), unpooled, under Adagrad;
  ``tbe_rowwise.1``, ``.4``: summed in bags of one (the same vectors, its fastest way to them on a CPU) and of 4, under
  row-wise Adagrad.
- ``merged.<ids>``, ``separate.<ids>``: 26 tables, so many ids of each a step, as a ``TableGroup`` and as tables of
  their own. ``tensorflow.<ids>``: the same 26 as ``keras.layers.Embedding`` under ``keras.optimizers.Adagrad``, in a
  ``tf.function``.

- ``growth``: the first of a table that grows to four million keys of 16, a tenth of the ids new in every step. Steps of
  two rounds, each the faster of the two, since a step that stops does so in both. ``vs_longest_step`` is the median
  step over the longest.

What is to be moved is counted by ``DynamicTable.traffic``. ``vs_random_rows`` is those bytes a second over the bytes a
second of adding one to rows of 256 bytes at random, ``vs_stream`` over those of a plain copy (MBU).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.harness import Options, Result, Work, rates
from thinrow.embeddings import (
    DynamicTable,
    Embedding,
    EmbeddingBag,
    GroupEmbedding,
    SparseAdagrad,
    SparseAdam,
    SparseRowWiseAdagrad,
    TableGroup,
    stream_bandwidth,
)  # fmt: skip
from thinrow.kernels import kernel

_ZIPF, _BATCHES, _LR, _TABLES, _BAG, _NEW = 1.05, 4, 0.01, 26, 4, 0.05
#: Ids of each of many tables: batches of so many examples with one id a feature.
_FEW = (256, 1024)
_PAIRS = (
    ("adagrad", "torch_adagrad"),
    ("adam", "torch_sparse_adam"),
    ("adagrad", "tbe_adagrad"),
    ("rowwise.1", "tbe_rowwise.1"),
    ("rowwise.4", "tbe_rowwise.4"),
)
Optimizer = SparseAdagrad | SparseAdam | SparseRowWiseAdagrad | torch.optim.Optimizer
Ints = npt.NDArray[np.int64]


def run(options: Options) -> Result:
    """A million rows of 64, 200,000 ids a step; with ``quick`` a hundredth of that."""
    rows, dim, ids = (10_000, 64, 2_000) if options.quick else (1_000_000, 64, 200_000)
    rounds = 1 if options.quick else options.rounds or 9
    rng = np.random.default_rng(0)
    batches = _ids(rng, rows, ids)
    gradient = torch.from_numpy(rng.normal(size=(ids, dim)).astype(np.float32))
    result = Result("embedding", {
        "rows": rows, "dim": dim, "ids_a_step": ids, "distinct_ids_a_step": [len(np.unique(b)) for b in batches],
        "zipf": _ZIPF, "tables": _TABLES, "bag": _BAG, "new_keys": _NEW, "dtype": "float32",
        "threads": torch.get_num_threads(), "rounds": rounds, "torch": torch.__version__,
    })  # fmt: skip
    adagrad = _Ours(SparseAdagrad, rows, dim, batches, gradient)
    works: dict[str, Work] = {
        "thinrow_adagrad": adagrad,
        "torch_adagrad": _torch(torch.optim.Adagrad, rows, dim, batches, gradient),
        "thinrow_new_keys": _Ours(SparseAdagrad, rows, dim, batches, gradient, new=_NEW),
        "thinrow_adam": _Ours(SparseAdam, rows, dim, batches, gradient),
        "torch_sparse_adam": _torch(torch.optim.SparseAdam, rows, dim, batches, gradient),
        "thinrow_rowwise.1": _Ours(SparseRowWiseAdagrad, rows, dim, batches, gradient),
        "thinrow_rowwise.4": _bags(rows, dim, batches, gradient),
        "random_rows": _random_rows(rng, rows, dim, ids),
    }
    _if_there(result, "tbe_adagrad", "fbgemm_gpu", works, partial(_tbe_unpooled, rows, dim, batches, gradient))
    for bag in (1, _BAG):
        summed = partial(_tbe_summed, rows, dim, batches, gradient, bag)
        _if_there(result, f"tbe_rowwise.{bag}", "fbgemm_gpu", works, summed)
    many = {n: _many_ids(rng, rows // _TABLES, n) for n in (*_FEW, ids // _TABLES)}
    works |= _many(rows // _TABLES, dim, many)
    for n, batches_of in many.items():
        make_tf = partial(_tensorflow, rows // _TABLES, dim, batches_of, n)
        _if_there(result, f"tensorflow.{n}", "tensorflow", works, make_tf)
    # Each round runs every batch once, so that all contestants see the same ids.
    before, since = adagrad.table.traffic.total, adagrad.steps
    seen = rates(works, rounds)
    _judge(result, seen)
    moved = (adagrad.table.traffic.total - before) / (adagrad.steps - since) / ids
    _judge_bytes(result, seen, moved, stream_bandwidth(1 << 20 if options.quick else 1 << 28))
    works.clear()
    _judge_growth(result, 4 * rows, ids)
    return result


def _judge_growth(result: Result, keys: int, ids: int) -> None:
    rounds = [_grow(np.random.default_rng(1), keys, ids) for _ in range(2)]
    steps = np.minimum(*rounds)[1:] * 1e3
    longest = int(steps.argmax())
    result.figures["growth"] = {
        "keys": keys, "steps": len(steps), "median_ms": round(float(np.median(steps)), 2),
        "longest_ms": round(float(steps[longest]), 2), "longest_at_keys": (longest + 2) * (ids // 10),
    }  # fmt: skip
    result.ratios["vs_longest_step"] = float(np.median(steps) / steps[longest])


def _grow(rng: np.random.Generator, keys: int, ids: int) -> npt.NDArray[np.float64]:
    """Seconds of each step."""
    table, new = DynamicTable(16), ids // 10
    embedding, optimizer = Embedding(table), SparseAdagrad(table, lr=_LR)
    gradient, seconds = torch.full((ids, 16), 1e-3), []
    for first in range(0, keys, new):
        known = (rng.zipf(1.2, ids - new) * 7919) % max(first, 1)
        batch = torch.from_numpy(rng.permutation(np.concatenate([known, np.arange(first, first + new)])))
        since = time.perf_counter()
        _step(embedding, optimizer, batch, gradient)
        seconds.append(time.perf_counter() - since)
    return np.array(seconds)


def _judge(result: Result, seen: dict[str, dict[str, float]]) -> None:
    result.figures |= {n: {m: round(v) for m, v in r.items()} for n, r in seen.items()}

    def over(ours: str, peer: str) -> float:
        return seen[ours]["median"] / seen[peer]["median"]

    for ours, peer in _PAIRS:
        if peer in seen:
            result.ratios[f"vs_{peer}"] = over(f"thinrow_{ours}", peer)
    result.ratios["vs_no_new_keys"] = over("thinrow_new_keys", "thinrow_adagrad")
    for name in seen:
        peer, _, ids = name.partition(".")
        if peer in ("separate", "tensorflow"):
            result.ratios[f"vs_{peer}.{ids}"] = over(f"merged.{ids}", name)


def _judge_bytes(result: Result, seen: dict[str, dict[str, float]], bytes_an_id: float, stream: float) -> None:
    moved = seen["thinrow_adagrad"]["median"] * bytes_an_id
    result.figures["bytes"] = {
        "an_id": round(bytes_an_id), "a_second": round(moved), "stream_a_second": round(stream),
        "random_rows_a_second": round(seen["random_rows"]["median"]),
    }  # fmt: skip
    result.ratios["vs_random_rows"] = moved / seen["random_rows"]["median"]
    result.ratios["vs_stream"] = moved / stream


def _ids(rng: np.random.Generator, rows: int, ids: int) -> list[Tensor]:
    """Batches of ids in [0, rows), zipf-distributed over rows in no order."""
    weights = 1 / (np.arange(rows) + 1.0) ** _ZIPF
    shuffled, bounds = rng.permutation(rows), np.cumsum(weights / weights.sum())
    drawn = (np.minimum(np.searchsorted(bounds, rng.random(ids)), rows - 1) for _ in range(_BATCHES))
    return [torch.from_numpy(shuffled[d]) for d in drawn]


def _if_there(result: Result, name: str, module: str, works: dict[str, Work], make: Callable[[], Work]) -> None:
    try:
        importlib.import_module(module)
    except Exception as e:
        result.skip(name, f"{module} cannot be imported ({type(e).__name__})")
        return
    works[name] = make()


def _filled(rows: int, dim: int) -> DynamicTable:
    table = DynamicTable(dim)
    table.rows(np.arange(rows), insert=True)
    return table


class _Ours:
    """Steps of one table; of every batch the share ``new`` are keys that no step had."""

    def __init__(
        self,
        make: Callable[..., Any],
        rows: int,
        dim: int,
        batches: Sequence[Tensor],
        gradient: Tensor,
        *,
        new: float = 0,
    ) -> None:
        self.table, self.steps = _filled(rows, dim), 0
        self._batches, self._gradient, self._new = batches, gradient, int(len(gradient) * new)
        self._embedding, self._optimizer = Embedding(self.table), make(self.table, lr=_LR)

    def __call__(self) -> int:
        for ids in self._batches:
            if self._new:
                first = (1 << 40) + self.steps * self._new
                ids = torch.cat([ids[self._new :], torch.arange(first, first + self._new)])
            _step(self._embedding, self._optimizer, ids, self._gradient)
            self.steps += 1
        return sum(map(len, self._batches))


def _bags(rows: int, dim: int, batches: Sequence[Tensor], gradient: Tensor) -> Work:
    bag = EmbeddingBag(_filled(rows, dim))
    optimizer = SparseRowWiseAdagrad(bag, lr=_LR)
    bounds = torch.arange(0, len(gradient) + 1, _BAG)
    wanted = gradient[: len(bounds) - 1].contiguous()

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        bag(ids, bounds).backward(wanted)
        optimizer.step()

    return _each(batches, step)


def _torch(make: Callable[..., Any], rows: int, dim: int, batches: Sequence[Tensor], gradient: Tensor) -> Work:
    embedding = torch.nn.Embedding(rows, dim, sparse=True)
    optimizer = make(embedding.parameters(), lr=_LR)
    return _each(batches, lambda ids: _step(embedding, optimizer, ids, gradient))


def _step(embedding: torch.nn.Module, optimizer: Optimizer, ids: Tensor, gradient: Tensor) -> None:
    optimizer.zero_grad()
    embedding(ids).backward(gradient)
    optimizer.step()


def _each(batches: Sequence[Tensor], step: Callable[[Tensor], object]) -> Work:
    def work() -> int:
        for ids in batches:
            step(ids)
        return sum(map(len, batches))

    return work


def _tbe_unpooled(rows: int, dim: int, batches: Sequence[Tensor], gradient: Tensor) -> Work:
    table = _tbe(rows, dim, "NONE", "EXACT_ADAGRAD")
    offsets = torch.arange(len(gradient) + 1)
    return _each(batches, lambda ids: table(ids, offsets).backward(gradient))


def _tbe_summed(rows: int, dim: int, batches: Sequence[Tensor], gradient: Tensor, bag: int) -> Work:
    table = _tbe(rows, dim, "SUM", "EXACT_ROWWISE_ADAGRAD")
    offsets = torch.arange(0, len(gradient) + 1, bag)
    bags = gradient[: len(offsets) - 1].contiguous()
    return _each(batches, lambda ids: table(ids, offsets).backward(bags))


def _tbe(rows: int, dim: int, pooling: str, optimizer: str) -> Any:
    inference = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    optimizers = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    where = common.EmbeddingLocation.HOST, inference.ComputeDevice.CPU
    return inference.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *where)], optimizer=getattr(optimizers, optimizer), learning_rate=_LR,
        pooling_mode=getattr(common.PoolingMode, pooling),
    )  # fmt: skip


def _many_ids(rng: np.random.Generator, rows: int, ids: int) -> list[tuple[Tensor, ...]]:
    """Batches of ids of each table."""
    return [torch.split(batch, ids) for batch in _ids(rng, rows, ids * _TABLES)]


def _many(rows: int, dim: int, many: Mapping[int, Sequence[Sequence[Tensor]]]) -> dict[str, Work]:
    names = tuple(f"feature_{k}" for k in range(_TABLES))
    group = GroupEmbedding(TableGroup(names), Embedding(DynamicTable(dim)))
    apart = [Embedding(_filled(rows, dim)) for _ in names]
    group({name: torch.arange(rows) for name in names})
    merged, separate = SparseAdagrad(group, lr=_LR), SparseAdagrad(*apart, lr=_LR)

    def work(n: int, look_up: Callable[[Sequence[Tensor]], list[Tensor]], optimizer: SparseAdagrad) -> Work:
        wanted = [torch.full((n, dim), 1e-3) for _ in names]

        def run() -> int:
            for ids in many[n]:
                optimizer.zero_grad()
                torch.autograd.backward(look_up(ids), wanted)
                optimizer.step()
            return n * len(names) * len(many[n])

        return run

    works: dict[str, Work] = {}
    for n in many:
        works[f"merged.{n}"] = work(n, lambda ids: list(group(dict(zip(names, ids, strict=True))).values()), merged)
        works[f"separate.{n}"] = work(n, lambda ids: [e(i) for e, i in zip(apart, ids, strict=True)], separate)
    return works


def _tensorflow(rows: int, dim: int, batches: Sequence[Sequence[Tensor]], n: int) -> Work:
    tf = importlib.import_module("tensorflow")
    layers = [tf.keras.layers.Embedding(rows, dim) for _ in range(_TABLES)]
    optimizer = tf.keras.optimizers.Adagrad(_LR)
    ids = [[tf.constant(part.numpy()) for part in batch] for batch in batches]
    wanted = tf.fill((n, dim), 1e-3)
    for layer in layers:
        layer.build(None)
    variables = [layer.embeddings for layer in layers]
    optimizer.build(variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(parts: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(e(i) * wanted) for e, i in zip(layers, parts, strict=True)])
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def work() -> int:
        for parts in ids:
            step(parts)
        return sum(len(part) for batch in batches for part in batch)

    return work


def _random_rows(rng: np.random.Generator, rows: int, dim: int, ids: int) -> Work:
    """Adds to rows at random, each once, in place: reads and writes as an update does, and computes nothing. Units are
    bytes."""
    values = [np.zeros((1 << 16, dim), np.float32) for _ in range(-(-rows // (1 << 16)))]
    order = [rng.permutation(rows)[: min(ids, rows)] for _ in range(_BATCHES)]
    gradient = np.ones((min(ids, rows), dim), np.float32)

    def work() -> int:
        for picked in order:
            kernel("sgd_rows")(values, picked, gradient, 1.0, 0.0)
        return sum(3 * len(picked) * dim * 4 for picked in order)

    return work
