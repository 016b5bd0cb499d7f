"""A run over gloo ranks is the run of one process: its losses, its checkpoints, its resuming on any number of them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from thinrow.checkpoints import load
from thinrow.core.errors import InputError, RankLost
from thinrow.dpp import BatchBudget
from thinrow.embeddings import DynamicTable, Embedding, EmbeddingBag, GroupEmbedding, Ranks, TableGroup
from thinrow.testing.rankers import train_world, world_config
from thinrow.testing.ranks import GlooProcesses, run_threads
from thinrow.testing.world import World, make_world
from thinrow.training import TrainResult
from thinrow.training.ranks import same_everywhere, spread, sum_gradients, union

F32, F64 = torch.float32, torch.float64


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def close(ours: TrainResult, one: TrainResult, first: int = 0) -> None:
    expected = one.losses[first : first + len(ours.losses)]
    np.testing.assert_allclose(ours.losses, expected, rtol=1e-5, atol=1e-6)
    if ours.steps == one.steps:
        assert ours.ne == pytest.approx(one.ne, rel=1e-5)


def logged(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def hold_checkpoints(ours: Path, one: Path) -> None:
    saved, expected = load(ours), load(one)
    assert saved.step == expected.step == 10
    assert saved.meta["tensors"] == expected.meta["tensors"]
    order, expected_order = saved.tensors["table.keys"].argsort(), expected.tensors["table.keys"].argsort()
    for name in saved.meta["tensors"]:
        found, wanted = saved.tensors[name], expected.tensors[name]
        if name in ("table.keys", "table.values") or name.startswith("table.row_state."):
            found, wanted = found[order], wanted[expected_order]
        assert np.allclose(found, wanted, rtol=1e-4, atol=1e-5), name


def test_two_ranks_train_save_and_resume_as_one_process(world: World, tmp_path: Path) -> None:
    config = world_config("dlrm", checkpoint_every=3, deltas=1, keep=9)
    one, weights = train_world(None, world, config, out=tmp_path / "one")
    out = tmp_path / "two"
    with GlooProcesses(2) as processes:
        processes.run(2, partial(train_world, out=out, stop_after=4), world, config)
        got = processes.run(2, partial(train_world, out=out, resume=True), world, config)
    for result, found in got:
        close(result, one, 4)
        assert (result.examples, result.candidates, result.steps) == (80, 640, 10)
        assert all(found[name].tobytes() == got[0][1][name].tobytes() for name in weights)
    np.testing.assert_allclose(logged(out), one.losses, rtol=1e-5, atol=1e-6)
    hold_checkpoints(out, tmp_path / "one")


@pytest.mark.slow
def test_ranks_repeat_to_the_bit_and_one_process_goes_on(world: World, tmp_path: Path) -> None:
    config = world_config("hstu", checkpoint_every=3, sparse_optimizer="adam")
    one, _ = train_world(None, world, config, out=tmp_path / "one")
    out = tmp_path / "part"
    with GlooProcesses(2) as processes:
        whole = processes.run(2, train_world, world, config)
        close(whole[0][0], one)
        in_turn = processes.run(2, partial(train_world, overlap=False), world, config)
        assert in_turn[0][0].losses == whole[0][0].losses
        processes.run(2, partial(train_world, out=out, stop_after=4), world, config)
        again = processes.run(2, partial(train_world, out=out, stop_after=6, resume=True), world, config)
        assert again[1][0].losses == whole[0][0].losses[4:6]
        alone, _ = train_world(None, world, config, out=out, stop_after=7, resume=True)
        np.testing.assert_allclose(alone.losses, one.losses[6:7], rtol=1e-5, atol=1e-6)
        processes.run(2, partial(train_world, out=out, resume=True), world, config)
    hold_checkpoints(out, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mtgr", "argus"])
def test_sharded_dense_weights_train_save_and_resume_as_one_process(world: World, name: str, tmp_path: Path) -> None:
    # Batches of few users: some of three ranks have none. No dropout, whose masks hang on the rank.
    config = world_config(name, checkpoint_every=2, deltas=1, budget=BatchBudget(limit=200))
    model = dataclasses.replace(config.ranker.model, dropout=0.0)
    config = dataclasses.replace(config, ranker=dataclasses.replace(config.ranker, model=model))
    one, weights = train_world(None, world, config, out=tmp_path / "one")
    out, n = tmp_path / "ranks", len(one.losses)
    for n_ranks, stop in ((2, 3), (3, n)):
        with GlooProcesses(n_ranks) as processes:
            job = partial(train_world, out=out, stop_after=stop, resume=stop == n, shard_dense=True)
            for result, found in processes.run(n_ranks, job, world, config):
                close(result, one, 0 if stop < n else 3)
                if stop == n:
                    for key, values in weights.items():
                        np.testing.assert_allclose(found[key], values, rtol=1e-4, atol=1e-5)
    saved, expected = load(out), load(tmp_path / "one")
    assert saved.meta["tensors"] == expected.meta["tensors"]
    for key in (k for k in saved.tensors if k.startswith("dense_optimizer.")):
        np.testing.assert_allclose(saved.tensors[key], expected.tensors[key], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shard_dense", [False, True])
def test_next_items_are_learned_over_ranks(world: World, shard_dense: bool, tmp_path: Path) -> None:
    # Negatives are each rank's own, so losses are not those of one process; but they repeat, and resume, to the bit.
    config = world_config("argus", objective="next_item", checkpoint_every=2, budget=BatchBudget(limit=200))
    with GlooProcesses(3) as processes:
        whole = processes.run(3, partial(train_world, shard_dense=shard_dense), world, config)
        job = partial(train_world, out=tmp_path, shard_dense=shard_dense)
        processes.run(3, partial(job, stop_after=3), world, config)
        rest = processes.run(3, partial(job, resume=True), world, config)
    one, _ = train_world(None, world, config)
    assert rest[0][0].losses == whole[0][0].losses[3:]
    assert len(whole[0][0].losses) == len(one.losses)
    assert whole[0][0].candidates == one.candidates
    np.testing.assert_allclose(whole[0][0].losses, one.losses, rtol=0.6)
    assert all(w.tobytes() == whole[2][1][name].tobytes() for name, w in whole[0][1].items())


def test_one_process_shards_no_weights(world: World) -> None:
    with pytest.raises(InputError, match="shard_dense with one process"):
        train_world(None, world, world_config("dlrm"), shard_dense=True)


def test_ranks_that_differ_are_told_so() -> None:
    def start(ranks: Ranks) -> None:
        same_everywhere("configuration", {"lr": [0.1, 0.1, 0.5][ranks.rank]}, ranks)

    with pytest.raises(InputError, match="rank 2 has another configuration than rank 0; start all ranks alike"):
        run_threads(3, start)


def test_gradients_and_names_are_those_of_all_ranks() -> None:
    def job(ranks: Ranks) -> tuple[list[list[float] | None], list[str]]:
        parameters = [torch.nn.Parameter(torch.zeros(n, dtype=d)) for n, d in ((2, F32), (1, F64), (1, F32), (2, F32))]
        parameters[0].grad = torch.tensor([1.0 + ranks.rank, 2.0])
        if ranks.rank == 1:
            parameters[1].grad = torch.tensor([1e-9], dtype=F64)
            parameters[3].grad = torch.tensor([0.0, 5.0])
        sum_gradients(parameters, ranks)
        return [None if p.grad is None else p.grad.tolist() for p in parameters], union([f"n{ranks.rank}"], ranks)

    expected = [[6.0, 6.0], [1e-9], None, [0.0, 5.0]], ["n0", "n1", "n2"]
    assert run_threads(3, job) == [expected] * 3


def test_whatever_reads_the_table_is_spread_or_refused() -> None:
    class Own(torch.nn.Module):
        def __init__(self, table: DynamicTable) -> None:
            super().__init__()
            self.table = table

    def job(ranks: Ranks) -> list[str]:
        table = DynamicTable(2)
        group = GroupEmbedding(TableGroup(("a",)), Embedding(table))
        model = torch.nn.ModuleList([Embedding(table), EmbeddingBag(table, "mean"), group, Embedding(DynamicTable(2))])
        sharded = spread(model, table, ranks)
        assert {id(m.shard) for m in model[:3]} == {id(sharded.shard)}
        with pytest.raises(InputError, match="1 reads the table itself, as Own; over ranks it is read by Embedding"):
            spread(torch.nn.ModuleList([Embedding(table), Own(table)]), table, ranks)
        return [type(m).__name__ for m in model]

    expected = ["ShardedEmbedding", "ShardedEmbeddingBag", "GroupEmbedding", "Embedding"]
    assert run_threads(2, job) == [expected] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hstu", "dlrm"])
def test_any_number_of_ranks_goes_on(world: World, name: str, tmp_path: Path) -> None:
    # Batches of few users: some ranks have none.
    config = world_config(name, checkpoint_every=2, deltas=2, epochs=2, budget=BatchBudget(limit=200))
    one, _ = train_world(None, world, config)
    done = 0
    with GlooProcesses(4) as processes:
        for n_ranks, steps in ((3, 3), (4, 3), (2, 3), (3, 4)):
            job = partial(train_world, out=tmp_path, stop_after=done + steps, resume=done > 0)
            for result, _ in processes.run(n_ranks, job, world, config):
                np.testing.assert_allclose(result.losses, one.losses[done : done + steps], rtol=1e-5, atol=1e-6)
            done += steps


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_by_all_others(world: World, tmp_path: Path) -> None:
    config = world_config("dlrm", checkpoint_every=2)
    with GlooProcesses(3) as processes:
        processes.start(3, partial(train_world, out=tmp_path, die_at=6), world, config)
        lost = [processes.result(rank) for rank in range(2)]
    assert all(isinstance(e, RankLost) and e.rank == 2 for e in lost)
    assert all("rank 2 ended in the middle of a run" in str(e) for e in lost)
    one, _ = train_world(None, world, config)
    with GlooProcesses(2) as processes:
        rest = processes.run(2, partial(train_world, out=tmp_path, resume=True), world, config)
    assert len(rest[0][0].losses) in (6, 8)
    close(rest[0][0], one, 10 - len(rest[0][0].losses))


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_a_run_of_shared_dense_weights(world: World, tmp_path: Path) -> None:
    config = world_config("hstu", checkpoint_every=2)
    with GlooProcesses(2) as processes:
        processes.start(2, partial(train_world, out=tmp_path, die_at=6, shard_dense=True), world, config)
        assert isinstance(processes.result(0), RankLost)
    one, _ = train_world(None, world, config)
    alone, _ = train_world(None, world, config, out=tmp_path, resume=True)
    assert 6 <= len(alone.losses) <= 8
    close(alone, one, 10 - len(alone.losses))


def test_prefetched_keys_of_a_step_that_looks_nothing_up_are_dropped() -> None:
    def job(ranks: Ranks) -> list[float]:
        table = DynamicTable(2)
        model = torch.nn.ModuleList([Embedding(table), EmbeddingBag(table)])
        spread(model, table, ranks)
        single, bag = model
        for child in model:
            child.prefetch(torch.tensor([5 + ranks.rank]))
            child.forget()
            child.forget()
        found = single(torch.tensor([7])), bag(torch.tensor([7]), torch.tensor([0, 1]))
        return [float(vectors.detach()[0, 0]) for vectors in found]

    found = run_threads(2, job)
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] != 0


@pytest.mark.slow
def test_the_command_under_torchrun(world: World, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from thinrow.testing.rankers import world_config\n\ndef small():\n    return world_config('dlrm')\n"
    )
    main = ["-c", "from thinrow.cli.main import main; main()"]
    command = ["train", f"{tmp_path / 'mine.py'}:small", "--store", world.store_path, "--table", world.table_path]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    for out, python in (("one", [sys.executable]), ("two", [*launcher, sys.executable])):
        done = subprocess.run(
            [*python, *main, *map(str, command), "--out", str(tmp_path / out)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("progressive NE") == 1
        assert "144 requests with 1152 candidates" in done.stdout
    np.testing.assert_allclose(logged(tmp_path / "two"), logged(tmp_path / "one"), rtol=1e-5, atol=1e-6)
