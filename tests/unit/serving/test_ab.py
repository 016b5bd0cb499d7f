"""Arms of an experiment: rates, and intervals that hold the truth as often as they say."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from thinrow.cli.main import cli
from thinrow.core.errors import InputError
from thinrow.examples import ExampleTable, ImpressionLog, OutcomeLog, Outcomes, join_logs
from thinrow.examples.records import Impressions
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema, ExampleSchema
from thinrow.serving.ab import ArmResult, _difference, _quantile, _result, _Sums, compare_arms


def sums(rng: np.random.Generator, users: int, rate: float) -> _Sums:
    """Users with 1 to 9 requests each, who buy more or less of what they are shown."""
    made = _Sums()
    for user in range(users):
        n = int(rng.integers(1, 10))
        made.users[user] = [n, float(rng.binomial(n, min(1.0, rate * rng.gamma(2, 0.5))))]
    return made


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held, z = 0, _quantile(0.95)
    for _ in range(200):
        a, b = _result("a", sums(rng, 400, 0.2)), _result("b", sums(rng, 400, 0.2))
        found = _difference(a, b, z)
        held += found.low <= 0 <= found.high
        assert (found.p_value < 0.1) == (not found.low <= 0 <= found.high) or abs(found.p_value - 0.1) < 0.03
    # 90% of 200, give or take four standard deviations.
    assert 163 <= held <= 197
    larger = _difference(_result("a", sums(rng, 4_000, 0.2)), _result("b", sums(rng, 4_000, 0.3)), z)
    assert larger.low > 0.2
    assert larger.p_value < 1e-6


def test_one_user_has_no_error_and_no_outcome_has_no_lift() -> None:
    one = _Sums()
    one.users[1] = [4, 2.0]
    result = _result("a", one)
    assert result.rate == 0.5
    assert math.isnan(result.error)
    nothing = ArmResult("z", (), 1, 4, 0.0, 0.1, 0)
    assert math.isnan(_difference(nothing, result, 1.96).lift)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    import pyarrow as pa

    shape = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 100})
    events = pa.table({"user": [1], "ts": [1], "item": [1]})
    with HistoryStore.create(tmp_path / "store", EventSchema.infer(events.schema, user="user", time="ts"), 2) as store:
        log, clicks = ImpressionLog(tmp_path / "shown", store.schema, shape), OutcomeLog(tmp_path / "clicks")
        for number, arm in enumerate(("A", "B") * 20):
            seen = store.snapshot([number // 2], [10 + number])
            shown = Impressions.of(
                shape, [number], seen, candidates={"item": [[5, 6]]}, arm=arm, model_version=f"m{arm}"
            )
            log.append(shown)
            if arm == "B" or number % 4 == 0:
                clicks.append(Outcomes.of("click", [number], [5], [20 + number]))
        with ExampleTable.create(
            tmp_path / "table", event_schema=store.schema, example_schema=shape, n_buckets=2
        ) as made:
            join_logs(log, clicks, made, 10_000)
    return tmp_path / "table"


def test_arms_of_a_table(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ExampleTable.open(table) as opened:
        arms, (other,) = compare_arms(opened, "click")
        assert [(a.arm, a.versions, a.users, a.requests, a.rate) for a in arms] == [
            ("A", ("mA",), 20, 20, 0.5),
            ("B", ("mB",), 20, 20, 1.0),
        ]
        assert other.lift == 1
        assert 0 < other.low < 1 < other.high
        later = compare_arms(opened, "click", base="B", since_ms=30, until_ms=40)[0]
        assert [(a.arm, a.requests) for a in later] == [("B", 5), ("A", 5)]
        for wrong, message in (
            ({"outcome": "buy"}, "the table has click"),
            ({"base": "C"}, "the arms are 'A', 'B'"),
            ({"since_ms": 10_000}, "no request of that time"),
            ({"confidence": 1}, "between 0 and 1"),
        ):
            with pytest.raises(InputError, match=message):
                compare_arms(opened, **{"outcome": "click", **wrong})
    cli(["ab", "--table", str(table), "--outcome", "click"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "B over A: +100.0%" in said
    assert "they differ" in said
