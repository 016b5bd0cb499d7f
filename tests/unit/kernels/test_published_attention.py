"""Side by side with the PyTorch reference of generative-recommenders (Meta), where it is installed: the same values and
gradients for the masks on which published references agree, and where targets meet a window, on which they do not.
"""

import numpy as np
import pytest
import torch

from thinrow.kernels import kernel
from thinrow.kernels.layout import AttentionLayout
from thinrow.kernels.sequence import SequenceLayout

pytest.importorskip("fbgemm_gpu")
published = pytest.importorskip("generative_recommenders.ops.pytorch.pt_hstu_attention")

OFFSETS = np.array([0, 7, 8, 48, 60])
LONGEST, SCALE = 40, 0.3


def with_gradients(attend):
    draw = torch.Generator().manual_seed(1)
    leaves = [torch.randn(60, 2, 16, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3)]
    out = attend(*leaves)
    out.backward(torch.randn(out.shape, generator=draw, dtype=torch.float64))
    return [out.detach(), *(x.grad for x in leaves)]


def theirs(q, k, v, offsets, targets=None, window=0, context=0):
    targets = None if targets is None else torch.tensor(targets)
    given = {"causal": True, "num_targets": targets, "max_attn_len": window, "contextual_seq_len": context}
    out = published.pytorch_hstu_mha(LONGEST, SCALE, q, k, v, torch.tensor(offsets), **given)
    # They divide by the longest row, here callers divide.
    return out * LONGEST


def check(layout, **given):
    ours = with_gradients(lambda *x: kernel("hstu_attention")(*x, layout, SCALE))
    for a, b in zip(ours, with_gradients(lambda *x: theirs(*x, layout.q_offsets, **given)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("targets", [None, [2, 0, 20, 12]])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_causal_with_targets_and_windows(targets, window):
    layout = SequenceLayout(OFFSETS, targets=0 if targets is None else targets, window=window)
    check(layout, targets=targets, window=window or 0)


def test_context_but_for_what_it_sees_itself():
    """There it sees the whole history, so that what is late reaches what is early; but for that all is the same."""
    context, targets = 3, [2, 0, 20, 4]
    offsets = np.array([0, 7, 12, 48, 60])
    layout = SequenceLayout(offsets, context=context, targets=targets)
    starts, stops = layout.starts.copy(), layout.stops.copy()
    for p, start in enumerate(offsets[:-1]):
        stops[start : start + context, 0] = offsets[p + 1] - start - targets[p]
        starts[start : start + context, 1] = stops[start : start + context, 1] = stops[start : start + context, 0]
    check(AttentionLayout(offsets, offsets, starts, stops), targets=targets, context=context)
