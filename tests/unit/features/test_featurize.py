"""Featurize: outputs beside events become event columns, all others stand by themselves."""

import dataclasses

import numpy as np
import pyarrow as pa

from thinrow.core.units import NEVER
from thinrow.features import Bucketize, Cross, FeaturePlan, Hash, HistoryMatch, Source, featurize
from thinrow.jagged import Column, Events, Jagged, SharedHistories

ITEM, SHOWN, HOUR = Source("history.item"), Source("cand.item"), Source("ctx.hour")
EVENTS = Events(
    np.array([1, 2]),
    np.array([0, 2, 3]),
    np.array([10, 20, 30]),
    np.array([1, 2, 1]),
    np.full(3, NEVER),
    {"item": Column(np.array([7, 8, 7]))},
)
HISTORIES = SharedHistories(
    EVENTS, np.array([0, 1, 0]), np.array([0, 2, 0]), np.array([1, 3, 2]), np.full(3, 5), np.ones(3, np.bool_)
)
CONTEXT = {"hour": Column(np.array([3, 4, 5]))}
CANDIDATES = {"item": Jagged(Column(np.array([7, 7, 8])), np.array([0, 1, 1, 3]))}
REQUEST_TS = np.array([15, 40, 25])


def test_without_a_plan_nothing_changes():
    histories, features = featurize(None, HISTORIES, CONTEXT, CANDIDATES, REQUEST_TS)
    assert histories is HISTORIES
    assert features == {}


def test_outputs_stand_where_their_inputs_stand():
    plan = FeaturePlan(
        {
            "item_key": Hash(ITEM),
            "age": Bucketize(Source("history.event_ts"), (15, 25)),
            "hour_key": Hash(HOUR),
            "shown_at": Cross((SHOWN, HOUR)),
            "before": HistoryMatch(ITEM, SHOWN),
            "raw": SHOWN,
        }
    )
    histories, features = featurize(plan, HISTORIES, CONTEXT, CANDIDATES, REQUEST_TS)
    assert list(histories.events.columns) == ["item", "item_key", "age"]
    assert histories.events.columns["age"].values.tolist() == [0, 1, 2]
    assert len(set(histories.events.columns["item_key"].values.tolist())) == 2
    assert histories.to_jagged("age").to_arrow().to_pylist() == [[0], [2], [0, 1]]
    assert list(HISTORIES.events.columns) == ["item"]
    assert sorted(features) == ["before", "hour_key", "raw", "shown_at"]
    assert len(features["hour_key"]) == 3
    assert features["shown_at"].lengths.tolist() == [1, 0, 2]
    assert features["before"].to_arrow().to_pylist() == [[1], [], [1, 1]]
    assert features["raw"].to_arrow().equals(CANDIDATES["item"].to_arrow())


def test_codes_of_integers_give_what_their_values_give():
    plan = FeaturePlan(
        {"key": Hash(ITEM, 9), "x": Cross((ITEM, ITEM)), "before": HistoryMatch(ITEM, SHOWN), "raw": ITEM}
    )
    codes = Column(np.array([1, 0, 3], np.int32), np.array([True, True, False]), pa.array([8, 7, 6, 7]))
    found = []
    for column in (codes, codes.decoded()):
        histories = dataclasses.replace(HISTORIES, events=EVENTS.with_columns({"item": column}))
        built, features = featurize(plan, histories, CONTEXT, CANDIDATES, REQUEST_TS)
        found.append([*built.events.columns.items(), *features.items()])
    for (name, coded), (_, plain) in zip(*found, strict=True):
        assert coded.to_arrow().equals(plain.to_arrow()), name


def test_requests_together_or_alone_give_the_same():
    """What a request gets in a batch of training is what it gets alone, when it is served."""
    plan = FeaturePlan(
        {"key": Hash(ITEM, 9), "days": HistoryMatch(ITEM, SHOWN, "days_since"), "x": Cross((SHOWN, HOUR))}
    )
    together, features = featurize(plan, HISTORIES, CONTEXT, CANDIDATES, REQUEST_TS)
    for i in range(3):
        row = np.array([i])
        context = {n: c.take(row) for n, c in CONTEXT.items()}
        candidates = {n: c.take(row) for n, c in CANDIDATES.items()}
        alone, own = featurize(plan, HISTORIES.select(row), context, candidates, REQUEST_TS[row])
        assert alone.to_jagged("key").row(0).tolist() == together.to_jagged("key").row(i).tolist()
        for name, value in own.items():
            assert value.row(0).tolist() == features[name].row(i).tolist()
