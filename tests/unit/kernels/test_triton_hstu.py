"""The attention of GPUs, in Triton's interpreter (``conftest`` turns it on): equal to the reference, no leak, the same
bits again. And it compiles for a GPU, which needs none."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from thinrow.core.errors import InputError, MissingExtraError
from thinrow.kernels import dispatch, kernel, use
from thinrow.kernels.distance import Bias, Distances
from thinrow.kernels.layout import AttentionLayout
from thinrow.kernels.prefix import PrefixLayout
from thinrow.kernels.sequence import SequenceLayout
from thinrow.kernels.torch import hstu as on_cpu


@pytest.fixture
def attention(monkeypatch):
    """Small tiles, so that small shapes have several."""
    found = dispatch.cuda_kernel("hstu_attention")
    monkeypatch.setitem(found.__globals__, "_QUERIES", 16)
    monkeypatch.setitem(found.__globals__, "_KEYS", 16)
    return found


def drawn(layout, heads, d, e, n_biases, seed=0):
    rng, draw = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    sizes = ((layout.n_queries, d), (layout.n_keys, d), (layout.n_keys, e), (layout.n_queries, e))
    q, k, v, dout = (torch.randn(n, heads, width, generator=draw) for n, width in sizes)
    biases = []
    for buckets, span, bits in ((9, 40, 1), (30, 4_000, 2))[:n_biases]:
        places = (rng.integers(-span, span, n) for n in (layout.n_queries, layout.n_keys))
        biases.append(Bias(torch.randn(heads, buckets, generator=draw), Distances.of(*places, bits)))
    return (q, k, v), biases, dout


def with_gradients(attend, layout, inputs, biases, dout, dtype=torch.float32):
    leaves = [x.to(dtype).clone().requires_grad_() for x in (*inputs, *(b.table_HN for b in biases))]
    tables = [Bias(x, b.distances) for x, b in zip(leaves[3:], biases, strict=True)]
    out = attend(*leaves[:3], layout, 0.4, tables)
    out.backward(dout.to(dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def check(attention, layout, heads, d, e, n_biases):
    given = drawn(layout, heads, d, e, n_biases)
    with use("reference"):
        wanted = with_gradients(kernel("hstu_attention"), layout, *given, torch.float64)
    found = with_gradients(attention, layout, *given)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * float(b.abs().max()) if b.numel() else 0)
    return given, found


def test_equals_the_reference(attention):
    check(attention, SequenceLayout([0, 3, 21], context=1, targets=[0, 2], seen=[3, 15], window=4), 1, 5, 7, 1)


def test_the_order_of_tiles_where_ranges_cross(attention):
    """Two queries of a block, the second range of the one before the first of the other."""
    layout = AttentionLayout([0, 2, 2], [0, 40, 41], [[30, 40], [3, 5]], [[39, 40], [3, 40]])
    check(attention, layout, 1, 3, 3, 0)


@pytest.mark.parametrize("layout", [PrefixLayout.causal([0]), PrefixLayout([0, 3], [0, 0], [0, 0, 0])])
def test_nothing_to_attend_to(attention, layout):
    check(attention, layout, 2, 3, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("n_biases", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_reference_over_random_ranges(attention, n_biases, seed):
    rng = np.random.default_rng(seed)
    n_queries, n_keys = (rng.choice([0, 1, 15, 16, 17, 40], 3) for _ in range(2))
    keys_of = np.repeat(n_keys, n_queries)
    bounds = np.sort(rng.integers(0, keys_of[:, None] + 1, (len(keys_of), 2 * (1 + seed % 3))), axis=1)
    offsets = (np.concatenate([[0], np.cumsum(n)]) for n in (n_queries, n_keys))
    layout = AttentionLayout(*offsets, bounds[:, ::2], bounds[:, 1::2])
    given, found = check(attention, layout, 2, 16, 20, n_biases)
    assert all(map(torch.equal, with_gradients(attention, layout, *given), found))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        PrefixLayout.causal([0, 1, 17, 50]),
        SequenceLayout([0, 20, 40], targets=20),
        SequenceLayout([0, 30, 60], context=[30, 0], targets=[0, 10], window=3, first=2),
    ],
    ids=["causal", "all targets", "windows"],
)
def test_no_leak(attention, layout):
    (q, k, v), biases, _ = drawn(layout, 2, 8, 8, 1)
    wanted = attention(q, k, v, layout, 0.4, biases)
    for query in (0, layout.n_queries // 2, layout.n_queries - 1):
        row = np.searchsorted(layout.q_offsets, query, "right") - 1
        hidden = np.ones(layout.n_keys, bool)
        for start, stop in zip(layout.starts[query], layout.stops[query], strict=True):
            hidden[layout.k_offsets[row] + start : layout.k_offsets[row] + stop] = False
        changed = [x.clone() for x in (q, k, v)]
        for x, rows in zip(changed, (np.arange(layout.n_queries) != query, hidden, hidden), strict=True):
            x[torch.from_numpy(rows)] = -7.0
        assert torch.equal(attention(*changed, layout, 0.4, biases)[query], wanted[query])
        k[int(np.flatnonzero(~hidden)[0])] += 1
        assert not torch.equal(attention(q, k, v, layout, 0.4, biases)[query], wanted[query])
        k = drawn(layout, 2, 8, 8, 1)[0][1]


def test_tensors_of_a_device_go_there(monkeypatch):
    """And tables of biases with them; where Triton is missing the error says what to install."""
    calls = []
    monkeypatch.setattr(on_cpu, "cuda_kernel", lambda name: lambda *given: calls.append((name, *given)))
    q = SimpleNamespace(device=torch.device("cuda"))
    on_cpu.hstu_attention(q, 1, 2, "layout", 0.5, ["bias"])
    assert calls == [("hstu_attention", q, 1, 2, "layout", 0.5, ["bias"])]

    def missing(name):
        raise ModuleNotFoundError(name, name="triton")

    monkeypatch.setattr(dispatch.importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"thinrow\[triton\]"):
        dispatch.cuda_kernel("hstu_attention")
    with pytest.raises(InputError, match="no kernel 'crc32c' of CUDA tensors"):
        dispatch.cuda_kernel("crc32c")


def test_another_type_is_refused(attention):
    x = torch.zeros(3, 1, 8, dtype=torch.float64)
    with pytest.raises(InputError, match=r"takes no torch\.float64"):
        attention(x, x, x, PrefixLayout.causal([0, 3]), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "backward_queries", "backward_keys"])
def test_compiles_for_a_gpu(name, tmp_path):
    """In a process of its own: here the kernels are those of the interpreter."""
    program = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from thinrow.kernels.triton import loops

loop = getattr(loops, sys.argv[1])
constants = dict(D=32, E=24, BLOCK_D=32, BLOCK_E=32, R=2, B=1, QUERIES=64, KEYS=64, NEED_TABLE=True)
ints = ("bounds", "blocks", "places_q", "places_k", "tables", "key_blocks")
tensors = ("q", "k", "v", "table", "out", "dout", "dq", "dk", "dv")
kinds = {"scale": "fp32", "sums": "*fp32", **dict.fromkeys(ints, "*i32"), **dict.fromkeys(tensors, "*bf16")}
given = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in loop.arg_names}
source = ASTSource(loop, given, constexprs={n: constants[n] for n in given if n in constants})
assert "cubin" in compile(source, target=GPUTarget("cuda", 90, 32)).asm
"""
    bare = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    place = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, name], check=True, timeout=300, env=bare | place)
