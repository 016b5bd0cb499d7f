"""Metrics: known values, extremes, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from thinrow.core.errors import InputError
from thinrow.training.metrics import (
    ProgressiveNE,
    auc,
    gauc,
    hit_rate,
    interval,
    log_loss,
    ndcg,
    normalized_entropy,
    single_feature_auc,
)

LOGITS, LABELS, GROUP = [2.0, 0.0, 0.0, -1.0], [1, 0, 1, 0], [7, 7, 8, 8]


def test_the_worked_example() -> None:
    assert log_loss(LOGITS, LABELS) == pytest.approx(0.457, abs=5e-4)
    assert normalized_entropy(LOGITS, LABELS) == pytest.approx(0.659, abs=5e-4)
    assert auc(LOGITS, LABELS) == 3.5 / 4
    assert gauc(LOGITS, LABELS, GROUP) == 1.0


def test_no_logit_is_too_large() -> None:
    assert log_loss([1e300, -1e300, np.inf, -np.inf], [1, 0, 1, 0]) == 0
    assert log_loss([-800.0], [1]) == 800
    assert log_loss([np.inf], [0]) == math.inf
    assert log_loss([-40.0], [0]) == pytest.approx(math.exp(-40), rel=1e-12)
    assert log_loss([0.0, 1.0], [0, 1], probabilities=True) == 0
    assert log_loss([0.0], [1], probabilities=True) == math.inf
    # In float32 the sum of so many would lose digits.
    assert log_loss(np.zeros(1 << 20, np.float32), np.ones(1 << 20)) == math.log(2)


@pytest.mark.parametrize("kind", [bool, np.int8, np.int64, np.uint8, np.float32])
def test_labels_of_every_kind(kind: Any) -> None:
    assert auc(LOGITS, np.array(LABELS, kind)) == 3.5 / 4


def test_large_auc_is_exact() -> None:
    # 300,000 positives and as many negatives at alternating scores: positive i beats negatives 0 to i - 1.
    n = 300_000
    assert auc(np.arange(2 * n), np.arange(2 * n) % 2 == 0) == (n - 1) / (2 * n)


def test_gauc_weights() -> None:
    # User 1: 3 candidates, AUC 1. User 2: 4 candidates, 2 clicks, AUC 0.25. User 3: no click.
    scores, labels = [3, 2, 1, 4, 3, 2, 1, 0, 9], [1, 0, 0, 0, 1, 0, 1, 0, 0]
    users = [1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert gauc(scores, labels, users) == pytest.approx((3 * 1 + 4 * 0.25) / 7)
    assert gauc(scores, labels, users, "clicks") == pytest.approx((1 * 1 + 2 * 0.25) / 3)
    assert gauc(scores, labels, users, "none") == pytest.approx((1 + 0.25) / 2)


def test_ranking_by_hand() -> None:
    # Request 0 has its positives at places 2 and 4, request 2 none, request 3 its one at place 1; request 1 is empty.
    scores, labels = [9, 8, 7, 6, 5, 4, 3, 1], [0, 1, 0, 1, 0, 0, 1, 0]
    offsets = [0, 4, 4, 6, 8]
    assert [hit_rate(scores, labels, offsets, k) for k in (1, 2, 9)] == [0.5, 1, 1]
    first = (1 / math.log2(3) + 1 / math.log2(5)) / (1 + 1 / math.log2(3))
    assert ndcg(scores, labels, offsets, 4) == pytest.approx((first + 1) / 2)
    assert ndcg(scores, labels, offsets, 1) == 0.5
    # A model that gives all the same score gets what chance gets.
    assert hit_rate(np.zeros(1000), np.arange(1000) < 10, [0, 1000], 1) == pytest.approx(0.01)
    assert hit_rate(np.zeros(1000), np.arange(1000) < 10, [0, 1000], 991) == 1


def test_progressive_entropy() -> None:
    so_far = ProgressiveNE()
    assert math.isnan(so_far.value)
    so_far.add([1.0], [1])
    assert math.isnan(so_far.value)
    so_far.add([-1.0, 0.5], [0, 1])
    assert so_far.value == pytest.approx(normalized_entropy([1.0, -1.0, 0.5], [1, 0, 1]))
    with pytest.raises(InputError, match="1 of 2 are NaN"):
        so_far.add([np.nan, 1.0], [1, 0])
    assert ProgressiveNE.from_state(json.loads(json.dumps(so_far.state()))) == so_far
    for state in ({}, {"cross_entropy": 0.0, "count": "x", "positives": 0}):
        with pytest.raises(InputError, match="pass what state"):
            ProgressiveNE.from_state(state)
    with pytest.raises(InputError, match="3 positives of 2 examples"):
        ProgressiveNE.from_state({"cross_entropy": 0.0, "count": 2, "positives": 3})


def test_labels_that_can_be_read_off_one_column() -> None:
    rng = np.random.default_rng(0)
    n = 20_000
    labels, train = rng.random(n) < 0.3, np.arange(n) < n // 2
    columns: dict[str, Any] = {
        "noise": rng.normal(size=n),
        "ids": rng.integers(-(2**63), 2**63 - 1, n),
        "shop": rng.integers(0, 50, n),
    }
    quiet = single_feature_auc(columns, labels, train)
    assert quiet.auc < 0.53
    assert quiet.each["ids"] < 0.52
    leaks = {
        "falling": np.where(labels, 0.0, 1.0) + rng.normal(size=n) / 100,
        "hashed": np.array([77, -3, 5, 12])[2 * labels + rng.integers(0, 2, n)],
        "far from 0": np.where(labels, 2.0, 0.5) * rng.choice([-1, 1], n) + rng.normal(size=n) / 100,
        "flag": labels,
    }
    for name, column in leaks.items():
        found = single_feature_auc(columns | {name: column}, labels, train)
        assert found.name == name
        assert found.auc > 0.99
        assert found.each == quiet.each | {name: found.auc}


@pytest.mark.parametrize(
    ("n", "t"),
    [(2, 12.706205), (3, 4.302653), (4, 3.182446), (5, 2.776445), (11, 2.228139), (31, 2.042272), (101, 1.983972)],
)
def test_interval_follows_the_tables(n: int, t: float) -> None:
    values = np.arange(n) * 2.0
    mean, half = interval(values)
    assert mean == n - 1
    assert half == pytest.approx(t * values.std(ddof=1) / math.sqrt(n), rel=1e-6)


def test_interval_of_one_and_of_many() -> None:
    mean, half = interval([0.7])
    assert mean == 0.7
    assert math.isnan(half)
    assert interval([3, 3, 3]) == (3, 0)
    _, half = interval(np.tile([-1.0, 1.0], 50_000))
    assert half == pytest.approx(1.959964 / math.sqrt(1e5), rel=1e-4)


def test_an_interval_holds_the_mean_19_times_in_20() -> None:
    draws = np.random.default_rng(0).normal(size=(4000, 4))
    held = [abs(mean) <= half for mean, half in map(interval, draws)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.01)


NAN = [1.0, np.nan, np.nan, 0.0]
BOTH: list[Callable[..., Any]] = [auc, lambda s, y: gauc(s, y, np.zeros(len(y), int)), normalized_entropy]
RANKING: list[Callable[..., Any]] = [
    lambda s, y: hit_rate(s, y, [0, len(y)], 1),
    lambda s, y: ndcg(s, y, [0, len(y)], 1),
]


@pytest.mark.parametrize("metric", [log_loss, *BOTH, *RANKING])
def test_scores_and_labels_that_cannot_be_used(metric: Callable[..., Any]) -> None:
    for scores, labels, message in [
        ([], [], "the evaluation set is empty: evaluate one example or more"),
        (NAN, LABELS, "2 of 4 are NaN; of a model that diverged lower the learning rate"),
        (LOGITS, [0, 1, 2, -1], "2 of 4 labels, 2 first, are not 0 or 1"),
        (LOGITS, [0, 1, np.nan, 1], "1 of 4 labels, nan first"),
        (LOGITS, ["a"] * 4, "labels are <U1; pass numbers"),
        (LOGITS, [[0, 1]] * 2, r"labels of shape \(2, 2\)"),
        (LOGITS[:3], LABELS, r"float64\(3,\) for \(4,\) labels; pass one number a label"),
        (["a"] * 4, LABELS, "<U1"),
    ]:
        with pytest.raises(InputError, match=message):
            metric(np.array(scores), np.array(labels))


@pytest.mark.parametrize("metric", BOTH)
@pytest.mark.parametrize("label", [0, 1])
def test_one_class_only(metric: Callable[..., Any], label: int) -> None:
    with pytest.raises(InputError, match=r"of 4 labels are positive; both classes are needed|none of the 1 groups"):
        metric(LOGITS, [label] * 4)
    assert log_loss(LOGITS, [label] * 4) > 0
    assert normalized_entropy(LOGITS, [label] * 4, prior=0.5) == log_loss(LOGITS, [label] * 4) / math.log(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: log_loss([0.5, 1.5], [0, 1], probabilities=True), r"probability 1.5 is not within \[0, 1\]"),
        (lambda: normalized_entropy(LOGITS, LABELS, prior=1.0), "the prior is 1.0; it must lie between 0 and 1"),
        (lambda: gauc(LOGITS, LABELS, [1, 2]), r"int64\(2,\) for \(4,\) scores"),
        (lambda: gauc(LOGITS, LABELS, [0.5] * 4), "pass an integer or string a score"),
        (lambda: gauc(LOGITS, LABELS, GROUP, "likes"), "no weight 'likes'; there are impressions, clicks, none"),  # type: ignore[arg-type]
        (lambda: gauc(LOGITS, LABELS, [1, 2, 3, 4]), "none of the 4 groups has positives and negatives; group by user"),
        (lambda: hit_rate(LOGITS, LABELS, [0, 3], 1), "rise from 0 to the 4 candidates"),
        (lambda: hit_rate(LOGITS, LABELS, [0, 3, 2, 4], 1), "rise from 0 to the 4 candidates"),
        (lambda: hit_rate(LOGITS, LABELS, [0.0, 4.0], 1), "must be integers"),
        (lambda: ndcg(LOGITS, LABELS, [0, 4], 0), "k is 0; it must be 1 or more"),
        (lambda: ndcg(LOGITS, [0] * 4, [0, 4], 1), "none of the 4 candidates is positive"),
        (lambda: single_feature_auc({}, LABELS, [True] * 4), "there is no column"),
        (
            lambda: single_feature_auc({"a": LOGITS}, LABELS, [1, 1, 0, 0]),
            r"train_mask is int64\(4,\); pass \(4,\) bool",
        ),
        (
            lambda: single_feature_auc({"a": LOGITS}, LABELS, [True] * 4),
            "0 of 0 labels are positive.*split the examples",
        ),
        (lambda: single_feature_auc({"a": NAN}, LABELS, np.array(GROUP) == 7), "column 'a': 2 of 4 are NaN"),
        (lambda: single_feature_auc({"a": LOGITS}, LABELS, np.array(GROUP) == 7, 0), "smoothing is 0"),
        (lambda: interval([]), "pass a figure of each seed"),
        (lambda: interval([1.0, math.inf]), "1 of 2 values are not finite"),
    ],
)
def test_other_arguments_that_cannot_be_used(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
