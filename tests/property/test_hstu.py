"""The compiled attention equals the reference to float64 rounding over random layouts and biases, forward and all
gradients; what a query does not see changes no bit of its output."""

from unittest import mock

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.kernels import BACKENDS, cut, kernel, use
from thinrow.kernels.distance import Bias, Distances
from thinrow.kernels.layout import AttentionLayout
from thinrow.kernels.prefix import PrefixLayout
from thinrow.kernels.sequence import SequenceLayout

lengths = st.one_of(st.integers(0, 5), st.integers(14, 18), st.integers(30, 35), st.integers(60, 140))
seeds = st.integers(0, 2**32 - 1)


@st.composite
def prefixes(draw):
    rows = draw(st.lists(st.tuples(lengths, lengths), max_size=5))
    order = draw(st.sampled_from(["any", "ascending", "steps", "all"]))
    rng = np.random.default_rng(draw(seeds))
    visible = []
    for n_queries, n_keys in rows:
        seen = rng.integers(0, n_keys + 1, n_queries)
        if order == "steps":
            seen = np.repeat(seen, 7)[:n_queries]
        visible.append(np.full(n_queries, n_keys) if order == "all" else seen if order == "any" else np.sort(seen))
    return PrefixLayout(*_offsets(rows), np.concatenate([np.empty(0, np.int64), *visible]))


@st.composite
def any_ranges(draw):
    """Up to four ranges a query, each anywhere; many are empty or touch."""
    rows, n_ranges = draw(st.lists(st.tuples(lengths, lengths), max_size=4)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(seeds))
    n_keys = np.repeat([r[1] for r in rows], [r[0] for r in rows]).astype(np.int64)
    bounds = np.sort(rng.integers(0, n_keys[:, None] + 1, (len(n_keys), 2 * n_ranges)), axis=1)
    return AttentionLayout(*_offsets(rows), bounds[:, ::2], bounds[:, 1::2])


@st.composite
def sequences(draw):
    """Context, history and targets, none of some kind or nothing but one kind."""
    part = st.one_of(st.just(0), lengths)
    rows = draw(st.lists(st.tuples(st.sampled_from([0, 0, 1, 3, 40]), part, part), max_size=4))
    context, history, targets = (np.array([r[i] for r in rows], np.int64) for i in range(3))
    rng = np.random.default_rng(draw(seeds))
    offsets = np.cumsum([0, *(context + history + targets)])
    window, first = draw(st.sampled_from([None, 0, 1, 20, 70])), draw(st.sampled_from([0, 0, 2, 50]))
    seen = draw(st.sampled_from([None, rng.integers(0, np.repeat(history, targets) + 1)]))
    return SequenceLayout(offsets, context=context, targets=targets, seen=seen, window=window, first=first)


def _offsets(rows):
    return tuple(np.cumsum([0, *(r[side] for r in rows)]) for side in (0, 1))


layouts = st.one_of(prefixes(), any_ranges(), sequences())


def _biases(rng, layout, heads, n, dtype=torch.float64):
    draw = np.random.default_rng(rng)
    found = []
    for bits, buckets, span in ((0, 9, 40_000), (5, 70, 300), (2, 1, 5))[:n]:
        q, k = (draw.integers(-span, span, t) for t in (layout.n_queries, layout.n_keys))
        table = torch.from_numpy(draw.normal(size=(heads, buckets))).to(dtype)
        found.append(Bias(table, Distances.of(q, k, bits)))
    return found


@given(layouts, st.integers(1, 3), st.integers(1, 33), st.integers(1, 33), st.integers(0, 2), seeds, st.booleans())
@settings(max_examples=60)
def test_equals_the_reference(layout, heads, d, e, n_biases, seed, split):
    rng = torch.Generator().manual_seed(seed)
    sizes = ((layout.n_queries, heads, d), (layout.n_keys, heads, d), (layout.n_keys, heads, e))
    inputs = [torch.randn(s, dtype=torch.float64, generator=rng) for s in sizes]
    dout = torch.randn((layout.n_queries, heads, e), dtype=torch.float64, generator=rng)
    biases = _biases(seed, layout, heads, n_biases)
    results = []
    # Small parts split even these short rows over chunks.
    with mock.patch.multiple(cut, _TASK_PAIRS=300, _PART_PAIRS=1000 if split else 1 << 18):
        for backend in BACKENDS:
            with use(backend):
                leaves = [x.clone().requires_grad_() for x in (*inputs, *(b.table_HN for b in biases))]
                given_biases = [Bias(x, b.distances) for x, b in zip(leaves[3:], biases, strict=True)]
                out = kernel("hstu_attention")(*leaves[:3], layout, d**-0.5, given_biases)
                out.backward(dout)
            results.append([out.detach(), *(x.grad for x in leaves)])
    for found, wanted in zip(*results, strict=True):
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12 * max(1.0, largest))


@given(layouts, st.integers(0, 2), seeds)
@settings(max_examples=30)
def test_no_leak(layout, n_biases, seed):
    """Every hidden key and every other query may change: no bit of the output. A seen key may not."""
    if not layout.n_queries:
        return
    rng = np.random.default_rng(seed)
    query = int(rng.integers(layout.n_queries))
    row = np.searchsorted(layout.q_offsets, query, "right") - 1
    seen = np.zeros(layout.n_keys, bool)
    for start, stop in zip(layout.starts[query], layout.stops[query], strict=True):
        seen[layout.k_offsets[row] + start : layout.k_offsets[row] + stop] = True
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, 2, 16, generator=draw) for n in (layout.n_queries, layout.n_keys, layout.n_keys))
    biases = _biases(seed, layout, 2, n_biases, torch.float32)

    def attend(q, k, v, q_shift=0, k_shift=0):
        places = [Distances(b.distances.q + q_shift, b.distances.k + k_shift, b.distances.bits) for b in biases]
        tables = [Bias(b.table_HN, Distances(p.q.astype(np.int32), p.k.astype(np.int32), p.bits))
                  for b, p in zip(biases, places, strict=True)]  # fmt: skip
        return kernel("hstu_attention")(q, k, v, layout, 0.25, tables)[query]

    wanted = attend(q, k, v)
    hidden, others = torch.from_numpy(~seen), np.arange(layout.n_queries) != query
    for value in (3.0, float("nan")):
        changed = [x.clone() for x in (q, k, v)]
        for x, rows in zip(changed, (torch.from_numpy(others), hidden, hidden), strict=True):
            x[rows] = value
        assert torch.equal(attend(*changed, others * 777, ~seen * 777), wanted)
    if seen.any():
        v[int(rng.choice(np.flatnonzero(seen)))] += 1
        assert not torch.equal(attend(q, k, v), wanted)
