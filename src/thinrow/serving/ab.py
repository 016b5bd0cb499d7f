"""ab: the arms of an experiment, compared by the outcomes of what they showed, with intervals.

Worked example. Arm A showed 1,000 users 2,000 lists with 300 purchases, arm B 1,000 users 2,100 with 357: 0.150 and
0.170 purchases a list, a lift of 13%. Users are what was drawn into arms, and lists of one user are alike, so the error
of a rate is that of a ratio of sums over users (the delta method, linearised): the interval says how far both may be
off together. Where it holds 0, the arms cannot be told apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.examples.table import ExampleTable

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ArmResult:
    """Attributes:
    arm: its name.
    versions: models that ranked.
    users, requests: in it.
    rate: outcomes a request.
    error: standard error of ``rate``, users being independent.
    degraded: requests with rows that no server gave.
    """

    arm: str
    versions: tuple[str, ...]
    users: int
    requests: int
    rate: float
    error: float
    degraded: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Of an arm against the first one.

    Attributes:
        arm: its name.
        lift: relative difference of the rates.
        low, high: of the interval of ``lift``.
        p_value: of no difference, two-sided.
    """

    arm: str
    lift: float
    low: float
    high: float
    p_value: float


def compare_arms(
    table: ExampleTable,
    outcome: str,
    *,
    base: str | None = None,
    since_ms: int | None = None,
    until_ms: int | None = None,
    confidence: float = 0.95,
) -> tuple[list[ArmResult], list[Difference]]:
    """Arms of joined impressions, and the others against ``base``, by default the first by name.

    Args:
        outcome: whose labels are counted.
        since_ms, until_ms: of the requests, inclusive and exclusive.
        confidence: of the intervals.

    Raises:
        InputError: no such outcome, no such arm, nothing in the table, a confidence outside (0, 1).
    """
    outcomes = [n for n, _ in table.example_schema.outcomes]
    if outcome not in outcomes:
        raise InputError(f"outcome={outcome!r}; the table has {', '.join(outcomes)}")
    if not 0 < confidence < 1:
        raise InputError(f"confidence={confidence}; it must be between 0 and 1")
    sums = _sums(table, outcome, since_ms, until_ms)
    if not sums:
        raise InputError("no request of that time is in the table; join the logs first, or ask for another time")
    names = sorted(sums)
    base = names[0] if base is None else base
    if base not in sums:
        raise InputError(f"base={base!r}; the arms are {', '.join(map(repr, names))}")
    results = [_result(name, sums[name]) for name in sorted(names, key=lambda n: (n != base, n))]
    z = _quantile(0.5 + confidence / 2)
    return results, [_difference(results[0], other, z) for other in results[1:]]


class _Sums:
    """Requests and outcomes of each user of an arm."""

    def __init__(self) -> None:
        self.users: dict[object, list[float]] = {}
        self.versions: set[str] = set()
        self.degraded = 0


def _sums(table: ExampleTable, outcome: str, since_ms: int | None, until_ms: int | None) -> dict[str, _Sums]:
    found: dict[str, _Sums] = {}
    there = {f.name for f in table.example_schema.context}
    degraded = "ctx_degraded_rows" if "degraded_rows" in there else None
    for bucket in table.buckets():
        for row in _rows(table.scan_bucket(bucket), outcome, degraded):
            user, at, arm, version, happened, lost = row
            if (since_ms is not None and at < since_ms) or (until_ms is not None and at >= until_ms):
                continue
            sums = found.setdefault(arm, _Sums())
            of_user = sums.users.setdefault(user, [0, 0.0])
            of_user[0] += 1
            of_user[1] += happened
            sums.versions.add(version)
            sums.degraded += lost > 0
    return found


def _rows(rows: pa.Table, outcome: str, degraded: str | None) -> Iterable[tuple[object, int, str, str, float, int]]:
    labels = [sum(1 for v in label or () if v) for label in rows[f"label_{outcome}"].to_pylist()]
    lost = rows[degraded].to_pylist() if degraded is not None else [0] * len(rows)
    columns = [rows[n].to_pylist() for n in ("user_id", "request_ts", "arm", "model_version")]
    return zip(*columns, labels, lost, strict=True)


def _result(name: str, sums: _Sums) -> ArmResult:
    counts: Floats = np.array(list(sums.users.values()), np.float64)
    requests, happened = counts.sum(0)
    rate = happened / requests
    n = len(counts)
    # Of the ratio of two sums: what each user adds beyond what its requests explain.
    left = counts[:, 1] - rate * counts[:, 0]
    error = math.sqrt(n / max(n - 1, 1) * float(left @ left)) / requests if n > 1 else math.nan
    return ArmResult(name, tuple(sorted(sums.versions)), n, int(requests), float(rate), error, sums.degraded)


def _difference(base: ArmResult, other: ArmResult, z: float) -> Difference:
    if not base.rate:
        return Difference(other.arm, math.nan, math.nan, math.nan, math.nan)
    lift = other.rate / base.rate - 1
    error = math.hypot(other.error / base.rate, other.rate * base.error / base.rate**2)
    apart = math.hypot(base.error, other.error)
    p = math.erfc(abs(other.rate - base.rate) / apart / math.sqrt(2)) if apart else math.nan
    return Difference(other.arm, lift, lift - z * error, lift + z * error, p)


def _quantile(p: float) -> float:
    """Of the standard normal distribution."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)


__all__ = ["ArmResult", "Difference", "compare_arms"]
