"""What is learned: labels of several tasks, the next item, and a ranker that begins with what was pretrained."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinrow.checkpoints import load
from thinrow.core.errors import CheckpointMismatch, CheckpointNotFound, InputError
from thinrow.core.units import DAY_MS
from thinrow.dpp import RowFilter, loader
from thinrow.jagged.passes import plan_passes
from thinrow.models import RankerInputs, SavedRanker
from thinrow.models.items import targets_of
from thinrow.serving import Ranker
from thinrow.testing.rankers import world_config
from thinrow.testing.world import World, make_world
from thinrow.training import TrainConfig, evaluate, score, train
from thinrow.training.loop import Trainer, TrainResult
from thinrow.training.step import loss_of


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), keep=True)


def run(world: World, config: TrainConfig, **arguments: Any) -> tuple[Trainer, TrainResult]:
    with world.store() as store, world.table() as table:
        return train(config, store, table, **arguments)


def test_the_loss_of_two_tasks_is_that_of_their_joint_probability() -> None:
    logits = torch.randn(40, 2, dtype=torch.float64)
    labels = (torch.rand(40, 2) < 0.5).to(torch.float64)
    click, keep = torch.sigmoid(logits).T
    joint = torch.where(labels[:, 0] == 0, 1 - click, click * torch.where(labels[:, 1] == 1, keep, 1 - keep))
    torch.testing.assert_close(loss_of(logits, labels), -joint.log().mean())


@pytest.mark.parametrize("epochs", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_second_task_is_learned_on_what_has_the_label_and_served_beside_it(
    world: World, tmp_path: Path, epochs: int
) -> None:
    cut = world.start_ms + 9 * DAY_MS
    config = world_config("dlrm", epochs=epochs, rows=RowFilter(until_ms=cut), dense_lr=0.01, sparse_lr=0.1)
    config = dataclasses.replace(config, ranker=dataclasses.replace(config.ranker, given=("keep",)))
    assert TrainConfig.from_dict(config.to_dict()) == config
    run(world, config, out=tmp_path)
    checkpoint = load(tmp_path)
    saved = SavedRanker.of(checkpoint.meta, checkpoint.tensors, checkpoint.path)
    with world.store() as store, world.table() as table:
        everything = score(saved.spec, saved.module, store, table, RowFilter(since_ms=cut))
        given = score(saved.spec, saved.module, store, table, RowFilter(since_ms=cut), task="keep")
        if epochs > 1:
            assert evaluate(everything).auc > 0.75
            assert evaluate(given).auc > 0.75
        assert len(given.labels) == given.offsets[-1] == everything.labels.sum()
        with pytest.raises(InputError, match="task='return'; the model has buy, keep"):
            score(saved.spec, saved.module, store, table, task="return")
        shown = {"item": [[3, 4, 5]], "brand": [["brand 3", "brand 4", "brand 5"]]}
        ranked = Ranker(store, checkpoint).rank([1], [1], world.end_ms, candidates=shown, context={"city": ["city 0"]})
    assert len(ranked.scores.row(0)) == 3


@pytest.mark.slow
def test_retrieval_learns_which_items_come_next(world: World) -> None:
    cut = world.start_ms + 9 * DAY_MS
    config = world_config(
        "hstu_retrieval", objective="next_item", epochs=16, rows=RowFilter(until_ms=cut), sparse_lr=0.1
    )
    model = dataclasses.replace(config.ranker.model, width=32, negatives=64)
    config = dataclasses.replace(config, ranker=dataclasses.replace(config.ranker, model=model, dim=16))
    trainer, result = run(world, config)
    assert np.mean(result.losses[-5:]) < np.mean(result.losses[:5])
    assert np.isnan(result.ne)
    with world.store() as store, world.table() as table:
        found = evaluate(score(config.ranker, trainer.module, store, table, RowFilter(since_ms=cut)))
    assert found.gauc > 0.65
    assert 0 < found.ndcg <= found.hit_rate <= 1


@pytest.mark.parametrize("name", ["argus", pytest.param("argus_late", marks=pytest.mark.slow)])
def test_a_pretrained_model_is_fine_tuned_and_resumes(world: World, name: str, tmp_path: Path) -> None:
    pretrain = world_config(name, objective="next_item", checkpoint_every=4)
    _, first = run(world, pretrain, out=tmp_path / "pretrained")
    with world.store() as store, world.table() as table:
        Trainer(pretrain, store, table).run(tmp_path / "killed", stop_after=4)
    _, rest = run(world, pretrain, out=tmp_path / "killed", resume=True)
    assert rest.losses == first.losses[4:]
    tune = world_config(name, start=str(tmp_path / "pretrained"))
    assert TrainConfig.from_dict(tune.to_dict()) == tune
    trainer, tuned = run(world, tune)
    fresh_trainer, fresh = run(world, world_config(name))
    assert tuned.losses[0] != fresh.losses[0]
    # What a run began with need not be there when it goes on.
    with world.store() as store, world.table() as table:
        Trainer(tune, store, table).run(tmp_path / "tuned", stop_after=3)
    shutil.rmtree(tmp_path / "pretrained")
    assert run(world, tune, out=tmp_path / "tuned", resume=True)[1].losses == tuned.losses[3:]
    assert len(trainer.embeddings) >= len(fresh_trainer.embeddings)


def test_what_cannot_be_learned_or_begun_with_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="objective='rnak'; there are rank and next_item"):
        world_config("argus", objective="rnak")
    with pytest.raises(InputError, match="the model dlrm predicts no next item; take one of argus, hstu_retrieval"):
        world_config("dlrm", objective="next_item")
    with pytest.raises(CheckpointNotFound):
        run(world, world_config("dlrm", start=str(tmp_path / "nothing")))
    run(world, world_config("dlrm"), out=tmp_path / "dlrm")
    with pytest.raises(CheckpointMismatch, match="for the weight"):
        run(world, world_config("hstu", start=str(tmp_path / "dlrm")))
    with pytest.raises(CheckpointMismatch, match="another feature plan"):
        run(world, world_config("argus", start=str(tmp_path / "dlrm")))
    config = world_config("dlrm")
    with pytest.raises(InputError, match="label='return'"):
        run(world, dataclasses.replace(config, ranker=dataclasses.replace(config.ranker, given=("return",))))


@pytest.mark.parametrize("share", [True, False])
def test_a_user_of_several_base_batches_has_each_past_once(world: World, share: bool) -> None:
    spec = world_config("argus").ranker
    several = 0
    with world.store() as store, world.table() as table:
        reader = loader(store, table, projection=spec.projection, plan=spec.plan, base_rows=4, block=6)
        for batch in reader:
            events = batch.histories.events
            several += len(set(events.users.tolist())) < len(events.users)
            owner = np.repeat(events.users, np.diff(events.offsets))
            name = [(int(u), int(a)) for u, a in zip(owner, events.arrival, strict=True)]
            plain = plan_passes(batch.histories, share=share)
            pasts = set()
            for a, b in itertools.pairwise(plain.offsets.tolist()):
                row = [name[i] for i in plain.index[a:b]]
                pasts |= {tuple(row[:n]) for n in range(2, len(row) + 1)}
            inputs = RankerInputs(spec.inputs, batch.histories, batch.features, batch.request_ts, share=share)
            targets = targets_of(inputs.histories.passes)
            assert len(targets.event) == len(pasts)
            assert (inputs.histories.passes.index[targets.slot] == targets.event).all()
    assert several > 3
