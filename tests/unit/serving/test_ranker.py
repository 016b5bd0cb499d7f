"""The ranker: the best first, impressions that training rebuilds bit for bit, and clear refusals."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.checkpoints import Checkpoint, load
from thinrow.core.errors import CheckpointMismatch, InputError, SchemaError
from thinrow.core.units import DAY_MS
from thinrow.dpp import loader
from thinrow.examples import ExampleTable, ImpressionLog, OutcomeLog, Outcomes, join_logs
from thinrow.features import FeaturePlan, Hash, Source
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column
from thinrow.schema import EventSchema
from thinrow.serving import Ranked, Ranker, compare
from thinrow.serving.ranker import best
from thinrow.testing.rankers import PAIR, world_config
from thinrow.testing.world import World, brand_of, make_world
from thinrow.training import train

USERS, ITEMS = [1, 4, 7], [[3, 9, 27], [40, 41], [5]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module", params=PAIR)
def checkpoint(world: World, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    out = tmp_path_factory.mktemp("run")
    with world.store() as store, world.table() as table:
        train(world_config(request.param, epochs=3), store, table, out=out)
    return load(out)


def rank(ranker: Ranker, now_ms: int, first_id: int = 0, **changes: Any) -> Ranked:
    arguments: dict[str, Any] = {
        "candidates": {"item": ITEMS, "brand": [brand_of(np.array(row)) for row in ITEMS]},
        "context": {"city": ["city 0", "city 1", "nowhere"]},
        "k": 2,
    }
    return ranker.rank([first_id, first_id + 1, first_id + 2], USERS, now_ms, **{**arguments, **changes})


def test_the_best_come_first_with_what_was_known_of_them(world: World, checkpoint: Checkpoint) -> None:
    with world.store() as store:
        ranked = rank(Ranker(store, checkpoint), world.end_ms)
        whole = rank(Ranker(store, checkpoint), world.end_ms, k=9)
    assert ranked.scores.lengths.tolist() == [2, 2, 1]
    assert whole.scores.lengths.tolist() == [3, 2, 1]
    for row, shown in enumerate(ITEMS):
        scores = whole.scores.row(row)
        assert (np.diff(scores) <= 0).all()
        assert whole.candidates["item"].row(row).tolist() == [shown[p] for p in whole.position.row(row)]
        np.testing.assert_array_equal(ranked.scores.row(row), scores[:2])
    brands = whole.candidates["brand"].column.to_arrow().to_pylist()
    assert brands == brand_of(whole.candidates["item"].values)


def test_equal_scores_keep_their_order() -> None:
    rows, offsets = best(np.array([1, 3, 3, 2, 5, 5, 5], np.float32), np.array([0, 4, 4, 7]), 2)
    assert rows.tolist() == [1, 2, 4, 5]
    assert offsets.tolist() == [0, 2, 2, 4]


def test_served_inputs_are_rebuilt_bit_for_bit_after_late_events_and_compactions(
    world: World, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The loop closes: impressions of the ranker become examples, and what they rebuild is what was read."""
    shutil.copytree(world.store_path, tmp_path / "store")
    world = dataclasses.replace(world, store_path=tmp_path / "store")
    with world.store() as store:
        ranker = Ranker(store, checkpoint, arm="A", log=tmp_path / "shown")
        shown, bought = ranker.log, OutcomeLog(tmp_path / "bought")
        assert shown is not None
        for day in range(6):
            # The day's events, one of them late, are recent when the request comes, and archived later.
            now = world.end_ms + day * DAY_MS
            ranked = rank(ranker, now, 10_000 + 3 * day)
            times = [now + 5, now - 3 * DAY_MS, now + 7]
            items = [3 + day, 9, 40]
            store.append(pa.table({"user": USERS, "ts": times, "item": items, "brand": brand_of(np.array(items))}))
            if day % 2:
                store.compact(full=day == 5)
            bought.append(Outcomes.of("buy", [10_000 + 3 * day], ranked.candidates["item"].row(0)[:1], now + 1))
        table = ExampleTable.create(
            tmp_path / "served", event_schema=store.schema, example_schema=ranker.schema, n_buckets=2
        )
        with table:
            join_logs(shown, bought, table, world.end_ms + 30 * DAY_MS)
            parity = compare(checkpoint, store, table)
            assert parity.requests == 18
            assert parity.input_differences == 0
            assert parity.score_differences == 0
            assert parity.largest_score_difference <= 1e-5
            (batch,) = loader(store, table)
            assert batch.labels["buy"].values.sum() == 6
            assert set(batch.arm.to_arrow().to_pylist()) == {"A"}
            assert set(batch.model_version.to_arrow().to_pylist()) == {ranker.model_version}


def test_a_difference_is_counted(world: World, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Parity that cannot fail would say nothing: one score and one digest are falsified."""
    with world.store() as store:
        ranker = Ranker(store, checkpoint)
        log = ImpressionLog(tmp_path / "shown", store.schema, ranker.schema)
        logged = rank(ranker, world.end_ms).impressions
        logged.candidates["score"].values[0] += 0.25
        digest = logged.context["input_digest"].to_arrow().to_pylist()
        digest[2] = "0" * 32
        logged.context["input_digest"] = Column.from_arrow(pa.array(digest), "string")
        log.append(logged)
        schemas = {"event_schema": store.schema, "example_schema": ranker.schema}
        with ExampleTable.create(tmp_path / "served", **schemas, n_buckets=2) as table:
            join_logs(log, OutcomeLog(tmp_path / "bought"), table, world.end_ms + DAY_MS)
            parity = compare(checkpoint, store, table)
    assert (parity.requests, parity.input_differences, parity.score_differences) == (3, 1, 1)
    assert parity.largest_score_difference == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": 0}, InputError, "k=0"),
        ({"context": {}}, InputError, "city"),
        ({"candidates": {"item": ITEMS}}, InputError, "brand"),
        ({"candidates": {"item": ITEMS[:2], "brand": [["a"], ["b"]]}}, InputError, "2 rows"),
        ({"candidates": {"item": [["x"], [], []], "brand": [["a"], [], []]}}, SchemaError, "'item' takes rows"),
    ],
)
def test_bad_requests(
    world: World, checkpoint: Checkpoint, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with world.store() as store, pytest.raises(error, match=message):
        rank(Ranker(store, checkpoint), world.end_ms, **changes)


def test_a_user_asks_once_a_call(world: World, checkpoint: Checkpoint) -> None:
    with world.store() as store, pytest.raises(InputError, match="a user appears twice"):
        Ranker(store, checkpoint).rank(
            [0, 1], [1, 1], 5, candidates={"item": [[1], [2]], "brand": [["a"], ["b"]]}, context={"city": ["", ""]}
        )


def test_a_snapshot_of_other_requests_is_refused(world: World, checkpoint: Checkpoint) -> None:
    with world.store() as store:
        ranker = Ranker(store, checkpoint)
        for users, now in (([1, 4, 10], world.end_ms), (USERS, world.end_ms - 1)):
            with pytest.raises(InputError, match="of other users or times"):
                rank(ranker, world.end_ms, seen=store.snapshot(users, now))


def test_an_id_twice_is_refused(world: World, checkpoint: Checkpoint) -> None:
    one = {"candidates": {"item": [[1], [2]], "brand": [["a"], ["b"]]}, "context": {"city": ["", ""]}}
    with world.store() as store, pytest.raises(InputError, match="request_id 7 appears twice"):
        Ranker(store, checkpoint).rank([7, 7], [1, 4], world.end_ms, **one)


def test_a_score_that_is_no_number_is_neither_given_nor_logged(
    world: World, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    broken = {n: np.full_like(t, np.nan) if n.startswith("model.") else t for n, t in checkpoint.tensors.items()}
    bad = dataclasses.replace(checkpoint, tensors=broken)
    with world.store() as store:
        log = ImpressionLog(tmp_path / "shown", store.schema, Ranker(store, checkpoint).schema)
        with pytest.raises(InputError, match="request 0 has a score of nan"):
            rank(Ranker(store, bad, log=log), world.end_ms)
        assert not list(log.scan())
        rank(Ranker(store, checkpoint, log=log), world.end_ms)
        schemas = {"event_schema": store.schema, "example_schema": log.example_schema}
        with ExampleTable.create(tmp_path / "served", **schemas, n_buckets=2) as table:
            join_logs(log, OutcomeLog(tmp_path / "bought"), table, world.end_ms + DAY_MS)
            parity = compare(bad, store, table)
        assert parity.score_differences == parity.requests == 3
        assert np.isnan(parity.largest_score_difference)
        with world.table() as trained, pytest.raises(SchemaError, match="no field 'input_digest'"):
            compare(checkpoint, store, trained)


def test_requests_without_candidates_get_an_empty_list(world: World, checkpoint: Checkpoint) -> None:
    nothing: list[list[Any]] = [[], [], []]
    with world.store() as store:
        ranked = rank(Ranker(store, checkpoint), world.end_ms, candidates={"item": nothing, "brand": nothing})
    assert ranked.scores.lengths.tolist() == [0, 0, 0]


def test_a_store_of_other_columns_and_a_log_of_another_schema_are_refused(
    world: World, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    arrow = pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int32()), ("brand", pa.string())])
    with (
        HistoryStore.create(tmp_path / "other", EventSchema.infer(arrow, user="user", time="ts")) as other,
        pytest.raises(SchemaError, match="column 'item' of the store has id 1 and dtype int32"),
    ):
        Ranker(other, checkpoint)
    with world.store() as store, world.table() as table:
        log = ImpressionLog(tmp_path / "log", store.schema, table.example_schema)
        with pytest.raises(SchemaError, match=r"make it with ranker\.schema"):
            Ranker(store, checkpoint, log=log)


def test_a_checkpoint_of_another_plan_does_not_fit_the_weights(world: World, checkpoint: Checkpoint) -> None:
    plan = FeaturePlan({"e": Hash(Source("history.item")), "c": Hash(Source("cand.item"))}).to_dict()
    meta = {**checkpoint.meta, "ranker": {**checkpoint.meta["ranker"], "plan": plan}}
    with world.store() as store, pytest.raises(CheckpointMismatch, match="was written for another model"):
        Ranker(store, dataclasses.replace(checkpoint, meta=meta))
