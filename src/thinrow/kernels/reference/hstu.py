"""HSTU attention in plain torch, row by row: the oracle, differentiable as often as wanted, of any floating type.

One row of two events, one head, width 1, q = k = [1, 2], v = [10, 100], scale 1::

    scores    1 2      silu   0.731 1.762     seen   0.731   0
              2 4             1.762 3.928            1.762 3.928      out   7.31   410.4
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from thinrow.kernels.prefix import PrefixLayout, check_inputs


def hstu_attention(
    q_THD: torch.Tensor, k_SHD: torch.Tensor, v_SHE: torch.Tensor, layout: PrefixLayout, scale: float
) -> torch.Tensor:
    """(T, H, E): of each query and head the sum over the visible keys j of ``silu(scale * q . k[j]) * v[j]``.

    T queries, S keys, H heads, D and E widths. The pointwise attention of HSTU (Zhai et al., "Actions Speak Louder than
    Words", 2024, eq. 2) without its normaliser, by which the caller divides.

    Raises:
        InputError: tensors that do not fit the layout or each other.
    """
    check_inputs(layout, q_THD, k_SHD, v_SHE)
    visible = torch.from_numpy(layout.visible.copy()).to(q_THD.device)
    out = [q_THD[:0, :, :1] + k_SHD[:0, :, :1] + v_SHE[:0]]
    q_at, k_at = layout.q_offsets.tolist(), layout.k_offsets.tolist()
    for p in range(len(q_at) - 1):
        queries, keys = slice(q_at[p], q_at[p + 1]), slice(k_at[p], k_at[p + 1])
        scores_HLM = torch.einsum("lhd,mhd->hlm", q_THD[queries], k_SHD[keys]) * scale
        seen_LM = torch.arange(k_at[p + 1] - k_at[p], device=q_THD.device) < visible[queries, None]
        weights_HLM = torch.where(seen_LM, silu(scores_HLM), 0.0)
        out.append(torch.einsum("hlm,mhe->lhe", weights_HLM, v_SHE[keys]))
    return torch.cat(out)
