"""Batches for TorchRec: what a plan or a projection names, as one ``KeyedJaggedTensor``.

Worked example, two examples; ``cand.item`` [[1, 2], [3]], ``ctx.city`` (hashed) [7, 8]::

    keys       cand.item, ctx.city
    values     1 2 3   7 8            key after key
    lengths    2 1     1 1            of each key its examples, in order

TorchRec has no shared rows: columns of the history are copied out for each example. It has no nulls either: a null is
no id, so that it is left out, and the example has one less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError, MissingExtraError

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise MissingExtraError("torch", "train") from error

from thinrow.dpp.batch import Batch
from thinrow.jagged import Column, Jagged


def keyed_jagged(batch: Batch, keys: Sequence[str]) -> tuple[Tensor, Tensor]:
    """What a ``KeyedJaggedTensor`` of these keys holds.

    Args:
        batch: X examples.
        keys: K of them: ``history.NAME`` for an event's column or output of the plan, ``cand.NAME``, ``ctx.NAME``, or
            the name of an output of the plan beside candidates or requests.

    Returns:
        values: int64, those of key 0 first; lengths: (K * X,) int64.

    Raises:
        InputError: there is no such key, or it holds no integers.
    """
    rows = [_rows(batch, key) for key in keys]
    values = [np.empty(0, np.int64), *(v for v, _ in rows)]
    lengths = [np.empty(0, np.int64), *(n for _, n in rows)]
    return torch.from_numpy(np.concatenate(values)), torch.from_numpy(np.concatenate(lengths))


def to_kjt(batch: Batch, keys: Sequence[str]) -> Any:
    """A ``torchrec.KeyedJaggedTensor``. Raises as ``keyed_jagged``, and MissingExtraError without TorchRec."""
    try:
        from torchrec import KeyedJaggedTensor
    except ModuleNotFoundError as error:
        raise MissingExtraError("torchrec", "torchrec") from error
    values, lengths = keyed_jagged(batch, keys)
    return KeyedJaggedTensor(keys=list(keys), values=values, lengths=lengths)


def _rows(batch: Batch, key: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    column, lengths = _column(batch, key)
    column = column.decoded()
    column, lengths = _without_nulls(column, lengths)
    values = None if column.is_text or column.offsets is not None else column.values
    if values is None or values.ndim != 1 or values.dtype.kind not in "iu":
        raise InputError(
            f"{key!r} holds no integers, and a KeyedJaggedTensor holds ids; hash it in the loader's plan and name that"
        )
    return values.astype(np.int64, copy=False), lengths


def _without_nulls(column: Column, lengths: npt.NDArray[np.int64]) -> tuple[Column, npt.NDArray[np.int64]]:
    if column.valid is None or column.offsets is not None:
        return column, lengths
    row = np.repeat(np.arange(len(lengths)), lengths)[column.valid]
    return column.take(np.flatnonzero(column.valid)), np.bincount(row, minlength=len(lengths)).astype(np.int64)


def _column(batch: Batch, key: str) -> tuple[Column, npt.NDArray[np.int64]]:
    domain, _, name = key.partition(".")
    held: Column | Jagged | None
    if domain == "history" and name in ("event_ts", *batch.histories.events.columns):
        held = batch.histories.to_jagged(name)
    elif domain == "cand":
        held = batch.candidates.get(name)
    elif domain == "ctx":
        held = batch.context.get(name)
    else:
        held = batch.features.get(key)
    if held is None:
        known = [f"history.{n}" for n in batch.histories.events.columns]
        known += [f"cand.{n}" for n in batch.candidates] + [f"ctx.{n}" for n in batch.context]
        raise InputError(f"the batch has no {key!r}; it has {', '.join([*known, *batch.features])}")
    if isinstance(held, Jagged):
        return held.column, held.lengths
    return held, np.ones(len(batch), np.int64)
