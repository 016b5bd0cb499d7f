"""Tables of ranks: saved by four, full and as deltas, and trained on by three as by four; a rank's failure is all's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinrow.checkpoints import RankIncremental, load, load_shard, steps
from thinrow.checkpoints.manifest import read
from thinrow.core.errors import InputError, StoreError
from thinrow.core.routing import Routing
from thinrow.embeddings import DynamicTable, ShardedEmbedding, SparseAdagrad
from thinrow.embeddings.ranks import Ranks
from thinrow.embeddings.states import pick, tables_of
from thinrow.testing.ranks import run_threads

PREFIXES = {"items.": False, "stores.": True}


class Run:
    """One rank of a model of two tables, one of them whole on every rank."""

    def __init__(self, ranks: Ranks, states: Any = None) -> None:
        self.ranks = ranks
        self.tables = {
            p: ShardedEmbedding(DynamicTable.from_state(states[p]) if states else DynamicTable(3), ranks, whole=whole)
            for p, whole in PREFIXES.items()
        }
        self.optimizer = SparseAdagrad(*self.tables.values(), lr=0.1)

    def step(self, number: int) -> None:
        # The keys of a step, dealt to however many ranks there are.
        keys = np.random.default_rng(number).integers(0, 40, 24)
        mine = torch.from_numpy(keys[self.ranks.rank :: self.ranks.size].copy())
        for embedding in self.tables.values():
            embedding(mine).square().sum().backward()
        self.optimizer.step()

    def saving(self, folder: Path, after: Any = None) -> RankIncremental:
        shards = {p: e.shard for p, e in self.tables.items()}
        return RankIncremental(folder, shards, deltas=2, keep=2, after=after)

    def states(self) -> dict[str, Any]:
        return {p: e.table.state() for p, e in self.tables.items()}


def train_and_save(ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    run, seen = Run(ranks), []
    with run.saving(folder) as saving:
        for number in range(1, 6):
            run.step(number)
            if number in (3, 5):
                saving.save(number, tensors={"w": np.full(2, number)}, meta={"step": number})
                seen.append(run.states())
    run.step(6)
    return [*seen, run.states()]


def load_and_train(ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    found = load_shard(folder, ranks.rank, Routing.even(ranks.size))
    assert (found.step, found.meta, found.tensors["w"].tolist()) == (5, {"step": 5}, [5, 5])
    run = Run(ranks, tables_of(found.tensors))
    loaded = run.states()
    # On other ranks the first is full again; where they are the same it is a delta.
    with run.saving(folder, after=found) as saving:
        run.step(6)
        saving.save(6, tensors={}, meta={})
        path = saving.wait()
    assert path is not None
    assert (read(path).base is not None) == (ranks.size == 4)
    return [loaded, run.states()]


def by_key(states: list[dict[str, Any]]) -> dict[str, dict[int, Any]]:
    rows: dict[str, dict[int, Any]] = {}
    for prefix, whole in PREFIXES.items():
        for state in [s[prefix] for s in states][: 1 if whole else None]:
            for row, key in enumerate(state["keys"].tolist()):
                found = np.concatenate([state["values"][row], state["row_state.adagrad.sum"][row]])
                assert rows.setdefault(prefix, {}).setdefault(key, found) is found
    return rows


@pytest.mark.parametrize("n_ranks", [3, 4])
def test_four_ranks_save_and_others_go_on(tmp_path: Path, n_ranks: int) -> None:
    four = list(zip(*run_threads(4, train_and_save, tmp_path), strict=True))
    assert steps(tmp_path) == [3, 5]
    assert load(tmp_path).routing == Routing.even(4)
    loaded, after = zip(*run_threads(n_ranks, load_and_train, tmp_path), strict=True)
    saved, found = by_key(list(four[1])), by_key(list(loaded))
    for prefix in PREFIXES:
        assert found[prefix].keys() == saved[prefix].keys()
        assert all(found[prefix][key].tobytes() == row.tobytes() for key, row in saved[prefix].items())
    trained, trained_on = by_key(list(four[2])), by_key(list(after))
    for prefix in PREFIXES:
        assert trained_on[prefix].keys() == trained[prefix].keys()
        for key, row in trained[prefix].items():
            np.testing.assert_allclose(trained_on[prefix][key], row, rtol=1e-4, atol=1e-6)
    newest = load(tmp_path / "step-00000006")
    assert newest.routing == Routing.even(n_ranks)
    assert by_key([tables_of(newest.tensors)]).keys() == trained.keys()
    # Step 3 is what step 5 rests on.
    assert steps(tmp_path) == [3, 5, 6]


def spread_or_whole(ranks: Ranks, folder: Path, whole: bool) -> None:
    """Two saves of a table that is spread over the ranks or whole on each, after what was saved before."""
    routing, after = Routing.even(ranks.size), None
    table = DynamicTable(2)
    if steps(folder):
        after = load_shard(folder, ranks.rank, routing)
        state = tables_of(after.tensors)["w."]
        table = DynamicTable.from_state(state if whole else pick(state, routing.shards(state["keys"]) == ranks.rank))
    embedding = ShardedEmbedding(table, ranks, whole=whole)
    with RankIncremental(folder, {"w.": embedding.shard}, deltas=3, after=after) as saving:
        for step in (1, 2) if after is None else (3, 4):
            embedding(torch.arange(9)).sum().backward()
            SparseAdagrad(embedding, lr=0.1).step()
            saving.save(step, tensors={}, meta={})


def test_a_table_that_was_whole_is_saved_full_when_it_is_spread(tmp_path: Path) -> None:
    for whole in (True, False):
        run_threads(2, spread_or_whole, tmp_path, whole)
    assert [read(tmp_path / f"step-0000000{s}").base is not None for s in (1, 2, 3, 4)] == [False, True] * 2
    assert sorted(load(tmp_path / "step-00000004").tensors["w.keys"]) == list(range(9))


def give_nonsense_on_one(ranks: Ranks, folder: Path) -> str:
    run = Run(ranks)
    run.step(1)
    saving = run.saving(folder)
    for step, meta in ((1, {}), (2, [1] if ranks.rank == 0 else {})):
        saving.save(step, tensors={}, meta=meta)
    with pytest.raises((InputError, StoreError)) as failed:
        saving.wait()
    saving.save(3, tensors={}, meta={})
    saving.close()
    return str(failed.value)


def test_what_one_rank_cannot_store_is_an_error_of_all(tmp_path: Path) -> None:
    told = run_threads(2, give_nonsense_on_one, tmp_path)
    assert told[0] == "meta is a list; it must be a dict with string keys"
    assert told[1] == "rank 0 did not save its shard of 2; its own error says why, save again"
    assert steps(tmp_path) == [1, 3]


def fail_on_one(ranks: Ranks, folder: Path) -> str:
    run = Run(ranks)
    run.step(1)
    saving = run.saving(folder)
    saving.save(1, tensors={}, meta={})
    saving.wait()
    saving.folder = folder if ranks.rank != 1 else folder / "a file"
    saving.save(2, tensors={}, meta={})
    with pytest.raises(StoreError) as failed:
        saving.wait()
    saving.folder = folder
    run.step(2)
    saving.save(3, tensors={}, meta={})
    saving.close()
    return str(failed.value)


def test_what_one_rank_cannot_save_is_saved_by_none(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    told = run_threads(2, fail_on_one, tmp_path)
    assert told[0] == "rank 1 did not save its shard of 2; its own error says why, save again"
    assert "cannot save step 2 in" in told[1]
    assert steps(tmp_path) == [1, 3]
    assert load(tmp_path).step == 3


def test_a_rank_that_fails_while_a_save_is_pending_says_why(tmp_path: Path) -> None:
    def job(ranks: Ranks) -> None:
        run = Run(ranks)
        with run.saving(tmp_path) as saving:
            run.step(1)
            saving.save(1, tensors={}, meta={})
            saving.save(2, tensors={}, meta={})
            if ranks.rank == 1:
                raise ValueError("no example can be read")

    with pytest.raises(ValueError, match="no example can be read"):
        run_threads(2, job)
    assert steps(tmp_path) == [1]
