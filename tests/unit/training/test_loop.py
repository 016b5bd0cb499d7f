"""The training loop: it learns, repeats bit for bit, resumes as if never interrupted, and refuses what does not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from thinrow.checkpoints import load, save, steps
from thinrow.core.errors import CheckpointMismatch, CheckpointNotFound, CorruptionError, InputError
from thinrow.core.units import DAY_MS
from thinrow.dpp import BatchBudget, RowFilter
from thinrow.features import FeaturePlan, Hash, Source
from thinrow.history.store import HistoryStore
from thinrow.models import SavedRanker
from thinrow.testing.rankers import CONFIGS, NEXT_ITEM, PAIR, world_config
from thinrow.testing.world import World, make_world
from thinrow.training import TrainConfig, Trainer, TrainResult, evaluate, score, train
from thinrow.training.log import LOG
from thinrow.training.step import loss_of
from thinrow.training.stream import StreamTrainer

both = pytest.mark.parametrize("name", PAIR)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def run(world: World, config: TrainConfig, **arguments: Any) -> tuple[Trainer, TrainResult]:
    with world.store() as store, world.table() as table:
        return train(config, store, table, **arguments)


@both
def test_one_seed_gives_one_sequence_of_losses_whatever_the_readers_threads(world: World, name: str) -> None:
    config = world_config(name)
    _, first = run(world, config, threads=1)
    _, again = run(world, config, threads=3)
    _, other = run(world, dataclasses.replace(config, seed=1))
    assert len(first.losses) == first.steps == 10
    assert first.losses == again.losses
    assert first.ne == again.ne
    assert first.losses != other.losses
    assert first.examples == 144
    assert first.candidates == 144 * 8


@both
def test_it_learns_what_the_world_is_made_of(world: World, name: str) -> None:
    cut = world.start_ms + 9 * DAY_MS
    config = world_config(name, epochs=8, rows=RowFilter(until_ms=cut), dense_lr=0.01, sparse_lr=0.1)
    trainer, _ = run(world, config)
    with world.store() as store, world.table() as table:
        found = evaluate(score(config.ranker, trainer.module, store, table, RowFilter(since_ms=cut)))
    assert found.requests == 36
    assert found.auc > 0.75
    assert found.ne < 0.95


@both
@pytest.mark.parametrize(("stop", "deltas"), [(1, 0), (4, 2), (8, 9)])
def test_a_run_resumed_at_a_checkpoint_has_the_losses_of_one_that_was_not_interrupted(
    world: World, name: str, stop: int, deltas: int, tmp_path: Path
) -> None:
    config = world_config(name, checkpoint_every=1, deltas=deltas)
    _, whole = run(world, config, out=tmp_path / "whole")
    with world.store() as store, world.table() as table:
        Trainer(config, store, table).run(tmp_path / "part", stop_after=stop)
    # What a killed run leaves: steps beyond its checkpoint, the last line torn.
    with (tmp_path / "part" / LOG).open("a") as log:
        log.write('{"step": 99, "loss": 0.0}\n{"st')
    with (tmp_path / "part" / LOG).open("ab") as log_bytes:
        log_bytes.write(b"\xff\x00")
    _, rest = run(world, config, out=tmp_path / "part", resume=True)
    assert whole.losses[stop:] == rest.losses
    assert whole.ne == rest.ne
    logs = [(tmp_path / f / LOG).read_text() for f in ("whole", "part")]
    assert logs[0] == logs[1]
    assert [json.loads(line)["loss"] for line in logs[0].splitlines()] == whole.losses
    ends = [load(tmp_path / f) for f in ("whole", "part")]
    assert ends[0].meta == ends[1].meta
    for key, values in ends[0].tensors.items():
        np.testing.assert_array_equal(values, ends[1].tensors[key])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(PAIR)))
@pytest.mark.parametrize("objective", ["rank", "next_item"])
def test_every_model_resumes_at_any_step_bit_for_bit(world: World, name: str, objective: str, tmp_path: Path) -> None:
    if objective == "next_item" and name not in NEXT_ITEM:
        pytest.skip("it has no next item")
    config = world_config(name, objective=objective, checkpoint_every=1, keep=99, deltas=2)
    _, whole = run(world, config, out=tmp_path / "whole")
    for step in range(1, 10):
        shutil.copytree(tmp_path / "whole", tmp_path / str(step))
        for later in steps(tmp_path / str(step))[step:]:
            shutil.rmtree(tmp_path / str(step) / f"step-{later:08d}")
        with world.store() as store, world.table() as table:
            trainer = Trainer(config, store, table)
            assert trainer.resume(tmp_path / str(step)) == step
            # To the end from a few of them, a step from each.
            rest = trainer.run(stop_after=None if step in (1, 6) else step + 1).losses
        assert rest == whole.losses[step : step + len(rest)]


def test_resuming_reads_the_generation_and_snapshot_of_the_time_or_later_ones(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.store_path, tmp_path / "store")
    moved = dataclasses.replace(world, store_path=tmp_path / "store")
    config = world_config("dlrm", checkpoint_every=1)
    _, whole = run(moved, config)
    with moved.store() as store, moved.table() as table:
        Trainer(config, store, table).run(tmp_path / "part", stop_after=4)
        store.compact(full=True)
    _, rest = run(moved, config, out=tmp_path / "part", resume=True)
    assert whole.losses[4:] == rest.losses


def late_events(store: HistoryStore, item: int) -> None:
    """An event of each user that no request of the world saw, in the middle of what they saw, and archived."""
    users = store.users()
    at = np.full(len(users), 1_005 * DAY_MS)
    store.append(pa.table({"user": users, "ts": at, "item": np.full(len(users), item), "brand": ["x"] * len(users)}))
    store.compact()


@both
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_an_event_that_no_example_sees_moves_nothing(world: World, name: str, optimizer: str, tmp_path: Path) -> None:
    ends = []
    for item in (3, 17):
        folder = tmp_path / str(item)
        shutil.copytree(world.store_path, folder)
        changed = dataclasses.replace(world, store_path=folder)
        with changed.store() as store:
            late_events(store, item)
        trainer, result = run(changed, world_config(name, sparse_optimizer=optimizer, epochs=2))
        ends.append((result.losses, trainer.embeddings.state()))
    assert ends[0][0] == ends[1][0]
    for key, values in ends[0][1].items():
        np.testing.assert_array_equal(values, ends[1][1][key])


def test_a_budget_is_refused_over_a_log_that_grows() -> None:
    nothing: Any = None
    with pytest.raises(InputError, match="needs the sizes of all rows, and a log grows"):
        StreamTrainer(world_config("dlrm", budget=BatchBudget(limit=90)), nothing, nothing)


def test_a_run_with_a_budget_resumes_and_its_configuration_travels(world: World, tmp_path: Path) -> None:
    config = world_config("dlrm", budget=BatchBudget(limit=90), checkpoint_every=1)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert "budget" not in world_config("dlrm").to_dict()
    _, whole = run(world, config)
    with world.store() as store, world.table() as table:
        Trainer(config, store, table).run(tmp_path, stop_after=4)
    _, rest = run(world, config, out=tmp_path, resume=True)
    assert whole.losses[4:] == rest.losses
    assert len(rest.losses) > 4


@both
def test_late_events_that_came_since_do_not_change_a_resumed_run(world: World, name: str, tmp_path: Path) -> None:
    shutil.copytree(world.store_path, tmp_path / "store")
    moved = dataclasses.replace(world, store_path=tmp_path / "store")
    config = world_config(name, checkpoint_every=1)
    _, whole = run(moved, config)
    with moved.store() as store, moved.table() as table:
        Trainer(config, store, table).run(tmp_path / "part", stop_after=4)
        late_events(store, 3)
    _, rest = run(moved, config, out=tmp_path / "part", resume=True)
    assert whole.losses[4:] == rest.losses


def test_a_folder_with_a_damaged_checkpoint_is_not_trained_over(world: World, tmp_path: Path) -> None:
    run(world, world_config("dlrm"), out=tmp_path)
    log = (tmp_path / LOG).read_text()
    for file in tmp_path.glob("step-*/*"):
        file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(InputError, match="holds checkpoints of an earlier run"):
        run(world, world_config("dlrm"), out=tmp_path)
    assert (tmp_path / LOG).read_text() == log


@pytest.mark.parametrize("lacking", ["train", "reader", "generation", "tensors"])
def test_what_is_no_checkpoint_of_a_run_is_not_resumed(world: World, tmp_path: Path, lacking: str) -> None:
    config = world_config("dlrm")
    with world.store() as store, world.table() as table:
        Trainer(config, store, table).run(tmp_path / "run", stop_after=2)
    found = load(tmp_path / "run")
    meta = {k: v for k, v in found.meta.items() if k != lacking}
    save(tmp_path / "other", 2, tensors=found.tensors, meta=meta)
    with pytest.raises(CheckpointMismatch, match=f"it lacks '{lacking}'"):
        run(world, config, out=tmp_path / "other", resume=True)
    fewer = {k: v for k, v in found.tensors.items() if not k.startswith("dense_optimizer")}
    save(tmp_path / "fewer", 2, tensors=fewer, meta=found.meta)
    with pytest.raises(CheckpointMismatch, match="its tensors are not those"):
        run(world, config, out=tmp_path / "fewer", resume=True)


def test_the_loss_is_a_sum_over_the_labelled_candidates_divided_by_their_number() -> None:
    logits, labels = torch.randn(50, dtype=torch.float64), torch.arange(50) % 3 == 0
    p = torch.sigmoid(logits)
    expected = -(torch.where(labels, p, 1 - p)).log().sum() / 50
    torch.testing.assert_close(loss_of(logits, labels), expected)
    parts = [loss_of(logits[a:b], labels[a:b]) * (b - a) / 50 for a, b in ((0, 7), (7, 50))]
    torch.testing.assert_close(parts[0] + parts[1], expected)


def test_checkpoints_are_kept_up_to_a_number_and_hold_the_readers_place(world: World, tmp_path: Path) -> None:
    run(world, world_config("dlrm", checkpoint_every=2, keep=3), out=tmp_path)
    assert steps(tmp_path) == [6, 8, 10]
    assert load(tmp_path).meta["reader"]["t"] == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: dataclasses.replace(c, seed=1), "another 'seed'"),
        (lambda c: dataclasses.replace(c, base_rows=4), "another 'base_rows'"),
        (
            lambda c: dataclasses.replace(
                c, ranker=dataclasses.replace(c.ranker, plan=FeaturePlan({"c": Hash(Source("cand.item"))}))
            ),
            "another feature plan",
        ),
        (lambda c: c.with_history(5), "another 'ranker.projection.max_len'"),
    ],
)
def test_resuming_with_another_configuration_is_refused(
    world: World, tmp_path: Path, change: Any, message: str
) -> None:
    config = world_config("dlrm")
    with world.store() as store, world.table() as table:
        Trainer(config, store, table).run(tmp_path, stop_after=2)
    with pytest.raises(CheckpointMismatch, match=message):
        run(world, change(config), out=tmp_path, resume=True)
    with pytest.raises(InputError, match="holds checkpoints of an earlier run; resume it"):
        run(world, config, out=tmp_path)


def test_resuming_on_another_store_or_table_is_refused(world: World, tmp_path: Path) -> None:
    config = world_config("dlrm")
    with world.store() as store, world.table() as table:
        Trainer(config, store, table).run(tmp_path / "run", stop_after=2)
    other = make_world(tmp_path / "other", users=4, days=3)
    for mixed, what in (
        (dataclasses.replace(world, table_path=other.table_path), "snapshot of the table"),
        (dataclasses.replace(world, store_path=other.store_path), "generation"),
    ):
        with pytest.raises(CheckpointMismatch, match=f"another store or table: its {what} is not here"):
            run(mixed, config, out=tmp_path / "run", resume=True)


def test_nothing_to_resume_and_nothing_to_train_on(world: World, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        run(world, world_config("dlrm"), out=tmp_path, resume=True)
    with pytest.raises(InputError, match="no example to train on"):
        run(world, world_config("dlrm", rows=RowFilter(until_ms=0)))
    config = world_config("dlrm")
    other = dataclasses.replace(config, ranker=dataclasses.replace(config.ranker, label="click"))
    with pytest.raises(InputError, match="label='click'; the table has the outcomes buy"):
        run(world, other)


def test_a_run_that_is_asked_to_stop_ends_with_a_checkpoint_and_none_goes_to_a_url(
    world: World, tmp_path: Path
) -> None:
    stop = threading.Event()
    stop.set()
    with world.store() as store, world.table() as table:
        result = train(world_config("dlrm"), store, table, out=tmp_path / "run", stop=stop)[1]
        assert result.steps == 1
        assert load(tmp_path / "run").step == 1
        with pytest.raises(InputError, match=r"out='s3://bucket/run' is a URL"):
            train(world_config("dlrm"), store, table, out="s3://bucket/run")


def test_an_empty_evaluation_set_is_named(world: World) -> None:
    config = world_config("dlrm")
    module, _ = config.ranker.build()
    with (
        world.store() as store,
        world.table() as table,
        pytest.raises(InputError, match="the evaluation set is empty: no example passes"),
    ):
        score(config.ranker, module, store, table, RowFilter(since_ms=world.end_ms))


@both
def test_a_ranker_read_back_from_its_checkpoint_gives_the_scores_of_the_one_that_was_saved(
    world: World, name: str, tmp_path: Path
) -> None:
    config = world_config(name, epochs=2)
    trainer, _ = run(world, config, out=tmp_path)
    checkpoint = load(tmp_path)
    saved = SavedRanker.of(checkpoint.meta, checkpoint.tensors, checkpoint.path)
    with world.store() as store, world.table() as table:
        before = score(config.ranker, trainer.module, store, table)
        after = score(saved.spec, saved.module, store, table)
    np.testing.assert_array_equal(before.request_id, after.request_id)
    np.testing.assert_array_equal(before.logits, after.logits)


def test_damaged_checkpoints_are_told_from_those_of_another_model(world: World, tmp_path: Path) -> None:
    run(world, world_config("dlrm"), out=tmp_path / "run")
    checkpoint = load(tmp_path / "run")
    other = {k: v for k, v in checkpoint.tensors.items() if k != "model.top.0.weight"}
    with pytest.raises(CheckpointMismatch, match=r"nothing for the weight 'top.0.weight' of the dlrm model"):
        SavedRanker.of(checkpoint.meta, other, checkpoint.path)
    with pytest.raises(CheckpointMismatch, match="is not the checkpoint of a ranker"):
        SavedRanker.of({"step": 1}, checkpoint.tensors, checkpoint.path)
    file = next(checkpoint.path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptionError):
        load(checkpoint.path)
