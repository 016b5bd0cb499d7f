"""A plan in one pass equals its steps one by one, in plain Python, in every backend and on tensors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from thinrow.core.errors import InputError
from thinrow.core.wrap import MASK64, mix64
from thinrow.features import (
    Bucketize,
    Clip,
    Cross,
    DictionaryMap,
    FeaturePlan,
    Fill,
    Hash,
    Log1p,
    Mod,
    MultiHash,
    Source,
    TimeDelta,
)
from thinrow.features.tensors import apply_tensors
from thinrow.jagged import Column
from thinrow.kernels import use
from thinrow.kernels.chain import INT, TUPLE

X = Source("cand.x")
DTYPES = [np.dtype(n) for n in ("int8", "int16", "int32", "int64", "float32", "float64")]
numbers = st.integers(-(2**62), 2**62) | st.integers(-3, 3) | st.floats(-100, 100).map(lambda v: round(v, 2))


@st.composite
def columns(draw):
    dtype = draw(st.sampled_from(DTYPES))
    if dtype.kind == "f":
        width = dtype.itemsize * 8
        elements = st.floats(width=width) | st.floats(-5, 5, width=width) | st.integers(-3, 3).map(float)
    else:
        ends = np.iinfo(dtype)
        elements = st.integers(int(ends.min), int(ends.max)) | st.integers(-3, 3)
    values = draw(hnp.arrays(dtype, draw(st.sampled_from([0, 1, 7, 600])), elements=elements))
    valid = draw(st.none() | hnp.arrays(np.bool_, len(values)))
    return Column(values if valid is None else np.where(valid, values, dtype.type(0)), valid)


@st.composite
def steps(draw, below, dtype):
    """A step on one of ``dtype``, with the dtype of its result."""
    seed = draw(st.integers(0, 2**63 - 1))
    divisor = draw(st.integers(1, 2**63 - 1) | st.integers(1, 100) | st.integers(0, 62).map(lambda p: 2**p))
    kinds = ["bucketize", "clip", "log1p"] + (["hash", "mod", "map"] if dtype.kind == "i" else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "hash":
        return Hash(below, draw(st.none() | st.just(divisor)), seed), np.dtype(np.int64)
    if kind == "mod":
        return Mod(below, divisor), np.dtype(np.int64)
    if kind == "map":
        keys = draw(
            st.lists(st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1), min_size=1, unique=True, max_size=5)
        )
        return DictionaryMap(below, {k: draw(st.integers(-9, 9)) for k in keys}, 77), np.dtype(np.int64)
    if kind == "bucketize":
        bounds = draw(st.lists(numbers, min_size=1, max_size=5, unique_by=float))
        return Bucketize(below, tuple(sorted(bounds, key=float)), draw(st.sampled_from(["left", "right"]))), np.dtype(
            "i4"
        )
    if kind == "log1p":
        return Log1p(below), np.dtype(np.float32)
    low, high = sorted([draw(st.integers(-100, 0)), draw(st.integers(0, 100) | st.floats(0, 100))])
    return Clip(below, low, high), dtype


@st.composite
def plans(draw, dtype):
    """Named steps of a column of ``dtype``, some on others."""
    made = [(X, dtype)]
    for _ in range(draw(st.integers(1, 6))):
        below, below_dtype = draw(st.sampled_from(made))
        made.append(draw(steps(below, below_dtype)))
    outputs = {f"o{i}": node for i, (node, _) in enumerate(made[1:]) if i == 0 or draw(st.booleans())}
    whole = [node for node, d in made if d.kind == "i"]
    if whole and draw(st.booleans()):
        outputs["many"] = MultiHash(draw(st.sampled_from(whole)), draw(st.integers(1, 50)), (1, 2, 3))
    if whole and draw(st.booleans()):
        outputs["pair"] = Cross((whole[0], whole[-1]), draw(st.none() | st.integers(1, 50)), 5)
    if draw(st.booleans()):
        outputs["filled"] = Fill(made[-1][0], 3)
    return FeaturePlan(outputs)


def hash_of(value, seed, buckets):
    hashed = mix64(mix64((seed + INT) & MASK64) ^ (value & MASK64))
    return signed(hashed) if buckets is None else hashed % buckets


def signed(word):
    return word - 2**64 if word >= 2**63 else word


def one(node, value, dtype):
    """The value of an elementwise step of one value, and its dtype, by the words of its docstring."""
    below, dtype = (value, dtype) if node.input is X else one(node.input, value, dtype)
    if isinstance(node, Hash):
        return hash_of(below, node.seed, node.buckets), np.dtype(np.int64)
    if isinstance(node, Mod):
        return (below & MASK64) % node.divisor, np.dtype(np.int64)
    if isinstance(node, MultiHash):
        return [hash_of(below, s, node.buckets) for s in node.seeds], np.dtype(np.int64)
    if isinstance(node, DictionaryMap):
        return dict(node.entries).get(below, node.other), np.dtype(np.int64)
    if isinstance(node, Bucketize):
        if math.isnan(below):
            return len(node.boundaries), np.dtype(np.int32)
        bounds = [float(b) if dtype.kind == "f" else b for b in node.boundaries]
        return sum(b < below or (b == below and node.side == "right") for b in bounds), np.dtype(np.int32)
    if isinstance(node, Log1p):
        with np.errstate(all="ignore"):
            return float(np.float32(np.log1p(np.float64(below)))), np.dtype(np.float32)
    assert isinstance(node, Clip)
    low, high = (dtype.type(b) if dtype.kind == "f" else b for b in (node.low, node.high))
    if dtype.kind == "f":
        return float(low if below < low else high if below > high else below), dtype
    return min(max(below, math.ceil(low)), math.floor(high)), dtype


def expected(node, column):
    values, valid = column.values.tolist(), column.valid
    made = []
    for i, value in enumerate(values):
        null = valid is not None and not valid[i]
        if isinstance(node, Fill):
            made.append(3 if null else value if node.input is X else one(node.input, value, column.values.dtype)[0])
        elif null:
            made.append([0] * 3 if isinstance(node, MultiHash) else 0)
        elif isinstance(node, Cross):
            h = mix64((node.seed + TUPLE) & MASK64)
            for side in node.inputs:
                part = value if side is X else one(side, value, column.values.dtype)[0]
                h = mix64(h ^ (hash_of(part, 0, None) & MASK64))
            made.append(signed(h) if node.buckets is None else h % node.buckets)
        else:
            made.append(one(node, value, column.values.dtype)[0])
    return made


def same(found, wanted, exact):
    found = np.asarray(found)
    wanted = np.asarray(wanted, found.dtype).reshape(found.shape)
    if found.dtype.kind == "f" and not exact:
        # The oracle's logarithm is the machine's: it may round the other way.
        np.testing.assert_array_max_ulp(found.astype(np.float32), wanted.astype(np.float32), 1)
        return
    assert np.array_equal(found, wanted, equal_nan=found.dtype.kind == "f")


def has(node, kind):
    return isinstance(node, kind) or any(has(o, kind) for o in node.operands)


@given(st.data(), columns())
@settings(max_examples=150)
def test_one_pass_equals_each_step_alone(data, column):
    plan = data.draw(plans(column.values.dtype))
    outputs = []
    for backend in ("numba", "reference"):
        with use(backend):
            outputs.append(plan.apply({"cand.x": column}))
    valid = {} if column.valid is None else {"cand.x": torch.from_numpy(column.valid)}
    tensors = apply_tensors(plan, {"cand.x": torch.from_numpy(column.values.copy())}, valid)
    again = FeaturePlan.from_dict(plan.to_dict()).apply({"cand.x": column})
    for name, node in plan.outputs.items():
        fast = outputs[0][name]
        for other in (outputs[1][name], again[name]):
            assert fast.values.dtype == other.values.dtype
            same(fast.values, other.values, exact=True)
            assert (fast.valid is None) == (other.valid is None)
        values, mask = tensors[name]
        assert values.numpy().dtype == fast.values.dtype
        same(fast.values, values.numpy(), exact=True)
        assert (mask is None) == (fast.valid is None)
        # A logarithm that the oracle rounds otherwise may fall in another bucket.
        if not any(has(o, Log1p) for o in node.operands):
            same(fast.values, expected(node, column), exact=not isinstance(node, Log1p))


@given(st.integers(1, 2**63 - 1) | st.integers(1, 99), hnp.arrays(np.int64, 50))
@settings(max_examples=200)
def test_remainders_of_unsigned_words(divisor, values):
    column = Column(np.append(values, [-1, 0, divisor - 1, -divisor]))
    out = FeaturePlan({"m": Mod(X, divisor)}).apply({"cand.x": column})["m"].values
    assert out.tolist() == [(v & MASK64) % divisor for v in column.values.tolist()]


@pytest.mark.parametrize("dtype", ["int64", "float64"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_many_boundaries_are_searched(dtype, side):
    boundaries = np.unique(np.random.default_rng(0).integers(-(10**6), 10**6, 300))
    values = np.concatenate([boundaries, boundaries + 1, [-(2**62), 2**62]]).astype(dtype)
    if dtype == "float64":
        values = np.append(values, [np.nan, np.inf, -np.inf])
    out = FeaturePlan({"b": Bucketize(X, tuple(boundaries.tolist()), side)}).apply({"cand.x": Column(values)})["b"]
    assert out.values.tolist() == np.searchsorted(boundaries, values, side).tolist()


@given(hnp.arrays(np.float64, 200, elements=st.floats(-1, 1e300) | st.floats(-1e-3, 1e-3)))
@settings(max_examples=100)
def test_the_logarithm_is_right_to_the_last_bit_of_float32(values):
    out = FeaturePlan({"l": Log1p(X)}).apply({"cand.x": Column(values)})["l"].values
    with np.errstate(all="ignore"):
        np.testing.assert_array_max_ulp(out, np.log1p(values).astype(np.float32), 1)


def test_times_and_context_beside_candidates_on_tensors():
    age = TimeDelta(Source("cand.published"), Source("ctx.request_ts"), "h")
    plan = FeaturePlan({"age": Bucketize(age, (0, 1, 24)), "pair": Cross((X, Source("ctx.store")), 9)})
    sources = {"cand.published": [0, 3_600_000, 10], "ctx.request_ts": [3_600_000, 7_199_999], "cand.x": [5, 6, 5]}
    sources["ctx.store"] = [1, 2]
    tensors = {n: torch.tensor(v) for n, v in sources.items()}
    rows = torch.tensor([0, 0, 1])
    out = apply_tensors(plan, tensors, request=rows)
    beside = {n: Column(np.array(v)[rows] if n.startswith("ctx") else np.array(v)) for n, v in sources.items()}
    wanted = plan.apply(beside)
    assert out["age"][0].tolist() == wanted["age"].values.tolist() == [2, 1, 2]
    assert out["pair"][0].tolist() == wanted["pair"].values.tolist()
    with pytest.raises(InputError, match="give request, the row of each candidate"):
        apply_tensors(plan, tensors)
    with pytest.raises(InputError, match=r"reads 'cand\.published', which is not there"):
        apply_tensors(plan, {})
