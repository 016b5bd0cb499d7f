"""Batches as what a KeyedJaggedTensor holds: key after key, of each key its examples in order."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

import thinrow
from thinrow.core.errors import InputError, MissingExtraError
from thinrow.dpp.batch import Batch
from thinrow.dpp.torchrec import keyed_jagged, to_kjt
from thinrow.features import FeaturePlan, Hash, Source
from thinrow.jagged import Column, Jagged
from thinrow.testing.world import make_world

PLAN = FeaturePlan(
    {
        "past": Hash(Source("history.brand"), buckets=50),
        "shown": Hash(Source("cand.brand"), buckets=50),
        "where": Hash(Source("ctx.city"), buckets=50),
    }
)
KEYS = ["history.item", "where", "cand.item", "history.past", "shown"]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    world = make_world(tmp_path_factory.mktemp("world"), users=5, days=6)
    with world.store() as store, world.table() as table:
        return next(iter(thinrow.loader(store, table, plan=PLAN, max_len=9, base_rows=8, threads=1)))


def expected(batch: Batch) -> list[list[list[int]]]:
    """Of each key the values of each example, one at a time."""
    h, n = batch.histories, len(batch)
    past, items = h.to_jagged("past"), h.to_jagged("item")
    shown, where, cand = batch.features["shown"], batch.features["where"], batch.candidates["item"]
    return [
        [items.row(i).tolist() for i in range(n)],
        [[int(where.values[i])] for i in range(n)],
        [cand.row(i).tolist() for i in range(n)],
        [past.row(i).tolist() for i in range(n)],
        [shown.row(i).tolist() for i in range(n)],  # type: ignore[union-attr]
    ]


def test_values_are_key_after_key_and_of_each_key_its_examples_in_order(batch: Batch) -> None:
    values, lengths = keyed_jagged(batch, KEYS)
    rows = [row for of_key in expected(batch) for row in of_key]
    assert lengths.tolist() == [len(row) for row in rows]
    assert values.tolist() == [v for row in rows for v in row]
    assert len({len(row) for row in rows}) > 2
    none, no_lengths = keyed_jagged(batch, [])
    assert (len(none), len(no_lengths)) == (0, 0)
    times, _ = keyed_jagged(batch, ["history.event_ts"])
    assert times.tolist() == batch.histories.to_jagged("event_ts").values.tolist()


def test_nulls_are_no_ids(batch: Batch) -> None:
    item, rng = batch.candidates["item"], np.random.default_rng(1)
    valid = rng.random(len(item.column)) < 0.6
    hours = Column(np.arange(len(batch)), np.arange(len(batch)) % 3 > 0)
    holed = replace(
        batch,
        candidates={"item": Jagged(replace(item.column, valid=valid), item.offsets)},
        context={"hour": hours},
    )
    values, lengths = keyed_jagged(holed, ["ctx.hour", "cand.item"])
    rows = [[i] if i % 3 else [] for i in range(len(batch))]
    for i in range(len(batch)):
        there = valid[item.offsets[i] : item.offsets[i + 1]]
        rows.append(item.row(i)[there].tolist())
    assert lengths.tolist() == [len(row) for row in rows]
    assert values.tolist() == [v for row in rows for v in row]
    none = replace(holed, context={"hour": replace(hours, valid=np.zeros(len(batch), np.bool_))})
    values, lengths = keyed_jagged(none, ["ctx.hour"])
    assert (len(values), lengths.tolist()) == (0, [0] * len(batch))


@pytest.mark.parametrize(
    ("key", "message"),
    [("history.brand", "hash it"), ("ctx.city", "hash it"), ("cand.none", "it has history.item"), ("item", "it has")],
)
def test_what_is_no_id_or_not_there_is_named(batch: Batch, key: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        keyed_jagged(batch, ["cand.item", key])


def test_torchrec_reads_the_same(batch: Batch) -> None:
    if importlib.util.find_spec("torchrec") is None:
        with pytest.raises(MissingExtraError, match=r"run: pip install 'thinrow\[torchrec\]'"):
            to_kjt(batch, KEYS)
        pytest.skip("torchrec is not installed")
    kjt = to_kjt(batch, KEYS)
    assert kjt.keys() == KEYS
    assert kjt.stride() == len(batch)
    for key, rows in zip(KEYS, expected(batch), strict=True):
        one = kjt[key]
        assert [r.tolist() for r in one.to_dense()] == rows
        np.testing.assert_array_equal(one.lengths().numpy(), [len(r) for r in rows])
