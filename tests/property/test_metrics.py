"""Every metric equals a slow, obvious count."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from thinrow.training.metrics import (
    ProgressiveNE,
    auc,
    gauc,
    hit_rate,
    log_loss,
    ndcg,
    normalized_entropy,
    single_feature_auc,
)

logits = st.floats(-800, 800) | st.sampled_from([0.0, -0.0, 1.0, -1.0])
#: Few values, so that there are ties.
scores = st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 0.25, 3.0, np.inf])
labels = st.integers(0, 1)


def pairwise(rows) -> Fraction | None:
    """AUC of (score, label) pairs by definition; None where a class is missing."""
    pairs = [(p, n) for p, y in rows if y for n, z in rows if not z]
    if not pairs:
        return None
    return sum(Fraction(2 * (p > n) + (p == n), 2) for p, n in pairs) / len(pairs)


def cross_entropy(z: float, y: int) -> float:
    margin = z if y else -z
    return math.log1p(math.exp(-margin)) if margin > -700 else -margin


@given(st.lists(st.tuples(logits, labels), min_size=1, max_size=30))
def test_log_loss(rows):
    z, y = zip(*rows, strict=True)
    expected = math.fsum(cross_entropy(*row) for row in rows) / len(rows)
    assert math.isclose(log_loss(z, y), expected, rel_tol=1e-13, abs_tol=1e-300)
    near = [1 / (1 + math.exp(-max(min(v, 30), -30))) for v in z]
    clipped = [max(min(v, 30), -30) for v in z]
    assert math.isclose(log_loss(near, y, probabilities=True), log_loss(clipped, y), rel_tol=1e-2)


@given(st.lists(st.tuples(logits, labels), min_size=2, max_size=30), st.floats(0.01, 0.99))
def test_normalized_entropy(rows, prior):
    z, y = zip(*rows, strict=True)
    mean = math.fsum(cross_entropy(*row) for row in rows) / len(rows)
    entropy = -prior * math.log(prior) - (1 - prior) * math.log(1 - prior)
    assert math.isclose(normalized_entropy(z, y, prior), mean / entropy, rel_tol=1e-12)
    assume(0 < sum(y) < len(y))
    rate = sum(y) / len(y)
    assert normalized_entropy(z, y) == normalized_entropy(z, y, rate)
    # Always predicting the base rate is worth 1.
    constant = [math.log(rate / (1 - rate))] * len(y)
    assert math.isclose(normalized_entropy(constant, y), 1, rel_tol=1e-12)


@given(st.lists(st.tuples(scores, labels), min_size=2, max_size=40))
def test_auc_is_the_share_of_pairs(rows):
    expected = pairwise(rows)
    assume(expected is not None)
    x, y = zip(*rows, strict=True)
    assert auc(x, y) == float(expected)
    assert auc(-np.array(x), y) == float(1 - expected)
    assert auc(x, 1 - np.array(y)) == float(1 - expected)


@given(st.lists(st.tuples(st.sampled_from([2**63 - 1, 2**63 - 2, -(2**63), 0]), labels), min_size=2, max_size=20))
def test_auc_of_integers_that_no_float_tells_apart(rows):
    expected = pairwise(rows)
    assume(expected is not None)
    assert auc(*zip(*rows, strict=True)) == float(expected)


@given(st.lists(st.tuples(scores, labels, st.integers(-2, 2)), min_size=1, max_size=40))
def test_gauc_is_the_mean_over_groups(rows):
    groups = {g: [(x, y) for x, y, h in rows if h == g] for _, _, g in rows}
    aucs = {g: pairwise(members) for g, members in groups.items()}
    used = [g for g, a in aucs.items() if a is not None]
    assume(used)
    x, y, g = zip(*rows, strict=True)
    weights = {
        "impressions": {h: len(groups[h]) for h in used},
        "clicks": {h: sum(b for _, b in groups[h]) for h in used},
        "none": dict.fromkeys(used, 1),
    }
    for name, of in weights.items():
        expected = sum(of[h] * aucs[h] for h in used) / sum(of.values())
        ids = [list(g), [f"user {h}" for h in g], np.array([f"ü{h}" for h in g], object)]
        for group in ids:
            assert math.isclose(gauc(x, y, group, name), expected, rel_tol=1e-12, abs_tol=1e-15)


requests = st.lists(st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 2.5]), labels), max_size=5), min_size=1, max_size=5)


@given(requests, st.integers(1, 7))
@settings(max_examples=60)
def test_ranking_metrics_are_means_over_every_order_of_ties(rows, k):
    hits, gains = [], []
    for request in rows:
        positives = sum(y for _, y in request)
        if not positives:
            continue
        best = sum(1 / math.log2(i + 2) for i in range(min(k, positives)))
        # Every order that is sorted by score: the sort is stable.
        orders = [sorted(o, key=lambda c: -c[0]) for o in itertools.permutations(request)]
        hits.append(np.mean([any(y for _, y in o[:k]) for o in orders]))
        gains.append(np.mean([sum(y / math.log2(i + 2) for i, (_, y) in enumerate(o[:k])) / best for o in orders]))
    assume(hits)
    flat = [c for request in rows for c in request]
    offsets = np.cumsum([0, *(len(request) for request in rows)])
    x, y = zip(*flat, strict=True)
    assert math.isclose(hit_rate(x, y, offsets, k), np.mean(hits), rel_tol=1e-12, abs_tol=1e-12)
    assert math.isclose(ndcg(x, y, offsets, k), np.mean(gains), rel_tol=1e-12, abs_tol=1e-12)


batches = st.lists(st.lists(st.tuples(logits, labels), min_size=1, max_size=8), min_size=1, max_size=8)


@given(batches, st.integers(0, 8))
def test_progressive_entropy_resumes_bit_for_bit(parts, cut):
    through, resumed = ProgressiveNE(), ProgressiveNE()
    for i, part in enumerate(parts):
        z, y = zip(*part, strict=True)
        if i == cut:
            resumed = ProgressiveNE.from_state(json.loads(json.dumps(resumed.state())))
        through.add(z, y)
        resumed.add(z, y)
        assert resumed.state() == through.state()
    z, y = zip(*itertools.chain.from_iterable(parts), strict=True)
    if 0 < sum(y) < len(y):
        assert math.isclose(through.value, normalized_entropy(z, y), rel_tol=1e-12)
        assert resumed.value == through.value
    else:
        assert math.isnan(through.value)


# Three of seven are positive where the value is 0, as in all of the train part: a tie that rounding must not break.
@example([(0, 0, False), *[(0, y, True) for y in (0, 0, 0, 0, 1, 1, 1)], (1, 1, False), (-1, 1, False)], 5.421875)
@given(st.lists(st.tuples(st.integers(-3, 3), labels, st.booleans()), min_size=4, max_size=40), st.floats(0.1, 9))
def test_single_feature_means(rows, smoothing):
    train = [(v, y) for v, y, t in rows if t]
    rest = [(v, y) for v, y, t in rows if not t]
    assume(0 < sum(y for _, y in train) < len(train))
    rate, exact = Fraction(sum(y for _, y in train), len(train)), Fraction(smoothing)

    def mean(value: int) -> Fraction:
        seen = [y for v, y in train if v == value]
        return (sum(seen) + exact * rate) / (len(seen) + exact)

    plain = pairwise(rest)
    assume(plain is not None)
    expected = max(plain, 1 - plain, pairwise([(mean(v), y) for v, y in rest]))
    value, y, mask = map(np.array, zip(*rows, strict=True))
    found = single_feature_auc({"keys": value, "nothing": np.zeros(len(rows))}, y, mask, smoothing)
    assert math.isclose(found.each["keys"], expected)
    assert found.each["nothing"] == 0.5
    assert found.auc == max(found.each.values())
