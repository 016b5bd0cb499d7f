"""The compiled attention equals the reference to float64 rounding over random layouts, forward and all gradients."""

from unittest import mock

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.kernels import BACKENDS, kernel, prefix, use
from thinrow.kernels.prefix import PrefixLayout

lengths = st.one_of(st.integers(0, 5), st.integers(14, 18), st.integers(30, 35), st.integers(60, 140))


@st.composite
def layouts(draw):
    rows = draw(st.lists(st.tuples(lengths, lengths), max_size=5))
    seed, order = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(["any", "ascending", "steps", "all"]))
    rng = np.random.default_rng(seed)
    visible = []
    for n_queries, n_keys in rows:
        seen = rng.integers(0, n_keys + 1, n_queries)
        if order == "steps":
            seen = np.repeat(seen, 7)[:n_queries]
        visible.append(np.full(n_queries, n_keys) if order == "all" else seen if order == "any" else np.sort(seen))
    q_offsets, k_offsets = (np.cumsum([0, *(r[side] for r in rows)]) for side in (0, 1))
    return PrefixLayout(q_offsets, k_offsets, np.concatenate([np.empty(0, np.int64), *visible]))


@given(layouts(), st.integers(1, 3), st.integers(1, 33), st.integers(1, 33), st.integers(0, 99), st.booleans())
@settings(max_examples=60)
def test_equals_the_reference(layout, heads, d, e, seed, split):
    rng = torch.Generator().manual_seed(seed)
    sizes = ((layout.n_queries, heads, d), (layout.n_keys, heads, d), (layout.n_keys, heads, e))
    inputs = [torch.randn(s, dtype=torch.float64, generator=rng) for s in sizes]
    dout = torch.randn((layout.n_queries, heads, e), dtype=torch.float64, generator=rng)
    results = []
    # Small parts split even these short rows over chunks.
    with mock.patch.multiple(prefix, _TASK_PAIRS=300, _PART_PAIRS=1000 if split else 1 << 18):
        for backend in BACKENDS:
            with use(backend):
                leaves = [x.clone().requires_grad_() for x in inputs]
                out = kernel("hstu_attention")(*leaves, layout, d**-0.5)
                out.backward(dout)
            results.append([out.detach(), *(x.grad for x in leaves)])
    for found, wanted in zip(*results, strict=True):
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12 * max(1.0, largest))
