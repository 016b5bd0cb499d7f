"""Jagged HSTU attention, forward and backward, against a padded dense one and against the machine's matrix product.

Every contestant gets the same jagged leaf tensors and leaves gradients in them. Units are (query, key) pairs that see
each other, summed over heads, per second; padding and masked halves are not counted, only paid for.

- ``thinrow``: the kernel ``hstu_attention``, on as many threads as torch uses.
- ``padded_dense``: written as the published PyTorch reference works: rows padded to the longest, scores of all pairs by
  one batched product, SiLU, a mask multiplied in, a second product, padding cut off, gradients by autograd. The mask
  and the positions that pad and cut are prepared outside the timing.
- ``sgemm``: one product of two square float32 matrices, in floating-point operations per second: the ceiling.

Shapes: ``RxL`` are R causal rows of L events; ``skewed``, the longest has L and the shortest an eighth. ``candidates``:
requests of a user in one row, each with 20 candidates that see a prefix. ``short``: many rows of 16 events, causal, and
with 20 to 300 candidates each that see them all. ``biased``: with two tables of 128 buckets, of positions and times;
the peer looks each up for all pairs of a padded row and its autograd sums them, the buckets of all pairs prepared
outside the timing. ``window``: one row in which an event sees the 256 before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.harness import Options, Result, Work, rates
from thinrow.core.ragged import offsets_of
from thinrow.kernels import kernel
from thinrow.kernels.distance import Bias, Distances
from thinrow.kernels.layout import AttentionLayout
from thinrow.kernels.prefix import PrefixLayout
from thinrow.kernels.sequence import SequenceLayout

_HEADS, _WIDTH = 2, 32

#: Multiply-adds of a pair and head, in widths: 2 products forward, 5 backward (the scores are made again).
_PRODUCTS = 7

#: Buckets of a table of biases.
_BUCKETS = 128

#: Of q, k, v and tables of biases.
Attention = Callable[..., torch.Tensor]


def run(options: Options) -> Result:
    """All shapes; with ``quick`` one small of each kind, one round."""
    shapes = _quick_shapes() if options.quick else _shapes()
    rounds, side = (1, 256) if options.quick else (7, 2048)
    result = Result(
        "attention",
        {
            "heads": _HEADS, "width": _WIDTH, "dtype": "float32", "threads": torch.get_num_threads(), "rounds": rounds,
            "sgemm": f"{side} x {side} x {side}", "torch": torch.__version__, "pass": "forward and backward",
        },
    )  # fmt: skip
    for name, layout in shapes.items():
        distances = _distances(layout) if name.startswith("biased") else []
        inputs, dout = _tensors(layout, len(distances))
        contestants = {"thinrow": _thinrow(layout, distances), "padded_dense": _padded_dense(layout, distances)}
        _check(contestants, inputs, dout)
        works = {n: _step(attend, inputs, dout, layout.n_pairs * _HEADS) for n, attend in contestants.items()}
        seen = rates({**works, "sgemm": _sgemm(side)}, rounds)
        flops = seen["thinrow"]["median"] * _PRODUCTS * 2 * _WIDTH
        result.figures[name] = {
            "pairs": layout.n_pairs,
            "padded_pairs": _padded_pairs(layout),
            "ns_a_pair": {n: round(1e9 / seen[n]["median"], 2) for n in contestants},
            "sgemm_share": round(flops / seen["sgemm"]["median"], 3),
            "rates": {n: {m: round(v) for m, v in r.items()} for n, r in seen.items()},
        }
        result.ratios[f"vs_padded_dense.{name}"] = seen["thinrow"]["median"] / seen["padded_dense"]["median"]
        result.ratios[f"vs_sgemm.{name}"] = flops / seen["sgemm"]["median"]
    return result


def _shapes() -> dict[str, AttentionLayout]:
    causal = {f"{rows}x{longest}": (rows, longest) for rows, longest in ((16, 512), (4, 2048), (2, 4096))}
    return {
        **{n: _causal(np.full(rows, longest)) for n, (rows, longest) in causal.items()},
        **{f"{n}_skewed": _causal(np.geomspace(longest, longest / 8, rows)) for n, (rows, longest) in causal.items()},
        "candidates": _candidates(8, 1024, 20),
        "short": _causal(np.full(1000, 16)),
        "short_candidates": _short_candidates(1000),
        "biased_16x512_skewed": _causal(np.geomspace(512, 64, 16)),
        "biased_4x2048_skewed": _causal(np.geomspace(2048, 256, 4)),
        "window_1x4096": SequenceLayout([0, 4096], window=256),
    }


def _quick_shapes() -> dict[str, AttentionLayout]:
    return {
        "4x64": _causal(np.full(4, 64)),
        "4x64_skewed": _causal(np.geomspace(64, 8, 4)),
        "candidates": _candidates(2, 64, 4),
        "short": _causal(np.full(20, 16)),
        "short_candidates": _short_candidates(20),
        "biased_4x64_skewed": _causal(np.geomspace(64, 8, 4)),
        "window_1x64": SequenceLayout([0, 64], window=8),
    }


def _causal(lengths: Any) -> PrefixLayout:
    return PrefixLayout.causal(offsets_of(np.asarray(lengths).astype(np.int64)))


def _candidates(rows: int, keys: int, requests: int) -> PrefixLayout:
    seen = np.linspace(keys * 0.3, keys, requests).astype(np.int64).repeat(20)
    return PrefixLayout(np.arange(rows + 1) * len(seen), np.arange(rows + 1) * keys, np.tile(seen, rows))


def _short_candidates(rows: int) -> PrefixLayout:
    queries = np.random.default_rng(0).integers(20, 301, rows)
    return PrefixLayout(offsets_of(queries), np.arange(rows + 1) * 16, np.full(queries.sum(), 16))


def _distances(layout: AttentionLayout) -> list[Distances]:
    """Of positions, and of times minutes to hours apart."""
    gaps = np.random.default_rng(0).integers(0, 7_200_000, layout.n_keys)
    position, times = np.arange(layout.n_keys), np.cumsum(gaps)
    return [Distances.of(position, position, 4), Distances.of_times(times, times, 2)]


def _tensors(layout: AttentionLayout, n_tables: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    rows = (layout.n_queries, layout.n_keys, layout.n_keys, layout.n_queries)
    *inputs, dout = (torch.randn((n, _HEADS, _WIDTH), generator=draw) for n in rows)
    inputs += [torch.randn((_HEADS, _BUCKETS), generator=draw) for _ in range(n_tables)]
    return [x.requires_grad_() for x in inputs], dout


def _thinrow(layout: AttentionLayout, distances: list[Distances]) -> Attention:
    attention = kernel("hstu_attention")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        biases = [Bias(t, d) for t, d in zip(tables, distances, strict=True)]
        out: torch.Tensor = attention(q, k, v, layout, _WIDTH**-0.5, biases)
        return out

    return attend


def _padded_dense(layout: AttentionLayout, distances: list[Distances]) -> Attention:
    q_at, q_shape = _places(layout.q_offsets)
    k_at, k_shape = _places(layout.k_offsets)
    start, stop = (torch.zeros(q_shape, dtype=torch.int64) for _ in range(2))
    start[q_at], stop[q_at] = (torch.tensor(x[:, -1]) for x in (layout.starts, layout.stops))
    key = torch.arange(k_shape[1])
    mask = ((start[:, :, None] <= key) & (key < stop[:, :, None]))[:, None].float()
    buckets = [_buckets(d, q_at, q_shape, k_at, k_shape) for d in distances]

    def pad(x: torch.Tensor, at: Any, shape: tuple[int, int]) -> torch.Tensor:
        return x.new_zeros((*shape, *x.shape[1:])).index_put(at, x)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        q, k, v = pad(q, q_at, q_shape), pad(k, k_at, k_shape), pad(v, k_at, k_shape)
        scores = torch.einsum("blhd,bmhd->bhlm", q, k) * _WIDTH**-0.5
        for table, bucket in zip(tables, buckets, strict=True):
            scores = scores + torch.nn.functional.embedding(bucket, table.T).permute(0, 3, 1, 2)
        weights = torch.nn.functional.silu(scores) * mask
        return torch.einsum("bhlm,bmhd->blhd", weights, v)[q_at]

    return attend


def _buckets(
    distances: Distances, q_at: Any, q_shape: tuple[int, int], k_at: Any, k_shape: tuple[int, int]
) -> torch.Tensor:
    """(rows, L, M) int64: the rule of ``kernels.distance`` by searching the least distance of each bucket."""
    widths = 1 << (np.arange(_BUCKETS - 1) >> distances.bits)
    least = torch.from_numpy(offsets_of(widths))
    q, k = torch.zeros(q_shape, dtype=torch.int64), torch.zeros(k_shape, dtype=torch.int64)
    q[q_at], k[k_at] = torch.tensor(distances.q).long(), torch.tensor(distances.k).long()
    distance = (q[:, :, None] - k[:, None, :]).clamp(min=0)
    return torch.searchsorted(least, distance, right=True) - 1


def _places(offsets: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
    """Row and position of every token, and the shape that holds them all."""
    lengths = np.diff(offsets)
    row = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(row)) - offsets[row]
    return (torch.from_numpy(row), torch.from_numpy(position)), (len(lengths), int(lengths.max()))


def _padded_pairs(layout: AttentionLayout) -> int:
    longest = [int(np.diff(x).max()) for x in (layout.q_offsets, layout.k_offsets)]
    return (len(layout.q_offsets) - 1) * longest[0] * longest[1]


def _step(attend: Attention, inputs: list[torch.Tensor], dout: torch.Tensor, units: int) -> Work:
    def step() -> int:
        for x in inputs:
            x.grad = None
        attend(*inputs).backward(dout)  # type: ignore[no-untyped-call]
        return units

    return step


def _check(contestants: dict[str, Attention], inputs: list[torch.Tensor], dout: torch.Tensor) -> None:
    """All give the same gradients, to single precision."""
    found = []
    for attend in contestants.values():
        _step(attend, inputs, dout, 0)()
        found.append([x.grad for x in inputs])
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def _sgemm(side: int) -> Work:
    a, b, c = (torch.randn(side, side) for _ in range(3))

    def multiply() -> int:
        torch.mm(a, b, out=c)
        return 2 * side**3

    return multiply
