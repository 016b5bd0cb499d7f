"""Jagged HSTU attention: values by hand, edges of tiles, what may not leak, gradients, threads, refused input."""

import math
import threading
import warnings

import numpy as np
import pytest
import torch

from thinrow.core.errors import InputError
from thinrow.kernels import BACKENDS, cut, kernel, use
from thinrow.kernels.distance import Bias, Distances
from thinrow.kernels.prefix import PrefixLayout
from thinrow.kernels.sequence import SequenceLayout
from thinrow.kernels.torch import hstu as fast


@pytest.fixture(params=BACKENDS)
def attention(request):
    return of_backend(request.param)


def of_backend(name):
    with use(name):
        return kernel("hstu_attention")


def causal(*lengths):
    return PrefixLayout.causal(np.cumsum([0, *lengths]))


def tensors(layout, heads=2, d=16, e=16, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    sizes = ((layout.n_queries, heads, d), (layout.n_keys, heads, d), (layout.n_keys, heads, e))
    return [torch.randn(s, dtype=dtype, generator=draw) for s in sizes]


def with_gradients(attention, inputs, layout, scale=0.3, dout=None):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(*inputs, layout, scale)
    draw = torch.Generator().manual_seed(99)
    random = torch.randn(out.shape, dtype=torch.float64, generator=draw).to(out.dtype)
    out.backward(random if dout is None else dout)
    return [out.detach(), *(x.grad for x in inputs)]


def by_hand(q, k, v, layout, scale):
    out = np.zeros((layout.n_queries, q.shape[1], v.shape[2]))
    for p in range(len(layout.q_offsets) - 1):
        for i in range(layout.q_offsets[p], layout.q_offsets[p + 1]):
            for j in range(layout.k_offsets[p], layout.k_offsets[p] + layout.visible[i]):
                for h in range(q.shape[1]):
                    s = scale * float(q[i, h] @ k[j, h])
                    out[i, h] += s / (1 + math.exp(-s)) * v[j, h].numpy()
    return out


MIXED = PrefixLayout([0, 3, 3, 9, 10], [0, 4, 9, 9, 12], [4, 0, 2, 0, 0, 0, 0, 0, 0, 1])


def test_the_example_of_the_reference(attention):
    q = torch.tensor([1.0, 2.0]).reshape(2, 1, 1)
    out = attention(q, q, torch.tensor([10.0, 100.0]).reshape(2, 1, 1), causal(2), 1.0)
    assert out.flatten().tolist() == pytest.approx([7.31, 410.4], rel=1e-3)


def test_the_examples_of_the_layout():
    layout = PrefixLayout.causal([0, 3, 5])
    assert layout.visible.tolist() == [1, 2, 3, 1, 2]
    assert (layout.n_queries, layout.n_keys, layout.n_pairs) == (5, 5, 9)
    assert PrefixLayout([0, 3, 3], [0, 3, 5], [1, 1, 3]).n_pairs == 5


@pytest.mark.parametrize("layout", [causal(5, 0, 2), MIXED], ids=["causal", "mixed"])
def test_equals_the_definition(attention, layout):
    q, k, v = tensors(layout, d=3, e=5)
    np.testing.assert_allclose(attention(q, k, v, layout, 0.7), by_hand(q, k, v, layout, 0.7), rtol=1e-12)


@pytest.mark.parametrize("length", [1, 15, 16, 31, 32, 33, 63, 64, 65, 129])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_edges_of_blocks(length, dtype):
    layout = causal(length, 3)
    inputs = tensors(layout, heads=1, d=32, e=48, dtype=dtype)
    found = with_gradients(of_backend("numba"), inputs, layout)
    wanted = with_gradients(of_backend("reference"), [x.double() for x in inputs], layout)
    exact = dtype == torch.float64
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-10 if exact else 1e-4, atol=1e-10 if exact else 1e-4)


@pytest.mark.parametrize(
    ("q_offsets", "k_offsets", "visible"),
    [
        ([0], [0], []),
        ([0, 0, 0], [0, 0, 0], []),
        ([0, 0], [0, 40], []),
        ([0, 40], [0, 0], [0] * 40),
        ([0, 40], [0, 40], [0] * 40),
    ],
    ids=["no rows", "empty rows", "no queries", "no keys", "sees nothing"],
)
def test_nothing_to_attend_to(attention, q_offsets, k_offsets, visible):
    layout = PrefixLayout(q_offsets, k_offsets, visible)
    out, *grads = with_gradients(attention, tensors(layout), layout)
    assert out.shape == (layout.n_queries, 2, 16)
    assert not out.any()
    assert [g.shape[0] for g in grads] == [layout.n_queries, layout.n_keys, layout.n_keys]
    assert not any(g.any() for g in grads)


def test_scores_of_any_size():
    """Where exp leaves the range of the type the activation is 0 or the score itself."""
    for dtype, sizes in ((torch.float32, (1.0, 20.0, 87.0, 89.0, 104.0, 1e30)), (torch.float64, (700.0, 720.0, 1e200))):
        scores = torch.tensor([s for size in sizes for s in (-size, size)], dtype=dtype)
        layout = PrefixLayout([0, len(scores)], [0, 1], [1] * len(scores))
        q, one = scores.reshape(-1, 1, 1), torch.ones(1, 1, 1, dtype=dtype)
        out = of_backend("numba")(q, one, one, layout, 1.0).flatten()
        wanted = scores.double() / (1 + torch.exp(-scores.double()))
        torch.testing.assert_close(out.double(), wanted, rtol=5e-7 if dtype == torch.float32 else 1e-14, atol=1e-36)


def test_activation_is_accurate_to_the_last_bits():
    scores = torch.linspace(-60, 60, 20_001, dtype=torch.float64).float()
    layout = PrefixLayout([0, len(scores)], [0, 1], [1] * len(scores))
    wanted = scores.double() / (1 + torch.exp(-scores.double()))
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, 1, 1, dtype=dtype)
        out = of_backend("numba")(scores.to(dtype).reshape(-1, 1, 1), one, one, layout, 1.0).flatten()
        assert ((out.double() - wanted).abs() <= 3 * torch.finfo(dtype).eps * wanted.abs()).all()


STEPS = PrefixLayout([0, 70, 90], [0, 150, 150 + 90], [10] * 20 + [75] * 20 + [140] * 30 + [*range(70, 90)])


@pytest.mark.parametrize("value", [3.0, -1e30, 3e38, math.inf, math.nan])
@pytest.mark.parametrize("query", [0, 25, 45, 71, 89])
def test_unseen_keys_and_other_queries_change_no_bit(value, query):
    attention = of_backend("numba")
    inputs = tensors(STEPS, dtype=torch.float32)
    out, dq, _, _ = with_gradients(attention, inputs, STEPS)
    row = int(query >= STEPS.q_offsets[1])
    first = STEPS.k_offsets[row]
    unseen = np.ones(STEPS.n_keys, bool)
    unseen[first : first + STEPS.visible[query]] = False
    others = np.arange(STEPS.n_queries) != query
    for which, rows in ((0, others), (1, unseen), (2, unseen)):
        changed = [x.clone() for x in inputs]
        changed[which][torch.from_numpy(rows)] = value
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            seen_out, seen_dq, _, _ = with_gradients(attention, changed, STEPS)
        assert torch.equal(seen_out[query], out[query])
        assert torch.equal(seen_dq[query], dq[query])


@pytest.mark.parametrize("which", ["query", "gradient"])
def test_what_does_not_see_a_key_does_not_reach_its_gradient(which):
    attention, layout = of_backend("numba"), causal(50)
    inputs = tensors(layout, dtype=torch.float32)
    dout = torch.randn(50, 2, 16, generator=torch.Generator().manual_seed(1))
    _, _, dk, dv = with_gradients(attention, inputs, layout, dout=dout)
    (inputs[0] if which == "query" else dout)[:20] = math.nan
    _, _, seen_dk, seen_dv = with_gradients(attention, inputs, layout, dout=dout)
    assert torch.equal(seen_dk[20:], dk[20:])
    assert torch.equal(seen_dv[20:], dv[20:])
    assert seen_dk[:20].isnan().all()


def test_a_query_alone_gets_the_same_bits_as_in_a_batch():
    attention = of_backend("numba")
    q, k, v = tensors(STEPS, dtype=torch.float32)
    out = attention(q, k, v, STEPS, 0.3)
    for i in (0, 19, 44, 69):
        alone = attention(q[i : i + 1], k[:150], v[:150], PrefixLayout([0, 1], [0, 150], STEPS.visible[i : i + 1]), 0.3)
        assert torch.equal(alone[0], out[i])


@pytest.fixture
def small_parts(monkeypatch):
    """Tasks of few pairs, rows split in backward, threads for any size."""
    monkeypatch.setattr(cut, "_TASK_PAIRS", 500)
    monkeypatch.setattr(cut, "_PART_PAIRS", 2_000)
    monkeypatch.setattr(fast, "_ALONE", 0)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("team", ["of torch", "own"])
def test_threads_change_no_bit(small_parts, threads, monkeypatch, team):
    if team == "own":
        monkeypatch.setattr(fast, "_team", lambda: None)
    layout = causal(200, 5, 0, 130)
    inputs = tensors(layout, heads=3, d=32, dtype=torch.float32)
    threads(1)
    wanted = with_gradients(of_backend("numba"), inputs, layout)
    for n in (1, 2, 3, 3):
        threads(n)
        assert all(map(torch.equal, with_gradients(of_backend("numba"), inputs, layout), wanted))


def test_split_rows_sum_to_the_same_gradients(small_parts):
    layout = PrefixLayout([0, 300, 420], [0, 100, 400], [*range(100)] * 3 + [300] * 120)
    assert layout.plan.folds
    inputs = tensors(layout, d=8, e=24)
    for a, b in zip(
        with_gradients(of_backend("numba"), inputs, layout),
        with_gradients(of_backend("reference"), inputs, layout),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("team", ["of torch", "own"])
def test_an_error_in_a_thread_reaches_the_caller(small_parts, threads, monkeypatch, team):
    if team == "own":
        monkeypatch.setattr(fast, "_team", lambda: None)
    threads(2)
    caller, first = threading.get_ident(), threading.Barrier(2, timeout=20)

    def work(counter):
        first.wait()
        if threading.get_ident() != caller:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fast._on_threads(work, 1)


@pytest.mark.parametrize("layout", [causal(3, 0, 1, 6), causal(3, 36), MIXED], ids=["causal", "two blocks", "mixed"])
def test_gradcheck(attention, layout):
    inputs = [x.requires_grad_() for x in tensors(layout, heads=1, d=3, e=2)]
    # In fast mode, along random directions, where every number at a time would take seconds.
    assert torch.autograd.gradcheck(lambda *x: attention(*x, layout, 0.5), inputs, fast_mode=layout.n_queries > 30)


def biases_of(layout, heads=1, dtype=torch.float64):
    """Of positions, near ones apart, and of times, hours apart."""
    draw = np.random.default_rng(5)
    times = np.cumsum(draw.integers(0, 7_200_000, layout.n_keys))
    places = Distances.of(layout.positions, layout.positions, 3), Distances.of_times(times, times, 1)
    sizes = (20, 40)
    return [
        Bias(torch.from_numpy(draw.normal(size=(heads, n))).to(dtype), p) for n, p in zip(sizes, places, strict=True)
    ]


MTGR = SequenceLayout([0, 45, 57], context=[2, 0], targets=[3, 2], seen=[0, 30, 40, 10, 9], window=6, first=1)


def test_gradcheck_of_ranges_and_biases(attention):
    inputs, biases = tensors(MTGR, heads=2, d=3, e=2), biases_of(MTGR, heads=2)
    leaves = [x.requires_grad_() for x in (*inputs, *(b.table_HN for b in biases))]

    def attend(q, k, v, *tables):
        return attention(q, k, v, MTGR, 0.5, [Bias(t, b.distances) for t, b in zip(tables, biases, strict=True)])

    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


@pytest.mark.parametrize(
    ("bits", "distance", "bucket"),
    [(2, d, b) for d, b in enumerate([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 8, 8, 9, 9, 9, 9, 10])]
    + [
        (2, -5, 0),
        (0, 0, 0),
        (0, 1, 1),
        (0, 2, 1),
        (0, 3, 2),
        (0, 7, 3),
        (5, 31, 31),
        (5, 33, 32),
        (5, 65, 48),
        (12, 4095, 99),
    ],
)
def test_the_bucket_of_a_distance(attention, bits, distance, bucket):
    """The score is the number of the bucket; the last of 100 takes all that is farther."""
    layout, one = PrefixLayout([0, 1], [0, 1], [1]), torch.ones(1, 1, 1, dtype=torch.float64)
    bias = Bias(torch.arange(100, dtype=torch.float64)[None], Distances.of([distance], [0], bits))
    out = attention(0 * one, one, one, layout, 1.0, [bias])
    assert float(out) == pytest.approx(bucket / (1 + math.exp(-bucket)), rel=1e-14)


def test_heads_share_a_table_that_is_expanded(attention):
    layout = SequenceLayout([0, 50])
    table, distances = biases_of(layout)[0]
    inputs = tensors(layout)
    each, shared = table.repeat(2, 1).requires_grad_(), table.clone().requires_grad_()
    for rows in (each, shared.expand(2, -1)):
        attention(*inputs, layout, 0.3, [Bias(rows, distances)]).sum().backward()
    torch.testing.assert_close(shared.grad, each.grad.sum(0, keepdim=True))


def test_gradients_of_tables_are_the_same_bits_on_any_threads(small_parts, threads):
    layout = SequenceLayout([0, 300, 305, 440], context=2, targets=3, window=50)
    inputs, biases = tensors(layout, dtype=torch.float32), biases_of(layout, 2, torch.float32)
    found = []
    for n in (1, 2, 2, 3):
        threads(n)
        tables = [b.table_HN.clone().requires_grad_() for b in biases]
        given = [Bias(t, b.distances) for t, b in zip(tables, biases, strict=True)]
        of_backend("numba")(*inputs, layout, 0.3, given).square().sum().backward()
        found.append([t.grad for t in tables])
    for grads in found[1:]:
        assert all(map(torch.equal, grads, found[0]))


def test_long_sums_for_a_bias_lose_nothing():
    """More steps than a thread sums in single precision; two buckets take them all."""
    layout = PrefixLayout([0, 64], [0, 9_000], [9_000] * 64)
    inputs = tensors(layout, d=8, e=8, dtype=torch.float32)
    distances = Distances.of(np.zeros(64, np.int64), np.arange(9_000) % 2 - 1, 0)
    found = []
    for backend, kind in (("numba", torch.float32), ("reference", torch.float64)):
        table = torch.zeros(2, 3, dtype=kind, requires_grad=True)
        out = of_backend(backend)(*(x.to(kind) for x in inputs), layout, 0.3, [Bias(table, distances)])
        out.sum().backward()
        found.append(table.grad.double())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize(
    ("table", "places", "scale", "message"),
    [
        (torch.zeros(1, 4), ([0, 1], [0, 1]), 1.0, r"bias 0 has a table of shape \(1, 4\); pass \(2, buckets\)"),
        (torch.zeros(2, 0), ([0, 1], [0, 1]), 1.0, r"shape \(2, 0\)"),
        (torch.zeros(2, 4).double(), ([0, 1], [0, 1]), 1.0, "bias 0 has a table of torch.float64 on cpu and q is"),
        (torch.zeros(2, 4), ([0], [0, 1]), 1.0, "bias 0 has places of 1 tokens of q, which has 2"),
        (torch.zeros(2, 4), ([0, 1], [0]), 1.0, "places of 1 tokens of k, which has 2"),
        (torch.zeros(2, 4), ([0, 1], [0, 1]), 0.0, "scale=0 with biases"),
    ],
)
def test_biases_that_do_not_fit_are_refused(attention, table, places, scale, message):
    x = torch.zeros(2, 2, 8)
    with pytest.raises(InputError, match=message):
        attention(x, x, x, causal(2), scale, [Bias(table, Distances.of(*places, 2))])


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)])
def test_gradients_only_where_required(attention, needs):
    layout = causal(40, 70)
    inputs = tensors(layout)
    wanted = with_gradients(attention, inputs, layout)[1:]
    some = [x.clone().requires_grad_(bool(need)) for x, need in zip(inputs, needs, strict=True)]
    out = attention(*some, layout, 0.3)
    out.backward(torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(99)))
    for x, need, grad in zip(some, needs, wanted, strict=True):
        assert x.grad is None if not need else torch.equal(x.grad, grad)


def test_without_gradients_nothing_is_saved(attention):
    layout = causal(40)
    inputs = tensors(layout)
    assert not attention(*inputs, layout, 0.3).requires_grad
    with torch.no_grad():
        out = attention(*(x.requires_grad_() for x in inputs), layout, 0.3)
    assert out.grad_fn is None
    assert torch.equal(out, attention(*inputs, layout, 0.3).detach())


def test_slices_of_one_projection_and_an_expanded_gradient():
    layout = causal(45, 20)
    draw = torch.Generator().manual_seed(3)
    whole = torch.randn(65, 3, 2, 40, generator=draw)

    def parts(x):
        return x[:, 0, :, :16], x[:, 1, :, 3:19], x[:, 2].transpose(1, 2)[:, 8:40:2].transpose(1, 2)

    results = []
    for backend in BACKENDS:
        x = whole.clone().requires_grad_()
        out = of_backend(backend)(*parts(x), layout, 0.25)
        out.sum().backward()
        results.append((out.detach(), x.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_only_once_differentiable():
    layout = causal(3)
    inputs = [x.requires_grad_() for x in tensors(layout)]
    out = of_backend("numba")(*inputs, layout, 1.0)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 2], [0, 3], [1, 4]), r"query 1 sees 4 keys of a row that has 3; clip visible to \[0, 3\]"),
        (([0, 2], [0, 3], [-1, 3]), "query 0 sees -1 keys"),
        (([0, 2], [0, 3], [1]), "q_offsets end at 2 but visible has 1"),
        (([0, 2], [0, 1, 3], [1, 1]), "q_offsets are of 1 rows and k_offsets of 2"),
        (([1, 2], [0, 3], [1]), r"q_offsets begins with \[1\]"),
        (([], [0], []), r"q_offsets begins with \[\]"),
        (([0, 2], [0, 3, 1], [1, 1]), "k_offsets falls from 3 to 1 at row 1"),
        (([0, 2], [0, 3], [0.5, 1]), "visible is 1-dimensional of float64; pass a one-dimensional int64"),
        (([[0, 2]], [0, 3], [1, 1]), "q_offsets is 2-dimensional"),
    ],
)
def test_a_bad_layout_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        PrefixLayout(*arguments)


def test_a_layout_keeps_its_own_numbers():
    visible = np.array([1, 2])
    layout = PrefixLayout([0, 2], [0, 2], visible)
    visible[:] = 99
    assert layout.visible.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        layout.visible[0] = 99


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (zeros(4, 1, 8), zeros(3, 1, 8), zeros(3, 1, 8), "q has 4 tokens, but the offsets of the layout end at 3"),
        (zeros(3, 1, 8), zeros(2, 1, 8), zeros(3, 1, 8), "k has 2 tokens"),
        (zeros(3, 1, 8), zeros(3, 1, 8), zeros(2, 1, 8), "v has 2 tokens"),
        (zeros(3, 1, 8), zeros(3, 1, 9), zeros(3, 1, 8), "q has width 8 and k has width 9"),
        (zeros(3, 2, 8), zeros(3, 2, 8), zeros(3, 1, 8), "v has 1 heads and q has 2"),
        (zeros(3, 8), zeros(3, 1, 8), zeros(3, 1, 8), r"q has shape \(3, 8\); pass \(tokens, heads, width\)"),
        (zeros(3, 1, 8), zeros(3, 1, 8, dtype=torch.float64), zeros(3, 1, 8), "k is torch.float64 and q is"),
        (*(zeros(3, 1, 8, dtype=torch.int64),) * 3, "q is torch.int64 .* floating-point"),
        (zeros(3, 1, 8), zeros(3, 1, 8), zeros(3, 1, 8, device="meta"), "v is on meta and q on cpu"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(attention, q, k, v, message):
    with pytest.raises(InputError, match=message):
        attention(q, k, v, causal(1, 2), 1.0)


@pytest.mark.parametrize(("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float32, "meta")])
def test_what_only_the_reference_takes(dtype, device):
    x = zeros(3, 1, 8, dtype=dtype, device=device)
    with pytest.raises(InputError, match=f"float32 or float64 on cpu, not {dtype} on {device}"):
        of_backend("numba")(x, x, x, causal(3), 1.0)
    if device == "cpu":
        assert of_backend("reference")(x, x, x, causal(3), 1.0).dtype == dtype


def test_the_plan_covers_every_query_once(small_parts):
    layout = PrefixLayout([0, 100, 100, 101, 400], [0, 50, 90, 90, 600], [50] * 100 + [0] + [*range(299)])
    plan = layout.plan
    assert plan is layout.plan
    covered = [i for first, n, *_ in plan.blocks.tolist() for i in range(first, first + n)]
    assert covered == list(range(400))
    assert max(plan.blocks[:, 1]) == cut.BLOCK
    blocks = [b for first, stop, _ in plan.chunks.tolist() for b in range(first, stop)]
    assert blocks == list(range(len(plan.blocks)))
    for tasks, n in ((plan.tasks, len(plan.blocks)), (plan.chunk_tasks, len(plan.chunks))):
        assert (tasks[0], tasks[-1]) == (0, n)
        assert (np.diff(tasks) > 0).all()
    assert plan.n_rows == layout.n_keys + sum(stop - first for first, stop, _ in plan.folds)
