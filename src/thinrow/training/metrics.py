"""How good predictions are: cross entropy and NE, AUC and GAUC, hit rate and NDCG; NumPy in float64, whole arrays.

Worked example, four candidates of two requests::

    logits   [2.0, 0.0, 0.0, -1.0]      labels [1, 0, 1, 0]      group [7, 7, 8, 8]
    log_loss = mean(0.127, 0.693, 0.693, 0.313)            = 0.457
    normalized_entropy = 0.457 / 0.693 (base rate 1/2)     = 0.659
    auc: of 4 pairs (positive, negative) 3 are in order and one is tied     = 3.5 / 4
    gauc: both groups have their pair in order             = 1.0

Scores that tie count as the mean over every order of them, so that no metric depends on the order of its input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

#: Into how many ranges of equal counts ``single_feature_auc`` cuts a column of floats.
_RANGES = 64


def log_loss(scores: npt.ArrayLike, labels: npt.ArrayLike, *, probabilities: bool = False) -> float:
    """Mean cross entropy in nats: the mean of ``-log p`` of the positives and ``-log(1 - p)`` of the negatives.

    Of a logit z, ``-log p = log(1 + exp(-z))``, computed without overflow; an infinite logit or a probability of 0 or 1
    on the wrong side gives infinity.

    Args:
        scores: (n,) logits, or with ``probabilities`` numbers from 0 to 1.
        labels: (n,) of 0 and 1.

    Raises:
        InputError: nothing to evaluate, a NaN, a probability beyond [0, 1], a label other than 0 and 1.
    """
    return float(_cross_entropy(scores, labels, probabilities)[0].mean())


def normalized_entropy(logits: npt.ArrayLike, labels: npt.ArrayLike, prior: float | None = None) -> float:
    """NE = mean cross entropy / ``-(p log p + (1 - p) log(1 - p))``, where p is the base rate of the labels.

    1 is as good as always predicting p, lower is better. He et al., "Practical lessons from predicting clicks on ads
    at Facebook" (ADKDD 2014), equation 1.

    Args:
        logits: (n,).
        labels: (n,) of 0 and 1.
        prior: where given, p in place of the labels' own rate: for a part of a stream, the rate of the whole.

    Raises:
        InputError: as ``log_loss``; one class only and no prior; a prior that is not within (0, 1).
    """
    losses, positive = _cross_entropy(logits, labels, False)
    if prior is None:
        _both_classes(positive, "pass the prior, or evaluate more examples")
        prior = float(positive.mean())
    if not 0 < prior < 1:
        raise InputError(f"the prior is {prior}; it must lie between 0 and 1, both exclusive: pass a base rate")
    return float(losses.mean()) / _entropy(prior)


def auc(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Area under the ROC curve: the share of pairs (positive, negative) in which the positive has the higher score.

    A tie counts one half. ``U / (P N)`` with the Mann-Whitney statistic U by ranks (Hanley and McNeil 1982). U is
    counted in integers, so the result is the exact fraction, rounded once.

    Args:
        scores: (n,) integers or floats, infinite ones allowed.
        labels: (n,) of 0 and 1.

    Raises:
        InputError: nothing to evaluate, one class only, a NaN, a label other than 0 and 1.
    """
    values, positive = _pair(scores, labels)
    _both_classes(positive, "evaluate more examples")
    twice, positives, negatives = _twice_in_order(values, positive, np.zeros(len(values), np.int8))
    return int(twice[0]) / int(2 * positives[0] * negatives[0])


def gauc(
    scores: npt.ArrayLike,
    labels: npt.ArrayLike,
    group: npt.ArrayLike,
    weight: Literal["impressions", "clicks", "none"] = "impressions",
) -> float:
    """AUC within each group, averaged: ``sum(w_g AUC_g) / sum(w_g)`` over the groups that have both classes.

    Zhou et al., "Deep interest network for click-through rate prediction" (KDD 2018), equation 7, where groups are
    users and weights their impressions or clicks.

    Args:
        scores: (n,) integers or floats.
        labels: (n,) of 0 and 1.
        group: (n,) ids of users or requests, integers or strings, in any order.
        weight: of a group: its candidates, its positives, or 1.

    Raises:
        InputError: as ``auc``; no group has both classes.
    """
    values, positive = _pair(scores, labels)
    ids = np.asarray(group)
    if ids.shape != values.shape or ids.dtype.kind not in "biuUSO":
        raise InputError(f"groups: {ids.dtype}{ids.shape} for {values.shape} scores; pass an integer or string a score")
    if ids.dtype.kind == "O":
        ids = np.unique(ids, return_inverse=True)[1].reshape(-1)
    twice, positives, negatives = _twice_in_order(values, positive, ids)
    both = (positives > 0) & (negatives > 0)
    if not both.any():
        raise InputError(
            f"none of the {len(both)} groups has positives and negatives; group by user in place of request, or "
            "evaluate more examples"
        )
    weights = {"impressions": positives + negatives, "clicks": positives, "none": np.ones(len(both))}
    if weight not in weights:
        raise InputError(f"no weight {weight!r}; there are {', '.join(weights)}")
    each = twice[both] / (2 * positives[both] * negatives[both])
    return float(np.average(each, weights=weights[weight][both]))


def hit_rate(scores: npt.ArrayLike, labels: npt.ArrayLike, offsets: npt.ArrayLike, k: int) -> float:
    """Share of requests with a positive among their k candidates of highest score.

    Of candidates that tie at place k, all choices are equally likely: of m with p positives and s places, the chance
    of none is ``C(m - p, s) / C(m, s)``. Requests without a positive are left out.

    Args:
        scores: (n,) integers or floats, the candidates of one request after those of another.
        labels: (n,) of 0 and 1.
        offsets: (R + 1,) integers, request r has the candidates ``[offsets[r], offsets[r + 1])``; it may have none.
        k: 1 or more.

    Raises:
        InputError: as ``auc``; no request has a positive, offsets that do not fit, a k below 1.
    """
    ties = _ties(scores, labels, offsets, k)
    size, positives, places = ties.size, ties.positives, np.clip(k - ties.first, 0, ties.size)
    log_factorial = np.cumsum(np.log(np.maximum(np.arange(size.max() + 1), 1)))
    rest = size - positives
    possible = places <= rest
    chosen = np.where(possible, places, 0)
    chance = log_factorial[rest] - log_factorial[rest - chosen] - (log_factorial[size] - log_factorial[size - chosen])
    none = np.where(possible, np.exp(chance), 0.0)
    missed = np.multiply.reduceat(none, ties.request_start)
    return float(np.mean(1 - missed[ties.request_positives > 0]))


def ndcg(scores: npt.ArrayLike, labels: npt.ArrayLike, offsets: npt.ArrayLike, k: int) -> float:
    """Mean over requests of ``DCG@k / best DCG@k``, DCG@k = sum over places i = 1 to k of ``label_i / log2(i + 1)``.

    Järvelin and Kekäläinen 2002; candidates that tie share the mean of their places' discounts (McSherry and Najork
    2008). Requests without a positive are left out. Arguments and errors as ``hit_rate``.
    """
    ties = _ties(scores, labels, offsets, k)
    last = int(max((ties.first + ties.size).max(), ties.request_positives.max()))
    discount = np.zeros(last + 1)
    discount[1:] = np.where(np.arange(last) < k, 1 / np.log2(np.arange(last) + 2), 0)
    total = np.cumsum(discount)
    gain = ties.positives * (total[ties.first + ties.size] - total[ties.first]) / ties.size
    shown = ties.request_positives > 0
    return float(np.mean(np.add.reduceat(gain, ties.request_start)[shown] / total[ties.request_positives[shown]]))


@dataclass
class ProgressiveNE:
    """NE of batches that were each predicted *before* the model trained on them, over all of them so far.

    Worked example::

        so_far = ProgressiveNE()
        for batch in batches:
            so_far.add(model(batch), batch.labels)      # then one step of training on it
        so_far.value

    Attributes:
        cross_entropy: sum over examples, in nats.
        count: number of examples.
        positives: how many of them have label 1.
    """

    cross_entropy: float = 0.0
    count: int = 0
    positives: int = 0

    def add(self, logits: npt.ArrayLike, labels: npt.ArrayLike) -> None:
        """Count one batch, (n,) logits and labels; of one class only is fine.

        Raises:
            InputError: as ``log_loss``; nothing is counted then.
        """
        losses, positive = _cross_entropy(logits, labels, False)
        self.add_sums(float(losses.sum()), len(losses), int(positive.sum()))

    def add_sums(self, cross_entropy: float, count: float, positives: float) -> None:
        """Count batches of which these are the sums, as another rank's ``cross_entropy``, ``count``, ``positives``."""
        self.cross_entropy += float(cross_entropy)
        self.count += int(count)
        self.positives += int(positives)

    @property
    def value(self) -> float:
        """Mean cross entropy over the entropy of the base rate so far; NaN until both classes were seen."""
        if not 0 < self.positives < self.count:
            return math.nan
        return self.cross_entropy / self.count / _entropy(self.positives / self.count)

    def state(self) -> dict[str, float | int]:
        """JSON-ready; ``from_state`` of it goes on bit for bit."""
        return {"cross_entropy": self.cross_entropy, "count": self.count, "positives": self.positives}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ProgressiveNE:
        """Reverse of ``state``.

        Raises:
            InputError: it is none.
        """
        try:
            found = cls(float(state["cross_entropy"]), int(state["count"]), int(state["positives"]))
        except (KeyError, TypeError, ValueError) as e:
            raise InputError(f"{state!r} is no state of a ProgressiveNE: {e!r}; pass what state() returned") from e
        if not 0 <= found.positives <= found.count:
            raise InputError(f"{found.positives} positives of {found.count} examples; pass what state() returned")
        return found


class SingleFeatureAUC(NamedTuple):
    """The input column that predicts the label best by itself.

    Attributes:
        name: of the column.
        auc: its AUC, 0.5 to 1.
        each: column -> AUC, of every column.
    """

    name: str
    auc: float
    each: dict[str, float]


def single_feature_auc(
    columns: Mapping[str, npt.ArrayLike], labels: npt.ArrayLike, train_mask: npt.ArrayLike, smoothing: float = 1.0
) -> SingleFeatureAUC:
    """How well each input column alone predicts the label: near 1, the label can be read off that column.

    Of a column the largest of these is taken, all on the examples outside ``train_mask``:

    - ``max(AUC, 1 - AUC)`` of the values themselves, so the order of values either way;
    - AUC of the label's mean per value on the train part, ``(positives + smoothing * rate) / (count + smoothing)``
      with the train part's rate, which is also that of values it lacks (Micci-Barreca 2001). Floats, which seldom
      repeat, are cut into 64 ranges of equal counts of the train part first.

    Args:
        columns: name -> (n,) integers or booleans (keys) or floats.
        labels: (n,) of 0 and 1.
        train_mask: (n,) bool, which examples the means are learned from; both parts need both classes.
        smoothing: how many examples the rate counts for, above 0.

    Raises:
        InputError: no column, a NaN, lengths that differ, a part without examples or of one class only.
    """
    positive = _labels(labels)
    train = np.asarray(train_mask)
    if train.dtype != np.bool_ or train.shape != positive.shape:
        raise InputError(f"train_mask is {train.dtype}{train.shape}; pass {positive.shape} booleans")
    if not columns:
        raise InputError("there is no column to look at; pass one or more")
    if not smoothing > 0:
        raise InputError(f"smoothing is {smoothing}; it must be above 0")
    for part in (train, ~train):
        _both_classes(positive[part], "split the examples so that both parts have both classes")
    each: dict[str, float] = {}
    for name, column in columns.items():
        values = _scores(column, positive, f"column {name!r}")
        plain = auc(values[~train], positive[~train])
        learned = auc(_label_means(values, positive, train, smoothing), positive[~train])
        each[name] = max(plain, 1 - plain, learned)
    best = max(each, key=each.__getitem__)
    return SingleFeatureAUC(best, each[best], each)


def interval(values: Sequence[float] | npt.NDArray[Any]) -> tuple[float, float]:
    """Mean over seeds and half the width of its 95% interval: ``t(0.975, n - 1) * s / sqrt(n)`` (Student 1908).

    s is the sample's standard deviation (over n - 1). Of one value the half width is NaN: it says nothing of spread.

    Args:
        values: (n,) one figure a seed.

    Raises:
        InputError: no value, or one that is not finite.
    """
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or len(x) == 0:
        raise InputError(f"values of shape {x.shape}; pass a figure of each seed, one or more")
    if not np.isfinite(x).all():
        raise InputError(f"{int((~np.isfinite(x)).sum())} of {len(x)} values are not finite; leave no failed run in")
    if len(x) == 1:
        return float(x[0]), math.nan
    return float(x.mean()), _student_975(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))


@cache
def _student_975(freedom: int) -> float:
    """The number that Student's t of so many degrees of freedom exceeds with probability 0.025.

    By bisection of the distribution's closed form for whole degrees (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    odd = freedom % 2
    # Ratios of successive terms: 2/3, 4/5 ... for odd degrees, 1/2, 3/4 ... for even ones.
    steps = np.arange(1 + odd, freedom - 2 + odd, 2)
    ratios = steps / (steps + 1)

    def within(t: float) -> float:
        angle = math.atan2(t, math.sqrt(freedom))
        series = 1 + float(np.cumprod(ratios * math.cos(angle) ** 2).sum())
        if not odd:
            return math.sin(angle) * series
        return 2 / math.pi * (angle + (math.sin(angle) * math.cos(angle) * series if freedom > 1 else 0))

    low, high = 1.9, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < 0.95 else (low, middle)
    return high


def _labels(labels: npt.ArrayLike) -> Bool:
    array = np.asarray(labels)
    if array.ndim != 1:
        raise InputError(f"labels of shape {array.shape}; pass one dimension")
    if len(array) == 0:
        raise InputError("the evaluation set is empty: evaluate one example or more")
    if array.dtype.kind not in "biuf":
        raise InputError(f"labels are {array.dtype}; pass numbers 0 and 1, or booleans")
    positive: Bool = array == 1
    other = ~(positive | (array == 0))
    if other.any():
        raise InputError(
            f"{int(other.sum())} of {len(array)} labels, {array[other][0]} first, are not 0 or 1: drop them"
        )
    return positive


def _scores(scores: npt.ArrayLike, positive: Bool, what: str = "scores") -> npt.NDArray[Any]:
    values = np.asarray(scores)
    if values.dtype.kind not in "biuf" or values.shape != positive.shape:
        raise InputError(f"{what}: {values.dtype}{values.shape} for {positive.shape} labels; pass one number a label")
    n_nan = int(np.isnan(values).sum()) if values.dtype.kind == "f" else 0
    if n_nan:
        raise InputError(
            f"{what}: {n_nan} of {len(values)} are NaN; of a model that diverged lower the learning rate, in data fill "
            "nulls first"
        )
    return values


def _pair(scores: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[npt.NDArray[Any], Bool]:
    positive = _labels(labels)
    return _scores(scores, positive), positive


def _both_classes(positive: Bool, remedy: str) -> None:
    if not 0 < positive.sum() < len(positive):
        raise InputError(
            f"{int(positive.sum())} of {len(positive)} labels are positive; both classes are needed: {remedy}"
        )


def _cross_entropy(scores: npt.ArrayLike, labels: npt.ArrayLike, probabilities: bool) -> tuple[F64, Bool]:
    """(n,) cross entropy of each example in nats, and which are positive."""
    values, positive = _pair(scores, labels)
    if not probabilities:
        logits = values.astype(np.float64)
        return np.logaddexp(0, np.where(positive, -logits, logits)), positive
    p = values.astype(np.float64)
    beyond = (p < 0) | (p > 1)
    if beyond.any():
        raise InputError(f"probability {p[beyond][0]} is not within [0, 1]; of logits leave probabilities=False")
    with np.errstate(divide="ignore"):
        return -np.where(positive, np.log(p), np.log1p(-p)), positive


def _entropy(rate: float) -> float:
    """Entropy of a coin that shows 1 with probability ``rate``, 0 < rate < 1, in nats."""
    return -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def _twice_in_order(values: npt.NDArray[Any], positive: Bool, group: npt.NDArray[Any]) -> tuple[I64, I64, I64]:
    """Per group, by id: twice its pairs in order plus its tied pairs, its positives, its negatives; exact integers."""
    order = np.lexsort((values, group))
    values, group = values[order], group[order]
    new_group = np.append(True, group[1:] != group[:-1])
    start = np.flatnonzero(new_group | np.append(True, values[1:] != values[:-1]))
    size = np.diff(start, append=len(values))
    positives = np.add.reduceat(positive[order].astype(np.int64), start)
    negatives = size - positives
    # Negatives below each run of ties: all before it, less those before its group.
    before = np.cumsum(negatives) - negatives
    first = np.flatnonzero(new_group[start])
    n_runs = np.diff(first, append=len(start))
    below = before - np.repeat(before[first], n_runs)
    twice = np.add.reduceat(positives * (2 * below + negatives), first)
    return twice, np.add.reduceat(positives, first), np.add.reduceat(negatives, first)


@dataclass(frozen=True, slots=True)
class _Ties:
    """Candidates of equal score, runs from the highest score of a request to its lowest, requests one after another.

    Attributes:
        first: (T,) place of the run's first candidate in its request, from 0.
        size: (T,) candidates of the run.
        positives: (T,) of them.
        request_start: (R,) first run of each request that has candidates.
        request_positives: (R,) its positives.
    """

    first: I64
    size: I64
    positives: I64
    request_start: I64
    request_positives: I64


def _ties(scores: npt.ArrayLike, labels: npt.ArrayLike, offsets: npt.ArrayLike, k: int) -> _Ties:
    values, positive = _pair(scores, labels)
    bounds = np.asarray(offsets)
    n = len(values)
    if (
        bounds.ndim != 1
        or bounds.dtype.kind not in "iu"
        or len(bounds) < 2
        or (bounds[0], bounds[-1]) != (0, n)
        or (bounds[1:] < bounds[:-1]).any()
    ):
        raise InputError(f"offsets of requests must be integers that rise from 0 to the {n} candidates, got {bounds!r}")
    if k < 1:
        raise InputError(f"k is {k}; it must be 1 or more")
    if not positive.any():
        raise InputError(f"none of the {n} candidates is positive, so no request can be ranked; evaluate more requests")
    request = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    # Backwards, so that the order falls within a request; requests are reversed as well, which changes no mean.
    order = np.lexsort((values, request))[::-1]
    values, request, positive = values[order], request[order], positive[order]
    new_request = np.append(True, request[1:] != request[:-1])
    start = np.flatnonzero(new_request | np.append(True, values[1:] != values[:-1]))
    size = np.diff(start, append=n)
    positives = np.add.reduceat(positive.astype(np.int64), start)
    request_start = np.flatnonzero(new_request[start])
    first = start - np.repeat(start[request_start], np.diff(request_start, append=len(start)))
    return _Ties(first, size, positives, request_start, np.add.reduceat(positives, request_start))


def _label_means(values: npt.NDArray[Any], positive: Bool, train: Bool, smoothing: float) -> F64:
    """The smoothed label mean of the train part for the value of each example outside it."""
    if values.dtype.kind == "f":
        cuts = np.quantile(values[train], np.arange(1, _RANGES) / _RANGES, method="inverted_cdf")
        values = np.searchsorted(cuts, values, side="right")
    known, number = np.unique(values[train], return_inverse=True)
    count = np.bincount(number, minlength=len(known))
    positives = np.bincount(number, positive[train], minlength=len(known))
    n, n_positive = len(number), int(positive[train].sum())
    rate = n_positive / n
    # The formula with the rate taken out: a value whose mean is the rate is then tied with values that are not known.
    means: F64 = rate + (positives.astype(np.int64) * n - count * n_positive) / (n * (count + smoothing))
    asked = values[~train]
    place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    found: F64 = np.where(known[place] == asked, means[place], rate)
    return found
