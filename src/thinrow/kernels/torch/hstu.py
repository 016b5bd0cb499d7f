"""HSTU attention on CPU: compiled tiles, scores made again in backward.

Autograd keeps q, k and v and no scores: memory is linear in tokens. The loops, and what a thread needs beside, are in
``kernels.numba.hstu``. The worked example is that of ``kernels.reference.hstu``.

What holds beyond equality with the reference: an output is the same bits whatever keys its query does not see, whatever
other queries there are and however many threads; so are gradients, but for dk and dv, where the split of a long row
(``prefix.Plan.chunks``) moves the rounding. NaN and infinity reach only those who see them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of
from thinrow.kernels.dispatch import cuda_kernel
from thinrow.kernels.distance import Bias, Distances, check_biases
from thinrow.kernels.layout import AttentionLayout, check_inputs
from thinrow.kernels.numba.hstu import Biases, Grads, Tokens, Work, attend, attend_backward
from thinrow.kernels.numba.vectors import VECTOR_BYTES

Ints = npt.NDArray[np.int64]

#: Products of two numbers below which a second thread costs more than it saves.
_ALONE = 1 << 23

_NO_PLACES = np.empty((0, 0), np.int32)


def hstu_attention(
    q_THD: torch.Tensor,
    k_SHD: torch.Tensor,
    v_SHE: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    biases: Sequence[Bias] = (),
) -> torch.Tensor:
    """(T, H, E): of each query and head the sum over the keys j that it sees of ``silu(score[j]) * v[j]``, where
    ``score[j]`` is ``scale * q . k[j]`` and each bias at the bucket of the distance to j.

    T queries, S keys, H heads, D and E widths; float32 or float64 on CPU, any strides. Tensors of a CUDA device go to
    ``kernels.triton.hstu``. The pointwise attention of HSTU (Zhai et al., "Actions Speak Louder than Words", 2024,
    eq. 2) without its normaliser, by which the caller divides. Runs on ``torch.get_num_threads()`` threads.
    Differentiable once, in the tables of biases too.

    Raises:
        InputError: tensors that do not fit the layout or each other, another data type or device.
        MissingExtraError: tensors of a CUDA device, and no Triton.
    """
    if q_THD.device.type == "cuda":
        on_device: torch.Tensor = cuda_kernel("hstu_attention")(q_THD, k_SHD, v_SHE, layout, scale, biases)
        return on_device
    check_inputs(layout, q_THD, k_SHD, v_SHE)
    check_biases(tuple(biases), q_THD, layout.n_keys, scale)
    if q_THD.device.type != "cpu" or q_THD.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"the compiled attention takes float32 or float64 on cpu, not {q_THD.dtype} on {q_THD.device}; "
            'convert, or use the backend "reference"'
        )
    distances = tuple(b.distances for b in biases)
    table = joined_tables(biases, q_THD)
    at = offsets_of([b.table_HN.shape[1] for b in biases])
    out: torch.Tensor = _Attention.apply(q_THD, k_SHD, v_SHE, table, layout, scale, distances, at)  # type: ignore[no-untyped-call]
    return out


def joined_tables(biases: Sequence[Bias], q_THD: torch.Tensor) -> torch.Tensor:
    """(H, N of all biases): their tables side by side."""
    return torch.cat([b.table_HN for b in biases], dim=1) if biases else q_THD.new_empty((q_THD.shape[1], 0))


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
        distances: tuple[Distances, ...],
        at: Ints,
    ) -> Any:
        ctx.save_for_backward(q, k, v, table)
        ctx.rest = layout, scale, distances, at
        width = v.shape[2]
        q, k, v = _whole(q), _whole(k), _whole(v)
        out = _new(len(q), v)
        plan, work, into = layout.plan, _work(q, k, v, table, *ctx.rest), _tokens(out)
        products = plan.cost * work.heads * (work.d + work.e)
        _on_threads(lambda counter: attend(counter, plan.tasks, plan.blocks, work, into), products)
        return out[:, :, :width]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        *saved, table = ctx.saved_tensors
        plan, scale = ctx.rest[0].plan, ctx.rest[1]
        needs = need_q, need_k, need_v = ctx.needs_input_grad[:3]
        q, k, v, dout = (_whole(x) for x in (*saved, dout))
        work = _work(q, k, v, table, *ctx.rest)
        rows = (len(q), plan.n_rows, plan.n_rows)
        made = [_new(n if need else 0, x, np.zeros) for x, n, need in zip((q, k, v), rows, needs, strict=True)]
        n_units = (len(plan.chunk_tasks) - 1) * work.heads if ctx.needs_input_grad[3] else 0
        sums = np.zeros((n_units, table.shape[1]))
        dq, dk, dv = map(_tokens, made)
        grads = Grads(_tokens(dout), dq, dk, dv, need_q, need_k, need_v, type(work.scale)(1), sums)
        products = plan.cost * work.heads * 2 * (work.d + work.e)
        _on_threads(
            lambda counter: attend_backward(counter, plan.chunk_tasks, plan.chunks, plan.blocks, work, grads), products
        )
        for x in (x for x, need in zip(made[1:], needs[1:], strict=True) if need):
            for first, stop, at in plan.folds:
                x[first:stop] += x[at : at + stop - first]
        cut = [x[: len(s), :, : s.shape[2]] if need else None for x, s, need in zip(made, saved, needs, strict=True)]
        dtable = None
        if ctx.needs_input_grad[3]:
            dtable = torch.from_numpy(sums.reshape(-1, *table.shape).sum(axis=0) / scale).to(table.dtype)
        return (*cut, dtable, None, None, None, None)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """Elements of a head side by side, and zeros added until they fill vectors: they change no product."""
    x = x.detach()
    missing = -x.shape[2] % (VECTOR_BYTES // x.element_size())
    if missing:
        return pad(x, (0, missing))
    return x if x.stride(2) == 1 else x.contiguous()


def _new(n: int, like: torch.Tensor, make: Callable[..., Any] = np.empty) -> torch.Tensor:
    """(n, ...) of NumPy's memory, which comes in huge pages where it is large, from a cache line's start."""
    size = n * like.shape[1] * like.shape[2]
    line = make(size + 64 // like.element_size(), np.float32 if like.dtype == torch.float32 else np.float64)
    skip = -line.ctypes.data % 64 // line.itemsize
    return torch.from_numpy(line[skip : skip + size].reshape(n, *like.shape[1:]))


def _tokens(x: torch.Tensor) -> Tokens:
    reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return Tokens(x.as_strided((reach,), (1,)).numpy(), x.stride(0), x.stride(1))


def _work(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    distances: tuple[Distances, ...],
    at: Ints,
) -> Work:
    factor = np.float32(scale) if q.dtype == torch.float32 else np.float64(scale)
    biases = Biases(
        table.detach().contiguous().numpy().reshape(-1),
        at,
        np.stack([d.q for d in distances]) if distances else _NO_PLACES,
        np.stack([d.k for d in distances]) if distances else _NO_PLACES,
        np.array([d.bits for d in distances], np.int64),
    )
    tokens = _tokens(q), _tokens(k), _tokens(v)
    return Work(layout.bounds, *tokens, factor, q.shape[1], q.shape[2], v.shape[2], biases)


def _on_threads(work: Callable[[Any], None], products: int) -> None:
    """Call ``work`` with one counter on as many threads as torch uses, or on this one where that is faster.

    The threads are torch's own team where torch is built on GNU OpenMP: its idle threads spin for milliseconds after
    each operation of torch, and others would share processors with them.
    """
    if products == 0:
        return None
    counter = np.zeros(1, np.int64)
    n = torch.get_num_threads() if products > _ALONE else 1
    if n == 1:
        return work(counter)
    failures: list[BaseException] = []

    def run(_: Any = None) -> None:
        try:
            work(counter)
        except BaseException as failure:
            failures.append(failure)

    team = _team()
    if team is not None:
        team(_CALLBACK(run), None, n, 0)
    else:
        threads = [Thread(target=run) for _ in range(n - 1)]
        for thread in threads:
            thread.start()
        run()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return None


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _team() -> Any:
    """``GOMP_parallel`` of the OpenMP library that torch has loaded, or None."""
    try:
        run = ctypes.CDLL("libgomp.so.1").GOMP_parallel
    except (OSError, AttributeError):
        return None
    run.argtypes = [_CALLBACK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    return run
