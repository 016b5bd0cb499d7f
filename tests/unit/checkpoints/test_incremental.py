"""Checkpoints written while training goes on: killed or cut off at any moment, what is loaded is a whole one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.checkpoints import Background, Incremental, commit, load, save, save_shard, snapshot, steps, version_of
from thinrow.checkpoints.manifest import read
from thinrow.core.errors import InputError, StoreError
from thinrow.core.routing import Routing
from thinrow.embeddings import Budget, DynamicTable, SparseAdagrad
from thinrow.embeddings.states import prefixed, tables_of
from thinrow.testing.power_cut import Recorder

#: Steps between saves.
EVERY = 3


class Training:
    """A table whose state after each step is a function of the step's number."""

    def __init__(self) -> None:
        self.table = DynamicTable(8, budget=Budget(max_rows=400))
        self.optimizer = SparseAdagrad(self.table, lr=0.1)

    def step(self, number: int) -> None:
        keys = np.random.default_rng(number).integers(0, 2000, 40)
        self.table.add_gradient(self.table.rows(keys, insert=True), np.full((40, 8), number, np.float32))
        self.optimizer.step()

    @classmethod
    def after(cls, steps: int) -> Training:
        training = cls()
        for number in range(1, steps + 1):
            training.step(number)
        return training


def check(found: Any) -> None:
    expected = prefixed("t.", Training.after(found.step).table.state()) | {"step": np.array(found.step)}
    assert found.meta == {"step": found.step}
    assert found.tensors.keys() == expected.keys()
    for name, array in expected.items():
        assert found.tensors[name].tobytes() == array.tobytes(), name


def train(folder: Path, first: int, done: Any) -> None:
    """Saves every ``EVERY`` steps, goes on meanwhile, and tells ``done`` of each step that is durable."""
    training, after = Training(), None
    if first:
        found = load(folder)
        training.table.load_state({n.removeprefix("t."): a for n, a in found.tensors.items() if n.startswith("t.")})
        after = found
    with Incremental(folder, {"t.": training.table}, deltas=3, keep=2, after=after) as saving:
        for number in range(first + 1, first + 10_000):
            training.step(number)
            if number % EVERY == 0:
                if (path := saving.wait()) is not None:
                    done(int(path.name.removeprefix("step-")))
                saving.save(number, tensors={"step": np.array(number)}, meta={"step": number})


def tell(out: int, step: int) -> None:
    os.write(out, step.to_bytes(8, "little"))


def kill_and_check(folder: Path, rounds: int, seed: int) -> None:
    warnings.simplefilter("error")
    rng = random.Random(seed)
    Training.after(2)
    last, found_deltas = 0, 0
    for i in range(rounds):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            train(folder, last, partial(tell, write))
        os.close(write)
        told = os.read(read, 8) if i % 3 == 0 or not last else b""
        time.sleep(rng.expovariate(1 / 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(read, "rb") as pipe:
            told += pipe.read()
        found = load(folder)
        assert found.step >= (int.from_bytes(told[-8:], "little") if told else last)
        check(found)
        last = found.step
        found_deltas += len(steps(folder)) > 2
    print(last, found_deltas)


def kills(folder: Path, rounds: int, seed: int) -> tuple[int, int]:
    command = [sys.executable, __file__, str(folder), str(rounds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last, deltas = map(int, done.stdout.split())
    return last, deltas


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_many_times(tmp_path: Path, seed: int) -> None:
    last, deltas = kills(tmp_path, 100, seed)
    assert last > 0
    assert deltas > 0


def save_all_kinds(folder: Path, done: Any) -> dict[int, bytes]:
    """A checkpoint of two shards, a delta on it, one without shards, and a delta on that: step -> its keys."""
    routing, base, keys = Routing.even(2), None, {}
    tables = [DynamicTable(2) for _ in range(2)]
    changes = [table.track() for table in tables]
    for step in (1, 2):
        new = np.arange(step * 10)
        for shard, table in enumerate(tables):
            table.rows(new[routing.shards(new) == shard], insert=True)
            tensors = table.delta(changes[shard]) if base else table.state()
            save_shard(folder, step, shard, routing, tensors=tensors)
        base = version_of(commit(folder, step, routing, keep=2, base=base))
        keys[step] = np.concatenate([table.keys() for table in tables]).tobytes()
        done(step)
        for noted in changes:
            noted.mark(base)
    with Incremental(folder, {"": tables[0]}, deltas=1, keep=2) as saving:
        for step in (3, 4):
            tables[0].rows(np.arange(step * 10), insert=True)
            saving.save(step, tensors={}, meta={})
            keys[step] = tables[0].keys().tobytes()
            saving.wait()
            done(step)
    return keys


@pytest.mark.parametrize("share", [0.15, pytest.param(1, marks=pytest.mark.slow)])
def test_after_a_power_cut_there_is_a_whole_one(tmp_path: Path, share: float) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Recorder(folder) as disk:
        keys = save_all_kinds(folder, disk.mark)
    rng = random.Random(3)
    seen = set()
    cuts = len(disk.operations) + 1
    for n in (*rng.sample(range(cuts), int(share * cuts)), cuts - 1):
        for after in disk.cuts(n, rng):
            elsewhere = tmp_path / "after"
            shutil.rmtree(elsewhere, ignore_errors=True)
            elsewhere.mkdir()
            after.write(folder, elsewhere)
            if after.marks or steps(elsewhere):
                # None is damaged, so there is no warning either.
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    found = load(elsewhere)
                assert found.step >= max(after.marks, default=0)
                assert found.tensors["keys"].tobytes() == keys[found.step]
                seen.add(found.step)
    assert seen == {1, 2, 3, 4}


def test_a_power_cut_while_a_step_is_saved_again_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Recorder(folder) as disk:
        for at in (1, 2, 3):
            save(folder, 5, tensors={"x": np.full(9, at)}, meta={"at": at})
            disk.mark(at)
    rng, seen = random.Random(4), set()
    for n in range(len(disk.operations) + 1):
        for after in disk.cuts(n, rng):
            elsewhere = tmp_path / "after"
            shutil.rmtree(elsewhere, ignore_errors=True)
            elsewhere.mkdir()
            after.write(folder, elsewhere)
            if after.marks or steps(elsewhere):
                found = load(elsewhere)
                assert found.meta["at"] >= max(after.marks, default=0)
                assert found.tensors["x"].tolist() == [found.meta["at"]] * 9
                seen.add(found.meta["at"])
    assert seen == {1, 2, 3}


def test_training_goes_on_while_it_is_saved(tmp_path: Path) -> None:
    go = threading.Event()

    def slow(*args: Any, **named: Any) -> Path:
        assert go.wait(60)
        return save(*args, **named)

    x = np.zeros(4)
    with Background() as saving:
        saving.start(slow, tmp_path, 1, tensors=snapshot({"x": x}), meta={})
        x += 1
        assert steps(tmp_path) == []
        go.set()
        assert saving.wait() == tmp_path / "step-00000001"
        assert saving.wait() is None
    assert load(tmp_path).tensors["x"].tolist() == [0] * 4


def test_an_error_is_raised_by_the_next_call_and_the_save_after_it_is_full(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    table = DynamicTable(2)
    saving = Incremental(folder, {"t.": table}, deltas=9)
    for step in (1, 2):
        table.rows(np.arange(step), insert=True)
        saving.save(step, tensors={}, meta={})
    assert saving.wait() == folder / "step-00000002"
    folder.rename(tmp_path / "moved")
    folder.write_text("a file in its place")
    table.rows(np.arange(3), insert=True)
    saving.save(3, tensors={}, meta={})
    with pytest.raises(StoreError, match="cannot save step 3"):
        saving.save(4, tensors={}, meta={})
    folder.unlink()
    saving.save(4, tensors={}, meta={})
    assert saving.wait() is not None
    # Nor is there a delta on what somebody took away.
    shutil.rmtree(folder)
    saving.save(5, tensors={}, meta={})
    saving.close()
    assert load(folder / "step-00000005").tensors["t.keys"].tolist() == [0, 1, 2]
    assert steps(folder) == [5]
    with pytest.raises(InputError, match="deltas=-1"):
        Incremental(folder, {}, deltas=-1)


def load_without_warning(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(folder)


def test_a_run_that_goes_on_with_another_table_begins_with_a_full_one(tmp_path: Path) -> None:
    tables = {"a.": DynamicTable(2)}
    tables["a."].rows(np.arange(5), insert=True)
    with Incremental(tmp_path, tables, deltas=3) as saving:
        saving.save(1, tensors={}, meta={})
    found = load(tmp_path)
    tables = {"a.": DynamicTable.from_state(tables_of(found.tensors)["a."]), "b.": DynamicTable(3)}
    with Incremental(tmp_path, tables, deltas=3, after=found) as saving:
        for step in (2, 3):
            for table in tables.values():
                table.rows(np.arange(step * 10), insert=True)
            saving.save(step, tensors={}, meta={})
    assert [read(tmp_path / f"step-0000000{s}").base is not None for s in (2, 3)] == [False, True]
    after = load_without_warning(tmp_path)
    assert after.step == 3
    assert {p: len(s["keys"]) for p, s in tables_of(after.tensors).items()} == {"a.": 30, "b.": 30}


def test_tables_whose_prefixes_meet_and_tensors_beside_them(tmp_path: Path) -> None:
    tables = {"": DynamicTable(1, init="constant"), "a.": DynamicTable(2), "a.b.": DynamicTable(3)}
    weights = {"a.weight": np.ones(2), "a.b.bias": np.ones(3)}
    with Incremental(tmp_path, tables, deltas=1) as saving:
        for step in (1, 2):
            for table in tables.values():
                table.rows(np.arange(step * 4), insert=True)
            saving.save(step, tensors=weights, meta={})
        for taken in ("a.keys", "a.row_state.x", "dim"):
            with pytest.raises(InputError, match=f"tensor '{taken}' has a name of table"):
                saving.save(3, tensors=weights | {taken: np.ones(2)}, meta={})
    found = load_without_warning(tmp_path)
    assert found.step == 2
    for prefix, table in tables.items():
        expected = table.state()
        state = tables_of(found.tensors)[prefix]
        assert state.keys() == expected.keys()
        assert DynamicTable.from_state(state).keys().tolist() == table.keys().tolist() == list(range(8))
    assert weights.keys() <= found.tensors.keys()
    with pytest.raises(InputError, match=r"prefix 't' of a table; it must be empty or end with a dot, as 't\.' does"):
        Incremental(tmp_path, {"t": tables["a."]}, deltas=1).save(3, tensors={}, meta={})


def test_meta_is_saved_as_it_was(tmp_path: Path) -> None:
    meta = {"at": [1]}
    with Incremental(tmp_path, {}, deltas=0) as saving:
        go = threading.Event()
        # The thread is busy with something else.
        saving._background._pool.submit(go.wait, 60)
        saving.save(1, tensors={}, meta=meta)
        meta["at"].append(2)
        go.set()
        with pytest.raises(InputError, match="meta is a list; it must be a dict"):
            saving.save(2, tensors={}, meta=[1])
    assert load(tmp_path).meta == {"at": [1]}


if __name__ == "__main__":
    kill_and_check(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
