"""What runs beside a step changes no bit of it, ends with it, and fails in its turn."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinrow.checkpoints import load
from thinrow.core.errors import InputError
from thinrow.dpp import BatchBudget
from thinrow.testing.rankers import world_config
from thinrow.testing.world import World, make_world
from thinrow.training import Trainer, train
from thinrow.training.pipeline import Ahead, OneByOne


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def counting(n: int, made: list[int], closed: threading.Event) -> Generator[int, None, None]:
    try:
        for i in range(n):
            made.append(i)
            yield i
        if n == 5:
            raise InputError("number 5")
    finally:
        closed.set()


@pytest.mark.parametrize("kind", [Ahead, OneByOne])
def test_items_come_in_order_and_what_fails_fails_in_its_turn(kind: Any) -> None:
    made: list[int] = []
    closed = threading.Event()
    source = kind(counting(5, made, closed))
    for i in range(5):
        assert source.peek() == (i if kind is Ahead else None)
        assert source.take() == i
        assert len(made) <= i + 4
    assert source.peek() is None
    with pytest.raises(InputError, match="number 5"):
        source.take()
    source.close()
    assert closed.is_set()
    whole = kind(counting(2, [], threading.Event()))
    assert [whole.take() for _ in range(4)] == [0, 1, None, None]
    assert whole.waited_s > 0


def test_an_end_in_the_middle_ends_thread_and_source() -> None:
    closed, made = threading.Event(), []
    source = Ahead(counting(100, made, closed))
    assert source.take() == 0
    source.close()
    assert closed.is_set()
    assert len(made) < 6
    assert not any(t.name == "thinrow-copy" for t in threading.enumerate())


@pytest.mark.parametrize("name", ["hstu", "argus"])
def test_overlapped_stages_have_the_losses_tables_and_logs_of_one_after_another(
    world: World, name: str, tmp_path: Path
) -> None:
    objective = "next_item" if name == "argus" else "rank"
    config = world_config(name, checkpoint_every=3, objective=objective)
    with world.store() as store, world.table() as table:
        trainers = []
        for overlap in (True, False):
            out = tmp_path / str(overlap)
            trainer = Trainer(config, store, table, overlap=overlap)
            # Left in the middle, and gone on with, where the reader is ahead of what was learned.
            parts = [trainer.run(out, stop_after=2).losses, trainer.run(out, stop_after=5).losses]
            trainers.append((trainer, [*parts[0], *parts[1], *trainer.run(out).losses]))
    (one, losses), (other, expected) = trainers
    assert losses == expected
    assert len(losses) == one.steps == 10
    logs = [(tmp_path / f / "log.jsonl").read_bytes() for f in ("True", "False")]
    assert logs[0] == logs[1]
    ends = [load(tmp_path / f) for f in ("True", "False")]
    assert ends[0].meta == ends[1].meta
    for key, values in ends[0].tensors.items():
        np.testing.assert_array_equal(values, ends[1].tensors[key])
    assert one.loader.state_dict() == other.loader.state_dict()


def test_batches_that_are_accumulated_are_one_batch_to_rounding(world: World, tmp_path: Path) -> None:
    config = world_config("dlrm")
    whole = dataclasses.replace(config, block=4)
    halves = dataclasses.replace(config, block=2, accumulate=2)
    with world.store() as store, world.table() as table:
        expected = train(whole, store, table)[1]
        trainer = Trainer(dataclasses.replace(halves, checkpoint_every=2), store, table)
        trainer.run(tmp_path, stop_after=2)
        assert load(tmp_path).meta["reader"]["t"] == 3
        result = train(dataclasses.replace(halves, checkpoint_every=2), store, table, out=tmp_path, resume=True)[1]
        again = train(halves, store, table)[1]
    assert len(expected.losses) == again.steps == 5
    assert again.losses[2:] == result.losses
    np.testing.assert_allclose(again.losses, expected.losses, rtol=1e-5)
    assert again.ne == pytest.approx(expected.ne, rel=1e-5)
    assert (again.examples, again.candidates) == (expected.examples, expected.candidates)


def test_accumulating_goes_to_the_end_where_batches_do_not_divide(world: World) -> None:
    config = world_config("dlrm", accumulate=5, budget=BatchBudget(limit=90))
    assert dataclasses.asdict(config) == dataclasses.asdict(type(config).from_dict(config.to_dict()))
    with world.store() as store, world.table() as table:
        trainer, result = train(config, store, table)
        assert len(trainer.loader) % 5
        assert result.steps == trainer.n_steps == -(-len(trainer.loader) // 5)
    assert result.examples == 144


def test_deterministic_runs_refuse_what_is_not_and_leave_torch_as_it_was(world: World) -> None:
    seen: list[bool] = []
    with world.store() as store, world.table() as table:
        trainer = Trainer(world_config("dlrm", deterministic=True), store, table)
        trainer.run(stop_after=1, on_step=lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()))
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
