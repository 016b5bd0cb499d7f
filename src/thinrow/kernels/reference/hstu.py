"""HSTU attention in plain torch, row by row: the oracle, differentiable as often as wanted, of any floating type.

One row of two events, one head, width 1, q = k = [1, 2], v = [10, 100], scale 1::

    scores    1 2      silu   0.731 1.762     seen   0.731   0
              2 4             1.762 3.928            1.762 3.928      out   7.31   410.4
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import silu

from thinrow.kernels.distance import Bias, check_biases
from thinrow.kernels.layout import AttentionLayout, check_inputs


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

    T queries, S keys, H heads, D and E widths. The pointwise attention of HSTU (Zhai et al., "Actions Speak Louder than
    Words", 2024, eq. 2) without its normaliser, by which the caller divides.

    Raises:
        InputError: tensors that do not fit the layout or each other.
    """
    check_inputs(layout, q_THD, k_SHD, v_SHE)
    check_biases(tuple(biases), q_THD, layout.n_keys, scale)
    starts, stops = (torch.tensor(x, device=q_THD.device)[:, None, :] for x in (layout.starts, layout.stops))
    # Nothing, but so that every input has a gradient.
    out = [q_THD[:0, :, :1] + k_SHD[:0, :, :1] + v_SHE[:0] + sum(b.table_HN.sum() for b in biases)]
    q_at, k_at = layout.q_offsets.tolist(), layout.k_offsets.tolist()
    for p in range(len(q_at) - 1):
        queries, keys = slice(q_at[p], q_at[p + 1]), slice(k_at[p], k_at[p + 1])
        scores_HLM = torch.einsum("lhd,mhd->hlm", q_THD[queries], k_SHD[keys]) * scale
        for table_HN, distances in biases:
            bucket_LM = _buckets(distances.q[queries], distances.k[keys], distances.bits, table_HN)
            scores_HLM = scores_HLM + table_HN[:, bucket_LM]
        key_M = torch.arange(k_at[p + 1] - k_at[p], device=q_THD.device)[None, :, None]
        seen_LM = ((starts[queries] <= key_M) & (key_M < stops[queries])).any(2)
        weights_HLM = torch.where(seen_LM, silu(scores_HLM), 0.0)
        out.append(torch.einsum("hlm,mhe->lhe", weights_HLM, v_SHE[keys]))
    return torch.cat(out)


def _buckets(q: object, k: object, bits: int, table_HN: torch.Tensor) -> torch.Tensor:
    """(L, M) int64: the exponent of ``distance + 2**bits`` as a single-precision number, and its first ``bits``
    fraction bits, counted from distance 0."""
    places_L, places_M = (torch.tensor(x, device=table_HN.device) for x in (q, k))
    distance = (places_L[:, None] - places_M[None, :]).clamp(min=0)
    word = (distance + (1 << bits)).float().view(torch.int32) >> (23 - bits)
    return (word - ((127 + bits) << bits)).clamp(max=table_HN.shape[1] - 1).long()
