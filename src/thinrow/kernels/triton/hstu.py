"""HSTU attention on a GPU: tiles of ``loops``, launched and differentiated.

Autograd keeps q, k and v and no scores: memory is linear in tokens. The worked example is that of
``kernels.reference.hstu``. With ``TRITON_INTERPRET=1`` in the environment before the first import the same code runs on
tensors in the processor's memory, slowly; that is how it is tested where there is no GPU.

What holds beyond equality with the reference, for finite values: an output is the same bits whatever keys its query
does not see and whatever other queries there are, since a key has one place in the tiles of its row; gradients are the
same bits every time. A NaN or infinity may reach queries that do not see it, that share a tile with one that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch.autograd.function import once_differentiable

from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of
from thinrow.kernels.cut import bounds_of
from thinrow.kernels.distance import Bias, Distances, check_biases
from thinrow.kernels.layout import AttentionLayout, Ints, check_inputs
from thinrow.kernels.torch.hstu import joined_tables
from thinrow.kernels.triton import loops

#: Queries and keys of a tile.
_QUERIES, _KEYS = 64, 64


def hstu_attention(
    q_THD: torch.Tensor,
    k_SHD: torch.Tensor,
    v_SHE: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    biases: Sequence[Bias] = (),
) -> torch.Tensor:
    """As ``kernels.torch.hstu.hstu_attention``, for tensors of a CUDA device; float32, bfloat16 or float16.

    Sums are float32; products of float32 are not rounded to TF32.

    Raises:
        InputError: tensors that do not fit the layout or each other, or are of another type.
    """
    check_inputs(layout, q_THD, k_SHD, v_SHE)
    if q_THD.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f'the attention of GPUs takes no {q_THD.dtype}; convert, or use the backend "reference"')
    check_biases(tuple(biases), q_THD, layout.n_keys, scale)
    table = joined_tables(biases, q_THD)
    places = _Places.of([b.distances for b in biases], [b.table_HN.shape[1] for b in biases], q_THD.device)
    out: torch.Tensor = _Attention.apply(q_THD, k_SHD, v_SHE, table, layout, scale, places)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, eq=False)
class _Places:
    """Of B biases on a device: places of queries (B, T) and keys (B, S), and of each table (B, 3): first column, last
    bucket, bits."""

    q: torch.Tensor
    k: torch.Tensor
    tables: torch.Tensor

    @staticmethod
    def of(distances: list[Distances], sizes: list[int], device: torch.device) -> _Places:
        def together(places: list[Any]) -> torch.Tensor:
            return torch.from_numpy(np.stack(places) if places else np.zeros((0, 0), np.int32)).to(device)

        at = offsets_of(sizes)[:-1]
        lines = [[int(a), n - 1, d.bits] for a, n, d in zip(at, sizes, distances, strict=True)]
        tables = torch.tensor(lines, dtype=torch.int32).reshape(-1, 3).to(device)
        return _Places(together([d.q for d in distances]), together([d.k for d in distances]), tables)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Of a layout on a device, int32.

    Attributes:
        bounds: (T, 2 R), of ``AttentionLayout``.
        blocks: (B, 4 + 2 R), of up to ``_QUERIES`` queries of a row each: first query, how many, first key of the row,
            how many keys the row has; then the runs of tiles of keys that some query sees, each from (inclusive) and
            to (exclusive) a place in the row that is a multiple of ``_KEYS``. Runs ascend and do not overlap.
        key_blocks: (C, 5): first key, how many keys, its place in the row, and the first (inclusive) and last
            (exclusive) of the blocks that see some key of it.
    """

    bounds: torch.Tensor
    blocks: torch.Tensor
    key_blocks: torch.Tensor

    @staticmethod
    def of(layout: AttentionLayout, device: torch.device) -> _Plan:
        """From ``layout.kept``, where it is put on first use."""
        key = f"triton {device}"
        if key not in layout.kept:
            blocks, row = _blocks(layout)
            arrays = layout.bounds, blocks, _key_blocks(layout, blocks, row)
            layout.kept[key] = _Plan(*(torch.from_numpy(x.astype(np.int32)).to(device) for x in arrays))
        plan: _Plan = layout.kept[key]
        return plan


def _blocks(layout: AttentionLayout) -> tuple[Ints, Ints]:
    n_queries, n_keys = np.diff(layout.q_offsets), np.diff(layout.k_offsets)
    n_blocks = -(-n_queries // _QUERIES)
    row = np.repeat(np.arange(len(n_queries)), n_blocks)
    if not len(row):
        return np.empty((0, 4 + layout.bounds.shape[1]), np.int64), row
    within = np.arange(len(row)) - np.repeat(np.cumsum(n_blocks) - n_blocks, n_blocks)
    first = layout.q_offsets[row] + within * _QUERIES
    count = np.minimum(layout.q_offsets[row + 1] - first, _QUERIES)
    columns = bounds_of(first, layout.starts, layout.stops)[0]
    least, most = (np.stack(columns[i::4], axis=1) for i in (0, 3))
    begin, end = least // _KEYS * _KEYS, -(-most // _KEYS) * _KEYS
    begin[least == most] = end[least == most] = 0
    # Ranges of several queries may cross: a tile is in the first run that has it.
    order = np.argsort(begin, axis=1, kind="stable")
    begin, end = (np.take_along_axis(x, order, axis=1) for x in (begin, end))
    end = np.maximum.accumulate(end, axis=1)
    begin[:, 1:] = np.maximum(begin[:, 1:], end[:, :-1])
    runs = np.stack([begin, np.maximum(begin, end)], axis=2).reshape(len(row), -1)
    return np.concatenate([np.stack([first, count, layout.k_offsets[row], n_keys[row]], axis=1), runs], axis=1), row


def _key_blocks(layout: AttentionLayout, blocks: Ints, row: Ints) -> Ints:
    n_keys = np.diff(layout.k_offsets)
    n_blocks = -(-n_keys // _KEYS)
    offsets = offsets_of(n_blocks)
    key_row = np.repeat(np.arange(len(n_keys)), n_blocks)
    place = (np.arange(len(key_row)) - offsets[key_row]) * _KEYS
    first, stop = np.zeros(len(key_row), np.int64), np.zeros(len(key_row), np.int64)
    for at in range(4, blocks.shape[1], 2):
        begin, end = (offsets[row] + blocks[:, at + i] // _KEYS for i in (0, 1))
        for b, i, j in zip(range(len(row)), begin.tolist(), end.tolist(), strict=True):
            first[i:j] = np.where(stop[i:j] == 0, b, np.minimum(first[i:j], b))
            stop[i:j] = np.maximum(stop[i:j], b + 1)
    count = np.minimum(n_keys[key_row] - place, _KEYS)
    return np.stack([layout.k_offsets[key_row] + place, count, place, first, stop], axis=1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: torch.Tensor,
        layout: AttentionLayout,
        scale: float,
        places: _Places,
    ) -> torch.Tensor:
        q, k, v, table = _lines(q), _lines(k), _lines(v), table.contiguous()
        ctx.save_for_backward(q, k, v, table)
        ctx.rest = plan, _, _ = _Plan.of(layout, q.device), scale, places
        out = torch.zeros((len(q), q.shape[1], v.shape[2]), dtype=v.dtype, device=v.device)
        given, shape = _given(q, k, v, table, *ctx.rest)
        if len(plan.blocks):
            loops.forward[len(plan.blocks), q.shape[1]](*given, out, *out.stride()[:2], **shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        q, k, v, table = ctx.saved_tensors
        plan, _, _ = ctx.rest
        dout, heads = _lines(dout), q.shape[1]
        need_q, need_k, need_v, need_table = ctx.needs_input_grad[:4]
        given, shape = _given(q, k, v, table, *ctx.rest)
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        n_lines = len(plan.blocks) if need_table else 0
        sums = torch.zeros((n_lines, *table.shape), device=q.device)
        moved = (dout, *dout.stride()[:2])
        if len(plan.blocks) and (need_q or need_table):
            loops.backward_queries[len(plan.blocks), heads](
                *given, *moved, dq, *dq.stride()[:2], sums, NEED_TABLE=need_table, **shape
            )
        if len(plan.key_blocks) and (need_k or need_v):
            loops.backward_keys[len(plan.key_blocks), heads](
                *given, *moved, plan.key_blocks, dk, *dk.stride()[:2], dv, *dv.stride()[:2], **shape
            )
        dtable = sums.sum(0).to(table.dtype) if need_table else None
        return dq if need_q else None, dk if need_k else None, dv if need_v else None, dtable, None, None, None


def _lines(x: torch.Tensor) -> torch.Tensor:
    """Elements of a head side by side."""
    return x if x.stride(2) == 1 else x.contiguous()


def _given(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    plan: _Plan,
    scale: float,
    places: _Places,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that all three kernels begin with, and the constants that they are compiled for."""
    tensors = [x for t in (q, k, v) for x in (t, *t.stride()[:2])]
    given = (*tensors, plan.bounds, plan.blocks, table, table.shape[1], places.q, places.k, places.tables, len(q),
             len(k), scale)  # fmt: skip
    widths = {"D": q.shape[2], "E": v.shape[2]}
    tiles = {f"BLOCK_{n}": max(16, triton.next_power_of_2(w)) for n, w in widths.items()}
    shape = {**widths, **tiles, "R": plan.bounds.shape[1] // 2, "B": len(places.tables), "QUERIES": _QUERIES}
    return given, {**shape, "KEYS": _KEYS}
