"""HistoryMatch: candidates against the visible window, within a plan."""

import json

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import InputError
from thinrow.core.units import DAY_MS, NEVER
from thinrow.features import (
    Bucketize,
    Cross,
    FeaturePlan,
    Hash,
    HistoryMatch,
    Mod,
    Source,
    featurize,
    history_candidate_cross,
    plan,
)
from thinrow.jagged import Column, Events, Jagged, SharedHistories

ITEM, SHOWN = Source("history.item"), Source("cand.item")
REQUEST_TS = np.array([5 * DAY_MS, 2 * DAY_MS])


def windows():
    """User 1: products 7, 9 and 7 on days 0, 1 and 3, a late 8 (arrival 6) between; two requests with bound 5."""
    events = Events(
        np.array([1]),
        np.array([0, 4]),
        np.array([0, DAY_MS, 2 * DAY_MS, 3 * DAY_MS]),
        np.array([1, 2, 6, 3]),
        np.full(4, NEVER),
        {"item": Column(np.array([7, 9, 8, 7])), "shop": Column.from_arrow(pa.array(["a", "b", "b", None]), "string")},
    )
    zero = np.zeros(2, np.int64)
    return SharedHistories(events, zero, zero, np.array([4, 2]), np.array([5, 5]), np.array([False, True]))


def rows(values, offsets=(0, 3, 4), dtype="int64"):
    return Jagged(Column.from_arrow(pa.array(values), dtype), np.array(offsets))


CANDIDATES = {"item": rows([7, 8, 7, 9]), "shop": rows(["b", "a", None, "c"], dtype="string")}


def apply(outputs, histories=None):
    return featurize(FeaturePlan(outputs), histories or windows(), {}, CANDIDATES, REQUEST_TS)[1]


def test_the_worked_example_with_a_late_event():
    out = apply({m: HistoryMatch(ITEM, SHOWN, m) for m in ("count", "days_since", "seen")})
    assert {n: v.to_arrow().to_pylist() for n, v in out.items()} == {
        "count": [[2, 0, 2], [1]],
        "days_since": [[2, -1, 2], [1]],
        "seen": [[1, 0, 1], [1]],
    }
    assert {v.values.dtype for v in out.values()} == {np.dtype(np.int32)}


def test_the_window_is_what_is_looked_at():
    newest = windows()
    newest = SharedHistories(
        newest.events, newest.user_of, np.array([3, 1]), newest.stop, newest.bound, np.array([True, True])
    )
    assert apply({"n": HistoryMatch(ITEM, SHOWN)}, newest)["n"].to_arrow().to_pylist() == [[1, 0, 1], [1]]


def test_strings_match_and_null_is_nothing():
    out = apply({"n": HistoryMatch(Source("history.shop"), Source("cand.shop"))})
    assert out["n"].to_arrow().to_pylist() == [[1, 1, 0], [0]]


def test_it_is_the_cross_feature_and_stands_beside_candidates():
    node = HistoryMatch(ITEM, SHOWN, "days_since")
    assert FeaturePlan({"a": node}).domain("a") == "cand"
    alone = history_candidate_cross(windows(), "item", CANDIDATES["item"], REQUEST_TS)
    assert apply({"a": node})["a"].to_arrow().equals(alone.days_since.to_arrow())


def test_it_feeds_other_ops():
    count = HistoryMatch(ITEM, SHOWN)
    bucket = Bucketize(count, boundaries=(1, 2, 4))
    out = apply(
        {
            "bucket": bucket,
            "key": Hash(bucket, seed=5),
            "small": Mod(count, 2),
            "pair": Cross((SHOWN, bucket), buckets=1000, seed=2),
        }
    )
    assert out["bucket"].to_arrow().to_pylist() == [[2, 0, 2], [1]]
    same = FeaturePlan({"key": Hash(SHOWN, seed=5)}).apply({"cand.item": rows([2, 0, 2, 1])})
    assert out["key"].to_arrow().equals(same["key"].to_arrow())
    assert out["small"].to_arrow().to_pylist() == [[0, 0, 0], [1]]
    assert len(set(out["pair"].values.tolist())) == 3


def test_one_pass_gives_all_measures_of_two_operands(monkeypatch):
    calls = []
    original = plan.history_candidate_cross

    def counted(histories, column, *rest):
        calls.append(column)
        return original(histories, column, *rest)

    monkeypatch.setattr(plan, "history_candidate_cross", counted)
    again = HistoryMatch(Source("history.item"), Source("cand.item"), "seen")
    shop = HistoryMatch(Source("history.shop"), Source("cand.shop"))
    outputs = {m: HistoryMatch(ITEM, SHOWN, m) for m in ("count", "days_since", "seen")}
    apply({**outputs, "bucket": Bucketize(again, (1,)), "shop": shop, "key": Hash(shop)})
    assert calls == ["item", "shop"]


def test_it_is_data():
    key = Hash(Bucketize(HistoryMatch(ITEM, SHOWN, "days_since"), boundaries=(1, 7)), seed=5)
    whole = FeaturePlan({"key": key, "count": HistoryMatch(ITEM, SHOWN), "item": Hash(ITEM)})
    data = json.loads(json.dumps(whole.to_dict()))
    again = FeaturePlan.from_dict(data)
    assert again == whole
    assert again.fingerprint() == whole.fingerprint()
    assert json.loads(json.dumps(again.to_dict())) == data
    assert whole.sources == ("cand.item", "history.item")
    assert whole.history_columns == ("item",)
    assert [s for s in data["steps"] if s["op"] == "history_match"] == [
        {"op": "history_match", "inputs": [0, 1], "measure": "days_since"},
        {"op": "history_match", "inputs": [0, 1], "measure": "count"},
    ]
    others = [HistoryMatch(ITEM, SHOWN, "seen"), HistoryMatch(ITEM, SHOWN), HistoryMatch(ITEM, Source("cand.shop"))]
    assert len({o.digest() for o in others}) == 3


def test_bad_operands_are_named():
    with pytest.raises(InputError, match=r"history is 'cand\.item'; it must be Source\('history\.NAME'\)"):
        HistoryMatch(SHOWN, SHOWN)
    with pytest.raises(InputError, match=r"candidate is Hash\(.*; it must be Source\('cand\.NAME'\)"):
        HistoryMatch(ITEM, Hash(SHOWN))
    with pytest.raises(InputError, match="measure='days'; it must be one of count, days_since, seen"):
        HistoryMatch(ITEM, SHOWN, "days")
    with pytest.raises(InputError, match=r"'history\.event_ts', a time"):
        HistoryMatch(Source("history.event_ts"), SHOWN)
    steps = [{"op": "source", "inputs": [], "name": "cand.item"}, {"op": "history_match", "inputs": [0]}]
    with pytest.raises(InputError, match="not a feature plan"):
        FeaturePlan.from_dict({"format": 1, "steps": steps, "outputs": {"a": 1}})


def test_a_plan_without_windows_or_with_unfit_ones_is_refused():
    one = FeaturePlan({"n": HistoryMatch(ITEM, SHOWN)})
    sources = {"cand.item": CANDIDATES["item"]}
    for given in ((), (windows(),), (None, REQUEST_TS)):
        with pytest.raises(
            InputError, match=r"relates 'cand\.item' to 'history\.item', but histories or request times"
        ):
            one.apply(sources, *given)
    with pytest.raises(InputError, match=r"'cand\.item' is a flat column"):
        one.apply({"cand.item": Column(np.array([7]))}, windows(), REQUEST_TS)
    with pytest.raises(InputError, match=r"reads 'cand\.item', which is not there"):
        one.apply({}, windows(), REQUEST_TS)
    with pytest.raises(InputError, match="2 histories, 2 rows of candidates, 1 request times"):
        one.apply(sources, windows(), REQUEST_TS[:1])
    with pytest.raises(InputError, match="column 'item' of the candidates is of string"):
        one.apply({"cand.item": CANDIDATES["shop"]}, windows(), REQUEST_TS)
